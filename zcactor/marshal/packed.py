"""A packed value as a value of its own, which is passed on without being unpacked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.errors import ProtocolError
from zcactor.marshal.values import Code, decode_small, encode, register
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.store import Block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.marshal.packing import Packing
    from zcactor.marshal.unpacking import Unpacking
    from zcactor.rpc.parts import Part

__all__ = ["Packed", "Resolved", "pack_resolved", "shared"]


class Packed:
    """Payload, parts and flags of some value, which only its final receiver unpacks.

    A result is passed on in this form. An actor's class and arguments wait in this form at the node agent, which need
    not import them.
    """

    __slots__ = ("flags", "parts", "payload", "status")

    def __init__(self, payload: Any, parts: Sequence[Part], flags: int, status: int = 0) -> None:
        self.payload = payload
        self.parts = parts
        self.flags = flags
        self.status = status


class Resolved(Packed):
    """A packed value, within another value too, in whose place the receiver finds the value itself."""

    __slots__ = ()


def shared(parts: Sequence[Part]) -> Sequence[Part]:
    """Return `parts` of a value that may have several receivers: parts that were moved to this process are shared from
    now on, read-only."""
    if not any(part.kind == RegionKind.MOVED for part in parts):
        return parts
    for part in parts:
        if part.kind == RegionKind.MOVED:
            if type(part.holder) is Lease:
                part.holder.seal()
            elif type(part.holder) is Block:
                part.holder.store.seal(part.holder)
    return [part._replace(kind=RegionKind.ARRAY) if part.kind == RegionKind.MOVED else part for part in parts]


def _pack(packing: Packing, packed: Packed) -> bytes:
    first = len(packing.parts)
    packing.parts.extend(packed.parts)
    return encode((bytes(packed.payload), first, len(packed.parts), packed.flags, packed.status))


def _unpack(unpacking: Unpacking, data: memoryview) -> Packed:
    fields = decode_small(data)
    if type(fields) is not list or [type(field) for field in fields] != [bytes, int, int, int, int]:
        raise ProtocolError("a packed value is malformed")
    payload, first, count, flags, status = fields
    if not 0 <= first <= first + count <= len(unpacking.parts):
        raise ProtocolError(f"a packed value names parts {first} to {first + count} of {len(unpacking.parts)}")
    return Packed(payload, list(unpacking.parts[first : first + count]), flags, status)


def pack_resolved(packing: Packing, packed: Packed) -> Any:
    """Encode a packed value as an extension that gives the receiver the value itself."""
    from msgspec.msgpack import Ext

    return Ext(Code.RESOLVED, _pack(packing, packed))


def _unpack_resolved(unpacking: Unpacking, data: memoryview) -> Any:
    packed = _unpack(unpacking, data)
    return unpacking.value(packed.payload, packed.parts, packed.flags)


register(Packed, Code.PACKED, _pack, _unpack)
register(Resolved, Code.RESOLVED, _pack, _unpack_resolved)
