"""The puller's side of bulk bytes over TCP: data sockets, one at first, and pulls that share them.

While bytes arrive on a data socket, a thread of the process's crew (`zcactor.transport.tcp.crew`) receives them
straight into their destination. A pull that is cancelled ends its socket, so that the thread stops. The memory is held
until the thread has stopped. A data socket that is unused for a while is closed.

The owner may be behind a firewall or an address translator, so that it can open sockets to this process, and this
process none to it. Where opening a socket fails or takes long, the puller asks the owner, over the connection, to open
it, and takes the one that is there first. From then on it asks at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.transport.tcp import crew
from zcactor.transport.tcp.flow import TcpFlow

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from zcactor.transport.bytes import Commit, RemoteRegion
    from zcactor.transport.tcp.data import Channel

__all__ = ["DataPuller"]

STREAMS: Final = 4
"""Data sockets of one connection. One TCP stream is bound by one core at each end, and more than four by the memory."""
PARALLEL_NBYTES: Final = 64 << 20
"""Bytes from which on an object is pulled over several streams. It takes some 20 ms, and opening a socket far less."""
PIECE_NBYTES: Final = 16 << 20
"""Bytes of one request where there are several streams. They take some milliseconds, and a small pull waits no longer
for a large one."""
ATTEMPTS: Final = 2
"""Attempts at a piece, each on a new socket, and attempts to open a socket. The system breaks a socket when this
process is stopped for some seconds, although the connection lives. And the owner may have too many handshakes under
way."""
PAUSE: Final = 0.25
"""Seconds until the next attempt to open a socket."""
HEADSTART: Final = 0.5
"""Seconds after which the owner is asked to open the socket, while the attempt to open it here goes on. Opening takes
a millisecond where packets pass, and many firewalls drop packets without an answer."""
COMES_WITHIN: Final = 5.0
"""Seconds that the owner has to open a socket: as long as a handshake may be silent."""
IDLE: Final = 20.0
"""Seconds between two looks at unused data sockets. A socket that was unused from one look to the next is closed. So it
ends before the owner gives up waiting (`zcactor.transport.tcp.data.PATIENCE`)."""


class _Destination(msgspec.Struct, eq=False):
    """The destination of a pull. The owner of the memory is removed when the pull has ended: an exception that is kept
    refers to frames, which shall not keep the memory."""

    address: int
    keep: object
    commit: Commit | None


class _Stream:
    """A data socket, with a thread of the process's crew while bytes arrive. Its methods run on the loop's thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._received = 0
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._working = False  # whether a thread uses the channel; without one, `end` closes it
        self.usable = True
        """Whether the next request can be sent."""
        self.rested = False
        """Whether it was unused since the last look."""

    async def fetch(self, region: RemoteRegion, start: int, nbytes: int, destination: _Destination) -> bool:
        """Receive `nbytes` of the region from `start` on, to the same place of the destination. False where the owner
        refuses. Cancelling ends the stream, and the memory is held until its thread has stopped.

        Raises:
            OSError: the stream broke or was ended.
            ProtocolError: the owner, or an attacker on the way, violated the protocol.
            NoThread: the system cannot start another thread.
            OutOfMemory: the system has no memory for the bytes.
            Exception: any other exception in the thread.
        """
        done: asyncio.Future[bool] = self._loop.create_future()
        work = _Work(self, done, start, nbytes, destination)
        fetched = False
        try:
            self.begin()
            try:
                # Here and not in the thread, so that the owner and the thread wake up at the same time.
                self.ask(region, start, nbytes)
                crew.run(work)
            except BaseException:
                self._working = False
                raise
            finally:
                del work  # the frames of an exception do not keep the memory
            answer = await done
            fetched = True
            return answer
        finally:
            if not fetched:
                self.end()

    @property
    def worn(self) -> bool:
        """Whether a new channel has to replace its channel."""
        return self._received >= self._channel.lasts

    def end(self) -> None:
        """Make the thread stop at once, and close the socket. Idempotent."""
        with self._lock:
            self.usable = False
            if self._working:
                self._channel.end()
            else:
                self._channel.close()

    def abandon(self) -> None:
        """Close a forked child's copy of the socket; the child has no such thread."""
        self._channel.abandon()

    def is_bare(self, region: RemoteRegion) -> bool:
        """Whether each byte of a region may be used when it has arrived."""
        return self._channel.is_bare(authenticate=region.authenticate, sealed=region.sealed)

    def begin(self) -> None:
        """Note that a thread is about to use the channel."""
        with self._lock:
            self._working = True

    def rest(self) -> None:
        """Note that no thread uses the channel any more. Any thread may call it."""
        with self._lock:
            self._working = False
            if not self.usable:
                self._channel.close()

    def ask(self, region: RemoteRegion, start: int, nbytes: int) -> None:
        """Ask for `nbytes` of a region from `start` on; here, or in the thread. It does not block, as the owner has
        read all earlier requests but one.

        Raises:
            OSError: the stream is broken.
        """
        self._channel.ask(
            region.object_id, region.offset + start, nbytes, authenticate=region.authenticate, sealed=region.sealed
        )
        self._received += nbytes

    # ---- in the thread

    def answered(self) -> bool:
        """Whether the owner sends the bytes of the next request.

        Raises:
            OSError, ProtocolError: as `fetch`.
        """
        return self._channel.answered()

    def take(self, view: memoryview, *, last: bool) -> None:
        """Fill `view` with the next bytes; `last` where the caller takes no more.

        Raises:
            OSError: as `fetch`.
        """
        self._channel.take(view)
        if last:
            self._channel.check_alive()

    def receive(self, nbytes: int, address: int) -> bool:
        """Receive the requested bytes at `address`. False where the owner refuses.

        Raises:
            OSError, ProtocolError: as `fetch`.
        """
        channel = self._channel
        if not channel.answered():
            return False
        channel.take(memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"))
        channel.check_alive()
        return True

    def leave(self, done: asyncio.Future[bool], answer: bool, error: BaseException | None) -> None:
        """Pass the result of the thread, which does not use the channel any more, to the loop."""
        self.rest()
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
            self._loop.call_soon_threadsafe(_finish, done, answer, error)


class _Work:
    """A request, which a thread calls. It holds the destination's memory until the bytes have arrived or the stream has
    ended."""

    def __init__(
        self, stream: _Stream, done: asyncio.Future[bool], start: int, nbytes: int, destination: _Destination
    ) -> None:
        self._stream = stream
        self._done = done
        self._start, self._nbytes = start, nbytes
        self._address = destination.address + start
        self._keep = destination.keep
        self._commit = destination.commit

    def __call__(self) -> None:
        answer, failure = False, None
        try:
            if self._commit is not None:
                self._commit(self._start, self._nbytes)
            answer = self._stream.receive(self._nbytes, self._address)
        except BaseException as error:
            failure = error
        self._keep = None  # the frames of the exception refer to this object
        self._stream.leave(self._done, answer, failure)
        failure = None  # its traceback refers to this frame


def _finish(done: asyncio.Future[bool], answer: bool, error: BaseException | None) -> None:
    if done.done():
        return  # the pull was cancelled
    if error is None:
        done.set_result(answer)
    else:
        done.set_exception(error)


class DataPuller:
    """The pulls from one peer's arena. Its methods run on the loop's thread.

    Args:
        name: the name of the peer for messages.
        connect: opens a data socket, connected and authenticated, which belongs to the puller from there.
        violated: called with the error where the peer violated the protocol on a data socket. The pull raises the error
            afterwards.

    Attributes:
        ask: asks the owner to open a data socket, which `offered` gets; None where it cannot be asked.
        undialled: the reason why the owner opens the data sockets, once that was seen; empty until then.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[Channel]],
        violated: Callable[[ProtocolError], None] = lambda _: None,
    ) -> None:
        self._violated = violated
        self._name = name
        self._connect = connect
        self._turns = asyncio.Semaphore(STREAMS)
        self._streams: set[_Stream] = set()
        self._idle: list[_Stream] = []
        self._pulls: set[asyncio.Timeout] = set()
        self._flows: dict[TcpFlow, _Stream] = {}
        self.ask: Callable[[], None] | None = None
        self.undialled = ""
        self._awaited: deque[asyncio.Future[Channel]] = deque()  # sockets that the owner was asked for
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._look: asyncio.TimerHandle | None = None  # at unused sockets, while there are any

    async def pull(self, region: RemoteRegion, address: int, keep: object, commit: Commit | None = None) -> None:
        """See `Connection.pull`. The caller has checked the bounds. Cancelling does not affect other pulls.

        Raises:
            ConnectionLost: `close` was called, or the owner cannot be reached.
            ObjectLost: the owner refused the request.
            OutOfMemory: as `commit`.
            ProtocolError: received bytes are not from the owner.
            AuthenticationError: another process answers at the owner's address.
        """
        if self._closed:
            raise self._lost()
        destination = _Destination(address, keep, commit)
        del keep
        try:
            async with asyncio.timeout(None) as interruption:
                self._pulls.add(interruption)
                await self._pull(region, destination)
            return
        except TimeoutError:
            pass  # it refers to the time-out, and so may not be the context of another error
        finally:
            destination.keep = None
            self._pulls.discard(interruption)
            del interruption  # it refers to the task, which keeps its error, and so all objects of the caller's frames
        raise self._lost()

    async def flow(self, region: RemoteRegion) -> TcpFlow | None:
        """Prepare to take bytes as they arrive. The caller has checked the bounds, and calls `take_flows`.

        Returns:
            None where that cannot be done, or not now: the bytes have to be checked before their use, all data sockets
            are in use, or the owner cannot be reached. `pull` tells the last from the others.
        """
        if self._closed or self._turns.locked():
            return None
        await self._turns.acquire()  # which does not wait
        stream: _Stream | None = None
        begun = False
        try:
            stream = self._idle.pop() if self._idle else await self._open()
            if self._may_begin(stream, region):
                stream.begin()
                begun = True
        except ConnectionLost:
            return None
        finally:
            if not begun:
                self._turns.release()
                if stream is not None:
                    self._put_back(stream)
        if not begun:
            return None
        assert stream is not None
        flow = TcpFlow(stream, region, self._flowed)
        self._flows[flow] = stream
        return flow

    def _may_begin(self, stream: _Stream, region: RemoteRegion) -> bool:
        return not self._closed and stream.is_bare(region)

    def _flowed(self, flow: TcpFlow, whole: bool, violation: ProtocolError | None) -> None:
        stream = self._flows.pop(flow)
        if not whole:
            stream.end()
        self._put_back(stream)
        self._turns.release()
        if violation is not None:
            self._violated(violation)

    def close(self) -> None:
        """Interrupt all pulls and end all streams, without waiting for their threads. Idempotent."""
        self._closed = True
        for flow in self._flows:
            flow.end()
        for interruption in self._pulls:
            interruption.reschedule(0)
        if self._look is not None:
            self._look.cancel()
            self._look = None
        for stream in self._idle:
            stream.end()
            self._streams.discard(stream)
        self._idle.clear()

    def abandon(self) -> None:
        """Close a forked child's copies of the sockets."""
        for stream in self._streams:
            stream.abandon()

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self._name} has ended", maybe_executed=True)

    async def _pull(self, region: RemoteRegion, destination: _Destination) -> None:
        if region.nbytes < PARALLEL_NBYTES:
            await self._piece(region, 0, region.nbytes, destination)
            return
        pieces = _pieces(region.nbytes)
        loop = asyncio.get_running_loop()
        workers = [loop.create_task(self._work(pieces, region, destination)) for _ in range(STREAMS)]
        # Not a task group: its exceptions refer to themselves, and so keep all objects of the caller's frames.
        try:
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in workers:
                if worker.done():
                    worker.result()
        finally:
            while workers:
                worker = workers.pop()
                worker.cancel()
                worker.add_done_callback(_look_at)
            del worker

    async def _work(self, pieces: Iterator[tuple[int, int]], region: RemoteRegion, destination: _Destination) -> None:
        for start, nbytes in pieces:
            await self._piece(region, start, nbytes, destination)

    async def _piece(self, region: RemoteRegion, start: int, nbytes: int, destination: _Destination) -> None:
        async with self._turns:
            attempts = ATTEMPTS
            while True:
                reused = bool(self._idle)
                stream = self._idle.pop() if reused else await self._open()
                try:
                    answer = await stream.fetch(region, start, nbytes, destination)
                except ProtocolError as error:
                    self._violated(error)
                    raise
                except crew.NoThread as error:
                    raise ConnectionLost(f"no thread is left to pull from {self._name}") from error
                except OSError as error:
                    # The owner may have closed an unused socket. There are few of them, so try again.
                    attempts -= not reused
                    if attempts == 0:
                        raise ConnectionLost(
                            f"{self._name} did not send {nbytes} bytes: {error.strerror or error}", maybe_executed=True
                        ) from error
                    continue
                finally:
                    self._put_back(stream)
                if not answer:
                    raise ObjectLost(f"{self._name} does not have object {region.object_id:x} any more")
                return

    async def _open(self) -> _Stream:
        stream = _Stream(await self._socket())
        self._streams.add(stream)
        return stream

    async def _socket(self) -> Channel:
        """Return a new data socket, which this process or the owner has opened.

        Raises:
            ConnectionLost: neither could open one.
            AuthenticationError, ProtocolError, VersionMismatch: as `connect`, where the owner opened none either.
        """
        if self.ask is None:
            return await self._dial()
        offer: asyncio.Future[Channel] = self._loop.create_future()
        dialling: asyncio.Task[Channel] | None = None
        taken: asyncio.Future[Channel] | None = None
        try:
            if self.undialled:
                self._await_offer(offer)
                await asyncio.wait((offer,), timeout=COMES_WITHIN)
            if not offer.done():
                self.undialled = ""
                dialling = self._loop.create_task(self._dial())
                await asyncio.wait((dialling,), timeout=HEADSTART)
                if not _has_succeeded(dialling):
                    taken = await self._either(dialling, offer)
            taken = taken or (offer if offer.done() else dialling)
            assert taken
            return taken.result()
        finally:
            for way in (offer, dialling):
                if way is not None and way is not taken:
                    way.cancel()
                    way.add_done_callback(self._spare)
            del taken, dialling, offer, way  # the frames of an exception do not keep other exceptions

    async def _either(self, dialling: asyncio.Task[Channel], offer: asyncio.Future[Channel]) -> asyncio.Future[Channel]:
        """Ask the owner to open a data socket. Returns the way by which one has come first, or the one that failed."""
        failure = dialling.exception() if dialling.done() else None
        reason = f"no answer within {HEADSTART:g} s" if failure is None else str(failure.args[0])
        self._await_offer(offer)
        await asyncio.wait((dialling, offer), return_when=asyncio.FIRST_COMPLETED)
        if not offer.done() and not _has_succeeded(dialling):
            await asyncio.wait((offer,), timeout=COMES_WITHIN)
        if not offer.done():
            failure = None if _has_succeeded(dialling) else dialling.exception()
            if isinstance(failure, ConnectionLost):
                raise ConnectionLost(
                    f"{failure.args[0]}; asked for a data socket to this process, it opened none within "
                    f"{COMES_WITHIN:g} s: let one of the two hosts accept connections of the other",
                    failure.maybe_executed,
                ) from failure
            return dialling
        self.undialled = reason
        return offer

    def _await_offer(self, offer: asyncio.Future[Channel]) -> None:
        if not self._awaited or self._awaited[-1] is not offer:
            self._awaited.append(offer)
        assert self.ask
        self.ask()

    def offered(self, channel: Channel) -> None:
        """Take a data socket, which the owner has opened."""
        while self._awaited:
            offer = self._awaited.popleft()
            if not offer.done():
                offer.set_result(channel)
                return
        self._keep(channel)  # the one who asked was served otherwise

    def _spare(self, way: asyncio.Future[Channel]) -> None:
        if _has_succeeded(way):
            self._keep(way.result())

    def _keep(self, channel: Channel) -> None:
        stream = _Stream(channel)
        self._streams.add(stream)
        self._put_back(stream)

    async def _dial(self) -> Channel:
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._connect()
            except ConnectionLost:  # other errors would be the same at another attempt
                await asyncio.sleep(PAUSE)
        return await self._connect()

    def _put_back(self, stream: _Stream) -> None:
        if self._closed or stream.worn:
            stream.end()
        if stream.usable:
            stream.rested = False
            self._idle.append(stream)
            if self._look is None:
                self._look = self._loop.call_later(IDLE, self._look_at_idle)
        else:
            self._streams.discard(stream)

    def _look_at_idle(self) -> None:
        for stream in self._idle:
            if stream.rested:
                stream.end()
                self._streams.discard(stream)
            stream.rested = True
        self._idle = [stream for stream in self._idle if stream.usable]
        self._look = self._loop.call_later(IDLE, self._look_at_idle) if self._idle else None


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, PIECE_NBYTES):
        yield start, min(PIECE_NBYTES, nbytes - start)


def _has_succeeded(way: asyncio.Future[Channel]) -> bool:
    return way.done() and not way.cancelled() and way.exception() is None


def _look_at(worker: asyncio.Task[None]) -> None:
    """Mark a worker's failure as seen: the pull raises one of them, and the loop would complain about the others."""
    if not worker.cancelled():
        worker.exception()
