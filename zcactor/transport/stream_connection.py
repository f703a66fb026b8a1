"""Frames over a connected stream socket: what connections on one host and between hosts have in common.

The socket is driven directly by the loop's readiness callbacks, not through an asyncio transport: a frame goes out by
one ``send`` from the buffer it was encoded in and comes in by one ``recv_into`` into a buffer that is reused, so that a
batch costs two system calls and no allocation per frame. asyncio and uvloop both offer what this needs.

A peer that ends with unread bytes leaves an error on our socket beside its last frames, and libuv's ``uv_poll`` stops
watching a socket with an error after one call. So that the end is noticed under uvloop too, a second descriptor is
watched: an epoll instance that becomes readable when the peer hangs up (EPOLLRDHUP, epoll_ctl(2)) and never has an
error of its own. It does nothing as long as the connection lives.

On a `SealedSocket` the same frames leave and arrive in sealed records (`zcactor.transport.sealing`).
"""

from __future__ import annotations

import asyncio
import functools
import os
import select
import struct
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.native import hot
from zcactor.transport.base import LENGTH_PREFIX, PeerInfo, Receiver
from zcactor.transport.delivering import Delivering
from zcactor.transport.framing import max_frame_for, whole_frames
from zcactor.transport.sealing import SealedReader, SealedSocket
from zcactor.transport.sendbuffer import SendBuffer

if TYPE_CHECKING:
    import socket
    from collections import abc
    from collections.abc import Callable

__all__ = ["StreamConnection"]

RECEIVE_NBYTES: Final = 256 << 10
"""Bytes of the receive buffer: what one system call can bring. Larger gains nothing, the cache holds it no more."""
LAST_READS: Final = 64
"""How often a connection that cannot send any more still reads what the peer sent before. Bounded, because a peer that
only closed its reading side could go on for ever."""

_unpack_length = struct.Struct("<I").unpack_from


class _Reserve(Protocol):
    def __call__(self, nbytes: int) -> tuple[bytearray, int]: ...


class _Commit(Protocol):
    def __call__(self, nbytes: int) -> None: ...


class StreamConnection(Delivering):
    """The frames of a connected and authenticated socket; a subclass adds how the peer's bytes are reached.

    Args:
        sock: non-blocking; belongs to the connection from here. Frames are sealed where it is a `SealedSocket`.
        peer: who is at the other end.
        recv_depth: frames either side may have outstanding, the same number on both.
        eager_limit: bytes, the same number on both.
        where: added to the peer's process number in messages, where that says too little.

    Raises:
        OSError: no descriptor is left (EMFILE); `sock` stays the caller's.
    """

    native: ClassVar[bool] = True
    """Whether frames may take the native way, which reads and writes the descriptor itself."""
    export: Callable[[int, int, int], tuple[int, int]] | None = None

    def __init__(
        self, sock: socket.socket, peer: PeerInfo, *, recv_depth: int, eager_limit: int, where: str = ""
    ) -> None:
        super().__init__(asyncio.get_running_loop())
        self.peer = peer
        self.rejected: abc.Mapping[str, str] = {}
        self.name = f"process {peer.pid}{where}"
        """The peer, as messages call it."""
        self.recv_depth = recv_depth
        self.eager_limit = eager_limit
        self.max_frame = max_frame_for(eager_limit)
        self._sock = sock
        self._fd = sock.fileno()
        self._hangup = select.epoll(1)
        self._hangup.register(self._fd, select.EPOLLRDHUP)
        self._recv_into = sock.recv_into
        self._sealed = sock if isinstance(sock, SealedSocket) else None
        self._hot = hot if self.native else None
        self.native_out: Any = None
        """The native send buffer, where there is one: whoever writes whole frames may do so without `reserve`."""
        self._out: Any
        if self._hot is None:
            send = sock.send if self._sealed is None else self._sealed.send_record
            self._out = SendBuffer(self.max_frame + LENGTH_PREFIX, send)
        else:
            sealing = () if self._sealed is None else (None, *self._sealed.seals.sealer.hand_over())
            self._out = self.native_out = self._hot.SendBuffer(self.max_frame + LENGTH_PREFIX, sock.fileno(), *sealing)
        # bound here because the rpc layer calls them for every frame: one call less each
        self.reserve: _Reserve = self._out.reserve
        self.commit: _Commit = self._out.commit
        self._flush_out = self._out.flush
        self._reader: Any = None  # native, while the connection is open; where there is one, the three below go unused
        self._read: Callable[[], bool] = self._on_readable
        self._in = bytearray(0 if self._hot is not None else max(RECEIVE_NBYTES, self.max_frame + LENGTH_PREFIX))
        self._in_view = memoryview(self._in)
        self._filled = 0  # bytes at the start of _in: the beginning of a frame
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._drained = asyncio.Event()

    @property
    def sealed(self) -> bool:
        """Whether nobody on the way can read or change the frames."""
        return self._sealed is not None

    @property
    def seals_payloads(self) -> bool:
        """See `zcactor.transport.base.Connection`."""
        return self._sealed is not None

    def __repr__(self) -> str:
        state = "closed" if self._lost else "closing" if self._closing else "open"
        return f"<{type(self).__name__} to {self.name}, {state}>"

    def _begin(self, receiver: Receiver) -> None:
        """Watch the socket. A receiver whose `wire` is a native one gets its frames there, without a Python function
        in between."""
        if self._hot is not None:
            opening = () if self._sealed is None else self._sealed.seals.opener.hand_over()
            self._reader = self._hot.Reader(
                self._fd, max(RECEIVE_NBYTES, self.max_frame + LENGTH_PREFIX), self.max_frame,
                getattr(receiver, "wire", None), receiver.frames_received, self._reading_ended, *opening,
            )  # fmt: skip
            self._read = self._reader.readable
        elif self._sealed is not None:
            self._read = SealedReader(self._sealed, self._feed, self._reading_ended).readable
        self._loop.add_reader(self._fd, self._read)
        self._loop.add_reader(self._hangup.fileno(), self._read)

    # ---- sending

    def flush(self) -> None:
        """Hand over what is committed, by one system call where the peer keeps up. Never blocks."""
        try:
            if self._flush_out():
                self.send_blocked()
        except OSError as error:
            self.send_failed(error)

    def send_blocked(self) -> None:
        """The socket is full: go on when it is not."""
        self._on_loop(self._watch_writable)

    def send_failed(self, error: OSError) -> None:
        """The socket is broken."""
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
        except OSError as error:
            self._on_send_failed(error)

    def _on_send_failed(self, error: OSError) -> None:
        # What the peer sent before it went away is still there, and may say why it went.
        for _ in range(LAST_READS if self._receiver is not None else 0):
            if self._lost or not self._read():
                break
        self._lose(self._broken(error))

    # ---- receiving

    def _on_readable(self) -> bool:
        """Read once and deliver. False when there was nothing to read, or the connection ended."""
        filled = self._filled
        try:
            received = self._recv_into(self._in_view[filled:] if filled else self._in)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(self._broken(error))
            return False
        if received == 0:
            self._lose(ConnectionLost(f"{self.name} closed the connection", maybe_executed=True))
            return False
        return self._deliver(filled + received)

    def _feed(self, plain: bytes) -> bool:
        """Deliver what a record held. False when the connection ended."""
        view, at = self._in_view, 0
        while at < len(plain) and not self._lost:
            filled = self._filled
            part = plain[at : at + len(view) - filled]
            view[filled : filled + len(part)] = part
            at += len(part)
            self._deliver(filled + len(part))
        return not self._lost

    def _deliver(self, end: int) -> bool:
        """Deliver the whole frames in the first `end` bytes that came in. False when the connection ended."""
        # one whole frame, which is what a process that waits for an answer gets: no need to look for more
        done = 0
        if LENGTH_PREFIX <= end <= self.max_frame and _unpack_length(self._in)[0] + LENGTH_PREFIX == end:
            done = end
        view, receiver = self._in_view, self._receiver
        delivered = False
        try:
            while receiver is not None and (done or (done := whole_frames(self._in, end, self.max_frame))):
                receiver.frames_received(view[:done])
                if done == end or self._lost:
                    end = 0
                    break
                end -= done
                view[:end] = view[done : done + end]
                done = 0
            delivered = True
        except ProtocolError as error:
            self._lose(error)
        finally:
            # Anything else is a defect of the receiver and goes on to the loop's exception handler. Frames were
            # skipped, for whose answers callers would wait for ever, so the connection ends all the same.
            if not delivered:
                self._lose(self._ended("has no receiver any more: it failed"))
        self._filled = end
        return not self._lost

    def _reading_ended(self, error: BaseException | None, from_receiver: bool) -> None:
        """The native reader can or may not go on: the socket has ended (None) or failed, or the receiver raised."""
        if error is None:
            self._lose(ConnectionLost(f"{self.name} closed the connection", maybe_executed=True))
        elif not from_receiver and isinstance(error, OSError):
            self._lose(self._broken(error))
        elif isinstance(error, ProtocolError):
            self._lose(error)
        else:  # as in `_on_readable`
            self._lose(self._ended("has no receiver any more: it failed"))
            raise error

    # ---- ending

    async def aclose(self) -> None:
        """Send what is committed, then close; `reserve` refuses from the first moment. Idempotent.

        Frames that arrive meanwhile are still delivered. Cancelling drops what was not sent and closes at once.
        """
        if not self._lost:
            self._closing = True
            self._out.refuse(f"the connection to {self.name} is closing")
            self.flush()
            try:
                while self._out.pending and not self._lost:
                    self._watch_writable()
                    self._drained.clear()
                    await self._drained.wait()
                if not self._lost:
                    await self._linger()
            finally:
                self._lose(None)
        await self._gone.wait()

    def abort(self) -> None:
        """Close at once, dropping what was not sent. Idempotent.

        In a forked child it closes the child's copy of the socket only: the loop and the peer stay the parent's, and
        nothing is reported.
        """
        if os.getpid() != self._process:
            # Neither the loop, whose epoll set the parent shares, nor a lock that a thread may have held at the fork.
            self._lost = True
            self._out.refuse("this connection belongs to the process that forked this one")
            self._hangup.close()
            self._sock.close()
            self._abandon()
        elif threading.get_ident() == self._thread:
            self._lose(None)
        else:
            self._loop.call_soon_threadsafe(self._lose, None)

    # ---- what a subclass may add

    async def _linger(self) -> None:
        """Runs between the last byte's way into the socket and closing it; returns when closing loses nothing."""

    def _fence(self, then: Callable[[], None]) -> None:
        """Runs once, on the loop, when the connection has ended and nobody was told.

        Calls `then`, at once or in a later turn of the loop, when nothing that belongs to the connection reads our
        arena any more: being told ends the peer's leases.
        """
        then()

    def _abandon(self) -> None:
        """Runs in a forked child: closes its copies of further descriptors, without a lock or the loop."""

    def _broken(self, error: OSError) -> Exception:
        if isinstance(error, ProtocolError):  # of a socket that checks what comes
            return error
        lost = self._ended(f"broke: {error.strerror}")
        lost.__cause__ = error
        return lost

    def _ended(self, how: str) -> ConnectionLost:
        # nobody here knows which of the frames that were sent the peer has acted on
        return ConnectionLost(f"the connection to {self.name} {how}", maybe_executed=True)

    def _lose(self, cause: Exception | None) -> None:
        """Close, and report it in the loop's next turn. Only the first call has an effect."""
        if self._lost:
            return
        self._lost = True
        if self._reader is not None:
            self._reader.close()
        self._out.close(f"the connection to {self.name} is closed")
        self._loop.remove_reader(self._fd)
        self._loop.remove_reader(self._hangup.fileno())
        self._loop.remove_writer(self._fd)
        self._hangup.close()
        self._sock.close()
        self._drained.set()
        self._fence(functools.partial(self._report_later, cause))

    def _report(self, cause: Exception | None) -> None:
        # these hold the receiver too, and what it keeps: the peer's arena among others
        self._reader = None
        self._read = self._on_readable
        super()._report(cause)
