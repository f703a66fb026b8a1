"""Promises: results that are passed on before they are known, in chains over several processes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import zcactor as zc
from simulation import record as records
from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    from simulation.workloads.scene import Scene

__all__ = ["Adder", "Chains"]


@zc.actor
class Adder:
    """An actor that adds one to its argument."""

    def __init__(self, name: str) -> None:
        records.current.constructed(name)

    @zc.method
    async def slowly(self, number: int, value: Any, seconds: float) -> Any:
        """Add one on the loop, after a while."""
        records.current.ran(number, self)
        await asyncio.sleep(seconds)
        return value + 1

    @zc.method
    def add(self, number: int, value: Any) -> Any:
        """Add one in a thread."""
        records.current.ran(number, self)
        return value + 1

    @zc.method
    async def have_added(self, number: int, other: Any, inner: int, seconds: float) -> list[Any]:
        """Call another actor, and return the promise of its result, in a list: a promise would be awaited."""
        records.current.ran(number, self)
        return [other.slowly(inner, 0, seconds)]


class Chains:
    """A driver that passes results on. See `simulation.workloads.scene.Workload`.

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
            tasks.append(asyncio.create_task(self._chain() if scene.rng.random() < 0.7 else self._third()))
            await scene.pause(0.3)
        await asyncio.gather(*tasks)

    async def finish(self) -> None:
        """Kill every actor."""
        for handle in self._handles:
            await zc.kill(handle)
        self._handles.clear()

    async def _third(self) -> None:
        """Get a promise that an actor has made, and pass it on. The actor may end before any of that."""
        scene, rng, record = self._scene, self._scene.rng, self._scene.record
        first, second, third = (rng.choice(self._handles) for _ in range(3))
        inner = record.begin("inner link")
        _, made = await scene.ask("link", first.have_added, second, inner.number, rng.choice((0.0, 0.3)))
        if made is None:
            record.end(inner, "no promise")
            return
        await scene.pause(0.2)
        operation, said = await scene.ask("link", third.add, made[0])
        if operation.outcome == "ok" and said != 2:
            record.break_("I3", f"{record.name(operation)} gave {said!r:.80} and not 2")
        found = await scene.outcome(inner, lambda: made[0])
        if inner.outcome == "ok" and found != 1:
            record.break_("I3", f"{record.name(inner)} gave {found!r:.80} and not 1")

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
