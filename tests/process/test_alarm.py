"""Timers that cost a loop nothing until they go off."""

from __future__ import annotations

import asyncio

import pytest

from tests.descriptors import opened
from zcactor.process import alarm
from zcactor.process.alarm import Alarm


async def rings_three_times(timer: bool) -> None:
    rang: asyncio.Queue[int] = asyncio.Queue()
    bell = Alarm(asyncio.get_running_loop(), 1e-9, lambda: rang.put_nowait(1))
    assert (bell._timer is not None) is timer
    async with asyncio.timeout(20):
        assert [await rang.get() for _ in range(3)] == [1, 1, 1]
    bell.close()
    bell.close()
    assert bell._timer is None or bell._timer.cancelled()


async def test_it_goes_off_again_and_again() -> None:
    await rings_three_times(timer=False)


async def test_the_loop_has_no_timer_and_the_descriptor_goes() -> None:
    before = opened()
    bell = Alarm(asyncio.get_running_loop(), 3600.25, lambda: None)
    assert bell._timer is None
    assert len(opened() - before) == 1
    bell.close()
    assert opened() <= before


async def test_without_a_descriptor_it_is_a_timer_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm, "_descriptor", lambda seconds: -1)
    await rings_three_times(timer=True)


async def test_a_loop_that_waits_for_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop:
        add_reader = asyncio.AbstractEventLoop.add_reader  # that of a loop which waits for no descriptors

        def __init__(self, real: asyncio.AbstractEventLoop) -> None:
            self.call_later = real.call_later

    before = opened()
    bell = Alarm(Loop(asyncio.get_running_loop()), 3600, lambda: None)  # type: ignore[arg-type]
    assert bell._timer is not None
    assert opened() <= before
    bell.close()
