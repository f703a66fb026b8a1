"""The common parts of benchmarks that are programs of their own: their options, and their reports."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness import Measurement

__all__ = ["options_of", "report"]


def options_of(module: str, description: str) -> argparse.ArgumentParser:
    """The options of ``python -m module``, to which the program may add its own."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer runs and smaller counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, one JSON object a line")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a budget does not hold")
    parser.add_argument("--markdown", action="store_true", help="end with a Markdown table of what has a budget")
    return parser


def report(options: argparse.Namespace, found: Sequence[Measurement]) -> int:
    """Write and print the requested reports, and how many budgets hold.

    Returns:
        The exit status: 0, or with ``--strict`` 1 when a budget does not hold.
    """
    if options.json is not None:
        options.json.write_text("".join(json.dumps(measurement.plain()) + "\n" for measurement in found))
    if options.markdown:
        print(markdown(found) + "\n")
    with_budget = [m for m in found if m.budget is not None]
    missed = [m for m in with_budget if m.verdict == "FAIL"]
    print(f"{len(with_budget) - len(missed)} of {len(with_budget)} budgets hold")
    return int(options.strict and bool(missed))
