"""The eager limit: the payload size up to which a copy within the frame is cheaper than a READ.

An *eager* payload travels in the frame: the sender copies it in, and the receiver copies it out. By *rendezvous* the
frame carries a reference, and the receiver READs the bytes from the sender's memory. Each way costs a constant and a
time per byte. A READ costs a round trip, which the copies do not, but moves bytes faster. So there is one size at which
both cost the same. (The model and its first constants: "RDMA over ML/DL and Big Data Frameworks", SC Asia 2018.)

This module only computes. The caller measures the times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Final, TypeAlias

__all__ = ["CostModel", "Line", "Samples", "calibrated", "choose", "crossover", "fit"]

Samples: TypeAlias = Sequence[tuple[int, float]]
"""Measured times: bytes and seconds of each run, in any order, with any number of runs of each size."""

HIGHEST: Final = 65536
"""Default of the largest limit in bytes: each posted receive has room for a frame with such a payload."""
LOWEST: Final = 4096
"""Default of the least limit in bytes: below a page, the bookkeeping of a reference costs more than the bytes."""
STEP: Final = 64
"""Bytes of a cache line. Limits are multiples of it, as limits that are exact to the byte would differ from run to
run."""

_TICK: Final = 1e-9
"""The least time of a sample, in seconds: a clock may measure 0, and no sample may get an infinite weight."""


@dataclass(frozen=True, slots=True)
class Line:
    """The cost of moving bytes: a constant and a time per byte.

    Raises:
        ValueError: the constant is negative or not finite, or the rate is not positive.
    """

    latency_s: float
    """Seconds for 0 bytes."""
    bytes_per_s: float
    """Rate; infinite where more bytes take no longer."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf or not self.bytes_per_s > 0:
            raise ValueError(f"no line of costs: {self.latency_s} s and {self.bytes_per_s} bytes/s")

    def cost(self, nbytes: float) -> float:
        """Return the seconds that `nbytes` take."""
        return self.latency_s + nbytes / self.bytes_per_s

    def __str__(self) -> str:
        rate = "nothing per byte" if math.isinf(self.bytes_per_s) else f"bytes at {self.bytes_per_s / 2**20:,.0f} MiB/s"
        return f"{self.latency_s * 1e6:.2f} us + {rate}"


def fit(points: Samples) -> Line:
    """Fit a line to measured times.

    The median of each size counts, so that a run during which the process was interrupted changes nothing. Through two
    sizes the line is exact; through more it has the least squares of *relative* errors, because the constant shows in
    the small sizes, whose times are lost in the noise of the large ones. A line that noise would tilt is the nearest
    possible one: where times do not grow with the size, they are a constant; where the constant would be negative,
    it is 0. One size tells nothing about the constant: it is 0 as well.

    Raises:
        ValueError: there is no point, a size is negative, or a time is negative or not finite.
    """
    if not points:
        raise ValueError("a line of costs needs at least one measured time")
    for nbytes, seconds in points:
        if nbytes < 0 or not 0 <= seconds < math.inf:
            raise ValueError(f"{seconds} s for {nbytes} bytes is no measured time")
    typical = [
        (nbytes, max(_TICK, median(seconds for _, seconds in runs)))
        for nbytes, runs in groupby(sorted(points), key=lambda point: point[0])
    ]
    weights = [1 / (seconds * seconds) for _, seconds in typical]
    total = math.fsum(weights)

    def mean(values: Sequence[float]) -> float:
        return math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / total

    size, time = mean([nbytes for nbytes, _ in typical]), mean([seconds for _, seconds in typical])
    spread = mean([(nbytes - size) ** 2 for nbytes, _ in typical])
    slope = mean([(nbytes - size) * (seconds - time) for nbytes, seconds in typical]) / spread if spread else 0.0
    latency = time - slope * size
    if len(typical) == 1 or latency < 0:
        latency = 0.0
        square = mean([float(nbytes * nbytes) for nbytes, _ in typical])
        slope = mean([nbytes * seconds for nbytes, seconds in typical]) / square if square else 0.0
    if slope <= 0:
        return Line(time, math.inf)
    rate = 1 / slope if slope > 1e-300 else math.inf  # the inverse of a smaller one is no float
    return Line(latency, rate)


def crossover(eager: Line, rendezvous: Line) -> float:
    """Return the bytes at which both cost the same. Above that size `rendezvous` is cheaper.

    Returns:
        0 where `rendezvous` is never dearer, infinity where it never becomes cheaper.
    """
    ahead = rendezvous.latency_s - eager.latency_s
    gain = 1 / eager.bytes_per_s - 1 / rendezvous.bytes_per_s
    if gain < 0 or (gain == 0 and ahead > 0):
        return math.inf
    return ahead / gain if ahead > 0 else 0.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Measured costs, and the eager limit that follows from them."""

    eager: Line
    rendezvous: Line
    eager_limit: int
    """Bytes of the largest payload that travels in a frame."""
    reason: str
    """The measurement and the reason for the limit, in one line."""


def choose(eager: Line, rendezvous: Line, low: int = LOWEST, high: int = HIGHEST) -> CostModel:
    """Choose the limit where both cost the same: rounded down to a multiple of 64, and within `low` and `high`.

    Raises:
        ValueError: there is no positive multiple of 64 between `low` and `high`.
    """
    least, most = -(-low // STEP) * STEP, high // STEP * STEP
    if not 0 < least <= most:
        raise ValueError(f"an eager limit must be a positive multiple of {STEP}; there is none from {low} to {high}")
    size = crossover(eager, rendezvous)
    limit = most if size >= most else max(least, int(size) // STEP * STEP)
    if math.isinf(size):
        why = f"a READ never becomes the cheaper one, so the limit is the largest allowed, {limit:,} bytes"
    elif size < least:
        why = f"equal at {size:,.0f} bytes, so the limit is the least allowed, {limit:,} bytes"
    elif size >= most + STEP:
        why = f"equal at {size:,.0f} bytes, so the limit is the largest allowed, {limit:,} bytes"
    else:
        why = f"equal at {size:,.0f} bytes, so the limit is {limit:,} bytes"
    return CostModel(eager, rendezvous, limit, f"in a frame {eager}, by READ {rendezvous}: {why}")


def calibrated(
    copies: Samples,
    small_reads: Samples,
    large_reads: Samples,
    *,
    sends: Samples = (),
    low: int = LOWEST,
    high: int = HIGHEST,
) -> CostModel:
    """Make the model of this machine.

    Eager costs two copies, and with `sends` the time of the bytes in the frame. Rendezvous costs a READ. Both send a
    frame, so the constant cost of one is left out: only the rate of `sends` counts.

    Args:
        copies: times of one copy into a frame or out of it.
        small_reads: times of READs that the constant dominates, of 4 KiB for instance.
        large_reads: times of READs that the rate dominates, of 1 MiB for instance.
        sends: times of SENDs of several sizes, without the copies.
        low: bytes of the least limit.
        high: bytes of the largest limit.

    Raises:
        ValueError: `copies` or one kind of READ is empty, or `fit` or `choose` raises it.
    """
    copy = fit(copies)
    per_byte = 2 / copy.bytes_per_s + (1 / fit(sends).bytes_per_s if sends else 0.0)
    eager = Line(2 * copy.latency_s, 1 / per_byte if per_byte else math.inf)
    return choose(eager, fit([*small_reads, *large_reads]), low, high)
