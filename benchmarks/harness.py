"""A measurement, with its floor and its budget; the tables that show it, and the options of programs that measure."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

__all__ = [
    "FULL", "QUICK", "Budget", "Measurement", "Sample", "Scale", "Unmeasured", "at_least", "at_most", "each",
    "exactly", "interleave", "markdown", "median_round", "medians", "one_of", "options_of", "quantity", "rate",
    "report", "show", "spread",
]  # fmt: skip


# ---- measurements

Sample = Callable[[], Awaitable[float]]
"""A function that measures one run and returns its figure."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of measuring.

    Attributes:
        runs: interleaved runs whose median counts.
        share: the factor of every count of a full measurement.
    """

    runs: int
    share: float

    def count(self, full: int, least: int = 1) -> int:
        """The count for this scale in place of `full`, but no less than `least`."""
        return max(least, round(full * self.share))


FULL = Scale(9, 1.0)
QUICK = Scale(5, 0.1)


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit, on the value itself or on its ratio to the floor."""

    compare: Literal["<=", ">=", "=="]
    limit: float
    of: Literal["value", "ratio"]

    def holds(self, figure: float) -> bool:
        """Whether `figure` is within the budget."""
        if self.compare == "<=":
            return figure <= self.limit
        return figure >= self.limit if self.compare == ">=" else figure == self.limit

    def text(self, unit: str) -> str:
        """The budget as text, for instance ``<= 3x`` or ``<= 20 ms``."""
        return f"{self.compare} " + (f"{number(self.limit)}x" if self.of == "ratio" else quantity(self.limit, unit))


def at_most(limit: float, of: Literal["value", "ratio"] = "ratio") -> Budget:
    """A budget of at most `limit` times the floor, or `limit` in the value's unit."""
    return Budget("<=", limit, of)


def at_least(limit: float, of: Literal["value", "ratio"] = "ratio") -> Budget:
    """A budget of at least `limit` times the floor, or `limit` in the value's unit."""
    return Budget(">=", limit, of)


def exactly(limit: float) -> Budget:
    """A budget that allows only this value."""
    return Budget("==", limit, "value")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of the result.

    Attributes:
        item: the benchmark's name, a key of `benchmarks.ITEMS`.
        name: the name of the measure.
        value: the figure, in `unit`.
        unit: ``"us"``, ``"ms"``, ``"calls/s"``, ``"B"``, ...
        floor: the figure with which the value is compared, in the same unit; None for a value without a floor.
        floor_name: the name of the floor.
        budget: the limit, if it has one.
        runs: the number of runs whose median is the value.
        statistic: the name of another statistic of these runs, where the value is not their median.
        spread: the least and the most of these runs, in `unit`.
    """

    item: str
    name: str
    value: float
    unit: str
    floor: float | None = None
    floor_name: str = ""
    budget: Budget | None = None
    runs: int = 1
    statistic: str = "median"
    spread: tuple[float, float] | None = None

    @property
    def ratio(self) -> float | None:
        """Value over floor; None without a floor or with a floor of zero."""
        return self.value / self.floor if self.floor else None

    @property
    def verdict(self) -> Literal["pass", "FAIL", ""]:
        """Whether the budget holds; empty without a budget."""
        if self.budget is None:
            return ""
        figure = self.value if self.budget.of == "value" else self.ratio
        return "pass" if figure is not None and self.budget.holds(figure) else "FAIL"

    def plain(self) -> dict[str, Any]:
        """The fields as plain values, with the ratio and the verdict for readers of the file."""
        return {**asdict(self), "ratio": self.ratio, "verdict": self.verdict}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Measurement:
        """The inverse of `plain`."""
        fields = {key: value for key, value in plain.items() if key not in ("ratio", "verdict")}
        budget, spread = fields.get("budget"), fields.get("spread")
        fields["budget"] = None if budget is None else Budget(**budget)
        fields["spread"] = None if spread is None else (spread[0], spread[1])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A line of the result without a figure.

    Attributes:
        item: the benchmark's name.
        name: the name of the measure.
        reason: the lack of this machine, in words.
    """

    item: str
    name: str
    reason: str

    def plain(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


async def interleave(runs: int, subjects: Mapping[str, Sample], *, warm_up: bool = True) -> dict[str, list[float]]:
    """Run every subject `runs` times in turns, each turn beginning with another one.

    Args:
        runs: figures of each subject.
        subjects: by name.
        warm_up: begin with one run of each subject that does not count.
    """
    names = list(subjects)
    figures: dict[str, list[float]] = {name: [] for name in names}
    if warm_up:
        for name in names:
            await subjects[name]()
    for turn in range(runs):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()  # no subject pays for another's garbage
            figures[name].append(await subjects[name]())
    return figures


async def each(call: Callable[[], Any], times: int) -> float:
    """The microseconds of a call that is awaited, of so many one after the other."""
    before = time.perf_counter()
    for _ in range(times):
        await call()
    return (time.perf_counter() - before) / times * 1e6


async def rate(read: Callable[[], Any], nbytes: int, times: int) -> float:
    """MiB a second of a read of so many bytes, of so many one after the other."""
    return nbytes / (1 << 20) / (await each(read, times) / 1e6)


def medians(figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each subject's figures."""
    return {name: median(values) for name, values in figures.items()}


def median_round(values: Sequence[float], floors: Sequence[float]) -> tuple[float, float]:
    """The value and the floor of the round with the median ratio of both, the lower one of two. A slow moment of the
    machine changes both, and their ratio little."""
    rounds = sorted(zip(values, floors, strict=True), key=lambda both: both[0] / both[1])
    return rounds[(len(rounds) - 1) // 2]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The least and the most of the values."""
    return min(values), max(values)


def number(value: float) -> str:
    """A number in three digits, with separated thousands and without an exponent."""
    if value and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def quantity(value: float, unit: str) -> str:
    """A number with its unit, which may be empty."""
    return f"{number(value)} {unit}".rstrip()


_COLUMNS = ("measure", "value", "floor", "ratio", "budget", "")
_RIGHT = (False, True, True, True, True, False)


def row(measurement: Measurement) -> tuple[str, ...]:
    """The cells of one measurement's line."""
    floor = ratio = budget = ""
    if measurement.floor is not None:
        floor = f"{quantity(measurement.floor, measurement.unit)} ({measurement.floor_name})"
    if measurement.ratio is not None:
        ratio = f"{measurement.ratio:.2f}x"
    if measurement.budget is not None:
        budget = measurement.budget.text(measurement.unit)
    return measurement.name, quantity(measurement.value, measurement.unit), floor, ratio, budget, measurement.verdict


def plain_table(title: str, measurements: Iterable[Measurement]) -> str:
    """A table in plain text."""
    rows = [_COLUMNS, *map(row, measurements)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, _RIGHT, strict=True)).rstrip()
        for cells in rows
    ]
    return "\n".join([title, *("  " + line for line in lines)])


def show(title: str, measurements: Sequence[Measurement]) -> None:
    """Print a table: by rich where it is installed and the output is a terminal, else plain."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print(plain_table(title, measurements) + "\n", flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column, right in zip(_COLUMNS, _RIGHT, strict=True):
        table.add_column(column, justify="right" if right else "left")
    for measurement in measurements:
        style = {"FAIL": "red", "pass": "green"}.get(measurement.verdict, "")
        table.add_row(*row(measurement)[:-1], f"[{style}]{measurement.verdict}[/]" if style else "")
    Console().print(table)


def markdown(measurements: Iterable[Measurement]) -> str:
    """The measurements that have a budget, as a Markdown table."""
    lines = ["| Measure | Value | Floor | Ratio | Budget | |", "|---|---:|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(row(m))} |" for m in measurements if m.budget is not None]
    return "\n".join(lines)


# ---- programs


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """The type of an argument that has to be one of these names."""

    def check(name: str) -> str:
        if name not in known:
            raise argparse.ArgumentTypeError(f"there is no {name!r}; there are {', '.join(known)}")
        return name

    return check


def options_of(module: str, description: str, parts: Collection[str] = ()) -> argparse.ArgumentParser:
    """The options of ``python -m module``, to which the program may add its own.

    Args:
        module: the name of the module.
        description: a sentence about the program.
        parts: the names of its parts, of which a user may choose some.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer runs and smaller counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, one JSON object a line")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a budget does not hold")
    parser.add_argument("--markdown", action="store_true", help="end with a Markdown table of what has a budget")
    if parts:
        which = f"which (default all): {', '.join(parts)}"
        parser.add_argument("parts", nargs="*", metavar="PART", type=one_of(parts), help=which)
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
