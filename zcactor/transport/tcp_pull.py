"""The puller's side of bulk bytes over TCP: data sockets, one at first, and pulls that share them.

Each data socket has a thread, which receives straight into the memory that the bytes are for. A pull that is given up
ends its socket, so that the thread cannot go on; the memory is held until the thread has noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import queue
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.errors import ConnectionLost, ObjectLost
from zcactor.transport.tcp_data import REQUEST, Answer, Channel

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Iterator

    from zcactor.transport.base import RemoteRegion

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


class _Job(msgspec.Struct, eq=False):
    """A request, and the memory that its bytes go to."""

    object_id: int
    offset: int
    nbytes: int
    address: int
    keep: object
    done: asyncio.Future[bool]
    """Whether the owner sent them; an `OSError` when the socket broke."""


class _Destination(msgspec.Struct, eq=False):
    """Where a pull's bytes go. What keeps the memory is taken out when the pull has ended: the frames of an exception
    that somebody keeps shall not keep the memory."""

    address: int
    keep: object


class _Stream:
    """A data socket and its thread. Its methods are called on the loop's thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._received = 0
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.usable = True
        """Whether the next request can be sent."""
        threading.Thread(target=self._run, name="zcactor data puller", daemon=True).start()

    async def fetch(self, object_id: int, offset: int, nbytes: int, start: int, destination: _Destination) -> bool:
        """Whether the owner sent the bytes, which go to `start` of the destination. Cancelling ends the stream; the
        memory is held until its thread has ended.

        Raises:
            OSError: the stream broke or was ended.
        """
        done: asyncio.Future[bool] = self._loop.create_future()
        self._jobs.put(_Job(object_id, offset, nbytes, destination.address + start, destination.keep, done))
        fetched = False
        try:
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
        return self._received >= self._channel.lasts

    def end(self) -> None:
        """Let the thread end, at once. Idempotent."""
        if self.usable:
            self.usable = False
            self._channel.end()
            self._jobs.put(None)

    def abandon(self) -> None:
        """In a forked child, which has no such thread."""
        self._channel.abandon()

    def _finish(self, job: _Job, answer: bool, error: OSError | None) -> None:
        job.keep = None  # the thread's exception has a frame that holds the job
        if job.done.done():
            return  # given up
        if error is None:
            job.done.set_result(answer)
        else:
            job.done.set_exception(error)

    # ---- in the thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            answer, broken = False, None
            try:
                answer = self._fetch(job)
            except OSError as error:
                broken = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._finish, job, answer, broken)
            job = broken = None  # not held while this waits
        self._channel.close()

    def _fetch(self, job: _Job) -> bool:
        channel = self._channel
        channel.send(REQUEST.pack(job.object_id, job.offset, job.nbytes))
        answer = bytearray(1)
        if not channel.receive(memoryview(answer)):
            raise ConnectionResetError("the owner closed the data socket")
        if answer[0] != Answer.OK:
            return False
        destination = memoryview((ctypes.c_char * job.nbytes).from_address(job.address)).cast("B")
        if not channel.receive(destination):
            raise ConnectionResetError("the owner closed the data socket")
        channel.check_alive()
        return True


class DataPuller:
    """Brings bytes of one peer's arena here. Its methods are called on the loop's thread.

    Args:
        name: the peer, for messages.
        connect: gives a data socket, connected and authenticated, that is the puller's from there.
        channel: what a data socket becomes.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[socket.socket]],
        channel: Callable[[socket.socket], Channel] = Channel,
    ) -> None:
        self._channel = channel
        self._name = name
        self._connect = connect
        self._turns = asyncio.Semaphore(STREAMS)
        self._streams: set[_Stream] = set()
        self._idle: list[_Stream] = []
        self._pulls: set[asyncio.Timeout] = set()
        self._closed = False

    async def pull(self, region: RemoteRegion, address: int, keep: object) -> None:
        """As `Connection.pull`; the bounds have been checked. Cancelling leaves other pulls alone.

        Raises:
            ConnectionLost: `close` was called, or the owner cannot be reached.
            ObjectLost: the owner refused.
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
        for stream in self._idle:
            stream.end()
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
                    answer = await stream.fetch(region.object_id, region.offset + start, nbytes, start, destination)
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
        sock = await self._socket()
        try:
            stream = _Stream(self._channel(sock))
        except RuntimeError as error:
            sock.close()
            raise ConnectionLost(f"no thread is left to pull from {self._name}") from error
        self._streams.add(stream)
        return stream

    async def _socket(self) -> socket.socket:
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
            self._idle.append(stream)
        else:
            self._streams.discard(stream)


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, PIECE_NBYTES):
        yield start, min(PIECE_NBYTES, nbytes - start)


def _look_at(worker: asyncio.Task[None]) -> None:
    """One failure is raised; the loop need not complain that nobody asked for the others."""
    if not worker.cancelled():
        worker.exception()
