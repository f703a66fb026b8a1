"""A connection by RDMA: frames by SEND through one queue pair, arrays by READ through another, and a TCP socket.

There are two queue pairs, because a READ that fails, for instance for a stale key, puts the queue pair into ERR at
*both* ends. Then the bulk pair is connected anew, and the control pair continues. The TCP socket through which the ends
met stays open. Its end is the first sign of a dead peer, which an idle queue pair never detects, and the bulk pair is
connected anew by messages on it.

At the end, each side sends a last message. When that has arrived, the side ends its half of the socket. When both
halves have ended, it ends its control queue pair: until then it acknowledges the peer's last messages, so that none is
sent twice. The peer polls its completion queue before it acts on the end of the socket. When a connection ends, the
bulk pair is fenced first, so that the peer reads nothing any more. Only then the loss is reported, which ends the
peer's leases. Queue pairs are destroyed when all requests in them have ended, as only then their memory is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
import zlib
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.logs import logger
from zcactor.transport.base import Connection
from zcactor.transport.credits import Credits
from zcactor.transport.frames import LENGTH_PREFIX, PeerInfo, Receiver
from zcactor.transport.stream.record_layer import Integrity
from zcactor.transport.verbs.device.sizing import PROOF_NBYTES, SEND_DEPTH
from zcactor.transport.verbs.driver.base import Read, Send
from zcactor.transport.verbs.driver.codes import CompletionStatus, describe_status
from zcactor.transport.verbs.peer.bootstrap import Message, Rebuild, Rebuilt, Resume
from zcactor.transport.verbs.peer.bulk import BulkPair, Proving
from zcactor.transport.verbs.peer.inbox import Inbox
from zcactor.transport.verbs.peer.link import Link
from zcactor.transport.verbs.peer.pulling import LAST
from zcactor.transport.verbs.peer.reaching import Reach
from zcactor.transport.verbs.peer.records import Records
from zcactor.transport.verbs.peer.sending import SEND_ID, SlotSender

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

    from zcactor.transport.bytes import Commit, RemoteRegion
    from zcactor.transport.stream.record_layer import Seals
    from zcactor.transport.verbs.device.engine import Engine
    from zcactor.transport.verbs.device.gpu_memory import RegisteredGpuMemory
    from zcactor.transport.verbs.device.registration_cache import ExtentTable
    from zcactor.transport.verbs.driver.base import Completion
    from zcactor.transport.verbs.peer.pulling import Puller
    from zcactor.transport.verbs.peer.queue_pairs import QueuePairs

__all__ = ["MARK", "GpuReading", "PathProof", "Takedown", "VerbsConnection"]

MARK: Final = SEND_ID | 1 << 61
"""``wr_id`` of a request that is posted to be flushed: when it has ended, so have all requests before it."""


class Takedown:
    """The destruction of both queue pairs. Runs on the loop's thread.

    Args:
        pairs: the queue pairs.
        engine: the engine of their device.
        loop: the loop of the connection.
        report: called with errors that are defects.

    Attributes:
        bulk: the user of the bulk pair; set before any method is called.
    """

    bulk: BulkPair

    def __init__(
        self, pairs: QueuePairs, engine: Engine, loop: asyncio.AbstractEventLoop, report: Callable[[Exception], None]
    ) -> None:
        self._pairs = pairs
        self._engine = engine
        self._loop = loop
        self._report = report
        self._marked = False
        self._control_drained = False

    def drained(self) -> None:
        """Note that no request of the control pair is under way any more, or that none will ever end."""
        self._control_drained = True

    def fence_control(self) -> None:
        """End all requests in the control queue pair: put it into ERR, and post one request to wait for."""
        if self._marked:
            return
        self._marked = True
        try:
            control = self._pairs.control
            control.to_error()
            area = self._pairs.send_area
            control.post_sends([Send(MARK, area.address(0), 0, area.lkey)])
        except Exception as error:  # requests on a failed device never end
            self._report(error)
            self._control_drained = True
        self._loop.call_soon(self.look)

    def fence_bulk(self) -> None:
        """Fence the bulk pair, so that the peer reads nothing any more."""
        try:
            self.bulk.end()
        except Exception as error:
            self._report(error)
            # A failed device serves no READs, and memory that it may write to is kept for ever. On another device the
            # requests end when the queue pair is destroyed.
            self.bulk.puller.stuck = True

    def look(self) -> None:
        """Destroy both if no request is under way in them."""
        puller = self.bulk.puller
        if not self._control_drained or not (puller.drained or (puller.stuck and self._engine.usable)):
            return
        try:
            self._pairs.close()
        except OSError as error:  # all other objects are closed, and the device's other connections continue
            logger.warning("a queue pair or its memory stays with %s: %s", self._engine.device.name, error)
        else:
            puller.destroyed()


_PROOF: Final = LAST | 1 << 60
"""``wr_id`` of the READ."""


class PathProof:
    """The proof of one path. Runs on the loop's thread.

    Args:
        pairs: the queue pairs, connected at both ends.
        loop: the loop of the connection.
    """

    def __init__(self, pairs: QueuePairs, loop: asyncio.AbstractEventLoop) -> None:
        self.read: asyncio.Future[str] = loop.create_future()
        """The failure of the READ; an empty string where it worked."""
        self._probed: asyncio.Future[str] = loop.create_future()
        self._pairs = pairs

    async def run(self, sender: SlotSender) -> str:
        """Send a message and READ memory of the peer, which does the same.

        Returns:
            An empty string where both worked, otherwise the failure.

        Raises:
            OSError: the device takes no requests.
        """
        address, rkey, nbytes, checksum = self._pairs.theirs.proof
        area = self._pairs.seal_area  # not in use yet
        target = area.address(0)
        if not 0 < nbytes <= PROOF_NBYTES:
            return f"the peer offers {nbytes} bytes to prove the path with, and at most {PROOF_NBYTES} are usable"
        ctypes.memset(target, 0, nbytes)
        sender.probe()
        self._pairs.bulk.post_reads([Read(_PROOF, target, nbytes, area.lkey, address, rkey)])
        wrong = await self.read
        if not wrong and zlib.crc32(ctypes.string_at(target, nbytes)) != checksum:
            wrong = f"a READ of {nbytes} bytes succeeded and delivered other bytes"
        return wrong or await self._probed

    def probed(self) -> None:
        """Note that the peer's message has arrived."""
        if not self._probed.done():
            self._probed.set_result("")

    def fail(self, text: str) -> None:
        """End the proof with a failure. Nothing happens once the path is proved."""
        for future in (self._probed, self.read):
            if not future.done():
                future.set_result(text)


class GpuReading:
    """The way between the GPUs of two processes through their cards. Used on the loop's thread.

    Args:
        engine: the engine of this process.
        puller: posts the READs.
    """

    def __init__(self, engine: Engine, puller: Puller) -> None:
        self._engine: Final = engine
        self._puller: Final = puller

    @property
    def memory(self) -> RegisteredGpuMemory:
        """The memory of this process's GPUs that is registered with its card."""
        return self._engine.gpu_memory

    def seal(self, object_id: int, holder: Any) -> int:
        """The entry of an object of ours in the table of seals; 0 where the table is full. The seal is zeroed with
        `holder`, which has `offset` and `nbytes`."""
        return self._engine.seals.seal(object_id, holder.offset, holder.nbytes, holder)

    async def pull(self, region: RemoteRegion, source: int, address: int, lkey: int, keep: object) -> None:
        """READ bytes of the peer's GPU memory.

        Args:
            region: the bytes, with the rkey and the seal that the peer has named. The offset is that in the seal.
            source: the number by which the peer's region names the first byte.
            address: the number by which our region names the first byte of the destination.
            lkey: key of that region.
            keep: the owner of the destination, which is held until nothing can write there any more.

        Raises:
            ConnectionLost: the connection is lost before or meanwhile.
            ObjectLost: the peer has no such memory under that rkey, or another object is there by now.
            OSError: the destination cannot be written to.
            ProtocolError: the peer's numbers leave the address space.
        """
        nbytes = region.nbytes
        await self._puller.pull(region, address, ((nbytes, lkey),), keep, ((nbytes, region.rkey),), source)


PATIENCE: Final = 1.0
"""Seconds in which a peer has to confirm its last message. A busy peer may take longer, and its queue pair detects the
end of ours by itself then."""
LINGER: Final = 5.0
"""Seconds in which a closing connection has to make progress: a message is sent or arrives. A stopped peer returns no
credits, and messages that wait for them are dropped after this time."""


class VerbsConnection(Connection):
    """A connection to one peer by RDMA. Satisfies `zcactor.transport.base.Connection`. `VerbsEndpoint` makes it, and
    calls `prove` first.

    Args:
        pairs: the queue pairs, connected at both ends; they belong to the connection from here.
        peer: the process at the other end.
        recv_depth: frames that each end may have outstanding; the same number at both ends.
        leads: whether this end made the connection, and so leads when the bulk pair is connected anew.
        lookup: ``lookup(object_id)`` returns our object with that id, which has `offset` and `nbytes`, or None. Any
            thread may call it.
        authorize: ``authorize(receiver, object_id, offset, nbytes)`` returns None (or False) where the peer may not
            read these bytes.
        seals: the keys of the socket. With them each message is an encrypted record, and read bytes can be
            authenticated. None where frames are not encrypted.
    """

    kind = "verbs"
    one_sided = True
    lies_unread = True
    nbytes_per_s = 10e9  # a cable of 100 Gbit/s

    def __init__(
        self, pairs: QueuePairs, peer: PeerInfo, *, recv_depth: int, leads: bool, lookup: Callable[[int], Any],
        authorize: Callable[[Receiver | None, int, int, int], object], seals: Seals | None = None,
    ) -> None:  # fmt: skip
        agreed = pairs.agreed
        super().__init__(asyncio.get_running_loop(), peer, recv_depth, agreed.eager_limit)
        self.pairs: Final = pairs
        self._engine = pairs.engine
        self._records = records = None if seals is None else Records(seals.exporter, leads=leads)
        self._integrity = None if seals is None else seals.integrity
        self._credits = Credits(agreed.depth)
        self._sender = SlotSender(
            pairs.control, pairs.send_area, SEND_DEPTH, self.max_frame + LENGTH_PREFIX, self._credits, self._wake,
            self._post_failed, records,
        )  # fmt: skip
        self._send_by(self._sender.native)
        self._proof = PathProof(pairs, self._loop)
        self._inbox = Inbox(
            self._loop, pairs.engine, peer.pid, self._credits, self._sender, records, self.max_frame,
            self._proof.probed, self._message_broke, self._lose, self._left,
        )  # fmt: skip
        self.received, self.turn_ended = self._inbox.received, self._inbox.turn_ended  # of `Completions`
        self._takedown = Takedown(pairs, pairs.engine, self._loop, self._report_defect)
        self._bulk = self._takedown.bulk = BulkPair(
            pairs, leads=leads, tell=self._tell, broken=self._bulk_broken, drained=self._takedown.look
        )
        self.puller: Final = self._bulk.puller
        self._reach = Reach(
            pairs.engine, self.puller, peer.pid, lookup, lambda *what: authorize(self._receiver, *what), seals,
            leads=leads, tell=self._tell, start=self._start, ended=self._ended, lose=self._lose,
        )  # fmt: skip
        self.export = self._reach.export
        self.gpu_reading: Final = GpuReading(pairs.engine, self.puller)
        """The READs from GPU to GPU. GPU code asks for it."""
        self._link: Link | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._lingering = False  # lost here, and last messages are still under way
        self._peer_left = False  # the peer has sent its last message
        self._peer_ended = False  # and knows that the message has arrived; or the peer has ended
        self._patience: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._bye = asyncio.Event()
        self._over = asyncio.Event()  # ended, and no request is under way
        self._engine.watch(pairs.control, self)
        self._engine.watch(pairs.bulk, Proving(self._bulk, self._proof.read))

    def __repr__(self) -> str:
        state = "closed" if self._lost else "closing" if self._closing else "open"
        return f"<VerbsConnection to process {self.peer.pid} through {self._engine.device.name}, {state}>"

    @property
    def sealed(self) -> bool:
        """See `zcactor.transport.base.Connection`."""
        return self._records is not None

    seals_payloads = sealed  # see `zcactor.transport.base.Connection`

    @property
    def integrity(self) -> str:
        """See `zcactor.transport.base.Connection`."""
        if self._integrity is None:
            return "none"
        return "arrays" if self._integrity is Integrity.ARRAYS else "frames"

    # ---- setting up

    async def prove(self) -> str:
        """Send a message and READ memory of the peer, which does the same. Both ends are connected.

        Returns:
            An empty string where both worked, otherwise the failure.

        Raises:
            OSError: the device takes no requests.
        """
        return await self._proof.run(self._sender)

    def adopt(self, sock: socket.socket) -> None:
        """Take over the socket `sock`, non-blocking, after both ends have proved the path."""
        if self._over.is_set():  # the peer's last message came before its verdict was read
            sock.close()
            return
        self._engine.watch(self.pairs.bulk, self._bulk)
        self._link = Link(sock, self._loop, self._take, self._lose, self._socket_ended)
        self.puller.up = not self._lost

    def give_up(self) -> None:
        """Destroy the queue pairs, as the path does not work. The socket stays the caller's."""
        if self._lost:  # a message has failed, which has destroyed them
            return
        self._sender.close("the path by RDMA could not be proven")
        self._lost = True
        self._inbox.closed = True
        self._proof.fail("given up")
        self._inbox.forget()
        self._takedown.fence_control()
        self._takedown.fence_bulk()
        self._gone.set()
        self._over.set()

    def _begin(self, receiver: Receiver) -> None:
        self._inbox.receiver = receiver
        self._loop.call_soon(self._inbox.deliver_early)  # messages that arrived before

    # ---- completions; see `zcactor.transport.verbs.device.engine.Completions`

    def completed(self, completion: Completion) -> None:
        """Handle a message that has arrived at the peer, or has failed."""
        if completion.wr_id == MARK:
            self._takedown.drained()
            self._takedown.look()
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
            self._proof.fail(failed)
            if completion.status == CompletionStatus.RETRY_EXC and self.puller.up:  # `join` tries other ports first
                self._engine.avoid(self.peer.process, failed)
            self._lose(self._ended(f"broke: {failed}"), broken=True)

    def _message_broke(self, text: str) -> None:
        if text:
            self._proof.fail(text)
        self._lose(self._ended(f"broke: {text}" if text else "has no receiver any more: it failed"), broken=bool(text))

    def _left(self) -> None:
        self._peer_left = True
        self._lose(self._ended("was closed by the peer"))

    def device_failed(self, error: OSError) -> None:
        """End the connection: the device has failed."""
        self._takedown.drained()
        self._bye.set()
        self.path_lost(str(error))

    def path_lost(self, why: str) -> None:
        """End the connection: no message gets through."""
        self._proof.fail(why)
        if self._lingering:
            self._stop_lingering()
        self._lose(self._ended(f"broke: {why}"), broken=True)

    queue_pair_failed = path_lost

    def failed(self, error: Exception) -> None:
        """End the connection as a broken one, after a defect in any of these methods."""
        text = f"failed here: {error!r}"
        self._proof.fail(text)
        self._lose(self._ended(text), broken=True)
        self._stop_lingering()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, as the process is ending
            self._loop.call_soon_threadsafe(self._sender.pump)

    def _post_failed(self, error: BaseException) -> None:
        self._report_defect(error)
        # Waiting completions have the cause, and messages that the peer sent before have to be delivered.
        self._engine.poll_now()
        if self._lingering:
            self._stop_lingering()
        self._lose(self._ended(f"broke: a message could not be posted: {error}"), broken=True)

    def flush(self) -> None:
        """See `zcactor.transport.base.Connection`."""
        self._sender.flush()

    def is_writing_here(self) -> bool:
        """See `zcactor.transport.base.Connection`."""
        return self._sender.is_changing_here()

    def _sending_stopped(self, error: BaseException | None) -> None:
        if error is not None:  # otherwise messages that cannot be posted wait in `SlotSender`
            self._post_failed(error)

    # ---- the peer's arena

    async def pull(self, region: RemoteRegion, address: int, keep: object, commit: Commit | None = None) -> None:
        """Copy bytes of the peer's arena to `address` by READ. See `zcactor.transport.base.Connection.pull`.

        Where our own memory cannot be registered, they pass through bounce buffers. Where the peer's cannot, they are
        sent through the socket. `describe` has the reasons.

        Raises:
            ConnectionLost: the connection is lost before or meanwhile, or READs fail again and again.
            ObjectLost: the peer has freed the object.
            OutOfMemory: as `commit`.
            ProtocolError: the range does not lie inside the peer's arena, or the bytes have to be authenticated, by
                agreement or by `region`, and are not the peer's. The connection ends then.
            OSError: the device failed or is closed, or the destination cannot be written to.
        """
        self._check_range(region.offset, region.nbytes)
        if self._lost:
            raise self._ended("is closed")
        if not region.nbytes:  # a list cannot be a READ of the seal only
            return
        await self._reach.pull(region, address, keep, commit)

    # ---- the socket

    def _tell(self, message: Message) -> None:
        if self._link is not None and not self._lost:
            self._link.tell(message)

    def _socket_ended(self, how: str, error: OSError | None) -> None:
        self._engine.poll_now()  # deliver messages that the peer sent before
        self._peer_ended = True
        if not self._lingering:
            lost = self._ended(how)
            lost.__cause__ = error
            self._lose(lost, broken=True)
        elif self._bye.is_set() or not self._peer_left:  # otherwise the peer still receives our last message
            self._stop_lingering()

    def _take(self, message: Message) -> None:
        """Handle a message of the peer on the socket.

        Raises:
            ProtocolError: the message is not expected here.
        """
        try:
            self._act_on(message)
        except ProtocolError:
            raise
        except Exception as error:  # a defect ends the connection, as one in the handling of completions does
            self._report_defect(error)
            self.failed(error)

    def _report_defect(self, error: BaseException) -> None:
        if not isinstance(error, OSError):
            self._loop.call_exception_handler({"message": "a connection by RDMA failed", "exception": error})

    def _act_on(self, message: Message) -> None:
        if self._lost or self._reach.take(message):
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

    # ---- facts

    @property
    def heard(self) -> int | None:
        """A number that changes with each message; see `zcactor.transport.base.Connection`."""
        return self._inbox.expected

    def turns_behind(self) -> int:
        """See `zcactor.transport.base.Connection`."""
        link = self._link
        quiet = not self._lost and link is not None and not self._engine.has_unread(link.fileno())
        return 0 if quiet else super().turns_behind()

    def describe(self) -> str:
        """See `zcactor.transport.base.Connection`. Both ends of the path, and the problems of pulls so far."""
        engine = self._engine
        known = [self.pairs.describe(), engine.extents.refused, self._reach.by_socket, engine.seals.shortage]
        frames = ", frames sealed" if self.seals_payloads else ""
        return f"RDMA, proven by a message and a READ{frames}: " + "; ".join(one for one in known if one)

    @property
    def extents(self) -> ExtentTable:
        """The registered parts of our arena."""
        return self._engine.extents

    @property
    def generation(self) -> int:
        """Number of reconnections of the bulk pair."""
        return self._bulk.generation

    # ---- ending

    async def aclose(self) -> None:
        """Send all committed frames, then close. `reserve` raises from the start. Idempotent.

        Frames that arrive meanwhile are delivered. After `LINGER` seconds without progress the remaining frames are
        dropped. Cancelling drops frames that were not sent, and closes at once.
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
        """Close at once and drop all frames that were not sent. Idempotent.

        In a forked child it closes only the child's copy of the socket: all else belongs to the parent, and nothing is
        reported.
        """
        if os.getpid() != self._process:
            self._lost = self._inbox.closed = True
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
        # This end cannot know which of the sent frames the peer has acted on.
        return ConnectionLost(f"the connection to process {self.peer.pid} by RDMA {how}", maybe_executed=True)

    def _lose(self, cause: Exception | None, *, broken: bool = False) -> None:
        """Close, and report the end in the loop's next turn. Only the first call has an effect.

        Args:
            cause: the cause that the receiver gets.
            broken: whether messages under way are not awaited.
        """
        if self._lost:
            return
        self._lost = self._inbox.closed = True
        ended = self._ended(f"ended: {cause}" if cause is not None else "was closed here")
        with contextlib.ExitStack() as whatever_fails:
            whatever_fails.callback(self._report_later, cause)
            whatever_fails.callback(self._stop_lingering if broken else self._linger)
            whatever_fails.callback(self._inbox.forget)
            for task in self._tasks:
                whatever_fails.callback(task.cancel)
            whatever_fails.callback(self._reach.end)
            whatever_fails.callback(self._sender.drop, f"the connection to process {self.peer.pid} is closed")
            whatever_fails.callback(self.puller.lose, ended)
            self._takedown.fence_bulk()  # first of all, so that the peer reads nothing any more

    def _linger(self) -> None:
        """Wait until posted messages have arrived or failed. That ends, as retries are finite."""
        self._lingering = True
        self._get_on()
        if self._bye.is_set():
            self._end_our_half()
        else:
            self._sender.say_bye()

    def _get_on(self, before: tuple[int, int] | None = None) -> None:
        """Check from time to time that the end makes progress, and drop the rest where it does not. `before` is the
        number of posted messages and of those under way at the last look."""
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
        """End our half of the socket, as our last message has arrived, and wait for the peer's half."""
        if self._link is None or self._peer_ended:
            self._stop_lingering()
        else:
            self._link.finish()
            if self._lingering:  # not after a failure
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
        self._takedown.fence_control()
