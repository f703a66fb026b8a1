"""One connection's conversation: calls out, calls in, streams, leases and credits over ordered frames.

The session is the asyncio shell around pure parts: `codec` for frames, `Credits` for flow control, `LeaseTable` for the
peer's leases on our objects, `CallState` for the states of a call. The session moves messages; the hub gives calls
their meaning.

Threads: frames arrive on the loop's thread. Frames may be sent from any thread (a sync method answers from its own), so
everything that touches the send side happens under `lock`. An object may be finalized anywhere, even inside that lock
when the garbage collector runs there, so a release is only noted in the native part and never takes the lock. The next
frame takes the release along, or a RELEASE frame does in the loop's next turn. A thread that drops the arguments of a
method which it has run sends their releases itself. A finalizer of the program's may make calls, too. One that runs
inside the lock has its frames written in the loop's next turn.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.exception_pickling import bare
from zcactor.logs import logger
from zcactor.native import hot
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.store import Block
from zcactor.objectstore.table import LeaseTable
from zcactor.rpc.call import CallState
from zcactor.rpc.codec import TEMPLATE, decode, encode_hello_into, frame_at
from zcactor.rpc.grants import CheckedGrants, Grants
from zcactor.rpc.intake import Intake
from zcactor.rpc.leasing import LockedLeases, LockedLeasesOfCopies, collecting
from zcactor.rpc.messages import Flags, Hello, Kind, Status
from zcactor.rpc.outgoing import Outgoing
from zcactor.rpc.parts import Announced
from zcactor.transport.credits import Credits
from zcactor.transport.frames import held_here, is_of_sending
from zcactor.transport.mapping import STEP_BITS, Mapping

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from zcactor.rpc.call import Call
    from zcactor.rpc.hub import Hub
    from zcactor.rpc.incoming import Incoming
    from zcactor.rpc.parts import Part
    from zcactor.transport.base import Connection

__all__ = ["Session"]

_HELLO_ROOM = 4096
_BEHIND: Final = 1.0
"""Seconds for which the loop may have read nothing of a connection by which a call is sent. A process whose actors have
moved stays for longer, and sends back what comes until its callers have its news (`zcactor.control.draining`)."""
_numbers = count(1)
_Deferred = tuple["Call", int, int, int, int, bytes, "Sequence[Part]"]
"""A call that waits for the loop's next turn, with the other arguments of `Session.send_call`."""

# Plain ints: an IntEnum member costs a method call wherever it is compared or packed.
_CALL, _RESPONSE, _ITEM = int(Kind.CALL), int(Kind.RESPONSE), int(Kind.ITEM)
_CREDIT, _GOODBYE = int(Kind.CREDIT), int(Kind.GOODBYE)
_CANCEL, _STREAM_CREDIT, _DIAL = int(Kind.CANCEL), int(Kind.STREAM_CREDIT), int(Kind.DIAL)
_PUSH, _FORWARD = int(Kind.PUSH), int(Kind.FORWARD)
_OK, _SPILLED = int(Status.OK), int(Flags.SPILLED)

_MAX_RELEASES = 128
_RELEASE = int(Kind.RELEASE)
_RELEASE_DELAY = 1.0
"""Seconds that the peer's memory may stay leased in order to save a frame."""
_MOST_DELAYED = 4 << 20
"""Bytes of the peer's memory that may stay leased so by several leases, and no more than one part in 64 of its arena. A
process that only takes the results of another one sends it no frame, and takes as many as it can in a second."""
_MOST_ALONE = 4
"""The largest part of the peer's arena, as one in so many, that may stay leased so by a single lease."""

hot.setup(TEMPLATE, ProtocolError, ConnectionLost, CallState.QUEUED, CallState.SENT)


def _share_nothing(*_: object) -> None:
    return None


def _ask_to_dial(session: ref[Session]) -> None:
    """Ask the peer of a session that still lives for a data socket. The connection must not keep its session alive."""
    if (living := session()) is not None:
        living._control(_DIAL, 0, 0)


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The functions of Python that the native part of a session calls."""

    call: Callable[[int, int, int, int, list[Any]], None]
    """``call(actor, call_id, code, timeout_ns, args)``: a plain call to an actor that is not here has come."""
    frame: Callable[[memoryview, int, int], int]
    """``frame(data, at, total)`` takes the frame in at `at`, which the native part declines. Returns the position of
    the next one."""
    batch: Callable[[], None]
    """A batch was taken in, and frames wait or credits are due."""
    stopped: Callable[[BaseException | None], None]
    """The connection takes no more bytes now, or is broken; see `zcactor.transport.base.Connection.send_stopped`."""
    push: Callable[[int, int, Any], None]
    """``push(word, key, value)``: the plain outcome of a promise has come."""
    argument: Callable[[int, int, str], Any]
    """``argument(object_id, key, label)`` makes the argument that stands for a promise of the peer's."""
    forward: Callable[[int, int, int, bytes], None]
    """``forward(call_id, key, number, target)``: a FORWARD frame of an open call has come."""
    lease: Callable[[int, int, int], Lease]
    """``lease(object_id, offset, nbytes)`` makes our lease on an object of the peer's."""
    share: Callable[[Any, int, int], Any]
    """``share(array, address, nbytes)``: see `zcactor.rpc.hub.Hub.share`."""
    schedule_flush: Callable[[], None]
    """Have the written frames sent soon. From any thread."""


class Session:
    """The conversation with one peer process. The hub makes a session for each connection; it is a `Receiver` of its
    transport."""

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
        checker = hub.checker
        self._new_leases = LeaseTable if checker is None else checker.leases
        self.opener = opener
        """Process id of the end that opened the connection."""
        self.twin = twin
        """The other connection to the same peer, where both ends have opened one at the same moment."""
        self.successor: Session | None = None
        """The twin that is used instead; releases go to it."""
        if twin is not None:
            twin.twin = self
        self.lock: threading.RLock = threading.RLock() if twin is None else twin.lock
        self.leases: LeaseTable = self._new_leases() if twin is None else twin.leases
        """The peer's leases on our objects, and our pins of others' objects for it. Twins share the table and the lock:
        an object leased by one session may be released by the other."""
        self.pending: dict[int, Call] = {}
        """Calls that were sent and not answered, by id."""
        self.incoming: dict[int, Incoming] = {}
        """Calls that were received and not answered, by id."""
        self.closed: Exception | None = None
        self.peer_hello: Hello | None = None
        """The peer's greeting; None until it has come."""
        self.goodbye = False
        self.parted = False
        """Whether both ends have agreed to close the connection. Then neither holds a lease that was granted by it."""
        self.given_up = ""
        """The reason for which this end has given the peer up, whose process may still live; empty until then."""
        self.number = number or next(_numbers)
        """This process's number of the connection; the peer learns it by the greeting."""
        self.credits = Credits(connection.recv_depth)
        self._backlog: deque[tuple[Any, ...]] = deque()
        self._deferred: deque[_Deferred] = deque()
        self._is_lost = False
        """Whether `connection_lost` has taken the open calls."""
        self._grants = (Grants if checker is None else partial(CheckedGrants, checker))(
            self, hub.process, connection.export
        )
        self._outgoing = Outgoing(self, self._backlog, self._grants, self._schedule_flush)
        # Bound here: a method in between would cost a call for each message.
        self._send = self._outgoing.send
        self._credits_returned = self._outgoing.credits_returned
        self._intake = Intake(self, self._credits_returned)
        self.wire = self._make_wire()
        """The native part, which writes and reads plain frames."""
        self._outgoing.wire = self.wire
        self.caught_up()
        self.wire.behind_after = int(_BEHIND * 1000) if connection.lies_unread else 0
        self._note_release: Callable[[int], None] = self.wire.release
        self._flush_scheduled = False
        self._release_scheduled = False
        self._release_delayed = False
        self._delayed_nbytes = 0
        self._flush_now = connection.flush
        self._counters = hub.counters

    def _make_wire(self) -> hot.Wire:
        hub, connection = self.hub, self.connection
        writes_references = connection.export is None and hub.checker is None
        callbacks = Callbacks(
            call=self._intake.plain_call,
            frame=self._intake.take,
            batch=self._batch_received,
            stopped=connection.send_stopped,
            push=hub.push_received_plain,
            argument=partial(hub.argument_received, self),
            forward=self._intake.forward,
            lease=self._make_lease,
            # Python has to write references that carry an rkey, or whose bytes are checked.
            share=_share_nothing if not writes_references else hub.share if connection.maps else hub.share_copied,
            schedule_flush=self._schedule_flush,
        )
        given = {
            "leases": (LockedLeases if connection.maps else LockedLeasesOfCopies)(self.leases, self.lock),
            "pending": self.pending,
            "open": self.incoming,
            "backlog": self._backlog,
            "hosts": hub.hosts,
            "session": self,
            "loop": self.loop,
            "takers": hub.takers,
            "ahead": self._intake.ahead,
            "announced_type": Announced,
            "ref_type": hub.ref_type,
            "block_type": Block if writes_references else None,
            "store": hub.store,
            "codes": hub.dtype_codes,
            "dtypes": hub.dtypes,
        }
        # An arena of 0 bytes where nothing is mapped, and where the peer is this process: Python finds the blocks that
        # are ours. The native part accepts no references then.
        maps = connection.maps and self.peer_process != self.process
        return hot.Wire(
            connection.native_out, self.credits, hub.counters, self.process, self.peer_process, connection.eager_limit,
            connection.max_frame, connection.peer.arena_nbytes if maps else 0, callbacks, given,
        )  # fmt: skip

    @property
    def sent(self) -> int:
        """A value that changes with every call that is sent."""
        return self.wire.sent

    @property
    def is_read(self) -> bool:
        """Whether the peer has reported all frames that were sent to it as consumed."""
        return not self._backlog and self.credits.available == self.credits.window

    def start(self) -> None:
        """Begin to receive, and send the greeting. A connection that has ended already reports it in a later turn."""
        twin = 0 if self.twin is None else self.twin.number
        hello = self.hub.hello()._replace(session=self.number, twin=twin)
        self.connection.ask_to_dial = partial(_ask_to_dial, ref(self))
        self.connection.start(self)
        with self.lock, contextlib.suppress(ConnectionLost):
            buffer, offset = self.connection.reserve(_HELLO_ROOM)
            self.connection.commit(encode_hello_into(buffer, offset, hello))
            self.credits.take()
            self.connection.flush()

    # ---------------------------------------------------------------- sending

    def is_behind(self) -> bool:
        """Whether a call must not be sent before the loop has read what has come: it did other things for long, and the
        peer may have said that its actors have moved, and have ended. Calls of other threads, which need not wait for
        the loop otherwise, are held back by the end alone."""
        if not self.connection.lies_unread:
            return False
        if time.monotonic() - self.wire.heard / 1000 <= _BEHIND:
            return False
        on_loop = threading.get_ident() == self.thread
        behind: bool = self.connection.turns_behind() > 0 if on_loop else self.connection.hung_up()
        if on_loop and not behind:
            self.caught_up()
        return behind

    def caught_up(self) -> None:
        """Note that the loop has read what had come."""
        self.wire.heard = int(time.monotonic() * 1000)

    def pin(self, holder: object) -> int:
        """Keep `holder` for the peer until it has a lease of its own. Returned ids have the top bit set, so that they
        share the lease table with our own objects."""
        return self.leases.pin(holder)

    def send_call(
        self, call: Call, actor: int, code: int, flags: int, timeout_ns: int, payload: bytes, parts: Sequence[Part]
    ) -> None:
        """Send `call`. When the connection is lost before the response, the hub fails the call."""
        if self._is_writing_here():
            if self.closed is not None:
                raise self.closed
            call.session, call.id = self, self.wire.next_id()
            self._deferred.append((call, actor, code, flags, timeout_ns, payload, parts))
            self._on_loop(self._send_deferred)
            return
        with self.lock:
            if self.closed is not None:
                raise self.closed
            call_id = self.wire.next_id()
            call.id = call_id
            call.session = self
            call.state = CallState.SENT
            self.pending[call_id] = call
            if call.pushes is not None:
                call.forwarded = 0
                self.hub.sent_again(call)
            try:
                self._send(_CALL, flags, code, actor, call_id, timeout_ns, parts, payload)
            except BaseException:
                if self._outgoing.wrote:  # and the peer may write into what was moved to it
                    call.undo = None
                else:  # an argument's owner has ended: nothing was sent
                    del self.pending[call_id]
                    call.state = CallState.QUEUED
                raise
            if call.undo is not None and not self._backlog:
                call.undo = None
            self._counters.calls += 1
            self._counters.requests += not actor  # at index 0 is the process itself
            if len(self.pending) == 1:  # nothing to batch with: wake the peer now
                self._flush_locked()
                return
        self._schedule_flush()

    def _is_writing_here(self) -> bool:
        """Whether this thread is writing or sending frames of the session already: a finalizer runs there. Its frames
        have to wait for the loop's next turn."""
        return held_here(self.lock) or self.connection.is_writing_here()

    def _send_deferred(self) -> None:
        """Send the calls of finalizers that ran where frames were written. Those of a connection that has ended are
        for `connection_lost`."""
        while self._deferred and (self.closed is None or self._is_lost):
            deferred = self._deferred.popleft()
            call = deferred[0]
            try:
                if not call.known:
                    self.send_call(*deferred)
            except Exception as error:  # an argument's owner has ended
                call.fail(bare(error, None))

    def respond(
        self, incoming: Incoming, status: int, payload: Any, parts: Sequence[Part], flags: int, *, more: bool = False,
        pushed: int = 0,
    ) -> None:  # fmt: skip
        """Answer a call, unless it was answered before.

        Args:
            incoming: the call.
            status, payload, parts, flags: the outcome.
            more: further answers follow at once from this thread, so that all may share a system call.
            pushed: the numbers of the call's FORWARD frames that were obeyed, as bits.

        Raises:
            Exception: the error of granting a part or writing the frame; the call is open as before then.
        """
        call_id = incoming.id
        if call_id not in self.incoming or self.closed is not None:
            return
        with self.lock:
            regions = self._grants.export(parts) if parts else ()
            if self.incoming.pop(call_id, None) is None:  # another thread has answered the call meanwhile
                self._grants.take_back(regions)
                return
            try:
                self._outgoing.write(_RESPONSE, flags, status, 0, call_id, pushed, regions, payload, parts)
            except BaseException:
                if not self._outgoing.wrote:
                    self.incoming[call_id] = incoming
                raise
            if not more and (not self.incoming or threading.get_ident() != self.thread):
                self._flush_locked()
                return
        self._schedule_flush()

    def send_item(self, incoming: Incoming, index: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """Send one item of the stream that `incoming` opened. Exceptions as in `respond`; the item was not sent
        then."""
        if self.closed is not None:
            return
        with self.lock:
            self._send(_ITEM, flags, 0, 0, incoming.id, index, parts, payload)
        self._schedule_flush()

    def push(self, key: int, word: int, status: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """Send the outcome of a promise to the peer, which has it as an argument.

        Args:
            key: the key under which it was announced.
            word: the `owner_word` of the process that owns the promise.
            status: OK with the result; another status, without one, has the peer ask the owner.
            payload, parts, flags: the packed result.

        Raises:
            ConnectionLost: the connection has ended.
            Exception: the error of granting a part or writing the frame; nothing was sent.
        """
        if self._is_writing_here():
            self._on_loop(partial(self._push_later, key, word, status, payload, parts, flags))
            return
        with self.lock:
            if self.closed is not None:
                raise self.closed
            self._send(_PUSH, flags, status, 0, key, word, parts, payload)
            if status == _OK:
                self._counters.pushes += 1
            self._flush_locked()

    def _push_later(self, *push: Any) -> None:
        with contextlib.suppress(ConnectionLost, ObjectLost):  # those who wait for the outcome learn of the end
            self.push(*push)

    def publish(self, key: int, word: int, payload: bytes) -> None:
        """Send packed values, without parts, to the taker of `word` in the peer.

        Raises:
            ConnectionLost: the connection has ended.
        """
        with self.lock:
            if self.closed is not None:
                raise self.closed
            self._send(_PUSH, 0, _OK, 0, key, word, (), payload)
            self._flush_locked()

    def forward(self, call: Call, key: int, target: bytes) -> None:
        """Ask the peer to push the result of `call` to the process `target` under `key`. On the loop's thread, where
        nothing else is being written."""
        if self.wire.forward(call.id, call.forwarded, key, target):
            return
        with self.lock:
            self._send(_FORWARD, 0, call.forwarded, 0, call.id, key, (), target)
        self._schedule_flush()

    def send_stream_credit(self, call: Call, count: int) -> None:
        """Allow the producer of the stream `call` to send `count` more items."""
        self._control(_STREAM_CREDIT, call.id, count)

    def cancel(self, call: Call) -> None:
        """Ask the peer to stop `call`. Its response is ignored when it comes."""
        if call.state is CallState.SENT:
            call.state = CallState.CANCELLING
            self._control(_CANCEL, call.id, 0)

    def _control(self, kind: int, message_id: int, extra: int) -> None:
        if self.closed is not None:
            return
        if self._is_writing_here():
            self._on_loop(partial(self._control, kind, message_id, extra))
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
        except RuntimeError:  # the loop is closed: the process is about to exit, and the kernel closes the rest
            self.closed = self.closed or ConnectionLost("the event loop is closed")
            self.connection.native_out.refuse("the event loop is closed")

    def _flush(self) -> None:
        self._flush_scheduled = False
        self.wire.flush_scheduled = False
        self.wire.look()
        if self.closed is None:
            self._flush_locked()

    def _flush_locked(self) -> None:
        """Flush the written frames. If that fails for a reason of our own, the frames would never leave and their
        receivers would wait for ever: so the connection ends.

        Raises:
            BaseException: as `zcactor.transport.frames.Frames.send_stopped`; the connection ends, too.
        """
        try:
            self._flush_now()
        except BaseException as error:
            self.fail(ConnectionLost(f"frames could not be sent: {error!r}", maybe_executed=True))
            if not is_of_sending(error):
                raise
            logger.exception("frames to process %d could not be sent", self.connection.peer.pid)

    # ---------------------------------------------------------------- receiving

    def frames_received(self, data: memoryview) -> None:
        """See `zcactor.transport.frames.Receiver`."""
        self.wire.feed(data)

    def _batch_received(self) -> None:
        """Finish a batch of received frames: send frames that its credits allow, and return credits if no frame did."""
        if self._backlog:
            self._credits_returned(0)
        if self.credits.due:
            with self.lock:
                if self.credits.due:
                    with contextlib.suppress(ConnectionLost):  # the report of the end follows in the loop's next turn
                        self._outgoing.frame(_CREDIT, 0, 0, 0, 0, 0, (), b"")
            self._schedule_flush()

    def _make_lease(self, object_id: int, offset: int, nbytes: int) -> Lease:
        """Make our lease on an object of the peer, which has granted it by sending the reference."""
        connection: Any = self.connection
        mapping, release = connection.mapping, self.release
        if type(mapping) is Mapping:
            # The native part has compared the range with the arena. All that is short lies in such a window.
            window = mapping.windows.get(offset >> STEP_BITS)
            if window is None or offset + nbytes > window.end:
                window = mapping.window(offset, nbytes)
            address = window.base + offset
            return Lease(self.peer_process, object_id, offset, nbytes, address, window, release, False, self.process)
        mapped = connection.map(offset, nbytes)
        address, owner = mapped.address, mapped.owner
        return Lease(self.peer_process, object_id, offset, nbytes, address, owner, release, False, self.process)

    # ---------------------------------------------------------------- the end

    def connection_lost(self, cause: Exception | None) -> None:
        """See `zcactor.transport.frames.Receiver`."""
        if self.closed is None:
            self.closed = cause or ConnectionLost("the connection was closed here")
        calls = []
        with self.lock:
            # The native part enters calls without the lock, and removes calls that it could not send: each is removed
            # once.
            while self.pending:
                for call_id in list(self.pending):
                    call = self.pending.pop(call_id, None)
                    if call is not None:
                        calls.append(call)
            unsent = {entry[4] for entry in self._backlog if entry[0] == _CALL}
            self._is_lost = True
            calls += [call for call, *_ in self._deferred if not call.known]
            again = self._not_sent({call.id: call for call in calls})
            self._backlog.clear()
            self._deferred.clear()
        for call in calls:
            if call.id in unsent and call.state is CallState.SENT:
                call.state = CallState.QUEUED
        incoming = list(self.incoming.values())
        self.incoming.clear()
        for each in incoming:
            each.cancelled = True
            self.hub.cancel_received(each)
        self.end_leases()
        self.hub.session_lost(self, cause, [call for call in calls if call not in again])
        for call, arguments in again.items():
            call.target.moved(call, *arguments)

    def _not_sent(self, calls: dict[int, Call]) -> dict[Call, tuple[int, int, bytes, Sequence[Part]]]:
        """The calls of actors among `calls` that had not been sent when the peer was seen to have hung up, with the
        arguments of `zcactor.api.remote_actor.RemoteActor.moved`. A call whose arguments were granted to the peer is
        none of them: it ends, and has not run."""
        frames = self.connection.unsent
        if frames is None:
            return {}
        found: dict[Call, tuple[int, int, bytes, Sequence[Part]]] = {}
        at, total = 0, len(frames)
        while at < total:
            start, at = frame_at(frames, at, total, self.connection.max_frame)
            kind, flags, code, _, _, call_id, _, regions, _, low, high = decode(frames, start, at)
            call = calls.get(call_id) if kind == _CALL else None
            if call is not None:
                call.state = CallState.QUEUED
                if call.target is not None and not regions and not flags & _SPILLED:
                    found[call] = code, flags, frames[low:high], ()
        for kind, flags, code, _, call_id, _, _, payload, parts in self._backlog:
            call = calls.get(call_id) if kind == _CALL else None
            if call is not None and call.target is not None:
                found[call] = code, flags, bytes(payload), parts
        for call, _, code, flags, _, payload, parts in self._deferred:
            if call.id in calls and call.target is not None:
                found[call] = code, flags, payload, parts
        return found

    def end_leases(self) -> None:
        """End the connection's part in the peer's leases. Idempotent.

        Where the peer maps our arena its leases do not end, because it may live and read on: its blocks are parked.
        Holders that are not blocks of ours (a pin, a promise, an actor) are dropped, because nobody reads them in
        place. A twin that lives has the same leases, and keeps them.
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
            blocks = {object_id: keep for object_id, keep in kept.items() if getattr(keep, "read_in_place", False)}
            if blocks:
                self.hub.park(reader, self, blocks)

    def disown(self, cause: str, *, leases: bool) -> None:
        """Drop the connection, which the peer has lost. A later one to the same peer may share its table of leases, and
        goes on with it. Called on the loop's thread.

        Args:
            cause: text for the calls that are open on the connection.
            leases: whether the table has leases of this connection, which end; it has none of the later one then.
        """
        twin, self.twin = self.twin, None
        if twin is not None:
            twin.twin = None
        if leases:
            self.end_leases()
        self.leases = self._new_leases()
        self.closed = self.closed or ConnectionLost(cause, maybe_executed=True)
        self.connection.abort()  # at once: frames that have come may release leases that have ended

    async def aclose(self, cause: ConnectionLost | None = None) -> None:
        """Say goodbye and close. With `cause`, sending raises it from then on. Idempotent."""
        if self.closed is None:
            with self.lock, contextlib.suppress(ConnectionLost):  # as in `_batch_received`: the peer cannot be reached
                self._outgoing.frame(_GOODBYE, 0, 0, 0, 0, 0, (), b"")
                self._flush_locked()
                if cause is not None and self.closed is None:
                    self.closed = cause
                    self.connection.native_out.refuse(str(cause))
        await self.connection.aclose()

    def give_up(self, cause: str) -> None:
        """Drop the connection to a peer that does not respond. Its later answers and releases are not read."""
        if self.closed is None:
            self.given_up = cause
            self.fail(ConnectionLost(cause, maybe_executed=True))

    def fail(self, error: Exception) -> None:
        """Drop the connection, because of a defect at either end. Any thread may call this. Open calls fail by its
        end."""
        self.closed = self.closed or error
        self._on_loop(self.connection.abort)

    # ---------------------------------------------------------------- the peer's leases go back

    @property
    def is_replaced(self) -> bool:
        """Whether the session's twin is used instead."""
        return self.successor is not None and self.successor.closed is None

    @property
    def in_use(self) -> Any:
        """The session to send by: the twin that is used instead, or this one. The peer may close a connection that is
        replaced at any moment, and does not read what comes by it then."""
        return self.successor if self.is_replaced else self

    def release(self, object_id: int, nbytes: int = 0) -> None:
        """Give back a lease that the peer granted. Any thread may call this at any time; it takes no lock. `nbytes` is
        as for `release_later`, and has no effect here."""
        if self.successor is not None and self.is_replaced:
            self.successor.release(object_id)
            return
        self._note_release(object_id)
        self._release_soon()

    def _release_soon(self) -> None:
        if not self._release_scheduled:
            self._release_scheduled = True
            due = collecting.get(threading.get_ident()) if collecting else None
            if due is not None:
                due.append(self)
            else:
                self._on_loop(self._send_releases)

    def release_later(self, object_id: int, nbytes: int = 0) -> None:
        """`release` for a lease on bytes that have been read: a frame is likely to follow, which takes the release
        along. Releases that no frame has taken within `_RELEASE_DELAY` are sent in a frame of their own, and those of
        many bytes at once.

        Args:
            object_id: the object.
            nbytes: bytes of the peer's memory that the lease keeps; 0 for a promise.
        """
        if self.successor is not None and self.is_replaced:
            self.successor.release_later(object_id, nbytes)
            return
        much = nbytes > 0 and self._is_much(nbytes)
        self._note_release(object_id)
        if much:
            self._release_soon()
        elif not self._release_scheduled and not self._release_delayed and self.closed is None:
            self._release_delayed = True
            self._on_loop(self._send_releases_later)

    def _is_much(self, nbytes: int) -> bool:
        """Whether the leases that were noted, and one on so many bytes, keep too much of the peer's memory."""
        before = self._delayed_nbytes if self.has_releases else 0
        self._delayed_nbytes = before + nbytes
        arena: int = self.connection.peer.arena_nbytes
        return self._delayed_nbytes > (min(_MOST_DELAYED, arena // 64) if before else arena // _MOST_ALONE)

    def _send_releases_later(self) -> None:
        self.loop.call_later(_RELEASE_DELAY, self._send_delayed)

    def _send_delayed(self) -> None:
        self._release_delayed = False
        self._send_releases()

    def hold_releases(self) -> bool:
        """Promise that a frame follows at once and takes the releases noted meanwhile; see `unhold_releases`."""
        held = not self._release_scheduled
        self._release_scheduled = True
        return held

    def unhold_releases(self) -> None:
        """End `hold_releases`: releases that no frame took are sent in a frame of their own."""
        self._release_scheduled = False
        if self.wire.releases and self.closed is None:
            self._release_scheduled = True
            self._on_loop(self._send_releases)

    def send_releases(self) -> None:
        """Send the releases that were noted while the calling thread was `collecting`. Any thread may call this."""
        if self.closed is not None:
            self._on_loop(self._send_releases)
        else:
            self._release_scheduled = False
            self._write_releases()

    def _send_releases(self) -> None:
        self._release_scheduled = False
        if self.closed is not None:
            self.hub.outlived(self)
        else:
            self._write_releases()

    def _write_releases(self) -> None:
        with self.lock:
            while self.has_releases:
                self._send(_RELEASE, 0, 0, 0, 0, 0, (), b"")
                if self._backlog:
                    break  # they go with the backlog
            self._flush_locked()

    def take_releases(self) -> list[tuple[int, int]]:
        """Take the releases for the next frame: object ids, and the count of each. Called under the lock."""
        return list(Counter(self.wire.take_releases(_MAX_RELEASES)).items())

    def put_releases_back(self, taken: Sequence[tuple[int, int]]) -> None:
        """Note the releases from `take_releases` again, because their frame was not sent."""
        for object_id, number in taken:
            for _ in range(number):
                self._note_release(object_id)

    @property
    def has_releases(self) -> bool:
        """Whether releases are noted that no frame has taken."""
        return bool(self.wire.releases)
