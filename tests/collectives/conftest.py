"""The groups of the tests of collectives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import SIZE, ranks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(node: zc.Runtime) -> AsyncIterator[tuple[zc.Group, list[Any]]]:
    """A group of three ranks of a module's tests, in its runtime."""
    async with ranks(SIZE) as made:
        yield made
