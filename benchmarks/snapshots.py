"""The costs of snapshots: copies of pieces of open arrays, for calls and for sums, and forks.

A piece is compared with a new array of as many bytes, which goes by reference. The difference is one copy. A fork
is compared with that of a process that has the same arrays in NumPy's usual memory: the first one, and a later one,
when the process has written to all arrays since. Both processes then write to all arrays, the child having ended: pages
of the store are copied at the first write, as peers may still read those of the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import deque
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

import zcactor as zc
from benchmarks.actors import SyncAdder
from benchmarks.harness import Measurement, Sample, Scale, at_most, interleave
from benchmarks.machine import available_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["measure"]

MIB = 1 << 20
PIECES = {"1 MiB": MIB, "64 MiB": 64 * MIB}
OUT_OF_CACHE = 64 * MIB
"""Bytes of the targets of memcpy, which take turns: the next one is in no cache, as a block of the store is in none."""
SUMMED = 16 * MIB
FORKED = 1 << 30
"""Bytes of the arrays that a forking process has; the times grow with them."""
ARRAYS = 16
PIECE_LIMIT, FORK_LIMIT = 1.1, 1.5
FORKS = 3


def _beyond(times: dict[str, list[float]], more: str, less: str) -> float:
    """The median of the times by which one subject was slower than the other in the same turn."""
    return median(a - b for a, b in zip(times[more], times[less], strict=True))


async def _memcpy(targets: deque[Any], source: Any) -> float:
    targets.rotate()
    before = time.perf_counter()
    np.copyto(targets[0], source)
    return (time.perf_counter() - before) * 1e6


async def _call(adder: Any, make: Callable[[], Any]) -> float:
    before = time.perf_counter()
    await adder.first(make())
    return (time.perf_counter() - before) * 1e6


async def _pieces(scale: Scale) -> list[Measurement]:
    adder: Any = await SyncAdder.spawn()
    found, runs = [], 10 * scale.runs
    for name, nbytes in PIECES.items():
        held = np.ones(nbytes // 8 + 1)
        targets = deque(np.ones(nbytes // 8) for _ in range(OUT_OF_CACHE // nbytes + 1))
        subjects: dict[str, Sample] = {
            "piece": partial(_call, adder, partial(held.__getitem__, slice(1, None))),
            "new": partial(_call, adder, partial(zc.empty, nbytes // 8)),
            "memcpy": partial(_memcpy, targets, held[1:]),
        }
        times = await interleave(runs, subjects)
        value, floor = _beyond(times, "piece", "new"), median(times["memcpy"])
        what = f"piece of an open array, {name}: more than a new array"
        found.append(Measurement("snapshots", what, value, "us", floor, "memcpy", at_most(PIECE_LIMIT), runs))
    return found


@zc.actor
class _Member:
    """A rank with an array of one element more than it sums."""

    def __init__(self) -> None:
        self.held = np.ones(SUMMED // 8 + 1)
        self.whole = np.ones(SUMMED // 8)
        self.target = np.empty(SUMMED // 8)

    async def sum(self, group: Any, piece: bool) -> None:
        await group.allreduce(self.held[1:] if piece else self.whole)

    def copy(self) -> None:
        np.copyto(self.target, self.held[1:])


async def _sums(scale: Scale) -> Measurement:
    members: list[Any] = [await _Member.spawn() for _ in range(2)]
    group = await zc.group(members)

    async def step(*arguments: Any, method: str = "sum") -> float:
        before = time.perf_counter()
        await asyncio.gather(*(getattr(member, method)(*arguments) for member in members))
        return (time.perf_counter() - before) * 1e6

    runs = 10 * scale.runs
    subjects: dict[str, Sample] = {
        "piece": partial(step, group, True),
        "whole": partial(step, group, False),
        "memcpy": partial(step, method="copy"),
    }
    times = await interleave(runs, subjects)
    value, floor = _beyond(times, "piece", "whole"), median(times["memcpy"])
    what = "allreduce of a piece, 16 MiB on two ranks: more than of a whole array"
    return Measurement("snapshots", what, value, "us", floor, "memcpy on both", at_most(PIECE_LIMIT), runs)


async def _scene(scale: Scale) -> list[Measurement]:
    async with zc.init(config=zc.Config(store_capacity=1 << 30)):
        return [*await _pieces(scale), await _sums(scale)]


def _forked() -> list[list[float]]:
    """Milliseconds of the calls of fork, and of the writes to all arrays after the child's end."""
    arrays = [np.ones(FORKED // ARRAYS, np.uint8) for _ in range(ARRAYS)]
    found = []
    for _ in range(FORKS):
        begun = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        forked = time.perf_counter()
        os.waitpid(pid, 0)
        ended = time.perf_counter()
        for array in arrays:
            array += 1
        found.append([(forked - begun) * 1e3, (time.perf_counter() - ended) * 1e3])
    return found


async def _with_store() -> list[list[float]]:
    async with zc.init(config=zc.Config(store_capacity=3 * FORKED)):
        return _forked()


def _forks(scale: Scale) -> Iterator[Measurement]:
    if available_memory() < 4 * FORKED:
        print(f"snapshots: forks left out, {available_memory() >> 20} MiB of memory are free", file=sys.stderr)
        return
    times: dict[str, list[Any]] = {"store": [], "usual": []}
    for _ in range(scale.runs):
        for kind, found in times.items():
            command = [sys.executable, "-m", "benchmarks.snapshots", kind]
            found.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    for name, turn, at, budget in (
        ("first fork with 1 GiB in the store", 0, 0, at_most(FORK_LIMIT)),
        ("later fork, all written since", -1, 0, at_most(FORK_LIMIT)),
        ("writing all after the first fork", 0, 1, None),
        ("writing all after a later fork", -1, 1, None),
    ):
        value, floor = (median(run[turn][at] for run in times[kind]) for kind in ("store", "usual"))
        yield Measurement("snapshots", name, value, "ms", floor, "NumPy's usual memory", budget, scale.runs)


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure pieces, sums of pieces, and forks."""
    yield from zc.run(_scene(scale))
    yield from _forks(scale)


if __name__ == "__main__":
    print(json.dumps(_forked() if sys.argv[1] == "usual" else zc.run(_with_store())))
