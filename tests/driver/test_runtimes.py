"""The end of a program's runtime, also where its agent is late or gone."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path
from typing import TextIO

import pytest

import zcactor as zc
from tests.driver.programs import alive
from tests.driver.test_driver import PATIENCE, Talker, spawn
from zcactor.config import Config
from zcactor.driver import runtimes
from zcactor.driver.runtimes import EmbeddedRuntime


class Writer:
    """An actor whose file has its line once the actor ends in order."""

    def write(self, path: Path) -> None:
        self.file: TextIO = path.open("w")
        self.file.write("line\n")


class Blocked:
    """An actor whose loop is blocked until a file has a line."""

    async def until_written(self, path: Path) -> None:
        while not path.stat().st_size:
            select.select([], [], [], 0.005)


@pytest.mark.slow
async def test_an_idle_actor_ends_in_order_beside_one_whose_loop_is_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "_SENDING", PATIENCE)  # above the time of the end, as in an end of a second
    async with zc.init(config=Config(shutdown_timeout=PATIENCE / 2)):
        path = tmp_path / "file"
        writer = await spawn(Writer)
        await writer.write(path)
        blocked = await spawn(Blocked)
        blocked.until_written(path)
    assert path.read_text() == "line\n"


@pytest.mark.slow
async def test_an_end_that_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for turns in (1, 3, 6):
        node = await zc.init()
        await spawn(Talker)
        ending = asyncio.ensure_future(zc.shutdown())
        for _ in range(turns):
            await asyncio.sleep(0.001)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        assert isinstance(node, EmbeddedRuntime)
        assert node._agent.returncode is not None
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("shutdown_timeout", [0.0, 1.0])
async def test_an_agent_that_is_stopped_is_killed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shutdown_timeout: float
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    node = await zc.init(config=Config(shutdown_timeout=shutdown_timeout))
    assert isinstance(node, EmbeddedRuntime)
    worker = await (await spawn(Talker)).say()
    os.kill(node._agent.pid, signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE):
        await zc.shutdown()
    assert node._agent.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    async with asyncio.timeout(PATIENCE):
        while alive(worker):
            await asyncio.sleep(0)


@pytest.mark.slow
async def test_an_agent_that_responds_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing takes all the time that actors have; the agent is asked, and not killed."""
    node = await zc.init(config=Config(shutdown_timeout=0.0))
    assert isinstance(node, EmbeddedRuntime)
    killed: list[None] = []
    monkeypatch.setattr(node, "_give_up", lambda: killed.append(None))
    await spawn(Talker)
    async with asyncio.timeout(PATIENCE):
        await zc.shutdown()
    assert killed == []
    assert node._agent.returncode == 0
