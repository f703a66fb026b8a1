"""Fabrics and engines that the tests of RDMA share."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.conformance.connection import ARENA_NBYTES, ConnectedPair, Recorder, Side, connect, finish
from tests.transport.verbs.entitlements import entitlements
from tests.transport.verbs.parts import SLOT, engine_on
from tests.transport.verbs.sides import fake_sides
from zcactor.transport.verbs.device.engine import Engine
from zcactor.transport.verbs.driver import adapter
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.driver.sysfs import gid_table

__all__ = ["entitlements"]


@pytest.fixture(autouse=True, scope="session")
def _table_of_addresses() -> Iterator[None]:
    """In a guest read a device's table of addresses once: it stays the same; its 1,024 entries take long to read."""
    with pytest.MonkeyPatch.context() as patch:
        if "VM_HOST" in os.environ:
            patch.setattr(adapter, "gid_table", functools.cache(gid_table))
        yield


@pytest.fixture
def fabric() -> FakeFabric:
    """A fabric without adapters."""
    return FakeFabric()


@pytest.fixture
def sides(fabric: FakeFabric) -> Iterator[tuple[Side, Side]]:
    """Two hosts with an adapter each."""
    with fake_sides(fabric) as sides:
        yield sides


@pytest.fixture
async def engines(fabric: FakeFabric) -> AsyncIterator[tuple[Engine, Engine]]:
    """Two engines, each on an adapter of its own."""
    with engine_on(fabric, "a", SLOT) as left, engine_on(fabric, "b", SLOT) as right:
        yield left, right


@pytest.fixture
async def pair(fabric: FakeFabric) -> AsyncIterator[ConnectedPair]:
    with fake_sides(fabric) as sides:
        pair = await connect(*sides)
        yield pair
        await finish(pair)


@pytest.fixture
def left(pair: ConnectedPair) -> Recorder:
    recorder = Recorder()
    pair.left.start(recorder)
    return recorder


@pytest.fixture
def right(pair: ConnectedPair) -> Recorder:
    recorder = Recorder()
    pair.right.start(recorder)
    return recorder


@pytest.fixture
def source(pair: ConnectedPair) -> bytes:
    """The bytes of the right side's arena."""
    data = pair.sides[1].arena[:] = random.Random(1).randbytes(ARENA_NBYTES)
    return data
