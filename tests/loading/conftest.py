"""A runtime for the tests of each module, with a store that is empty after each test."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest_asyncio

import zcactor as zc
from tests.loading.samples import CAPACITY


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(store_capacity=CAPACITY, log_to_driver=False) as node:
        yield node


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _empty_store(node: zc.Runtime) -> AsyncIterator[None]:
    """After a test wait until the store is empty, also after an error, and check that nothing was copied."""
    yield
    async with asyncio.timeout(20):
        while zc.stats().store_used:
            gc.collect()
            await asyncio.sleep(0)
    assert zc.stats().bytes_copied == 0
