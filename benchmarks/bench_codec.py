"""What a frame costs to encode and decode, by the template and by the generated code.

::

    python benchmarks/bench_codec.py            # one JSON object a line, then a table
    python benchmarks/bench_codec.py --seconds 2

Each number is the best of five runs, in microseconds per frame on one core; the best, because everything that disturbs
a run of pure computation only makes it longer.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from timeit import Timer
from typing import TYPE_CHECKING

from zcactor.objectstore.ref import Region
from zcactor.rpc import codec, generic
from zcactor.rpc.messages import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 5
REGION = Region(0, bytes(range(16)), 1234567, 1 << 26, 1 << 30, 0)
SHAPES = {
    "call": ((), (), bytes(41)),
    "call, 1 region": ((REGION,), (), bytes(41)),
    "call, 1 region, 1 release": ((REGION,), ((7, 1),), bytes(41)),
    "call, 8 regions": ((REGION,) * 8, (), bytes(41)),
    "call, 4 KiB payload": ((), (), bytes(4096)),
}


def microseconds(operation: Callable[[], object], seconds: float) -> float:
    """The best time of one call in microseconds, from `REPEATS` runs that take `seconds` together."""
    timer = Timer(operation)
    number, taken = timer.autorange()
    number = max(1, int(number * seconds / REPEATS / taken))
    return min(timer.repeat(REPEATS, number)) / number * 1e6


def main() -> int:
    """Run all; returns the exit status."""
    parser = argparse.ArgumentParser(description="Microseconds per frame, fast and generic codec.")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each number (default 0.5)")
    seconds = parser.parse_args().seconds
    table: list[str] = []
    for name, (regions, releases, payload) in SHAPES.items():
        buffer = memoryview(bytearray(codec.frame_size(len(regions), len(releases), len(payload))))
        frame = (Kind.CALL, 0, 3, 2, 1, 77777, 0, regions, releases, payload)
        nbytes = codec.encode_into(buffer, 0, *frame)
        foreign = generic.encode(*frame)
        operations: dict[str, Callable[[], object]] = {
            "encode": partial(codec.encode_into, buffer, 0, *frame),
            "decode": partial(codec.decode, buffer, 4, nbytes),
            "generic encode": partial(generic.encode, *frame),
            "generic decode": partial(generic.decode, foreign, 4, len(foreign)),
        }
        row = {label: round(microseconds(operation, seconds), 3) for label, operation in operations.items()}
        print(json.dumps({"frame": name, "nbytes": nbytes, "unit": "us", **row}), flush=True)
        table.append("{:<28}{:>7}{:>9.2f}{:>9.2f}{:>12.1f}{:>10.1f}".format(name, nbytes, *row.values()))
    print(f"\n{'frame':<28}{'bytes':>7}{'encode':>9}{'decode':>9}{'generic':>12}{'generic':>10}")
    print(f"{'us per frame':<35}{'':>18}{'encode':>12}{'decode':>10}")
    print("\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
