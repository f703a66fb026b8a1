"""Spawn storms: many actors at once, called once, and ended in every way that the package has."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import zcactor as zc
from simulation import record as records
from zcactor.errors import RemoteError, ZcactorError

if TYPE_CHECKING:
    from simulation.workloads.scene import Scene

__all__ = ["Mayfly", "Storms"]

SIZES = (1, 5, 20)
"""Actors of one storm."""
DEFECTIVE = 0.1
"""Share of the actors whose constructor raises."""


@zc.actor
class Mayfly:
    """An actor that lives for one call."""

    def __init__(self, name: str, *, defective: bool) -> None:
        if defective:
            raise ValueError(f"{name} is not to be")
        records.current.constructed(name)
        self.name = name

    @zc.method
    def once(self, number: int) -> str:
        """The actor's name."""
        records.current.ran(number, self)
        return self.name


class Storms:
    """Tasks of a driver that spawn many actors at a time. See `simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "storms"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._count = 0

    async def prepare(self) -> None:
        """Do nothing: the tasks spawn their actors themselves."""

    async def run(self) -> None:
        """See `Workload.run`."""
        scene = self._scene
        while not scene.over:
            size = scene.rng.choice(SIZES)
            await asyncio.gather(*(self._live() for _ in range(size)))
            if size == SIZES[-1]:
                scene.record.saw("a storm of spawns")
            await scene.pause(3.0)

    async def finish(self) -> None:
        """Do nothing: the tasks have ended their actors."""

    async def _live(self) -> None:
        scene, rng = self._scene, self._scene.rng
        self._count += 1
        name, defective = f"f{self._count}", rng.random() < DEFECTIVE
        options: dict[str, Any] = {"node": rng.choice(("spread", "pack", None))}
        if rng.random() < 0.7:
            options["process"] = "shared"
        end = rng.choice((zc.stop, zc.kill, None))  # None: its last handle is dropped
        try:
            handle: Any = await Mayfly.options(**options).spawn(name, defective=defective)
        except RemoteError as error:
            if error.type_name.endswith("OutOfMemory"):  # a store was full
                scene.record.saw("no actor of a storm: OutOfMemory")
            elif not defective or error.type_name != "ValueError":  # where a store was full, it comes as text
                scene.record.break_("I3", f"the constructor of {name} has raised {error!r:.200}")
            return
        except ZcactorError as error:
            scene.record.saw(f"no actor of a storm: {type(error).__name__}")
            return
        if defective:
            scene.record.break_("I3", f"the constructor of {name} has raised, and it lives")
        operation, said = await scene.ask("once", handle.once)
        if operation.outcome == "ok" and said != name:
            scene.record.break_("I3", f"{name} says that it is {said}")
        if end is not None:
            try:
                await end(handle)
            except ZcactorError as error:
                scene.record.saw(f"an actor that could not be ended: {type(error).__name__}")
