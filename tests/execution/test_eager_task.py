"""A coroutine that is started at once behaves as in a task, whether or not it becomes one."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import weakref
from collections.abc import Callable, Coroutine
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


class Scene:
    """A coroutine that is cancelled in its first wait, and a log of its end and those of the awaited ones.

    Args:
        eager: whether the coroutine is started eagerly; otherwise a task of asyncio runs it.
    """

    def __init__(self, eager: bool) -> None:
        self.eager = eager
        self.log: list[str] = []
        self.again = asyncio.Event()
        """Set when the coroutine is to be cancelled once more."""
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda _, context: self.log.append(f"loop: {context['message']}"))

    async def part(self, name: str, outcome: BaseException | None = None) -> str:
        """Wait for ever. A cancellation ends the wait two turns later: by itself, or by `outcome`."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.log.append(f"{name} ends")
            if outcome is not None:
                raise outcome from None
            raise
        return name

    async def stubborn(self, name: str) -> str:
        """Return at the first cancellation."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        self.log.append(f"{name} goes on")
        return name

    async def twice(self, name: str) -> None:
        """End at the second cancellation."""
        await self.stubborn(name)
        self.again.set()
        await self.part(name)

    async def whole(self, waiting: asyncio.Future[Any]) -> None:
        try:
            self.log.append(f"result {await waiting!r}")
            await asyncio.sleep(0)
        except BaseException as error:
            self.log.append(f"whole ends by {error!r}")
            raise

    async def play(self, waiting: asyncio.Future[Any]) -> list[str]:
        """Cancel the coroutine while it waits for `waiting`, and return the log."""
        await asyncio.sleep(0)  # the coroutines behind `waiting` have begun
        coroutine = self.whole(waiting)
        if self.eager:
            task = suspended(coroutine)
        else:
            task = asyncio.create_task(coroutine)
            await asyncio.sleep(0)
        task.cancel("once")
        del waiting
        again = asyncio.ensure_future(self.again.wait())
        if again in (await asyncio.wait([task, again], return_when=asyncio.FIRST_COMPLETED))[0]:
            task.cancel("again")
            await asyncio.wait([task])
        again.cancel()
        self.log.append("cancelled" if task.cancelled() else f"ended by {task.exception()!r}")
        gc.collect()  # a future whose exception nobody has retrieved tells the loop
        return self.log


class Unwilling(asyncio.Future[Any]):
    """A future that refuses to be cancelled, and is done soon after so many tries."""

    def __init__(self, scene: Scene, outcome: Any, tries: int = 1) -> None:
        super().__init__()
        self._scene = scene
        self._outcome = outcome
        self._tries = tries

    def cancel(self, msg: Any | None = None) -> bool:
        self._tries -= 1
        if self._tries:
            self._scene.again.set()
        elif isinstance(self._outcome, Exception):
            self._scene.loop.call_soon(self.set_exception, self._outcome)
        else:
            self._scene.loop.call_soon(self.set_result, self._outcome)
        return False


async def parts_of_a_gathering(scene: Scene) -> list[str]:
    return await scene.play(asyncio.gather(scene.part("part 1"), scene.part("part 2")))


async def one_that_ends_by_an_error(scene: Scene) -> list[str]:
    return await scene.play(asyncio.ensure_future(scene.part("part", ValueError("mine"))))


async def one_that_goes_on(scene: Scene) -> list[str]:
    return await scene.play(asyncio.ensure_future(scene.stubborn("part")))


async def two_cancellations(scene: Scene) -> list[str]:
    return await scene.play(asyncio.gather(scene.twice("part 1"), scene.part("part 2")))


async def a_shield(scene: Scene) -> list[str]:
    inner = asyncio.ensure_future(scene.part("part"))
    log = list(await scene.play(asyncio.shield(inner)))
    inner.cancel()
    await asyncio.wait([inner])
    return log


async def one_that_refuses(scene: Scene) -> list[str]:
    return await scene.play(Unwilling(scene, "late"))


async def one_that_refuses_and_fails(scene: Scene) -> list[str]:
    return await scene.play(Unwilling(scene, ValueError("late")))


async def one_that_refuses_twice(scene: Scene) -> list[str]:
    return await scene.play(Unwilling(scene, "late", tries=2))


@pytest.mark.parametrize(
    "scenario",
    [
        parts_of_a_gathering, one_that_ends_by_an_error, one_that_goes_on, two_cancellations, a_shield,
        one_that_refuses, one_that_refuses_and_fails, one_that_refuses_twice,
    ],
)  # fmt: skip
async def test_a_cancellation_waits_for_the_awaited_one_as_in_a_task(
    scenario: Callable[[Scene], Coroutine[Any, Any, list[str]]],
) -> None:
    plain = await scenario(Scene(eager=False))
    assert await scenario(Scene(eager=True)) == plain
    assert not [line for line in plain if line.startswith("loop: ")]


@pytest.mark.parametrize("error", [None, ValueError("early")])
async def test_a_cancellation_after_the_awaited_one_is_done(error: ValueError | None) -> None:
    scene = Scene(eager=True)
    future: asyncio.Future[Any] = scene.loop.create_future()
    task = suspended(scene.whole(future))
    if error is None:
        future.set_result("early")
    else:
        future.set_exception(error)
    task.cancel()
    del future
    await asyncio.wait([task])
    gc.collect()
    assert task.cancelled()
    assert scene.log == ["whole ends by CancelledError()"]


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
