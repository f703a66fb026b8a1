"""Predicted times and volumes of an allreduce by each plan. Pure.

On one host members take their inputs through mappings, so bytes cost the time of the sum, and each meeting of all
members costs the time of a frame. Between hosts each step waits for a frame that names bytes, and then for the bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.collectives.hierarchy import Hierarchy

__all__ = ["MOST_IN_TURN_NBYTES", "GroupPlan", "Line", "fastest", "plan_of"]

MOST_IN_TURN_NBYTES: Final = 1 << 20
"""Bytes of the largest input for which two ranks on one host take turns: one of them reduces two of 1 MiB in 36-50 us,
and a meeting of both takes 40-100 us."""
_FRAME_NBYTES_PER_S: Final = 1e9
"""Bytes per second of a payload within frames: made, sent through a socket, taken out."""
_SUM_NBYTES_PER_S: Final = 8e9
"""Bytes per second that one core reads and adds."""
_FRAMES_A_STEP: Final = 3
"""Frames of one way that a step between hosts takes before its first byte: bytes are named, asked for, and sent."""


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


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The plan of an allreduce, with the predicted costs of all plans. ``str()`` is a table."""

    nbytes: int
    """Bytes of each rank's input."""
    size: int
    """Number of ranks."""
    plan: str
    """The plan that ``"auto"`` takes."""
    predicted_s: Mapping[str, float]
    """Predicted seconds by plan, with the parameter server for comparison."""
    volume: Mapping[str, int]
    """Bytes that a rank takes from others by plan, the rank that takes most; with several hosts, from other hosts. (By
    ``"ring"`` and ``"halving"`` some come from its own host.)"""
    reason: str
    """The reason for `plan`."""
    gpus: str = ""
    """The way of arrays on GPUs, for which the figures are not: ``"nccl"``, or why the first member has none."""

    def __str__(self) -> str:
        lines = [
            f"allreduce of {self.nbytes:,} bytes over {self.size} ranks: {self.plan}, because {self.reason}",
            f"{'plan':<18} {'predicted us':>14} {'bytes a rank takes':>20}",
        ]
        lines += [
            f"{name:<18} {seconds * 1e6:>14,.1f} {self.volume[name]:>20,}" for name, seconds in self.predicted_s.items()
        ]
        if self.gpus:
            lines.append(f"arrays on GPUs: {self.gpus}")
        return "\n".join(lines)


def plan_of(nbytes: int, hierarchy: Hierarchy, line: Line, eager_nbytes: int, gpus: str = "") -> GroupPlan:
    """Predict the times of an allreduce, and say which plan is taken.

    Args:
        nbytes: bytes of each rank's input.
        hierarchy: the ranks by host.
        line: the cost of bytes from one member to another; between hosts, where there are several.
        eager_nbytes: bytes of the largest input that travels in frames.
        gpus: the way of arrays on GPUs.
    """
    size, frame_s = hierarchy.size, line.latency_s
    volume = {"eager": (size - 1) * nbytes}
    seconds = {"eager": frame_s + (size - 1) * nbytes / _FRAME_NBYTES_PER_S + size * nbytes / _SUM_NBYTES_PER_S}
    if hierarchy.one_host:
        others = size - 1
        volume |= {
            "naive": others * nbytes,
            "shared": round(nbytes * others / size),
            "direct": round(2 * nbytes * others / size),
            "parameter server": size * nbytes,  # one server takes the inputs of all
        }
        read = {"naive": size, "shared": 1, "direct": 1, "parameter server": size}
        seconds |= {name: 2 * frame_s + n * nbytes / _SUM_NBYTES_PER_S for name, n in read.items()}
    else:
        far = _Far(hierarchy, line, nbytes)
        far.add("naive", 1, far.most_far, size)
        far.add("direct", 2, far.parts_taken / size, far.inputs_read / size)
        far.add("ring", 2 * (size - 1), 2 * (size - 1) / size, 2 * (size - 1) / size)
        far.add("halving", *_halving(size))
        far.add("parameter server", 2, size, size)
        volume |= far.volume
        seconds |= far.seconds
    plan = "eager" if nbytes <= eager_nbytes else "shared" if hierarchy.one_host else fastest(nbytes, hierarchy, line)
    if plan == "eager":
        reason = f"inputs of at most {eager_nbytes:,} bytes travel in the frames: one meeting"
    elif plan == "shared":
        reason = "all members map each other's memory: each reduces its part into one shared result"
        if size == 2 and nbytes <= MOST_IN_TURN_NBYTES:
            reason = "both members map each other's memory: one of them, by turns, reduces everything into one result"
    elif plan == "naive":
        reason = "each rank takes all inputs of other hosts at once, which is the fastest for so few bytes"
    else:
        inputs = "all inputs" if hierarchy.flat else "each host's sum"
        reason = f"each rank takes its part of {inputs}, and then the finished parts: the fewest bytes in two steps"
    return GroupPlan(nbytes, size, plan, seconds, volume, reason, gpus)


def fastest(nbytes: int, hierarchy: Hierarchy, line: Line) -> str:
    """The faster one of the plans between hosts that add in the group's order: ``"naive"`` or ``"direct"``."""
    far = _Far(hierarchy, line, nbytes)
    far.add("naive", 1, far.most_far, hierarchy.size)
    far.add("direct", 2, far.parts_taken / hierarchy.size, far.inputs_read / hierarchy.size)
    return min(far.seconds, key=far.seconds.__getitem__)


class _Far:
    """The costs of plans between hosts.

    Attributes:
        most_far: the most ranks on other hosts than a rank.
        parts_taken: the most parts, of one for each rank, that a rank takes from other hosts by ``"direct"``.
        inputs_read: the parts of inputs and sums that it reads then.
    """

    def __init__(self, hierarchy: Hierarchy, line: Line, nbytes: int) -> None:
        hosts, size = len(hierarchy.ranks), hierarchy.size
        least = min(len(ranks) for ranks in hierarchy.ranks)
        self._line, self._nbytes = line, nbytes
        self.most_far = size - least
        served = math.ceil(max(size - len(ranks) for ranks in hierarchy.ranks) / least)
        """The most parts of other hosts that a rank takes finished."""
        first = self.most_far if hierarchy.everywhere else hosts - 1
        self.parts_taken = first + served
        self.inputs_read = size if hierarchy.flat else (served + 1) * size // hosts + hosts
        self.volume: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def add(self, plan: str, steps: int, taken: float, read: float) -> None:
        """Note a plan: its steps, and the multiples of an input that a rank takes from others, and reads."""
        line, nbytes = self._line, self._nbytes
        self.volume[plan] = round(taken * nbytes)
        self.seconds[plan] = (
            _FRAMES_A_STEP * steps * line.latency_s
            + taken * nbytes / line.bytes_per_s
            + read * nbytes / _SUM_NBYTES_PER_S
        )


def _halving(size: int) -> tuple[int, float, float]:
    """The steps of halving and doubling, the multiples of an input that the busiest rank takes, and those it reads."""
    power = 1 << (size.bit_length() - 1)
    steps, taken = 2 * (power.bit_length() - 1), 2 * (power - 1) / power
    if power < size:  # a surplus rank gives its input to another one first, and takes the result last
        return steps + 2, taken + 1, taken + 2
    return steps, taken, taken
