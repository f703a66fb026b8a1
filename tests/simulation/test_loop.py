"""The loop of a simulated process, as tasks and futures use it."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import weakref
from typing import Any

from simulation.trace import Trace
from simulation.world import World

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


def run(main: Any) -> World:
    world = World(1, Trace())
    loop = world.process("h0", "a")
    loop.begin(main)
    assert not world.run(lambda: loop.main is not None and loop.main.done(), limit=100) or loop.main is not None
    assert loop.main is not None
    loop.main.result()
    return world


def test_tasks_timeouts_futures_and_executors() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert loop.is_running() and not loop.is_closed() and not loop.get_debug()
        future: asyncio.Future[int] = loop.create_future()
        loop.call_later(1.0, future.set_result, 3)
        cancelled = loop.call_later(0.5, future.set_result, 4)
        cancelled.cancel()
        assert await future == 3
        try:
            async with asyncio.timeout(2):
                await asyncio.sleep(50)
        except TimeoutError:
            pass
        else:
            raise AssertionError("no timeout")
        assert await asyncio.to_thread(lambda: 5) == 5
        assert await asyncio.gather(*(asyncio.sleep(0.1, number) for number in range(3))) == [0, 1, 2]

    assert 3.0 < run(main()).now < 3.5


def test_contexts_are_kept_apart() -> None:
    async def inner() -> str:
        variable.set("inner")
        await asyncio.sleep(0)
        return variable.get()

    async def main() -> None:
        variable.set("outer")
        assert await asyncio.create_task(inner()) == "inner"
        assert variable.get() == "outer"

    run(main())
    assert variable.get() == "none"


def test_what_a_process_begins_after_its_end_never_runs() -> None:
    async def never() -> None:
        raise AssertionError("it runs")

    world = World(1, Trace())
    loop = world.process("h0", "a")
    world.end(loop, "killed")
    coroutine = never()
    task = loop.create_task(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED, (
        "it is closed, and nobody is warned that nobody awaits it"
    )
    assert not world.run(task.done, limit=1.0)


def test_a_process_that_has_ended_keeps_nothing() -> None:
    class Kept:
        """A stand-in for the memory of a process."""

    async def main(kept: Kept) -> None:
        await asyncio.get_running_loop().create_future()
        del kept

    world = World(1, Trace())
    loop = world.process("h0", "a")
    kept = Kept()
    gone = weakref.ref(kept)
    loop.begin(main(kept))
    del kept
    world.run(lambda: loop.main is not None and not loop.ready, limit=1.0)
    assert gone() is not None
    world.end(loop, "killed")
    gc.collect()
    assert gone() is None
