"""Fabrics and engines that the tests of RDMA share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.transport.verbs.parts import SLOT, engine_on
from zcactor.transport.verbs.engine import Engine
from zcactor.transport.verbs.fake import FakeFabric


@pytest.fixture
def fabric() -> FakeFabric:
    """Without adapters."""
    return FakeFabric()


@pytest.fixture
async def engines(fabric: FakeFabric) -> AsyncIterator[tuple[Engine, Engine]]:
    """Two, each on an adapter of its own."""
    with engine_on(fabric, "a", SLOT) as left, engine_on(fabric, "b", SLOT) as right:
        yield left, right
