"""The end of a program's runtime, also where its agent is late or gone."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import zcactor as zc
from tests.driver.programs import alive
from tests.driver.test_driver import PATIENCE, Talker, spawn
from zcactor.config import Config
from zcactor.driver.runtimes import EmbeddedRuntime


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
