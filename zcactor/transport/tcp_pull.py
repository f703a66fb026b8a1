"""The puller's side of bulk bytes over TCP: data sockets, one at first, and pulls that share them.

While bytes come on a data socket a thread of the process's crew (`zcactor.transport.crew`) receives them straight into
the memory that they are for. A pull that is given up ends its socket, so that the thread cannot go on; the memory is
held until the thread has noticed. A data socket that nobody has used for a while is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.transport import crew

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from zcactor.transport.base import RemoteRegion
    from zcactor.transport.tcp_data import Channel

__all__ = ["DataPuller"]

STREAMS: Final = 4
"""Data sockets of one connection. One TCP stream is bound by one core at either end; beyond four the memory is."""
PARALLEL_NBYTES: Final = 64 << 20
"""Objects from this size on come over several streams: some 20 ms, against which opening a socket is little."""
PIECE_NBYTES: Final = 16 << 20
"""What a stream of several brings at once, some milliseconds long: a small pull waits no longer for a big one."""
ATTEMPTS: Final = 2
"""How often a piece is asked for on a new socket. One that breaks although the connection lives is no reason to give
up: the system breaks it when this process is stopped for some seconds. And how often a socket is asked for: the owner
may have too many handshakes to do for the moment."""
PAUSE: Final = 0.25
"""Seconds until a socket that could not be had is asked for again."""
IDLE: Final = 20.0
"""Seconds between two looks at data sockets that nobody uses: one that lay idle from one look to the next is closed. So
it ends before the owner's patience does (`zcactor.transport.tcp_data.PATIENCE`)."""


class _Destination(msgspec.Struct, eq=False):
    """Where a pull's bytes go. What keeps the memory is taken out when the pull has ended: the frames of an exception
    that somebody keeps shall not keep the memory."""

    address: int
    keep: object


class _Stream:
    """A data socket, and a thread of the process's crew while bytes come. Called on the loop's thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._received = 0
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._working = False  # whether a thread has the channel; who finds it False when all is over closes it
        self.usable = True
        """Whether the next request can be sent."""
        self.rested = False
        """Whether nothing was asked of it for some time."""

    async def fetch(self, region: RemoteRegion, start: int, nbytes: int, destination: _Destination) -> bool:
        """Whether the owner sent `nbytes` of the region from `start` on, which go to the same place of the destination.
        Cancelling ends the stream; the memory is held until its thread has ended.

        Raises:
            OSError: the stream broke or was ended.
            ProtocolError: the owner, or somebody on the way, sent what it should not.
            NoThread: the system has no thread left.
            Exception: whatever else was raised in the thread.
        """
        done: asyncio.Future[bool] = self._loop.create_future()
        work = _Work(self, done, region, start, nbytes, destination.address + start, destination.keep)
        fetched = False
        try:
            with self._lock:
                self._working = True
            try:
                crew.run(work)
            except crew.NoThread:
                self._working = False
                raise
            del work
            answer = await done
            fetched = True
            self._received += nbytes
            return answer
        finally:
            if not fetched:
                self.end()

    @property
    def worn(self) -> bool:
        """Whether it has carried as much as its channel lasts."""
        return self._received >= self._channel.lasts or self._channel.worn

    def end(self) -> None:
        """Have its thread return, at once, and close it. Idempotent."""
        with self._lock:
            self.usable = False
            if self._working:
                self._channel.end()
            else:
                self._channel.close()

    def abandon(self) -> None:
        """In a forked child, which has no such thread."""
        self._channel.abandon()

    # ---- in the thread

    def receive(self, region: RemoteRegion, start: int, nbytes: int, address: int) -> bool:
        """Whether the owner gave the bytes, which are at `address` then.

        Raises:
            OSError, ProtocolError: as `fetch`.
        """
        channel = self._channel
        channel.ask(
            region.object_id, region.offset + start, nbytes, authenticate=region.authenticate, sealed=region.sealed
        )
        if not channel.answered():
            return False
        channel.take(memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"))
        channel.check_alive()
        return True

    def leave(self, done: asyncio.Future[bool], answer: bool, error: BaseException | None) -> None:
        """The thread is done with the channel: tell how that went."""
        with self._lock:
            self._working = False
            if not self.usable:
                self._channel.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(_finish, done, answer, error)


class _Work:
    """One request, to be called in a thread. Holds the memory that its bytes go to until they have come or cannot."""

    def __init__(
        self, stream: _Stream, done: asyncio.Future[bool], region: RemoteRegion, start: int, nbytes: int, address: int,
        keep: object,
    ) -> None:  # fmt: skip
        self._stream = stream
        self._done = done
        self._wanted = region, start, nbytes, address
        self._keep = keep

    def __call__(self) -> None:
        answer, failure = False, None
        try:
            answer = self._stream.receive(*self._wanted)
        except BaseException as error:
            failure = error
        self._keep = None  # the frames of the exception hold this
        self._stream.leave(self._done, answer, failure)
        failure = None  # its traceback has this frame


def _finish(done: asyncio.Future[bool], answer: bool, error: BaseException | None) -> None:
    if done.done():
        return  # given up
    if error is None:
        done.set_result(answer)
    else:
        done.set_exception(error)


class DataPuller:
    """Brings bytes of one peer's arena here. Its methods are called on the loop's thread.

    Args:
        name: the peer, for messages.
        connect: gives a data socket, connected and authenticated, that is the puller's from there.
        violated: called with what a data socket raised because of what came on it that should not; the pull raises it
            afterwards.
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
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._look: asyncio.TimerHandle | None = None  # at those that lie idle, where there are any

    async def pull(self, region: RemoteRegion, address: int, keep: object) -> None:
        """As `Connection.pull`; the bounds have been checked. Cancelling leaves other pulls alone.

        Raises:
            ConnectionLost: `close` was called, or the owner cannot be reached.
            ObjectLost: the owner refused.
            ProtocolError: what came is not from the owner.
            AuthenticationError: another process answers at the owner's address.
        """
        if self._closed:
            raise self._lost()
        destination = _Destination(address, keep)
        del keep
        try:
            async with asyncio.timeout(None) as interruption:
                self._pulls.add(interruption)
                await self._pull(region, destination)
        except TimeoutError:
            raise self._lost() from None
        finally:
            destination.keep = None
            self._pulls.discard(interruption)

    def close(self) -> None:
        """Interrupt all pulls and end all streams; nothing waits for their threads. Idempotent."""
        self._closed = True
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
        """In a forked child: close its copies of the sockets."""
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
        # A task group would do, but its exceptions refer to themselves, and keep what the caller's frames hold.
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
                    # one that lay idle may have been closed by the owner; the others are soon used up
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
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._connect()
            except ConnectionLost:  # and not what trying again does not change
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


def _look_at(worker: asyncio.Task[None]) -> None:
    """One failure is raised; the loop need not complain that nobody asked for the others."""
    if not worker.cancelled():
        worker.exception()
