"""The owner's side of bulk bytes over TCP: a peer's requests are answered straight from the arena's memfd.

Each data socket has a thread that sends by sendfile(2): the bytes go from the arena's pages into the network without
passing through this process's address space. The pages themselves are what is sent, so they must not change before the
puller has the bytes: its lease sees to that, and `DataServer.close`, before the lease ends by force.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING, Final

from zcactor.transport.tcp_data import REQUEST, Answer, Channel

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["MAX_CHANNELS", "DataServer"]

MAX_CHANNELS: Final = 16
"""Data sockets of one connection, and threads: four times what a puller uses, as those that it gave up may linger."""


class DataServer:
    """Answers the requests that belong to one connection, which keeps it alive; called on the loop's thread.

    Args:
        process: the peer's name.
        arena_fd: this process's memfd; stays the caller's. None for a process without an arena.
        arena_nbytes: its size.
        authorize: ``authorize(process, object_id, offset, nbytes)``: whether the peer may have these bytes, which lie
            inside the arena. Called from serving threads, under no lock.
        channel: what a data socket becomes.
    """

    def __init__(
        self,
        process: bytes,
        arena_fd: int | None,
        arena_nbytes: int,
        authorize: Callable[[bytes, int, int, int], bool],
        channel: Callable[[socket.socket], Channel] = Channel,
    ) -> None:
        self._channel = channel
        self.process = process
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

    def adopt(self, sock: socket.socket) -> None:
        """Serve a data socket, which belongs to the server from here.

        Raises:
            OSError: no descriptor or no thread is left; `sock` stays the caller's.
        """
        if self.full:
            raise BlockingIOError(errno.EAGAIN, "no further data socket is allowed")
        # a thread may outlive what its caller knows of, so it reads from a descriptor of its own
        arena = -1 if self._arena_fd is None else os.dup(self._arena_fd)
        channel = self._channel(sock)
        try:
            threading.Thread(target=self._serve, args=(channel, arena), name="zcactor data server", daemon=True).start()
        except RuntimeError as error:
            if arena >= 0:
                os.close(arena)
            raise BlockingIOError(errno.EAGAIN, "no thread is left for a data socket") from error
        self._channels.add(channel)

    def close(self, then: Callable[[], None]) -> None:
        """End all data sockets; `then` is called on the loop once no thread reads the arena for this peer any more."""
        self._closed = True
        self._then = then
        for channel in self._channels:
            channel.end()
        self._finish()

    def abandon(self) -> None:
        """In a forked child: close its copies of the sockets."""
        for channel in self._channels:
            channel.abandon()

    def _finish(self) -> None:
        if self._then is not None and not self._channels:
            then, self._then = self._then, None
            then()

    def _ended(self, channel: Channel) -> None:
        self._channels.discard(channel)
        self._finish()

    # ---- in the thread of one data socket

    def _serve(self, channel: Channel, arena: int) -> None:
        request = memoryview(bytearray(REQUEST.size))
        try:
            while channel.receive(request):
                self._answer(channel, arena, *REQUEST.unpack(request))
        except OSError:
            pass  # the peer is gone, or wants nothing more: the control connection says what there is to say
        finally:
            channel.close()
            if arena >= 0:
                os.close(arena)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._ended, channel)

    def _answer(self, channel: Channel, arena: int, object_id: int, offset: int, nbytes: int) -> None:
        inside = nbytes > 0 and offset + nbytes <= self._arena_nbytes
        if not inside or not self._authorize(self.process, object_id, offset, nbytes):
            channel.send(bytes((Answer.REFUSED,)))
            return
        channel.send(bytes((Answer.OK,)), more=True)
        channel.send_file(arena, offset, nbytes)
