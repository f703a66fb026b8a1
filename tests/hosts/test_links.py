"""Processes of two hosts over TCP: values arrive unchanged, and a failure of the link is noticed in time.

The times here are promises: a peer that is out of reach is noticed within six seconds. The limit has room for a machine
that is busy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.hosts.netns import Host, Network, Program, has_rules, missing

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

MIB = 1 << 20
NOTICED = 8.0
"""Seconds within which the end of a link has to be noticed: six are promised, and two are for a busy machine."""
CALLS = 20

GONE = {"ActorDied", "ConnectionLost"}
"""The errors that end a call whose answer cannot come."""

Pair = tuple[Host, Host, Program, Program]


def member(host: Host, mib: int) -> Program:
    """Start a member on the host, with a store of `mib` MiB."""
    return host.python("-m", "tests.hosts.member", host.address, str(mib))


@contextlib.contextmanager
def pair(mib: int = 16, **settings: Any) -> Iterator[Pair]:
    """Start a member on each of two hosts, and make them known to each other."""
    with Network(2, **settings) as (left, right), contextlib.ExitStack() as stack:
        a, b = [stack.enter_context(member(host, mib)) for host in (left, right)]
        a.ask("meet", **b.ask("about"))
        b.ask("meet", **a.ask("about"))
        yield left, right, a, b


@pytest.mark.slow
def test_calls_and_large_arrays_arrive_as_they_were_sent() -> None:
    with pair(mib=512) as (_, _, a, b):
        assert a.ask("add", count=500, at_once=100) == 500
        answers = [program.send("exchange", nbytes=64 * MIB, seed=1) for program in (a, b)]
        assert a.answer(answers[0]) and b.answer(answers[1])
        a.send("settle")
        for program in (a, b):
            program.ask("settle")
            stats = program.ask("stats")
            assert stats["bytes_mapped"] == 0 and stats["bytes_received"] == 4 * 64 * MIB
            assert stats["connections"] == 1


BREAKINGS: dict[str, Callable[[Host, Host], contextlib.AbstractContextManager[None]]] = {
    "the link is down": lambda caller, _: caller.down(),
    "nothing comes to the callers": lambda caller, _: caller.dropping("in"),
    "nothing comes to the actor": lambda caller, actor: actor.dropping("in", other=caller),
    "nothing leaves the callers": lambda caller, _: caller.dropping("out"),
}
"""The faults between the callers' host and the actor's."""


class Callers:
    """Three programs on a host that use one actor in different ways, each over a connection of its own.

    The first has open calls and sends nothing, the second calls all the time, and the third is pulling an array.
    """

    def __init__(self, host: Host, stack: contextlib.ExitStack) -> None:
        self.host = host
        self.programs = [stack.enter_context(member(host, 160)) for _ in range(3)]
        self.waiting, self.talking, self.pulling = self.programs

    def connect(self, actor: dict[str, Any]) -> None:
        for program in self.programs:
            program.ask("meet", **actor)
            assert program.ask("add", count=1, at_once=1) == 1

    def begin(self) -> None:
        self.waiting.ask("begin", method="wait", count=CALLS, args=[])
        self.pulling.ask("begin", method="made", count=1, args=[1, 64 * MIB])
        self.pulling.ask("receiving", nbytes=64 * MIB)
        self.talked = self.talking.send("talk", interval=0.02)

    def check(self, broken: float) -> None:
        """Check that each session and each call has ended in time, and once."""
        waited = self.waiting.ask("outcomes")
        assert len(waited) == CALLS
        for when, (kind, maybe_executed) in waited:
            assert kind in GONE and maybe_executed
            assert 0 < when - broken < NOTICED
        ((when, (kind, _)),) = self.pulling.ask("outcomes")
        # The answer of this call has come, but not the array in it.
        assert kind in {"ObjectLost", *GONE}
        assert 0 < when - broken < NOTICED
        ends = [(when - broken, kind, ran) for when, (kind, ran) in self.talking.answer(self.talked)]
        assert all(kind in GONE or (kind == "value" and ran) for _, kind, ran in ends)
        assert any(kind in GONE for _, kind, _ in ends)
        assert max(when for when, _, _ in ends) < NOTICED
        for program in self.programs:
            ((when, _),) = program.ask("alone")
            assert 0 < when - broken < NOTICED


@pytest.mark.slow
def test_a_link_that_breaks_is_noticed_at_both_ends() -> None:
    # All faults run at the same time, because each takes five seconds in which nothing happens.
    with Network(1 + len(BREAKINGS)) as (place, *hosts), contextlib.ExitStack() as stack:
        actor = stack.enter_context(member(place, 400))
        groups = [Callers(host, stack) for host in hosts]
        for group in groups:
            group.connect(actor.ask("about"))
        limit = stack.enter_context(contextlib.ExitStack())
        limit.enter_context(place.limited(50))  # so that even the first array is on its way for ten seconds
        for group in groups:
            group.begin()
        actor.ask("waiting", count=CALLS * len(groups))
        actor.ask("noting", number=5, times=len(groups))
        with contextlib.ExitStack() as links:
            broken = time.monotonic()
            for group, breaking in zip(groups, BREAKINGS.values(), strict=True):
                links.enter_context(breaking(group.host, place))
            for group, name in zip(groups, BREAKINGS, strict=True):
                print(name)
                group.check(broken)
            ends = [when - broken for when, _ in actor.ask("alone")]
            assert len(ends) == 3 * len(groups) and max(ends) < NOTICED
            actor.ask("cancelled", count=CALLS * len(groups))
            noted = actor.ask("noted")
            assert all(noted.count(number) <= len(groups) for number in set(noted))
        limit.close()
        actor.ask("settle")
        for group in groups:
            group.connect(actor.ask("about"))
            assert group.pulling.ask("exchange", nbytes=MIB, seed=1)
            group.pulling.ask("settle")
        actor.ask("settle")


@pytest.mark.slow
def test_a_link_that_is_back_soon_has_broken_nothing() -> None:
    with pair() as (left, _, a, b):
        assert a.ask("add", count=10, at_once=10) == 10
        with left.down():
            writing = [program.send("note", start=0, stop=50, nbytes=0) for program in (a, b)]
        a.answer(writing[0])
        b.answer(writing[1])
        assert a.ask("noted") == b.ask("noted") == list(range(50))
        assert a.ask("lost") == b.ask("lost") == []


FAULTS: dict[str, Callable[[Host, Host], Sequence[contextlib.AbstractContextManager[None]]]] = {
    "loss of 1 %": lambda a, b: (a.dropping("in", 1), b.dropping("in", 1)),
    "loss of 5 %": lambda a, b: (a.dropping("in", 5), b.dropping("in", 5)),
    # Losses of a tenth by chance would now and then be five in a row, and after five seconds without an answer a link
    # counts as broken.
    "loss of each tenth": lambda a, b: (a.dropping("in", 10, regular=True), b.dropping("in", 10, regular=True)),
    "10 Mbit/s": lambda a, b: (a.limited(10), b.limited(10)),
}


@pytest.mark.slow
@pytest.mark.parametrize("faults", list(FAULTS.values()), ids=list(FAULTS))
def test_a_bad_link_is_slower_and_nothing_else(
    faults: Callable[[Host, Host], Sequence[contextlib.AbstractContextManager[None]]],
) -> None:
    numbers, nbytes = 160, 16384
    with pair(offload=False) as (left, right, a, b), contextlib.ExitStack() as stack:
        for fault in faults(left, right):
            stack.enter_context(fault)
        assert a.ask("add", count=1, at_once=1) == 1  # both programs use the connection that this call opens
        writing = [program.send("note", start=0, stop=numbers, nbytes=nbytes) for program in (a, b)]
        a.answer(writing[0])
        b.answer(writing[1])
        assert a.ask("noted") == b.ask("noted") == list(range(numbers))
        assert a.ask("exchange", nbytes=MIB // 4, seed=5)
        for program in (a, b):
            program.ask("settle")
            assert program.ask("stats")["connections"] == 1, "the first one has lasted"
            assert program.ask("lost") == []


guards = pytest.mark.skipif(not has_rules(), reason="a host that accepts no connections needs nftables that work")


@guards
@pytest.mark.parametrize("nbytes", [8, 16 << 10, (16 << 10) + 8, 5 * MIB, 80 * MIB])
def test_arrays_of_a_host_that_accepts_no_connections(nbytes: int) -> None:
    """The other end pulls from there over sockets that the owner opens."""
    with pair(mib=512) as (_, right, a, b), right.guarded():
        assert b.ask("add", count=1, at_once=1) == 1  # the guarded one connects
        answers = [program.send("exchange", nbytes=nbytes, seed=1) for program in (a, b)]
        assert a.answer(answers[0]) and b.answer(answers[1])
        for program in (a, b):
            program.send("settle")
            assert program.ask("stats")["connections"] == 1


@guards
def test_arrays_of_a_guarded_host_that_connects_again() -> None:
    with pair(mib=64) as (left, right, a, b), right.guarded():
        for _ in range(2):
            assert b.ask("exchange", nbytes=MIB, seed=3)
            with left.down():
                assert a.ask("alone") and b.ask("alone")
            b.ask("meet", **a.ask("about"))
