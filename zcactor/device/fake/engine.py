"""The streams of one fake GPU: queues that one thread runs, late and side by side."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from zcactor.device.driver import CudaCode, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.device.fake.options import FakeOptions

__all__ = ["FakeEngine"]

_POLL: Final = 0.0005
"""Seconds between looks at an event on which a stream waits: another process may be the one to set it."""


@dataclass(slots=True)
class _Operation:
    run: Callable[[], object]
    ready: Callable[[], bool] | None
    """Whether it may begin; None for one that waits for nothing."""
    is_work: bool
    """Whether it touches memory: this alone begins late, and may break the context."""


@dataclass(slots=True, eq=False)
class _Stream:
    random: random.Random
    queue: deque[_Operation] = field(default_factory=deque)
    due: float = 0.0
    """The time at which the first of the queue may begin."""
    held: Callable[[], bool] | None = None
    """Nothing of it begins until this is true; None for a stream that nobody holds."""
    queued: int = 0
    """Number of operations that were ever queued."""

    @property
    def done(self) -> int:
        """Number of operations that were done."""
        return self.queued - len(self.queue)

    def may_begin(self) -> bool:
        """Whether the first of the queue waits for nothing but its time."""
        if self.held is not None:
            if not self.held():
                return False
            self.held = None
        return bool(self.queue) and ((ready := self.queue[0].ready) is None or ready())


class FakeEngine:
    """The engine of one GPU. It has a thread from the first operation on, until `close`. Any thread may use it.

    Args:
        device: the GPU's index, which names the thread and is part of the seed.
        options: the options of the fake.
    """

    def __init__(self, device: int, options: FakeOptions) -> None:
        self._device: Final = device
        self._options: Final = options
        self._changed: Final = threading.Condition()
        self._streams: dict[int, _Stream] = {0: self._stream(0)}
        self._ended: list[_Stream] = []
        """Streams without a number, whose work is not done."""
        self._behind = self._stream(-1)
        """The stream of operations that come after the work of all others. No call names it."""
        self._free: list[int] = []
        """Numbers of streams that were given up. As CUDA does, the last one is handed out again at once, also while the
        work of that stream goes on."""
        self._works = 0
        self._runs = False
        """Whether an operation runs now."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self.broken: Refused | None = None
        """The fault by which the device's context is broken."""

    def _stream(self, number: int) -> _Stream:
        return _Stream(random.Random(f"{self._options.seed}/{self._device}/{number}"))

    def add_stream(self) -> int:
        """Make a stream. Returns its number among those of the GPU."""
        with self._changed:
            number = self._free.pop() if self._free else len(self._streams)
            self._streams[number] = self._stream(number)
            return number

    def end_stream(self, number: int) -> None:
        """Give up a stream; its queue is still done."""
        with self._changed:
            stream = self._find(number)
            del self._streams[number]
            self._free.append(number)
            if stream.queue:
                self._ended.append(stream)

    def _find(self, number: int) -> _Stream:
        stream = self._streams.get(number)
        if stream is None:
            raise Refused(CudaCode.INVALID_HANDLE, f"there is no stream {number}")
        return stream

    def check(self, number: int) -> None:
        """Check that there is a stream of that number.

        Raises:
            Refused: there is no such stream.
        """
        with self._changed:
            self._find(number)

    def is_idle(self, number: int) -> bool:
        """Whether the stream's queue is empty.

        Raises:
            Refused: there is no such stream.
        """
        with self._changed:
            return not self._find(number).queue

    def hold(self, number: int, until: Callable[[], bool]) -> None:
        """Begin nothing on a stream until a function is true: its work is then not done for certain, however slow the
        program is.

        Args:
            number: the stream's.
            until: called again and again, by any thread; it takes the place of an earlier one.

        Raises:
            Refused: there is no such stream.
        """
        with self._changed:
            self._find(number).held = until
            self._changed.notify_all()

    def rests(self) -> bool:
        """Whether nothing runs, and all that is queued waits for something else than its time."""
        with self._changed:
            return not self._runs and not any(stream.may_begin() for stream in self._all())

    def synchronize(self, seconds: float) -> bool:
        """Wait until nothing is queued any more, the context is broken, or the engine is closed. Returns whether that
        was so within `seconds`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.broken is not None or self._closed or not any(each.queue for each in self._all()), seconds
            )

    def _all(self) -> list[_Stream]:
        return [*self._streams.values(), *self._ended, self._behind]

    def submit(
        self, number: int, run: Callable[[], object], ready: Callable[[], bool] | None = None, *, is_work: bool = False
    ) -> None:
        """Queue an operation.

        Args:
            number: the stream's.
            run: called by the engine's thread; a `Refused` that it raises breaks the context.
            ready: called until it is true, before `run`.
            is_work: whether it is a copy or a fill.

        Raises:
            Refused: there is no such stream.
        """
        with self._changed:
            self._queue(self._find(number), _Operation(run, ready, is_work))

    def submit_behind(self, run: Callable[[], object]) -> None:
        """Queue an operation that begins when all is done that is queued now, on any stream."""
        with self._changed:
            before = [(stream, stream.queued) for stream in self._all() if stream is not self._behind]
            ready = lambda: all(stream.done >= queued for stream, queued in before)  # noqa: E731
            self._queue(self._behind, _Operation(run, ready, is_work=False))

    def _queue(self, stream: _Stream, operation: _Operation) -> None:
        stream.queue.append(operation)
        stream.queued += 1
        if len(stream.queue) == 1:
            self._due(stream)
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name=f"zcactor-gpu{self._device}", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _due(self, stream: _Stream) -> None:
        stream.due = time.monotonic()
        if stream.queue and stream.queue[0].is_work and self._options.late:
            stream.due += self._options.late / 1e3 * stream.random.uniform(0.5, 1.5)

    def _run(self) -> None:
        while True:
            with self._changed:
                while (stream := self._choose()) is None:
                    if self._closed:
                        return
                    self._changed.wait(self._pause())
                self._runs = True
            operation = stream.queue[0]
            try:
                if operation.is_work:
                    self._count()
                operation.run()
            except Refused as error:
                self.give_up(error)
            with self._changed:
                self._runs = False
                if self.broken is not None:
                    continue
                stream.queue.popleft()
                if stream.queue:
                    self._due(stream)
                else:
                    if stream in self._ended:
                        self._ended.remove(stream)
                    self._changed.notify_all()

    def give_up(self, error: Refused) -> None:
        """Break the device's context: nothing that is queued is done any more."""
        with self._changed:
            self.broken = error
            for each in self._all():
                each.queue.clear()
            self._changed.notify_all()

    def _count(self) -> None:
        self._works += 1
        if self._works == self._options.breaks_at:
            raise Refused(CudaCode.ILLEGAL_ADDRESS, "the option fail=fatal broke the context")

    def _choose(self) -> _Stream | None:
        """The stream whose first operation may begin, and is due longest."""
        if self.broken is not None or self._closed:
            return None
        now = time.monotonic()
        able = [each for each in self._all() if each.queue and each.due <= now and each.may_begin()]
        return min(able, key=lambda stream: stream.due, default=None)

    def _pause(self) -> float | None:
        """Seconds until there may be something to do; None for until it is told."""
        if self.broken is not None:
            return None
        now = time.monotonic()
        times = [stream.due - now for stream in self._all() if stream.queue]
        return max(min(times), _POLL) if times else None

    def close(self) -> None:
        """End the thread after the operation that it is at; the others are dropped. Idempotent."""
        with self._changed:
            self._closed = True
            self._streams.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
