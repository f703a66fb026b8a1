"""Drains: nodes leave one after the other, in order, while their actors are called without pause."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import zcactor as zc
from zcactor.errors import ActorDied, ActorUnavailable, ZcactorError
from zcactor.process.context import current
from zcactor.simulation import record as records

if TYPE_CHECKING:
    from zcactor.simulation.workloads.scene import Scene

__all__ = ["Drains", "Mover"]


@zc.actor
class Mover:
    """An actor that may live anywhere, and is closed before it lives elsewhere.

    Args:
        name: in the record of the run.
    """

    def __init__(self, name: str) -> None:
        records.current.constructed(name)
        self._closed = False

    @zc.method
    def plain(self, number: int) -> int:
        """Run and return."""
        self._run(number)
        return number

    @zc.method
    async def apply(self, number: int, seconds: float) -> int:
        """Run and return, after a while."""
        self._run(number)
        await asyncio.sleep(seconds)
        self._run_on(number)
        return number

    @zc.method
    async def take(self, number: int, array: Any) -> int:
        """Run with an array, which may be the result of another call."""
        self._run(number)
        records.current.same(array, 7.0, f"call {number}")
        return number

    @zc.method
    def make(self, number: int, length: int) -> Any:
        """Make an array."""
        self._run(number)
        return np.full(length, 7.0)

    @zc.method
    async def ask_back(self, number: int, other: Any, me: Any) -> int:
        """Have another actor call this one, which waits for that."""
        self._run(number)
        await records.current.called("asked", other.call, me)
        return number

    @zc.method
    async def call(self, number: int, other: Any) -> int:
        """Call another actor."""
        self._run(number)
        await records.current.called("called back", other.plain)
        return number

    def _run(self, number: int) -> None:
        records.current.ran(number, self)
        self._run_on(number)

    def _run_on(self, number: int) -> None:
        if self._closed:
            records.current.break_("I4", f"call {number} runs in an actor that is closed")

    def close(self) -> None:
        """Note the end of this life."""
        self._closed = True


class Drains:
    """A driver that drains nodes. See `zcactor.simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "drains"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._handles: list[Any] = []
        self._placed: dict[str, int] = {}

    async def prepare(self) -> None:
        """Spawn two actors for each node, and at most 16."""
        rng = self._scene.rng
        for number in range(min(2 * self._scene.nodes, 16)):
            options: dict[str, Any] = {"node": "spread", "max_restarts": -1}
            if rng.random() < 0.3:
                options["process"] = "shared"
            self._handles.append(await Mover.options(name=f"drained{number}", **options).spawn(f"drained{number}"))

    async def run(self) -> None:
        """See `Workload.run`."""
        callers = [self._call(which) for which in range(len(self._handles)) for _ in range(2)]
        await asyncio.gather(self._drain(), *callers)

    async def finish(self) -> None:
        """Stop every actor."""
        for handle in self._handles:
            await zc.stop(handle)
        self._handles.clear()

    async def _drain(self) -> None:
        scene, rng, record = self._scene, self._scene.rng, self._scene.record
        while not scene.over:
            await scene.pause(1.0)
            try:
                node = rng.choice([each.node_id for each in await zc.nodes()])
                record.saw("a drain began")
                done = await current().head.ask_members("drain", node, rng.choice((0.0, 0.5, 3.0, 20.0)), False)
                record.saw("a drain left actors" if done["left"] else "a node was drained")
            except (ZcactorError, ValueError) as error:
                record.saw(f"no drain: {type(error).__name__}")

    async def _call(self, which: int) -> None:
        """Call an actor again and again, a few times at once."""
        scene, rng, handle = self._scene, self._scene.rng, self._handles[which]
        while not scene.over:
            await asyncio.gather(*(self._one(which, handle, rng.choice(_KINDS)) for _ in range(rng.choice((1, 2, 8)))))
            await scene.pause(rng.choice((0.01, 0.2)))

    async def _one(self, which: int, handle: Any, kind: str) -> None:
        scene, rng, record = self._scene, self._scene.rng, self._scene.record
        other = rng.choice(self._handles)
        order, calm = None, record.calm
        if kind == "plain":
            line = f"driver to drained{which}"
            self._placed[line] = self._placed.get(line, 0) + 1
            order = line, self._placed[line]
        operation = record.begin(f"drained {kind}", 1, order)
        number = operation.number
        try:
            if kind == "take":
                made = record.begin("drained make")
                ref = other.make(made.number, rng.choice((10, 5_000)))
                value = await handle.take(number, ref)
                await scene.outcome(made, lambda: ref)
            elif kind == "apply":
                value = await handle.apply(number, rng.choice((0.0, 1e-3, 0.3)))
            elif kind == "ask_back":
                value = await handle.ask_back(number, other, handle)
            else:
                value = await handle.plain(number)
        except ZcactorError as error:
            record.fail(operation, error)
            if calm and record.calm and isinstance(error, ActorDied | ActorUnavailable):
                record.break_("I3", f"{record.name(operation)} failed by a drain alone: {error}")
        else:
            record.end(operation, "ok")
            if value != number:
                record.break_("I3", f"{record.name(operation)} gave {value!r}")


_KINDS = ("plain", "plain", "apply", "take", "ask_back")
