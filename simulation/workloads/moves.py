"""Moves: arrays that are handed over, written to by their new owner, and handed on or back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import zcactor as zc
from simulation import record as records
from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    from simulation.workloads.scene import Scene

__all__ = ["Moves", "Stage"]

LENGTHS = (10, 5_000, 40_000)
"""Elements of an array: within a frame, by reference, and by reference in several parts of the arena."""


@zc.actor
class Stage:
    """An actor that adds one to the arrays it gets."""

    def __init__(self, name: str) -> None:
        records.current.constructed(name)

    @zc.method
    async def raised(self, number: int, array: np.ndarray, expected: int, onward: list[Any]) -> np.ndarray:
        """Write to an array, hand it on to the others, and hand back their result."""
        record = records.current
        record.ran(number, self)
        record.same(array, expected, f"call {number}")
        await asyncio.sleep(0.01)
        array += 1
        record.same(array, expected + 1, f"call {number}, which is its only owner,")
        if not onward:
            return zc.move(array)
        _, array = await record.called("move on", onward[0].raised, zc.move(array), expected + 1, onward[1:])
        return zc.move(array)


class Moves:
    """A driver that hands arrays to chains of actors. See `simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "moves"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._handles: list[Any] = []

    async def prepare(self) -> None:
        """Spawn an actor for each node, and at most 8."""
        rng = self._scene.rng
        for number in range(min(self._scene.nodes, 8)):
            options = self._scene.spread(rng.choice((0, -1)))
            self._handles.append(await Stage.options(**options).spawn(f"m{number}"))

    async def run(self) -> None:
        """See `Workload.run`."""
        scene, tasks = self._scene, []
        while not scene.over:
            tasks.append(asyncio.create_task(self._hand_over()))
            await scene.pause(0.3)
        await asyncio.gather(*tasks)

    async def finish(self) -> None:
        """Stop every actor."""
        for handle in self._handles:
            await zc.stop(handle)
        self._handles.clear()

    async def _hand_over(self) -> None:
        rng, record = self._scene.rng, self._scene.record
        # No actor twice, for it would wait for itself.
        stages = rng.sample(self._handles, rng.randint(1, min(3, len(self._handles))))
        first, kept = rng.randrange(1000), None
        try:
            array = zc.empty(rng.choice(LENGTHS), np.float32)
        except ZcactorError:
            record.saw("no room for an argument")
            return
        array[:] = first
        if rng.random() < 0.2:
            kept = array.copy()  # of the same bytes, and private
        operation, value = await self._scene.ask(
            "move", lambda number: stages[0].raised(number, zc.move(array), first, stages[1:])
        )
        if value is not None:
            record.same(value, first + len(stages), record.name(operation))
            await asyncio.sleep(rng.random())
            value += 1
            record.same(value, first + len(stages) + 1, f"the result of {record.name(operation)}")
        if kept is not None:
            record.same(kept, first, f"the copy for {record.name(operation)}")
