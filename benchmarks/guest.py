"""Calls and pulls by RDMA in a virtual machine: next to the base, and sealed next to not sealed.

Runs in the guest: ``python tools/vm.py run -- python -m benchmarks.guest --built FOLDER``, where FOLDER has the package
of the base, which takes too long to build there. ``python -m benchmarks.performance guest`` does both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.harness import Measurement, at_most, show, spread
from benchmarks.machine import cores
from benchmarks.paired import ROOT, Side, turns
from benchmarks.program import options_of, report

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ITEMS", "main"]

ITEMS: Final[Mapping[str, tuple[str, int]]] = {
    "sync": ("sync call in a guest", 16),
    "pipelined": ("call in a guest, 1,000 in flight", 1000),
    "array-16m": ("16 MiB array as argument in a guest", 1),
}
"""What it is called, and how many there are in a round."""
ROUNDS, QUICK_ROUNDS = 30, 20
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
    core, told = cores()[-1], 0
    found: list[Measurement] = []
    with Side(options.built, core, RDMA) as old, Side(ROOT, core, RDMA) as new, Side(ROOT, core, SEALED) as sealed:
        for item, (name, count) in ITEMS.items():
            sides = [old, new, sealed] if item == "sync" else [old, new]
            figures = turns(sides, item, count, rounds)
            before, after = map(min, figures[:2])
            found.append(
                Measurement("guest", name, after, "us", before, "the base", at_most(TIMES_BASE), rounds, "least",
                            spread(figures[1]))
            )  # fmt: skip
            if len(figures) == 3:
                budget = at_most(TIMES_PLAIN)
                found.append(
                    Measurement("guest", f"{name}, sealed", min(figures[2]), "us", after, "not sealed", budget, rounds,
                                "least", spread(figures[2]))
                )  # fmt: skip
            for measurement in found[told:]:  # a guest that is ended keeps nothing else
                print(json.dumps(measurement.plain()), flush=True)
            told = len(found)
    show("By RDMA", found)
    return report(options, found)


if __name__ == "__main__":
    sys.exit(main())
