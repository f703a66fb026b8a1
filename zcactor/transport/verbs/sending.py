"""The sending half of a control queue pair: frames go straight into registered slots, and leave as messages.

The writer (any thread, under its caller's lock) reserves, commits and flushes; the loop's thread posts. What is flushed
leaves at once where a credit and a slot are free. Otherwise frames gather, so that a connection under pressure sends
few large messages; what finds no free slot is written to ordinary memory and copied into a slot in its turn. Where
messages are sealed, frames are always written to ordinary memory, and each message is encrypted into its slot.

Only every `SIGNAL_EVERY`-th message asks for a completion, which frees the slots of all before it. Messages that are
small enough are carried inline, where the device can, and free their slot at once.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from zcactor.errors import ConnectionLost
from zcactor.native import hot
from zcactor.transport.verbs.base import Send
from zcactor.transport.verbs.records import RECORD_NBYTES
from zcactor.transport.verbs.slots import BYE, CREDIT, DATA, HEADER_NBYTES, PROBE, SlotArea, pack_header

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.credits import Credits
    from zcactor.transport.verbs.base import QueuePair
    from zcactor.transport.verbs.records import Records

__all__ = ["SEND_ID", "SIGNAL_EVERY", "SlotSender", "SlotWriter"]

SIGNAL_EVERY: Final = 8
"""Messages. A completion costs more than a small SEND; at a quarter of the slots they never run out waiting for one."""

SEND_ID: Final = 1 << 62
"""Bit of the ``wr_id`` of messages sent; the other bits are the message's number. Receives have their slot's."""
_SPARE: Final = 4
"""Buffers of ordinary memory that are kept for the next messages, where these are sealed."""
_NONE: Final = -1
"""No slot; no message."""


class _Writer(Protocol):
    """What frames are encoded into: the native send buffer, or `SlotWriter`."""

    def reserve(self, nbytes: int, /) -> tuple[bytearray | memoryview, int]: ...
    def commit(self, nbytes: int, /) -> None: ...
    @property
    def pending(self) -> int:
        """Bytes in the slot behind its header."""

    def swap(self, view: memoryview, tail: int, /) -> int:
        """Write to `view` from now on; where the frames in the former slot end, or -1: a frame is being written."""

    def refuse(self, reason: str, /) -> None: ...
    def close(self, reason: str, /) -> None: ...


class SlotWriter:
    """The native send buffer on slots, in Python.

    Args:
        max_reserve: bytes of the largest frame with its prefix.
        slots: whose `full` gives it another slot.
    """

    def __init__(self, max_reserve: int, slots: SlotSender) -> None:
        self._max_reserve = max_reserve
        self._slots = slots
        self._lock = threading.Lock()
        self._view = memoryview(b"")
        self._head = self._tail = 0
        self._open = False  # a reservation is being written
        self._refused = ""
        self._closed = False

    def reserve(self, nbytes: int) -> tuple[memoryview, int]:
        """Room for one frame with its prefix: a buffer and the offset in it.

        Raises:
            ValueError: `nbytes` is more than a slot holds.
            ConnectionLost: `refuse` or `close` was called.
        """
        if nbytes > self._max_reserve:
            raise ValueError(
                f"a frame of {nbytes} bytes with its prefix is too large: the limit is {self._max_reserve}; pass large "
                "values by reference"
            )
        while True:
            with self._lock:
                if self._refused:
                    raise ConnectionLost(self._refused)
                if self._tail + nbytes <= len(self._view):
                    self._open = True
                    return self._view, self._tail
                self._open = False
            self._slots.full()

    def commit(self, nbytes: int) -> None:
        """The first `nbytes` of the last reservation are a frame.

        Raises:
            ConnectionLost: `close` was called meanwhile.
        """
        with self._lock:
            if self._closed:
                raise ConnectionLost(self._refused)
            self._tail += nbytes
            self._open = False

    @property
    def pending(self) -> int:
        """Bytes of frames in the slot."""
        return self._tail - self._head

    def swap(self, view: memoryview, tail: int) -> int:
        """Write to `view` from now on; where the frames in the former slot end, or -1: a frame is being written, whose
        writer will flush."""
        with self._lock:
            if self._open:
                return -1
            end = self._tail
            self._view = view
            self._head = self._tail = tail
            return end

    def flushed(self) -> None:
        """The writer has no reservation that it will still commit."""
        self._open = False

    def refuse(self, reason: str) -> None:
        """Accept nothing more. Takes no lock: safe in a forked child."""
        self._refused = self._refused or reason

    def close(self, reason: str) -> None:
        """Accept nothing more, and forget the slot."""
        self.refuse(reason)
        with self._lock:
            self._closed = True
            self._view = memoryview(b"")
            self._head = self._tail = 0


class SlotSender:
    """Messages of one queue pair, in order.

    Args:
        qp: the control queue pair.
        area: its send slots, two more than `depth`.
        depth: messages that may be under way; the queue pair takes two requests more.
        max_reserve: bytes of the largest frame with its prefix, which a slot has room for.
        credits: of the connection, in messages; shared with the receiving half.
        wake: has `pump` called on the loop's thread, soon; itself called from any thread.
        failed: called on the loop's thread with what went wrong when a message cannot be posted.
        records: makes each message a sealed record; None where they are not sealed.
    """

    def __init__(
        self,
        qp: QueuePair,
        area: SlotArea,
        depth: int,
        max_reserve: int,
        credits: Credits,
        wake: Callable[[], None],
        failed: Callable[[Exception], None],
        records: Records | None = None,
    ) -> None:
        self.max_reserve: Final = max_reserve
        self.messages = 0
        """Posted so far."""
        self.bye = -1
        """Number of the last message, once `say_bye` has posted it."""
        self._qp = qp
        self._area = area
        self._depth = depth
        self._credits = credits
        self._wake = wake
        self._failed = failed
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._free = list(range(area.count))  # slots
        self._flight: deque[tuple[int, int]] = deque()  # posted and not known to be done: number of the message, slot
        self._waiting: deque[tuple[memoryview, int, int]] = deque()  # full and not posted: buffer, its end, slot
        self._flushed = False  # what is committed is to leave
        self._inline: list[int] = []  # slots of messages that are carried inline and not posted yet
        self._last = _NONE  # kind of the header-only message that is to follow: CREDIT, or BYE behind all frames
        self._closed = False
        self.native: Any = None if hot is None else hot.SendBuffer(max_reserve, -1, self)
        """The native send buffer, where there is one: whoever writes whole frames may do so without `reserve`."""
        self._python = SlotWriter(max_reserve, self) if hot is None else None
        writer: Any = self._python or self.native
        self._writer: _Writer = writer
        self.reserve = self._writer.reserve
        self.commit = self._writer.commit
        self._records = records
        self._room: Final = area.nbytes if records is None else area.nbytes - RECORD_NBYTES  # bytes of a message
        self._buffers: list[memoryview] = []  # ordinary memory that nobody writes to
        self._slot = _NONE  # what the writer fills; _NONE for ordinary memory
        self._view = memoryview(b"")
        self._next_buffer()

    # ---- the writer

    def full(self) -> None:
        """The writer's slot has no room for the next frame: give it another one."""
        with self._lock:
            view, slot = self._view, self._slot
            end = self._next_buffer()
            if end > HEADER_NBYTES:
                self._waiting.append((view, end, slot))
            elif slot != _NONE:
                self._free.append(slot)

    def flush(self) -> None:
        """Let what is committed leave as soon as it can. Never blocks."""
        if self._python is not None:
            self._python.flushed()
        if self._closed or not self.pending:
            return
        self._flushed = True
        if threading.get_ident() == self._thread:
            self.pump()
        else:
            self._wake()

    @property
    def pending(self) -> bool:
        """Whether anything that is committed has not been posted."""
        return bool(self._waiting) or self._writer.pending > 0

    @property
    def under_way(self) -> int:
        """Messages that were posted and are not known to have arrived."""
        return len(self._flight)

    def refuse(self, reason: str) -> None:
        """Accept nothing more; what is committed still leaves."""
        self._writer.refuse(reason)

    def abandon(self, reason: str) -> None:
        """In a forked child: accept nothing more, and write to no slot, as they are the parent's. Takes no lock."""
        self._closed = True
        self.refuse(reason)

    def drop(self, reason: str) -> None:
        """Accept nothing more, and forget what was not posted."""
        self._writer.close(reason)
        with self._lock:
            self._free += [slot for _, _, slot in self._waiting if slot != _NONE]
            self._waiting.clear()

    def close(self, reason: str) -> None:
        """`drop`, and post nothing more either."""
        self.drop(reason)
        self._closed = True

    def _next_buffer(self) -> int:
        """A fresh buffer for the writer: a slot, unless they are needed for what waits already. Returns where the
        frames in the former one end; -1: it cannot be left now, and nothing has changed. Called under the lock."""
        slot = self._free.pop() if self._free and not self._waiting and self._records is None else _NONE
        if slot != _NONE:
            view = self._area.views[slot]
        else:
            view = self._buffers.pop() if self._buffers else memoryview(bytearray(self._room))
        end = self._writer.swap(view, HEADER_NBYTES)
        if end >= 0:
            self._slot, self._view = slot, view
        elif slot != _NONE:
            self._free.append(slot)
        return end

    # ---- the loop's thread

    def pump(self) -> None:
        """Post what is flushed, as far as credits and slots go."""
        with self._lock:
            if self._closed:
                return
            failure = self._post(self._next_messages())
        if failure is not None:
            self._failed(failure)

    def _next_messages(self) -> list[Send]:
        """Requests for all that may leave now. Called under the lock."""
        sends: list[Send] = []
        while self._flushed and len(self._flight) < self._depth:
            if self._waiting:
                if not self._may_leave(self._waiting[0][2]):
                    break
                self._credits.take()
                sends.append(self._message(DATA, *self._waiting.popleft()))
                continue
            self._flushed = False  # before the look: what a thread commits and flushes behind it sets this again
            if not self._writer.pending:
                break
            self._flushed = True
            if not self._may_leave(self._slot):
                break
            view, slot = self._view, self._slot
            end = self._next_buffer()
            if end < 0:  # a writer that is at work flushes when it is done
                break
            self._credits.take()
            sends.append(self._message(DATA, view, end, slot))
        if self._last != _NONE and self._free and len(self._flight) < self._depth + 1:
            if self._last == CREDIT:
                if self._credits.due:
                    sends.append(self._message(CREDIT, None, HEADER_NBYTES, _NONE))
                self._last = _NONE
            elif not self.pending:
                self.bye = self.messages
                sends.append(self._message(BYE, None, HEADER_NBYTES, _NONE))
                self._last = _NONE
        return sends

    def _may_leave(self, slot: int) -> bool:
        """Whether there is a credit, and a slot for the next message, whose frames lie in `slot`."""
        return self._credits.available > 0 and (slot != _NONE or bool(self._free))

    def _message(self, kind: int, view: memoryview | None, end: int, slot: int) -> Send:
        """The request for the next message, written to its slot. Called under the lock."""
        buffer = None
        if slot == _NONE:
            slot = self._free.pop()
            buffer = view
        room = self._area.views[slot]
        number = self.messages
        self.messages += 1
        if self._records is not None:
            plain = memoryview(bytearray(HEADER_NBYTES)) if buffer is None else buffer
            pack_header(plain, kind, self._credits.take_owed(), end - HEADER_NBYTES, number)
            end = self._records.seal_into(room, plain[:end])
            if buffer is not None and len(self._buffers) < _SPARE:
                self._buffers.append(buffer)
        else:
            if buffer is not None:
                room[HEADER_NBYTES:end] = buffer[HEADER_NBYTES:end]
            pack_header(room, kind, self._credits.take_owed(), end - HEADER_NBYTES, number)
        inline = end <= self._qp.max_inline
        if inline:
            self._inline.append(slot)
        self._flight.append((number, _NONE if inline else slot))
        signalled = self.messages % SIGNAL_EVERY == 0 or kind in (BYE, PROBE)
        return Send(SEND_ID | number, self._area.address(slot), end, self._area.lkey, signalled, inline)

    def _post(self, sends: list[Send]) -> Exception | None:
        """Post them; what went wrong. Called under the lock."""
        if not sends:
            return None
        try:
            self._qp.post_sends(sends)
        except Exception as error:  # of any kind: whose frames these are is not known here
            self._closed = True
            return error
        finally:
            self._free += self._inline
            self._inline.clear()
        return None

    def return_credits(self) -> None:
        """Send them by themselves unless a frame has taken them along."""
        if self._credits.due and self.bye < 0:  # nothing follows the last message
            if self._last != BYE:
                self._last = CREDIT
            self.pump()

    def say_bye(self) -> None:
        """Post the last message behind everything that is committed. Its completion says that all has arrived."""
        if self.bye < 0:
            self._last = BYE
            self._flushed = True
        self.pump()

    def probe(self) -> None:
        """Post the first message.

        Raises:
            OSError: it cannot be posted.
        """
        with self._lock:
            self._credits.take()
            failure = self._post([self._message(PROBE, None, HEADER_NBYTES, _NONE)])
        if failure is not None:
            raise failure

    def done(self, message: int) -> None:
        """Message number `message`, and so all before it, is done: their slots are free again."""
        flight = self._flight
        while flight and flight[0][0] <= message:
            slot = flight.popleft()[1]
            if slot != _NONE:
                self._free.append(slot)
        if self._flushed or self._last != _NONE:
            self.pump()
