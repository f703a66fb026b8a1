"""The tasks and async generators that an actor has begun: which of them end with it, and which are left."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextvars import Context, copy_context
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.execution import open_tasks as begun_module
from zcactor.execution.open_tasks import OpenTasks, is_ours, leave_to_its_task, watch_generators, watch_tasks
from zcactor.process.context import current_host
from zcactor.process.tasks import Tasks

PATIENCE = 20.0
"""Seconds that nothing here needs."""


class Actor:
    """An actor as its tasks see it: a context."""

    def __init__(self, *, shared: bool = True) -> None:
        self.open_tasks = OpenTasks(asyncio.get_running_loop(), "A(1)", shared=shared)
        self.context: Context = copy_context()
        self.context.run(current_host.set, SimpleNamespace(open_tasks=self.open_tasks))

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Make a task as the actor's code does."""
        return self.context.run(asyncio.create_task, coroutine)

    async def end(self, seconds: float = PATIENCE) -> None:
        """End what it has begun."""
        await self.open_tasks.end(seconds, lambda step: asyncio.create_task(step, context=self.context.copy()))


@pytest.fixture(autouse=True)
async def _watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(begun_module, "_watched", None)
    watch_tasks(loop)
    yield
    loop.set_task_factory(None)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def stubborn(told: asyncio.Event, enough: asyncio.Event) -> None:
    """Swallow one cancelling."""
    try:
        await enough.wait()
    except asyncio.CancelledError:
        told.set()
        await enough.wait()


async def test_tasks_of_the_actor_are_cancelled_and_those_of_others_are_not() -> None:
    actor, other = Actor(), Actor()
    own, others, nobodys = actor.begin(forever()), other.begin(forever()), asyncio.create_task(forever())
    await asyncio.sleep(0)
    await actor.end()
    assert own.cancelled() and not others.done() and not nobodys.done()
    await other.end()
    assert others.cancelled()
    nobodys.cancel()


async def test_without_waiting() -> None:
    actor = Actor()
    own = actor.begin(forever())
    await asyncio.sleep(0)
    actor.open_tasks.cancel()
    assert not own.done() and own.cancelling()
    await asyncio.wait([own])


async def test_tasks_of_the_runtime_that_begin_in_the_actors_context_go_on() -> None:
    actor = Actor()
    ours = actor.begin(Tasks(asyncio.get_running_loop()).on_loop(forever))
    await asyncio.sleep(0)
    await actor.end()
    assert not ours.done()
    ours.cancel()


async def test_where_the_process_is_its_own_tasks_of_any_factory_are_cancelled() -> None:
    actor, loop = Actor(shared=False), asyncio.get_running_loop()
    loop.set_task_factory(lambda loop, coroutine, **options: asyncio.Task(coroutine, loop=loop, **options))
    before = {task for task in asyncio.all_tasks() if not is_ours(task)}  # the test is the actor's, too
    own = actor.begin(forever())
    await asyncio.sleep(0)
    assert set(actor.open_tasks._running()) == {own, *before}
    own.cancel()


async def test_a_task_that_swallows_its_cancelling_is_left() -> None:
    actor, told, enough = Actor(), asyncio.Event(), asyncio.Event()
    left = actor.begin(stubborn(told, enough))
    await asyncio.sleep(0)
    await actor.end(0.01)
    assert told.is_set() and not left.done()
    enough.set()
    await left


async def test_tasks_that_begin_while_others_are_cancelled_are_cancelled_too() -> None:
    actor, later = Actor(), []

    async def begins() -> None:
        try:
            await forever()
        finally:
            later.append(asyncio.create_task(forever()))

    actor.begin(begins())
    await asyncio.sleep(0)
    await actor.end()
    assert [task.cancelled() for task in later] == [True]


async def test_generators_are_closed_behind_the_tasks() -> None:
    watch_generators()
    actor, ends = Actor(), []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            ends.append("generator")

    async def use(generator: AsyncGenerator[int, None]) -> None:
        try:
            await anext(generator)
            await forever()
        finally:
            ends.append("task")

    generator, finished, others = numbers(), numbers(), numbers()
    actor.begin(use(generator))
    await actor.begin(finished.aclose())
    await anext(others)
    await asyncio.sleep(0)
    await actor.end()
    assert ends == ["task", "generator"]
    assert await anext(others) == 2
    await others.aclose()


async def test_a_generator_that_raises_or_does_not_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    watch_generators()
    actor = Actor()

    async def raises() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            raise ValueError("jammed")

    async def hangs() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            await forever()

    generators = [raises(), hangs()]
    for generator in generators:
        await actor.context.run(generator.__anext__)
    await actor.end(0.01)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "A(1) raised while it was being closed" in caplog.text and "ValueError: jammed" in caplog.text
    assert all(generator.ag_frame is None for generator in generators)  # type: ignore[attr-defined]


async def _exit() -> None:
    sys.exit(3)


def _stepped(coroutine: Coroutine[Any, Any, Any]) -> BaseException:
    """The exception that the first step of a coroutine lets out."""
    with pytest.raises(SystemExit) as caught:
        coroutine.send(None)
    return caught.value


async def test_an_exit_is_left_to_a_task_of_the_users() -> None:
    tasks = Tasks(asyncio.get_running_loop())
    error = _stepped(_exit())
    assert leave_to_its_task(error)
    assert error.__traceback__ is not None and error.__traceback__.tb_frame.f_code is _exit.__code__
    assert leave_to_its_task(_stepped(tasks.on_loop(_exit))), "an awaiting method of the runtime's has let it through"


async def test_an_exit_that_comes_in_another_way_is_nobodys() -> None:
    assert not leave_to_its_task(SystemExit(3)), "without a frame of a coroutine"
    ended = _stepped(Tasks(asyncio.get_running_loop()).on_loop(sys.exit))
    assert not leave_to_its_task(ended), "a task of the runtime has ended"
