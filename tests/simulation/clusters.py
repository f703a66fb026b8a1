"""A small cluster for tests, and programs in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import zcactor as zc
from simulation import record as records
from simulation.cluster import Cluster
from simulation.loop import SimLoop
from simulation.network import Network
from simulation.record import Record
from simulation.trace import Trace
from simulation.world import World
from zcactor import ids
from zcactor.assembly.process import Process
from zcactor.config import Config
from zcactor.control.head_log import HeadLog

Program = Callable[[Process], Coroutine[Any, Any, Any]]


@zc.actor
class Keeper:
    """An actor that keeps a value."""

    def __init__(self) -> None:
        self.kept: Any = None

    @zc.method
    def keep(self, value: Any) -> int:
        """Keep a value from now on."""
        self.kept = value
        return len(value)

    @zc.method
    async def sizes(self) -> int:
        """The sum of the sizes of the kept actors."""
        return sum(await asyncio.gather(*(each.size() for each in self.kept)))

    @zc.method
    async def look_up(self, names: list[str]) -> int:
        """Look up actors by these names; return their number."""
        return len([await zc.get_actor(name) for name in names])

    @zc.method
    async def spawn_another(self) -> int:
        """Spawn an actor here, and return the size of the value that it keeps."""
        other = await Keeper.spawn()
        await other.keep("abc")
        return await other.size()

    @zc.method
    async def give_up_spawning(self, node: str) -> None:
        """Begin to spawn an actor on `node`, which has no room for it, and cancel the spawn after a second."""
        spawning = asyncio.ensure_future(Keeper.options(node=node, num_cpus=8).spawn())
        await asyncio.sleep(1)
        assert not spawning.done()
        spawning.cancel()
        await asyncio.wait([spawning])

    @zc.method
    def size(self) -> int:
        """The length of the kept value."""
        return len(self.kept)

    @zc.method
    async def total(self) -> float:
        """The sum of the kept array."""
        return float(self.kept.sum())


class Bench:
    """A cluster whose nodes have joined."""

    def __init__(self, nodes: int, log: HeadLog | None = None, **settings: Any) -> None:
        self.world = World(1, Trace())
        self.record = Record(self.world)
        settings = {"loop": "asyncio", "num_cpus": 8, "warn_after": 0, "store_capacity": 8 << 20, **settings}
        self.cluster = Cluster(Network(self.world), Config(**settings), {"CPU": 8.0})
        if log is not None:
            self.cluster.make_log = lambda: log
        for number in range(nodes):
            self.cluster.start_agent(f"h{number}")
            self.world.run(lambda number=number: self.cluster.joined > number, limit=60)  # type: ignore[misc]
        assert self.cluster.joined == nodes

    def run(self, program: Program, host: str = "h0", patience: float = 60.0) -> Any:
        """Run `program` in a driver that stays; return its result."""
        result: list[Any] = []

        async def main(process: Process) -> None:
            result.append(await program(process))

        self.driver: SimLoop = self.cluster.start_driver(f"driver{self.world.number(host)}", host, main)
        driver = self.driver

        def over() -> bool:
            return driver.main is not None and driver.main.done()

        assert self.world.run(over, limit=self.world.now + patience), "the program has no end"
        assert driver.main is not None
        driver.main.result()
        return result[0]

    def wait(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.world.run(lambda: False, limit=self.world.now + seconds)


@contextmanager
def bench(nodes: int = 2, log: HeadLog | None = None, **settings: Any) -> Iterator[Bench]:
    """A cluster with drawn ids, as in a run. `log` is its head's; by default one in memory."""
    import random

    with ids.drawn_from(random.Random(1)):
        made = Bench(nodes, log, **settings)
        records.current = made.record
        yield made
        del records.current
