"""Calls to system actors: answers, and errors of zcactor's own as they are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

import zcactor as zc
from tests.runtime.test_process import PATIENCE
from zcactor.runtime.head import AGENT_INDEX
from zcactor.runtime.system import system_interface


@pytest.fixture
async def node() -> AsyncIterator[zc.Node]:
    async with asyncio.timeout(PATIENCE), zc.init() as made:
        yield made


async def test_the_system_actor_answers(node: zc.Node) -> None:
    process = node.process
    session = await process.connections.connect(process.process)
    assert await process.requests.ask(session, "ping") == os.getpid()


async def test_errors_come_out_as_they_are_where_they_are_zcactors(node: zc.Node) -> None:
    process = node.process
    session = await process.connections.connect(process.process)
    with pytest.raises(zc.RemoteError):
        await process.requests.ask(session, "fetch", 7)
    with pytest.raises(zc.ObjectLost) as lost:
        await process.requests.ask_of(session, 0, system_interface(), "fetch", (7,))
    assert not isinstance(lost.value, zc.RemoteError)
    with pytest.raises(zc.ZcactorError):  # a worker or a driver has no agent
        await process.requests.ask_of(session, AGENT_INDEX, system_interface(), "ping", ())
