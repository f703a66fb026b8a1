"""Snapshots: things that are left, and things that do not count."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import weakref

import pytest

from zcactor.testing import leaks
from zcactor.testing.leaks import Snapshot


async def test_nothing() -> None:
    before = Snapshot(asyncio.get_running_loop())
    assert before.left() == []


async def test_tasks_of_the_loop() -> None:
    old = asyncio.create_task(asyncio.Event().wait(), name="old")
    before, without = Snapshot(asyncio.get_running_loop()), Snapshot()
    new = asyncio.create_task(asyncio.Event().wait(), name="new")
    assert before.left() == ["task 'new' (Event.wait)"]
    assert without.left() == []
    for task in (old, new):
        task.cancel()
    await asyncio.wait([old, new])
    assert before.left() == []


async def test_threads_but_not_those_of_the_loop() -> None:
    before, go = Snapshot(), threading.Event()
    thread = threading.Thread(target=go.wait, name="new")
    thread.start()
    await asyncio.to_thread(int)
    (line,) = before.left()
    assert line.startswith("thread 'new', which is in ") and "threading.py:" in line
    go.set()
    assert await leaks.settled(before.left) == []
    thread.join()


def test_children_also_those_that_nobody_waits_for() -> None:
    before = Snapshot()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (line,) = [each for each in before.left() if "child" in each]
    assert line.startswith(f"child {child.pid} (")
    assert not line.endswith("not waited for)")
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    (line,) = before.left()
    assert "python, which has ended and was not waited for" in line
    child.wait()
    assert before.left() == []


def test_descriptors_by_number_and_target() -> None:
    read, write = os.pipe()
    before = Snapshot()
    os.close(read)
    again = os.open("/dev/null", os.O_RDONLY)
    assert again == read  # the number is old, the file is new
    assert before.left() == [f"descriptor {again} (/dev/null)"]
    os.close(again)
    os.close(write)
    assert before.left() == []


async def test_what_ends_soon_is_waited_for() -> None:
    looks = [["a"], ["a"], ["a"], []]
    assert await leaks.settled(lambda: looks.pop(0) if len(looks) > 1 else looks[0]) == []


async def test_what_stays_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "SETTLING", 0.01)
    assert await leaks.settled(lambda: ["it"]) == ["it"]


async def test_garbage_does_not_count() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    left = weakref.ref(Cycle())
    assert await leaks.settled(lambda: ["it"] if left() is not None else []) == []
