"""Broadcasts: one array that readers on all nodes take at once, from its owner or from each other's copies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import zcactor as zc
from simulation import record as records
from zcactor.errors import ZcactorError
from zcactor.objects.locations import LOCATED_NBYTES

if TYPE_CHECKING:
    from simulation.workloads.scene import Scene

__all__ = ["Broadcasts", "Reader"]

SIZES = (50_000, LOCATED_NBYTES - 1, LOCATED_NBYTES, LOCATED_NBYTES + 4097)
"""Bytes of an array: from the third size on, readers ask its owner for the source."""


@zc.actor
class Reader:
    """An actor that looks at an array now and later."""

    def __init__(self, name: str) -> None:
        records.current.constructed(name)

    @zc.method
    async def look(self, number: int, array: np.ndarray, value: int, seconds: float) -> int:
        """Check an array, hold it for a while, and check it again."""
        record = records.current
        record.ran(number, self)
        record.same(array, value, f"call {number}")
        await asyncio.sleep(seconds)
        record.same(array, value, f"call {number}, after a while,")
        return int(array[-1])


class Broadcasts:
    """A driver that shows arrays to many actors. See `simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "broadcast"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._readers: list[Any] = []
        self._value = 0

    async def prepare(self) -> None:
        """Spawn two readers for each node, and at most 12."""
        for number in range(min(2 * self._scene.nodes, 12)):
            restarts = self._scene.rng.choice((0, -1))
            self._readers.append(await Reader.options(node="spread", max_restarts=restarts).spawn(f"b{number}"))

    async def run(self) -> None:
        """See `Workload.run`."""
        scene = self._scene
        while not scene.over:
            await self._show()
            await scene.pause(2.0)

    async def finish(self) -> None:
        """Kill every reader."""
        for reader in self._readers:
            await zc.kill(reader)
        self._readers.clear()

    async def _show(self) -> None:
        """Show one array to some readers at once, and to further readers while copies of it exist."""
        scene, rng = self._scene, self._scene.rng
        self._value = self._value % 250 + 1
        try:
            array = zc.full(rng.choice(SIZES), self._value, np.uint8)
            shown: Any = zc.put(array) if rng.random() < 0.5 else array
        except ZcactorError:
            scene.record.saw("no room for an argument")
            return
        del array
        readers = rng.sample(self._readers, rng.randint(1, len(self._readers)))
        late = rng.randint(0, len(readers))
        looks = [self._look(reader, shown, rng.expovariate(2)) for reader in readers[:late]]
        tasks = [asyncio.create_task(look) for look in looks]
        await scene.pause(0.3)
        tasks += [asyncio.create_task(self._look(reader, shown, rng.expovariate(2))) for reader in readers[late:]]
        del shown
        await asyncio.gather(*tasks)

    async def _look(self, reader: Any, shown: Any, seconds: float) -> None:
        record, value = self._scene.record, self._value
        operation, said = await self._scene.ask("look", reader.look, shown, value, seconds)
        if operation.outcome == "ok" and said != value:
            record.break_("I3", f"{record.name(operation)} has seen {said} instead of {value}")
