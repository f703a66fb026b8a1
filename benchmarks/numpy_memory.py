"""NumPy's own allocations in the store, against NumPy's usual allocator.

Both run in one process, in turns: a turn runs the same operation on arrays of either allocator, a few times each. The
medians over the turns are compared. The usual allocator keeps blocks of up to 32 MiB and returns larger ones, which
then fault in page by page with every operation; the store keeps the memory that a loop used last.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

import zcactor as zc
from benchmarks.harness import Measurement, Scale, at_most

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["measure"]

SIZES = {
    "64 KiB": 1 << 16,
    "1 MiB": 1 << 20,
    "4 MiB": 1 << 22,
    "16 MiB": 1 << 24,
    "64 MiB": 1 << 26,
    "256 MiB": 1 << 28,
}
NOT_SLOWER = 1.03
"""Limit, as a multiple of the usual allocator's time."""
PAIR_LIMIT = 1.0
"""Microseconds for an allocation and its release."""
TURN = 0.03
"""The least seconds of one allocator's share of a turn; an operation that takes longer counts once."""
MAX_SORT = 1 << 24
"""Bytes; larger arrays take seconds to sort, and allocate as little."""


def _operations(nbytes: int) -> dict[str, Callable[[], Any]]:
    n = nbytes // 8
    x, y = np.random.default_rng(1).random(n), np.random.default_rng(2).random(n)
    half = x[: n // 2]
    operations: dict[str, Callable[[], Any]] = {
        "x + y": lambda: x + y,
        "x.copy()": lambda: x.copy(),
        "np.concatenate": lambda: np.concatenate((half, half)),
    }
    if nbytes <= MAX_SORT:
        operations["np.sort"] = lambda: np.sort(x)
    return operations


def _per_call(operation: Callable[[], Any], calls: int) -> float:
    """The microseconds of a call."""
    before = time.perf_counter()
    for _ in range(calls):
        operation()
    return (time.perf_counter() - before) / calls * 1e6


def _compare(make: Callable[[], Callable[[], Any]], turns: int) -> tuple[float, float]:
    """The microseconds of a call with memory of the store and with NumPy's, operands included."""
    ours = make()
    with zc.numpy_allocator(False):
        theirs = make()
        calls = max(1, int(TURN * 1e6 / _per_call(theirs, 1)))
        _per_call(theirs, calls)
    _per_call(ours, calls)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            with zc.numpy_allocator(False) if which else nullcontext():
                times[which].append(_per_call((ours, theirs)[which], calls))
    return median(times[0]), median(times[1])


async def _scene(scale: Scale) -> list[Measurement]:
    found = []
    turns = 2 * scale.runs + 1
    async with zc.init():
        for label, nbytes in SIZES.items():
            for name in _operations(8):
                if name == "np.sort" and nbytes > MAX_SORT:
                    continue
                ours, theirs = _compare(lambda name=name, nbytes=nbytes: _operations(nbytes)[name], turns)  # type: ignore[misc]
                what = f"{name}, {label}"
                found.append(
                    Measurement("numpy", what, ours, "us", theirs, "NumPy's allocator", at_most(NOT_SLOWER), turns)
                )
        pair, usual = _compare(lambda: lambda: np.empty(1 << 17, np.uint8), turns)
        limit = at_most(PAIR_LIMIT, of="value")
        found.append(
            Measurement("numpy", "allocate and free 128 KiB", pair, "us", usual, "NumPy's allocator", limit, turns)
        )
    return found


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure all operations at all sizes, then one allocation with its release."""
    yield from zc.run(_scene(scale))
