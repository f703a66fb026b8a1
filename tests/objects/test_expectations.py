"""Outcomes that are pushed: in time, too early, too late, twice, and not at all."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest

from zcactor.api.passing import Awaited, RefHolder, Unresolved
from zcactor.buggify import decided_by
from zcactor.objects import expectations as module
from zcactor.objects.expectations import PATIENCE, Expectations
from zcactor.rpc.call import Call
from zcactor.rpc.messages import Status, owner_word

OWNER = b"\x05" + bytes(15)
WORD = owner_word(OWNER)
KEY = 3 << 32


class Clock:
    """The loop and the tasks of a process: time goes on by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.loop = self

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Any:
        entry = self.now + seconds, callback
        self.due.append(entry)
        clock = self

        class Timer:
            def cancel(self) -> None:
                clock.due.remove(entry)

        return Timer()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        due, self.due = self.due, []
        for at, callback in due:
            if at <= self.now:
                callback()
            else:
                self.due.append((at, callback))


class Bench:
    def __init__(self) -> None:
        self.clock = Clock()
        self.asked: list[Call] = []
        self.noted: list[str] = []
        tasks: Any = self.clock
        promises: Any = SimpleNamespace(ask=self.asked.append, call_of=self._stand_in)
        self.expectations = Expectations(tasks, promises)
        self.expectations.noted = self.noted.append

    def argument(self, key: int = KEY, owner: bytes = OWNER) -> Call:
        """A stand-in for a promise that came as an argument with a key."""
        call = Call(owner)
        call.retrieved = True
        call.holder = RefHolder(owner, 9, lambda _: None)
        call.holder.expected = expected = self.expectations.expect(owner, key)
        if expected is not None:
            expected.add(call, self.asked.append)
        return call

    def awaited(self, incoming: Any, values: list[Any], place: int, key: int = KEY) -> Awaited:
        """A promise that came as a plain argument with a key, and holds up a call."""
        made = Awaited.__new__(Awaited)
        made.owner, made.id, made._release, made.label = OWNER, 9, lambda _: None, "a value"
        made.promises = SimpleNamespace(call_of=self._stand_in)
        made.incoming, made.values, made.place = incoming, values, place
        made.expected = expected = self.expectations.expect(OWNER, key)
        assert expected is not None
        expected.calls.append(ref(made))
        values[place] = made
        incoming.blockers += 1
        return made

    def _stand_in(self, holder: Any, label: str) -> Call:
        call = Call(OWNER)
        call.label, call.retrieved, call.holder = label, True, holder
        if holder.expected is not None:
            holder.expected.add(call, self.asked.append)
        return call

    def push(self, value: int, key: int = KEY, status: int = Status.OK, word: int = WORD) -> None:
        if status == Status.OK:
            self.expectations.pushed_plain(word, key, value)
        else:
            self.expectations.pushed(word, key, status, b"", (), 0)


def test_an_outcome_completes_the_call_that_waits() -> None:
    bench = Bench()
    call = bench.argument()
    assert not call.done
    bench.push(7)
    assert (call.done, call.value) == (True, 7)
    assert not bench.asked and not bench.noted
    bench.clock.wait(2 * PATIENCE)
    assert not bench.asked and not bench.clock.due, "nothing is left to look at"


def test_a_packed_outcome_keeps_its_form() -> None:
    bench = Bench()
    call = bench.argument()
    bench.expectations.pushed(WORD, KEY, Status.OK, b"\x07", (), 2)
    assert (call.payload, call.flags, call.status, call.decoded) == (b"\x07", 2, Status.OK, False)


def test_an_outcome_that_overtakes_its_call_is_kept() -> None:
    bench = Bench()
    bench.push(7)
    assert bench.noted == ["push before its call"]
    call = bench.argument()
    assert (call.done, call.value) == (True, 7)
    bench.clock.wait(2 * PATIENCE)
    assert not bench.clock.due


@pytest.mark.parametrize("before", [True, False])
def test_of_two_outcomes_the_first_counts(before: bool) -> None:
    bench = Bench()
    if before:
        bench.push(7)
        bench.push(8)
    call = bench.argument()
    if not before:
        bench.push(7)
    bench.push(9)
    assert call.value == 7
    assert bench.noted[-1] == "push came late or twice"


@pytest.mark.parametrize("before", [True, False])
def test_a_push_without_a_result_asks_the_owner(before: bool) -> None:
    bench = Bench()
    if before:
        bench.push(0, status=Status.ERROR)
        call = bench.argument()
        assert call.holder.expected is None, "as for a reference without a key"
    else:
        call = bench.argument()
        bench.push(0, status=Status.ERROR)
        assert bench.asked == [call]
    assert not call.done


def test_an_outcome_that_does_not_come_is_asked_for() -> None:
    bench = Bench()
    first = bench.argument()
    bench.clock.wait(PATIENCE / 2)
    second = bench.argument(KEY + 1)
    bench.clock.wait(PATIENCE / 2)
    assert bench.asked == [first]
    bench.clock.wait(PATIENCE)
    assert bench.asked == [first, second]
    assert not bench.clock.due
    bench.push(7)
    assert (first.done, first.value, second.done) == (True, 7, False), "the owner's answer would bring it again"


@pytest.mark.parametrize("before", [False, True])
def test_an_outcome_whose_bytes_are_being_read_is_not_asked_for(before: bool) -> None:
    bench = Bench()
    if before:
        bench.expectations.coming(WORD, KEY)
    call = bench.argument()
    if not before:
        bench.expectations.coming(WORD, KEY)
    other = bench.argument(KEY + 1)
    bench.clock.wait(2 * PATIENCE)
    assert bench.asked == [other]
    bench.expectations.pushed(WORD, KEY, Status.OK, b"\x07", (), 0)
    assert call.done and not bench.expectations._coming
    again = bench.argument(KEY + 2)
    bench.expectations.coming(WORD, KEY + 2)
    bench.expectations.session_lost(OWNER, last=True)
    assert bench.asked == [other, again]


def test_the_loss_of_any_connection_asks_for_all() -> None:
    bench = Bench()
    first, second = bench.argument(), bench.argument(KEY, b"\x06" + bytes(15))
    bench.expectations.session_lost(b"m" * 16, last=True)
    assert bench.asked == [first, second]


def test_a_reference_after_its_outcome_was_dropped_is_asked_for() -> None:
    bench = Bench()
    bench.push(7)
    bench.clock.wait(PATIENCE)
    assert bench.noted[-1] == "push without a call dropped"
    call = bench.argument()
    assert call.holder.expected is None and not call.done
    earlier = bench.argument(KEY - 1)
    assert earlier.holder.expected is None, "it may have been dropped as well"
    later = bench.argument(KEY + 1)
    assert later.holder.expected is not None


def test_a_key_that_is_announced_twice_is_asked_for() -> None:
    bench = Bench()
    bench.argument()
    assert bench.argument().holder.expected is None


def test_outcomes_without_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_EARLY", 3)
    bench = Bench()
    for number in range(5):
        bench.push(number, KEY + number)
    assert len(bench.expectations._early) == 3
    calls = [bench.argument(KEY + number) for number in range(5)]
    assert [call.value for call in calls] == [None, None, 2, 3, 4]
    assert [call.holder.expected is None for call in calls] == [True, True, False, False, False]


def test_an_early_outcome_may_be_dropped_at_any_time() -> None:
    bench = Bench()
    with decided_by(lambda place: place == "early push dropped"):
        bench.push(7)
        bench.push(8, KEY + 1)
    assert len(bench.expectations._early) == 1
    assert bench.argument().holder.expected is None
    assert bench.argument(KEY + 1).value == 8


def test_the_end_of_an_owner_drops_its_outcomes() -> None:
    bench = Bench()
    bench.push(7)
    bench.push(8, word=6)
    bench.expectations.session_lost(OWNER, last=False)
    assert len(bench.expectations._early) == 2, "another connection to it is open"
    bench.expectations.session_lost(OWNER, last=True)
    assert list(bench.expectations._early) == [(6, KEY)]
    bench.expectations.close()
    assert not bench.expectations._early and not bench.clock.due
    bench.expectations.close()


def test_an_argument_that_is_dropped_is_forgotten() -> None:
    bench = Bench()
    holder = RefHolder(OWNER, 9, lambda _: None)
    holder.expected = bench.expectations.expect(OWNER, KEY)
    released: list[int] = []
    holder._release = released.append
    del holder
    assert released == [9], "nothing else keeps it"
    bench.clock.wait(PATIENCE)
    assert not bench.expectations._waiting and not bench.asked, "no call waits"
    bench.push(7)
    assert bench.noted[-1] == "push came late or twice"
    assert not bench.expectations._early


def test_an_argument_that_was_asked_for_is_freed_without_the_garbage_collector() -> None:
    bench = Bench()
    enabled = gc.isenabled()
    gc.disable()
    try:
        call = bench.argument()
        bench.clock.wait(PATIENCE)
        assert bench.asked == [call]
        bench.asked.clear()
        gone = ref(call)
        del call
        assert gone() is None
    finally:
        if enabled:
            gc.enable()
    bench.push(7)


def test_a_stand_in_made_after_the_loss_asks_by_itself() -> None:
    bench = Bench()
    expected = bench.expectations.expect(OWNER, KEY)
    assert expected is not None
    bench.expectations.session_lost(b"m" * 16, last=True)
    call = Call(OWNER)
    expected.add(call, bench.asked.append)
    assert not bench.asked
    call.add_callback(lambda _: None)
    assert bench.asked == [call]


class Host:
    """The actor of a call: notes what it is told."""

    def __init__(self) -> None:
        self.unblocked_calls: list[Any] = []
        self.kept: list[Any] = []

    def unblocked(self, incoming: Any) -> None:
        self.unblocked_calls.append(incoming)

    def keep_unresolved(self, incoming: Any, values: list[Any]) -> None:
        self.kept.append((incoming, values))


def waiting_call() -> Any:
    return SimpleNamespace(host=Host(), blockers=0)


def test_a_plain_outcome_takes_the_place_of_its_promise() -> None:
    bench, incoming = Bench(), waiting_call()
    values: list[Any] = [1, None, 3, None]
    bench.awaited(incoming, values, 1)
    bench.awaited(incoming, values, 3, KEY + 1)
    bench.push(7)
    assert values[:3] == [1, 7, 3] and incoming.blockers == 1 and not incoming.host.unblocked_calls
    bench.push(8, KEY + 1)
    assert values == [1, 7, 3, 8] and incoming.host.unblocked_calls == [incoming] and not incoming.host.kept
    bench.clock.wait(2 * PATIENCE)
    assert not bench.asked and not bench.clock.due


class Owner:
    """The session with the owner of a promise."""

    def __init__(self) -> None:
        self.peer_process = OWNER
        self.released: list[int] = []

    def release_later(self, object_id: int) -> None:
        self.released.append(object_id)


def test_a_promise_among_plain_arguments_waits_for_its_outcome() -> None:
    bench, session = Bench(), Owner()
    holder = bench.expectations.argument(session, 9, KEY, "a value")  # type: ignore[arg-type]
    assert type(holder) is Awaited and not session.released
    assert (holder.owner, holder.id, holder.label) == (OWNER, 9, "a value")
    incoming = waiting_call()
    values: list[Any] = [holder]
    incoming.blockers = 1
    holder.incoming, holder.values, holder.place = incoming, values, 0
    del holder
    bench.push(7)
    assert values == [7] and incoming.host.unblocked_calls == [incoming]
    assert session.released == [9], "nothing needs the promise any more"


def test_a_plain_outcome_that_came_before_its_call_is_the_argument() -> None:
    bench, session = Bench(), Owner()
    bench.push(7)
    assert bench.expectations.argument(session, 9, KEY, "a value") == 7  # type: ignore[arg-type]
    assert session.released == [9] and not bench.expectations._waiting and not bench.expectations._early
    bench.push(8)
    assert bench.noted == ["push before its call", "push came late or twice"]


def test_another_outcome_that_came_before_its_call_is_resolved() -> None:
    bench, session = Bench(), Owner()
    bench.expectations.pushed(WORD, KEY, Status.OK, b"\x07", (), 2)
    argument = bench.expectations.argument(session, 9, KEY, "a value")  # type: ignore[arg-type]
    assert type(argument) is Unresolved and (argument.call.payload, argument.call.flags) == (b"\x07", 2)
    bench.push(0, KEY + 1, Status.ERROR)
    argument = bench.expectations.argument(session, 10, KEY + 1, "a value")  # type: ignore[arg-type]
    assert type(argument) is Unresolved and not argument.call.done, "the owner has to be asked"


def test_another_outcome_is_resolved_when_the_method_runs() -> None:
    bench, incoming = Bench(), waiting_call()
    values: list[Any] = [None]
    bench.awaited(incoming, values, 0)
    bench.expectations.pushed(WORD, KEY, Status.OK, b"\x07", (), 2)
    assert type(values[0]) is Unresolved and values[0].call.payload == b"\x07"
    assert incoming.host.kept == [(incoming, values)] and incoming.host.unblocked_calls == [incoming]


@pytest.mark.parametrize("first", ["push", "owner"])
@pytest.mark.parametrize("plain", [True, False])
def test_an_argument_that_is_asked_for_takes_what_comes_first(first: str, plain: bool) -> None:
    bench, incoming = Bench(), waiting_call()
    values: list[Any] = [None]
    bench.awaited(incoming, values, 0)
    bench.clock.wait(2 * PATIENCE)
    (call,) = bench.asked
    assert values[0].call is call and incoming.blockers == 1 and not incoming.host.unblocked_calls
    if first == "owner":
        call.complete_plain(7)
    if plain:
        bench.push(7)
    else:
        bench.expectations.pushed(WORD, KEY, Status.OK, b"\x07", (), 0)
    assert incoming.blockers == 0 and incoming.host.unblocked_calls == [incoming], "once"
    assert call.done


def test_the_outcome_for_a_call_that_was_refused_starts_nothing() -> None:
    bench, incoming = Bench(), waiting_call()
    values: list[Any] = [None]
    bench.awaited(incoming, values, 0)
    incoming.host = None
    bench.push(7)
    assert values == [7] and incoming.blockers == 0


def test_an_argument_gives_its_lease_back_with_its_place() -> None:
    bench, incoming = Bench(), waiting_call()
    values: list[Any] = [None]
    released: list[int] = []
    bench.awaited(incoming, values, 0)._release = released.append
    assert not released
    enabled = gc.isenabled()
    gc.disable()
    try:
        bench.push(7)
        assert released == [9]
    finally:
        if enabled:
            gc.enable()
