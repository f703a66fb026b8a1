"""Drains: nodes leave one after the other, in order, while their actors are called without pause."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import zcactor as zc
from simulation import record as records
from zcactor.errors import ActorDied, ActorUnavailable, ZcactorError
from zcactor.process.cluster import MembershipService
from zcactor.process.context import current

if TYPE_CHECKING:
    from simulation.workloads.scene import Scene

__all__ = ["Drains", "Mover"]

_MOVERS = 3
"""Actors at most, as each of their moves costs hundreds of events."""
_ROUNDS = 5
"""Times that each of them is called while a node is drained: a run spends its events on other things, too."""
_FEW = 8
"""Processes of a node, at most, that is drained."""
_TIMES = 4
"""Drains at most: the nodes that have left are missing."""


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
        return zc.full(length, 7.0, np.float32)

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
    """A driver that drains nodes. See `simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "drains"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._handles: list[Any] = []
        self._placed: dict[str, int] = {}

    async def prepare(self) -> None:
        """Spawn an actor for each node, within bounds."""
        for number in range(min(self._scene.nodes, _MOVERS)):
            options = self._scene.spread(-1)
            self._handles.append(await Mover.options(name=f"drained{number}", **options).spawn(f"drained{number}"))

    async def run(self) -> None:
        """See `Workload.run`."""
        for _ in range(_TIMES):
            await self._scene.pause(self._scene.duration / (2 * _TIMES))
            if self._scene.over:
                return
            await asyncio.gather(self._drain(), *(self._call(which) for which in range(len(self._handles))))

    async def finish(self) -> None:
        """Stop every actor."""
        for handle in self._handles:
            await zc.stop(handle)
        self._handles.clear()

    async def _drain(self) -> None:
        """Drain a node, in the midst of calls."""
        scene, rng, record = self._scene, self._scene.rng, self._scene.record
        await scene.pause(0.01)
        try:
            head = current().sessions.head.hex()  # it refuses
            nodes = [each for each in await zc.nodes() if each.node_id != head and each.workers <= _FEW]
            node = rng.choice([each.node_id for each in nodes] or [head])
            record.saw("a drain began")
            done = await current().head.ask(MembershipService.drain, node, rng.choice((0.0, 0.5, 3.0)), False)
            record.saw("a drain left actors" if done["left"] else "a node was drained")
        except (ZcactorError, ValueError) as error:
            record.saw(f"no drain: {type(error).__name__}")

    async def _call(self, which: int) -> None:
        """Call an actor again and again, a few times at once."""
        rng, handle = self._scene.rng, self._handles[which]
        for _ in range(_ROUNDS):
            await asyncio.gather(*(self._one(which, handle, rng.choice(_KINDS)) for _ in range(rng.choice((1, 2, 4)))))
            await self._scene.pause(0.005)

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
                try:
                    ref = other.make(made.number, rng.choice((10, 5_000)))
                except ZcactorError as error:
                    record.fail(made, error)
                    raise
                try:
                    value = await handle.take(number, ref)
                finally:
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
