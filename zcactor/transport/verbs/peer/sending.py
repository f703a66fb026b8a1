"""The sending half of a control queue pair: frames are written straight into registered slots, and sent as messages.

The writer (any thread, under its caller's lock) reserves, commits and flushes. The loop's thread posts. Flushed frames
are sent at once where a credit and a slot are free. Otherwise frames gather, so that a connection under load sends few
large messages. Without a free slot, frames are written to ordinary memory and copied into a slot later. With
encryption, frames are always written to ordinary memory, and each message is encrypted into its slot.

Only every `SIGNAL_EVERY`-th message asks for a completion, which frees the slots of all messages before it. Small
messages are sent inline, where the device supports it, and free their slots at once.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from zcactor.native import hot
from zcactor.transport.frames import held_here, is_of_sending
from zcactor.transport.stream.record_layer import RECORD_NBYTES
from zcactor.transport.verbs.device.slots import BYE, CREDIT, DATA, HEADER_NBYTES, PROBE, SlotArea, pack_header
from zcactor.transport.verbs.driver.base import Send

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.credits import Credits
    from zcactor.transport.verbs.driver.base import QueuePair
    from zcactor.transport.verbs.peer.records import Records

__all__ = ["SEND_ID", "SIGNAL_EVERY", "SlotSender"]

SIGNAL_EVERY: Final = 8
"""Messages for each completion. A completion costs more than a small SEND. With a quarter of the slots, messages never
wait for slots because of a missing completion."""

SEND_ID: Final = 1 << 62
"""Bit of the ``wr_id`` of sent messages. The other bits are the number of the message. Receives have that of the
slot."""
_SPARE: Final = 4
"""Buffers of ordinary memory that are kept for the next messages, with encryption."""
_NONE: Final = -1
"""No slot; no message."""


class SlotSender:
    """The messages of one queue pair, in order.

    Args:
        qp: the control queue pair.
        area: its send slots, two more than `depth`.
        depth: messages that may be under way. The queue pair has room for two requests more.
        max_reserve: bytes of the largest frame with its prefix, which fits a slot.
        credits: the credits of the connection, in messages; shared with the receiving half.
        wake: has `pump` called on the loop's thread soon. Any thread may call it.
        failed: called on the loop's thread with the error when a message cannot be posted.
        records: encrypts each message; None where messages are not encrypted.
    """

    def __init__(
        self,
        qp: QueuePair,
        area: SlotArea,
        depth: int,
        max_reserve: int,
        credits: Credits,
        wake: Callable[[], None],
        failed: Callable[[BaseException], None],
        records: Records | None = None,
    ) -> None:
        self.max_reserve: Final = max_reserve
        self.messages = 0
        """Number of posted messages."""
        self.bye = -1
        """Number of the last message, once `say_bye` has posted it."""
        self._qp = qp
        self._area = area
        self._depth = depth
        self._credits = credits
        self._wake = wake
        self._failed = failed
        self._lock = threading.RLock()
        self._thread = threading.get_ident()
        self._free = list(range(area.count))  # slots
        self._flight: deque[tuple[int, int]] = deque()  # posted without a completion: number of the message, slot
        self._waiting: deque[tuple[memoryview, int, int]] = deque()  # full, but not posted: buffer, its end, slot
        self._flushed = False  # committed frames have to be sent
        self._inline: list[int] = []  # slots of inline messages that are not posted yet
        self._last = _NONE  # kind of the next message without frames: CREDIT, or BYE behind all frames
        self._closed = False
        self.native = hot.SendBuffer(max_reserve, -1, self)
        """The writer, which encodes plain frames by itself."""
        self.reserve = self.native.reserve
        self.commit = self.native.commit
        self._records = records
        self._room: Final = area.nbytes if records is None else area.nbytes - RECORD_NBYTES  # bytes of a message
        self._buffers: list[memoryview] = []  # unused ordinary memory
        self._slot = _NONE  # the slot that the writer fills; _NONE for ordinary memory
        self._view = memoryview(b"")
        self._next_buffer()

    # ---- the writer

    def full(self) -> None:
        """Give the writer another slot, as its own has no room for the next frame.

        Raises:
            BlockingIOError: not now, as `is_changing_here`.
        """
        if self.is_changing_here():
            raise BlockingIOError(errno.EAGAIN, "the frame does not fit those that its thread is about to send")
        with self._lock:
            view, slot = self._view, self._slot
            end = self._next_buffer()
            if end > HEADER_NBYTES:
                self._waiting.append((view, end, slot))
            elif slot != _NONE:
                self._free.append(slot)

    def is_changing_here(self) -> bool:
        """Whether this thread is changing slots: a finalizer runs there, whose frames find no other slot now."""
        return held_here(self._lock)

    def flush(self) -> None:
        """Send committed frames as soon as possible. Never blocks."""
        if self._closed or not (self._waiting or self.native.pending):  # as `pending`, without a call
            return
        self._flushed = True
        if threading.get_ident() == self._thread and not self.is_changing_here():
            self.pump()
        else:
            self._wake()

    @property
    def pending(self) -> bool:
        """Whether committed frames are not posted yet."""
        return bool(self._waiting) or self.native.pending > 0

    @property
    def under_way(self) -> int:
        """Number of posted messages that have not arrived as far as known."""
        return len(self._flight)

    def refuse(self, reason: str) -> None:
        """Accept nothing more. Committed frames are still sent."""
        self.native.refuse(reason)

    def abandon(self, reason: str) -> None:
        """Accept nothing more and write to no slot, in a forked child, as slots belong to the parent. Takes no lock."""
        self._closed = True
        self.refuse(reason)

    def drop(self, reason: str) -> None:
        """Accept nothing more, and drop frames that were not posted."""
        self.native.close(reason)
        with self._lock:
            self._free += [slot for _, _, slot in self._waiting if slot != _NONE]
            self._waiting.clear()

    def close(self, reason: str) -> None:
        """Drop frames as `drop` does, and post nothing more."""
        self.drop(reason)
        self._closed = True

    def _next_buffer(self) -> int:
        """Give the writer an empty buffer: a slot, unless waiting frames need them. Returns the end of the frames in
        the former one. Called under the lock."""
        slot = self._free.pop() if self._free and not self._waiting and self._records is None else _NONE
        if slot != _NONE:
            view = self._area.views[slot]
        else:
            view = self._buffers.pop() if self._buffers else memoryview(bytearray(self._room))
        self._slot, self._view = slot, view
        return self.native.swap(view, HEADER_NBYTES)

    # ---- the loop's thread

    def pump(self) -> None:
        """Post flushed frames, as far as there are credits and slots.

        Raises:
            BaseException: that of a signal's handler, as far as it is no defect by its type; `failed` was called with
                it, as nobody knows what was posted.
        """
        if not self._flushed and self._last == _NONE:  # a thread that flushes later wakes the loop
            return
        with self._lock:
            if self._closed:
                return
            try:
                self._post(self._next_messages())
            except BaseException as error:
                self._closed = True
                failure = error
            else:
                return
        self._failed(failure)
        if is_of_sending(failure) or (isinstance(failure, Exception) and not isinstance(failure, OSError)):
            return  # the driver's: a defect of it is told by `failed`, as the frames may belong to any caller
        raise failure

    def _next_messages(self) -> list[Send]:
        """Make the requests for all messages that may be sent now. Called under the lock."""
        sends: list[Send] = []
        while self._flushed and len(self._flight) < self._depth:
            if self._waiting:
                if not self._may_leave(self._waiting[0][2]):
                    break
                self._credits.take()
                sends.append(self._message(DATA, *self._waiting.popleft()))
                continue
            self._flushed = False  # reset before the check: a thread that flushes later sets it again
            if not self.native.pending:
                break
            self._flushed = True
            if not self._may_leave(self._slot):
                break
            view, slot = self._view, self._slot
            end = self._next_buffer()
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
        """Whether there is a credit, and a slot for the next message, which has its frames in `slot`."""
        return self._credits.available > 0 and (slot != _NONE or bool(self._free))

    def _message(self, kind: int, view: memoryview | None, end: int, slot: int) -> Send:
        """Write the next message to its slot, and return the request. Called under the lock."""
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

    def _post(self, sends: list[Send]) -> None:
        """Post requests. Called under the lock."""
        try:
            if sends:
                self._qp.post_sends(sends)
        finally:
            self._free += self._inline
            self._inline.clear()

    def return_credits(self) -> None:
        """Send a CREDIT message, unless a message with frames has returned the credits."""
        if self._credits.due and self.bye < 0:  # no message follows the last one
            if self._last != BYE:
                self._last = CREDIT
            self.pump()

    def say_bye(self) -> None:
        """Post the last message behind all committed frames. Its completion means that all have arrived."""
        if self.bye < 0:
            self._last = BYE
            self._flushed = True
        self.pump()

    def probe(self) -> None:
        """Post the first message.

        Raises:
            OSError: the message cannot be posted.
        """
        with self._lock:
            self._credits.take()
            try:
                self._post([self._message(PROBE, None, HEADER_NBYTES, _NONE)])
            except BaseException:
                self._closed = True
                raise

    def done(self, message: int) -> None:
        """Free the slots of message number `message` and of all before it, which are done."""
        flight = self._flight
        while flight and flight[0][0] <= message:
            slot = flight.popleft()[1]
            if slot != _NONE:
                self._free.append(slot)
        if self._flushed or self._last != _NONE:
            self.pump()
