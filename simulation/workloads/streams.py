"""Streams: generators of both kinds, with arrays among the items, read to the end, left midway or cancelled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import zcactor as zc
from simulation import record as records
from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from simulation.workloads.scene import Scene

__all__ = ["Source", "Streams"]

PATTERN = 251
"""Arrays among the items are filled with the number of their stream plus their own, modulo this."""


@zc.actor
class Source:
    """An actor with streams."""

    def __init__(self, name: str) -> None:
        records.current.constructed(name)

    @zc.method
    def count(self, number: int, items: int) -> Iterator[int]:
        """Yield numbers, in a thread."""
        records.current.ran(number, self)
        yield from range(items)

    @zc.method
    async def arrays(self, number: int, items: int, length: int) -> AsyncIterator[np.ndarray]:
        """Yield arrays, on the loop, with rests in between."""
        records.current.ran(number, self)
        for item in range(items):
            array = zc.empty(length, np.float32)
            array[:] = (number + item) % PATTERN
            yield array
            await asyncio.sleep(0.01)


class Streams:
    """A driver that reads streams. See `simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "streams"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._handles: list[Any] = []

    async def prepare(self) -> None:
        """Spawn an actor for each node, and at most 16."""
        rng = self._scene.rng
        for number in range(min(self._scene.nodes, 16)):
            options = self._scene.spread(rng.choice((0, -1)))
            self._handles.append(await Source.options(name=f"s{number}", **options).spawn(f"s{number}"))

    async def run(self) -> None:
        """See `Workload.run`."""
        scene, tasks = self._scene, []
        while not scene.over:
            tasks.append(asyncio.create_task(self._read()))
            await scene.pause(0.3)
        await asyncio.gather(*tasks)

    async def finish(self) -> None:
        """Stop every actor."""
        for handle in self._handles:
            await zc.stop(handle)
        self._handles.clear()

    async def _read(self) -> None:
        rng, record = self._scene.rng, self._scene.record
        handle, items = rng.choice(self._handles), rng.choice((0, 1, 5, 40))
        wanted = rng.choice((items, items, items // 2, 0))
        of_arrays, length = rng.random() < 0.5, rng.choice((10, 5_000))
        operation = record.begin("stream of arrays" if of_arrays else "stream")
        got = 0
        try:
            number = operation.number
            stream = handle.arrays(number, items, length) if of_arrays else handle.count(number, items)
            async for item in stream:
                expected = (number + got) % PATTERN if of_arrays else got
                if not np.all(item == expected):
                    record.break_(
                        "I5" if of_arrays else "I6", f"item {got} of {record.name(operation)} is {item!r:.80}"
                    )
                got += 1
                if got >= wanted:
                    break
            await stream.aclose()
            if wanted == items and got != items:
                record.break_("I3", f"{record.name(operation)} gave {got} of {items} items and no error")
        except ZcactorError as error:
            record.fail(operation, error)
        else:
            record.end(operation, "ok" if got or not items else "left")
