"""Fabrics and engines that the tests of RDMA share."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.conformance.connection import Side
from tests.transport.verbs.entitlements import entitlements
from tests.transport.verbs.parts import SLOT, engine_on
from tests.transport.verbs.sides import fake_sides
from zcactor.transport.verbs import adapter
from zcactor.transport.verbs.engine import Engine
from zcactor.transport.verbs.fake import FakeFabric
from zcactor.transport.verbs.sysfs import gid_table

__all__ = ["entitlements"]


@pytest.fixture(autouse=True, scope="session")
def _table_of_addresses() -> Iterator[None]:
    """A guest's device keeps the addresses it has, and to read the 1,024 entries for each test takes long there."""
    with pytest.MonkeyPatch.context() as patch:
        if "VM_HOST" in os.environ:
            patch.setattr(adapter, "gid_table", functools.cache(gid_table))
        yield


@pytest.fixture
def fabric() -> FakeFabric:
    """Without adapters."""
    return FakeFabric()


@pytest.fixture
def sides(fabric: FakeFabric) -> Iterator[tuple[Side, Side]]:
    """Two hosts with an adapter each."""
    with fake_sides(fabric) as sides:
        yield sides


@pytest.fixture
async def engines(fabric: FakeFabric) -> AsyncIterator[tuple[Engine, Engine]]:
    """Two, each on an adapter of its own."""
    with engine_on(fabric, "a", SLOT) as left, engine_on(fabric, "b", SLOT) as right:
        yield left, right
