"""The end of a process ends no other: a process that reads or writes its memory at that moment goes on, and is told."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from zcactor.process.context import current

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
COUNT = 100_000
"""Elements of an array that is reduced where it lies."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=8, store_capacity=64 << 20, log_to_driver=False) as node:
        yield node


@zc.actor
class Rank:
    """A rank whose thread stops just before it computes, until it may go on."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.inside, self.may_go, self.done = threading.Event(), threading.Event(), threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def process(self) -> bytes:
        return current().process

    def make(self, count: int) -> Any:
        return np.arange(count) * 1.0

    def keep(self, value: Any) -> None:
        self.kept = value

    def total(self) -> float:
        return float(self.kept.sum())

    async def stop_inside(self) -> None:
        """Let the next computation of a group wait in its thread."""
        groups: Any = current().groups()
        work = groups.work

        def wait(job: Callable[[], None], done: Callable[[Any], None], nbytes: int | None = None) -> None:
            def late() -> None:
                self.inside.set()
                self.may_go.wait(PATIENCE)
                try:
                    job()
                finally:
                    self.done.set()

            groups.work = work
            work(late, done)

        groups.work = wait

    async def is_inside(self) -> bool:
        return await asyncio.to_thread(self.inside.wait, PATIENCE)

    async def go_on(self) -> bool:
        self.may_go.set()
        return await asyncio.to_thread(self.done.wait, PATIENCE)

    async def reduce(self, group: zc.Group, operation: str, *args: Any) -> Any:
        """Reduce ones. Returns the first and the last element of the result; or the rank that is gone."""
        try:
            result = await getattr(group, operation)(np.full(COUNT, 1.0 + group.rank), *args)
        except zc.GroupBroken as error:
            return error.rank
        return float(result[0]), float(result[-1])

    async def has_noticed(self, process: bytes) -> None:
        """Wait until this process has done all that it does with the memory of a process that has ended."""
        here: Any = current()
        adoptions = here.adoptions
        async with asyncio.timeout(PATIENCE):
            while process in adoptions._outlived or any(
                each.name == "zcactor-adopting" for each in threading.enumerate()
            ):
                await asyncio.sleep(0)


@pytest.mark.parametrize("holds", [False, True], ids=["nothing else is held", "another array is held"])
@pytest.mark.parametrize(
    ("size", "operation"),
    [
        (2, ("allreduce", "prod")),
        (3, ("allreduce", "prod")),
        (3, ("allreduce", "sum")),
        (3, ("reduce_scatter", "prod")),
        (3, ("allgather",)),
    ],
    ids=lambda value: "-".join(value) if type(value) is tuple else str(value),
)
async def test_a_rank_that_dies_while_others_read_and_write_its_memory(
    size: int, operation: tuple[str, ...], holds: bool
) -> None:
    actors: list[Any] = [await Rank.options(max_restarts=1).spawn() for _ in range(size)]
    first, *others = actors
    pid, process = await first.pid(), await first.process()
    if holds:
        array = await first.make(COUNT)
        await zc.get([other.keep(array) for other in others])
        del array
    group = await zc.group(actors)
    for other in others:
        await other.stop_inside()
    calls = [actor.reduce(group, *operation) for actor in actors]
    assert all(await zc.get([other.is_inside() for other in others]))
    os.kill(pid, signal.SIGKILL)
    assert await zc.get(calls[1:], timeout=PATIENCE) == [0] * (size - 1)
    await zc.get([other.has_noticed(process) for other in others], timeout=PATIENCE)
    assert all(await zc.get([other.go_on() for other in others], timeout=PATIENCE))
    if holds:
        assert await zc.get([other.total() for other in others]) == [COUNT * (COUNT - 1) / 2] * (size - 1)
    with pytest.raises(zc.ActorUnavailable, match="is being restarted"):
        await calls[0]
    again = await group.reform()
    found = await zc.get([actor.reduce(again, "allreduce", "sum") for actor in actors], timeout=PATIENCE)
    total = float(sum(range(1, size + 1)))
    assert found == [(total, total)] * size
    for actor in actors:
        await zc.kill(actor)


@zc.actor
class Loader:
    """A process that hands out arrays, and ends."""

    def pid(self) -> int:
        return os.getpid()

    def batch(self, value: float) -> Any:
        return np.full(COUNT, value)


@zc.actor
class Trainer:
    """A rank whose input came from another process."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.called = asyncio.Event()

    def take(self, *inputs: Any) -> None:
        self.inputs = [*inputs]

    async def reduce(self, group: zc.Group, number: int, plan: Any = "auto") -> float:
        """Reduce an input. Returns an element of the result."""
        reference = group.allreduce(self.inputs[number], "sum", plan=plan)
        self.called.set()
        result = await reference
        return float(result[-1])

    async def has_called(self) -> None:
        await self.called.wait()

    async def leave(self, process: bytes) -> None:
        """Wait until this process has lost its connection to another one."""
        async with asyncio.timeout(PATIENCE):
            while process in current().sessions.used:
                await asyncio.sleep(0)


async def test_an_input_whose_owner_ends_between_two_steps() -> None:
    """Each rank has another one of its arrays, which the others do not map."""
    loader: Any = await Loader.spawn()
    ranks: list[Any] = [await Trainer.spawn() for _ in range(3)]
    for number, rank in enumerate(ranks):
        await rank.take(await loader.batch(number + 1.0))
    group = await zc.group(ranks)
    assert await zc.get([rank.reduce(group, 0) for rank in ranks]) == [6.0] * 3
    process, pid = loader._remote.location[0], await loader.pid()
    os.kill(pid, signal.SIGKILL)
    await zc.get([rank.leave(process) for rank in ranks], timeout=PATIENCE)
    for _ in range(2):
        assert await zc.get([rank.reduce(group, 0) for rank in ranks]) == [6.0] * 3
    for rank in ranks:
        await zc.kill(rank)


@pytest.mark.parametrize("plan", ["auto", "shared"])
async def test_an_input_whose_owner_ends_after_its_rank_has_called(plan: str) -> None:
    """The other ranks have not mapped it by then: its rank, which has, gives them a copy."""
    loader: Any = await Loader.spawn()
    ranks: list[Any] = [await Trainer.spawn() for _ in range(3)]
    for number, rank in enumerate(ranks):
        await rank.take(await loader.batch(number + 1.0))
    group = await zc.group(ranks)
    process, pid = loader._remote.location[0], await loader.pid()
    calls = [rank.reduce(group, 0, plan) for rank in ranks[1:]]
    await zc.get([rank.has_called() for rank in ranks[1:]], timeout=PATIENCE)
    os.kill(pid, signal.SIGKILL)
    await zc.get([rank.leave(process) for rank in ranks], timeout=PATIENCE)
    calls.append(ranks[0].reduce(group, 0, plan))
    assert await zc.get(calls, timeout=PATIENCE) == [6.0] * 3
    for rank in ranks:
        await zc.kill(rank)
