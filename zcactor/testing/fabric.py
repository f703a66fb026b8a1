"""Fake RDMA fabrics for tests, and the resources of theirs that a test has left."""

from __future__ import annotations

import random

from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.driver.fake_nic import INLINE_LIMITS

__all__ = ["make_fabric", "resources_left"]


def make_fabric(adapters: int, seed: int) -> FakeFabric:
    """Make a fabric, whose adapters take as much inline data as `seed` draws. See the fixture `zc_rdma`.

    Raises:
        TypeError: `adapters` is no int.
        ValueError: `adapters` is less than 1.
    """
    if type(adapters) is not int:
        raise TypeError(f"zc_rdma: adapters is a number of adapters, such as 2, not {adapters!r}")
    if adapters < 1:
        raise ValueError(f"zc_rdma: adapters is {adapters}, at least 1 is possible")
    fabric = FakeFabric(seed=seed)
    draw = random.Random(seed)
    for number in range(adapters):
        fabric.add_nic(f"fake{number}", max_inline=draw.choice(INLINE_LIMITS))
    return fabric


def resources_left(fabric: FakeFabric) -> list[str]:
    """The devices that are open, and the memory registered with them, a line for each."""
    found = []
    for adapter in fabric.devices:
        for device in adapter.devices:
            found.append(f"device {adapter.name}, which is open")
            found += [
                f"a memory region of {region.nbytes:,} bytes registered with device {adapter.name}"
                for region in device.regions.values()
            ]
    return found
