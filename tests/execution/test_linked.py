"""Calls with promises among their arguments, and calls with FORWARD frames, on their way to the mailbox."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.api.passing import Awaited, Unresolved
from zcactor.execution.actor_runner import ActorRunner
from zcactor.execution.arguments import Arguments
from zcactor.rpc.incoming import Incoming


class Session:
    """A caller's connection."""

    def __init__(self) -> None:
        self.incoming: dict[int, Incoming] = {}


class Mailbox:
    """A mailbox that notes the calls whose last value has come."""

    def __init__(self) -> None:
        self.freed: list[Incoming] = []

    def unblocked(self, incoming: Incoming, spec: Any) -> None:
        self.freed.append(incoming)


class Runner(ActorRunner):
    """A runner of an actor with one method."""

    def __init__(self) -> None:
        self.session: Any = Session()
        self.forwarded: list[Any] = []
        pushes = SimpleNamespace(forward=lambda *a: self.forwarded.append(a), reached={b"r" * 16: None})
        process: Any = SimpleNamespace(pushes=pushes)
        mailbox: Any = Mailbox()
        marshaller: Any = SimpleNamespace(unpack=None)
        self.process, self.index, self.mailbox = process, 2, mailbox
        self.stopping = self._closed = False
        self._away = {}
        self._arguments = Arguments(marshaller, self.unblocked)
        self._by_code = [mailbox]
        self._specs: Any = [None]
        self.received: list[Incoming] = []
        self.refused: list[Incoming] = []

    def receive(self, incoming: Incoming) -> None:
        incoming.host = self
        self.received.append(incoming)

    def _refuse(self, incoming: Incoming) -> None:
        self.refused.append(incoming)

    def link(self, *args: Any, timeout_ns: int = 0, forwards: Any = None) -> Incoming:
        """A call that arrives."""
        self.receive_linked(self.session, 5, 0, timeout_ns, list(args), forwards)
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


def test_a_call_waits_until_the_last_value_is_there() -> None:
    runner = Runner()
    first, second = promise(), promise()
    incoming = runner.link(first, 2, second, timeout_ns=9)
    assert runner.received == [incoming] and incoming.blockers == 2 and incoming.timeout_ns == 9
    second.complete_plain(3)
    assert not runner.mailbox.freed
    first.complete_plain(1)
    assert runner.mailbox.freed == [incoming] and incoming.payload == [1, 2, 3]
    first.complete_plain(7)
    assert incoming.payload == [1, 2, 3] and runner.mailbox.freed == [incoming], "the first counts"


def test_the_only_forward_frame_to_a_process_that_can_be_reached_is_only_noted() -> None:
    runner = Runner()
    incoming = runner.link(1, forwards=[(0, 7, b"r" * 16)])
    assert not runner.forwarded and incoming.forwards == [(0, 7, b"r" * 16)]
    for forwards in ([(1, 7, b"r" * 16)], [(0, 7, b"s" * 16)], [(0, 7, b"r" * 16), (1, 8, b"r" * 16)]):
        runner.forwarded.clear()
        del runner.session.incoming[5]
        runner.link(1, forwards=forwards)
        assert len(runner.forwarded) == len(forwards)


def test_each_forward_frame_of_several_is_obeyed() -> None:
    runner = Runner()
    incoming = runner.link(1, forwards=[(0, 7, b"t" * 16), (1, 8, b"u" * 16)])
    assert runner.forwarded == [(incoming, 0, 7, b"t" * 16), (incoming, 1, 8, b"u" * 16)]
    assert runner.received == [incoming] and incoming.payload == [1]


def test_a_promise_whose_outcome_is_asked_for_is_resolved_later() -> None:
    runner = Runner()
    call: Any = SimpleNamespace(done=True, add_callback=None)
    value = promise()
    incoming = runner.link(Unresolved(call), value)
    assert runner.received == [incoming] and incoming.blockers == 1 and type(incoming.payload) is not list
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
    assert runner.mailbox.freed == [incoming]


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
