"""The greeting <-> bytes: every connection begins with one in each direction.

`encode` writes the bytes that FlatBuffers' own builder makes, at a fortieth of its time, and `decode` reads them
likewise. Bytes count from the length prefix::

      0  u32  length of the rest                      148  u32  offset of the role, of python and of the host
      4  the frame's table, of which all else is 0    160  u32  pid
    114  vtable of the greeting, 18 bytes             164  u32  offset of the process (always 8), 2 of padding
    132  i32  table: offset back to the vtable        170  u16  version
    136  u32  session, u32  twin, 4 of padding        172  u32  16, then the 16 bytes of the process
    192  role, python, host: each u32 bytes, the text, a zero byte, padding to a multiple of 4

A frame has a multiple of 8 bytes. Where it would have 4 more, the padding behind the session is left out, and all bytes
behind it lie 4 bytes further ahead. A greeting with another layout goes through `zcactor.rpc.generic`.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Final

from zcactor.objectstore.ref import OWNER_NBYTES
from zcactor.rpc.messages import Hello
from zcactor.rpc.verify import IDENTIFIER, MAX_TEXT, Buffer

__all__ = ["decode", "encode"]


def _constant(shift: int) -> bytes:
    """The constant bytes between the length prefix and the session. `shift` is 0, or 4 where the bytes behind them lie
    further ahead."""
    return struct.pack(
        "<I4s6x13Hi4I48x2x9Hi",
        *(40, IDENTIFIER),
        *(26, 48, 47, 46, 44, 42, 36, 28, 20, 16, 12, 8, 4),  # vtable of the frame
        *(26, 84, 56, 44, 32),  # its table: offsets of greeting, payload, releases and regions
        *(18, 40 - shift, 38 - shift, 32 - shift, 28 - shift, 24 - shift, 20 - shift, 16 - shift, 4),  # vtable
        18,
    )


_WIDE: Final = _constant(0)
_NARROW: Final = _constant(4)
_CONSTANT_NBYTES: Final = len(_WIDE)
_PACK_WIDE: Final = Struct("<I132sII4xIIIII2xHI16s")
_PACK_NARROW: Final = Struct("<I132sIIIIIII2xHI16s")
_READ: Final = {_WIDE: Struct("<132xII4xIIIII2xHI16s"), _NARROW: Struct("<132xIIIIIII2xHI16s")}
"""The structs for the bytes between the length prefix and the role, by the constant at the beginning."""
_LENGTH: Final = Struct("<I")
_TO_ROLE: Final = 44
"""The offset of the role: the bytes in between always have the same length."""
_TO_PROCESS: Final = 8


def _encode_any(hello: Hello) -> bytes:
    from zcactor.rpc import generic  # with FlatBuffers, which imports NumPy, too: few processes need it at their start

    return generic.encode_hello(hello)


def _decode_any(data: Buffer, start: int, end: int) -> Hello:
    from zcactor.rpc import generic  # see `_encode_any`

    return generic.decode_hello(data, start, end)


def encode(hello: Hello) -> bytes:
    """Encode a HELLO frame with its length prefix.

    Raises:
        ValueError: a text or the process id has a length that the schema does not allow.
        TypeError: a number does not fit its field.
    """
    role, python, host = hello.role.encode(), hello.python.encode(), hello.host.encode()
    if len(hello.process) != OWNER_NBYTES or max(len(role), len(python), len(host)) > MAX_TEXT:
        return _encode_any(hello)  # raises the error that names the text or id
    texts = b"".join([_LENGTH.pack(len(text)) + text + bytes(4 - len(text) % 4) for text in (role, python, host)])
    to_python = _TO_ROLE + len(role) // 4 * 4 + 4
    to_host = to_python + len(python) // 4 * 4 + 4
    packing, constant = (_PACK_NARROW, _NARROW) if len(texts) % 8 else (_PACK_WIDE, _WIDE)
    try:
        head = packing.pack(
            packing.size + len(texts) - 4, constant, hello.session, hello.twin, _TO_ROLE, to_python, to_host, hello.pid,
            _TO_PROCESS, hello.version, OWNER_NBYTES, hello.process,
        )  # fmt: skip
    except struct.error:
        return _encode_any(hello)
    return head + texts


def decode(data: Buffer, start: int, end: int) -> Hello:
    """Decode a HELLO frame; arguments as in `zcactor.rpc.codec.decode`. The version is returned, not checked.

    Raises:
        ProtocolError: the bytes are not a valid frame, or not HELLO. Any other exception is a bug here.
    """
    reading = _READ.get(bytes(data[start : start + _CONSTANT_NBYTES]))
    if reading is None or end - start < reading.size:
        return _decode_any(data, start, end)
    session, twin, to_role, to_python, to_host, pid, to_process, version, length, process = reading.unpack_from(
        data, start
    )
    at = start + reading.size
    texts = []
    if to_role == _TO_ROLE and to_process == _TO_PROCESS and length == OWNER_NBYTES:
        place = at - to_role  # position of the offset to the next text
        for offset in (to_role, to_python, to_host):
            if place + offset != at or at + 4 > end:
                break
            (length,) = _LENGTH.unpack_from(data, at)
            stop = at + 4 + length
            if length > MAX_TEXT or stop >= end or data[stop]:
                break
            try:
                texts.append(str(data[at + 4 : stop], "utf-8"))
            except UnicodeDecodeError:
                break
            at, place = at + 8 + length // 4 * 4, place + 4
    if len(texts) < 3:  # another layout, or wrong: the generic code checks it
        return _decode_any(data, start, end)
    role, python, host = texts
    return Hello(version, process, pid, host, python, role, session, twin)
