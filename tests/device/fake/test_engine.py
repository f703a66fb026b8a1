"""Streams of a fake GPU: each in order, all side by side, as late as the seed says."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from zcactor.device.driver import CudaCode, Refused
from zcactor.device.fake.engine import FakeEngine
from zcactor.device.fake.options import FakeOptions


def order(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The order in which one operation of each of twenty streams runs that are queued at the same time."""
    now = 0.0
    monkeypatch.setattr("zcactor.device.fake.engine.time", SimpleNamespace(monotonic=lambda: now))
    engine, seen, last = FakeEngine(0, FakeOptions(late=20, seed=seed)), list[int](), threading.Semaphore(0)

    def note(number: int) -> None:
        seen.append(number)
        last.release()

    for stream in [engine.add_stream() for _ in range(20)]:
        engine.submit(stream, lambda number=stream: note(number), is_work=True)  # type: ignore[misc]
    assert not seen
    now = 1.0
    for _ in range(20):
        assert last.acquire(timeout=30)
    engine.close()
    return seen


def test_streams_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [order(seed, monkeypatch) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(each) == list(range(1, 21)) != each for each in orders)


def test_a_stream_that_is_held_begins_nothing() -> None:
    engine, gate, done = FakeEngine(0, FakeOptions()), threading.Event(), threading.Event()
    first, second = engine.add_stream(), engine.add_stream()
    engine.hold(first, gate.is_set)
    engine.submit(first, done.set)
    entered, go_on = threading.Event(), threading.Event()

    def run() -> None:
        entered.set()
        assert go_on.wait(30)

    engine.submit(second, run)
    assert entered.wait(30) and not engine.rests(), "an operation runs"
    engine.hold(second, lambda: False)
    assert not engine.rests(), "it runs although its stream is held by now"
    go_on.set()
    while not engine.rests():
        pass
    assert not done.is_set() and engine.is_idle(second)
    gate.set()
    assert done.wait(30)
    engine.close()


def test_one_stream_holds_no_other_back() -> None:
    engine, held, free = FakeEngine(0, FakeOptions()), threading.Event(), threading.Event()
    first, second = engine.add_stream(), engine.add_stream()
    engine.submit(first, lambda: None, held.is_set)
    engine.submit(second, free.set)
    assert free.wait(30)
    after = threading.Event()
    engine.submit(first, after.set)
    held.set()
    assert after.wait(30)
    engine.close()


def test_a_fault_breaks_everything() -> None:
    engine, ran = FakeEngine(0, FakeOptions()), threading.Event()

    def fault() -> None:
        ran.set()
        raise Refused(CudaCode.ILLEGAL_ADDRESS, "it was read")

    gate = threading.Event()
    other = engine.add_stream()
    engine.submit(other, lambda: pytest.fail("it runs on a broken GPU"), gate.is_set)
    engine.submit(0, fault)
    assert ran.wait(30)
    while engine.broken is None:
        pass
    gate.set()
    engine.close()
    assert engine.broken.reason == "it was read"


def test_streams_that_have_ended() -> None:
    engine, gate, done = FakeEngine(0, FakeOptions()), threading.Event(), threading.Event()
    stream = engine.add_stream()
    engine.submit(stream, done.set, gate.is_set)
    engine.end_stream(stream)
    with pytest.raises(Refused):
        engine.submit(stream, lambda: None)
    gate.set()
    assert done.wait(30)
    with pytest.raises(Refused):
        engine.check(77)
    engine.close()


def test_closing_ends_the_thread() -> None:
    engine = FakeEngine(5, FakeOptions())
    assert not [each for each in threading.enumerate() if each.name == "zcactor-gpu5"]
    engine.submit(0, lambda: None, lambda: False)
    assert [each for each in threading.enumerate() if each.name == "zcactor-gpu5"]
    engine.close()
    engine.close()
    assert not [each for each in threading.enumerate() if each.name == "zcactor-gpu5"]
