"""Eager or rendezvous: measured times of both beside the lines that predict them, as a picture.

The picture belongs to ``docs/eager-or-rendezvous.md``. It needs matplotlib (the ``bench`` extra), which is imported
when it is drawn and not before.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from zcactor.transport.cost import crossover

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zcactor.transport.cost import CostModel, Samples

__all__ = ["plot"]

_SMALLEST: Final = 64
"""Bytes at the left edge, where nothing smaller was measured: a cache line, and both constants are all that counts."""
_LARGEST: Final = 1 << 20
"""Bytes at the right edge, where nothing larger was measured: there only the rates count."""
_POINTS_PER_DOUBLING: Final = 8
_EAGER: Final = "#1f6fb4"
_RENDEZVOUS: Final = "#d1661b"
_QUIET: Final = "#666666"


def plot(model: CostModel, eager_points: Samples, rendezvous_points: Samples, path: Path) -> None:
    """Write an SVG file: seconds by bytes, both axes logarithmic.

    Args:
        model: the two lines, and the limit that is marked.
        eager_points: measured times of payloads that rode in frames, (bytes, seconds); may be empty.
        rendezvous_points: likewise of payloads that were READ.
        path: of the file; one that is there is replaced.

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
            if points:
                xs, ys = zip(*points, strict=True)
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
    """From `low` to `high`, evenly on a logarithmic axis."""
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
