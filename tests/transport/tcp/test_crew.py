"""Threads that wait for work: at once, few, and gone after a while."""

from __future__ import annotations

import os
import queue
import threading

import pytest

from zcactor.transport.tcp import crew
from zcactor.transport.tcp.crew import Crew, NoThread

Idents = queue.SimpleQueue[int]


def ident(into: Idents) -> None:
    """A short piece of work: report the thread that runs it."""
    into.put(threading.get_ident())


def test_one_thread_for_work_that_comes_after_each_other() -> None:
    mine, seen = Crew(), Idents()
    for _ in range(20):
        mine.run(lambda: ident(seen))
        seen.get()
        while not mine._resting:
            pass
    assert seen.empty()
    assert len(mine._resting) == 1


def test_work_at_once_never_waits() -> None:
    mine, count = Crew(), 3 * crew.SPARE
    together = threading.Barrier(count + 1)
    for _ in range(count):
        mine.run(together.wait)
    together.wait(60)


def test_few_threads_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "SPARE", 2)
    mine, count = Crew(), 7
    before = set(threading.enumerate())
    together = threading.Barrier(count + 1)
    for _ in range(count):
        mine.run(together.wait)
    together.wait(60)
    while len(set(threading.enumerate()) - before) > 2 or len(mine._resting) < 2:
        pass
    assert len(mine._resting) == 2


def test_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "REST", 0.001)
    mine, seen = Crew(), Idents()
    before = set(threading.enumerate())
    for _ in range(200):  # some work comes just when the thread is about to end
        mine.run(lambda: ident(seen))
        seen.get(timeout=60)
    while set(threading.enumerate()) - before:
        pass
    assert mine._resting == []


def test_no_thread_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(NoThread, match="can't start"):
        Crew().run(lambda: None)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_has_threads_of_its_own() -> None:
    seen = Idents()
    crew.run(lambda: ident(seen))
    seen.get(timeout=60)
    child = os.fork()
    if child == 0:
        there = Idents()
        crew.run(lambda: ident(there))
        there.get(timeout=60)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
