"""The objects behind regions in frames: leases that go back, and objects of the process itself."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from zcactor.api.future import ObjectRef
from zcactor.api.remote_actor import RemoteActor
from zcactor.errors import ConnectionLost, ObjectLost
from zcactor.ids import new_actor
from zcactor.objects.resolver import _coming
from zcactor.transport.local.endpoint import LocalConnection

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
spawn: Any = zc.spawn
"""`zc.spawn` without static types, which know decorated methods only."""


@pytest.fixture
async def node() -> AsyncIterator[zc.Runtime]:
    async with asyncio.timeout(4 * PATIENCE), zc.init(num_cpus=4) as node:
        yield node


async def _settled(measure: Any, expected: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while measure() != expected:
            gc.collect()
            await asyncio.sleep(0.005)


async def _call(actor: RemoteActor, method: str, *args: Any) -> Any:
    return await ObjectRef(actor.call(actor.interface.by_name[method], args, {}, None, 0))


class Keeper:
    """An actor that returns its argument."""

    def same(self, value: Any) -> Any:
        return value

    def handed_on(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return zc.move(array)


class Maker(Keeper):
    """An actor that makes arrays and keeps none."""

    def made(self, count: int) -> np.ndarray[Any, Any]:
        return np.full(count, 5.0)

    def moved(self, count: int) -> np.ndarray[Any, Any]:
        return zc.move(np.full(count, 5.0))

    def used(self) -> tuple[int, int]:
        gc.collect()
        stats = zc.stats()
        return stats.leases, stats.store_used


@pytest.mark.slow
async def test_a_lease_goes_back_where_write_access_cannot_be_had(
    node: zc.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = await spawn(Maker)
    assert (await maker.made(10)).sum() == 50
    before = await maker.used()

    async def refuse(_: object) -> None:
        raise OSError(24, "no descriptor is left")

    with monkeypatch.context() as patch:
        patch.setattr(LocalConnection, "open_writable", refuse)
        for _ in range(3):
            with pytest.raises(zc.ObjectLost, match="no descriptor"):
                await maker.moved(1 << 17)
    async with asyncio.timeout(PATIENCE):
        while await maker.used() != before:
            await asyncio.sleep(0)
    moved = await maker.moved(1 << 17)
    moved[0] = 6
    assert moved[0] == 6


@pytest.mark.slow
@pytest.mark.parametrize("refused", ["map", "open_writable"])
async def test_a_lease_goes_back_where_a_third_processes_object_cannot_be_reached(
    node: zc.Runtime, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    maker, other = await spawn(Maker), await spawn(Keeper)
    before = await maker.used()
    made = maker.made(1 << 17)
    while not made.done():
        await asyncio.sleep(0)

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionLost("not today")

    with monkeypatch.context() as patch:
        patch.setattr(LocalConnection, refused, refuse)
        with pytest.raises(zc.ObjectLost, match="not today"):
            await (other.handed_on(maker.moved(1 << 17)) if refused == "open_writable" else other.same(made))
    del made
    async with asyncio.timeout(PATIENCE):
        while await maker.used() != before:
            gc.collect()
            await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["argument", "result", "reference", "promise"])
async def test_what_a_process_sends_to_itself_is_freed(node: zc.Runtime, kind: str) -> None:
    """This holds for the session of a process with itself as well: its leases end."""
    process = node.process
    host = process.hosts.add(index := process.hosts.take_index(), Local, "Local")
    host.adopt(Local())
    actor = RemoteActor(process, new_actor(), host.interface, (process.process, index), None, "default", 100, 0)
    before = process.store.stats().used
    for _ in range(8):
        if kind == "argument":
            assert await _call(actor, "total", np.full(1 << 17, 5.0)) == 5.0 * (1 << 17)
        elif kind == "result":
            assert (await _call(actor, "made", 1 << 17)).sum() == 5.0 * (1 << 17)
        elif kind == "reference":
            assert await _call(actor, "first", [zc.put(np.full(1 << 17, 5.0))]) == 5.0
        else:
            assert await _call(actor, "total", zc.put(np.full(1 << 17, 5.0))) == 5.0 * (1 << 17)
    own = [session for session in process.sessions.all() if session.peer_process == process.process]
    await _settled(lambda: [session.leases.total for session in own], [0, 0])
    await _settled(lambda: process.store.stats().used, before)


class Local:
    """An actor of the driver's own process."""

    async def total(self, array: np.ndarray[Any, Any]) -> float:
        return float(array.sum())

    async def made(self, count: int) -> np.ndarray[Any, Any]:
        return np.full(count, 5.0)

    async def first(self, refs: list[Any]) -> float:
        return float((await refs[0])[0])


def test_a_part_that_has_not_come_says_so() -> None:
    with pytest.raises(ObjectLost, match="zcactor was shut down before it had come"):
        _ = _coming(1).holder.__array_interface__
