"""Tasks and async generators that an actor has begun end with it, as those of a program do with `asyncio.run`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import zcactor as zc

PATIENCE = 60.0
"""Seconds after which what does not come is given up."""
_begun: list[asyncio.Task[Any]] = []
"""Tasks of the actors of this process, for an actor beside them."""


class Log:
    """A file of words, which each process can write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, word: str) -> None:
        """Add a word."""
        with self._path.open("a") as file:
            file.write(f"{word}\n")

    def words(self) -> list[str]:
        """The words so far."""
        return self._path.read_text().splitlines()


@zc.actor
class Busy:
    """An actor that begins tasks in all ways, and leaves them."""

    def __init__(self, path: Path) -> None:
        self.log = Log(path)
        self.never = asyncio.Event()  # the loop refers to a task weakly that waits for nothing else
        self.loop: Any = None
        self.tasks: list[asyncio.Task[Any]] = []
        self.generators: list[AsyncGenerator[int, None]] = []

    async def __aenter__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.tasks.append(asyncio.create_task(self.wait("of the constructor")))

    async def begin(self) -> int:
        """Begin tasks and an async generator."""
        self.tasks.append(asyncio.create_task(self.wait("of create_task")))
        self.tasks.append(asyncio.ensure_future(self.wait("of ensure_future")))
        self.tasks.append(asyncio.create_task(self.group()))
        self.generators.append(self.generate())
        await anext(self.generators[0])
        return os.getpid()

    async def show_tasks(self) -> None:
        """Let an actor beside this one see the tasks."""
        _begun.extend(self.tasks)

    def begin_from_thread(self) -> None:
        """Begin a task from the thread of plain methods."""
        asyncio.run_coroutine_threadsafe(self.wait("of a thread"), self.loop)

    async def wait(self, word: str) -> None:
        """Wait for ever, and do something that takes a turn of the loop at the end."""
        try:
            await self.never.wait()
        finally:
            await asyncio.sleep(0)
            self.log.add(f"task {word}")

    async def group(self) -> None:
        """Begin a task in a task."""

        async def member() -> None:  # it is cancelled twice, as by `asyncio.run`: the group does that, too
            try:
                await self.never.wait()
            finally:
                self.log.add("task of a TaskGroup")

        async with asyncio.TaskGroup() as group:
            group.create_task(member())

    async def generate(self) -> AsyncGenerator[int, None]:
        """Yield for ever."""
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(0)
            self.log.add("generator")

    async def __aexit__(self, *_: object) -> None:
        self.log.add("exit")

    def __del__(self) -> None:
        self.log.add("dropped")


KINDS = ("the constructor", "create_task", "ensure_future", "a TaskGroup", "a thread")


async def _no_actor() -> None:
    while any(actor.state != "dead" for actor in await zc.actors()):
        await asyncio.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("process", ["own", "shared"])
@pytest.mark.parametrize("how", ["stop", "drop", "the end of the block"])
async def test_an_orderly_end_cancels_tasks_and_closes_generators_before_it_drops_the_actor(
    tmp_path: Path, how: str, process: Literal["own", "shared"]
) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(num_cpus=2):
        busy: Any = await Busy.options(process=process).spawn(tmp_path / "log")
        await busy.begin()
        await busy.begin_from_thread()
        if how == "stop":
            await zc.stop(busy)
        elif how == "drop":
            del busy
            await _no_actor()
    words = Log(tmp_path / "log").words()
    assert words[0] == "exit" and words[-2:] == ["generator", "dropped"]
    assert sorted(words[1:-2]) == sorted(f"task of {kind}" for kind in KINDS)


@zc.actor(process="shared")
class Beside:
    """An actor in the process of others."""

    async def pid(self) -> int:
        return os.getpid()

    async def ends(self) -> list[bool]:
        """Wait for the ends of all tasks of the process's actors. Returns which were cancelled."""
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait(_begun)
        return [task.cancelled() for task in _begun]


async def _beside(pid: int) -> Any:
    """A `Beside` in a process."""
    others = []
    while True:
        others.append(await Beside.spawn())
        if await others[-1].pid() == pid:
            return others[-1]


async def _drop(handles: list[Any]) -> None:
    handles.clear()


async def _stop(handles: list[Any]) -> None:
    await zc.stop(handles[0])


async def _kill(handles: list[Any]) -> None:
    await zc.kill(handles[0])


@pytest.mark.parametrize("end", [_stop, _drop, _kill])
async def test_tasks_of_an_actor_that_has_ended_do_not_go_on_beside_others(
    tmp_path: Path, end: Callable[[list[Any]], Awaitable[None]]
) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(num_cpus=2):
        handles: list[Any] = [await Busy.options(process="shared").spawn(tmp_path / "log")]
        beside = await _beside(await handles[0].begin())
        await handles[0].show_tasks()
        await end(handles)
        assert await beside.ends() == [True] * 4
