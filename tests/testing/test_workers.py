"""Workers in this process: how they start and end, and the environment that they share."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

import zcactor as zc
from zcactor.testing.runtime import Environment, LoopbackRuntime


@zc.actor
class Restless:
    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        self.task = asyncio.create_task(self.run(), name="restless")

    async def run(self) -> None:
        await asyncio.Event().wait()


def test_environment_of_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZC_A", "before")
    monkeypatch.delenv("ZC_B", raising=False)
    environment = Environment()
    environment.enter("first", {"ZC_A": "1", "ZC_B": "1"})
    environment.enter("second", {"ZC_A": "2"})
    assert (os.environ["ZC_A"], os.environ["ZC_B"]) == ("2", "1")
    environment.leave("second")
    environment.leave("second")
    assert (os.environ["ZC_A"], os.environ["ZC_B"]) == ("1", "1")
    environment.leave("first")
    assert os.environ["ZC_A"] == "before" and "ZC_B" not in os.environ
    environment.enter("third", {"ZC_B": "3"})
    environment.restore()
    environment.restore()
    assert "ZC_B" not in os.environ


async def test_a_kill_cancels_the_tasks_of_the_process(zc_runtime: LoopbackRuntime) -> None:
    actor: Any = await Restless.spawn()
    await actor.begin()
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "restless"]
    await zc.kill(actor)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "restless"]


async def test_a_spawn_that_is_given_up(zc_runtime: LoopbackRuntime) -> None:
    for _ in range(20):
        spawning = asyncio.ensure_future(Restless.spawn())
        for _ in range(8):
            await asyncio.sleep(0)
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning


async def test_crash_names_what_is_wrong(zc_runtime: LoopbackRuntime) -> None:
    actor: Any = await Restless.spawn()
    with pytest.raises(TypeError, match="takes an actor's handle, not str"):
        zc_runtime.crash("actor")
    zc_runtime.crash(actor)
    with pytest.raises(zc.ActorDied, match="SIGKILL"):
        await actor.begin()
    with pytest.raises(zc.NoSuchActor, match="has ended"):
        zc_runtime.crash(actor)
