"""The actors of the tests of graphs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

import zcactor as zc
from tests.graphs.parts import Node


@pytest_asyncio.fixture(loop_scope="module")
async def two(node: zc.Runtime) -> AsyncIterator[list[Any]]:
    """Two actors of a test, in the module's runtime."""
    actors = [await Node.spawn() for _ in range(2)]
    yield actors
    for actor in actors:
        await zc.kill(actor)
