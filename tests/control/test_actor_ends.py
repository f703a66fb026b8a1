"""The ends of actors at a real node: kills, stops, and handles that are dropped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import zcactor as zc
from tests.control.test_head import PATIENCE, logs, state_of
from zcactor.process.cluster import HeadService
from zcactor.process.context import current


@pytest.fixture
async def node() -> AsyncIterator[zc.Runtime]:
    async with asyncio.timeout(4 * PATIENCE), zc.init(num_cpus=4) as node:
        yield node


async def _pid_of(handle: Any) -> int:
    return (await state_of(handle)).pid


@pytest.mark.slow
async def test_killing_and_stopping_beat_restarting(node: zc.Runtime, tmp_path: Path) -> None:
    actor = await logs.options(max_restarts=-1).spawn(str(tmp_path / "log"))
    await zc.kill(actor)
    with pytest.raises(zc.ActorDied, match=r"zc\.kill"):
        await actor.pid()
    await zc.kill(actor)
    await zc.stop(actor)
    other = await logs.options(max_restarts=-1).spawn(str(tmp_path / "log"))
    blocked = other.block()
    stopping = asyncio.ensure_future(current().head.ask(HeadService.stop, other._remote.actor_id))
    await asyncio.sleep(0)
    await zc.nodes()  # the agent has the request by now: it was sent earlier by the same connection
    os.kill((await _pid_of(other)), signal.SIGKILL)
    await stopping
    with pytest.raises(zc.ActorDied):
        await blocked
    info = await state_of(other)
    assert info.state == "dead"
    # Either end is seen first, that of the connection or that of the process; the cause says why no restart follows.
    assert info.cause.endswith(("it was stopped by zc.stop", " while it was being stopped")), info.cause


@pytest.mark.slow
async def test_who_stays_when_handles_are_dropped(node: zc.Runtime, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    unnamed = await logs.spawn(path)
    named = await logs.options(name="kept").spawn(path)
    detached = await logs.options(lifetime="detached").spawn(path)
    pids = [await actor.pid() for actor in (unnamed, named, detached)]
    del unnamed, named, detached
    async with asyncio.timeout(PATIENCE):
        while (infos := {info.pid: info for info in await zc.actors()})[pids[0]].state != "dead":
            await asyncio.sleep(0.005)
    assert [infos[pid].state for pid in pids] == ["dead", "alive", "alive"]
    assert "handle" in infos[pids[0]].cause
    again = await zc.get_actor("kept")
    assert await again.pid() == pids[1]


@pytest.mark.slow
async def test_calls_sent_before_the_handle_is_dropped_still_run(node: zc.Runtime, tmp_path: Path) -> None:
    actor = await logs.spawn(str(tmp_path / "log"))
    last = [actor.note(number) for number in range(50)][-1]
    del actor
    await last
    assert (tmp_path / "log").read_text().split() == [str(number) for number in range(50)]
