"""The consumer's end of a stream: items in order, and the credit that lets the producer run a few items ahead."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ProtocolError
from zcactor.exception_pickling import bare
from zcactor.rpc.messages import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.rpc.call import Call
    from zcactor.rpc.parts import Part

__all__ = ["STREAM_WINDOW", "Slot", "Stream"]

STREAM_WINDOW: Final = 16
"""Items that a producer may have sent and its consumer not taken. 16 cover a round trip at a few microseconds an item.
An item may be an array of any size, so a larger window would occupy more of the producer's store."""


class Slot:
    """The place of one item. It is filled at once, or when its arrays have been leased from a third process."""

    __slots__ = ("flags", "parts", "payload", "ready")

    def __init__(self) -> None:
        self.ready = False
        self.payload: Any = b""
        self.parts: Sequence[Part] = ()
        self.flags = 0


class Stream:
    """The items of one call. The session fills the stream on the loop's thread; one task at a time consumes it, on any
    loop."""

    def __init__(
        self, call: Call, unpack: Callable[[Any, Sequence[Part], int], Any], cancel: Callable[[Call], None]
    ) -> None:
        self.call = call
        self._unpack = unpack
        self._cancel = cancel
        self._slots: deque[Slot] = deque()
        self._taken = 0
        self._expected = 0
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        call.add_callback(self._ended)

    def slot(self, index: int) -> Slot:
        """Make the place for item number `index`.

        Raises:
            ProtocolError: the producer skipped or repeated an item, or ran further ahead than its credit.
        """
        if index != self._expected:
            raise ProtocolError(f"item {index} of a stream came when item {self._expected} was due")
        if len(self._slots) >= STREAM_WINDOW + STREAM_WINDOW // 2:
            raise ProtocolError(f"a producer ran more than its {STREAM_WINDOW} items ahead")
        self._expected += 1
        slot = Slot()
        if not self._closed:
            self._slots.append(slot)
        return slot

    def fill(self, slot: Slot, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """Fill `slot` with its item, which has come."""
        slot.payload, slot.parts, slot.flags, slot.ready = payload, parts, flags, True
        self._wake()

    def _ended(self, _: Call) -> None:
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None:
            return
        loop = waiter.get_loop()
        if loop is asyncio._get_running_loop():  # this C accessor does not raise
            _set(waiter)
        else:
            with contextlib.suppress(RuntimeError):  # the waiter's loop is closed: it does not wait any more
                loop.call_soon_threadsafe(_set, waiter)

    async def next(self) -> Any:
        """Return the next item. Cancelling loses no item.

        Raises:
            StopAsyncIteration: the stream has no more items.
            RuntimeError: another task is waiting on this stream, or the unpickling of an item raised
                StopAsyncIteration.
        """
        while not (self._slots and self._slots[0].ready):
            if self._closed:
                raise StopAsyncIteration
            if not self._slots and self.call.done:
                self._finish()
            if self._waiter is not None:
                raise RuntimeError("two tasks iterate over one stream; give each its own call")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                if (
                    not self.has_news()
                ):  # on a loop other than the session's, an item may have come before the waiter was set
                    await self._waiter
            finally:
                self._waiter = None
        slot = self._slots.popleft()
        self._taken += 1
        if self._taken >= STREAM_WINDOW // 2 and not self.call.done:
            self.call.session.send_stream_credit(self.call, self._taken)
            self._taken = 0
        try:
            return self._unpack(slot.payload, slot.parts, slot.flags)
        except StopAsyncIteration as error:  # it would end the loop over the stream, as if there were no more items
            raise RuntimeError("an item of the stream raised StopAsyncIteration while it was unpickled") from error

    def has_news(self) -> bool:
        """Whether `next` returns or raises without waiting."""
        if self._slots:
            return self._slots[0].ready
        return self._closed or self.call.done

    def _finish(self) -> None:
        call = self.call
        call.retrieved = True
        self._closed = True
        error, call.error = call.error, None  # else it would keep itself, by this frame in its traceback
        if error is not None:
            try:
                raise bare(error, None)
            finally:
                del error
        if call.status == Status.ERROR:
            raise self._unpack(call.payload, call.parts, call.flags)
        raise StopAsyncIteration

    def close(self) -> None:
        """Close the generator, and drop items that were not taken. Idempotent; ``__del__`` uses `abandon`."""
        if not self._closed:
            self._closed = True
            self._slots.clear()
            self.call.retrieved = True
            if not self.call.done:
                self._cancel(self.call)
            self._wake()

    def abandon(self) -> None:
        """Call `close` in the loop's next turn: for ``__del__``, which may run on any thread and inside the garbage
        collector."""
        loop = self.call.loop
        if not self._closed and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.close)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
