"""Frames over a connected stream socket: the common part of connections on one host and between hosts.

The loop's readiness callbacks drive the socket, without an asyncio transport. A frame is sent by one ``send`` from the
buffer it was encoded in, and received by one ``recv_into`` into a buffer that is reused. So a batch costs two system
calls, and no allocation for each frame. asyncio and uvloop both have such callbacks.

A peer that ends with unread bytes leaves an error on our socket beside its last frames, and libuv's ``uv_poll`` stops
watching a socket with an error after one call. A second descriptor makes the end visible under uvloop too: an epoll
instance that becomes readable when the peer hangs up (EPOLLRDHUP, epoll_ctl(2)) and never has an error of its own. It
stays silent as long as the connection lives.

On a `SealedSocket` the same frames leave and arrive in sealed records (`zcactor.transport.stream.record_layer`).
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import functools
import os
import select
import termios
import threading
from typing import TYPE_CHECKING, Final

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.native import hot
from zcactor.transport.frames import LENGTH_PREFIX, Frames, PeerInfo, Receiver, is_of_sending
from zcactor.transport.stream.record_layer import SealedSocket

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["StreamConnection"]

RECEIVE_NBYTES: Final = 256 << 10
"""Bytes of the receive buffer, and the most that one system call receives. A larger buffer does not fit the cache, and
gains nothing."""
LAST_READS: Final = 64
"""Reads after sending has failed, for frames that the peer sent before. Bounded, because a peer that
closed only its reading side could go on sending for ever."""


class StreamConnection(Frames):
    """The frames of a connected and authenticated socket. A subclass adds access to the peer's bytes.

    Args:
        sock: non-blocking; belongs to the connection from here. Frames are encrypted where it is a `SealedSocket`.
        peer: the process at the other end.
        recv_depth: frames that each end may have outstanding; the same number at both ends.
        eager_limit: bytes; the same number at both ends.
        where: the place of the peer, which messages add to its process number.

    Raises:
        OSError: no descriptor is left (EMFILE). `sock` stays the caller's then.
    """

    lies_unread = True

    def __init__(
        self, sock: socket.socket, peer: PeerInfo, *, recv_depth: int, eager_limit: int, where: str = "",
    ) -> None:  # fmt: skip
        super().__init__(asyncio.get_running_loop(), peer, recv_depth, eager_limit)
        self.name += where
        self._sock = sock
        self._fd = sock.fileno()
        self._hangup = select.epoll(1)
        self._hangup.register(self._fd, select.EPOLLRDHUP)
        # Other threads ask, while the loop's closes, and so may a finalizer that runs inside of it.
        self._hangup_lock = threading.RLock()
        self._sealed = sock if isinstance(sock, SealedSocket) else None
        self._out = self._make_buffer()
        self._send_by(self._out)
        self._flush_out = self._out.flush
        self._reader: hot.Reader | None = None  # while the connection is open
        self._read: Callable[[], bool] = bool  # reads once; False where there was nothing, or the connection has ended
        self._drained = asyncio.Event()

    @property
    def sealed(self) -> bool:
        """See `zcactor.transport.base.Connection`."""
        return self._sealed is not None

    @property
    def seals_payloads(self) -> bool:
        """See `zcactor.transport.base.Connection`."""
        return self._sealed is not None

    def turns_behind(self) -> int:
        """See `zcactor.transport.base.Connection`. Each turn reads once."""
        unread = array.array("i", [0])
        if not self._lost:
            fcntl.ioctl(self._fd, termios.FIONREAD, unread)
        if not unread[0] and not self.hung_up():
            return 0
        return super().turns_behind() + unread[0] // (RECEIVE_NBYTES // 2)

    def hung_up(self) -> bool:
        """See `zcactor.transport.base.Connection`."""
        with self._hangup_lock:
            return self._hangup.closed or bool(self._hangup.poll(0))

    def __repr__(self) -> str:
        state = "closed" if self._lost else "closing" if self._closing else "open"
        return f"<{type(self).__name__} to {self.name}, {state}>"

    def _begin(self, receiver: Receiver) -> None:
        """Watch the socket. The native reader delivers frames to the receiver's `wire`, without a Python function in
        between."""
        opening = () if self._sealed is None else self._sealed.seals.opener.hand_over()
        self._reader = hot.Reader(
            self._fd, max(RECEIVE_NBYTES, self.max_frame + LENGTH_PREFIX), self.max_frame,
            getattr(receiver, "wire", None), receiver.frames_received, self._reading_ended, *opening,
        )  # fmt: skip
        self._read = self._make_read(self._reader)
        self._loop.add_reader(self._fd, self._read)
        self._loop.add_reader(self._hangup.fileno(), self._read)

    # ---- sending

    def flush(self) -> None:
        """Send all committed frames, by one system call where the peer keeps up. Never blocks."""
        try:
            if self._flush_out():
                self.send_stopped(None)
        except BaseException as error:
            self.send_stopped(error)

    def _sending_stopped(self, error: BaseException | None) -> None:
        if error is None:
            self._on_loop(self._watch_writable)
        else:
            self._on_loop(self._on_send_failed, error)

    def _on_loop(self, callback: Callable[..., object], *args: object) -> None:
        if threading.get_ident() == self._thread:
            self._loop.call_soon(callback, *args)
        else:
            self._loop.call_soon_threadsafe(callback, *args)

    def _watch_writable(self) -> None:
        if not self._lost:
            self._loop.add_writer(self._fd, self._on_writable)

    def _on_writable(self) -> None:
        try:
            if self._out.resume():
                self._loop.remove_writer(self._fd)
                self._drained.set()
        except BaseException as error:
            self._on_send_failed(error)
            if not is_of_sending(error):
                raise

    def _on_send_failed(self, error: BaseException) -> None:
        # Frames that the peer sent before its end can still be read, and may have the reason for the end.
        for _ in range(LAST_READS if self._receiver is not None else 0):
            if self._lost or not self._read():
                break
        self._lose(self._broken(error))

    # ---- receiving

    def _reading_ended(self, error: BaseException | None, from_receiver: bool) -> None:
        """End the connection after the reader: the socket has ended (None) or failed, or the receiver raised."""
        if error is None:
            self._lose(ConnectionLost(f"{self.name} closed the connection", maybe_executed=True))
        elif not from_receiver and isinstance(error, OSError):
            self._lose(self._broken(error))
        elif isinstance(error, ProtocolError):
            self._lose(error)
        else:  # a defect, which the loop's handler gets; frames were skipped, and callers would wait for ever
            self._lose(self._ended("has no receiver any more: it failed"))
            raise error

    # ---- ending

    async def aclose(self) -> None:
        """Send all committed frames, then close. `reserve` raises from the start. Idempotent.

        Frames that arrive meanwhile are delivered. Cancelling drops frames that were not sent, and closes at once.
        """
        if not self._lost:
            self._closing = True
            self._out.refuse(f"the connection to {self.name} is closing")
            try:
                self.flush()
                while self._is_pending() and not self._lost:
                    self._watch_writable()
                    self._drained.clear()
                    await self._drained.wait()
                if not self._lost:
                    await self._linger()
            finally:
                self._lose(None)
        await self._gone.wait()

    def abort(self) -> None:
        """Close at once and drop all bytes that were not sent. Idempotent.

        In a forked child it closes only the child's copy of the socket: loop and peer belong to the parent, and nothing
        is reported.
        """
        if os.getpid() != self._process:
            # Use neither the loop, as the parent shares its epoll set, nor a lock, as a thread may have held it.
            self._lost = True
            self._out.refuse("this connection belongs to the process that forked this one")
            self._hangup.close()
            self._sock.close()
            self._abandon()
        elif threading.get_ident() == self._thread:
            self._lose(None)
        else:
            self._loop.call_soon_threadsafe(self._lose, None)

    # ---- for subclasses

    def _make_buffer(self) -> hot.SendBuffer:
        """Make the native send buffer. It writes to the descriptor itself."""
        room = self.max_frame + LENGTH_PREFIX
        if self._sealed is None:
            return hot.SendBuffer(room, self._fd)
        return hot.SendBuffer(room, self._fd, None, *self._sealed.seals.sealer.hand_over())

    def _is_pending(self) -> bool:
        """Whether committed frames have not been given to the system."""
        return self._out.pending > 0

    def _make_read(self, reader: hot.Reader) -> Callable[[], bool]:
        """Make the function that reads once. The native reader reads from the descriptor itself."""
        return reader.readable

    async def _linger(self) -> None:
        """Wait until closing the socket loses no byte. Runs after the last byte was given to the system."""

    def _fence(self, then: Callable[[], None]) -> None:
        """Call `then`, at once or in a later turn of the loop, when nothing of the connection reads our arena any more.

        Runs once, on the loop, when the connection has ended, and before the receiver learns of the end: the receiver
        ends the peer's leases.
        """
        then()

    def _abandon(self) -> None:
        """Close copies of further descriptors in a forked child, without a lock and without the loop."""

    def _broken(self, error: BaseException) -> Exception:
        if isinstance(error, ProtocolError):  # from a socket that checks records
            return error
        lost = self._ended(f"broke: {(isinstance(error, OSError) and error.strerror) or repr(error)}")
        lost.__cause__ = error
        return lost

    def _ended(self, how: str) -> ConnectionLost:
        # This end cannot know which of the sent frames the peer has acted on.
        return ConnectionLost(f"the connection to {self.name} {how}", maybe_executed=True)

    def _lose(self, cause: Exception | None) -> None:
        """Close, and report the end in the loop's next turn. Only the first call has an effect."""
        if self._lost:
            return
        self._lost = True
        if self._reader is not None:
            self._reader.close()
        wire = getattr(self._receiver, "wire", None)
        if wire is not None:
            wire.look()
        self.unsent = self._out.unsent()
        self._out.close(f"the connection to {self.name} is closed")
        self._loop.remove_reader(self._fd)
        self._loop.remove_reader(self._hangup.fileno())
        self._loop.remove_writer(self._fd)
        with self._hangup_lock:
            self._hangup.close()
        self._sock.close()
        self._drained.set()
        self._fence(functools.partial(self._report_later, cause))

    def _report(self, cause: Exception | None) -> None:
        # These hold the receiver, and so the peer's arena, too.
        self._reader = None
        self._read = bool
        super()._report(cause)
