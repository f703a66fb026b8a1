"""Inspection: statistics, paths, snapshots."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from zcactor.api import inspection

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


@zc.actor
class Sum:
    """An actor that sums arrays."""

    def total(self, array: Any) -> float:
        return float(array.sum())

    def pid(self) -> int:
        return os.getpid()

    async def self_path(self) -> Any:
        return await zc.explain(zc.current_actor().handle)


sums: Any = Sum
"""The class without static types, which know decorated methods only."""


@pytest.fixture
async def node() -> AsyncIterator[zc.Runtime]:
    async with asyncio.timeout(4 * PATIENCE), zc.init(num_cpus=3, num_gpus=0, resources={"tape": 1.5}) as node:
        yield node


@pytest.mark.slow
async def test_snapshots(node: zc.Runtime) -> None:
    assert await zc.actors() == []
    (info,) = await zc.nodes()
    assert info.node_id == node.node_id
    assert info.host == socket.gethostname()
    assert info.alive
    assert (info.workers, info.resources) == (0, {"CPU": 3, "tape": 1.5})
    actor = await sums.options(name="adder", num_cpus=2, resources={"tape": 1}).spawn()
    (found,) = await zc.actors()
    assert found == zc.ActorInfo(
        actor_id=found.actor_id, class_name="Sum", name="adder", namespace="default", state="alive",
        node_id=node.node_id, pid=await actor.pid(), restarts=0, cause="",
    )  # fmt: skip
    assert await zc.cluster_resources() == {"CPU": 3, "tape": 1.5}
    assert await zc.available_resources() == {"CPU": 1, "tape": 0.5}
    assert (await zc.nodes())[0].workers == 1
    await zc.stop(actor)
    (found,) = await zc.actors()
    assert (found.state, found.cause) == ("dead", "it was stopped by zc.stop")
    with pytest.raises(AttributeError):
        found.state = "alive"  # type: ignore[misc]


@pytest.mark.slow
async def test_statistics(node: zc.Runtime) -> None:
    actor = await sums.spawn()
    before = zc.stats()
    born = zc.ones(1 << 17)
    assert await actor.total(born) == 1 << 17
    after = zc.stats()
    assert after.calls - before.calls >= 1
    assert after.frames_sent > before.frames_sent
    assert after.bytes_copied == before.bytes_copied, "it was born in the store"
    assert after.store_used >= 1 << 20
    assert after.store_capacity == before.store_capacity
    theirs = await zc.stats(actor)
    assert theirs.bytes_mapped >= 1 << 20
    assert (theirs.bytes_read, theirs.bytes_received, theirs.registrations) == (0, 0, 0)
    assert theirs.connections >= 2
    mine = np.frombuffer(bytearray(1 << 20), np.uint8)  # not in the store
    await actor.total(mine)
    (copies,) = zc.stats().copies.values()
    assert (copies.count, copies.nbytes) == (1, 1 << 20)
    assert zc.stats().bytes_copied - after.bytes_copied == 1 << 20


@pytest.mark.slow
async def test_paths(node: zc.Runtime) -> None:
    actor = await sums.spawn()
    path = await zc.explain(actor)
    assert path.transport == "local"
    assert "same host" in path.reason
    assert set(path.rejected) == {"verbs", "tcp"}
    assert 0 < path.rtt < PATIENCE
    assert path.eager_limit == node.config.eager_limit
    assert (path.sealed, path.integrity) == (False, "mapped")
    mine = await actor.self_path()
    assert mine.transport == "loopback"
    assert set(mine.rejected) == {"local", "verbs", "tcp"}
    assert (mine.sealed, mine.integrity) == (False, "mapped")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, (True, "arrays")),
        ({"ZCACTOR_SECURITY": "frames"}, (True, "frames")),
        ({"ZCACTOR_SECURITY": "off"}, (False, "none")),
    ],
    ids=["by default", "frames", "not sealed"],
)
async def test_how_arrays_are_protected_between_hosts(
    settings: dict[str, str], told: tuple[bool, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    async with asyncio.timeout(4 * PATIENCE), zc.init(transports=("tcp",), log_to_driver=False):
        actor = await sums.spawn()
        path = await zc.explain(actor)
        assert (path.transport, path.sealed, path.integrity) == ("tcp", *told)
        assert ("authenticated" in path.reason) is (told[1] == "arrays")
        assert await actor.total(np.ones(100_000)) == 100_000
        theirs = await zc.stats(actor)
        assert theirs.bytes_received >= 800_000
        assert theirs.bytes_authenticated == (theirs.bytes_received if told[1] == "arrays" else 0)


@pytest.mark.slow
async def test_what_is_no_handle_and_what_is_dead(node: zc.Runtime) -> None:
    for ask in (zc.stats, zc.explain):
        with pytest.raises(TypeError, match="takes a handle, not str"):
            await ask("actor")
    actor = await sums.spawn()
    await zc.kill(actor)
    for ask in (zc.stats, zc.explain):
        with pytest.raises(zc.NoSuchActor, match=r"zc\.kill"):
            await ask(actor)


async def test_without_a_runtime() -> None:
    for ask in (zc.nodes, zc.actors, zc.cluster_resources, zc.available_resources):
        with pytest.raises(zc.NotInitialized):
            await ask()
    with pytest.raises(zc.NotInitialized):
        zc.stats()


@pytest.mark.slow
async def test_statistics_of_a_process_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Blocked:
        async def hold(self, began: str, path: str) -> None:
            Path(began).write_text("")
            Path(path).read_text()

    monkeypatch.setattr(inspection, "STATS_TIMEOUT", 0.1)
    async with asyncio.timeout(PATIENCE), zc.init():
        actor: Any = await zc.spawn(Blocked)
        began, go = tmp_path / "began", tmp_path / "go"
        os.mkfifo(began)
        os.mkfifo(go)
        held = actor.hold(str(began), str(go))
        await asyncio.to_thread(began.read_text)
        with pytest.raises(
            zc.DeadlineExceeded, match=r"the process of Blocked\(.*\) has not told .* within 0.1 s: one"
        ):
            await zc.stats(actor)
        go.write_text("")
        await held
        monkeypatch.setattr(inspection, "STATS_TIMEOUT", PATIENCE)
        assert (await zc.stats(actor)).calls >= 0
