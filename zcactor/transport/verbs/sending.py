"""The sending half of a control queue pair: frames go straight into registered slots, and leave as messages.

The writer (any thread, under its caller's lock) reserves, commits and flushes; the loop's thread posts. What is flushed
leaves at once where a credit and a slot are free. Otherwise frames gather, so that a connection under pressure sends
few large messages; what finds no free slot is written to ordinary memory and copied into a slot in its turn.

Only every `SIGNAL_EVERY`-th message asks for a completion, which frees the slots of all before it. Messages that are
small enough are carried inline, where the device can, and free their slot at once.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from zcactor.errors import ConnectionLost
from zcactor.transport.verbs.base import Send
from zcactor.transport.verbs.slots import BYE, CREDIT, DATA, HEADER_NBYTES, PROBE, SlotArea, pack_header

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.credits import Credits
    from zcactor.transport.verbs.base import QueuePair

__all__ = ["SEND_ID", "SIGNAL_EVERY", "SlotSender"]

SIGNAL_EVERY: Final = 16
"""Messages. A completion costs more than a small SEND; at a quarter of the slots they never run out waiting for one."""

SEND_ID: Final = 1 << 62
"""Bit of the ``wr_id`` of messages sent; the other bits are the message's number. Receives have their slot's."""
_NONE: Final = -1
"""No slot; no message."""


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
    """

    def __init__(
        self,
        qp: QueuePair,
        area: SlotArea,
        depth: int,
        max_reserve: int,
        credits: Credits,
        wake: Callable[[], None],
        failed: Callable[[OSError], None],
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
        self._slot = self._free.pop()  # what the writer fills; _NONE for ordinary memory
        self._view = area.views[self._slot]
        self._tail = HEADER_NBYTES
        self._open = False  # a reservation is being written
        self._flushed = False  # what is committed is to leave
        self._inline: list[int] = []  # slots of messages that are carried inline and not posted yet
        self._last = _NONE  # kind of the header-only message that is to follow: CREDIT, or BYE behind all frames
        self._refused = ""
        self._closed = False

    # ---- the writer

    def reserve(self, nbytes: int) -> tuple[memoryview, int]:
        """Room for one frame with its prefix: a buffer and the offset in it.

        Raises:
            ValueError: `nbytes` is more than a slot holds.
            ConnectionLost: `refuse` or `close` was called.
        """
        if nbytes > self.max_reserve:
            raise ValueError(
                f"a frame of {nbytes} bytes with its prefix is too large: the limit is {self.max_reserve}; pass large "
                "values by reference"
            )
        with self._lock:
            if self._refused:
                raise ConnectionLost(self._refused)
            if self._tail + nbytes > self._area.nbytes:
                self._waiting.append((self._view, self._tail, self._slot))
                self._next_buffer()
            self._open = True
            return self._view, self._tail

    def commit(self, nbytes: int) -> None:
        """The first `nbytes` of the last reservation are a frame."""
        with self._lock:
            self._tail += nbytes
            self._open = False

    def flush(self) -> None:
        """Let what is committed leave as soon as it can. Never blocks."""
        with self._lock:
            self._open = False
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
        return bool(self._waiting) or self._tail > HEADER_NBYTES

    @property
    def under_way(self) -> bool:
        """Whether anything that was posted is not known to have arrived."""
        return bool(self._flight)

    def refuse(self, reason: str) -> None:
        """Accept nothing more; what is committed still leaves. Takes no lock: safe in a forked child."""
        self._refused = self._refused or reason

    def drop(self, reason: str) -> None:
        """Accept nothing more, and forget what was not posted."""
        self.refuse(reason)
        with self._lock:
            self._free += [slot for _, _, slot in self._waiting if slot != _NONE]
            self._waiting.clear()
            self._tail = HEADER_NBYTES

    def close(self, reason: str) -> None:
        """`drop`, and post nothing more either."""
        self.drop(reason)
        self._closed = True

    def _next_buffer(self) -> None:
        """A fresh buffer for the writer: a slot, unless they are needed for what waits already."""
        if self._free and not self._waiting:
            self._slot = self._free.pop()
            self._view = self._area.views[self._slot]
        else:
            self._slot = _NONE
            self._view = memoryview(bytearray(self._area.nbytes))
        self._tail = HEADER_NBYTES

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
                sends.append(self._message(DATA, *self._waiting.popleft()))
            elif self._open or self._tail == HEADER_NBYTES:
                self._flushed = self._tail > HEADER_NBYTES  # a writer that is at work flushes when it is done
                break
            else:
                if not self._may_leave(self._slot):
                    break
                sends.append(self._message(DATA, self._view, self._tail, self._slot))
                self._next_buffer()
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
        """Whether there is a slot for the next message, whose frames lie in `slot`, and a credit, which is taken."""
        return (slot != _NONE or bool(self._free)) and self._credits.take()

    def _message(self, kind: int, view: memoryview | None, end: int, slot: int) -> Send:
        """The request for the next message, written to its slot. Called under the lock."""
        if slot == _NONE:
            slot = self._free.pop()
            if view is not None:
                self._area.views[slot][HEADER_NBYTES:end] = view[HEADER_NBYTES:end]
        number = self.messages
        self.messages += 1
        pack_header(self._area.views[slot], kind, self._credits.take_owed(), end - HEADER_NBYTES, number)
        inline = end <= self._qp.max_inline
        if inline:
            self._inline.append(slot)
        self._flight.append((number, _NONE if inline else slot))
        signalled = self.messages % SIGNAL_EVERY == 0 or kind in (BYE, PROBE)
        return Send(SEND_ID | number, self._area.address(slot), end, self._area.lkey, signalled, inline)

    def _post(self, sends: list[Send]) -> OSError | None:
        """Post them; what went wrong. Called under the lock."""
        if not sends:
            return None
        try:
            self._qp.post_sends(sends)
        except OSError as error:
            self._closed = True
            return error
        finally:
            self._free += self._inline
            self._inline.clear()
        return None

    def return_credits(self) -> None:
        """Send them by themselves unless a frame has taken them along."""
        if self._credits.due:
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
