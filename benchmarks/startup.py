"""The time of starts: the import, the start and end of the node, and actors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING

import zcactor as zc
from benchmarks.actors import SyncAdder
from benchmarks.forker import Forker
from benchmarks.harness import Budget, Measurement, Scale, at_most, interleave, medians

if TYPE_CHECKING:
    from collections.abc import Iterator

ACTORS = 20
IMPORTS = ("pass", "import numpy, asyncio", "import zcactor")


async def _python(program: str) -> float:
    before = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return (time.perf_counter() - before) * 1e3


async def _import(scale: Scale) -> list[Measurement]:
    times = medians(await interleave(scale.runs + 2, {program: lambda p=program: _python(p) for program in IMPORTS}))  # type: ignore[misc]
    bare, floor, ours = (times[program] for program in IMPORTS)
    limit = at_most(150, "value")
    return [
        Measurement("startup", "import zcactor", ours - bare, "ms", floor - bare, IMPORTS[1], limit, scale.runs + 2)
    ]


async def _round(forker: Forker, times: dict[str, list[float]]) -> None:
    """Time one life of a node, and next to each of its steps the step's floor."""
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()

    await _python(IMPORTS[1])
    lap("init floor")
    await zc.init()
    lap("init")
    handles = [await SyncAdder.spawn()]
    lap("first")
    forker.fork(1)
    lap("first floor")
    handles += [await SyncAdder.spawn() for _ in range(ACTORS - 2)]
    forker.fork(ACTORS - 2)
    began = time.perf_counter()
    handles.append(await SyncAdder.spawn())
    lap("last")
    forker.fork(1)
    lap("last floor")
    for handle in handles:
        await zc.kill(handle)
    forker.kill()
    began = time.perf_counter()
    handles = await asyncio.gather(*(SyncAdder.spawn() for _ in range(ACTORS)))
    lap("at once")
    forker.fork(ACTORS)
    lap("at once floor")
    await zc.shutdown()
    lap("shutdown")
    forker.kill()
    lap("shutdown floor")


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure several lives of a node in one process, the first of which does not count."""
    yield from zc.run(_import(scale))
    times: dict[str, list[float]] = {}
    with Forker() as forker:
        zc.run(_round(forker, {}))
        for _ in range(scale.runs):
            zc.run(_round(forker, times))
    lines: list[tuple[str, str, str, Budget | None]] = [
        ("init", "zc.init()", "a Python with NumPy", at_most(300, "value")),
        ("first", "first spawn", "fork", at_most(60, "value")),
        ("last", f"{ACTORS}th spawn", "fork", at_most(60, "value")),
        ("at once", f"{ACTORS} spawns at once", f"{ACTORS} forks", at_most(600, "value")),
        ("shutdown", f"zc.shutdown() with {ACTORS} actors", f"{ACTORS} kills", None),
    ]
    for key, name, floor_name, budget in lines:
        floor = median(times[f"{key} floor"])
        yield Measurement("startup", name, median(times[key]), "ms", floor, floor_name, budget, scale.runs)
