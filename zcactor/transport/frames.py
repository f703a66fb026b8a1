"""The first of the two seams of a transport: whole frames, in order, between two processes.

Frames travel *in batches*: the sender encodes each frame straight into the connection's send buffer (`reserve`,
`commit`) and hands over all frames of a loop turn by one `flush`. The receiver gets them by one callback with a view
into the receive buffer, which is valid during the callback only. A frame stands behind its length, a little-endian u32
that does not count itself.

The other seam is `zcactor.transport.bytes`. A connection has both, see `zcactor.transport.base.Connection`.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from zcactor.errors import ProtocolError, ZcactorError

if TYPE_CHECKING:
    from collections import abc
    from collections.abc import Callable

    from zcactor.config import Config
    from zcactor.native import hot

__all__ = [
    "LENGTH_PREFIX",
    "Frames",
    "PeerInfo",
    "Receiver",
    "held_here",
    "is_of_sending",
    "max_frame_for",
    "whole_frames",
]

LENGTH_PREFIX = 4
"""Bytes before each frame: its length, little-endian u32, not counting the prefix (FlatBuffers' size prefix)."""
MIN_MAX_FRAME: Final = 32 << 10
"""Bytes: room for the references of a call with many arrays, also where the eager limit is small."""
FRAME_HEADROOM: Final = 16 << 10
"""Bytes of a frame beside its eager payload: the fields of the call (under 512), and the rest for about 80 references
to arrays, of which one with shape and strides takes about 200."""

_unpack_length = struct.Struct("<I").unpack_from


def max_frame_for(eager_limit: int) -> int:
    """Return the bytes of the largest frame, without its prefix, for payloads of up to `eager_limit` bytes."""
    return max(MIN_MAX_FRAME, eager_limit + FRAME_HEADROOM)


def whole_frames(buffer: bytes | bytearray | memoryview, end: int, max_frame: int) -> int:
    """Return the number of bytes, among the first `end` bytes of `buffer`, that are whole frames.

    Frames before a bad prefix are counted, so that delivery does not depend on how the stream was cut into reads.

    Raises:
        ProtocolError: the first frame announces more than `max_frame` bytes.
    """
    done = 0
    while end - done >= LENGTH_PREFIX:
        (length,) = _unpack_length(buffer, done)
        if length > max_frame:
            if done == 0:
                raise ProtocolError(f"the peer announced a frame of {length} bytes; at most {max_frame} are allowed")
            break
        following = done + LENGTH_PREFIX + length
        if following > end:
            break
        done = following
    return done


class PeerInfo(msgspec.Struct, frozen=True):
    """The facts about a peer that the handshake has proved."""

    process: bytes
    """16 random bytes that name the process."""
    pid: int
    uid: int
    arena_nbytes: int
    """Bytes of the peer's arena. Each reference to the arena is checked against this size."""


class Receiver(Protocol):
    """The callbacks of a connection. They run on the event loop's thread."""

    def frames_received(self, data: memoryview) -> None:
        """Take one or more whole frames, each behind its length prefix. `data` is valid until this returns.

        A `ProtocolError` that this raises closes the connection, and no other.
        """

    def connection_lost(self, cause: Exception | None) -> None:
        """Take note that the connection has ended. Called exactly once. `cause` is None after an `aclose` here."""


class Frames(ABC):
    """Frames in order to and from one authenticated peer.

    `reserve`, `commit` and `flush` are called under the caller's lock, from any thread; everything else on the loop's
    thread.

    A subclass calls `_send_by` once. It hands frames to `_receiver`, which is None before `start` and after the end.
    When the connection ends, the subclass sets `_lost` and then calls `_report_later` once. `aclose` sets `_closing`
    before that, so that the receiver is called without a cause, and waits for `_gone`. A receiver may hold a lock of
    its own while it sends, so the end is never reported from within a call of the receiver's, but in a later turn.

    Args:
        loop: the loop that the connection runs on.
        peer: the process at the other end.
        recv_depth: frames that each end may have outstanding; the same number at both ends.
        eager_limit: bytes of the largest payload of a frame; the same number at both ends.
    """

    kind: str
    """The name of the transport, as in the setting ``transports``; ``"loopback"`` inside one process."""
    eager_limit: int
    """Bytes of the largest payload of a frame. Larger payloads travel by reference."""
    max_frame: int
    """Bytes of the largest frame, without its prefix. `reserve` refuses more."""
    recv_depth: int
    """Frames that the peer may have outstanding towards us. Both ends use the same number. Flow control is up to the
    caller."""
    peer: PeerInfo
    rejected: abc.Mapping[str, str]
    """Transports that were tried for this peer and failed, or that it does not need, each with the reason."""
    native_out: hot.SendBuffer
    """The native send buffer, which takes whole frames without `reserve`."""
    reserve: Callable[[int], tuple[bytearray | memoryview, int]]
    """``reserve(nbytes)`` reserves room for one frame with its prefix, and makes no system call. Returns a writable
    buffer, and the offset of the room in it. Raises `ValueError` where `nbytes` is larger than ``max_frame +
    LENGTH_PREFIX``, and `ConnectionLost` where the connection is closed."""
    commit: Callable[[int], None]
    """``commit(nbytes)`` hands over the first `nbytes` of the last reservation, a frame with its prefix. The connection
    sends them even when the task that wrote them is cancelled."""
    unsent: bytes | None = None
    """The frames that this end had written when it saw, after it had done other things for long, that the peer had hung
    up: none of them was sent. None where the connection has not ended so."""
    lies_unread = False
    """Whether received frames lie unread while the loop of this process does other things. Then the peer may have ended
    meanwhile, for all that its last frames say."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: PeerInfo, recv_depth: int, eager_limit: int) -> None:
        self.peer = peer
        self.name = f"process {peer.pid}"
        """The name of the peer in messages."""
        self.rejected = {}
        self.recv_depth = recv_depth
        self.eager_limit = eager_limit
        self.max_frame = max_frame_for(eager_limit)
        self._loop = loop
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._started = False
        self._receiver: Receiver | None = None
        self._closing = False
        self._lost = False
        self._gone = asyncio.Event()

    # ---- what the connection is

    @property
    def sealed(self) -> bool:
        """Whether the frames are encrypted and authenticated."""
        return False

    @property
    def seals_payloads(self) -> bool:
        """Whether frames are encrypted and pulled bytes are not. Payloads above the eager limit are encrypted before
        they are stored then, as they are pulled."""
        return False

    def describe(self) -> str:
        """Describe the way that frames and arrays take, for people, and the problems so far. By default `kind`."""
        return self.kind

    def idle_timeout(self, config: Config) -> float:
        """Seconds after which an unused connection is closed, as `config` has them; 0 where it is kept open."""
        return config.idle_timeout

    @property
    def heard(self) -> int | None:
        """A number that changes whenever bytes have arrived from the peer. None where the peer is on this host, as the
        system reports the ends of its processes."""
        return None

    def turns_behind(self) -> int:
        """The number of turns of the loop after which all is read that has come by now, at most; 0 where nothing, not
        the peer's end either, lies unread. The loop's thread asks. By default two: the loop looks at its descriptors in
        the next turn, and calls readers after what was due before."""
        return 2

    def hung_up(self) -> bool:
        """Whether the peer is known to have ended the connection, although its last frames may not be read yet. Any
        thread may ask."""
        return False

    def is_writing_here(self) -> bool:
        """Whether this thread is inside of a step of sending that another frame must not come into: a finalizer runs
        there then, whose frames have to wait for a later turn. Any thread may ask. By default False."""
        return False

    # ---- the beginning

    def start(self, receiver: Receiver) -> None:
        """Begin to deliver to `receiver`, also frames that have arrived before. Called once, before anything is sent.

        Raises:
            RuntimeError: a second call.
        """
        if self._started:
            raise RuntimeError("the connection has been started already")
        self._started = True
        self._receiver = receiver
        if self._lost:
            self._loop.call_soon(self._report, None)
        else:
            self._begin(receiver)

    @abstractmethod
    def _begin(self, receiver: Receiver) -> None:
        """Begin to deliver, or to watch the socket. `receiver` is called in a later turn only."""

    # ---- sending

    def _send_by(self, buffer: hot.SendBuffer) -> None:
        """Let `buffer` take the frames. The rpc layer calls its methods for each frame: bound here, this saves one
        call."""
        self.native_out = buffer
        self.reserve = buffer.reserve
        self.commit = buffer.commit

    @abstractmethod
    def flush(self) -> None:
        """Send all committed frames. Never blocks: bytes that the system does not take now are sent later.

        A broken connection is reported by `Receiver.connection_lost`, not here.

        Raises:
            BaseException: as `send_stopped`. The caller ends the connection.
        """

    def send_stopped(self, error: BaseException | None) -> None:
        """Note that the native part has flushed, and that the system takes no more bytes now: go on when it does again.
        With an error end the connection, as nobody knows how many bytes were sent. Any thread may call it.

        Raises:
            BaseException: `error`, where `is_of_sending` says that it is the caller's.
        """
        self._sending_stopped(error)
        if error is not None and not is_of_sending(error):
            raise error

    @abstractmethod
    def _sending_stopped(self, error: BaseException | None) -> None:
        """Go on when the system takes bytes again; with an error end the connection. Any thread may call it."""

    # ---- the end

    @abstractmethod
    async def aclose(self) -> None:
        """Send all committed frames, then close. Idempotent. Cancelling closes at once."""

    @abstractmethod
    def abort(self) -> None:
        """Close at once and drop all bytes that were not sent. Idempotent. After a fork any thread may call it."""

    def _report_later(self, cause: Exception | None) -> None:
        """Report the end to the receiver in a later turn: the caller may hold the lock that the receiver takes."""
        if self._receiver is None:
            self._gone.set()
        else:
            self._loop.call_soon(self._report, None if self._closing else cause)

    def _report(self, cause: Exception | None) -> None:
        self._gone.set()
        # Drop the receiver: a closed connection may wait long for the garbage collector, and would keep it until then.
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.connection_lost(cause)


def is_of_sending(error: BaseException) -> bool:
    """Whether an exception that ended a flush says that bytes cannot be sent. Any other one is the caller's: the use
    of a parent's keys in a forked child, or the exception of a signal's handler, which the interpreter has run inside
    of the flush. That may be an `OSError`, too, such as a `TimeoutError` without the number that the system gives."""
    if isinstance(error, OSError):
        return error.errno is not None or isinstance(error, ZcactorError)
    return isinstance(error, MemoryError)


def held_here(lock: threading.RLock) -> bool:
    """Whether this thread is inside a lock: a finalizer runs there then, which the garbage collector has started. Its
    frames have to wait, as others may be written in part."""
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # as threading.Condition asks
