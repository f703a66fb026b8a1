"""Frames from a peer: their effect on calls, on the called actors, and on leases."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from zcactor.errors import ProtocolError
from zcactor.objectstore.ref import OWNER_NBYTES
from zcactor.rpc.codec import decode, decode_hello, frame_at
from zcactor.rpc.incoming import Answering, Incoming
from zcactor.rpc.messages import MAX_FORWARDS, Flags, Kind, Status
from zcactor.rpc.parts import is_unread
from zcactor.rpc.verify import MAX_STATUS

if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import Callable, Sequence

    from zcactor.objectstore.ref import Region
    from zcactor.objectstore.table import LeaseTable
    from zcactor.rpc.call import Call
    from zcactor.rpc.hub import Hub
    from zcactor.rpc.messages import Hello
    from zcactor.rpc.parts import Part

__all__ = ["Arrivals", "Intake", "hold_back", "when"]


def _place(parts: list[Part], index: int, arrived: asyncio.Future[Part]) -> None:
    if not arrived.cancelled():  # else the process closes, and the part that holds the place says so to its users
        parts[index] = arrived.result()


# An object of a third process must be leased from there first, and bytes that cannot be mapped have to be read. A
# message waits for its own references; other messages do not wait for it.
class Arrivals:
    """The parts made of the regions in a session's frames. Used on the loop's thread.

    Args:
        bring: ``bring(region, unread, sealed)``, the session's `zcactor.rpc.hub.Hub.import_region`.
    """

    def __init__(self, bring: Callable[[Region, bool, bool], tuple[Part, asyncio.Future[Part] | None]]) -> None:
        self._bring = bring
        self.carried: dict[tuple[int, int], list[tuple[Part, asyncio.Future[Part] | None]]] = {}
        """Parts of REGIONS frames, by kind and id of the message that they belong to. Frames of other messages may come
        before that message."""

    def carry(self, regions: Sequence[Region], kind: int, message_id: int) -> None:
        """Import the regions of a REGIONS frame and keep their parts until `take` is called for that message.

        Raises:
            Exception: as `zcactor.rpc.hub.Hub.import_region`.
        """
        found = [self._bring(region, False, False) for region in regions]
        self.carried.setdefault((kind, message_id), []).extend(found)

    def take(
        self, regions: Sequence[Region], kind: int, message_id: int, unread: bool, sealed: bool = False
    ) -> tuple[Sequence[Part], Sequence[asyncio.Future[Part]]]:
        """Import the regions of a message's last frame, and join their parts to those of its REGIONS frames.

        Args:
            regions: regions of the last frame.
            kind, message_id: kind and id of the message.
            unread: see `zcactor.rpc.hub.Hub.import_region`; has no effect for a message with REGIONS frames, which is
                always read.
            sealed: see `zcactor.rpc.hub.Hub.import_region`; applies to the message's first part.

        Returns:
            The parts, and a future for each part that comes later. Such a part takes its place in the list before
            callbacks that are added to its future now are called.

        Raises:
            Exception: as `zcactor.rpc.hub.Hub.import_region`.
        """
        ahead = self.carried.pop((kind, message_id), None) if self.carried else None
        bring = self._bring
        if ahead is not None:
            found = ahead + [bring(region, False, False) for region in regions]
        else:
            found = [bring(region, unread, sealed and region is regions[0]) for region in regions]
        blocked = []
        parts = []
        for part, future in found:
            if future is not None:
                blocked.append(future)
            parts.append(part)
        if blocked:
            for index, (_, future) in enumerate(found):
                if future is not None:
                    future.add_done_callback(partial(_place, parts, index))
        return parts, blocked


def when(blocked: Sequence[asyncio.Future[Part]], then: Callable[[], None]) -> None:
    """Call `then` once the parts of all futures have come."""
    left = len(blocked)

    def arrived(_: asyncio.Future[Part]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            then()

    for future in blocked:
        future.add_done_callback(arrived)


def hold_back(incoming: Incoming, blocked: Sequence[asyncio.Future[Part]]) -> None:
    """Make a call wait, at its actor, for its arguments that come later."""
    incoming.blockers += len(blocked)

    def arrived(_: asyncio.Future[Part]) -> None:
        incoming.blockers -= 1
        if incoming.blockers == 0 and incoming.host is not None:
            incoming.host.unblocked(incoming)

    for future in blocked:
        future.add_done_callback(arrived)


# Plain ints: an IntEnum member costs a method call in each comparison.
_CALL, _RESPONSE, _ITEM, _CREDIT, _GOODBYE, _REGIONS, _CANCEL, _STREAM_CREDIT, _PUSH, _FORWARD, _DIAL = (
    int(k)
    for k in (
        Kind.CALL, Kind.RESPONSE, Kind.ITEM, Kind.CREDIT, Kind.GOODBYE, Kind.REGIONS, Kind.CANCEL, Kind.STREAM_CREDIT,
        Kind.PUSH, Kind.FORWARD, Kind.DIAL,
    )
)  # fmt: skip
_OK, _MOVED = int(Status.OK), int(Status.MOVED)
_SPILLED = int(Flags.SPILLED)


class Receiving(Answering, Protocol):
    """The parts of a `zcactor.rpc.session.Session` that taking frames in needs."""

    hub: Hub
    lock: threading.RLock
    leases: LeaseTable
    pending: dict[int, Call]
    incoming: dict[int, Incoming]
    credits: Any
    peer_hello: Hello | None
    goodbye: bool


class Intake:
    """The intake of a session's frames that the native part leaves to Python. Used on the loop's thread.

    Args:
        session: the session, with both sides' calls, its leases and its credits.
        credits_returned: function that is called with the credits that a frame brings.
    """

    def __init__(self, session: Receiving, credits_returned: Callable[[int], None]) -> None:
        hub, connection = session.hub, session.connection
        self._session = session
        self._hub = hub
        self._lock = session.lock
        self._leases = session.leases
        self._pending = session.pending
        self._incoming = session.incoming
        self._credits = session.credits
        self._counters = hub.counters
        self._call_received = hub.call_received
        self._credits_returned = credits_returned
        self._max_frame = connection.max_frame
        self._seals_payloads = connection.seals_payloads
        self.ahead: dict[int, list[tuple[int, int, bytes]]] = {}
        """FORWARD frames (number, key, target) that the native part has taken before their calls, by call id, until the
        end of their batch."""
        self._arrivals = Arrivals(partial(hub.import_region, session))

    def plain_call(self, actor: int, call_id: int, code: int, timeout_ns: int, args: list[Any]) -> None:
        """Take a plain call to an actor that does not exist here."""
        incoming = Incoming(self._session, call_id, actor, code, args)
        incoming.timeout_ns = timeout_ns
        if self._incoming.setdefault(call_id, incoming) is not incoming:
            raise ProtocolError(f"the peer opened call {call_id} twice")
        self._call_received(incoming)

    def take(self, data: memoryview, at: int, total: int) -> int:
        """Take in the frame whose length prefix lies at `at`. Returns the position of the next frame."""
        start, end = frame_at(data, at, total, self._max_frame)
        if self._session.peer_hello is None:
            self._session.peer_hello = decode_hello(data, start, end)
            with self._lock:  # a thread that answers takes the owed credits
                self._credits.consumed(1)
            self._counters.frames_received += 1
            self._hub.greeted(self._session)
            return end
        kind, flags, code, credits, actor, message_id, extra, regions, releases, low, high = decode(data, start, end)
        if kind != _CREDIT and kind != _GOODBYE:
            with self._lock:  # a thread that answers takes the owed credits
                self._credits.consumed(1)
        self._counters.frames_received += 1
        if flags & _SPILLED and low == high and self._seals_payloads:
            raise ProtocolError(
                f"frame of kind {kind} on a sealed connection has a payload above the eager limit without a key: "
                f"anybody between the hosts could have put it there"
            )
        if credits:
            self._credits_returned(credits)
        parts: Sequence[Part] = ()
        blocked: Sequence[asyncio.Future[Part]] = ()
        if kind == _REGIONS:
            self._arrivals.carry(regions, code, message_id)
        elif regions or self._arrivals.carried:
            sealed = bool(flags & _SPILLED) and low != high
            parts, blocked = self._arrivals.take(regions, kind, message_id, kind == _RESPONSE and code == _OK, sealed)
        if releases:
            with self._lock:
                holders = [self._leases.release(object_id, number) for object_id, number in releases]
            del holders  # a finalizer may call actors, by this session, too
        if kind == _RESPONSE:
            call = self._pending.get(message_id)
            if call is None:
                raise ProtocolError(f"the peer answered call {message_id}, which is not open")
            if code == _MOVED:
                self._take_back(call, message_id, extra, flags, bytes(data[low:high]), parts, blocked)
                return end
            if extra:
                self._note_pushed(call, message_id, extra)  # a call whose answer is refused stays open
            self._pending.pop(message_id, None)
            if blocked:
                when(blocked, partial(self._respond_to, call, code, bytes(data[low:high]), parts, flags))
            elif parts:
                self._respond_to(call, code, bytes(data[low:high]), parts, flags)
            else:
                call.complete(code, bytes(data[low:high]), parts, flags)
        elif kind == _CALL:
            incoming = Incoming(self._session, message_id, actor, code, bytes(data[low:high]))
            incoming.flags = flags
            incoming.timeout_ns = extra
            incoming.parts = parts
            if self._incoming.setdefault(message_id, incoming) is not incoming:
                raise ProtocolError(f"the peer opened call {message_id} twice")
            if self.ahead:
                for forward in self.ahead.pop(message_id, ()):
                    self._hub.forward_received(incoming, *forward)
            if blocked:
                hold_back(incoming, blocked)
            self._call_received(incoming)
        elif kind == _PUSH:
            self._push(message_id, extra, code, flags, bytes(data[low:high]), parts, blocked)
        elif kind == _FORWARD:
            target = bytes(data[low:high])
            if not extra or len(target) != OWNER_NBYTES or code >= MAX_FORWARDS or flags or parts:
                raise ProtocolError(
                    f"FORWARD {code} of call {message_id} has key {extra}, flags {flags:#x}, {len(parts)} parts and a "
                    f"payload of {len(target)} bytes; it needs a number below {MAX_FORWARDS}, a key, and the "
                    f"{OWNER_NBYTES} bytes of a process id"
                )
            self.forward(message_id, extra, code, target)
        elif kind == _ITEM:
            self._item(message_id, extra, flags, bytes(data[low:high]), parts, blocked)
        elif kind == _CANCEL:
            found = self._incoming.get(message_id)
            if found is not None and not found.cancelled:
                found.cancelled = True
                self._hub.cancel_received(found)
        elif kind == _STREAM_CREDIT:
            found = self._incoming.get(message_id)
            stream = None if found is None else found.stream  # the actor's thread may end it meanwhile
            if stream is not None:
                stream.credit(extra)
        elif kind == _GOODBYE:
            self._session.goodbye = True
        elif kind == _DIAL:
            self._session.connection.dial()
        return end

    def _respond_to(self, call: Call, code: int, payload: bytes, parts: Sequence[Part], flags: int) -> None:
        if any(map(is_unread, parts)):
            call.arrive(code, payload, parts, flags, self._hub.read_result)
        else:
            call.complete(code, payload, parts, flags)

    def _take_back(
        self, call: Call, call_id: int, method: int, flags: int, payload: bytes, parts: Sequence[Part],
        blocked: Sequence[asyncio.Future[Part]],
    ) -> None:  # fmt: skip
        """Give a call that was not run, as its actor moves, to the stand-in of the actor, with its arguments."""
        if call.target is None and not call.done:
            raise ProtocolError(f"the peer answered call {call_id} as that of an actor that moves, which it is not")
        self._pending.pop(call_id, None)
        target = call.target
        if target is None:  # it was cancelled here
            return
        take = partial(target.moved, call, method, flags, payload, parts)
        if blocked:
            when(blocked, take)
        else:
            take()

    def _note_pushed(self, call: Call, call_id: int, pushed: int) -> None:
        """Note which of the call's FORWARD frames were obeyed."""
        if pushed >> call.forwarded:
            raise ProtocolError(
                f"the peer answered call {call_id} with pushes {pushed:#x}; {call.forwarded} were asked for"
            )
        call.pushed = pushed

    def _push(
        self, key: int, word: int, status: int, flags: int, payload: bytes, parts: Sequence[Part],
        blocked: Sequence[asyncio.Future[Part]],
    ) -> None:  # fmt: skip
        if not key:
            raise ProtocolError("PUSH has key 0, under which nothing is announced")
        if status > MAX_STATUS:
            raise ProtocolError(f"PUSH has status {status}; known statuses are 0 to {MAX_STATUS}")
        if status != _OK and (payload or parts):
            raise ProtocolError(f"PUSH of status {status} has {len(payload)} bytes and {len(parts)} parts; 0 are valid")
        take = partial(self._hub.push_received, word, key, status, payload, parts, flags)
        if blocked:
            self._hub.push_coming(word, key)
            when(blocked, take)
        else:
            take()

    def forward(self, call_id: int, key: int, number: int, target: bytes) -> None:
        """Take a valid FORWARD frame.

        Raises:
            ProtocolError: the number is not the next one of the call.
        """
        found = self._incoming.get(call_id)
        if found is not None:
            self._hub.forward_received(found, number, key, target)
        # Otherwise the call was answered, or was never there: nobody waits for it.

    def _item(
        self, message_id: int, index: int, flags: int, payload: bytes, parts: Sequence[Part],
        blocked: Sequence[asyncio.Future[Part]],
    ) -> None:  # fmt: skip
        call = self._pending.get(message_id)
        if call is None:
            raise ProtocolError(f"the peer sent an item of stream {message_id}, which is not open")
        stream = getattr(call, "stream", None)
        if stream is None:
            raise ProtocolError(f"the peer sent an item for call {message_id}, which is not a stream")
        slot = stream.slot(index)
        if blocked:
            when(blocked, partial(stream.fill, slot, payload, parts, flags))
        else:
            stream.fill(slot, payload, parts, flags)
