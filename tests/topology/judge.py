"""The time of an allreduce by SimGrid, which follows every flow through every link (Casanova et al., "Versatile,
Scalable, and Accurate Simulation of Distributed Applications and Platforms", JPDC 2014).

A program of its own, for the interpreter that has the module ``simgrid`` (Debian's). It reads JSON from its input and
writes the seconds to its output. The network comes as arcs and each flow with its paths: SimGrid knows one route
between two hosts, so each host stands here once for each number of a path. A rank READs: it starts a step when it has
finished the one before, and when the ranks that it reads from have.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import simgrid

RAW = (
    "network/model:CM02", "network/latency-factor:1", "network/bandwidth-factor:1", "network/weight-S:0",
    "network/TCP-gamma:0", "network/crosstraffic:0",
)  # fmt: skip
"""Links as they are given. SimGrid's default model multiplies latencies by 13.01 and bandwidths by 0.97, as it found
TCP over Ethernet to behave."""


def simulate(told: dict[str, Any]) -> float:
    """The seconds until the last rank is done.

    Args:
        told: ``ranks``, ``arcs`` (each with bytes/s and seconds), ``steps`` (each a list of flows: giver, taker, bytes
            and lists of arcs), and ``model``: ``"raw"`` or ``"default"``.
    """
    settings = [f"--cfg={setting}" for setting in RAW] if told["model"] == "raw" else []
    engine = simgrid.Engine(["judge", "--log=root.thresh:critical", *settings])
    zone = simgrid.NetZone.create_full_zone("network")
    links = []
    for number, (bandwidth, latency) in enumerate(told["arcs"]):
        links.append(zone.create_link(f"arc {number}", bandwidth).set_latency(latency).seal())
    hosts: dict[tuple[int, int], Any] = {}
    routes: set[tuple[int, int, int]] = set()

    def host(rank: int, path: int) -> Any:
        if (rank, path) not in hosts:
            hosts[rank, path] = zone.create_host(f"rank {rank} path {path}", 1e9)
        return hosts[rank, path]

    steps: list[list[list[tuple[int, float, list[Any]]]]] = []  # by step and rank: its reads
    ends: list[list[set[int]]] = []  # by step and rank: its readers
    for flows in told["steps"]:
        reads: list[list[Any]] = [[] for _ in range(told["ranks"])]
        readers: list[set[int]] = [set() for _ in range(told["ranks"])]
        for giver, taker, nbytes, paths in flows:
            reads[taker].append((giver, nbytes / len(paths), list(range(len(paths)))))
            readers[giver].add(taker)
            for number, arcs in enumerate(paths):
                one, other = host(giver, number), host(taker, number)
                if (giver, taker, number) not in routes:
                    routes.add((giver, taker, number))
                    way = [simgrid.LinkInRoute(links[arc]) for arc in arcs]
                    zone.add_route(one.get_netpoint(), other.get_netpoint(), None, None, way, False)
        steps.append(reads)
        ends.append(readers)
    for rank in range(told["ranks"]):
        host(rank, 0)
    zone.seal()
    ready: dict[tuple[int, int], Any] = {}

    def semaphore(giver: int, taker: int) -> Any:
        if (giver, taker) not in ready:
            ready[giver, taker] = simgrid.Semaphore(0)
        return ready[giver, taker]

    def run(rank: int) -> None:
        for number, reads in enumerate(steps):
            for taker in sorted(ends[number][rank]):
                semaphore(rank, taker).release()
            for giver, _, _ in reads[rank]:
                semaphore(giver, rank).acquire()
            comms = [
                simgrid.Comm.sendto_async(hosts[giver, path], hosts[rank, path], round(nbytes))
                for giver, nbytes, paths in reads[rank]
                for path in paths
            ]
            for comm in comms:
                comm.wait()

    for rank in range(told["ranks"]):
        simgrid.Actor.create(f"rank {rank}", hosts[rank, 0], run, rank)
    engine.run()
    return float(engine.clock)


if __name__ == "__main__":
    print(json.dumps(simulate(json.load(sys.stdin))))
