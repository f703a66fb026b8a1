"""A coroutine that is started at once behaves as in a task, whether or not it becomes one."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from zcactor.execution.eager_task import _EagerTask, _rest, start_eagerly

variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def start(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    return start_eagerly(coroutine, asyncio.get_running_loop(), contextvars.copy_context())


def suspended(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """The task of a coroutine that does not end in its first step."""
    task = start(coroutine)
    assert task is not None
    return task


async def outside() -> list[Any]:
    """Run a coroutine from a callback of the loop, as calls in frames start: there is no current task there."""
    seen: list[Any] = []
    done = asyncio.get_running_loop().create_future()

    async def work() -> None:
        seen.append(asyncio.current_task())

    def callback() -> None:
        seen.append(start(work()))
        seen.append(asyncio.current_task())
        done.set_result(None)

    asyncio.get_running_loop().call_soon(callback)
    await done
    return seen


async def test_ends_without_a_task() -> None:
    inside, task, after = await outside()
    assert isinstance(inside, asyncio.Task)
    assert task is None
    assert after is None


async def test_gives_the_current_task_back() -> None:
    own = asyncio.current_task()
    seen: list[Any] = []

    async def work() -> None:
        seen.append(asyncio.current_task())

    assert start(work()) is None
    assert asyncio.current_task() is own
    assert seen[0] is not own


async def test_goes_on_as_the_task_it_began_as() -> None:
    gate = asyncio.Event()
    seen: list[Any] = []

    async def work() -> None:
        seen.append(asyncio.current_task())
        await gate.wait()
        seen.append(asyncio.current_task())

    task = suspended(work())
    assert not task.done()
    gate.set()
    await task
    assert seen == [task, task]


async def test_a_future_that_is_done_before_the_task_takes_its_step() -> None:
    future = asyncio.get_running_loop().create_future()
    seen: list[Any] = []

    async def work() -> None:
        seen.append(await future)
        await asyncio.sleep(0)
        seen.append("end")

    task = suspended(work())
    future.set_result("value")
    await task
    assert seen == ["value", "end"]


async def test_several_begin_to_await_one_future() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    seen: list[int] = []

    async def work(number: int) -> None:
        seen.append(number + await future)

    tasks = [suspended(work(number)) for number in range(3)]
    tasks.append(asyncio.create_task(work(3)))
    await asyncio.sleep(0)
    tasks.append(suspended(work(4)))
    future.set_result(10)
    await asyncio.gather(*tasks)
    assert sorted(seen) == [10, 11, 12, 13, 14]


async def test_timeout_over_the_first_suspension() -> None:
    caught: list[BaseException] = []

    async def work() -> None:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError as error:
            caught.append(error)

    await suspended(work())
    assert len(caught) == 1


async def test_task_group_over_the_first_suspension() -> None:
    seen: list[int] = []

    async def child(number: int) -> None:
        await asyncio.sleep(0)
        seen.append(number)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(child(1))
            group.create_task(child(2))
        seen.append(3)

    await suspended(work())
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_cancelling(turns: int) -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    task = suspended(work())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled", "cleaned up"]
    assert task.cancelled()


async def test_cancelling_that_is_caught() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("caught")

    task = suspended(work())
    task.cancel()
    await task
    assert seen == ["caught"]


async def test_context_is_one_from_first_step_to_last() -> None:
    seen: list[int] = []

    async def work() -> None:
        variable.set(7)
        await asyncio.sleep(0)
        seen.append(variable.get())

    await suspended(work())
    assert seen == [7]
    assert variable.get() == 0


async def test_nested() -> None:
    seen: list[Any] = []

    async def inner() -> None:
        seen.append(asyncio.current_task())

    async def outer() -> None:
        before = asyncio.current_task()
        start(inner())
        assert asyncio.current_task() is before
        seen.append(before)

    assert start(outer()) is None
    assert seen[0] is not seen[1]


async def test_the_result_that_a_task_waited_for_is_its_coroutines_alone() -> None:
    class Value:
        pass

    async def work(waiting: asyncio.Future[Any]) -> None:
        await waiting

    waiting, value = asyncio.get_running_loop().create_future(), Value()
    task = suspended(work(waiting))
    waiting.set_result(value)
    seen = weakref.ref(value)
    del waiting, value
    await task
    assert seen() is None


async def test_a_task_is_destroyed_after_the_coroutine_that_it_runs() -> None:
    async def waits() -> None:
        await asyncio.get_running_loop().create_future()

    coroutine = waits()
    coroutine.send(None)
    task = _EagerTask.__new__(_EagerTask)
    rest = _rest(coroutine, task)
    rest.send(None)
    coroutine.close()  # a garbage collection closes them in any order
    rest.close()
