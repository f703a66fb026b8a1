"""Publications of groups in the native part: meetings, and the seats that enter publications into them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from zcactor.errors import ProtocolError
from zcactor.native import hot

CALL = "allreduce(<f4, (2,), 'sum')"
SIZE = 3


def key(rank: int, seq: int) -> int:
    return seq + 1 << 20 | rank


class Table:
    """A seat of rank 1 with its tables, and what it gave to Python."""

    def __init__(self) -> None:
        self.meetings: dict[int, Any] = {}
        self.early: dict[int, Any] = {}
        self.pieces: dict[tuple[int, int], list[bytes]] = {}
        self.others: list[tuple[Any, ...]] = []
        self.met: list[Any] = []
        self.seat = hot.Seat(1, SIZE, self.meetings, self.early, self.pieces, self.pushed)

    def pushed(self, *args: Any) -> None:
        self.others.append(args)

    def meet(self, seq: int, nbytes: int = -1) -> Any:
        meeting = self.meetings[seq] = hot.Meeting(CALL, SIZE, nbytes, self.met.append)
        self.seat.next = seq + 1
        return meeting


# ---------------------------------------------------------------- meetings


def test_values_come_by_rank_with_the_last_one() -> None:
    met: list[Any] = []
    meeting: Any = hot.Meeting(CALL, SIZE, -1, met.append)
    meeting.take(2, CALL, "c")
    meeting.take(0, "".join([*CALL]), "a")  # an equal text
    assert meeting.missing == (1,) and not met
    meeting.take(1, CALL, None)
    assert met == [("a", None, "c")] and meeting.missing == () and not meeting.odd


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_another_call_is_kept_with_its_signature(rank: int) -> None:
    met: list[Any] = []
    meeting = hot.Meeting(CALL, SIZE, -1, met.append)
    for each in range(SIZE):
        meeting.take(each, "barrier()" if each == rank else CALL, each)
    assert met == [None] and meeting.odd
    assert meeting.publications() == {each: ("barrier()" if each == rank else CALL, each) for each in range(SIZE)}


@pytest.mark.parametrize("value", [bytes(7), b"", np.zeros(3, np.float32), "12345678", 8, None, [bytes(8)]])
def test_a_value_of_another_size_or_kind_is_odd(value: Any) -> None:
    met: list[Any] = []
    meeting = hot.Meeting(CALL, 2, 8, met.append)
    meeting.take(0, CALL, np.zeros(2, np.float32))
    assert not meeting.odd
    meeting.take(1, CALL, value)
    assert met == [None] and meeting.odd


def test_odd_is_also_said_by_python() -> None:
    met: list[Any] = []
    meeting = hot.Meeting(CALL, 1, -1, met.append)
    meeting.odd = True
    meeting.take(0, CALL, 1)
    assert met == [None] and meeting.publications() == {0: (CALL, 1)}


def test_what_a_meeting_refuses() -> None:
    meeting = hot.Meeting(CALL, SIZE, -1, print)
    meeting.take(1, CALL, 1)
    with pytest.raises(ProtocolError, match="rank 1 published .* twice"):
        meeting.take(1, CALL, 2)
    assert meeting.publications() == {1: (CALL, 1)}
    for rank in (-1, SIZE, 1 << 40):
        with pytest.raises(TypeError, match="rank below 3"):
            meeting.take(rank, CALL, 1)
    for wrong in ((0, b"text", 1), (0, CALL), ()):
        with pytest.raises(TypeError, match="take"):
            meeting.take(*wrong)
    with pytest.raises(TypeError):
        meeting.take("0", CALL, 1)  # type: ignore[arg-type]
    for size in (0, -1, 1 << 20):
        with pytest.raises(ValueError, match="ranks"):
            hot.Meeting(CALL, size, -1, print)
    with pytest.raises(TypeError, match="keywords"):
        hot.Meeting(CALL, SIZE, -1, met=print)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        hot.Meeting(7, SIZE, -1, print)  # type: ignore[arg-type]


def test_an_error_of_met_is_raised() -> None:
    def met(values: Any) -> None:
        raise RuntimeError(f"met {values}")

    meeting = hot.Meeting(CALL, 1, -1, met)
    with pytest.raises(RuntimeError, match=r"met \(5,\)"):
        meeting.take(0, CALL, 5)


def test_a_closed_meeting_calls_nobody() -> None:
    met: list[Any] = []
    meeting = hot.Meeting(CALL, 1, -1, met.append)
    meeting.close()
    meeting.close()
    meeting.take(0, CALL, 5)
    assert not met and meeting.publications() == {0: (CALL, 5)}


class Operation:
    """An operation, which its meeting refers to."""

    def __init__(self) -> None:
        self.meeting = hot.Meeting(CALL, 1, -1, self.met)
        self.array = np.zeros(3)

    def met(self, values: Any) -> None:
        """Be told."""


@pytest.mark.parametrize("how", ["met", "closed"])
def test_an_operation_that_has_ended_is_freed_without_the_collector(how: str) -> None:
    gc.collect()
    gc.disable()
    try:
        operation = Operation()
        array = weakref.ref(operation.array)
        if how == "met":
            operation.meeting.take(0, CALL, operation.array)
        else:
            operation.meeting.close()
        del operation
        assert array() is None
    finally:
        gc.enable()


def test_an_operation_that_has_not_ended_is_collected() -> None:
    operation = Operation()
    array = weakref.ref(operation.array)
    del operation
    gc.collect()
    assert array() is None


# ---------------------------------------------------------------- seats


def test_a_seat_enters_publications_and_keeps_early_ones() -> None:
    table = Table()
    seat = table.seat
    meeting = table.meet(0)
    assert seat.take(key(0, 0), [CALL, "a"]) and seat.take(key(2, 0), [CALL, "c"])
    assert meeting.missing == (1,)
    assert seat.take(key(0, 1), [CALL, "later"]) and seat.take(key(2, 1), ["barrier()", None])
    assert table.early == {1: {0: (CALL, "later"), 2: ("barrier()", None)}}
    meeting.take(1, CALL, "b")
    assert table.met == [("a", "b", "c")] and not table.others


def test_the_loop_is_kept_awake_by_what_was_awaited() -> None:
    table = Table()
    touched: list[int] = []
    table.seat.touch = lambda: touched.append(1)
    table.meet(0)
    table.seat.take(key(0, 0), [CALL, "a"])
    table.seat.take(key(0, 1), [CALL, "early"])
    assert touched == [1]


@pytest.mark.parametrize(
    ("number", "values"),
    [
        (key(1, 0), [CALL, 1]),  # its own rank
        (key(SIZE, 0), [CALL, 1]),
        (key((1 << 20) - 1, 0), [CALL, 1]),
        (key(0, -1), [CALL, 1]),
        (2**64 - 1, [CALL, 1]),
        (key(0, 0), []),  # a report
        (key(0, 0), [CALL]),
        (key(0, 0), [CALL, 1, b"", 0, b""]),
        (key(0, 0), [7, 1]),
        (key(0, 0), [b"text", 1]),
        (key(0, 0), b"packed"),
        (key(2, 0), [CALL, "again"]),
    ],
)
def test_everything_else_is_left_to_python(number: int, values: Any) -> None:
    table = Table()
    meeting = table.meet(0)
    assert table.seat.take(key(2, 0), [CALL, "c"])
    assert not table.seat.take(number, values)
    assert meeting.publications() == {2: (CALL, "c")} and not table.early and not table.met


def test_what_a_seat_leaves_to_python_in_other_states() -> None:
    table = Table()
    table.meet(3)
    assert not table.seat.take(key(0, 2), [CALL, 1]), "an operation without a meeting"
    table.meetings[3] = object()
    assert not table.seat.take(key(0, 3), [CALL, 1])
    table.pieces[4, 0] = [b"beginning"]
    assert not table.seat.take(key(0, 4), [CALL, b"end"])
    table.pieces.clear()
    table.seat.open = False
    assert not table.seat.take(key(0, 4), [CALL, 1])
    table.seat.open = True
    assert table.seat.take(key(0, 4), [CALL, 1])
    table.seat(7, ["values"], (), -1)
    assert table.others == [(7, ["values"], (), -1)]


def test_seats_are_made_of_dicts() -> None:
    wrongs: list[tuple[Any, ...]] = [
        (1, SIZE, {}, {}, [], print), (1, SIZE, {}, {}, {}), ("1", SIZE, {}, {}, {}, print),
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(TypeError):
            hot.Seat(*wrong)
    with pytest.raises(TypeError, match="keywords"):
        hot.Seat(1, SIZE, {}, {}, {}, pushed=print)  # type: ignore[call-arg]


def test_a_seat_is_collected_with_its_member() -> None:
    table = Table()
    table.meet(0)
    gone = weakref.ref(table)
    del table
    gc.collect()
    assert gone() is None
