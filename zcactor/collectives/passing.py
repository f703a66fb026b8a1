"""Groups on their way to other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from zcactor.api.handle import pack_handle, unpack_handle
from zcactor.api.passing import pack_ref, unpack_ref
from zcactor.collectives.founding import KEY_NBYTES
from zcactor.collectives.group import Group
from zcactor.collectives.group_options import GroupOptions
from zcactor.errors import ProtocolError
from zcactor.marshal.values import Code, decode_small, register

if TYPE_CHECKING:
    from zcactor.api.future import ObjectRef
    from zcactor.api.handle import ActorHandle

__all__ = ["pass_groups"]

_encode: Final = msgspec.msgpack.Encoder().encode


def pack_group(packing: Any, group: Group) -> bytes:
    """Encode a group as plain values, with parts for the leases on its members and on the group itself."""
    actors = [pack_handle(packing, handle) for handle in group.actors]
    return _encode((group._key, group.epoch, pack_ref(packing, group._token), list(group._options), actors))


def unpack_group(unpacking: Any, data: memoryview) -> Group:
    """Make the group that `pack_group` encoded."""
    fields = decode_small(data)
    if type(fields) is not list or len(fields) != 5:
        raise ProtocolError("a group is malformed")
    key, epoch, token, options, handles = fields
    well = type(key) is bytes and len(key) == KEY_NBYTES and type(epoch) is int
    if not well or not handles:
        raise ProtocolError("the key or the members of a group are malformed")
    chosen = GroupOptions.from_wire(options)
    actors: tuple[ActorHandle, ...] = tuple(unpack_handle(unpacking, memoryview(handle)) for handle in handles)
    promise: ObjectRef[None] = unpack_ref(unpacking, memoryview(token))
    return Group(key, epoch, actors, promise, chosen)


def pass_groups() -> None:
    """Let groups travel in messages of this process."""
    register(Group, Code.GROUP, pack_group, unpack_group)
