"""Calls to system actors: answers, and zcactor's own errors, which arrive unchanged."""

from __future__ import annotations

import os

import pytest

import zcactor as zc
from zcactor.assembly.system import system_interface
from zcactor.peers.head_link import AGENT_INDEX


@pytest.fixture
def node(zc_runtime: zc.Runtime) -> zc.Runtime:
    return zc_runtime


async def test_the_system_actor_answers(node: zc.Runtime) -> None:
    process = node.process
    session = await process.connections.connect(process.process)
    assert await process.requests.ask(session, "ping") == os.getpid()


async def test_errors_come_out_as_they_are_where_they_are_zcactors(node: zc.Runtime) -> None:
    process = node.process
    session = await process.connections.connect(process.process)
    with pytest.raises(zc.RemoteError):
        await process.requests.ask(session, "fetch", 7)
    with pytest.raises(zc.ObjectLost) as lost:
        await process.requests.ask_of(session, 0, system_interface(), "fetch", (7,))
    assert not isinstance(lost.value, zc.RemoteError)
    with pytest.raises(zc.ZcactorError):  # a worker or a driver has no agent
        await process.requests.ask_of(session, AGENT_INDEX, system_interface(), "ping", ())
