"""Promises: results that are passed on before they are known, in chains over several processes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import zcactor as zc
from zcactor.errors import ZcactorError
from zcactor.simulation import record as records

if TYPE_CHECKING:
    from zcactor.simulation.workloads.scene import Scene

__all__ = ["Adder", "Promises"]


@zc.actor
class Adder:
    """Adds one to what it is given."""

    def __init__(self, name: str) -> None:
        records.current.constructed(name)

    @zc.method
    async def slowly(self, number: int, value: Any, seconds: float) -> Any:
        """On the loop, after a while."""
        records.current.ran(number, self)
        await asyncio.sleep(seconds)
        return value + 1

    @zc.method
    def add(self, number: int, value: Any) -> Any:
        """In a thread."""
        records.current.ran(number, self)
        return value + 1


class Promises:
    """A driver that passes results on. See `zcactor.simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "promises"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._handles: list[Any] = []

    async def prepare(self) -> None:
        """Spawn an actor for each node, three at the least and 16 at the most."""
        for number in range(min(max(self._scene.nodes, 3), 16)):
            restarts = self._scene.rng.choice((0, -1))
            options = Adder.options(name=f"p{number}", node="spread", max_restarts=restarts)
            self._handles.append(await options.spawn(f"p{number}"))

    async def run(self) -> None:
        """See `Workload.run`."""
        scene, tasks = self._scene, []
        while not scene.over:
            tasks.append(asyncio.create_task(self._chain()))
            await scene.pause(0.3)
        await asyncio.gather(*tasks)

    async def finish(self) -> None:
        """Kill every actor."""
        for handle in self._handles:
            await zc.kill(handle)
        self._handles.clear()

    async def _chain(self) -> None:
        """Call actors one after another, each with the last one's promise, and await the last alone, or all."""
        rng, record = self._scene.rng, self._scene.record
        length = rng.randrange(2, 6)
        try:
            value: Any = zc.zeros(5_000, np.float32) if rng.random() < 0.4 else 0
        except ZcactorError:
            record.saw("no room for an argument")
            return
        begun: list[tuple[Any, Any]] = []
        for _ in range(length):
            operation = record.begin("link")
            handle = rng.choice(self._handles)
            try:
                if rng.random() < 0.5:
                    value = handle.slowly(operation.number, value, rng.choice((0.0, 0.2)))
                else:
                    value = handle.add(operation.number, value)
            except ZcactorError as error:
                record.fail(operation, error)
                break
            begun.append((operation, value))
        for place, (operation, reference) in enumerate(begun, 1):
            found = await self._scene.outcome(operation, lambda: reference)  # noqa: B023  # it is called at once
            if operation.outcome == "ok" and not np.all(found == place):
                record.break_("I3", f"{record.name(operation)} gave {found!r:.80} and not {place}")
