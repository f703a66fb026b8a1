"""References on their way to other processes: nested, where they stay references, and as top-level arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.msgpack import Ext

from zcactor.api.future import ObjectRef, packed_result, value_of
from zcactor.errors import ProtocolError
from zcactor.exception_pickling import hides
from zcactor.marshal.packed import Packed, pack_resolved
from zcactor.marshal.values import SCALARS, Code, arguments, decode_small, encode, register, unpackers
from zcactor.objectstore.ref import RegionKind
from zcactor.process.context import current
from zcactor.rpc.call import CallState
from zcactor.rpc.messages import Status
from zcactor.rpc.parts import Part

if TYPE_CHECKING:
    from zcactor.rpc.call import Call
    from zcactor.rpc.incoming import Incoming

__tracebackhide__ = hides
__all__ = [
    "ArgumentRef", "Awaited", "BorrowedRef", "FailedArgumentError", "OwnRef", "RefHolder", "Unresolved", "has_scalar",
    "known_here", "passed_value",
]  # fmt: skip


_DONE = CallState.DONE


class RefHolder:
    """The promise of another process, leased by this one; see `zcactor.rpc.parts.Holder`."""

    __slots__ = ("__weakref__", "_release", "expected", "id", "owner", "taken")

    def __init__(self, owner: bytes, object_id: int, release: Any) -> None:
        self.owner = owner
        self.id = object_id
        self.expected: Any = None
        """The `zcactor.objects.expectations.Expectation` of an outcome that is pushed; None for one to ask for."""
        self.taken: Call | None = None
        """Once the owner has ended in order: the promise of this process with the outcome. See
        `zcactor.objects.succession`."""
        self._release = release

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """Grant the session's peer a lease; the promise is pinned here when a third process owns it."""
        return _grant(self, session, self)

    def __del__(self) -> None:
        self._release(self.id)


class BorrowedRef:
    """The promise of another process on its way to a third process: pinned here, with its outcome if that is known."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call = call

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """See `RefHolder.grant`."""
        return _grant(self.call.holder, session, self)


def _grant(holder: RefHolder, session: Any, pinned: RefHolder | BorrowedRef) -> tuple[bytes, int, int]:
    if holder.taken is not None:
        return OwnRef(holder.taken).grant(session)
    if session.peer_process == holder.owner:
        return holder.owner, holder.id, 0
    return holder.owner, holder.id, session.pin(pinned)


class OwnRef:
    """A promise of this process that is passed to a peer; granting it keeps the call alive."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call = call

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """Grant the session's peer a lease on the promise."""
        call = self.call
        process = current()
        object_id = process.promises.export(call)
        session.leases.grant(object_id, call)
        return process.process, object_id, 0


class ArgumentRef(OwnRef):
    """A promise of this process that is an argument of the peer's: its outcome will be pushed."""

    __slots__ = ()

    def announce(self, session: Any) -> int:
        """Announce the outcome to the session's peer; the result is the key, or 0."""
        return current().promises.announce(self.call, session)


def known_here(pinned: Any) -> Call | None:
    """The promise with the outcome of another process's promise that is pinned here; None where it is not known
    here."""
    if isinstance(pinned, RefHolder):
        return pinned.taken
    if not isinstance(pinned, BorrowedRef):
        return None
    return pinned.call.holder.taken or (pinned.call if pinned.call.known else None)


def pack_ref(packing: Any, ref: ObjectRef[Any]) -> bytes:
    """Encode a nested reference, which stays a reference; see `pack_argument` for the top level."""
    call = ref._call
    call.retrieved = True
    holder = call.holder or OwnRef(call)
    if isinstance(holder, RefHolder):
        holder = BorrowedRef(call)
    return encode((packing.add(Part(RegionKind.REF, holder, 0, 0)), call.label, False))


def unpack_ref(unpacking: Any, data: memoryview) -> Any:
    """Make the reference that `pack_ref` encoded: a promise of this process again, or a borrowed one."""
    fields = decode_small(data)
    if type(fields) is not list or len(fields) != 3:
        raise ProtocolError("a reference is malformed")
    part = unpacking.part(fields[0])
    if part.kind != RegionKind.REF:
        raise ProtocolError(f"part {fields[0]} of a message is not a reference")
    return ObjectRef(current().promises.call_of(part.holder, str(fields[1])))


register(ObjectRef, Code.REF, pack_ref, unpack_ref)


class FailedArgumentError(Exception):
    """The failure of a call whose reference is an argument; `failure` is the call's error. Never leaves the package."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__(failure)
        self.failure = failure


class Unresolved:
    """A top-level argument that the callee still has to fetch."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call = call

    def value(self) -> Any:
        """Return the value of the promise, or raise the error that it failed with."""
        return value_of(self.call)


class Awaited(RefHolder):
    """A promise among the plain arguments of a call that waits for it, whose outcome is pushed. A plain value takes its
    place in the list of arguments; for every other outcome, and where the owner has to be asked, an `Unresolved` does.

    It is to an `zcactor.objects.expectations.Expectation` what a `Call` is. A call would cost ten Python functions more
    for each promise, most of them with cold caches.
    """

    __slots__ = ("incoming", "label", "place", "promises", "values")

    label: str
    promises: Any
    """The `zcactor.objects.promises.Promises` of this process."""
    incoming: Incoming | None
    """The call that waits: the outcome is one of its blockers. None once the outcome is here."""
    values: list[Any]
    """The arguments of the call."""
    place: int
    """Its place among them."""

    def complete_plain(self, value: Any) -> None:
        """Take the outcome, which is a plain value."""
        incoming = self.incoming
        if incoming is not None:
            self.incoming = None
            values, self.values = self.values, []
            values[self.place] = value
            incoming.blockers -= 1
            if not incoming.blockers and incoming.host is not None:
                incoming.host.unblocked(incoming)

    def complete(self, *_: Any) -> None:
        """Take another outcome, which the expectation has."""
        self.stand_in()

    def stand_in(self) -> None:
        """Put an `Unresolved` in the place, whose call gets the outcome from the expectation or from the owner."""
        incoming = self.incoming
        if incoming is None:
            return
        values, self.values = self.values, []
        values[self.place] = unresolved = self.unresolved()
        if incoming.host is not None:
            incoming.host.keep_unresolved(incoming, values)
        unresolved.call.add_callback(self._arrived)

    def unresolved(self) -> Unresolved:
        """The argument for a call that does not wait for it here."""
        return Unresolved(self.promises.call_of(self, self.label))

    def _arrived(self, _: Call) -> None:
        incoming, self.incoming = self.incoming, None
        if incoming is not None:
            incoming.blockers -= 1
            if not incoming.blockers and incoming.host is not None:
                incoming.host.unblocked(incoming)


def has_scalar(call: Call) -> bool:
    """Whether the call has ended with a scalar, which counts as seen then: it is about to be passed on."""
    if call.payload is not None or call.state is not _DONE or call.error is not None or type(call.value) not in SCALARS:
        return False
    call.retrieved = True
    return True


def passed_value(ref: ObjectRef[Any]) -> Packed:
    """The value of a reference, unopened, as what is called with the reference gets it. The outcome is known.

    Raises:
        FailedArgumentError: the reference has failed, or was cancelled: so does what is called with it.
        Exception: the error of packing a value again to which its holder may have written.
    """
    call = ref._call
    call.retrieved = True
    if call.error is not None or call.status != Status.OK:
        try:
            value_of(call)
        except BaseException as error:  # a call may have failed with anything
            raise FailedArgumentError(error) from error
    return Packed(*packed_result(call))


def pack_argument(packing: Any, ref: ObjectRef[Any]) -> Any:
    """Encode a reference as a top-level argument: its value, passed on unopened, where that is known; otherwise the
    promise."""
    call = ref._call
    if has_scalar(call):
        return packing.pack(call.value)
    if call.known:
        return pack_resolved(packing, passed_value(ref))
    call.retrieved = True
    if packing.direct and call.holder is None:
        part = Part(RegionKind.REF, ArgumentRef(call), 0, 0)
        return Ext(Code.ARGUMENT, encode((packing.add(part), call.label, False)))
    return Ext(Code.ARGUMENT, pack_ref(packing, ref))


def unpack_argument(unpacking: Any, data: memoryview) -> Unresolved:
    """The inverse of `pack_argument` for a promise."""
    return Unresolved(unpack_ref(unpacking, data)._call)


arguments[ObjectRef] = pack_argument
unpackers[Code.ARGUMENT] = unpack_argument
