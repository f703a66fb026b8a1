"""Calls with promises among their arguments, and calls with FORWARD frames, on their way to the mailbox."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.api.passing import Awaited, Unresolved
from zcactor.execution.actor_runner import ActorRunner
from zcactor.execution.arguments import Arguments
from zcactor.execution.mailbox import Lane
from zcactor.interface import MethodKind
from zcactor.rpc.incoming import Incoming

SYNC, ASYNC = int(MethodKind.SYNC), int(MethodKind.ASYNC)


class Session:
    """A caller's connection."""

    def __init__(self) -> None:
        self.incoming: dict[int, Incoming] = {}


class Mailbox:
    """A mailbox that notes what it is given."""

    def __init__(self, steps_out: bool) -> None:
        self.steps_out = steps_out
        self.lanes: dict[Any, Lane] = {}
        self.handed: list[Incoming] = []
        self.freed: list[Incoming] = []

    def hand_over(self, incoming: Incoming, spec: Any, lane: Lane) -> None:
        self.handed.append(incoming)

    def unblocked(self, incoming: Incoming, spec: Any) -> None:
        self.freed.append(incoming)


class Runner(ActorRunner):
    """A runner with a plain method, 0, and an async one, 1."""

    def __init__(self, *, steps_out: bool = False) -> None:
        self.session: Any = Session()
        self.forwarded: list[Any] = []
        pushes = SimpleNamespace(forward=lambda *a: self.forwarded.append(a), reached={b"r" * 16: None})
        process: Any = SimpleNamespace(pushes=pushes)
        mailbox: Any = Mailbox(steps_out)
        marshaller: Any = SimpleNamespace(unpack=None)
        specs: Any = [SimpleNamespace(kind=SYNC), SimpleNamespace(kind=ASYNC)]
        self.process, self.index, self.mailbox = process, 2, mailbox
        self.stopping = self._closed = False
        self._away = {}
        self._arguments = Arguments(marshaller, self.unblocked)
        self._by_code = [mailbox, mailbox]
        self._specs = specs
        self._plain = [("method", spec.kind, mailbox) for spec in specs]
        self.lane = mailbox.lanes[self.session] = Lane()
        self.received: list[Incoming] = []
        self.refused: list[Incoming] = []

    def receive(self, incoming: Incoming) -> None:
        self.received.append(incoming)

    def _refuse(self, incoming: Incoming) -> None:
        self.refused.append(incoming)

    def link(self, *args: Any, code: int = 0, timeout_ns: int = 0, forwards: Any = None) -> Incoming:
        """A call that arrives."""
        self.receive_linked(self.session, 5, code, timeout_ns, list(args), forwards)
        made: Incoming = self.session.incoming[5]
        return made


def promise(done: bool = False) -> Awaited:
    """An argument whose outcome will be pushed; `done`: that is known by the time somebody asks for a stand-in."""
    made = Awaited.__new__(Awaited)
    made.owner, made.id, made._release, made.label, made.expected = b"o" * 16, 9, lambda _: None, "a value", None
    callbacks: list[Any] = []
    call = SimpleNamespace(done=done, add_callback=callbacks.append, callbacks=callbacks)
    made.promises = SimpleNamespace(call_of=lambda *_: call)
    return made


@pytest.mark.parametrize("code", [0, 1])
def test_a_call_waits_in_its_lane_until_the_last_value_is_there(code: int) -> None:
    runner = Runner()
    first, second = promise(), promise()
    incoming = runner.link(first, 2, second, code=code)
    assert incoming.host is runner and incoming.blockers == 2
    assert [entry[0] for entry in runner.lane.held] == [incoming] and not runner.received
    second.complete_plain(3)
    goes = runner.mailbox.handed if code == 0 else runner.mailbox.freed
    assert not goes
    first.complete_plain(1)
    assert goes == [incoming] and incoming.payload == [1, 2, 3]
    first.complete_plain(7)
    assert incoming.payload == [1, 2, 3] and goes == [incoming], "the first counts"
    assert len(runner.lane.held) == code, "the mailbox takes what it starts itself out of the lane"


@pytest.mark.parametrize("why", ["another", "task", "pumping", "lane"])
def test_a_call_that_cannot_start_at_once_goes_by_the_mailbox(why: str) -> None:
    runner = Runner()
    value = promise()
    incoming = runner.link(value)
    if why == "another":
        runner.lane.held.appendleft((Incoming(runner.session, 4, 2, 0, []), runner._specs[0]))
    elif why == "task":
        runner.lane.async_unstarted = 1
    elif why == "pumping":
        runner.lane.pumping = True
    else:
        runner.mailbox.lanes.clear()
    value.complete_plain(1)
    assert runner.mailbox.freed == [incoming] and not runner.mailbox.handed


def test_a_call_to_an_actor_with_async_methods_steps_out_of_its_lane() -> None:
    runner = Runner(steps_out=True)
    value = promise()
    incoming = runner.link(value)
    assert incoming.host is runner and not runner.lane.held and not runner.received
    value.complete_plain(1)
    assert runner.mailbox.handed == [incoming]


def test_a_call_that_has_stepped_out_waits_for_those_that_were_held_meanwhile() -> None:
    runner = Runner(steps_out=True)
    value = promise()
    incoming = runner.link(value)
    runner.lane.held.append((Incoming(runner.session, 4, 2, 0, []), runner._specs[0]))
    value.complete_plain(1)
    assert runner.mailbox.freed == [incoming] and not runner.mailbox.handed


def test_the_only_forward_frame_to_a_process_that_can_be_reached_is_only_noted() -> None:
    runner = Runner()
    incoming = runner.link(1, forwards=[(0, 7, b"r" * 16)])
    assert not runner.forwarded and incoming.forwards == [(0, 7, b"r" * 16)]
    for forwards in ([(1, 7, b"r" * 16)], [(0, 7, b"s" * 16)], [(0, 7, b"r" * 16), (1, 8, b"r" * 16)]):
        runner.forwarded.clear()
        del runner.session.incoming[5]
        runner.link(1, forwards=forwards)
        assert len(runner.forwarded) == len(forwards)


def test_a_plain_call_with_forward_frames_goes_to_the_thread() -> None:
    runner = Runner()
    incoming = runner.link(1, forwards=[(0, 7, b"t" * 16), (1, 8, b"u" * 16)])
    assert runner.forwarded == [(incoming, 0, 7, b"t" * 16), (incoming, 1, 8, b"u" * 16)]
    assert runner.mailbox.handed == [incoming] and incoming.payload == [1]


@pytest.mark.parametrize("why", ["deadline", "held", "task", "async", "method", "lane", "closed"])
def test_every_other_call_goes_the_usual_way(why: str) -> None:
    runner = Runner()
    code, timeout_ns = 0, 0
    if why == "deadline":
        timeout_ns = 9
    elif why == "held":
        runner.lane.held.append((None, None))  # type: ignore[arg-type]
    elif why == "task":
        runner.lane.async_unstarted = 1
    elif why == "async":
        code = 1
    elif why == "method":
        code = 2
    elif why == "lane":
        runner.mailbox.lanes.clear()
    else:
        runner._plain = ()
    incoming = runner.link(1, code=code, timeout_ns=timeout_ns, forwards=[])
    assert runner.received == [incoming] and not runner.mailbox.handed and incoming.timeout_ns == timeout_ns


def test_a_promise_whose_outcome_is_asked_for_is_resolved_later() -> None:
    runner = Runner()
    call: Any = SimpleNamespace(done=True, add_callback=None)
    value = promise()
    incoming = runner.link(Unresolved(call), value)
    assert runner.received == [incoming] and incoming.blockers == 1 and type(incoming.payload) is not list
    incoming.host = runner
    value.complete_plain(1)
    assert runner.mailbox.freed == [incoming]


def test_an_outcome_that_is_not_plain_is_resolved_later() -> None:
    runner = Runner()
    value, other = promise(), promise()
    incoming = runner.link(value, other)
    value.complete(0, b"", (), 0)
    assert type(incoming.payload) is not list and incoming.blockers == 2
    stand_in = value.promises.call_of().callbacks.pop()
    stand_in(None)
    assert incoming.blockers == 1
    stand_in(None)
    value.stand_in()
    assert incoming.blockers == 1, "the first counts"
    other.complete_plain(2)
    assert runner.mailbox.handed == [incoming]


@pytest.mark.parametrize("why", ["stopping", "away"])
def test_a_call_that_is_refused_does_not_wait(why: str) -> None:
    runner = Runner()
    if why == "stopping":
        runner.stopping = True
    else:
        runner._away[runner.session] = None
    value, later = promise(), promise()
    incoming = runner.link(value, 2, later)
    value.complete_plain(1)  # the argument holds it, so that its outcome comes all the same
    later.stand_in()
    assert runner.received == [incoming] and not incoming.blockers
    assert type(incoming.payload[0]) is type(incoming.payload[2]) is Unresolved, "so that it can go back"
    assert incoming.payload[1] == 2


def test_what_comes_for_a_call_that_goes_back_or_has_ended_starts_nothing() -> None:
    runner = Runner()
    value = promise()
    incoming = runner.link(value)
    incoming.returning = True
    value.complete_plain(1)
    assert runner.refused == [incoming] and not runner.mailbox.freed
    incoming.returning = False
    runner._closed = True
    runner.unblocked(incoming)
    assert not runner.mailbox.freed
