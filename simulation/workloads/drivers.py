"""Drivers: further programs that join on some host, use actors of the first one and their own, and leave or die."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import zcactor as zc
from simulation import record as records
from zcactor.errors import ZcactorError
from zcactor.process.cluster import MembershipService

if TYPE_CHECKING:
    from simulation.workloads.scene import Scene
    from zcactor.assembly.process import Process

__all__ = ["Drivers", "Guest"]

COMMON = "common"
"""The name of the actor that all drivers call."""
GRACE = 2.0
"""Virtual seconds that a driver gives its actors when it leaves."""


@zc.actor
class Guest:
    """An actor of one driver, or of all of them."""

    def __init__(self, name: str) -> None:
        records.current.constructed(name)
        self.kept: Any = None
        self.value = 0

    @zc.method
    async def keep(self, number: int, array: np.ndarray, value: int) -> None:
        """Keep an array, which may outlive the driver that made it, and check the array that was kept before."""
        record = records.current
        record.ran(number, self)
        before, self.kept = self.kept, array
        was, self.value = self.value, value
        if before is not None:
            record.same(before, was, f"call {number}, of what an earlier one kept,")

    @zc.method
    async def drop(self, number: int) -> None:
        """Drop the kept array."""
        records.current.ran(number, self)
        self.kept = None


class Drivers:
    """Programs that come and go. See `simulation.workloads.scene.Workload`.

    Args:
        scene: of the run; it starts processes.
    """

    name: ClassVar[str] = "drivers"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._common: Any = None
        self._count = 0

    async def prepare(self) -> None:
        """Spawn the actor that all drivers call."""
        self._common = await Guest.options(name=COMMON, max_restarts=-1).spawn(COMMON)

    async def run(self) -> None:
        """See `Workload.run`."""
        await asyncio.gather(*(self._visits() for _ in range(2)))
        while True:  # an array that the actor keeps of an ended driver lies in the actor's own store
            operation, _ = await self._scene.ask("drop", self._common.drop)
            if operation.outcome == "ok" or self._scene.beheaded:
                break
            await self._scene.pause(1.0)

    async def finish(self) -> None:
        """End the actor that all drivers have called."""
        await zc.kill(self._common)
        self._common = None

    async def _visits(self) -> None:
        scene, rng = self._scene, self._scene.rng
        while not scene.over:
            self._count += 1
            number, patience = self._count, rng.choice((0.05, 0.5, 3.0, 1000.0))
            visit = scene.start(f"visitor{number}", partial(self._visit, number))
            try:
                async with asyncio.timeout(patience):
                    await visit.ended()
            except TimeoutError:
                scene.record.saw("driver killed")
                visit.kill()
            await scene.pause(1.0)

    async def _visit(self, number: int, process: Process) -> None:
        """The program of one driver."""
        rng = self._scene.rng
        try:
            mine: list[Any] = []
            for own in range(rng.randint(0, 3)):
                shared: dict[str, Any] = {"process": "shared"} if rng.random() < 0.3 else {}
                mine.append(await Guest.options(node="spread", **shared).spawn(f"g{number}.{own}"))
            common = await zc.get_actor(COMMON)
            for turn in range(rng.randint(1, 5)):
                value = 100 * number + turn
                array = zc.full(rng.choice((10, 30_000)), value, np.int32)
                for actor in (common, *mine):
                    await self._scene.ask("keep", actor.keep, array, value)
                await self._scene.pause(0.2)
            if rng.random() < 0.7:
                await process.head.ask(MembershipService.leave_driver, GRACE)
                self._scene.record.saw("driver left")
        except ZcactorError as error:
            self._scene.record.saw(f"a driver in trouble: {type(error).__name__}")
