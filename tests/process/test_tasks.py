"""Background tasks: kept until they end, started from any thread, and logged when they fail."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from zcactor.process.tasks import Tasks, all_of


@pytest.mark.slow
async def test_a_task_that_nobody_keeps_runs_to_its_end() -> None:
    tasks, done = Tasks(asyncio.get_running_loop()), asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0)
        done.set()

    await asyncio.to_thread(lambda: tasks.start(work()))  # started from another thread
    await asyncio.wait_for(done.wait(), 20)
    await tasks.settled(20)
    assert not tasks._tasks


async def test_a_failure_is_logged_unless_the_process_ends(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks(asyncio.get_running_loop())

    async def fail() -> None:
        raise ValueError("on purpose")

    with caplog.at_level(logging.ERROR):
        tasks.start(fail())
        await tasks.settled(20)
        assert [record.message for record in caplog.records] == ["a background task failed"]
        tasks.closing = True
        with pytest.raises(ValueError, match="on purpose"):
            await tasks.begin(fail())
        assert len(caplog.records) == 1


async def test_all_are_cancelled_and_waited_for() -> None:
    tasks, ended = Tasks(asyncio.get_running_loop()), []

    async def for_ever() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(1)

    for _ in range(3):
        tasks.start(for_ever())
    await asyncio.sleep(0)
    tasks.cancel()
    await tasks.settled(20)
    assert len(ended) == 3


async def test_what_is_asked_on_another_loop_runs_on_ours() -> None:
    loop = asyncio.get_running_loop()
    tasks = Tasks(loop)

    async def which() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert await asyncio.to_thread(lambda: asyncio.run(tasks.elsewhere(which()))) is loop


async def test_all_have_ended_when_the_first_error_is_raised() -> None:
    ended: list[int] = []

    async def step(number: int, error: Exception | None = None) -> int:
        for _ in range(number):
            await asyncio.sleep(0)
        ended.append(number)
        if error is not None:
            raise error
        return number

    assert await all_of([step(2), step(1)]) == [2, 1]
    with pytest.raises(KeyError):
        await all_of([step(5), step(4, KeyError("the first of the list")), step(0, ValueError("the first in time"))])
    assert sorted(ended) == [0, 1, 2, 4, 5]
