"""The admission of calls: each kind against each state of its lane, and arguments of another type."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from zcactor.interface import MethodKind
from zcactor.native import hot

THREADED = [MethodKind.SYNC, MethodKind.GENERATOR]
TASKS = [MethodKind.ASYNC, MethodKind.ASYNC_GENERATOR]


def lane(limit: int = 10) -> tuple[hot.Lane, hot.Admission]:
    """A caller's first lane, and the tasks of its mailbox."""
    tasks = hot.Admission(limit)
    return hot.Lane(tasks, deque()), tasks


@pytest.mark.parametrize("kind", MethodKind)
def test_the_first_call_is_admitted_whatever_its_kind(kind: MethodKind) -> None:
    made, tasks = lane(1)
    assert made.admit(kind)
    assert (tasks.running, tasks.full) == ((1, True) if kind in TASKS else (0, False))


@pytest.mark.parametrize("first", MethodKind)
@pytest.mark.parametrize("second", MethodKind)
def test_a_second_call_waits_for_the_beginning_of_one_of_the_other_kinds(first: MethodKind, second: MethodKind) -> None:
    made, _ = lane()
    made.admit(first)
    if first in TASKS:
        waits = second not in TASKS
        assert made.admit(second) is not waits
        assert not made.task_began()
    elif first in THREADED:
        waits = second not in THREADED
        assert made.admit(second) is not waits
        assert not made.thread_began()
    else:
        waits = False
    assert made.admit(second) or not waits


def test_a_call_behind_a_held_one_is_held() -> None:
    made, _ = lane()
    made.held.append("a call")
    assert not made.admit(MethodKind.SYNC)
    assert made.admit_held(MethodKind.SYNC), "the first of the held calls has none before it"
    assert made.thread_began(), "held calls may start"


def test_tasks_and_inline_calls_wait_for_room() -> None:
    made, tasks = lane(1)
    other = hot.Lane(tasks, deque())
    assert made.admit(MethodKind.ASYNC)
    assert not other.admit(MethodKind.ASYNC)
    assert not other.admit(MethodKind.INLINE)
    assert other.admit(MethodKind.SYNC)
    assert not other.thread_began()
    assert tasks.task_ended(), "held calls of other lanes may start"
    assert other.admit(MethodKind.ASYNC)


def test_an_end_below_the_limit_lets_nothing_start() -> None:
    made, tasks = lane(2)
    assert made.admit(MethodKind.ASYNC)
    assert not tasks.task_ended()
    assert tasks.running == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: hot.Admission(),  # type: ignore[call-arg]
        lambda: hot.Admission("many"),  # type: ignore[arg-type]
        lambda: hot.Admission(limit=1),  # type: ignore[call-arg]
        lambda: hot.Lane(hot.Admission(1)),  # type: ignore[call-arg]
        lambda: hot.Lane(1, deque()),  # type: ignore[arg-type]
        lambda: hot.Lane(hot.Admission(1), 5),  # type: ignore[arg-type]
        lambda: hot.Lane(hot.Admission(1), held=deque()),  # type: ignore[call-arg]
        lambda: lane()[0].admit("sync"),  # type: ignore[arg-type]
        lambda: lane()[0].admit_held(None),  # type: ignore[arg-type]
    ],
)
def test_other_arguments_are_refused(call: Any) -> None:
    with pytest.raises(TypeError):
        call()


def test_a_lane_is_collected_with_the_calls_that_refer_to_it() -> None:
    made, _ = lane()
    made.held.append(made)
