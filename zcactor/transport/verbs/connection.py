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
import os
import threading
import zlib
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ConnectionLost, ObjectLost, OutOfMemory, ProtocolError
from zcactor.transport.base import LENGTH_PREFIX, PeerInfo, Receiver, RemoteRegion
from zcactor.transport.credits import Credits
from zcactor.transport.delivering import Delivering
from zcactor.transport.framing import max_frame_for, whole_frames
from zcactor.transport.verbs.base import CompletionStatus, Read, Send, describe_status
from zcactor.transport.verbs.bootstrap import MAX_REASON, Ask, Exported, Message, Rebuild, Rebuilt, Resume
from zcactor.transport.verbs.bulk import BulkPair
from zcactor.transport.verbs.engine import PROOF_NBYTES, SEND_DEPTH
from zcactor.transport.verbs.link import Link
from zcactor.transport.verbs.pulling import LAST
from zcactor.transport.verbs.sending import SEND_ID, SlotSender
from zcactor.transport.verbs.slots import BYE, DATA, HEADER_NBYTES, PROBE, read_header

if TYPE_CHECKING:
    import socket
    from collections import abc
    from collections.abc import Callable, Coroutine

    from zcactor.transport.mapping import Mapping
    from zcactor.transport.verbs.base import Completion
    from zcactor.transport.verbs.extents import ExtentTable
    from zcactor.transport.verbs.pair import QueuePairs

__all__ = ["VerbsConnection"]

PATIENCE: Final = 1.0
"""Seconds that a peer gets to say that its last message has arrived. One that is at work elsewhere may take longer, and
its queue pair then finds out by itself that ours is gone."""
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
    ) -> None:
        super().__init__(asyncio.get_running_loop())
        agreed = pairs.agreed
        self.peer = peer
        self.rejected: abc.Mapping[str, str] = {}
        self.recv_depth = recv_depth
        self.eager_limit = agreed.eager_limit
        self.max_frame = max_frame_for(agreed.eager_limit)
        self.export: Callable[[int, int, int], tuple[int, int]] | None = self._export
        self.pairs: Final = pairs
        self._engine = pairs.engine
        self._lookup = lookup
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._credits = Credits(agreed.depth)
        self._sender = SlotSender(
            pairs.control, pairs.send_area, SEND_DEPTH, self.max_frame + LENGTH_PREFIX, self._credits, self._wake,
            self._post_failed,
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
        self._link: Link | None = None
        self._expected = 0  # the number of the peer's next message
        self._early: list[tuple[int, int]] = []  # messages that came before `start`: slot, bytes of frames
        self._asked: dict[int, asyncio.Future[Exported]] = {}
        self._asks = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._probed: asyncio.Future[str] = self._loop.create_future()
        self._read: asyncio.Future[str] = self._loop.create_future()
        self._lingering = False  # lost here, and the last messages of one side or the other are still on their way
        self._peer_left = False  # the peer has sent its last message
        self._peer_ended = False  # and knows that it has arrived; or it is gone
        self._patience: asyncio.TimerHandle | None = None
        self._marked = False
        self._control_drained = False
        self._bye = asyncio.Event()
        self._over = asyncio.Event()  # gone, and nothing of it on its way
        self._engine.watch(pairs.control, self)
        self._engine.watch(pairs.bulk, _Proving(self._bulk, self._read))

    def __repr__(self) -> str:
        state = "closed" if self._lost else "closing" if self._closing else "open"
        return f"<VerbsConnection to process {self.peer.pid} through {self._engine.device.name}, {state}>"

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
            kind, credits, nbytes = read_header(view, completion.byte_len, self._expected)
            self._expected += 1
            if credits:
                self._credits.returned(credits)
            if kind == DATA:
                if self._receiver is None or self._early:
                    if len(self._early) >= self._credits.window:
                        raise ProtocolError(f"the peer sent more than its window of {self._credits.window} messages")
                    self._early.append((slot, nbytes))
                    return False
                self._deliver(view, nbytes)
            elif kind == PROBE:
                self._credits.consumed()
                if not self._probed.done():
                    self._probed.set_result("")
            elif kind == BYE:
                self._peer_left = True
                self._lose(self._ended("was closed by the peer"))
        except ProtocolError as error:
            self._lose(error)
        return True

    def turn_ended(self) -> None:
        """All completions of this turn have been told: send what they allow."""
        if not self._lost:
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

    def _deliver(self, view: memoryview, nbytes: int) -> None:
        """Hand whole frames to the receiver.

        Raises:
            ProtocolError: they are not whole, the receiver refuses one, or they came without a credit.
        """
        receiver = self._receiver
        self._credits.consumed()
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
        if done < nbytes and not self._lost:
            raise ProtocolError(f"a message of {nbytes} bytes is whole frames only up to byte {done}")

    def _deliver_early(self) -> None:
        while self._early and not self._lost:
            slot, nbytes = self._early[0]
            try:
                self._deliver(self._engine.slot_view(slot), nbytes)
            except ProtocolError as error:
                self._lose(error)
                return
            if self._early:  # else the receiver has ended the connection
                del self._early[0]
                self._engine.give_back(slot)
        self.turn_ended()

    def _forget_early(self) -> None:
        for slot, _ in self._early:
            self._engine.give_back(slot)
        self._early.clear()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is on its way out
            self._loop.call_soon_threadsafe(self._sender.pump)

    def _post_failed(self, error: OSError) -> None:
        # Completions that wait say more, and what the peer sent before is still to be delivered.
        self._engine.poll_now()
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

    def _export(self, object_id: int, offset: int, nbytes: int) -> tuple[int, int]:
        """See `zcactor.transport.base.Connection.export`."""
        engine = self._engine
        region = engine.extents.find(offset, nbytes)
        if region is None:  # the reader will ask, by when it may be there
            with contextlib.suppress(RuntimeError):  # as in `_wake`
                self._loop.call_soon_threadsafe(engine.extents.ahead, offset, nbytes)
        return self._seal_of(object_id), 0 if region is None else region.rkey

    def _seal_of(self, object_id: int) -> int:
        seals = self._engine.seals
        found = seals.find(object_id)
        if not found:
            holder = self._lookup(object_id)
            if holder is not None:
                found = seals.seal(object_id, holder.offset, holder.nbytes, holder)
        return found

    async def pull(self, region: RemoteRegion, address: int, keep: object) -> None:
        """Bring bytes of the peer's arena to `address` of ours by READ. See `zcactor.transport.base.Connection.pull`.

        Raises:
            ConnectionLost: the connection is or gets lost, or READs fail again and again.
            ObjectLost: the peer does not have the object any more.
            ProtocolError: the range does not lie inside the peer's arena.
            OSError: our own memory cannot be registered; the message has the remedy.
            OutOfMemory: the system has no memory for the extent around the destination.
        """
        self._check_bounds(region.offset, region.nbytes)
        if self._lost:
            raise self._ended("is closed")
        extents = self._engine.extents
        local = await extents.get(address - self._engine.arena.address, region.nbytes)
        asked = not region.rkey
        seal, rkey = (region.seal, region.rkey) if not asked else await self._ask(region)
        while True:
            named = RemoteRegion(region.object_id, region.offset, region.nbytes, seal, rkey)
            try:
                await self.puller.pull(named, address, local.lkey, keep)
                return
            except ObjectLost:
                if asked:
                    raise
                asked = True
                seal, fresh = await self._ask(region)
                if (seal, fresh) == (named.seal, named.rkey):
                    raise
                rkey = fresh

    async def _ask(self, region: RemoteRegion) -> tuple[int, int]:
        """The seal and rkey of `region`, from the peer.

        Raises:
            ObjectLost: it does not have the object.
            ConnectionLost: the connection is or gets lost.
        """
        if self._lost:
            raise self._ended("is closed")
        self._asks = number = self._asks + 1 & 0xFFFFFFFF
        future = self._asked[number] = self._loop.create_future()
        try:
            self._tell(Ask(number, region.object_id, region.offset, region.nbytes))
            await asyncio.wait((future,))  # which no cancelling of ours makes look like the connection's end
        finally:
            self._asked.pop(number, None)
        if future.cancelled():
            raise self._ended("was lost")
        answer = future.result()
        if answer.reason:
            raise ObjectLost(f"process {self.peer.pid} cannot let {region.nbytes} bytes be read: {answer.reason}")
        return answer.seal, answer.rkey

    async def _answer(self, ask: Ask) -> None:
        holder = self._lookup(ask.object_id)
        if holder is None:
            self._tell(Exported(ask.number, reason="it has no such object any more"))
            return
        low, high = holder.offset, holder.offset + holder.nbytes
        if not low <= ask.offset <= ask.offset + ask.nbytes <= high:
            self._tell(Exported(ask.number, reason=f"they are not inside the object's {holder.nbytes} bytes"))
            return
        try:
            found = await self._engine.extents.get(ask.offset, ask.nbytes)
        except (OSError, OutOfMemory) as error:
            self._tell(Exported(ask.number, reason=str(error)[:MAX_REASON]))
            return
        self._tell(Exported(ask.number, rkey=found.rkey, seal=self._seal_of(ask.object_id)))

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
        if self._lost:
            return
        if isinstance(message, Ask):
            self._start(self._answer(message))
        elif isinstance(message, Exported):
            future = self._asked.get(message.number)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Rebuild | Rebuilt | Resume):
            self._bulk.take(message)
        else:
            raise ProtocolError(f"the peer sent {type(message).__name__.lower()!r} where it has no place")

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _bulk_broken(self, error: OSError) -> None:
        self._lose(self._ended(f"broke: the bulk queue pair cannot be connected again: {error}"), broken=True)

    # ---- seeing

    @property
    def activity(self) -> int:
        """Changes with every message and every READ."""
        return self._sender.messages + self._expected + self.puller.reads

    def describe(self) -> str:
        """Both ends of the path, and from which size on arrays go by reference and why."""
        return f"{self.pairs.describe()}; {self._engine.eager_reason}"

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

        Frames that arrive meanwhile are still delivered. Cancelling drops what was not sent and closes at once.
        """
        if not self._lost:
            self._closing = True
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
            self._sender.refuse("this connection belongs to the process that forked this one")
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
        self._fence_bulk()  # first: from here the peer reads nothing
        self.puller.lose(ended)
        self._sender.drop(f"the connection to process {self.peer.pid} is closed")
        for future in self._asked.values():
            if not future.done():
                future.cancel()
        for task in self._tasks:
            task.cancel()
        self._forget_early()
        if broken:
            self._stop_lingering()
        else:
            # What was posted is still the peer's to get. Its arrival, or failure, is certain: retries are finite.
            self._lingering = True
            if self._bye.is_set():
                self._end_our_half()
            else:
                self._sender.say_bye()
        self._report_later(cause)

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
        if self._patience is not None:
            self._patience.cancel()
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
        except OSError:  # a device that has failed gives nothing back
            self._control_drained = True
        self._loop.call_soon(self._destroy_when_drained)

    def _fence_bulk(self) -> None:
        with contextlib.suppress(OSError):  # a device that has failed serves no READs either
            self._bulk.end()

    def _destroy_when_drained(self) -> None:
        if self._control_drained and self.puller.drained:
            self.pairs.close()


class _Proving:
    """The bulk queue pair while only the path is proven: nothing but one READ goes through it."""

    def __init__(self, bulk: BulkPair, read: asyncio.Future[str]) -> None:
        self._read = read
        self.received, self.turn_ended, self.device_failed = bulk.received, bulk.turn_ended, bulk.device_failed

    def completed(self, completion: Completion) -> None:
        """The READ has ended."""
        if not self._read.done():
            wrong = completion.status != CompletionStatus.SUCCESS
            self._read.set_result(f"a READ failed: {describe_status(completion.status)}" if wrong else "")
