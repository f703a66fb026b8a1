"""The array traffic of a Ray program moved to zcactor, on the nodes of the same Ray cluster. Both times are printed.

    pip install 'zcactor[ray]'
    python examples/ray_arrays.py                            # on a Ray cluster that runs, or on one of its own
    python examples/ray_arrays.py --size 64MiB --rounds 20

One actor makes an array and another sums it, in another bundle of the cluster. The classes are the same in both parts.
Ray copies each array into its object store, and to the other node's. In zcactor it is made in memory that the other
process maps where both are on one host, and it is read from there otherwise.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import zcactor as zc

Array = npt.NDArray[np.float64]
BUNDLES = [{"CPU": 1}, {"CPU": 1}]


class Maker:
    """An actor whose results are arrays."""

    def make(self, count: int) -> Array:
        """An array of ones."""
        return np.ones(count)


class Summer:
    """An actor whose arguments are arrays."""

    def sum(self, x: Array) -> float:
        """The sum of the array, each byte of which is read."""
        return float(x.sum())


def by_ray(count: int, rounds: int) -> list[float]:
    """The program before: the seconds of each round by Ray."""
    group = placement_group(BUNDLES, strategy="SPREAD")
    ray.get(group.ready())
    places = [PlacementGroupSchedulingStrategy(group, number) for number in range(2)]
    maker = ray.remote(Maker).options(num_cpus=1, scheduling_strategy=places[0]).remote()
    summer = ray.remote(Summer).options(num_cpus=1, scheduling_strategy=places[1]).remote()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        total = ray.get(summer.sum.remote(maker.make.remote(count)))
        seconds.append(time.perf_counter() - started)
        assert total == count
    remove_placement_group(group)
    return seconds


async def by_zcactor(count: int, rounds: int) -> list[float]:
    """The program after: the seconds of each round by zcactor, in bundles of the same size."""
    async with zc.cluster.on_ray(BUNDLES):
        first, second = await zc.nodes()
        maker: Any = await zc.actor(Maker).options(node=first.node_id).spawn()
        summer: Any = await zc.actor(Summer).options(node=second.node_id).spawn()
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            total = await summer.sum(maker.make(count))
            seconds.append(time.perf_counter() - started)
            assert total == count
        return seconds


def nbytes(text: str) -> int:
    """The number in ``64MiB`` or the like."""
    found = re.fullmatch(r"(\d+)(KiB|MiB|GiB)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 64MiB")
    return int(found[1]) << {"KiB": 10, "MiB": 20, "GiB": 30}[found[2]]


def main() -> None:
    """Measure both, and print the median round of each."""
    parser = argparse.ArgumentParser(description="The same arrays by Ray and by zcactor.")
    parser.add_argument("--size", type=nbytes, default=64 << 20, help="bytes of an array  [64MiB]")
    parser.add_argument("--rounds", type=int, default=10, help="arrays  [10]")
    parser.add_argument("--address", help="Ray's  [RAY_ADDRESS, or a Ray cluster of its own]")
    options = parser.parse_args()
    count = options.size // 8
    ray.init(address=options.address)
    before = statistics.median(by_ray(count, options.rounds))
    after = statistics.median(zc.run(by_zcactor(count, options.rounds)))
    print(f"{count * 8 / 2**20:g} MiB from actor to actor, median of {options.rounds}:")
    print(f"by Ray      {before * 1e3:8.2f} ms")
    print(f"by zcactor  {after * 1e3:8.2f} ms, {before / after:.1f} times as fast")
    ray.shutdown()


if __name__ == "__main__":
    main()
