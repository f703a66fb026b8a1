"""The page of budgets, ``docs/performance.md``: each budget, its measurement, and whether it holds.

::

    python -m benchmarks --markdown                    # everything, in at most 20 minutes; writes docs/performance.md
    python -m benchmarks --markdown --out FILE         # the same, to another file
    python -m benchmarks.performance shared pairs      # the rows of two items, to the standard output

Each item is a program of its own that also runs by itself, and prints its figures as lines of JSON. An item that fails,
takes too long or cannot run here leaves rows that say so: the page always has the same rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import machine
from benchmarks.budget_rows import BASE, ITEMS, TABLES, Item, Row
from benchmarks.harness import Measurement, Unmeasured, quantity
from benchmarks.paired import built

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["ITEMS", "Outcome", "cells", "main", "page", "run_item", "write"]

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "performance.md"
SECONDS: Final = 20 * 60.0
"""Seconds of all items together."""
LEAST: Final = 5.0
"""The least remaining seconds with which an item is begun."""
_COLUMNS: Final = ("What", "Budget", "Measured", "Spread", "", "Command")


class Outcome:
    """The result of an item, and the reason where it is incomplete.

    Args:
        found: its measurements.
        problem: why the others are missing; empty where nothing went wrong.
        failed: whether that is an error, and not a lack of the machine.
        absent: the measures for which this machine lacks something.
    """

    def __init__(
        self, found: Iterable[Measurement] = (), problem: str = "", *, failed: bool = False,
        absent: Iterable[Unmeasured] = (),
    ) -> None:  # fmt: skip
        self.found = {measurement.name: measurement for measurement in found}
        self.absent = {each.name: each.reason for each in absent}
        self.problem = problem
        self.failed = failed


def cells(row: Row, outcome: Outcome) -> tuple[str, ...]:
    """The cells of one line of a table."""
    command = f"`python -m benchmarks.performance {row.item}`"
    measured = outcome.found.get(row.measurement)
    if row.measurement in outcome.absent:
        return row.what, row.limit(""), _plain(outcome.absent[row.measurement]), "", "not measured", command
    if measured is None:
        reason = outcome.problem or "the program has not measured it"
        verdict = "**error**" if outcome.failed or not outcome.problem else "not measured"
        return row.what, row.limit(""), _plain(reason), "", verdict, command
    budget, unit = row.budget, measured.unit
    figure = measured.ratio if budget.of == "ratio" else measured.value
    if figure is None:
        return row.what, row.limit(unit), "nothing to compare with was measured", "", "**error**", command
    text = quantity(measured.value, unit)
    if measured.floor is not None:
        beside = f"{quantity(measured.floor, unit)} ({measured.floor_name})"
        text = f"{figure:.2f}x: {text}, {beside}" if budget.of == "ratio" else f"{text}, {beside}"
    if measured.runs > 1:
        text += f"; {measured.statistic} of {measured.runs}"
    spread = ""
    if measured.spread is not None:
        least, most = measured.spread
        spread = f"{quantity(least, unit)} to {quantity(most, unit)}"
    return row.what, row.limit(unit), text, spread, "holds" if budget.holds(figure) else "**missed**", command


def _plain(text: str) -> str:
    """`text` without characters that would end a cell."""
    return " ".join(text.replace("|", "/").split())


def page(outcomes: Mapping[str, Outcome], about: Sequence[str]) -> str:
    """The text of the whole page."""
    lines = [
        "# Performance",
        "",
        "What must hold, what was measured, and whether it holds. `python -m benchmarks --markdown` writes this",
        "page; a row's command measures that row and its neighbours alone. Counts and rounds are small, so that all",
        f"of it takes at most {SECONDS / 60:.0f} minutes. A figure of several rounds is their median, or their least",
        "where the row says so; the spread is from the least to the most. A ratio is to what stands beside the figure,",
        f"measured in the same run, in turns; *the base* is revision {BASE}, built for the purpose. What needs network",
        "namespaces runs where the program is root, what needs an RDMA device in a virtual machine, whose times mean",
        "nothing and whose ratios do.",
        "",
        *about,
    ]
    for title, rows in TABLES:
        lines += ["", f"## {title}", "", f"| {' | '.join(_COLUMNS)} |", "|---|---:|---|---:|---|---|"]
        lines += [f"| {' | '.join(cells(row, outcomes.get(row.item, Outcome())))} |" for row in rows]
    verdicts = [cells(row, outcomes.get(row.item, Outcome()))[4] for _, rows in TABLES for row in rows]
    held, missed = verdicts.count("holds"), verdicts.count("**missed**")
    errors, absent = verdicts.count("**error**"), verdicts.count("not measured")
    lines += ["", f"{held} rows hold, {missed} are missed, {errors} are errors, {absent} are not measured.", ""]
    return "\n".join(lines)


def about(began: float, loads: Sequence[float], revision: str) -> list[str]:
    """The place, time, revision and load of the measurement, as lines."""
    found = machine.describe()
    load = ", ".join(f"{figure:.1f}" for figure in loads)
    return [
        f"- Machine: {found['cpu']}, {found['cores']} cores, {found['memory'] / 2**30:.1f} GiB, "
        f"Linux {found['kernel']}, Python {found['python']}",
        f"- Load before it began, of 1, 5 and 15 minutes: {load}",
        f"- Commit: {revision}",
        f"- Date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {time.monotonic() - began:.0f} s in all",
    ]


def _revision() -> str:
    """The revision of this checkout; says where it has uncommitted changes."""
    answer = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty=, with changes", "--exclude=*"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return answer.stdout.strip() or "unknown: this is no checkout"


def run_item(item: Item, limit: float, base: Path | None = None) -> Outcome:
    """Run the program of an item in a process of its own.

    Args:
        item: the item.
        limit: seconds that are left for it.
        base: the folder with the package of the base, where the item needs it.
    """
    if reason := item.missing():
        return Outcome(problem=reason)
    if limit < LEAST:
        return Outcome(problem=f"the {SECONDS / 60:.0f} minutes of the whole were over")
    command = [sys.executable, *item.arguments]
    if item.needs_base:
        assert base is not None
        command += ["--built", str(base)]
    seconds = min(limit, item.limit)
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [*command, "--json", "/dev/stdout"], stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL,
            text=True, errors="replace", cwd=ROOT, start_new_session=True,
        ) as process:  # fmt: skip
            late = False
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                late = True
                output = _ended(process)
            except BaseException:
                _ended(process)
                raise
        errors.seek(0)
        said = errors.read()
    sys.stderr.write(said)
    plain = [json.loads(line) for line in output.splitlines() if line.startswith('{"item"')]
    found = [Measurement.from_plain(each) for each in plain if "value" in each]
    absent = [Unmeasured(**each) for each in plain if "value" not in each]
    if late:
        return Outcome(found, f"took longer than {seconds:.0f} s", failed=True, absent=absent)
    if process.returncode == 124:  # as `timeout` and tools/vm.py say it
        return Outcome(found, "took longer than it may: ended with status 124", failed=True, absent=absent)
    if process.returncode:
        lines = [line for line in (output + "\n" + said).splitlines() if line.strip()]
        last = lines[-1] if lines else "it said nothing"
        return Outcome(found, f"ended with status {process.returncode}: {last[:200]}", failed=True, absent=absent)
    return Outcome(found, absent=absent)


def _ended(process: subprocess.Popen[str]) -> str:
    """End all processes of the item, in order where they can; the output until then."""
    for number, seconds in ((signal.SIGINT, 10.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""  # another process holds its output


def measure(names: Sequence[str]) -> dict[str, Outcome]:
    """Run these items, one after the other; they share one build of the base."""
    outcomes: dict[str, Outcome] = {}
    end = time.monotonic() + SECONDS
    with contextlib.ExitStack() as stack:
        base: Path | None = None
        problem = ""
        if any(ITEMS[name].needs_base for name in names):
            try:
                base = stack.enter_context(built(BASE))
            except subprocess.CalledProcessError as error:
                problem = f"the base {BASE} was not built: {str(error.stderr).strip()[-200:]}"
        for name in names:
            began = time.monotonic()
            if ITEMS[name].needs_base and base is None:
                outcomes[name] = Outcome(problem=problem, failed=True)
            else:
                outcomes[name] = run_item(ITEMS[name], end - began, base)
            print(f"{name}: {time.monotonic() - began:.0f} s {outcomes[name].problem}", file=sys.stderr, flush=True)
    return outcomes


def write(path: Path) -> int:
    """Measure everything and write the page.

    Returns:
        0, or 1 when an item failed.
    """
    began, loads, revision = time.monotonic(), os.getloadavg(), _revision()
    outcomes = measure(list(ITEMS))
    path.write_text(page(outcomes, about(began, loads, revision)))
    print(f"wrote {path}")
    return int(any(outcome.failed for outcome in outcomes.values()))


def main(arguments: list[str] | None = None) -> int:
    """Measure some items and print their rows.

    Returns:
        0, or 1 when an item failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.performance", description="Rows of the page of budgets."
    )
    parser.add_argument("items", nargs="+", metavar="ITEM", choices=list(ITEMS), help=f"which: {', '.join(ITEMS)}")
    names = parser.parse_args(arguments).items
    outcomes = measure(names)
    print(f"| {' | '.join(_COLUMNS)} |\n|---|---:|---|---:|---|---|")
    for _, rows in TABLES:
        for row in rows:
            if row.item in outcomes:
                print(f"| {' | '.join(cells(row, outcomes[row.item]))} |")
    return int(any(outcome.failed for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
