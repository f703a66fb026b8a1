"""Restart loops: actors whose processes end again and again, in a method or before the constructor is done."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import zcactor as zc
from simulation import record as records
from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    from simulation.workloads.scene import Scene

__all__ = ["Phoenix", "Restarts"]


@zc.actor
class Phoenix:
    """An actor that ends its process when it is asked to, and in some of its constructors.

    Args:
        name: in the record of the run.
        brittle: one of so many lives ends in the constructor; 0 for none.
    """

    def __init__(self, name: str, brittle: int) -> None:
        record = records.current
        record.constructed(name)
        self.life = record.lives(name)
        self.counted = 0
        if brittle and self.life > 1 and self.life % brittle == 0:
            record.saw("a process ended in a constructor")
            record.crash()

    @zc.method
    async def count(self, number: int) -> tuple[int, int]:
        """The number of this life, and the number of its calls so far."""
        records.current.ran(number, self)
        self.counted += 1
        return self.life, self.counted

    @zc.method
    async def crash(self, number: int) -> None:
        """End the process."""
        records.current.ran(number, self)
        records.current.crash()
        await asyncio.get_running_loop().create_future()  # a process that has ended takes no further step


class Restarts:
    """A driver whose actors do not last. See `simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "restarts"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._count = 0

    async def prepare(self) -> None:
        """Do nothing: the tasks spawn their actors themselves."""

    async def run(self) -> None:
        """See `Workload.run`."""
        await asyncio.gather(*(self._again() for _ in range(2)))

    async def finish(self) -> None:
        """Do nothing: the tasks have ended their actors."""

    async def _again(self) -> None:
        while not self._scene.over:
            try:
                await self._live()
            except ZcactorError as error:
                self._scene.record.saw(f"no phoenix: {type(error).__name__}")
            await self._scene.pause(0.5)

    async def _live(self) -> None:
        """Play all lives of one actor."""
        scene, rng, record = self._scene, self._scene.rng, self._scene.record
        self._count += 1
        name, restarts = f"x{self._count}", rng.choice((0, 1, 3))
        options: dict[str, Any] = {"max_restarts": restarts, "node": rng.choice(("spread", "pack", None))}
        handle: Any = await Phoenix.options(**options).spawn(name, rng.choice((0, 0, 2)))
        seen = (0, 0)
        for _ in range(rng.randint(1, 2 * restarts + 2)):
            operation, said = await scene.ask("count", handle.count)
            if said is not None:
                if tuple(said) <= seen:
                    record.break_("I4", f"{name} has counted {said} after {seen}")
                seen = tuple(said)
            if rng.random() < 0.6:
                await scene.ask("crash", handle.crash)
            await scene.pause(0.3)
            if operation.outcome == "ActorDied":
                break
        drains = record.sometimes.get("a drain began", 0)  # each may move the actor once, which is no restart
        if record.lives(name) > restarts + 1 + drains + record.take_overs:
            record.break_("I4", f"{name} has lived {record.lives(name)} times with max_restarts={restarts}")
        await zc.kill(handle)
