"""The services of each process: they serve leases, promises, statistics and pings to peers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

import zcactor as zc
from zcactor.objects.promises import Promises
from zcactor.peers.leases import Leases
from zcactor.rpc.services import Services

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


class Holder:
    def __init__(self) -> None:
        self.kept: Any = None
        self.gate = asyncio.Event()

    def make(self) -> Any:
        return zc.put(zc.ones(1 << 16))

    def keep(self, refs: list[Any]) -> None:
        self.kept = refs

    async def read(self) -> float:
        return float((await self.kept[0]).sum())

    def fail(self) -> None:
        raise ValueError("no")

    async def gated(self) -> int:
        await self.gate.wait()
        return 5

    async def open_gate(self) -> None:
        self.gate.set()

    def pid(self) -> int:
        return os.getpid()


spawn: Any = zc.spawn
"""`zc.spawn` without static types, which know decorated methods only."""


@pytest.fixture
async def node() -> AsyncIterator[zc.Runtime]:
    async with asyncio.timeout(4 * PATIENCE), zc.init() as node:
        yield node


@pytest.mark.slow
async def test_values_go_from_owner_to_reader(node: zc.Runtime) -> None:
    owner, reader = await spawn(Holder), await spawn(Holder)
    ref = await owner.make()
    await reader.keep([ref])
    del ref
    assert await reader.read() == 1 << 16
    failing = owner.fail()
    await reader.keep([failing])
    with pytest.raises(ValueError, match="no"):
        await reader.read()
    with pytest.raises(ValueError, match="no"):
        await failing


@pytest.mark.slow
async def test_a_promise_that_is_not_kept_yet(node: zc.Runtime) -> None:
    owner, reader = await spawn(Holder), await spawn(Holder)
    promise = owner.gated()
    await reader.keep([promise])
    reading = reader.read()
    with pytest.raises(AttributeError):
        await reading if reading.done() else await owner.open_gate() or await reading
    assert await promise == 5


@pytest.mark.slow
async def test_the_owner_dies_first(node: zc.Runtime) -> None:
    owner, reader = await spawn(Holder), await spawn(Holder)
    await reader.keep([await owner.make()])
    await zc.kill(owner)
    with pytest.raises(zc.ObjectLost):
        await reader.read()


async def test_an_object_nobody_knows(node: zc.Runtime) -> None:
    """A peer can ask for any id: the process refuses objects that are not its own. Requests name ids, not addresses."""
    process = node.process
    session = await process.connections.connect(process.sessions.head)
    assert await process.requests.ask(session, Leases.lease, 1 << 60) is False
    with pytest.raises(zc.ObjectLost):
        await process.requests.ask(session, Promises.fetch, 12345)
    assert await process.requests.ask(session, Services.ping) == (await zc.nodes())[0].pid
    assert await zc.nodes()


async def test_requests_that_wait_hold_up_no_others() -> None:
    """Those for outcomes wait for others, which a limit of coroutines that run at once would keep from being made."""
    async with asyncio.timeout(4 * PATIENCE), zc.init(max_concurrency_async=1, log_to_driver=False) as node:
        process = node.process
        actor = await spawn(Holder)
        promise = actor.gated()
        exported = process.promises.export(promise._call)
        session = await process.connections.connect(process.process)
        waiting = [process.requests.ask(session, Promises.fetch, exported) for _ in range(3)]
        array = zc.put(zc.ones(1 << 16))
        assert await process.requests.ask(session, Leases.lease, process.promises.export(array._call))
        assert not any(each.done() for each in waiting)
        await zc.kill(actor)
        for each in waiting:
            with pytest.raises(zc.ActorDied):
                await each
