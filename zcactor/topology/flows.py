"""Flows that share a network: their rates, and the time of steps in which each rank goes on as soon as it can.

A rank reads. It starts a step when it has finished the one before, and when the ranks that it reads from have. So flows
of several steps are under way at once. Rates follow from max-min fairness: no flow can have more but by taking from
one that has no more (Bertsekas and Gallager, "Data Networks", 1992, section 6.5). Each path of a flow counts as a
connection of its own, whose part of a full link is by its latency, as TCP has it: half as much at twice the latency.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.topology.arcs import Arcs
    from zcactor.topology.plans import Exchange

__all__ = ["Flows", "pieces", "seconds"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.intp]

AT_ONCE: Final = 1024
"""The flows of a step up to which they are followed."""
IN_ALL: Final = 32768
"""The flows of all steps up to which they are followed."""
_WAYS: Final = 64
"""The paths of a flow that count as connections at most."""
_PIECES_OF_A_STEP: Final = 16
"""The least number of pieces of the time of each step."""
_PIECES: Final = 2048
"""The number of pieces of the whole time where flows are few."""
_WORK: Final = 131072
"""The product of pieces and of flows at once where flows are many."""
_EXACT: Final = 1e-9
"""The relative error of rates and times that are meant to be equal."""


def pieces(ranks: int, steps: Sequence[Exchange]) -> int:
    """The pieces of the time in each of which rates are found once; 0 where flows are too many to be followed.

    Each step needs some of its own. Beyond that there are as many as take about a second.
    """
    at_once = max((len(step.flows) or ranks * (ranks - 1) for step in steps), default=0)
    number = sum(step.times for step in steps)
    if at_once > AT_ONCE or at_once * number > IN_ALL:
        return 0
    return max(1, _PIECES_OF_A_STEP * number, min(_PIECES, _WORK // max(1, at_once)))


class Flows:
    """The flows between some pairs of nodes, each spread evenly over its shortest paths.

    Args:
        arcs: the network.
        sources: the node where each flow begins.
        targets: the node where it ends, another one.
    """

    __slots__ = ("_bandwidths", "_counts", "_shares", "_weights", "latencies")

    def __init__(self, arcs: Arcs, sources: _Ints, targets: _Ints) -> None:
        self._bandwidths = arcs.rates
        self._shares = shares = arcs.shares(sources, targets)
        self._counts: _Ints = np.diff(shares.starts)
        self.latencies = shares.latencies
        """Seconds of each flow's slowest path."""
        some = shares.latencies[shares.latencies > 0]
        latencies = np.maximum(shares.latencies, some.min()) if len(some) else np.ones(len(sources))
        self._weights: _Floats = np.minimum(shares.paths, _WAYS) * (latencies.min(initial=1.0) / latencies)

    def rates(self, active: _Ints) -> _Floats:
        """The bytes/s of each of the flows `active` while these are under way and no others.

        In each round arcs are filled up whose flows all meet no fuller one, so their rates are found.
        """
        shares, going, counts = self._shares, np.arange(len(active)), self._counts[active]
        firsts = np.cumsum(counts) - counts
        entries = np.arange(counts.sum()) + np.repeat(shares.starts[active] - firsts, counts)
        arcs = shares.arcs[entries]
        loads = shares.parts[entries] * np.repeat(self._weights[active], counts)
        free, found = self._bandwidths.copy(), np.zeros(len(active))
        levels = np.zeros(len(free))
        while len(going):
            load = np.bincount(arcs, loads, minlength=len(free))
            level = np.divide(free, load, out=np.full(len(free), np.inf), where=load > 0)
            levels = np.maximum(levels, level)  # they rise, but for errors of rounding
            here = levels[arcs]
            least = np.minimum.reduceat(here, np.cumsum(counts) - counts)  # of each flow
            flow = np.repeat(np.arange(len(going)), counts)
            fullest = here <= least[flow] * (1 + _EXACT)
            filled = np.ones(len(free), bool)
            filled[arcs[~fullest]] = False
            known = np.zeros(len(going), bool)
            known[flow[fullest & filled[arcs]]] = True
            found[going[known]] = least[known]
            gone = known[flow]
            free -= np.bincount(arcs[gone], loads[gone] * least[flow[gone]], minlength=len(free))
            np.maximum(free, 0.0, out=free)
            going, counts, arcs, loads = going[~known], counts[~known], arcs[~gone], loads[~gone]
        return found * self._weights[active]


class _Step:
    """The reads of one step: of each rank the flows to it, and the ranks that it gives to."""

    __slots__ = ("givers", "nbytes", "reads", "takers")

    def __init__(self, ranks: int, nbytes: float) -> None:
        self.nbytes = nbytes
        self.givers: list[list[int]] = [[] for _ in range(ranks)]
        self.takers: list[list[int]] = [[] for _ in range(ranks)]
        self.reads: list[list[int]] = [[] for _ in range(ranks)]


class _Ranks:
    """The ranks on their way through the steps, and the flows that they have asked for."""

    def __init__(self, ranks: int, steps: Sequence[Exchange], nbytes: float) -> None:
        numbers: dict[tuple[int, int], int] = {}
        self._steps: list[_Step] = []
        for exchange in steps:
            step = _Step(ranks, exchange.part * nbytes)
            for giver, taker in exchange.flows or [(a, b) for a in range(ranks) for b in range(ranks) if a != b]:
                step.givers[taker].append(giver)
                step.takers[giver].append(taker)
                step.reads[taker].append(numbers.setdefault((giver, taker), len(numbers)))
            self._steps += [step] * exchange.times
        self.pairs: _Ints = np.array(list(numbers), np.intp).reshape(-1, 2)
        """The giver and the taker of each flow."""
        self.times = [0.0] * ranks
        """The time at which each rank finished its last step."""
        self.asked: list[tuple[float, int, float]] = []
        """The flows that have not started: a heap of the times, the flows and their bytes."""
        self._done = [0] * ranks
        self._started = [-1] * ranks
        self._left = [0] * ranks
        self._latencies: list[float] = []

    def start(self, latencies: Sequence[float]) -> None:
        """Start the first step, with the latency of each flow."""
        self._latencies = list(latencies)
        self._go_on(list(range(len(self.times))))

    def end(self, flow: int, time: float) -> None:
        """End a flow at `time`. Flows must end in the order of their times."""
        rank = int(self.pairs[flow, 1])
        self._left[rank] -= 1
        if self._left[rank] == 0:
            self.times[rank] = time
            self._go_on(self._finish(rank))

    def _finish(self, rank: int) -> list[int]:
        """Finish the step of `rank`. The ranks whose next step may start now."""
        self._done[rank] += 1
        number = self._done[rank]
        return [rank, *self._steps[number].takers[rank]] if number < len(self._steps) else []

    def _go_on(self, ranks: list[int]) -> None:
        for rank in ranks:  # grows
            number = self._done[rank]
            if number == len(self._steps) or self._started[rank] == number:
                continue
            step = self._steps[number]
            if any(self._done[giver] < number for giver in step.givers[rank]):
                continue
            self._started[rank] = number
            if not step.reads[rank]:
                ranks += self._finish(rank)
                continue
            # One of these times is that of the flow which ended just now, and no other is later.
            time = max([self.times[rank], *(self.times[giver] for giver in step.givers[rank])])
            self._left[rank] = len(step.reads[rank])
            for flow in step.reads[rank]:
                heapq.heappush(self.asked, (time + self._latencies[flow], flow, step.nbytes))


def seconds(arcs: Arcs, hosts: Sequence[int], steps: Sequence[Exchange], nbytes: float, grain: float = 0.0) -> float:
    """The time until the last rank has finished the last step.

    Args:
        arcs: the network.
        hosts: the nodes of the ranks, all different.
        steps: the steps, as of `zcactor.topology.plans`.
        nbytes: bytes of the whole array.
        grain: seconds in which flows may end and start before rates are found anew. Each starts and ends at its own
            time still.
    """
    ranks = _Ranks(len(hosts), steps, nbytes)
    nodes = np.array(hosts, np.intp)
    flows = Flows(arcs, nodes[ranks.pairs[:, 0]], nodes[ranks.pairs[:, 1]])
    ranks.start(flows.latencies.tolist())
    count = len(ranks.pairs)
    left, since, under_way = np.zeros(count), np.zeros(count), np.zeros(count, bool)
    now = 0.0
    while ranks.asked or under_way.any():
        active = np.flatnonzero(under_way)
        rates = flows.rates(active)
        ends = np.maximum(since[active], now) + left[active] / rates
        soon = min(float(ends.min(initial=np.inf)), ranks.asked[0][0] if ranks.asked else np.inf)
        left[active] = np.maximum(left[active] - rates * np.maximum(soon - np.maximum(since[active], now), 0.0), 0.0)
        now = soon
        until = now + max(grain, now * _EXACT)
        over = np.flatnonzero(ends <= until)
        under_way[active[over]] = False
        for index in over[np.argsort(ends[over], kind="stable")].tolist():
            ranks.end(int(active[index]), float(ends[index]))
        while ranks.asked and ranks.asked[0][0] <= until:
            time, flow, size = heapq.heappop(ranks.asked)
            left[flow], since[flow], under_way[flow] = size, time, True
    return max(ranks.times, default=0.0)
