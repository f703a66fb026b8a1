"""Calls of every kind: plain, async and inline ones, arrays kept and passed on, deadlines, cancels, retries."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import zcactor as zc
from simulation import record as records
from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulation.record import Operation
    from simulation.workloads.scene import Scene

__all__ = ["Calls", "Register"]

PATTERN = 251
"""Arrays are filled with the number of their call modulo this."""


def _check(number: int, array: Any) -> None:
    records.current.same(array, number % PATTERN, f"call {number}")


@zc.actor(concurrency_groups={"passed on": 1000})
class Register:
    """An actor that enters its runs into the record.

    Args:
        name: in the record of the run.
        limit: how many async calls may run at a time; 0 for any number.
    """

    def __init__(self, name: str, limit: int = 0) -> None:
        records.current.constructed(name)
        self._limit = limit
        self._running = 0

    @contextlib.contextmanager
    def _counted(self, number: int) -> Iterator[None]:
        """Check that no more calls run at a time than may."""
        records.current.ran(number, self)
        self._running += 1
        if self._running > self._limit > 0:
            records.current.break_("I6", f"call {number} makes {self._running} at a time, {self._limit} may be")
        try:
            yield
        finally:
            self._running -= 1

    @zc.method
    def plain(self, number: int) -> int:
        """Run and return."""
        records.current.ran(number, self)
        return number

    @zc.method(inline=True)
    def glance(self, number: int) -> int:
        """Run and return, on the loop."""
        records.current.ran(number, self)
        return number

    @zc.method
    async def apply(self, number: int, seconds: float) -> int:
        """Run and return, after a while."""
        with self._counted(number):
            await asyncio.sleep(seconds)
        return number

    @zc.method
    async def keep(self, number: int, array: np.ndarray, seconds: float) -> np.ndarray:
        """Hold an array for a while, check that its bytes stay the same, and give it back."""
        with self._counted(number):
            _check(number, array)
            await asyncio.sleep(seconds)
            _check(number, array)
        return array

    @zc.method
    async def pass_on(self, number: int, other: Any, array: np.ndarray, seconds: float) -> bool:
        """Have another actor keep an array of a third process."""
        with self._counted(number):
            try:
                await records.current.called("inner", other.again, number, array, seconds)
            except (ZcactorError, TimeoutError):
                return False
        return True

    @zc.method
    async def hand_on(self, number: int, other: Any, inner: int, array: np.ndarray, seconds: float) -> list[Any]:
        """Have another actor keep an array of a third process, and keep nothing of it; return the promise of that."""
        records.current.ran(number, self)
        return [other.again(inner, number, array, seconds)]

    @zc.method(concurrency_group="passed on")  # two actors that wait for each other would wait for ever
    async def again(self, number: int, outer: int, array: np.ndarray, seconds: float) -> int:
        """Hold an array that has passed through a third process."""
        records.current.ran(number, self)
        _check(outer, array)
        await asyncio.sleep(seconds)
        _check(outer, array)
        return number


class Calls:
    """A driver that calls actors on all nodes. See `simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "calls"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._handles: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._places: dict[str, int] = {}

    async def prepare(self) -> None:
        """Spawn two actors for each node, and at most 32."""
        rng = self._scene.rng
        count = min(2 * self._scene.nodes, 32)

        async def spawn(number: int) -> Any:
            options: dict[str, Any] = {"node": "spread", "max_restarts": rng.choice((0, 3, -1))}
            if rng.random() < 0.3:
                options["process"] = "shared"
            if rng.random() < 0.3:
                options["max_concurrency"] = rng.choice((1, 2, 8))
            name = f"r{number}"
            return await Register.options(name=name, **options).spawn(name, options.get("max_concurrency", 0))

        self._handles = await asyncio.gather(*(spawn(number) for number in range(count)))

    async def run(self) -> None:
        """See `Workload.run`."""
        scene = self._scene
        while not scene.over:
            for _ in range(scene.rng.choice((1, 2, 5, 20))):
                self._tasks.append(asyncio.create_task(self._call()))
            await scene.pause(0.2)
        await asyncio.gather(*self._tasks)
        self._tasks.clear()

    async def finish(self) -> None:
        """Stop half of the actors and kill the others."""
        for number, handle in enumerate(self._handles):
            await (zc.stop if number % 2 else zc.kill)(handle)
        self._handles.clear()

    async def _call(self) -> None:
        rng = self._scene.rng
        which = rng.randrange(len(self._handles))
        kind = rng.choice(_KINDS)
        try:
            await getattr(self, f"_{kind}")(which, self._handles[which], kind)
        except asyncio.CancelledError:
            raise
        except ZcactorError:  # an array for which the store had no room: no call was made
            self._scene.record.saw("no room for an argument")

    def _begin(self, kind: str, which: int, *, tries: int = 1, ordered: bool = False) -> Operation:
        order = None
        if ordered:
            line = f"driver to r{which}"
            self._places[line] = self._places.get(line, 0) + 1
            order = line, self._places[line]
        return self._scene.record.begin(kind, tries, order)

    async def _plain(self, which: int, handle: Any, kind: str) -> None:
        operation = self._begin(kind, which, ordered=True)
        self._same(operation, await self._scene.outcome(operation, lambda: handle.plain(operation.number)))

    async def _glance(self, which: int, handle: Any, kind: str) -> None:
        operation = self._begin(kind, which, ordered=True)
        self._same(operation, await self._scene.outcome(operation, lambda: handle.glance(operation.number)))

    async def _apply(self, which: int, handle: Any, kind: str) -> None:
        operation = self._begin(kind, which, ordered=True)
        seconds = self._scene.rng.choice((0.0, 0.0, 1e-4, 0.5))
        self._same(operation, await self._scene.outcome(operation, lambda: handle.apply(operation.number, seconds)))

    def _same(self, operation: Operation, value: Any) -> None:
        if operation.outcome == "ok" and value != operation.number:
            self._scene.record.break_("I3", f"{self._scene.record.name(operation)} gave {value!r}")

    async def _keep(self, which: int, handle: Any, kind: str) -> None:
        rng = self._scene.rng
        array = self._array(rng.choice((10, 5_000, 40_000)))
        operation = self._begin(kind, which)
        array[:] = operation.number % PATTERN
        seconds = rng.random()
        value = await self._scene.outcome(operation, lambda: handle.keep(operation.number, array, seconds))
        if value is not None:
            del array
            await asyncio.sleep(rng.random())
            _check(operation.number, value)

    async def _pass_on(self, which: int, handle: Any, kind: str) -> None:
        rng = self._scene.rng
        array = self._array(rng.choice((5_000, 40_000)))
        operation = self._begin(kind, which)
        array[:] = operation.number % PATTERN
        other, seconds = rng.choice(self._handles), rng.random()
        await self._scene.outcome(operation, lambda: handle.pass_on(operation.number, other, array, seconds))

    async def _hand_on(self, which: int, handle: Any, kind: str) -> None:
        """Have an array handed on by an actor that does not keep it: bytes on their way are kept for their receiver."""
        rng, record = self._scene.rng, self._scene.record
        kept = [self._array(rng.choice((5_000, 40_000)))]
        operation, inner = self._begin(kind, which), self._begin("handed on", which)
        kept[0][:] = operation.number % PATTERN
        other, seconds = rng.choice(self._handles), rng.random()
        made = await self._scene.outcome(
            operation, lambda: handle.hand_on(operation.number, other, inner.number, kept.pop(), seconds)
        )
        if made is None:
            record.end(inner, "no promise")
            return
        await self._scene.outcome(inner, lambda: made[0])
        if "ObjectLost" in inner.outcome and record.calm:
            record.break_("I5", f"{record.name(inner)} has lost its array without a fault")

    def _array(self, count: int) -> Any:
        return zc.empty(count, np.float32)

    async def _deadline(self, which: int, handle: Any, kind: str) -> None:
        rng = self._scene.rng
        operation = self._begin(kind, which)
        timeout, seconds = rng.uniform(0.001, 0.5), rng.uniform(0, 0.5)
        method = handle.apply.options(timeout=timeout)
        await self._scene.outcome(operation, lambda: method(operation.number, seconds))

    async def _cancel(self, which: int, handle: Any, kind: str) -> None:
        rng = self._scene.rng
        operation = self._begin(kind, which)
        seconds, wait = rng.uniform(0, 0.5), rng.choice((0.0, rng.uniform(0, 0.3)))
        made: list[Any] = []

        def make() -> Any:
            made.append(handle.apply(operation.number, seconds))
            return made[0]

        task = asyncio.create_task(self._scene.outcome(operation, make))
        await asyncio.sleep(wait)
        answered = task.done() and operation.outcome == "ok"
        for reference in made:
            reference.cancel()
        await task
        if answered:
            self._scene.record.saw("a cancel after the answer")

    async def _retry(self, which: int, handle: Any, kind: str) -> None:
        operation = self._begin(kind, which, tries=3)
        method = handle.apply.options(retries=2, idempotent=True)
        await self._scene.outcome(operation, lambda: method(operation.number, self._scene.rng.choice((0.0, 0.2))))


_KINDS = (
    "plain",
    "plain",
    "glance",
    "apply",
    "apply",
    "keep",
    "keep",
    "pass_on",
    "hand_on",
    "deadline",
    "cancel",
    "retry",
)
