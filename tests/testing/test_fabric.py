"""Fake RDMA fabrics: their adapters, and the resources that a test has left."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from zcactor.testing.plugin import resources_left
from zcactor.transport.verbs.driver.fake import FakeFabric

Make = Callable[..., FakeFabric]


def test_adapters(zc_rdma: Make) -> None:
    assert [device.name for device in zc_rdma().devices] == ["fake0"]
    fabric = zc_rdma(adapters=3, seed=2)
    assert [device.name for device in fabric.devices] == ["fake0", "fake1", "fake2"]
    assert fabric.binding().devices() == ["fake0", "fake1", "fake2"]


def test_the_same_seed_draws_the_same_keys(zc_rdma: Make) -> None:
    first, again, other = (zc_rdma(seed=seed) for seed in (1, 1, 2))
    keys = [[fabric.new_key() for _ in range(20)] for fabric in (first, again, other)]
    assert keys[0] == keys[1] != keys[2]


def test_resources_are_named(zc_rdma: Make) -> None:
    fabric = zc_rdma(adapters=2)
    memory = ctypes.create_string_buffer(4096)
    device = fabric.binding().open("fake1")
    region = device.register(ctypes.addressof(memory), 4096, remote_read=True)
    assert resources_left(fabric) == [
        "device fake1, which is open",
        "a memory region of 4,096 bytes registered with device fake1",
    ]
    region.close()
    device.close()
    assert resources_left(fabric) == []


@pytest.mark.parametrize(("adapters", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_wrong_numbers_of_adapters(zc_rdma: Make, adapters: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="zc_rdma: adapters is "):
        zc_rdma(adapters=adapters)
