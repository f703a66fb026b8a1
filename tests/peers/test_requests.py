"""Calls of services: answers, and zcactor's own errors, which arrive unchanged."""

from __future__ import annotations

import os

import pytest

import zcactor as zc
from zcactor.objects.promises import Promises
from zcactor.process.cluster import HeadService, WorkerService
from zcactor.rpc.services import Services


@pytest.fixture
def node(zc_runtime: zc.Runtime) -> zc.Runtime:
    return zc_runtime


async def test_services_answer(node: zc.Runtime) -> None:
    process = node.process
    session = await process.connections.connect(process.process)
    assert await process.requests.ask(session, Services.ping) == os.getpid()


async def test_errors_come_out_as_they_are_where_they_are_zcactors(node: zc.Runtime) -> None:
    process = node.process
    session = await process.connections.connect(process.process)
    with pytest.raises(zc.RemoteError):
        await process.requests.ask(session, Promises.fetch, 7)
    with pytest.raises(zc.ObjectLost) as lost:
        await process.requests.ask_of(session, Promises.fetch, 7)
    assert not isinstance(lost.value, zc.RemoteError)


async def test_a_service_that_the_peer_does_not_have(node: zc.Runtime) -> None:
    """Another role, or another version: the error says so, and the connection goes on."""
    process = node.process
    session = await process.connections.connect(process.process)
    for method in (HeadService.leader, WorkerService.leave):
        with pytest.raises(zc.ProtocolError, match=f"pid {os.getpid()} answers no service method"):
            await process.requests.ask_of(session, method, *(() if method is HeadService.leader else (0.0,)))
    assert await process.requests.ask(session, Services.ping) == os.getpid()
