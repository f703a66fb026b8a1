"""Simulated heads whose terms are leases: they step down, and the next one takes over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zcactor as zc
from simulation import record as records
from simulation.faults import Faults
from simulation.shared_log import SharedBook, SharedLog
from tests.simulation.clusters import Bench, Keeper
from zcactor import ids
from zcactor.assembly.process import Process
from zcactor.control.head_watch import boot_clock, clocked_by
from zcactor.control.quorum import LeaderState


class Leased(Bench):
    """A cluster whose head has a lease."""

    def __init__(self, nodes: int) -> None:
        super().__init__(0)
        self.book = self.cluster.book = SharedBook(self.world.random("log"), lambda: self.world.now, loss=0.0)
        self.cluster.make_log = lambda: SharedLog(self.book)
        for number in range(nodes):
            self.cluster.start_agent(f"h{number}")
            self.world.run(lambda number=number: self.cluster.joined > number, limit=60)  # type: ignore[misc]

    @property
    def head(self) -> Any:
        """The present head."""
        assert self.cluster.head_host is not None
        return self.cluster.head_host.node

    def until_led(self, epoch: int) -> None:
        """Let time pass until a head of such an epoch acts."""

        def acts() -> bool:
            lease = None if self.head is None else self.head.members.leader_lease
            return lease is not None and self.head.recorder.epoch >= epoch and self.state() is LeaderState.LEADING

        assert self.world.run(acts, limit=self.world.now + 60)

    def state(self) -> LeaderState:
        """The state of the head's quorum."""
        leader_lease = self.head.members.leader_lease
        assert self.cluster.head_host is not None and self.cluster.head_host.agent is not None
        found: LeaderState = leader_lease._quorum.state(self.cluster.head_host.agent.time())
        return found


@contextmanager
def leased(nodes: int) -> Iterator[Leased]:
    clock = clocked_by(lambda: asyncio.get_running_loop().time())
    with ids.drawn_from(random.Random(1)), clock:
        made = Leased(nodes)
        records.current = made.record
        yield made
        del records.current
        for loop in made.world.loops.values():
            loop.end()


async def spawned(_: Process) -> Any:
    return await Keeper.options(name="kept", node="spread", lifetime="detached", max_restarts=-1).spawn()


async def found(_: Process) -> int:
    size: int = await (await zc.get_actor("kept")).keep("abc")
    return size


def test_a_head_that_loses_its_lease_steps_down_and_the_next_one_takes_over() -> None:
    with leased(3) as made:
        assert made.cluster.elects
        first = made.head
        kept = made.run(spawned)
        made.until_led(1)
        made.book.resign(1)
        made.until_led(2)
        assert first.recorder.is_deposed and made.head is not first
        assert made.run(found, "h1") == 3
        assert len(made.head.members._nodes.by_id) == 3
        assert not made.record.broken
        del kept


def test_members_stay_with_a_head_whose_log_is_silent() -> None:
    with leased(3) as made:
        first = made.head
        kept = made.run(spawned)
        made.book.stop()
        made.wait(10.0)  # longer than the lease, and than members go on without a head
        assert made.head is first and made.state() is LeaderState.ADRIFT
        assert made.cluster.joined == 3
        made.book.resume()
        made.until_led(1)
        assert made.run(found, "h2") == 3
        del kept


def test_an_operator_forces_a_head_that_waits_for_more_than_half_of_the_nodes() -> None:
    with leased(4) as made:
        made.until_led(1)
        faults = Faults(made.cluster, made.record)
        for name in ("h1", "h2"):
            made.cluster.switch_off(name)
        host = made.cluster.head_host
        assert host is not None and host.agent is not None
        made.cluster.kill(host.agent, "its process was killed by signal 9 (SIGKILL)")
        made.cluster.start_agent("h0")
        made.wait(30.0)
        assert made.state() is LeaderState.TAKING_OVER
        faults._operate()
        made.until_led(2)
        assert "a head was forced" in made.record.sometimes
        assert len(made.head.members._nodes.by_id) == 2


def test_a_clock_of_another_kind() -> None:
    with clocked_by(lambda: 7.0):
        assert boot_clock() == 7.0
    assert boot_clock() != 7.0
