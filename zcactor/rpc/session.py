"""One connection's conversation: calls out, calls in, streams, leases and credits over ordered frames.

The session is the asyncio shell around pure parts: `codec` for frames, `Credits` for flow control, `LeaseTable` for
what the peer holds of ours, `protocol` for the states of a call. It moves messages; what a call means is for the hub.

Threads: frames arrive on the loop's thread. Frames may be sent from any thread (a sync method answers from its own),
so everything that touches the send side happens under `lock`. Losing an object may happen anywhere, even inside that
lock when the garbage collector runs there, so a release only appends to a deque and never takes the lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from zcactor.errors import ConnectionLost, ProtocolError, ZcactorError
from zcactor.native import hot
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.ref import Region
from zcactor.objectstore.store import Block
from zcactor.objectstore.table import LeaseTable
from zcactor.rpc.codec import TEMPLATE, decode, encode_hello_into, encode_into, frame_at, frame_size
from zcactor.rpc.codec import decode_hello as read_hello
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import Hello, Kind, Status
from zcactor.rpc.protocol import CallEvent, CallState, advance_call
from zcactor.transport.credits import Credits

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from zcactor.rpc.call import Call
    from zcactor.rpc.counters import Counters
    from zcactor.rpc.parts import Holder, Part
    from zcactor.transport.base import Connection

__all__ = ["Hub", "Session"]

_MAX_REGIONS = 128
"""Regions in one frame: 7 KiB of its room. A message with more sends them ahead in REGIONS frames."""
_MAX_RELEASES = 128
_HELLO_ROOM = 4096
_RELEASE_DELAY = 1.0
"""Seconds that the peer's memory may stay leased for the sake of a frame saved."""

# Plain ints: an IntEnum member costs a method call wherever it is compared or packed.
_CALL, _RESPONSE, _ITEM, _RELEASE, _CREDIT, _GOODBYE = (
    int(k) for k in (Kind.CALL, Kind.RESPONSE, Kind.ITEM, Kind.RELEASE, Kind.CREDIT, Kind.GOODBYE)
)
_OK = int(Status.OK)
_CANCEL, _STREAM_CREDIT, _REGIONS = (int(k) for k in (Kind.CANCEL, Kind.STREAM_CREDIT, Kind.REGIONS))


if hot is not None:
    hot.setup(TEMPLATE, ProtocolError, ConnectionLost, CallState.QUEUED, CallState.SENT)


def _share_nothing(*_: object) -> None:
    return None


def _place(parts: list[Part], index: int, arrived: asyncio.Future[Part]) -> None:
    parts[index] = arrived.result()


class Hub(Protocol):
    """What a session asks of its process."""

    process: bytes
    counters: Counters

    @property
    def hosts(self) -> Mapping[int, Any]:
        """The actors here, by index."""

    dtype_codes: dict[Any, Any]
    """Wire names by dtype, those that are in use."""
    dtypes: dict[str, Any]
    """The inverse."""

    def share(self, array: Any, address: int, nbytes: int) -> Any:
        """The block of our store that an array of plain bytes lies in, C-contiguous at `address`, read-only and
        exported; None when it lies in none."""

    def hello(self) -> Hello:
        """Who we are."""

    def call_received(self, incoming: Incoming) -> None:
        """A call has arrived; it is to be answered exactly once."""

    def cancel_received(self, incoming: Incoming) -> None:
        """The caller cancelled, or is gone."""

    def import_region(self, session: Session, region: Region, unread: bool) -> tuple[Part, asyncio.Future[Part] | None]:
        """The part that a region of the peer's stands for; a future where a third process must lease it first, or its
        bytes have to be read. With `unread` that is left for later: the part's holder is a `RemoteLease`."""

    def read_result(self, call: Call) -> None:
        """Read the bytes of a result that has arrived without them, then complete `call`."""

    def session_lost(self, session: Session, cause: Exception | None, calls: list[Call]) -> None:
        """The connection is gone, with `calls` of ours unanswered."""


class _Granting:
    """The lease table as the native part sees it, which writes frames without the session's lock."""

    __slots__ = ("_leases", "_lock")

    def __init__(self, leases: LeaseTable, lock: threading.Lock) -> None:
        self._leases = leases
        self._lock = lock

    def grant(self, object_id: int, keep: object) -> None:
        """See `LeaseTable.grant`."""
        with self._lock:
            self._leases.grant(object_id, keep)

    def release(self, object_id: int, count: int) -> None:
        """See `LeaseTable.release`."""
        with self._lock:
            self._leases.release(object_id, count)


class Session:
    """The conversation with one peer process. Made by the hub for each connection; a `Receiver` of its transport."""

    def __init__(self, hub: Hub, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.hub = hub
        self.connection: Any = connection
        self.loop = loop
        self.thread = threading.get_ident()
        self.process = hub.process
        self.peer_process = connection.peer.process
        self.peer_hello: Hello | None = None
        self.lock = threading.Lock()
        self.leases = LeaseTable()
        """Objects of ours (and pins of others') that the peer holds."""
        self.pending: dict[int, Call] = {}
        """Calls sent and not answered, by id."""
        self.incoming: dict[int, Incoming] = {}
        """Calls received and not answered, by id."""
        self.closed: Exception | None = None
        self.goodbye = False
        self.last_used = loop.time()
        out = getattr(connection, "native_out", None)
        self.credits: Any = Credits(connection.recv_depth) if out is None else hot.Credits(connection.recv_depth)
        self.wire: Any = None
        """The native part, which takes plain frames in and out; None where there is none."""
        self._backlog: deque[tuple[Any, ...]] = deque()
        self._next_id: Callable[[], int] = count(1).__next__
        if out is not None:
            self.wire = self._make_wire(out)
            self._next_id = self.wire.next_id
        self._next_pin = 1
        self._released: deque[int] = deque()
        self._note_release: Callable[[int], None] = self._released.append if self.wire is None else self.wire.release
        self._flush_scheduled = False
        self._release_scheduled = False
        self._carried: list[tuple[Part, asyncio.Future[Part] | None]] = []
        self._reserve = connection.reserve
        self._commit = connection.commit
        self._flush_now = connection.flush
        self._max_frame = connection.max_frame
        self._export_bytes = connection.export
        self._call_received = hub.call_received
        self._counters = hub.counters

    def _make_wire(self, out: Any) -> Any:
        hub, connection = self.hub, self.connection
        given = {
            "leases": _Granting(self.leases, self.lock),
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
            buffer, offset = self._reserve(_HELLO_ROOM)
            self._commit(encode_hello_into(buffer, offset, self.hub.hello()))
            self.credits.take()
            self.connection.flush()

    # ---------------------------------------------------------------- sending

    def _send(
        self,
        kind: int,
        flags: int,
        code: int,
        actor: int,
        message_id: int,
        extra: int,
        parts: Sequence[Part],
        payload: Any,
    ) -> None:
        """Encode one frame into the send buffer, or keep it until there is a credit. Called under `lock`."""
        regions = self._export(parts) if parts else ()
        while len(regions) > _MAX_REGIONS:
            self._enqueue(_REGIONS, 0, 0, 0, message_id, 0, regions[:_MAX_REGIONS], b"", parts)
            regions = regions[_MAX_REGIONS:]
        self._enqueue(kind, flags, code, actor, message_id, extra, regions, payload, parts)

    def _enqueue(self, *entry: Any) -> None:
        """Send one frame, or keep it until there is a credit. Its parts are kept with it, regions hold nothing."""
        if not self._backlog and self.credits.take():
            try:
                self._frame(*entry[:-1])
            except ConnectionLost:  # the transport knows of the end; `connection_lost` follows in the loop's next turn
                self._backlog.append(entry)
        else:
            self._backlog.append(entry)

    def _frame(
        self,
        kind: int,
        flags: int,
        code: int,
        actor: int,
        message_id: int,
        extra: int,
        regions: Sequence[Region],
        payload: Any,
    ) -> None:
        releases: Sequence[tuple[int, int]] = ()
        if self._has_releases:
            releases = self._take_releases()
        size = frame_size(len(regions), len(releases), len(payload))
        buffer, offset = self._reserve(size)
        credits = self.credits
        self._commit(
            encode_into(
                buffer, offset, kind, flags, code, credits.take_owed() if credits.owed else 0, actor, message_id, extra,
                regions, releases, payload,
            )
        )  # fmt: skip
        counters = self._counters
        counters.frames_sent += 1
        counters.bytes_eager += len(payload)

    def _export(self, parts: Sequence[Part]) -> Sequence[Region]:
        """Lease every part to the peer, or none: the owner of something passed on may be gone."""
        regions: list[Region] = []
        try:
            for part in parts:
                owner, object_id, pin = part.holder.grant(self)
                seal = rkey = 0
                if self._export_bytes is not None and owner == self.process and part.nbytes:
                    seal, rkey = self._export_bytes(object_id, part.offset, part.nbytes)
                regions.append(Region(part.kind, owner, object_id, part.offset, part.nbytes, pin, seal, rkey))
        except ZcactorError:
            for region in regions:
                leased = region.pin or region.id
                if self.leases.get(leased) is not None:
                    self.leases.release(leased, 1)
            raise
        return regions

    def pin(self, holder: Holder) -> int:
        """Keep `holder` for the peer until it has a lease of its own. The ids have the top bit set, so that they share
        the lease table with our own objects."""
        self._next_pin += 1
        pin = self._next_pin | 1 << 63
        self.leases.grant(pin, holder)
        return pin

    def _take_releases(self) -> list[tuple[int, int]]:
        if self.wire is not None:
            noted = self.wire.take_releases(_MAX_RELEASES)
        else:
            noted = [self._released.popleft() for _ in range(min(len(self._released), _MAX_RELEASES))]
        return list(Counter(noted).items())

    @property
    def _has_releases(self) -> bool:
        return bool(self._released) if self.wire is None else self.wire.releases > 0

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
            self._counters.calls += 1
            if len(self.pending) == 1:  # nothing to batch with: start the peer now
                self.connection.flush()
                return
        self._schedule_flush()

    def respond(
        self, incoming: Incoming, status: int, payload: Any, parts: Sequence[Part], flags: int, *, more: bool = False
    ) -> None:
        """Answer a call. `more`: further answers follow at once from this thread, so they may share a system call."""
        if self.incoming.pop(incoming.id, None) is None or self.closed is not None:
            return
        with self.lock:
            self._send(_RESPONSE, flags, status, 0, incoming.id, 0, parts, payload)
            if not more and (not self.incoming or threading.get_ident() != self.thread):
                self.connection.flush()
                return
        self._schedule_flush()

    def send_item(self, incoming: Incoming, index: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """One item of the stream that `incoming` opened."""
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
            self._flush_now()
        else:  # the buffer in Python is not atomic towards a thread that writes into it
            with self.lock:
                self._flush_now()

    # ---------------------------------------------------------------- leases

    def release(self, object_id: int) -> None:
        """A lease that the peer granted us is no longer needed. Any thread, at any time; takes no lock."""
        self._note_release(object_id)
        if not self._release_scheduled and self.closed is None:
            self._release_scheduled = True
            self._on_loop(self._send_releases)

    def release_later(self, object_id: int) -> None:
        """The same for a lease on bytes that have been read: a frame is likely to follow, which takes it along. What no
        frame has taken within `_RELEASE_DELAY` is sent by itself."""
        self._note_release(object_id)
        if not self._release_scheduled and self.closed is None:
            self._release_scheduled = True
            self._on_loop(self._send_releases_later)

    def _send_releases_later(self) -> None:
        self.loop.call_later(_RELEASE_DELAY, self._send_releases)

    def hold_releases(self) -> bool:
        """Promise that a frame follows at once and takes the releases noted meanwhile; see `unhold_releases`."""
        held = not self._release_scheduled
        self._release_scheduled = True
        return held

    def unhold_releases(self) -> None:
        """End of `hold_releases`: what no frame took is sent by itself."""
        self._release_scheduled = False
        if self._has_releases and self.closed is None:
            self._release_scheduled = True
            self._on_loop(self._send_releases)

    def _send_releases(self) -> None:
        self._release_scheduled = False
        if self.closed is not None:
            return
        with self.lock:
            while self._has_releases:
                self._send(_RELEASE, 0, 0, 0, 0, 0, (), b"")
                if self._backlog:
                    break  # they ride with the backlog
            self.connection.flush()

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
                    with contextlib.suppress(ConnectionLost):  # as in `_send`
                        self._frame(_CREDIT, 0, 0, 0, 0, 0, (), b"")
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
        if credits:
            self._credits_returned(credits)
        parts: Sequence[Part] = ()
        blocked: Sequence[asyncio.Future[Part]] = ()
        if regions or self._carried:
            unread = kind == _RESPONSE and code == _OK and not self._carried
            parts, blocked = self._import(regions, kind, unread)
        if releases:
            with self.lock:
                for object_id, number in releases:
                    self.leases.release(object_id, number)
        if kind == _RESPONSE:
            call = self.pending.pop(message_id, None)
            if call is None:
                raise ProtocolError(f"the peer answered call {message_id}, which is not open")
            if blocked:
                self._when(blocked, parts, partial(self._respond_to, call), code, bytes(data[low:high]), flags)
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
                self._block(incoming, blocked, parts)
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

    def _credits_returned(self, count: int) -> None:
        with self.lock:
            if count:
                self.credits.returned(count)
            backlog = self._backlog
            if not backlog:
                return
            while backlog and self.credits.take():
                try:
                    self._frame(*backlog[0][:-1])
                except ConnectionLost:  # as in `_enqueue`
                    return
                backlog.popleft()
        self._schedule_flush()

    def _import(
        self, regions: Sequence[Region], kind: int, unread: bool
    ) -> tuple[Sequence[Part], Sequence[asyncio.Future[Part]]]:
        """The parts that regions stand for; some may have to be leased from a third process first."""
        found = [self.hub.import_region(self, region, unread) for region in regions]
        if self._carried:
            found = self._carried + found
            self._carried = []
        if kind == _REGIONS:
            self._carried = found
            return (), ()
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

    def _when(
        self, blocked: Sequence[asyncio.Future[Part]], parts: Sequence[Part], then: Callable[..., None], code: int,
        payload: bytes, flags: int,
    ) -> None:  # fmt: skip
        left = len(blocked)

        def arrived(_: asyncio.Future[Part]) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                then(code, payload, parts, flags)

        for future in blocked:
            future.add_done_callback(arrived)

    def _block(self, incoming: Incoming, blocked: Sequence[asyncio.Future[Part]], parts: Sequence[Part]) -> None:
        incoming.blockers += len(blocked)

        def arrived(_: asyncio.Future[Part]) -> None:
            incoming.blockers -= 1
            if incoming.blockers == 0 and incoming.host is not None:
                incoming.host.unblocked(incoming)

        for future in blocked:
            future.add_done_callback(arrived)

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
            self._when(blocked, parts, lambda _, p, q, f: stream.fill(slot, p, q, f), 0, payload, flags)
        else:
            stream.fill(slot, payload, parts, flags)

    # ---------------------------------------------------------------- the end

    def connection_lost(self, cause: Exception | None) -> None:
        """See `zcactor.transport.base.Receiver`."""
        if self.closed is None:
            self.closed = cause or ConnectionLost("the connection was closed here")
        calls = list(self.pending.values())
        with self.lock:
            self.pending.clear()
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
        self.leases.clear()
        self.hub.session_lost(self, cause, calls)

    async def aclose(self) -> None:
        """Say goodbye and close. Idempotent."""
        if self.closed is None:
            with self.lock:
                self._frame(_GOODBYE, 0, 0, 0, 0, 0, (), b"")
                self.connection.flush()
        await self.connection.aclose()

    def fail(self, error: ProtocolError) -> None:
        """Drop the connection: the peer broke the protocol."""
        self.closed = error
        self.connection.abort()
