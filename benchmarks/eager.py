"""Eager or rendezvous: measured times of both beside the lines that predict them, as a picture.

::

    python -m benchmarks.eager measure > points.json               # where there is a device
    python tools/vm.py run -- python -m benchmarks.eager measure > points.json
    python -m benchmarks.eager plot points.json docs/explanation/eager-or-rendezvous.svg

The picture belongs to ``docs/explanation/eager-or-rendezvous.md``. It needs matplotlib (the ``bench`` extra), which
is imported when it is drawn and not before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import zcactor as zc
from benchmarks.actors import SyncAdder
from zcactor.transport.cost import CostModel, Line, crossover
from zcactor.transport.verbs.device.calibration import calibrate
from zcactor.transport.verbs.device.sizing import MAX_VERBS_EAGER_LIMIT
from zcactor.transport.verbs.device.viability import NotViable, viability
from zcactor.transport.verbs.driver.bindings import NAMES, Absent, bindings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.transport.cost import Samples
    from zcactor.transport.verbs.driver.base import Binding

__all__ = ["from_plain", "main", "measure", "plain", "plot"]

_SMALLEST: Final = 64
"""Bytes at the left edge, where no smaller array was measured: a cache line, where only both constants count."""
_LARGEST: Final = 1 << 20
"""Bytes at the right edge, where no larger array was measured: there only the rates count."""
_POINTS_PER_DOUBLING: Final = 8
_EAGER: Final = "#1f6fb4"
_RENDEZVOUS: Final = "#d1661b"
_QUIET: Final = "#666666"

_EAGER_KIB: Final = (1, 2, 4, 8, 16, 31)
"""Arrays of `MAX_VERBS_EAGER_LIMIT` bytes and more never go in a frame."""
_RENDEZVOUS_KIB: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LEAST: Final = 64
"""The least value of the setting `verbs_eager_limit`."""
_CALIBRATIONS: Final = 5
_SECONDS: Final = 15.0
"""Seconds of all calls with one eager limit."""
_LEAST_CALLS: Final = 15
"""Calls of each size, however long they take."""


# ---- measuring


def measure(binding: Binding) -> tuple[CostModel, Samples, Samples]:
    """Measure through the first device that works.

    A point is the time of a call with an array minus that of a call with two numbers, as both send a frame and get one
    back. Sender and receiver are two processes, and a call waits for its answer.

    Returns:
        The model of this machine, and bytes and seconds of arrays in frames and of arrays that were READ.

    Raises:
        OSError: no device works.
    """
    found = viability(binding, arena_nbytes=0)
    if isinstance(found, NotViable):
        raise OSError(str(found))
    with contextlib.closing(binding.open(found.device)) as device:
        models = [calibrate(device, found.port, found.gid, high=MAX_VERBS_EAGER_LIMIT) for _ in range(_CALIBRATIONS)]
    models.sort(key=lambda model: crossover(model.eager, model.rendezvous))
    eager = zc.run(_calls(binding.name, MAX_VERBS_EAGER_LIMIT, _EAGER_KIB))
    rendezvous = zc.run(_calls(binding.name, _LEAST, _RENDEZVOUS_KIB))
    return models[len(models) // 2], eager, rendezvous


async def _calls(binding: str, limit: int, sizes: Sequence[int]) -> Samples:
    """Measure arrays of so many KiB with one eager limit; the bytes and seconds."""
    config = zc.Config(verbs_binding=binding, verbs_eager_limit=limit, sealing="off")  # type: ignore[arg-type]
    async with zc.init(transports=("verbs",), config=config):
        adder = await SyncAdder.spawn()
        arrays = {kib: zc.ones(kib << 7) for kib in sizes}
        subjects = {0: partial(adder.add, 3, 4.5)} | {kib: partial(adder.first, array) for kib, array in arrays.items()}
        taken: dict[int, list[float]] = {kib: [] for kib in subjects}
        for call in subjects.values():
            await call()
        end = time.perf_counter() + _SECONDS
        # One call of each in turn, so that a slow moment of the machine meets all sizes.
        while len(taken[0]) < _LEAST_CALLS or time.perf_counter() < end:
            for kib, call in subjects.items():
                before = time.perf_counter()
                await call()
                taken[kib].append(time.perf_counter() - before)
        read = (await zc.stats(adder)).bytes_read
    wanted = 0 if limit > _LEAST else (len(taken[0]) + 1) * sum(kib << 10 for kib in sizes)
    if read != wanted:
        raise OSError(f"{read:,} bytes were READ with an eager limit of {limit}, and {wanted:,} were to be")
    return [(kib << 10, median(taken[kib]) - median(taken[0])) for kib in sizes]


def plain(model: CostModel, eager_points: Samples, rendezvous_points: Samples) -> dict[str, Any]:
    """The figures in the types of JSON. JSON has no infinity, so an infinite rate is null."""
    fields = asdict(model)
    for line in ("eager", "rendezvous"):
        if math.isinf(fields[line]["bytes_per_s"]):
            fields[line]["bytes_per_s"] = None
    return {"model": fields, "eager": list(eager_points), "rendezvous": list(rendezvous_points)}


def from_plain(fields: dict[str, Any]) -> tuple[CostModel, Samples, Samples]:
    """The inverse of `plain`."""
    model = fields["model"]
    lines = {
        name: Line(model[name]["latency_s"], model[name]["bytes_per_s"] or math.inf) for name in ("eager", "rendezvous")
    }
    eager, rendezvous = ([(nbytes, seconds) for nbytes, seconds in fields[name]] for name in lines)
    return CostModel(**{**model, **lines}), eager, rendezvous


# ---- drawing


def plot(model: CostModel, eager_points: Samples, rendezvous_points: Samples, path: Path) -> None:
    """Write an SVG file: seconds by bytes, both axes logarithmic.

    Args:
        model: the two lines, and the limit that is marked.
        eager_points: measured times of payloads in frames, (bytes, seconds); may be empty.
        rendezvous_points: measured times of payloads that were READ, in the same form.
        path: of the file; an existing file is replaced.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib import rc_context, ticker
    from matplotlib.figure import Figure

    measured = [nbytes for nbytes, _ in (*eager_points, *rendezvous_points) if nbytes > 0]
    sizes = _sizes(min([*measured, _SMALLEST]), max([*measured, _LARGEST]))
    # Text stays text (small, sharp, searchable), and the same figures give the same file.
    with rc_context({"font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "zcactor"}):
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log", xlabel="payload", ylabel="time")
        for name, colour, marker, line, points in (
            ("in the frame", _EAGER, "o", model.eager, eager_points),
            ("by READ", _RENDEZVOUS, "s", model.rendezvous, rendezvous_points),
        ):
            axes.plot(sizes, [line.cost(size) for size in sizes], color=colour, label=f"{name}: {line}")
            if shown := [(nbytes, seconds) for nbytes, seconds in points if seconds > 0]:  # a log axis shows no others
                xs, ys = zip(*shown, strict=True)
                axes.plot(xs, ys, marker, color=colour, markersize=4, alpha=0.7, label=f"{name}, measured")
        axes.axvline(model.eager_limit, color=_QUIET, linestyle="--", linewidth=1, label=_limit_label(model))
        axes.set_xlim(sizes[0], sizes[-1])
        axes.xaxis.set_major_locator(ticker.LogLocator(base=2, subs=[1], numticks=12))
        axes.xaxis.set_major_formatter(lambda value, _: _bytes_label(value))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * 1e6:g} us")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
        figure.savefig(path, format="svg", metadata={"Date": None})


def _sizes(low: float, high: float) -> Sequence[float]:
    """Sizes from `low` to `high`, at even steps of a logarithmic axis."""
    steps = math.ceil(math.log2(high / low) * _POINTS_PER_DOUBLING)
    return [low * (high / low) ** (step / steps) for step in range(steps + 1)]


def _limit_label(model: CostModel) -> str:
    size = crossover(model.eager, model.rendezvous)
    equal = "never equal" if math.isinf(size) else f"equal at {size:,.0f} bytes"
    return f"eager limit {model.eager_limit:,} bytes ({equal})"


def _bytes_label(value: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g} B"


# ---- the program


def main(arguments: list[str] | None = None) -> int:
    """Measure, or draw.

    Returns:
        0, or 2 where there is no device.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eager", description="Eager or rendezvous.")
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="write the figures to standard output, as JSON")
    measuring.add_argument("--binding", choices=NAMES, help="default: the first that finds a device")
    drawing = commands.add_parser("plot", help="draw such figures")
    drawing.add_argument("figures", type=Path)
    drawing.add_argument("svg", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "plot":
        plot(*from_plain(json.loads(options.figures.read_text())), options.svg)
        return 0
    binding = bindings(options.binding)
    if isinstance(binding, Absent):
        print(binding, file=sys.stderr)
        return 2
    print(json.dumps(plain(*measure(binding))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
