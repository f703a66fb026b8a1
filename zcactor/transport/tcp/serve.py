"""The owner's side of bulk bytes over TCP: answers to a peer's requests, straight from the arena.

A thread of the process's crew (`zcactor.transport.tcp.crew`) sends bytes from where they are mapped: the kernel copies
them into its buffers, which takes less time than to look up each page of the memfd. Few bytes, those with tags, and
those that this process has not mapped go by sendfile(2), from the arena's pages. The pages must not change before the
puller has the bytes. The puller's lease keeps them, the thread holds the leased object meanwhile, and
`DataServer.close` ends the sockets before the connection's end takes the lease away. A data socket without a request
for some time has no thread until the next one arrives (`Waiting`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import select
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ProtocolError
from zcactor.transport.stream.listener import Rebuff
from zcactor.transport.tcp import crew
from zcactor.transport.tcp import data as tcp_data
from zcactor.transport.tcp.authenticated import DataSeal, SealedChannel
from zcactor.transport.tcp.data import Channel

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from zcactor.transport.frames import Receiver
    from zcactor.transport.stream.record_layer import Seals

    Resume = Callable[[bool], object]
    """``resume(readable)``"""

__all__ = ["MAPPED_NBYTES", "MAX_CHANNELS", "DataServer", "Waiting", "until_readable"]


class Waiting:
    """Idle sockets, each with a function that is called once. There is a thread while there is such a socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None  # while there is a thread
        self._resume: dict[int, tuple[float, Resume]] = {}  # by descriptor, in the order of the calls

    def until_readable(self, fd: int, seconds: float, resume: Resume) -> None:
        """Have ``resume(True)`` called when `fd` has bytes or has ended, or ``resume(False)`` after so many seconds.

        `seconds` must be the same in all calls. The caller must not close `fd` before. `resume` runs in the one thread,
        and must neither raise nor block. Any thread may call this.

        Raises:
            OSError: no descriptor or no thread is left; `resume` is never called then.
        """
        with self._lock:
            begins = self._epoll is None
            epoll = self._epoll = self._epoll or select.epoll()
            self._resume[fd] = time.monotonic() + seconds, resume
            try:
                if begins:
                    crew.run(self._wait)
                epoll.register(fd, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT)
            except (OSError, crew.NoThread) as error:
                del self._resume[fd]
                if begins and isinstance(error, crew.NoThread):
                    self._end()
                raise OSError(*error.args) from error

    def forget(self) -> None:
        """Close a forked child's copy of the descriptor, without the lock that a thread may have held."""
        self._end()

    def _end(self) -> None:
        epoll, self._epoll = self._epoll, None
        if epoll is not None:
            epoll.close()

    def _wait(self) -> None:
        epoll = self._epoll
        assert epoll is not None
        pause = 0.0
        while True:
            found = {fd for fd, _ in epoll.poll(pause)}
            with self._lock:
                now = time.monotonic()
                late = [fd for fd, (until, _) in self._resume.items() if until <= now and fd not in found]
                calls = [(self._taken(fd), True) for fd in found] + [(self._taken(fd), False) for fd in late]
                if not self._resume:
                    self._end()
                pause = min((until for until, _ in self._resume.values()), default=now) - now
            for resume, readable in calls:
                resume(readable)
            del calls
            if self._epoll is not epoll:
                return

    def _taken(self, fd: int) -> Resume:
        assert self._epoll is not None
        with contextlib.suppress(FileNotFoundError):
            self._epoll.unregister(fd)
        return self._resume.pop(fd)[1]


_waiting = Waiting()


def until_readable(fd: int, seconds: float, resume: Resume) -> None:
    """Call `Waiting.until_readable` of the process's own instance."""
    _waiting.until_readable(fd, seconds, resume)


def _forked() -> None:
    """Replace the instance in a forked child, which has no such thread. The epoll instance belongs to the parent, so
    its copy is only closed."""
    global _waiting
    gone, _waiting = _waiting, Waiting()
    gone.forget()


os.register_at_fork(after_in_child=_forked)


MAX_CHANNELS: Final = 16
"""The most data sockets, and threads, of one connection: four times as many as a puller uses, as cancelled ones may
still be open."""
MAPPED_NBYTES: Final = 256 << 10
"""Bytes from which an answer is sent from where they are mapped. Sendfile takes half as long again at 1 MiB, and twice
as long or more at 16 MiB."""
LINGER: Final = 0.02
"""Seconds that a thread waits for the next request before it leaves the data socket. Waiting saves 100 us for the next
request, and takes an idle thread for that time."""


_rebuff = Rebuff("closed a data socket")


class DataServer:
    """The answers to requests of one connection's data sockets. The connection keeps the server. Its methods run on the
    loop's thread.

    Args:
        process: the peer's name.
        arena_fd: the memfd of this process's arena; stays the caller's. None for a process without an arena.
        arena_nbytes: bytes of the arena.
        authorize: ``authorize(receiver, object_id, offset, nbytes)``: returns an object that keeps these bytes, which
            lie inside the arena, while they are sent. None (or False) where the peer may not read them. An object with
            an `address` and an `offset` also keeps the arena mapped from that offset on at that address. Called from
            serving threads, under no lock.
        channel: the class of data sockets where frames are not encrypted.
        seals: the keys of the connection where frames are encrypted; the keys of data sockets come from them.
        arena: returns the bytes of the arena, which are read only where they are authenticated.

    Attributes:
        receiver: the receiver of the connection, once there is one.
        offered: takes data sockets that the peer has opened for the pulls of this process; set by the connection.
        seals: as the argument.
    """

    def __init__(
        self,
        process: bytes,
        arena_fd: int | None,
        arena_nbytes: int,
        authorize: Callable[[Receiver | None, int, int, int], object],
        channel: Callable[[socket.socket], Channel] = Channel,
        seals: Seals | None = None,
        arena: Callable[[], memoryview] | None = None,
    ) -> None:
        self._channel = channel
        self.seals = seals
        self._arena = arena
        self.process = process
        self.receiver: Receiver | None = None
        self.offered: Callable[[Channel], None] | None = None
        self._arena_fd = arena_fd
        self._arena_nbytes = arena_nbytes
        self._authorize = authorize
        self._loop = asyncio.get_running_loop()
        self._channels: set[Channel] = set()
        self._closed = False
        self._then: Callable[[], None] | None = None

    @property
    def full(self) -> bool:
        """Whether `adopt` must not be called: there are `MAX_CHANNELS` data sockets, or the connection has ended."""
        return self._closed or len(self._channels) >= MAX_CHANNELS

    def adopt(self, sock: socket.socket, occasion: bytes = b"") -> None:
        """Serve a data socket, which belongs to the server from here.

        Args:
            sock: authenticated.
            occasion: bytes that its keys are derived from, beside the keys of the connection.

        Raises:
            OSError: no descriptor or no thread is left; `sock` stays the caller's.
        """
        if self.full:
            raise BlockingIOError(errno.EAGAIN, "no further data socket is allowed")
        # A thread may outlive the connection, so it reads from a descriptor of its own.
        arena = -1 if self._arena_fd is None else os.dup(self._arena_fd)
        with contextlib.ExitStack() as undo:
            if arena >= 0:
                undo.callback(os.close, arena)
            if self.seals is None:
                channel = self._channel(sock)
            else:
                channel = SealedChannel(sock, DataSeal.of(self.seals, occasion), self._arena and self._arena())
            try:
                crew.run(partial(self._serve, channel, arena))
            except crew.NoThread as error:
                raise BlockingIOError(errno.EAGAIN, "no thread is left for a data socket") from error
            undo.pop_all()
        self._channels.add(channel)

    def close(self, then: Callable[[], None]) -> None:
        """End all data sockets. Calls `then` on the loop once no thread reads the arena for this peer any more."""
        self._closed = True
        self.receiver = None
        self._then = then
        for channel in self._channels:
            channel.end()
        self._finish()

    def abandon(self) -> None:
        """Close a forked child's copies of the sockets."""
        for channel in self._channels:
            channel.abandon()

    def _finish(self) -> None:
        if self._then is not None and not self._channels:
            then, self._then = self._then, None
            then()

    def _ended(self, channel: Channel) -> None:
        self._channels.discard(channel)
        self._finish()

    # ---- in a thread of the crew

    def _serve(self, channel: Channel, arena: int) -> None:
        goes_on = False
        try:
            while not (goes_on := not channel.wait(LINGER)):
                request = channel.asked()
                if request is None:
                    break
                self._answer(channel, arena, *request)
            if goes_on:
                resume = partial(self._resume, channel, arena)
                until_readable(channel.sock.fileno(), tcp_data.PATIENCE, resume)
        except OSError:
            goes_on = False  # the peer has ended or closed the socket; the control connection reports which
        except ProtocolError as error:
            goes_on = False
            _rebuff.report(time.monotonic(), error)
        finally:
            if not goes_on:
                self._give_up(channel, arena)

    def _resume(self, channel: Channel, arena: int, readable: bool) -> None:
        """Continue after the wait for the next request. `readable` is False where it was too long."""
        try:
            if readable:
                crew.run(partial(self._serve, channel, arena))
                return
        except crew.NoThread:
            pass  # the peer tries again on another data socket
        self._give_up(channel, arena)

    def _give_up(self, channel: Channel, arena: int) -> None:
        channel.close()
        if arena >= 0:
            os.close(arena)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
            self._loop.call_soon_threadsafe(self._ended, channel)

    def _answer(self, channel: Channel, arena: int, object_id: int, offset: int, nbytes: int) -> None:
        inside = nbytes > 0 and offset + nbytes <= self._arena_nbytes
        held: Any = self._authorize(self.receiver, object_id, offset, nbytes) if inside else None
        if not held:
            channel.refuse()
            return
        address = getattr(held, "address", None) if nbytes >= MAPPED_NBYTES else None
        if address is None:
            channel.give(arena)
        else:
            low = address + offset - held.offset
            channel.give(arena, memoryview((ctypes.c_char * nbytes).from_address(low)).cast("B"))
