"""Eager or rendezvous: which of the two is cheaper for a payload of some size, from a few measured times.

An *eager* payload rides in the frame: it is copied into it at the sender and out of it at the receiver. By *rendezvous*
the frame carries a reference, and the receiver READs the bytes from where they lie. Each costs a constant plus the
bytes by a rate: the READ costs a round trip that the copies do not, and then moves bytes faster than they do. So there
is one size at which both cost the same. (The model and its first constants: "RDMA over ML/DL and Big Data Frameworks",
SC Asia 2018.)

Everything here is arithmetic: times come from the caller.
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
"""Measured times: bytes and seconds of each run, in any order, any number of runs of a size."""

HIGHEST: Final = 65536
"""Default of the largest limit in bytes: every receive that is posted has room for a frame of it."""
LOWEST: Final = 4096
"""Default of the least limit in bytes: below a page, the bookkeeping of a reference costs more than either way."""
STEP: Final = 64
"""Bytes of a cache line, of which limits are multiples: measured to the byte, they would differ from run to run."""

_TICK: Final = 1e-9
"""Seconds. A clock that saw no time pass saw less than this, and no sample may weigh infinitely much."""


@dataclass(frozen=True, slots=True)
class Line:
    """Cost of moving bytes: a constant, and the bytes by a rate.

    Raises:
        ValueError: the constant is negative or not finite, or the rate not positive.
    """

    latency_s: float
    """Seconds that no bytes at all cost."""
    bytes_per_s: float
    """Infinite where more bytes take no longer."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf or not self.bytes_per_s > 0:
            raise ValueError(f"no line of costs: {self.latency_s} s and {self.bytes_per_s} bytes/s")

    def cost(self, nbytes: float) -> float:
        """Seconds for that many bytes."""
        return self.latency_s + nbytes / self.bytes_per_s

    def __str__(self) -> str:
        rate = "nothing per byte" if math.isinf(self.bytes_per_s) else f"bytes at {self.bytes_per_s / 2**20:,.0f} MiB/s"
        return f"{self.latency_s * 1e6:.2f} us + {rate}"


def fit(points: Samples) -> Line:
    """The line through measured times.

    Of each size the median counts, so that a run during which the process was interrupted changes nothing. Through two
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
    """Bytes at which both cost the same, and above which `rendezvous` is the cheaper one.

    Returns:
        0 where `rendezvous` is never the dearer one, infinity where it does not end up as the cheaper one.
    """
    ahead = rendezvous.latency_s - eager.latency_s
    gain = 1 / eager.bytes_per_s - 1 / rendezvous.bytes_per_s
    if gain < 0 or (gain == 0 and ahead > 0):
        return math.inf
    return ahead / gain if ahead > 0 else 0.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """What was measured, and the limit that follows."""

    eager: Line
    rendezvous: Line
    eager_limit: int
    """Bytes of the largest payload that rides in the frame."""
    reason: str
    """One line: what was measured and why this limit."""


def choose(eager: Line, rendezvous: Line, low: int = LOWEST, high: int = HIGHEST) -> CostModel:
    """The limit where the two cost the same: a multiple of 64, rounded down, and from `low` to `high`.

    Raises:
        ValueError: from `low` to `high` there is no positive multiple of 64.
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
    """The model of this machine.

    Eager is two copies, and the way of the bytes in the frame where `sends` were measured. Rendezvous is a READ. The
    constant cost of sending a frame is left out of both, as both send one: of `sends` only the rate counts.

    Args:
        copies: times of one copy into or out of a frame.
        small_reads: times of READs whose constant cost dominates, of 4 KiB for instance.
        large_reads: times of READs whose rate dominates, of 1 MiB for instance.
        sends: times of SENDs of several sizes, without the copies.
        low: bytes of the least limit.
        high: bytes of the largest limit.

    Raises:
        ValueError: copies or both kinds of READ are missing, or what `fit` and `choose` raise.
    """
    copy = fit(copies)
    per_byte = 2 / copy.bytes_per_s + (1 / fit(sends).bytes_per_s if sends else 0.0)
    eager = Line(2 * copy.latency_s, 1 / per_byte if per_byte else math.inf)
    return choose(eager, fit([*small_reads, *large_reads]), low, high)
