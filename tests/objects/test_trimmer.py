"""The return of memory to the system: two marks and a window, on a loop that only records."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from zcactor.objects.trimmer import HIGH, PERIOD, STEP_NBYTES, Trimmer
from zcactor.objectstore.arena import Arena
from zcactor.objectstore.heap import Heap, use_handler
from zcactor.objectstore.store import Store

MIB = 1 << 20
KEEP = 8 * MIB


class Timer:
    """A timer as `Loop.call_later` returns it."""

    def __init__(self, delay: float, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.delay = delay
        self.callback = callback
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        """Cancel the timer."""
        self.cancelled = True


class Loop:
    """A loop without time: the test says which timer is due."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}
        self.timers: list[Timer] = []

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Add a reader as asyncio's loop does."""
        assert fd not in self.readers
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> bool:
        """Remove a reader as asyncio's loop does."""
        return self.readers.pop(fd, None) is not None

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer:
        """Set a timer as asyncio's loop does."""
        self.timers.append(Timer(delay, callback, args))
        return self.timers[-1]

    def read(self) -> bool:
        """Call the readers with readable descriptors; return whether there was one."""
        ready, _, _ = select.select(list(self.readers), [], [], 0)
        for fd in ready:
            self.readers[fd]()
        return bool(ready)

    def run_timer(self) -> float:
        """Run the only timer, and return its delay."""
        due = [timer for timer in self.timers if not timer.cancelled]
        assert len(due) == 1
        self.timers.clear()
        due[0].callback(*due[0].args)
        return due[0].delay

    @property
    def pending(self) -> list[float]:
        """The delays of the timers that are set."""
        return [timer.delay for timer in self.timers if not timer.cancelled]


class FakeHeap:
    """A heap that consists of figures, and records calls."""

    fd = 0
    """The descriptor of its file."""

    def __init__(self, committed: int = 0, used: int = 0) -> None:
        self.committed = committed
        self.used = used
        self.peak = used
        self.watched: list[tuple[bool, int]] = []
        self.trims: list[tuple[int, int]] = []
        self.stuck = False
        """Whether free memory lies in crumbs, so that none can be given back."""
        self.event_fd = -1

    @property
    def idle(self) -> int:
        """See `Heap.idle`."""
        return max(self.committed - self.used, 0)

    def watch(self, event_fd: int, idle_limit: int) -> int:
        """See `Heap.watch`."""
        self.watched.append((event_fd >= 0, idle_limit))
        self.event_fd = event_fd
        peak, self.peak = self.peak, self.used
        return peak

    def trim(self, keep: int, at_most: int) -> int:
        """See `Heap.trim`."""
        self.trims.append((keep, at_most))
        given = 0 if self.stuck else min(max(self.committed - keep, 0), at_most)
        self.committed -= given
        return given

    def tell(self) -> None:
        """Write to the event as the heap does when too much memory lies idle."""
        assert self.event_fd >= 0
        os.eventfd_write(self.event_fd, 1)


def made(heap: Any, keep: int = KEEP) -> tuple[Trimmer, Loop]:
    """A trimmer on a recording loop."""
    loop: Any = Loop()
    return Trimmer(heap, loop, keep), loop


def told(heap: FakeHeap) -> tuple[Trimmer, Loop]:
    """A trimmer whose window has begun."""
    trimmer, loop = made(heap)
    heap.tell()
    assert loop.read()
    return trimmer, loop


def test_nothing_is_scheduled_until_the_heap_tells() -> None:
    heap = FakeHeap(committed=1000 * MIB)
    trimmer, loop = made(heap)
    assert heap.watched == [(True, HIGH * KEEP)]
    assert list(loop.readers) == [heap.event_fd]
    assert not loop.read() and not loop.timers and not heap.trims
    trimmer.close()


def test_told_then_a_window_then_steps_down_to_the_watermark() -> None:
    heap = FakeHeap(committed=300 * MIB, used=10 * MIB)
    trimmer, loop = made(heap)
    heap.tell()
    assert loop.read()
    assert loop.pending == [PERIOD] and not heap.trims
    assert heap.watched[1:] == [(False, 0)], "it is not told again meanwhile"
    assert not loop.read()
    assert loop.run_timer() == PERIOD
    steps = 1
    while heap.committed > 18 * MIB:
        before = heap.committed
        assert loop.run_timer() < PERIOD / 100
        assert before - heap.committed <= STEP_NBYTES
        steps += 1
    assert heap.trims == [(18 * MIB, STEP_NBYTES)] * steps
    assert steps == -(-282 * MIB // STEP_NBYTES)
    assert loop.run_timer() < PERIOD / 100, "one more look, whether more was freed"
    assert not loop.pending
    assert heap.watched[-1] == (True, HIGH * KEEP), "armed again"
    heap.committed = 200 * MIB
    heap.tell()
    assert loop.read() and loop.pending == [PERIOD]
    trimmer.close()
    assert not loop.pending


def test_the_peak_of_the_window_stays() -> None:
    heap = FakeHeap(committed=300 * MIB, used=10 * MIB)
    trimmer, loop = told(heap)
    heap.peak = 120 * MIB  # a step of a loop needed that much
    loop.run_timer()
    while loop.pending and loop.pending != [PERIOD]:
        loop.run_timer()
    assert heap.committed == 120 * MIB
    # More than twice the watermark still lies idle: the next window decides, with a peak of its own.
    assert loop.pending == [PERIOD]
    heap.peak = 50 * MIB
    loop.run_timer()
    while loop.pending and loop.pending != [PERIOD]:
        loop.run_timer()
    assert heap.committed == 50 * MIB
    loop.run_timer()
    while loop.pending:
        loop.run_timer()
    assert heap.committed == 18 * MIB
    assert heap.watched[-1] == (True, HIGH * KEEP)
    trimmer.close()


def test_what_is_used_again_in_the_window_is_not_given_back() -> None:
    heap = FakeHeap(committed=300 * MIB)
    trimmer, loop = told(heap)
    heap.used = heap.peak = 300 * MIB
    loop.run_timer()
    assert not heap.trims and not loop.pending
    assert heap.watched[-1] == (True, HIGH * KEEP)
    trimmer.close()


def test_memory_that_is_taken_between_two_steps_is_not_given_back() -> None:
    heap = FakeHeap(committed=300 * MIB)
    trimmer, loop = told(heap)
    loop.run_timer()
    assert heap.committed == 300 * MIB - STEP_NBYTES
    heap.used = heap.committed - MIB
    loop.run_timer()
    assert heap.committed == 300 * MIB - STEP_NBYTES and not loop.pending
    trimmer.close()


def test_crumbs_that_cannot_be_given_back_are_looked_at_once_per_window() -> None:
    heap = FakeHeap(committed=300 * MIB, used=MIB)
    heap.stuck = True
    trimmer, loop = told(heap)
    for _ in range(5):
        assert loop.run_timer() == PERIOD
    assert len(heap.trims) == 5
    heap.stuck = False
    loop.run_timer()
    while loop.pending:
        loop.run_timer()
    assert heap.committed == KEEP + MIB
    trimmer.close()


@pytest.mark.parametrize("state", ["idle", "told", "in the window", "in the steps"])
def test_close_is_idempotent_at_any_time(state: str) -> None:
    heap = FakeHeap(committed=300 * MIB)
    trimmer, loop = made(heap)
    (fd,) = loop.readers
    if state != "idle":
        heap.tell()
    if state.startswith("in"):
        loop.read()
    if state == "in the steps":
        loop.run_timer()
    for _ in range(3):
        trimmer.close()
        assert not loop.readers and not loop.pending
        assert heap.watched[-1] == (False, 0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_forked_child_closes_what_is_its_own_and_leaves_the_loop_alone() -> None:
    heap = FakeHeap()
    trimmer, loop = made(heap)
    (fd,) = loop.readers
    for _ in range(2):
        trimmer.abandon()
        assert list(loop.readers) == [fd]
        assert heap.watched[-1] == (False, 0)
    trimmer.close()
    assert list(loop.readers) == [fd]
    loop.readers.clear()


# ---------------------------------------------------------------- with a heap


@pytest.fixture
def store() -> Iterator[Store]:
    """A store that NumPy allocates from."""
    made = Store(256 * MIB, bytes(16))
    before = made.heap.use(1 << 16)
    yield made
    use_handler(before)
    made.close()


def test_between_the_two_marks_nothing_happens(store: Store) -> None:
    trimmer, loop = made(store.heap)
    for nbytes in (4 * MIB, KEEP + MIB, HIGH * KEEP - 2 * MIB, HIGH * KEEP):
        array = np.ones(nbytes, "u1")
        committed = store.stats().committed
        del array
        assert store.stats().committed == committed
        assert not loop.read() and not loop.timers
    trimmer.close()


def test_a_heap_with_too_much_is_trimmed_once_its_window_is_over(store: Store) -> None:
    trimmer, loop = made(store.heap, 16 * MIB)
    for _ in range(2):  # the event is armed again afterwards
        held = [np.ones(16 * MIB, "u1") for _ in range(5)]
        assert not loop.read()
        kept = held.pop(0)
        held.clear()
        assert loop.read() and loop.pending == [PERIOD]
        assert store.stats().committed == 80 * MIB
        peak = np.ones(48 * MIB, "u1")
        del peak
        assert not loop.read(), "it is told once"
        loop.run_timer()
        while loop.pending != [PERIOD]:
            loop.run_timer()
        assert store.stats().committed == 64 * MIB, "as much as was used at a time in the window"
        loop.run_timer()
        while loop.pending:
            loop.run_timer()
        assert store.stats().committed == 32 * MIB, "what is used, and the watermark"
        assert os.fstat(store.arena.fd).st_blocks * 512 == 32 * MIB
        assert kept.all()
        del kept
        assert not loop.read() and not loop.pending
    trimmer.close()


def test_a_heap_tells_from_the_thread_that_frees(store: Store) -> None:
    trimmer, loop = made(store.heap)
    held = [np.ones(40 * MIB, "u1")]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert loop.read() and loop.pending == [PERIOD]
    trimmer.close()


def test_a_heap_that_is_over_the_limit_before_it_is_watched_tells_at_the_next_free(store: Store) -> None:
    dirty = np.ones(60 * MIB, "u1")
    del dirty
    trimmer, loop = made(store.heap)
    np.ones(1 << 16, "u1")
    assert loop.read()
    trimmer.close()


def test_what_is_freed_just_before_the_heap_is_watched_again_is_not_missed(store: Store) -> None:
    """Another thread may free a program's last array between the look at the figures and `watch`.

    After that no free would trigger the event.
    """

    class Late:
        """A heap in which another array is freed at that moment."""

        def __init__(self, heap: Heap) -> None:
            self.heap = heap
            self.held: list[Any] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(self.heap, name)

        def watch(self, event_fd: int, idle_limit: int) -> int:
            """Free, then watch."""
            if event_fd >= 0:
                self.held.clear()
            return self.heap.watch(event_fd, idle_limit)

    heap = Late(store.heap)
    trimmer, loop = made(heap)
    heap.held.append(np.ones(60 * MIB, "u1"))
    dirty = np.ones(30 * MIB, "u1")
    del dirty
    assert loop.read()
    loop.run_timer()
    while loop.pending:
        loop.run_timer()
    assert not heap.held
    assert store.heap.committed - store.heap.used > HIGH * KEEP
    told = loop.read()
    trimmer.close()
    assert told or loop.pending


@pytest.mark.slow
def test_pinned_memory_is_not_idle(store: Store) -> None:
    store.heap.pin(0, 128 * MIB)
    trimmer, loop = made(store.heap)
    dirty = np.ones(100 * MIB, "u1")
    del dirty
    assert not loop.read() and store.heap.idle == 0
    dirty = np.ones(200 * MIB, "u1")
    del dirty
    assert loop.read() and store.heap.idle == 72 * MIB
    while loop.pending:
        loop.run_timer()
    assert store.heap.committed == 128 * MIB
    assert not loop.read(), "armed again, and nothing to tell"
    store.heap.unpin_all()
    assert loop.read(), "now it is idle"
    trimmer.close()


@pytest.mark.slow
async def test_on_a_real_loop(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcactor.objects.trimmer.PERIOD", 0.01)
    trimmer = Trimmer(store.heap, asyncio.get_running_loop(), 16 * MIB)
    try:
        first, second = np.full(16 * MIB, 3, "u1"), np.ones(96 * MIB, "u1")
        del second
        async with asyncio.timeout(20):
            while store.stats().committed > 32 * MIB:
                await asyncio.sleep(0)
        assert store.stats().committed == 32 * MIB
        assert (first == 3).all() and not np.zeros(50 * MIB, "u1").any()
    finally:
        trimmer.close()


def test_a_heap_without_a_file_is_asked() -> None:
    arena = Arena(64 * MIB, seed=1)
    loop = Loop()
    trimmer = Trimmer(arena.heap, loop, KEEP)  # type: ignore[arg-type]
    assert not loop.readers
    hold = arena.heap.take(48 * MIB)
    arena.commit(hold.offset, 48 * MIB)
    del hold
    assert arena.committed == 48 * MIB
    for _ in range(2):  # the memory was in use in the first window
        timer = loop.timers.pop()
        assert timer.delay == PERIOD
        timer.callback(*timer.args)
    while arena.committed > KEEP:
        timer = loop.timers.pop()
        timer.callback(*timer.args)
    trimmer.close()
    assert loop.timers[-1].cancelled
