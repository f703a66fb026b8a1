"""A packed value as a value: passed on without being opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zcactor.errors import ProtocolError
from zcactor.marshal.values import Code, decode_small, encode, lifts, register

if TYPE_CHECKING:
    from zcactor.marshal.marshaller import Packing, Unpacking
    from zcactor.rpc.parts import Part

__all__ = ["Sealed", "lower_resolved"]


class Sealed:
    """Payload, parts and flags of some value, which only its final receiver unpacks.

    A result is passed on this way, and an actor's class and arguments wait this way at the node agent, which has no need
    to import them.
    """

    __slots__ = ("flags", "parts", "payload", "status")

    def __init__(self, payload: Any, parts: Sequence[Part], flags: int, status: int = 0) -> None:
        self.payload = payload
        self.parts = parts
        self.flags = flags
        self.status = status


def _lower(packing: Packing, sealed: Sealed) -> bytes:
    first = len(packing.parts)
    packing.parts.extend(sealed.parts)
    return encode((bytes(sealed.payload), first, len(sealed.parts), sealed.flags, sealed.status))


def _open(unpacking: Unpacking, data: memoryview) -> Sealed:
    fields = decode_small(data)
    if type(fields) is not list or len(fields) != 5:  # noqa: PLR2004
        raise ProtocolError("a sealed value is malformed")
    payload, first, count, flags, status = fields
    if not 0 <= first <= first + count <= len(unpacking.parts):
        raise ProtocolError(f"a sealed value names parts {first} to {first + count} of {len(unpacking.parts)}")
    return Sealed(payload, list(unpacking.parts[first : first + count]), flags, status)


def lower_resolved(packing: Packing, sealed: Sealed) -> Any:
    """An extension that the receiver sees as the value itself."""
    from msgspec.msgpack import Ext

    return Ext(Code.RESOLVED, _lower(packing, sealed))


def _lift_resolved(unpacking: Unpacking, data: memoryview) -> Any:
    sealed = _open(unpacking, data)
    return unpacking.value(sealed.payload, sealed.parts, sealed.flags)


register(Sealed, Code.SEALED, _lower, _open)
lifts[Code.RESOLVED] = _lift_resolved
