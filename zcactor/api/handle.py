"""Handles: values that represent an actor, in any process."""

from __future__ import annotations

import copyreg
from typing import TYPE_CHECKING, Any

import msgspec

from zcactor.api.remote_actor import RemoteActor
from zcactor.api.remote_method import RemoteMethod
from zcactor.api.stream import RemoteStream
from zcactor.errors import ProtocolError
from zcactor.exception_pickling import hides
from zcactor.interface import Interface, MethodKind
from zcactor.marshal.values import Code, decode_small, register
from zcactor.objectstore.ref import RegionKind
from zcactor.observe.html import line, table
from zcactor.process.context import current
from zcactor.rpc.parts import Part

if TYPE_CHECKING:
    from zcactor.rpc.parts import Granting

__tracebackhide__ = hides
__all__ = ["ActorHandle", "ActorHold", "describe"]

_encode = msgspec.msgpack.Encoder().encode
_GENERATORS = (MethodKind.GENERATOR, MethodKind.ASYNC_GENERATOR)


class ActorHandle:
    """The handle of one actor. It is a value: it compares, hashes, and stays valid when it is passed to other actors.

    Its attributes are the actor's public methods. Any other name raises ``AttributeError`` in the caller, at once, and
    so does setting an attribute.
    """

    _remote: RemoteActor

    def __init__(self, remote: RemoteActor) -> None:
        self.__dict__["_remote"] = remote

    def __getattr__(self, name: str) -> RemoteMethod:
        remote = self._remote
        spec = remote.interface.find(name)
        method = (RemoteStream if spec.kind in _GENERATORS else RemoteMethod)(remote, spec)
        self.__dict__[name] = method  # later look-ups find the attribute without this function
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{self._remote.label} is a handle: attributes of the actor cannot be set from outside, call a method"
        )

    def __dir__(self) -> list[str]:
        return sorted(self._remote.interface.by_name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ActorHandle):
            return self._remote.actor_id == other._remote.actor_id
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._remote.actor_id)

    def __repr__(self) -> str:
        return f"<handle of {self._remote.label}>"

    def _repr_html_(self) -> str:
        methods = self._remote.interface.methods
        return line(repr(self), "an actor") + table(("method",), [(spec.shown,) for spec in methods])

    def __copy__(self) -> ActorHandle:
        return self

    def __deepcopy__(self, _: Any) -> ActorHandle:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "handles travel inside calls, puts and results; pickling one elsewhere would lose track of who holds it"
        )


class ActorHold:
    """This process's lease on an actor at its node agent; see `zcactor.rpc.parts.Holder`."""

    __slots__ = ("_release", "id", "owner")

    def __init__(self, owner: bytes, object_id: int, release: Any) -> None:
        self.owner = owner
        self.id = object_id
        self._release = release

    def grant(self, session: Granting) -> tuple[bytes, int, int]:
        """Grant the session's peer a lease on the actor."""
        if session.peer_process == self.owner:
            return self.owner, self.id, 0
        return self.owner, self.id, session.pin(self)

    def renew(self, release: Any) -> None:
        """Take another lease instead, which ``release(id)`` gives back: the one of before has ended with the head."""
        self._release = release

    def release(self) -> None:
        """Give the lease back."""
        if self._release is not None:
            release, self._release = self._release, None
            release(self.id)

    def __del__(self) -> None:
        self.release()


def pack_handle(packing: Any, handle: ActorHandle) -> bytes:
    """Encode a handle as plain values, with a part for the lease."""
    remote = handle._remote
    index = packing.add(Part(RegionKind.ACTOR, remote.hold, 0, 0)) if remote.hold is not None else -1
    return describe(remote, index, remote.process.places.of(remote.location[0]))


def describe(remote: RemoteActor, index: int, place: str) -> bytes:
    """Encode the contents of the extension. `index` names the part with the lease, -1 for none; `place` is the address
    at which the actor's process listens."""
    return _encode(
        (
            index, remote.actor_id, remote.location[0], remote.location[1], remote.name, remote.namespace,
            remote.max_pending, remote.max_retries, remote.interface.wire(), place,
        )
    )  # fmt: skip


def unpack_handle(unpacking: Any, data: memoryview) -> ActorHandle:
    """Make the handle that `pack_handle` encoded."""
    fields = decode_small(data)
    if type(fields) is not list or len(fields) != 10:
        raise ProtocolError("a handle is malformed")
    index, actor_id, process_id, actor_index, name, namespace, max_pending, max_retries, interface, place = fields
    process = current()
    process.places.claim(process_id, place)
    hold = None
    if index >= 0:
        part = unpacking.part(index)
        if part.kind != RegionKind.ACTOR:
            raise ProtocolError(f"part {index} of a message is not a handle's lease")
        hold = part.holder
    remote = process.sessions.remotes.get(actor_id)
    if remote is None:
        remote = RemoteActor(
            process, actor_id, Interface.from_wire(interface), (process_id, actor_index), name, namespace, max_pending,
            max_retries,
        )  # fmt: skip
        remote.hold = hold
        process.sessions.remotes[actor_id] = remote
    elif remote.hold is None:
        remote.hold = hold
    return ActorHandle(remote)


register(ActorHandle, Code.ACTOR, pack_handle, unpack_handle)


def _method_of(handle: Any, name: str, options: dict[str, Any]) -> RemoteMethod:
    """The method of a handle that came here: the inverse of `_reduce_method`."""
    method: RemoteMethod = getattr(handle, name)
    return method.options(**options) if options else method


def _reduce_method(method: RemoteMethod) -> tuple[Any, ...]:
    """Let a method travel as its handle does."""
    return _method_of, (ActorHandle(method._actor), method._spec.name, method._options)


copyreg.pickle(RemoteMethod, _reduce_method)
copyreg.pickle(RemoteStream, _reduce_method)
