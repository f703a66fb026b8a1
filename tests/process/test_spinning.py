"""A loop that stays awake for a while, and sleeps afterwards."""

from __future__ import annotations

import asyncio

import pytest

from zcactor.process.spinning import Spinner


async def test_it_spins_until_the_time_is_over_and_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("zcactor.process.spinning.time.perf_counter", lambda: now)
    spinner = Spinner(asyncio.get_running_loop(), 1.0)
    spinner.touch()
    for _ in range(20):
        await asyncio.sleep(0)
        assert spinner._spins
    spinner.touch()
    now = 1.0
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not spinner._spins
    spinner.touch()
    spinner.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not spinner._spins
