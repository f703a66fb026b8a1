"""Results whose bytes cannot be mapped: they stay with their maker until a process wants the value."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.assembly.test_process import PATIENCE, _settled
from zcactor.api.future import ObjectRef
from zcactor.api.remote_actor import RemoteActor
from zcactor.assembly.process import Process
from zcactor.ids import new_actor
from zcactor.interface import Interface
from zcactor.objectstore.lease import RemoteLease
from zcactor.objectstore.store import Store
from zcactor.process import context
from zcactor.transport.loopback.endpoint import LoopbackEndpoint, LoopbackNetwork

NBYTES = 80_000


class Maker:
    """An actor that makes arrays, and sums arrays of others."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def made(self) -> np.ndarray[Any, Any]:
        array = self.store.empty(NBYTES // 8)
        array[:] = 1
        return array

    async def moved(self) -> Any:
        return zc.move(await self.made())

    async def total(self, array: np.ndarray[Any, Any]) -> float:
        return float(array.sum())

    async def fails(self) -> None:
        raise ValueError("x" * NBYTES)


class Three:
    """A caller and two owners of a `Maker`, none of which maps another's arena."""

    async def __aenter__(self) -> tuple[Process, list[Process], list[RemoteActor]]:
        network = LoopbackNetwork(seed=5, maps=False)
        self.made = []
        for _ in range(3):
            name = os.urandom(16)
            store = Store(32 << 20, name)
            endpoint: Any = LoopbackEndpoint(
                network, name, (store.arena.address, store.arena.nbytes, store.arena), recv_depth=64, eager_limit=4096
            )
            config = zc.Config(eager_limit=4096, recv_depth=64)
            process = Process(name, "worker", config, asyncio.get_running_loop(), store, endpoint)
            await endpoint.start(process.connections.accepted)
            self.made.append(process)
        caller, *owners = self.made
        context.set_current(caller)
        actors = []
        for owner in owners:
            index = owner.hosts.take_index()
            owner.hosts.add(index, Maker, "Maker").adopt(Maker(owner.store))
            place = (owner.process, index)
            actors.append(RemoteActor(caller, new_actor(), Interface.of(Maker), place, None, "default", 100, 0))
        return caller, owners, actors

    async def __aexit__(self, *_: object) -> None:
        context.clear_current()
        for process in self.made:
            await process.close()


def call(actor: RemoteActor, method: str, *args: Any, timeout: float | None = None) -> ObjectRef[Any]:
    return ObjectRef(actor.call(actor.interface.by_name[method], args, {}, timeout, 0))


async def known(ref: ObjectRef[Any]) -> None:
    """Return once the outcome is known."""
    while not ref.done():
        await asyncio.sleep(0)


async def test_what_is_only_passed_on_is_never_read_here() -> None:
    async with asyncio.timeout(PATIENCE), Three() as (caller, owners, (one, other)):
        ref = call(one, "made")
        await known(ref)
        assert await call(other, "total", ref) == NBYTES / 8
        assert caller.counters.bytes_received == 0
        assert owners[1].counters.bytes_received == NBYTES
        assert float((await ref).sum()) == NBYTES / 8, "it can be read afterwards all the same"
        assert caller.counters.bytes_received == NBYTES


class Gate:
    """An actor whose result is known before or after it is passed on."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def let_go(self) -> None:
        self.open.set()

    async def array(self) -> np.ndarray[Any, Any]:
        await self.open.wait()
        return np.ones(NBYTES // 8)

    def total(self, array: np.ndarray[Any, Any]) -> float:
        return float(array.sum())


@pytest.mark.slow
async def test_a_promise_that_is_passed_on_is_read_by_whoever_got_it() -> None:
    async with asyncio.timeout(PATIENCE), zc.init(transports=("tcp",)):
        one: Any = await zc.spawn(Gate)
        other: Any = await zc.spawn(Gate)
        ref = one.array()
        early = other.total(ref)
        await asyncio.sleep(0)
        await one.let_go()
        assert await early == NBYTES / 8
        await known(ref)
        assert await other.total(ref) == NBYTES / 8
        assert zc.stats().bytes_received == 0
        assert (await zc.stats(other)).bytes_received >= NBYTES


async def test_a_result_that_is_waited_for_is_read_once() -> None:
    async with asyncio.timeout(PATIENCE), Three() as (caller, _, (one, _other)):
        ref = call(one, "made")
        values = await asyncio.gather(*([ref] * 3), zc.get([ref]))
        assert [float(np.sum(value)) for value in values] == [NBYTES / 8] * 4
        assert caller.counters.bytes_received == NBYTES
        assert values[0] is values[1] is values[3][0]


async def test_what_is_known_of_a_result_that_was_not_read() -> None:
    async with asyncio.timeout(PATIENCE), Three() as (caller, _, (one, _other)):
        ref = call(one, "made", timeout=30)
        await known(ref)
        assert ref.nbytes is not None and ref.nbytes > NBYTES and "bytes" in repr(ref)
        assert [type(part.holder) for part in ref._call.parts] == [RemoteLease]
        assert ref._call.timer is None, "its time has not run out"
        assert not ref.cancel(), "it has ended"
        assert await zc.wait([ref], timeout=0) == ([ref], [])
        assert (await zc.wait([ref]))[0] == [ref]
        assert not one.unfinished
        assert float((await ref).sum()) == NBYTES / 8
        assert caller.counters.bytes_received == NBYTES


@pytest.mark.slow
async def test_dropping_it_unread_ends_the_lease_and_keeping_it_keeps_the_actor() -> None:
    async with asyncio.timeout(PATIENCE), Three() as (caller, owners, (one, _)):
        ref = call(one, "made")
        await known(ref)
        assert ref._call.target is one
        assert [s.leases.total for s in owners[0].sessions.all()] == [1]
        del ref
        gc.collect()
        await _settled(lambda: [s.leases.total for s in owners[0].sessions.all()], [0])
        assert caller.counters.bytes_received == 0


async def test_a_result_whose_owner_is_gone_is_lost() -> None:
    async with asyncio.timeout(PATIENCE), Three() as (caller, _, (one, _other)):
        ref = call(one, "made")
        await known(ref)
        for session in list(caller.sessions.all()):
            session.connection.abort()
        await _settled(lambda: len(list(caller.sessions.all())), 0)
        with pytest.raises(zc.ObjectLost, match="could not be brought here"):
            await ref


async def test_an_array_that_was_moved_here_is_writable_and_read_once() -> None:
    async with asyncio.timeout(PATIENCE), Three() as (caller, _, (one, other)):
        ref = call(one, "moved")
        array = await ref
        array[:] = 2
        assert float(array.sum()) == NBYTES / 4
        passed = call(one, "moved")
        await known(passed)
        assert await call(other, "total", passed) == NBYTES / 8
        assert caller.counters.bytes_received == NBYTES


async def test_a_failure_is_read_at_once() -> None:
    async with asyncio.timeout(PATIENCE), Three() as (caller, _, (one, _other)):
        ref = call(one, "fails")
        with pytest.raises(ValueError, match="xxx"):
            await ref
        assert caller.counters.bytes_received >= NBYTES


async def test_a_thread_with_a_loop_of_its_own_reads_it() -> None:
    async with asyncio.timeout(PATIENCE), Three() as (_, _owners, (one, _other)):
        ref = call(one, "made")
        await known(ref)

        async def total() -> float:
            return float((await ref).sum())

        assert await asyncio.to_thread(lambda: asyncio.run(total())) == NBYTES / 8
