"""The threads of a process: their number, and a thread for work that waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.driver.programs import PATIENCE, until
from zcactor.execution import threads as threads_module
from zcactor.execution.threads import Threads


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads("test", 2)
    yield made
    made.close()


def test_as_few_as_do_the_work(threads: Threads) -> None:
    """Work that comes one item at a time runs on one thread, in order, and leaves no thread to spare."""
    ran: list[tuple[int, int]] = []
    for number in range(50):
        done = threading.Event()

        def work(number: int = number, done: threading.Event = done) -> None:
            ran.append((number, threading.get_ident()))
            done.set()

        threads.submit(work)
        assert done.wait(PATIENCE)
        until(lambda: threads._idle, "the thread is idle")
    assert [number for number, _ in ran] == list(range(50))
    assert len({ident for _, ident in ran}) == 1
    assert threads.count == 1
    assert not threads.wanted


def test_short_work_needs_no_more_than_the_size(monkeypatch: pytest.MonkeyPatch, threads: Threads) -> None:
    monkeypatch.setattr(threads_module, "PATIENCE", PATIENCE)  # this machine may be busy with other things
    left = threading.Semaphore(0)
    for _ in range(5000):
        threads.submit(left.release)
    for _ in range(5000):
        assert left.acquire(timeout=PATIENCE)
    assert threads._made <= threads.size


@pytest.mark.slow
def test_what_blocks_does_not_hold_up_the_others(threads: Threads) -> None:
    """Each item waits for the next one in the queue: twenty waits, with a size of two."""
    events = [threading.Event() for _ in range(21)]

    def work(number: int) -> None:
        if number == 20 or events[number + 1].wait(PATIENCE):
            events[number].set()

    for number in range(21):
        threads.submit(lambda number=number: work(number))  # type: ignore[misc]
    assert events[0].wait(PATIENCE)
    assert threads.count <= 21


def test_idle_ones_end(monkeypatch: pytest.MonkeyPatch, threads: Threads) -> None:
    monkeypatch.setattr(threads_module, "IDLE", 0.01)
    barrier = threading.Barrier(3)

    def meet() -> None:
        barrier.wait(PATIENCE)

    for _ in range(2):
        threads.submit(meet)
    barrier.wait(PATIENCE)
    until(lambda: not threads.count, "the threads have ended")
    again = threading.Event()
    threads.submit(again.set)
    assert again.wait(PATIENCE)


def test_given_while_they_end(monkeypatch: pytest.MonkeyPatch, threads: Threads) -> None:
    """No work is lost that comes while a thread gives up waiting."""
    monkeypatch.setattr(threads_module, "IDLE", 0.0005)
    ran = threading.Semaphore(0)
    for number in range(2000):
        threads.submit(ran.release)
        if number % 3 == 0:
            assert ran.acquire(timeout=PATIENCE)
            ran.release()
    for _ in range(2000):
        assert ran.acquire(timeout=PATIENCE)


def test_closing_ends_all(threads: Threads) -> None:
    held, began = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        held.wait(PATIENCE)

    threads.submit(hold)
    assert began.wait(PATIENCE)
    threads.close()
    threads.close()
    held.set()
    until(lambda: not threads.count, "the threads have ended")
