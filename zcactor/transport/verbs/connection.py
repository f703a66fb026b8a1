"""A connection over RDMA: frames by SEND through one queue pair, arrays by READ through another, and a TCP socket.

There are two queue pairs because a READ that fails, for a stale key say, puts the queue pair into ERR at *both* ends.
The bulk pair can then be connected anew while the control pair goes on. The TCP socket over which the ends met stays
open: its end is the first sign of a dead peer (an idle queue pair never notices), and the bulk pair is rebuilt over it.

The end. Each side says goodbye by a last message; when that has arrived, it ends its half of the socket, and when both
halves have ended, its control queue pair: until then the peer's last messages are answered, so that none is sent twice.
The peer takes what its completion queue holds before it believes the socket. When a connection ends, the bulk pair is
fenced first, so that the peer reads nothing any more, and only then is the loss reported, which ends the peer's leases.
Queue pairs are destroyed when everything in them has come back, as only then the memory that they use is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import threading
import zlib
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.base import LENGTH_PREFIX, PeerInfo, Receiver, RemoteRegion
from zcactor.transport.credits import Credits
from zcactor.transport.delivering import Delivering
from zcactor.transport.framing import max_frame_for, whole_frames
from zcactor.transport.sealing import Integrity
from zcactor.transport.verbs.base import CompletionStatus, Read, Send, describe_status
from zcactor.transport.verbs.bootstrap import (
    Message,
    Rebuild,
    Rebuilt,
    Resume,
)
from zcactor.transport.verbs.bulk import BulkPair, Proving
from zcactor.transport.verbs.link import Link
from zcactor.transport.verbs.pulling import LAST
from zcactor.transport.verbs.reaching import Reach
from zcactor.transport.verbs.records import Records
from zcactor.transport.verbs.sending import SEND_ID, SlotSender
from zcactor.transport.verbs.sizing import PROOF_NBYTES, SEND_DEPTH
from zcactor.transport.verbs.slots import BYE, DATA, HEADER_NBYTES, PROBE, read_header

if TYPE_CHECKING:
    import socket
    from collections import abc
    from collections.abc import Callable, Coroutine

    from zcactor.transport.mapping import Mapping
    from zcactor.transport.sealing import Seals
    from zcactor.transport.verbs.base import Completion
    from zcactor.transport.verbs.extents import ExtentTable
    from zcactor.transport.verbs.pair import QueuePairs

__all__ = ["VerbsConnection"]

logger = logging.getLogger("zcactor")

PATIENCE: Final = 1.0
"""Seconds that a peer gets to say that its last message has arrived. One that is at work elsewhere may take longer, and
its queue pair then finds out by itself that ours is gone."""
LINGER: Final = 5.0
"""Seconds within which a connection that ends has to get on: a message leaves, or arrives. A peer that is stopped
returns no credits, and what waits for them is given up then."""
_MARK: Final = SEND_ID | 1 << 61
"""``wr_id`` of a request that is posted to be flushed: when it has come back, so has everything before it."""
_PROOF: Final = LAST | 1 << 60
"""``wr_id`` of the READ that proves the path."""


class VerbsConnection(Delivering):
    """One peer over RDMA. Satisfies `zcactor.transport.base.Connection`. Made by `VerbsEndpoint`; `prove` comes first.

    Args:
        pairs: connected at this end and at the peer's; belong to the connection from here.
        sock: the socket over which it was made, non-blocking; the connection's from `adopt` on.
        peer: who is at the other end.
        recv_depth: frames either side may have outstanding, the same number on both.
        leads: whether this end connected, and so leads when the bulk pair is connected anew.
        lookup: ``lookup(object_id)``: the object of ours with that id, which has `offset` and `nbytes`, or None; from
            any thread.
        authorize: ``authorize(receiver, object_id, offset, nbytes)``: nothing (or False) where the peer may not have
            these bytes.
        seals: of the socket over which it was made: then each message is a sealed record, and what is read can be
            authenticated; None where they are not sealed.
    """

    kind = "verbs"
    maps = False
    mapping: Mapping | None = None
    writable_mapping: Mapping | None = None

    def __init__(
        self,
        pairs: QueuePairs,
        peer: PeerInfo,
        *,
        recv_depth: int,
        leads: bool,
        lookup: Callable[[int], Any],
        authorize: Callable[[Receiver | None, int, int, int], object],
        seals: Seals | None = None,
    ) -> None:
        super().__init__(asyncio.get_running_loop())
        agreed = pairs.agreed
        self.peer = peer
        self.rejected: abc.Mapping[str, str] = {}
        self.recv_depth = recv_depth
        self.eager_limit = agreed.eager_limit
        self.max_frame = max_frame_for(agreed.eager_limit)
        self.pairs: Final = pairs
        self._engine = pairs.engine
        self._records = records = None if seals is None else Records(seals.exporter, leads=leads)
        self._integrity = None if seals is None else seals.integrity
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._credits = Credits(agreed.depth)
        self._sender = SlotSender(
            pairs.control, pairs.send_area, SEND_DEPTH, self.max_frame + LENGTH_PREFIX, self._credits, self._wake,
            self._post_failed, records,
        )  # fmt: skip
        # bound here because the rpc layer calls them for every frame: one call less each
        self.reserve = self._sender.reserve
        self.commit = self._sender.commit
        self.flush = self._sender.flush
        self.native_out = self._sender.native
        self._bulk = BulkPair(
            pairs, leads=leads, tell=self._tell, broken=self._bulk_broken, drained=self._destroy_when_drained
        )
        self.puller: Final = self._bulk.puller
        self._reach = Reach(
            pairs.engine, self.puller, peer.pid, lookup, self._may_read, seals, leads=leads, tell=self._tell,
            start=self._start, ended=self._ended, lose=self._lose,
        )  # fmt: skip
        self._authorize = authorize
        self.export: Callable[[int, int, int], tuple[int, int]] | None = self._reach.export
        self._link: Link | None = None
        self._expected = 0  # the number of the peer's next message
        # messages that came before `start`: slot, the message there or in memory of its own, bytes of frames
        self._early: list[tuple[int, memoryview, int]] = []
        self._held = 0  # messages that took a credit, and whose slots are not known to be posted again
        self._read_slots = 0  # of these, those that have been read; they count as consumed when `turn_ended` says so
        self._tasks: set[asyncio.Task[None]] = set()
        self._probed: asyncio.Future[str] = self._loop.create_future()
        self._read: asyncio.Future[str] = self._loop.create_future()
        self._lingering = False  # lost here, and the last messages of one side or the other are still on their way
        self._peer_left = False  # the peer has sent its last message
        self._peer_ended = False  # and knows that it has arrived; or it is gone
        self._patience: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._marked = False
        self._control_drained = False
        self._bye = asyncio.Event()
        self._over = asyncio.Event()  # gone, and nothing of it on its way
        self._engine.watch(pairs.control, self)
        self._engine.watch(pairs.bulk, Proving(self._bulk, self._read))

    def __repr__(self) -> str:
        state = "closed" if self._lost else "closing" if self._closing else "open"
        return f"<VerbsConnection to process {self.peer.pid} through {self._engine.device.name}, {state}>"

    @property
    def sealed(self) -> bool:
        """Whether nobody on the way can read or change the frames."""
        return self._records is not None

    @property
    def seals_payloads(self) -> bool:
        """See `zcactor.transport.base.Connection`."""
        return self._records is not None

    @property
    def integrity(self) -> str:
        """What besides frames nobody on the way can change unnoticed; see `zcactor.transport.base.Connection`."""
        if self._integrity is None:
            return "none"
        return "arrays" if self._integrity is Integrity.ARRAYS else "frames"

    # ---- setting up

    async def prove(self) -> str:
        """Send a message and READ memory of the peer's, which does the same. Both ends are connected.

        Returns:
            Nothing where both worked, else what did not.

        Raises:
            OSError: the device takes no requests.
        """
        address, rkey, nbytes, checksum = self.pairs.theirs.proof
        area = self.pairs.seal_area  # in no other use yet
        target = area.address(0)
        if not 0 < nbytes <= PROOF_NBYTES:
            return f"the peer offers {nbytes} bytes to prove the path with, and at most {PROOF_NBYTES} are usable"
        ctypes.memset(target, 0, nbytes)
        self._sender.probe()
        self.pairs.bulk.post_reads([Read(_PROOF, target, nbytes, area.lkey, address, rkey)])
        wrong = await self._read
        if not wrong and zlib.crc32(ctypes.string_at(target, nbytes)) != checksum:
            wrong = f"a READ of {nbytes} bytes succeeded and delivered other bytes"
        return wrong or await self._probed

    def adopt(self, sock: socket.socket) -> None:
        """The path is proven at both ends: the socket is this connection's from here."""
        self._engine.watch(self.pairs.bulk, self._bulk)
        self._link = Link(sock, self._loop, self._take, self._lose, self._socket_ended)
        self.puller.up = True

    def give_up(self) -> None:
        """The path does not work: take the queue pairs down; the socket stays the caller's."""
        if self._lost:  # a message has failed, and everything been taken down
            return
        self._sender.close("the path by RDMA could not be proven")
        self._lost = True
        for future in (self._probed, self._read):
            if not future.done():
                future.set_result("given up")
        self._forget_early()
        self._fence_control()
        self._fence_bulk()
        self._gone.set()
        self._over.set()

    def _may_read(self, object_id: int, offset: int, nbytes: int) -> object:
        return self._authorize(self._receiver, object_id, offset, nbytes)

    def _begin(self, receiver: Receiver) -> None:
        del receiver  # what came before is delivered to it in a later turn
        self._loop.call_soon(self._deliver_early)

    # ---- completions; see `zcactor.transport.verbs.engine.Completions`

    def completed(self, completion: Completion) -> None:
        """A message has arrived at the peer, or failed."""
        if completion.wr_id == _MARK:
            self._control_drained = True
            self._destroy_when_drained()
        elif completion.status == CompletionStatus.SUCCESS:
            number = completion.wr_id & ~SEND_ID
            self._sender.done(number)
            if number == self._sender.bye:
                self._bye.set()
                if self._lingering:
                    self._end_our_half()
        elif self._lingering:
            self._stop_lingering()
        elif not self._lost:
            failed = f"a message failed: {describe_status(completion.status)} ({self.pairs.describe()})"
            self._probe_failed(failed)
            if completion.status == CompletionStatus.RETRY_EXC:
                self._engine.avoid(self.peer.process, failed)
            self._lose(self._ended(f"broke: {failed}"), broken=True)

    def received(self, view: memoryview, completion: Completion, slot: int) -> bool:
        """A message of the peer's has arrived."""
        if self._lost:
            return True
        if completion.status != CompletionStatus.SUCCESS:
            text = f"a message could not be received: {describe_status(completion.status)}"
            self._probe_failed(text)
            self._lose(self._ended(f"broke: {text}"), broken=True)
            return True
        try:
            length = completion.byte_len
            if self._records is not None:
                view = self._records.open(view, length)
                length = len(view)
            kind, credits, nbytes = read_header(view, length, self._expected)
            self._expected += 1
            if credits:
                self._credits.returned(credits)
            if kind == DATA:
                if self._receiver is None or self._early:
                    if len(self._early) >= self._credits.window:
                        raise self._beyond_window(len(self._early))
                    self._early.append((slot, view, nbytes))
                    return False
                self._deliver(view, nbytes)
            elif kind == PROBE:
                self._hold()
                self._read_slots += 1
                if not self._probed.done():
                    self._probed.set_result("")
            elif kind == BYE:
                self._peer_left = True
                self._lose(self._ended("was closed by the peer"))
        except ProtocolError as error:
            self._lose(error)
        return True

    def turn_ended(self) -> None:
        """Slots that were read are posted again, so the peer may hear of its credits: send what all of it allows."""
        if not self._lost:
            self._credits.consumed(self._read_slots)
            self._held -= self._read_slots
            self._read_slots = 0
            self._sender.pump()
            self._sender.return_credits()

    def device_failed(self, error: OSError) -> None:
        """There will be no further completions."""
        self._control_drained = True
        self._bye.set()
        self._probe_failed(str(error))
        if self._lingering:
            self._stop_lingering()
        self._lose(self._ended(f"broke: {error}"), broken=True)

    def path_lost(self, why: str) -> None:
        """Nothing can get through any more."""
        self._probe_failed(why)
        if self._lingering:
            self._stop_lingering()
        self._lose(self._ended(f"broke: {why}"), broken=True)

    queue_pair_failed = path_lost

    def failed(self, error: Exception) -> None:
        """A defect here: the connection ends as a broken one, whatever state it was left in."""
        text = f"failed here: {error!r}"
        self._probe_failed(text)
        self._lose(self._ended(text), broken=True)
        self._stop_lingering()

    def _hold(self) -> None:
        """A message that takes a credit has arrived.

        Raises:
            ProtocolError: the peer had none.
        """
        taken = self._credits.owed + self._held
        if taken >= self._credits.window:
            raise self._beyond_window(taken)
        self._held += 1

    def _beyond_window(self, taken: int) -> ProtocolError:
        """The peer sent a message although it had `taken` all of its credits. Said here too, because others pay: they
        share the receives, and a message of theirs that finds none is the first that people hear of."""
        window, name = self._credits.window, self._engine.device.name
        logger.error(
            "process %d ignores its credits: it had sent %d messages of %d, and sent another; messages of other "
            "processes may find no receive at %s, and their connections break",
            self.peer.pid, taken, window, name,
        )  # fmt: skip
        return ProtocolError(f"the peer sent a message beyond its window of {window}, none of them acknowledged")

    def _deliver(self, view: memoryview, nbytes: int) -> None:
        """Hand whole frames to the receiver. What that sends at once takes no credit for this message along, whose slot
        is in use until it returns.

        Raises:
            ProtocolError: they are not whole, the receiver refuses one, or they came without a credit.
        """
        receiver = self._receiver
        self._hold()
        frames = view[HEADER_NBYTES : HEADER_NBYTES + nbytes]
        done = whole_frames(frames, nbytes, self.max_frame)
        try:
            if done and receiver is not None:
                receiver.frames_received(frames[:done])
        except ProtocolError:
            raise
        except Exception as error:
            # A defect of the receiver. It goes to the loop's handler and not up through the engine, which is at work
            # for other connections as well; frames were skipped, so this connection ends.
            self._lose(self._ended("has no receiver any more: it failed"))
            self._loop.call_exception_handler({"message": "a receiver of frames failed", "exception": error})
        self._read_slots += 1
        if done < nbytes and not self._lost:
            raise ProtocolError(f"a message of {nbytes} bytes is whole frames only up to byte {done}")

    def _deliver_early(self) -> None:
        while self._early and not self._lost:
            slot, view, nbytes = self._early[0]
            try:
                self._deliver(view, nbytes)
            except ProtocolError as error:
                self._lose(error)
                return
            if self._early:  # else the receiver has ended the connection
                del self._early[0]
                self._engine.give_back(slot)
        self.turn_ended()

    def _forget_early(self) -> None:
        for slot, _, _ in self._early:
            self._engine.give_back(slot)
        self._early.clear()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is on its way out
            self._loop.call_soon_threadsafe(self._sender.pump)

    def _post_failed(self, error: Exception) -> None:
        self._report_defect(error)
        # Completions that wait say more, and what the peer sent before is still to be delivered.
        self._engine.poll_now()
        if self._lingering:
            self._stop_lingering()
        self._lose(self._ended(f"broke: a message could not be posted: {error}"), broken=True)

    def send_blocked(self) -> None:
        """Never called by the native part: what cannot leave waits here."""

    def send_failed(self, error: OSError) -> None:
        """Never called by the native part, for the same reason; the connection would be broken."""
        self._post_failed(error)

    def _probe_failed(self, text: str) -> None:
        for future in (self._probed, self._read):
            if not future.done():
                future.set_result(text)

    # ---- the peer's arena

    def map(self, offset: int, nbytes: int, *, writable: bool = False) -> int:
        """Nothing is mapped: 0.

        Raises:
            ProtocolError: the range does not lie inside the peer's arena.
        """
        self._check_bounds(offset, nbytes)
        del writable
        return 0

    def _check_bounds(self, offset: int, nbytes: int) -> None:
        size = self.peer.arena_nbytes
        if offset < 0 or nbytes < 0 or nbytes > size or offset > size - nbytes:
            raise ProtocolError(
                f"process {self.peer.pid} named {nbytes} bytes at {offset} of its arena, which has {size} bytes"
            )

    async def open_writable(self) -> None:
        """Never needed here.

        Raises:
            RuntimeError: always; what is moved is pulled.
        """
        raise RuntimeError(f"the arena of process {self.peer.pid} is not mapped: moved arrays are pulled from it")

    async def pull(self, region: RemoteRegion, address: int, keep: object) -> None:
        """Bring bytes of the peer's arena to `address` of ours by READ. See `zcactor.transport.base.Connection.pull`.

        Where our own memory cannot be registered they come by way of some that is, and where the peer's cannot by the
        socket, with a copy; `describe` says why.

        Raises:
            ConnectionLost: the connection is or gets lost, or READs fail again and again.
            ObjectLost: the peer does not have the object any more.
            ProtocolError: the range does not lie inside the peer's arena; or the bytes are to be authenticated, by what
                both ends have agreed or by `region`, and are not the peer's. The connection ends then.
            OSError: the device failed, or is closed, or the destination cannot be written to.
        """
        self._check_bounds(region.offset, region.nbytes)
        if self._lost:
            raise self._ended("is closed")
        if not region.nbytes:  # no READ can be of nothing but a seal
            return
        await self._reach.pull(region, address, keep)

    # ---- the socket

    def _tell(self, message: Message) -> None:
        if self._link is not None and not self._lost:
            self._link.tell(message)

    def _socket_ended(self, how: str) -> None:
        self._engine.poll_now()  # what the peer sent before comes first
        self._peer_ended = True
        if not self._lingering:
            self._lose(self._ended(how), broken=True)
        elif self._bye.is_set() or not self._peer_left:  # else it still takes our last message
            self._stop_lingering()

    def _take(self, message: Message) -> None:
        """A message of the peer's by the socket.

        Raises:
            ProtocolError: it has no place here.
        """
        try:
            self._act_on(message)
        except ProtocolError:
            raise
        except Exception as error:  # a defect: the connection ends, as when a completion is told of
            self._report_defect(error)
            self.failed(error)

    def _report_defect(self, error: Exception) -> None:
        if not isinstance(error, OSError):
            self._loop.call_exception_handler({"message": "a connection by RDMA failed", "exception": error})

    def _act_on(self, message: Message) -> None:
        if self._lost:
            return
        if self._reach.take(message):
            return
        if isinstance(message, Rebuild | Rebuilt | Resume):
            self._bulk.take(message)
        else:
            raise ProtocolError(f"the peer sent {type(message).__name__.lower()!r} where it has no place")

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _bulk_broken(self, error: Exception) -> None:
        if isinstance(error, ConnectionLost):  # the path is dead
            self._engine.avoid(self.peer.process, str(error))
        self._lose(self._ended(f"broke: the bulk queue pair cannot be used any more: {error}"), broken=True)

    # ---- seeing

    @property
    def activity(self) -> int:
        """Changes with every message and every READ."""
        return self._sender.messages + self._expected + self.puller.reads

    @property
    def heard(self) -> int | None:
        """Changes with every message that comes."""
        return self._expected

    def describe(self) -> str:
        """Both ends of the path, and from which size on arrays go by reference and why."""
        engine = self._engine
        known = [self.pairs.describe(), engine.eager_reason]
        known += [engine.extents.refused, self._reach.by_socket, engine.seals.shortage]
        return "; ".join(one for one in known if one)

    @property
    def extents(self) -> ExtentTable:
        """What of our arena is registered."""
        return self._engine.extents

    @property
    def generation(self) -> int:
        """How often the bulk pair has been connected anew."""
        return self._bulk.generation

    # ---- ending

    async def aclose(self) -> None:
        """Send what is committed, then close; `reserve` refuses from the first moment. Idempotent.

        Frames that arrive meanwhile are still delivered. A peer that takes nothing for `LINGER` seconds is given up,
        with what it was to get. Cancelling drops what was not sent and closes at once.
        """
        if not self._lost:
            self._closing = True
            self._get_on()
            self._sender.refuse(f"the connection to process {self.peer.pid} is closing")
            self._sender.say_bye()
            try:
                await self._bye.wait()
            finally:
                self._lose(None)
        await self._gone.wait()
        await self._over.wait()

    def abort(self) -> None:
        """Close at once, dropping what was not sent. Idempotent.

        In a forked child it closes the child's copy of the socket only: everything else is the parent's, and nothing
        is reported.
        """
        if os.getpid() != self._process:
            self._lost = True
            self._sender.abandon("this connection belongs to the process that forked this one")
            self._engine.abandon()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.pairs))  # never collected, see `Engine.abandon`
            if self._link is not None:
                self._link.abandon()
        elif threading.get_ident() == self._thread:
            self._lose(None)
        else:
            self._loop.call_soon_threadsafe(self._lose, None)

    def _ended(self, how: str) -> ConnectionLost:
        # nobody here knows which of the frames that were sent the peer has acted on
        return ConnectionLost(f"the connection to process {self.peer.pid} by RDMA {how}", maybe_executed=True)

    def _lose(self, cause: Exception | None, *, broken: bool = False) -> None:
        """Close, and report it in the loop's next turn. Only the first call has an effect.

        Args:
            cause: what the receiver is told.
            broken: there is no use in waiting for what is still on its way.
        """
        if self._lost:
            return
        self._lost = True
        ended = self._ended(f"ended: {cause}" if cause is not None else "was closed here")
        with contextlib.ExitStack() as whatever_fails:
            whatever_fails.callback(self._report_later, cause)
            whatever_fails.callback(self._stop_lingering if broken else self._linger)
            whatever_fails.callback(self._forget_early)
            for task in self._tasks:
                whatever_fails.callback(task.cancel)
            whatever_fails.callback(self._reach.end)
            whatever_fails.callback(self._sender.drop, f"the connection to process {self.peer.pid} is closed")
            whatever_fails.callback(self.puller.lose, ended)
            self._fence_bulk()  # first: from here the peer reads nothing

    def _linger(self) -> None:
        """What was posted is still the peer's to get. Its arrival, or failure, is certain: retries are finite."""
        self._lingering = True
        self._get_on()
        if self._bye.is_set():
            self._end_our_half()
        else:
            self._sender.say_bye()

    def _get_on(self, before: tuple[int, int] | None = None) -> None:
        """Look every now and then whether the end gets on, and give it up where it does not. `before`: messages posted
        and under way at the last look."""
        if before is None and self._limit is not None:
            return
        now = self._sender.messages, self._sender.under_way
        if now != before:
            self._limit = self._loop.call_later(LINGER, self._get_on, now)
        elif self._lingering:
            self._stop_lingering()
        else:
            self._lose(self._ended("was closed, and the peer took nothing any more"), broken=True)

    def _end_our_half(self) -> None:
        """Our last message has arrived: say so, and wait for the peer to say the same."""
        if self._link is None or self._peer_ended:
            self._stop_lingering()
        else:
            self._link.finish()
            if self._lingering:  # not when it was broken
                self._patience = self._loop.call_later(PATIENCE, self._stop_lingering)

    def _stop_lingering(self) -> None:
        self._lingering = False
        for timer in (self._patience, self._limit):
            if timer is not None:
                timer.cancel()
        self._bye.set()
        self._over.set()
        self._sender.close("")
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._fence_control()

    def _fence_control(self) -> None:
        """Let everything in the control queue pair come back: put it into ERR, and add one request to wait for."""
        if self._marked:
            return
        self._marked = True
        try:
            control = self.pairs.control
            control.to_error()
            area = self.pairs.send_area
            control.post_sends([Send(_MARK, area.address(0), 0, area.lkey)])
        except Exception as error:  # a device that has failed gives nothing back
            self._report_defect(error)
            self._control_drained = True
        self._loop.call_soon(self._destroy_when_drained)

    def _fence_bulk(self) -> None:
        try:
            self._bulk.end()
        except Exception as error:
            self._report_defect(error)
            # A device that has failed serves no READs either, and memory that it may write to is kept for good. Else
            # nothing comes back, and destroying the queue pair is what ends them.
            self.puller.stuck = True

    def _destroy_when_drained(self) -> None:
        if not self._control_drained or not (self.puller.drained or (self.puller.stuck and self._engine.usable)):
            return
        try:
            self.pairs.close()
        except OSError as error:  # the rest is closed all the same, and the device's other connections go on
            logger.warning("a queue pair or its memory stays with %s: %s", self._engine.device.name, error)
        else:
            self.puller.destroyed()
