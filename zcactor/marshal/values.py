"""The value tree: plain Python values as MessagePack, values of other types as extensions.

MessagePack (through msgspec) has no tuples, integers beyond 64 bits or arrays. Each of these travels as an *extension*
(code, bytes). Only exact types are plain: a subclass of ``int`` or ``dict`` goes through pickle with its type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from zcactor.errors import ProtocolError
from zcactor.lazy_numpy import np
from zcactor.marshal.arrays import dtype_code, dtype_from_code, is_shareable

__all__ = [
    "SCALARS",
    "Code",
    "NotPlain",
    "arguments",
    "decode_small",
    "encode",
    "pack_scalar",
    "register",
    "registered",
    "unpack_scalar",
    "unpackers",
]

SCALARS = frozenset({type(None), bool, int, float, str, bytes})
"""Types that MessagePack carries as they are."""

encode = msgspec.msgpack.Encoder().encode
decode_small = msgspec.msgpack.Decoder().decode
"""Decoder of extension contents, which hold no further extensions."""


class Code:
    """Extension codes."""

    TUPLE = 1
    BIG_INT = 2
    ARRAY = 3
    INLINE_ARRAY = 4
    SCALAR = 5
    PICKLE = 6
    PACKED = 7
    REF = 8
    ACTOR = 9
    ARGUMENT = 10
    RESOLVED = 11
    FAILURE = 12
    GROUP = 13
    DEVICE_ARRAY = 14


class NotPlain(Exception):
    """A value that MessagePack and the extensions cannot carry; it must be pickled. Never leaves the package."""


Packer = Callable[[Any, Any], Any]
Unpacker = Callable[[Any, memoryview], Any]
registered: dict[type, tuple[int, Packer]] = {}
unpackers: dict[int, Unpacker] = {}
arguments: dict[type, Packer] = {}
"""Types that are encoded differently as a top-level argument: ``pack(packing, value)`` gives the encodable form."""


def register(cls: type, code: int, pack: Packer, unpack: Unpacker) -> None:
    """Let values of exactly `cls` travel as extension `code`.

    Args:
        cls: the type.
        code: one of `Code`.
        pack: ``pack(packing, value) -> bytes``; may call ``packing.add(part)``.
        unpack: ``unpack(unpacking, data) -> value``, the inverse of `pack`.
    """
    registered[cls] = (code, pack)
    unpackers[code] = unpack


def pack_scalar(value: np.generic) -> msgspec.msgpack.Ext:
    """Encode a NumPy scalar, which keeps its type: dtype code and bytes."""
    array = np.asarray(value)
    dtype = array.dtype
    if not is_shareable(dtype) or dtype.type is not type(value):
        raise NotPlain
    return msgspec.msgpack.Ext(Code.SCALAR, encode((dtype_code(dtype), array.tobytes())))


def unpack_scalar(data: memoryview, dtype_of: Callable[[Any], np.dtype[Any]] = dtype_from_code) -> Any:
    """Make the NumPy scalar that `pack_scalar` encoded. `dtype_of` decodes its dtype."""
    fields = decode_small(data)
    if type(fields) is not list or len(fields) != 2 or type(fields[1]) is not bytes:
        raise ProtocolError("a scalar is malformed")
    code, raw = fields
    dtype = dtype_of(code)
    if len(raw) != dtype.itemsize:
        raise ProtocolError(f"a scalar of dtype {dtype} has {len(raw)} bytes instead of {dtype.itemsize}")
    try:
        return np.ndarray((), dtype, bytearray(raw or b"\0"))[()]
    except SystemError as error:  # raised by CPython for a code point beyond 0x10ffff
        raise ProtocolError(f"a scalar of dtype {dtype} holds no text: {error}") from error
