"""A packed value as a value: passed on without being opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.errors import ProtocolError
from zcactor.marshal.values import Code, decode_small, encode, lifts, register
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.store import Block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.marshal.marshaller import Packing, Unpacking
    from zcactor.rpc.parts import Part

__all__ = ["Sealed", "lower_resolved", "shared"]


class Sealed:
    """Payload, parts and flags of some value, which only its final receiver unpacks.

    A result is passed on this way, and an actor's class and arguments wait this way at the node agent, which has no
    need to import them.
    """

    __slots__ = ("flags", "parts", "payload", "status")

    def __init__(self, payload: Any, parts: Sequence[Part], flags: int, status: int = 0) -> None:
        self.payload = payload
        self.parts = parts
        self.flags = flags
        self.status = status


def shared(parts: Sequence[Part]) -> Sequence[Part]:
    """`parts` of a value that may have several receivers: what was moved to us is shared from now on, read-only."""
    if not any(part.kind == RegionKind.MOVED for part in parts):
        return parts
    for part in parts:
        if part.kind == RegionKind.MOVED:
            if type(part.holder) is Lease:
                part.holder.seal()
            elif type(part.holder) is Block:
                part.holder.store.seal(part.holder)
    return [part._replace(kind=RegionKind.ARRAY) if part.kind == RegionKind.MOVED else part for part in parts]


def _lower(packing: Packing, sealed: Sealed) -> bytes:
    first = len(packing.parts)
    packing.parts.extend(sealed.parts)
    return encode((bytes(sealed.payload), first, len(sealed.parts), sealed.flags, sealed.status))


def _open(unpacking: Unpacking, data: memoryview) -> Sealed:
    fields = decode_small(data)
    if type(fields) is not list or [type(field) for field in fields] != [bytes, int, int, int, int]:
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
