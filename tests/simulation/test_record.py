"""The record of a run, and its judgement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from simulation.record import Record
from simulation.trace import Trace
from simulation.world import World
from zcactor.process.context import current_host


@pytest.fixture
def record() -> Record:
    return Record(World(1, Trace()))


def broken(record: Record) -> list[str]:
    return [each.invariant for each in record.broken]


def test_calls_that_do_as_they_should(record: Record) -> None:
    for outcome, runs, maybe in (("ok", 1, None), ("ActorDied", 0, False), ("ActorDied", 1, True)):
        operation = record.begin("plain")
        for _ in range(runs):
            record.ran(operation.number, record)
        record.end(operation, outcome, maybe)
    record.judge()
    assert not record.broken
    assert record.outcomes == {"ok": 1, "ActorDied": 2}


@pytest.mark.parametrize(("tries", "runs", "expected"), [(1, 2, ["I2"]), (3, 3, []), (3, 4, ["I2"])])
def test_runs_are_bounded(record: Record, tries: int, runs: int, expected: list[str]) -> None:
    operation = record.begin("retry", tries)
    for _ in range(runs):
        record.ran(operation.number, record)
    assert broken(record) == expected


def test_ends_are_counted_and_outcomes_true(record: Record) -> None:
    twice, never_ran, ran = record.begin("plain"), record.begin("plain"), record.begin("plain")
    record.ran(twice.number, record)
    record.end(twice, "ok")
    record.end(twice, "ok")
    record.end(never_ran, "ok")
    record.ran(ran.number, record)
    record.end(ran, "ActorUnavailable", maybe=False)
    record.judge()
    assert broken(record) == ["I1", "I3", "I3"]


def test_order_holds_for_a_line_in_one_actor(record: Record) -> None:
    one, other = Mock(), Mock()
    first, second, third = (record.begin("plain", order=("driver to r0", place)) for place in (1, 2, 3))
    record.ran(second.number, one)
    record.ran(first.number, other)  # another life of the actor
    record.ran(third.number, one)
    assert not record.broken
    late = record.begin("plain", order=("driver to r0", 1))
    record.ran(late.number, one)
    assert broken(record) == ["I6"]


def test_reports_are_bounded(record: Record) -> None:
    for _ in range(1000):
        record.break_("I5", "again")
    assert len(record.broken) == 100
    record.saw("a state")
    assert record.sometimes == {"a state": 1}
    assert record.broken[0].plain() == {"invariant": "I5", "at": 0.0, "text": "again"}


@pytest.mark.parametrize(
    ("same", "apart", "expected"),
    [(False, False, ["I4"]), (False, True, []), (True, True, ["I4"]), (True, False, ["I4"])],
)
def test_an_actor_lives_once_and_a_name_is_unique_on_each_side_of_a_cut(
    record: Record, same: bool, apart: bool, expected: list[str]
) -> None:
    record.apart = lambda one, other: apart and one != other

    async def live(actor: bytes) -> None:
        current_host.set(SimpleNamespace(info=SimpleNamespace(actor_id=actor), index=2))
        record.constructed("n0")

    for number in (1, 2):
        loop = record.world.process(f"h{number}", f"w{number}")
        loop.begin(live(b"one" if same else b"%d" % number))
    record.world.run(lambda: record.lives("n0") == 2, limit=10.0)
    assert record.lives("n0") == 2
    assert broken(record) == expected


@pytest.mark.parametrize(
    ("former", "index", "expected"),
    [
        ((False, "it"), 3, ["I4"]), ((True, "it"), 3, ["I4"]), ((True, None), 3, []), (None, 3, []),
        ((False, None), 3, ["I4"]), (None, 2, ["I4"]),
    ],
    ids=["alive", "closing", "moved", "discarded", "in its constructor", "constructed twice"],
)  # fmt: skip
@pytest.mark.parametrize("back", [False, True], ids=["elsewhere", "back"])
def test_an_actor_lives_again_where_it_was_closed_or_discarded(
    record: Record, former: tuple[bool, object] | None, index: int, expected: list[str], back: bool
) -> None:
    """The runner of its next life may be in the same process, which several actors share: it came back there."""
    info = SimpleNamespace(actor_id=b"a")

    async def live(index: int) -> None:
        current_host.set(SimpleNamespace(info=info, index=index))
        record.constructed("n0")

    first: Any = record.world.process("h1", "w1")
    first.begin(live(2))
    record.world.run(lambda: record.lives("n0") == 1, limit=10.0)
    there = {9: SimpleNamespace(info=SimpleNamespace(actor_id=b"b"), moving=False, instance="another one")}
    if former is not None:
        there[2] = SimpleNamespace(info=info, moving=former[0], instance=former[1])
    first.process = SimpleNamespace(hosts=SimpleNamespace(by_index=there))
    if back or index == 2:  # a second constructor at one index is in the same process
        there[index] = SimpleNamespace(info=info, moving=False, instance=None)
        first.begin(live(index))
    else:
        record.world.process("h2", "w2").begin(live(index))
    record.world.run(lambda: record.lives("n0") == 2, limit=10.0)
    assert record.lives("n0") == 2
    assert broken(record) == expected


def test_an_actor_lives_again_where_its_process_has_ended(record: Record) -> None:
    async def live() -> None:
        record.constructed("n0")

    for number in (1, 2):
        loop = record.world.process(f"h{number}", f"w{number}")
        loop.begin(live())
        record.world.run(lambda number=number: record.lives("n0") == number, limit=10.0)  # type: ignore[misc]
        record.world.end(loop, "killed")
    assert record.lives("n0") == 2
    assert not record.broken
