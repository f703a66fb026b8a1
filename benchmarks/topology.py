"""Orders of ranks and predicted times: the time to find an order, its quality, and the judgement of SimGrid.

Orders are compared with 1,000 random ones by the load of links, and with the best ten of these by prediction, and the
worse of both counts.
Predictions are compared with SimGrid, where an interpreter has it: Debian's package ``python3-simgrid``.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.harness import Measurement, Scale, at_most
from tests.topology.simgrid_judge import interpreter, judged
from zcactor.topology import dragonfly, fat_tree, mesh, orders, plans, torus

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from zcactor.topology import Topology

NBYTES = 256 << 20
"""Bytes of the allreduce."""
RANDOM = 1000
"""Random orders of which the best counts."""
FOLLOWED = 10
"""Random orders that are predicted, as that takes a hundred times as long as to find the load of links."""
FOUND, TIMES_BEST, APART = 1.0, 1.1, 15.0
"""Budgets: seconds to find an order of 1,024 hosts, times the best random one, and per cent between the predictions."""


def _together(network: Topology, hosts: Sequence[Hashable]) -> float:
    """Seconds of a ring whose ranks start each step together."""
    (step,) = plans.steps("ring", len(network.hosts))
    number = {host: index for index, host in enumerate(network.hosts)}
    numbers = [number[host] for host in hosts]
    return step.times * orders.seconds(network._arcs, numbers, step.flows, step.part * NBYTES)


def _orders(scale: Scale) -> Iterator[Measurement]:
    rng = random.Random(0)
    for network in (
        torus(32, 32),
        mesh(32, 32),
        fat_tree(radix=16, levels=3),
        dragonfly(groups=32, routers=8, hosts=4),
    ):
        hosts = rng.sample(list(network.hosts), len(network.hosts))
        before = time.perf_counter()
        network.order(hosts)
        took = time.perf_counter() - before
        yield Measurement(
            "topology", f"order of 1,024 hosts, {network.label}", took, "s", budget=at_most(FOUND, "value")
        )
    for network in (torus(8, 8), fat_tree(radix=8, levels=3, blocking=2), dragonfly(groups=8, routers=4, hosts=2)):
        hosts = list(network.hosts)
        best = network.order(hosts)
        tried = [rng.sample(hosts, len(hosts)) for _ in range(scale.count(RANDOM))]
        tried.sort(key=partial(_together, network))
        together = _together(network, best), _together(network, tried[0])
        others = min(network.predict(NBYTES, hosts=hosts) for hosts in tried[:FOLLOWED])
        followed = network.predict(NBYTES, hosts=best), others
        taken, least = max(together, followed, key=lambda pair: pair[0] / pair[1])
        yield Measurement(
            "topology", f"ring in the best order, {network.label}", taken * 1e3, "ms", least * 1e3,
            "best of random orders", at_most(TIMES_BEST),
        )  # fmt: skip


def _judged() -> Iterator[Measurement]:
    for network, asked in (
        (torus(4, 4), ("ring", "halving", "direct")),
        (fat_tree(radix=4, levels=3), ("ring", "halving", "direct")),
        (torus(8, 8), ("ring", "halving")),
        (dragonfly(groups=8, routers=4, hosts=2), ("ring", "halving")),
    ):
        for plan in asked:
            predicted, found = network.predict(NBYTES, plan=plan), judged(network, NBYTES, plan)
            name = f"{plan} among {len(network.hosts)} hosts, {network.label}: apart from SimGrid"
            apart = abs(predicted / found - 1) * 100
            yield Measurement("topology", name, apart, "%", budget=at_most(APART, "value"))


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure orders, then predictions where there is a judge."""
    yield from _orders(scale)
    if interpreter() is None:
        print(
            "SimGrid is not installed: predictions are not judged (as root on Debian: apt-get install python3-simgrid)"
        )
    else:
        yield from _judged()
