"""Budgets one by one: ``python -m benchmarks.budgets ITEM``; `benchmarks.performance` makes a page of them."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import zcactor as zc
from benchmarks import guarantees, over_fake, over_tcp, switching
from benchmarks.harness import FULL, Measurement, Scale, show
from benchmarks.program import options_of, report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ITEMS", "main"]

ITEMS: Final[Mapping[str, Callable[..., Any]]] = {
    "objects": guarantees.objects,
    "adoption": guarantees.adoption,
    "passed-on": guarantees.passed_on,
    "table": guarantees.table,
    "shared": guarantees.shared,
    "all-to-all": guarantees.all_to_all,
    "sockets": over_tcp.sockets,
    "idle": over_tcp.idle,
    "keeping": over_tcp.keeping,
    "switching": switching.switching,
    "fake-calls": over_fake.calls,
    "ending": over_fake.ending,
    "registering": over_fake.registering,
    "stale": over_fake.stale,
}
NEED_BASE: Final = ("fake-calls",)
QUICK: Final = Scale(5, 0.25)


def main(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold.
    """
    parser = options_of("benchmarks.budgets", "What has a budget, one by one.")
    parser.add_argument("items", nargs="+", metavar="ITEM", choices=list(ITEMS), help=f"which: {', '.join(ITEMS)}")
    parser.add_argument("--built", type=Path, metavar="FOLDER", help=f"the package of the base, for {NEED_BASE[0]}")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else FULL
    found: list[Measurement] = []
    for item in options.items:
        if item in NEED_BASE:
            if options.built is None:
                parser.error(f"{item} needs --built")
            part = ITEMS[item](scale, options.built)
        else:
            part = ITEMS[item](scale)
        part = zc.run(part) if inspect.iscoroutine(part) else list(part)
        show(item, part)
        found += part
    return report(options, found)


if __name__ == "__main__":
    from benchmarks import budgets  # not as __main__, whose actors a worker would look for in vain

    sys.exit(budgets.main())
