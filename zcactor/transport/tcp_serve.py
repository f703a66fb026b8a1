"""The owner's side of bulk bytes over TCP: a peer's requests are answered straight from the arena's memfd.

A thread of the process's crew (`zcactor.transport.crew`) sends by sendfile(2): the bytes go from the arena's pages into
the network without passing through this process's address space. The pages themselves are what is sent, so they must
not change before the puller has the bytes: its lease sees to that, the thread, which holds what is leased meanwhile,
and `DataServer.close`, before the lease ends by force. A data socket without a request for some time has no thread
until the next one comes (`zcactor.transport.waiting`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from zcactor.errors import ProtocolError
from zcactor.transport import crew, tcp_data, waiting
from zcactor.transport.listener import Rebuff
from zcactor.transport.tcp_data import Channel
from zcactor.transport.tcp_sealed import DataSeal, SealedChannel

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from zcactor.transport.base import Receiver
    from zcactor.transport.sealing import Seals

__all__ = ["MAX_CHANNELS", "DataServer"]

MAX_CHANNELS: Final = 16
"""Data sockets of one connection, and threads: four times what a puller uses, as those that it gave up may linger."""
LINGER: Final = 0.02
"""Seconds that a thread waits for the next request before it leaves the data socket. Going on at once saves 100 us, and
so long a thread is there though nothing is sent."""


_rebuff = Rebuff("closed a data socket")


class DataServer:
    """Answers the requests that belong to one connection, which keeps it alive; called on the loop's thread.

    Args:
        process: the peer's name.
        arena_fd: this process's memfd; stays the caller's. None for a process without an arena.
        arena_nbytes: its size.
        authorize: ``authorize(receiver, object_id, offset, nbytes)``: what keeps these bytes, which lie inside the
            arena, while they are sent; nothing (or False) where the peer may not have them. Called from serving
            threads, under no lock.
        channel: what a data socket becomes, where frames are not sealed.
        seals: the connection's, where they are; data sockets have keys of their own then.
        arena: the arena's bytes, to be read only where they are authenticated.

    Attributes:
        receiver: the connection's, once there is one.
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
        self._seals = seals
        self._arena = arena
        self.process = process
        self.receiver: Receiver | None = None
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
            occasion: what its keys are made of beside the connection's, where frames are sealed.

        Raises:
            OSError: no descriptor or no thread is left; `sock` stays the caller's.
        """
        if self.full:
            raise BlockingIOError(errno.EAGAIN, "no further data socket is allowed")
        # a thread may outlive what its caller knows of, so it reads from a descriptor of its own
        arena = -1 if self._arena_fd is None else os.dup(self._arena_fd)
        with contextlib.ExitStack() as undo:
            if arena >= 0:
                undo.callback(os.close, arena)
            if self._seals is None:
                channel = self._channel(sock)
            else:
                channel = SealedChannel(sock, DataSeal.of(self._seals, occasion), self._arena and self._arena())
            try:
                crew.run(partial(self._serve, channel, arena))
            except crew.NoThread as error:
                raise BlockingIOError(errno.EAGAIN, "no thread is left for a data socket") from error
            undo.pop_all()
        self._channels.add(channel)

    def close(self, then: Callable[[], None]) -> None:
        """End all data sockets; `then` is called on the loop once no thread reads the arena for this peer any more."""
        self._closed = True
        self.receiver = None
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
                waiting.until_readable(channel.sock.fileno(), tcp_data.PATIENCE, resume)
        except OSError:
            goes_on = False  # the peer is gone, or wants nothing more: the control connection says what there is to say
        except ProtocolError as error:
            goes_on = False
            _rebuff.report(time.monotonic(), error)
        finally:
            if not goes_on:
                self._give_up(channel, arena)

    def _resume(self, channel: Channel, arena: int, readable: bool) -> None:
        """Called by who waited for the next request: whether it is there, or the stream's end."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._ended, channel)

    def _answer(self, channel: Channel, arena: int, object_id: int, offset: int, nbytes: int) -> None:
        inside = nbytes > 0 and offset + nbytes <= self._arena_nbytes
        held = self._authorize(self.receiver, object_id, offset, nbytes) if inside else None
        if not held:
            channel.refuse()
        else:
            channel.give(arena)
