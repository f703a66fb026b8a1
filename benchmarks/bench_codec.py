"""The cost of encoding and decoding a frame by the template, against the generated code.

Each figure is the best of the runs and not their median: every disturbance of pure computation makes it longer.
"""

from __future__ import annotations

from functools import partial
from timeit import Timer
from typing import TYPE_CHECKING

from benchmarks.harness import Measurement, Scale
from zcactor.objectstore.ref import Region
from zcactor.rpc import codec, generic
from zcactor.rpc.messages import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 0.5
"""Seconds for each figure."""
REGION = Region(0, bytes(range(16)), 1234567, 1 << 26, 1 << 30, 0)
SHAPES = {
    "call": ((), (), bytes(41)),
    "call, 1 region": ((REGION,), (), bytes(41)),
    "call, 1 region, 1 release": ((REGION,), ((7, 1),), bytes(41)),
    "call, 8 regions": ((REGION,) * 8, (), bytes(41)),
    "call, 4 KiB payload": ((), (), bytes(4096)),
}


def microseconds(operation: Callable[[], object], seconds: float, runs: int) -> float:
    """The best time of one call in microseconds, from `runs` runs that take `seconds` together."""
    timer = Timer(operation)
    calls = 1
    taken = timer.timeit(calls)
    while taken < seconds / runs / 10:
        calls *= 4
        taken = timer.timeit(calls)
    calls = max(1, int(calls * seconds / runs / taken))
    return min(timer.repeat(runs, calls)) / calls * 1e6


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure frames of calls, from none to eight regions."""
    seconds = SECONDS * scale.share
    for name, (regions, releases, payload) in SHAPES.items():
        buffer = memoryview(bytearray(codec.frame_size(len(regions), len(releases), len(payload))))
        frame = (Kind.CALL, 0, 3, 2, 1, 77777, 0, regions, releases, payload)
        nbytes = codec.encode_into(buffer, 0, *frame)
        foreign = generic.encode(*frame)
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "encode": (partial(codec.encode_into, buffer, 0, *frame), partial(generic.encode, *frame)),
            "decode": (partial(codec.decode, buffer, 4, nbytes), partial(generic.decode, foreign, 4, len(foreign))),
        }
        for verb, (ours, generated) in pairs.items():
            value, floor = (microseconds(operation, seconds, scale.runs) for operation in (ours, generated))
            label = f"{verb} {name} ({nbytes:,} B)"
            yield Measurement("codec", label, value, "us", floor, "generated code", None, scale.runs)
