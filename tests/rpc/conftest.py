"""Fixtures of the tests of sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.rpc.sessions import Pair


@pytest.fixture(params=["loopback", "local"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    pair = Pair(request.param)
    yield pair
    await pair.close()
