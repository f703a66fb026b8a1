"""One connection's conversation: calls out, calls in, streams, leases and credits over ordered frames.

The session is the asyncio shell around pure parts: `codec` for frames, `Credits` for flow control, `LeaseTable` for
what the peer holds of ours, `protocol` for the states of a call. It moves messages; what a call means is for the hub.

Threads: frames arrive on the loop's thread. Frames may be sent from any thread (a sync method answers from its own),
so everything that touches the send side happens under `lock`. Losing an object may happen anywhere, even inside that
lock when the garbage collector runs there, so a release only appends to a deque and never takes the lock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.native import hot
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.store import Block
from zcactor.objectstore.table import LeaseTable
from zcactor.rpc.arrivals import Arrivals, hold_back, when
from zcactor.rpc.codec import TEMPLATE, decode, encode_hello_into, frame_at
from zcactor.rpc.codec import decode_hello as read_hello
from zcactor.rpc.grants import Grants
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.leasing import Granting, GrantingCopies, Releasing
from zcactor.rpc.messages import Flags, Hello, Kind, Status
from zcactor.rpc.outgoing import Outgoing
from zcactor.rpc.protocol import CallEvent, CallState, advance_call
from zcactor.transport.credits import Credits

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from zcactor.rpc.call import Call
    from zcactor.rpc.hub import Hub
    from zcactor.rpc.parts import Part
    from zcactor.transport.base import Connection

__all__ = ["Session"]

logger = logging.getLogger("zcactor")
_HELLO_ROOM = 4096
_numbers = count(1)

# Plain ints: an IntEnum member costs a method call wherever it is compared or packed.
_CALL, _RESPONSE, _ITEM, _RELEASE, _CREDIT, _GOODBYE, _REGIONS = (
    int(k) for k in (Kind.CALL, Kind.RESPONSE, Kind.ITEM, Kind.RELEASE, Kind.CREDIT, Kind.GOODBYE, Kind.REGIONS)
)
_OK = int(Status.OK)
_SPILLED = int(Flags.SPILLED)
_CANCEL, _STREAM_CREDIT = int(Kind.CANCEL), int(Kind.STREAM_CREDIT)


if hot is not None:
    hot.setup(TEMPLATE, ProtocolError, ConnectionLost, CallState.QUEUED, CallState.SENT)


def _share_nothing(*_: object) -> None:
    return None


class Session(Releasing):
    """The conversation with one peer process. Made by the hub for each connection; a `Receiver` of its transport."""

    def __init__(
        self, hub: Hub, connection: Connection, loop: asyncio.AbstractEventLoop, *, opener: bytes = b"",
        twin: Session | None = None, number: int = 0,
    ) -> None:  # fmt: skip
        self.hub = hub
        self.connection: Any = connection
        self.loop = loop
        self.thread = threading.get_ident()
        self.process = hub.process
        self.peer_process = connection.peer.process
        self.peer_hello: Hello | None = None
        self.opener = opener
        """Process id of the end that has connected."""
        self.twin = twin
        """The other connection to the same peer, where both ends have connected at the same moment."""
        self.successor: Session | None = None
        """The twin that is used instead; releases go there."""
        if twin is not None:
            twin.twin = self
        self.lock: threading.Lock = threading.Lock() if twin is None else twin.lock
        self.leases: LeaseTable = LeaseTable() if twin is None else twin.leases
        """Objects of ours (and pins of others') that the peer holds. Twins share them, and the lock: what was leased by
        one may be released by the other."""
        self.pending: dict[int, Call] = {}
        """Calls sent and not answered, by id."""
        self.incoming: dict[int, Incoming] = {}
        """Calls received and not answered, by id."""
        self.closed: Exception | None = None
        self.goodbye = False
        self.given_up = ""
        """Why this end has given the peer up, which has not ended as far as is known; empty where it has not."""
        self.last_used = loop.time()
        self.number = number or next(_numbers)
        """Ours of this connection, which the peer is told with the greeting."""
        out = getattr(connection, "native_out", None)
        self.credits: Any = Credits(connection.recv_depth) if out is None else hot.Credits(connection.recv_depth)
        self.wire: Any = None
        """The native part, which takes plain frames in and out; None where there is none."""
        self._backlog: deque[tuple[Any, ...]] = deque()
        self._next_id: Callable[[], int] = count(1).__next__
        if out is not None:
            self.wire = self._make_wire(out)
            self._next_id = self.wire.next_id
        self._released: deque[int] = deque()
        self._note_release: Callable[[int], None] = self._released.append if self.wire is None else self.wire.release
        self._flush_scheduled = False
        self._release_scheduled = False
        self._release_delayed = False
        self._grants = Grants(self, hub.process, connection.export)
        self._outgoing = Outgoing(self, self._backlog, self._grants, self._schedule_flush)
        # Bound here: a method in between would cost a call for each message.
        self._send = self._outgoing.send
        self._credits_returned = self._outgoing.credits_returned
        self._arrivals = Arrivals(partial(hub.import_region, self))
        self._flush_now = connection.flush
        self._max_frame = connection.max_frame
        self._call_received = hub.call_received
        self._seals_payloads = connection.seals_payloads
        self._counters = hub.counters

    def _make_wire(self, out: Any) -> Any:
        hub, connection = self.hub, self.connection
        given = {
            "leases": (Granting if connection.maps else GrantingCopies)(self.leases, self.lock),
            "pending": self.pending,
            "open": self.incoming,
            "backlog": self._backlog,
            "hosts": hub.hosts,
            "session": self,
            "make_lease": self._make_lease,
            "on_call": self._plain_call_received,
            "on_other": self._other_received,
            "on_batch": self._batch_received,
            "on_blocked": connection.send_blocked,
            "on_broken": connection.send_failed,
            "schedule_flush": self._schedule_flush,
            # References that carry a key are Python's to write.
            "share": hub.share if connection.export is None else _share_nothing,
            "block_type": Block if connection.export is None else None,
            "store": hub.store,
            "codes": hub.dtype_codes,
            "dtypes": hub.dtypes,
        }
        # An arena of no bytes where there is no mapping: the native part takes in no references then.
        return hot.Wire(
            out, self.credits, hub.counters, self.process, self.peer_process, connection.eager_limit,
            connection.max_frame, connection.peer.arena_nbytes if connection.maps else 0, given,
        )  # fmt: skip

    def start(self) -> None:
        """Begin to receive, and introduce ourselves."""
        self.connection.start(self)
        with self.lock:
            buffer, offset = self.connection.reserve(_HELLO_ROOM)
            self.connection.commit(encode_hello_into(buffer, offset, self.hub.hello()._replace(session=self.number)))
            self.credits.take()
            self.connection.flush()

    # ---------------------------------------------------------------- sending

    def pin(self, holder: object) -> int:
        """Keep `holder` for the peer until it has a lease of its own. The ids have the top bit set, so that they share
        the lease table with our own objects."""
        return self.leases.pin(holder)

    def send_call(
        self, call: Call, actor: int, code: int, flags: int, timeout_ns: int, payload: bytes, parts: Sequence[Part]
    ) -> None:
        """Send `call`. It fails through the hub when the connection is lost before the response."""
        with self.lock:
            if self.closed is not None:
                raise self.closed
            call_id = self._next_id()
            call.id = call_id
            call.session = self
            call.state = CallState.SENT
            self.pending[call_id] = call
            try:
                self._send(_CALL, flags, code, actor, call_id, timeout_ns, parts, payload)
            except BaseException:  # an argument's owner is gone: nothing was sent
                del self.pending[call_id]
                call.state = CallState.QUEUED
                raise
            if call.undo is not None and not self._backlog:
                call.undo = None
            self._counters.calls += 1
            if len(self.pending) == 1:  # nothing to batch with: start the peer now
                self._flush_locked()
                return
        self._schedule_flush()

    def respond(
        self, incoming: Incoming, status: int, payload: Any, parts: Sequence[Part], flags: int, *, more: bool = False
    ) -> None:
        """Answer a call, unless it was answered before. `more`: further answers follow at once from this thread, so
        they may share a system call.

        Raises what granting a part or writing the frame raises; then the call is open as before.
        """
        call_id = incoming.id
        if call_id not in self.incoming or self.closed is not None:
            return
        with self.lock:
            regions = self._grants.export(parts) if parts else ()
            if self.incoming.pop(call_id, None) is None:  # another thread has answered it meanwhile
                self._grants.take_back(regions)
                return
            try:
                self._outgoing.write(_RESPONSE, flags, status, 0, call_id, 0, regions, payload, parts)
            except BaseException:
                self.incoming[call_id] = incoming
                raise
            if not more and (not self.incoming or threading.get_ident() != self.thread):
                self._flush_locked()
                return
        self._schedule_flush()

    def send_item(self, incoming: Incoming, index: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """One item of the stream that `incoming` opened. Raises as `respond` does; then it was not sent."""
        if self.closed is not None:
            return
        with self.lock:
            self._send(_ITEM, flags, 0, 0, incoming.id, index, parts, payload)
        self._schedule_flush()

    def send_stream_credit(self, call: Call, count: int) -> None:
        """The consumer of the stream `call` takes `count` items more."""
        self._control(_STREAM_CREDIT, call.id, count)

    def cancel(self, call: Call) -> None:
        """Ask the peer to stop `call`; its response is ignored when it comes."""
        if call.state is CallState.SENT:
            call.state = advance_call(call.state, CallEvent.CANCEL)
            self._control(_CANCEL, call.id, 0)

    def _control(self, kind: int, message_id: int, extra: int) -> None:
        if self.closed is not None:
            return
        with self.lock:
            self._send(kind, 0, 0, 0, message_id, extra, (), b"")
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if self._flush_scheduled:
            return
        self._flush_scheduled = True
        self._on_loop(self._flush)

    def _on_loop(self, callback: Callable[[], None]) -> None:
        try:
            if threading.get_ident() == self.thread:
                self.loop.call_soon(callback)
            else:
                self.loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: the process is on its way out and the kernel closes the rest
            self.closed = self.closed or ConnectionLost("the event loop is closed")
            if self.wire is not None:
                self.connection.native_out.refuse("the event loop is closed")

    def _flush(self) -> None:
        self._flush_scheduled = False
        wire = self.wire
        if wire is not None:
            wire.flush_scheduled = False
        if self.closed is not None:
            return
        if wire is not None:
            self._flush_locked()
        else:  # the buffer in Python is not atomic towards a thread that writes into it
            with self.lock:
                self._flush_locked()

    def _flush_locked(self) -> None:
        """Hand over what is written. Where that fails for a reason of our own it would never leave, and its receivers
        would wait for ever: the connection ends."""
        try:
            self._flush_now()
        except Exception as error:
            logger.exception("frames to process %d could not be sent", self.connection.peer.pid)
            self.fail(ConnectionLost(f"frames could not be sent: {error!r}", maybe_executed=True))

    # ---------------------------------------------------------------- receiving

    def frames_received(self, data: memoryview) -> None:
        """See `zcactor.transport.base.Receiver`."""
        if self.wire is not None:
            self.wire.feed(data)
            return
        at, total = 0, len(data)
        while at < total:
            at = self._other_received(data, at, total)
        self._batch_received()

    def _batch_received(self) -> None:
        """Frames were taken in: send what their credits allow, and the credits that they take if no frame has."""
        if self._backlog:
            self._credits_returned(0)
        if self.credits.due:
            with self.lock:
                if self.credits.due:
                    with contextlib.suppress(ConnectionLost):  # its report follows in the loop's next turn
                        self._outgoing.frame(_CREDIT, 0, 0, 0, 0, 0, (), b"")
            self._schedule_flush()

    def _make_lease(self, object_id: int, offset: int, nbytes: int) -> Lease:
        """Our lease on an object of the peer, which has granted it by sending the reference."""
        connection: Any = self.connection
        return Lease(
            self.peer_process,
            object_id,
            offset,
            nbytes,
            connection.map(offset, nbytes),
            connection.mapping,
            self.release,
            reader=self.process,
        )

    def _plain_call_received(self, actor: int, call_id: int, code: int, timeout_ns: int, args: list[Any]) -> None:
        """A plain call to an actor that is not here."""
        incoming = Incoming(self, call_id, actor, code, args)
        incoming.timeout_ns = timeout_ns
        if self.incoming.setdefault(call_id, incoming) is not incoming:
            raise ProtocolError(f"the peer opened call {call_id} twice")
        self._call_received(incoming)

    def _other_received(self, data: memoryview, at: int, total: int) -> int:
        """Take in the frame whose length prefix is at `at`; returns where the next one begins."""
        start, end = frame_at(data, at, total, self._max_frame)
        if self.peer_hello is None:
            self.peer_hello = read_hello(data, start, end)
            with self.lock:  # a thread that answers takes what is owed
                self.credits.consumed(1)
            self._counters.frames_received += 1
            return end
        kind, flags, code, credits, actor, message_id, extra, regions, releases, low, high = decode(data, start, end)
        if kind != _CREDIT and kind != _GOODBYE:
            with self.lock:  # a thread that answers takes what is owed
                self.credits.consumed(1)
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
            with self.lock:
                for object_id, number in releases:
                    self.leases.release(object_id, number)
        if kind == _RESPONSE:
            call = self.pending.pop(message_id, None)
            if call is None:
                raise ProtocolError(f"the peer answered call {message_id}, which is not open")
            if blocked:
                when(blocked, partial(self._respond_to, call, code, bytes(data[low:high]), parts, flags))
            elif parts:
                self._respond_to(call, code, bytes(data[low:high]), parts, flags)
            else:
                call.complete(code, bytes(data[low:high]), parts, flags)
        elif kind == _CALL:
            incoming = Incoming(self, message_id, actor, code, bytes(data[low:high]))
            incoming.flags = flags
            incoming.timeout_ns = extra
            incoming.parts = parts
            if self.incoming.setdefault(message_id, incoming) is not incoming:
                raise ProtocolError(f"the peer opened call {message_id} twice")
            if blocked:
                hold_back(incoming, blocked)
            self._call_received(incoming)
        elif kind == _ITEM:
            self._item(message_id, extra, flags, bytes(data[low:high]), parts, blocked)
        elif kind == _CANCEL:
            found = self.incoming.get(message_id)
            if found is not None and not found.cancelled:
                found.cancelled = True
                self.hub.cancel_received(found)
        elif kind == _STREAM_CREDIT:
            found = self.incoming.get(message_id)
            if found is not None and found.stream is not None:
                found.stream.credit(extra)
        elif kind == _GOODBYE:
            self.goodbye = True
        return end

    def _respond_to(self, call: Call, code: int, payload: bytes, parts: Sequence[Part], flags: int) -> None:
        if any(type(part.holder) is RemoteLease for part in parts):
            call.arrive(code, payload, parts, flags, self.hub.read_result)
        else:
            call.complete(code, payload, parts, flags)

    def _item(
        self, message_id: int, index: int, flags: int, payload: bytes, parts: Sequence[Part],
        blocked: Sequence[asyncio.Future[Part]],
    ) -> None:  # fmt: skip
        call = self.pending.get(message_id)
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

    # ---------------------------------------------------------------- the end

    def connection_lost(self, cause: Exception | None) -> None:
        """See `zcactor.transport.base.Receiver`."""
        if self.closed is None:
            self.closed = cause or ConnectionLost("the connection was closed here")
        calls = []
        with self.lock:
            # The native part enters calls without the lock, and takes back what it could not send: each has one end.
            while self.pending:
                for call_id in list(self.pending):
                    call = self.pending.pop(call_id, None)
                    if call is not None:
                        calls.append(call)
            unsent = {entry[4] for entry in self._backlog if entry[0] == _CALL}
            self._backlog.clear()
            self._released.clear()
        for call in calls:
            if call.id in unsent and call.state is CallState.SENT:
                call.state = CallState.QUEUED
        incoming = list(self.incoming.values())
        self.incoming.clear()
        for each in incoming:
            each.cancelled = True
            self.hub.cancel_received(each)
        self.end_leases()
        self.hub.session_lost(self, cause, calls)

    def end_leases(self) -> None:
        """The peer's leases are the connection's no more. Idempotent.

        Where it maps our arena they do not end: it may live, and read on. What is no block of ours (a pin, a promise,
        an actor) is let go of; nobody reads it in place. A twin that lives has them, too, and keeps them.
        """
        twin, self.twin = self.twin, None
        if twin is not None:
            twin.twin = None
            if twin.closed is None:
                return
        with self.lock:
            kept = self.leases.end()
        reader = self.connection.reader
        if reader is not None:
            blocks = {object_id: keep for object_id, keep in kept.items() if type(keep) is Block}
            if blocks:
                self.hub.park(reader, self, blocks)

    async def aclose(self) -> None:
        """Say goodbye and close. Idempotent."""
        if self.closed is None:
            with self.lock, contextlib.suppress(ConnectionLost):  # as in `_batch_received`: nobody is there to be told
                self._outgoing.frame(_GOODBYE, 0, 0, 0, 0, 0, (), b"")
                self._flush_locked()
        await self.connection.aclose()

    def give_up(self, cause: str) -> None:
        """Drop the connection to a peer that says nothing. What it may still answer or release is read by nobody."""
        if self.closed is None:
            self.given_up = cause
            self.fail(ConnectionLost(cause, maybe_executed=True))

    def fail(self, error: Exception) -> None:
        """Drop the connection, because of a defect at either end; from any thread. Whoever waits for an answer learns
        of its end."""
        self.closed = self.closed or error
        self._on_loop(self.connection.abort)
