"""The common parts of benchmarks that are programs of their own: their options, and their reports."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness import Measurement, Unmeasured

__all__ = ["options_of", "report"]


def options_of(module: str, description: str) -> argparse.ArgumentParser:
    """The options of ``python -m module``, to which the program may add its own."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer runs and smaller counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, one JSON object a line")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a budget does not hold")
    parser.add_argument("--markdown", action="store_true", help="end with a Markdown table of what has a budget")
    return parser


def report(options: argparse.Namespace, found: Sequence[Measurement], absent: Sequence[Unmeasured] = ()) -> int:
    """Write and print the requested reports, how many budgets hold, and what could not be measured.

    Returns:
        The exit status: 0, or with ``--strict`` 1 when a budget does not hold.
    """
    if options.json is not None:
        lines = [measurement.plain() for measurement in found] + [each.plain() for each in absent]
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if options.markdown:
        print(markdown(found) + "\n")
    for each in absent:
        print(f"{each.name}: not measured: {each.reason}")
    with_budget = [m for m in found if m.budget is not None]
    missed = [m for m in with_budget if m.verdict == "FAIL"]
    print(f"{len(with_budget) - len(missed)} of {len(with_budget)} budgets hold")
    return int(options.strict and bool(missed))
