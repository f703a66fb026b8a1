"""Calls and pulls by RDMA in a virtual machine: next to the base, and sealed next to not sealed.

It runs in a guest whose clock counts instructions, a nanosecond each: ``python tools/vm.py run --counting -- python -m
benchmarks.guest --built FOLDER``. Seconds of an emulated processor differ by a fifth between two runs of one program.
FOLDER has the package of the base, which takes too long to build there. ``python -m benchmarks.performance guest`` does
both.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.harness import Measurement, at_most, show, spread
from benchmarks.machine import cores
from benchmarks.paired import ROOT, Side, launches
from benchmarks.program import options_of, report

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ITEMS", "main"]

ITEMS: Final[Mapping[str, tuple[str, int]]] = {
    "sync": ("sync call in a guest", 16),
    "pipelined": ("call in a guest, 1,000 in flight", 1000),
    "array-16m": ("16 MiB array as argument in a guest", 1),
}
"""The name of each item, and its count in a round."""
ROUNDS, QUICK_ROUNDS = 16, 8
LAUNCHES: Final = 2
"""The number of times that the sides are started. Instructions hardly differ from one start to the next."""
TIMES_BASE, TIMES_PLAIN = 1.03, 1.3
RDMA: Final[Mapping[str, object]] = {"transports": ["verbs"], "sealing": "off"}
SEALED: Final[Mapping[str, object]] = {"transports": ["verbs"], "sealing": "on"}


def main(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold.
    """
    parser = options_of("benchmarks.guest", "Calls and pulls by RDMA, next to a base.")
    parser.add_argument("--built", type=Path, required=True, metavar="FOLDER", help="where the base's package is")
    options = parser.parse_args(arguments)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    core = cores()[-1]
    sides = [
        partial(Side, options.built, core, RDMA), partial(Side, ROOT, core, RDMA), partial(Side, ROOT, core, SEALED),
    ]  # fmt: skip
    found: list[Measurement] = []
    for item, (name, count) in ITEMS.items():
        figures = launches(sides if item == "sync" else sides[:2], {item: count}, rounds, LAUNCHES)[item]
        before, after = map(min, figures[:2])
        told = [
            Measurement("guest", name, after, "us", before, "the base", at_most(TIMES_BASE), rounds, "least",
                        spread(figures[1]))
        ]  # fmt: skip
        if len(figures) == 3:
            budget = at_most(TIMES_PLAIN)
            told.append(
                Measurement("guest", f"{name}, sealed", min(figures[2]), "us", after, "not sealed", budget, rounds,
                            "least", spread(figures[2]))
            )  # fmt: skip
        for measurement in told:  # a guest that is ended keeps no other output
            print(json.dumps(measurement.plain()), flush=True)
        found += told
    show("By RDMA", found)
    return report(options, found)


if __name__ == "__main__":
    sys.exit(main())
