"""Tasks and async generators that an actor has begun end with it, as those of a program do with `asyncio.run`, and an
exit in one of them is its outcome alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
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


@zc.actor(process="shared")
class Exiting:
    """An actor whose methods exit, in tasks and without."""

    async def plain(self, error: type[BaseException]) -> None:
        raise error(3)

    async def task(self, error: type[BaseException]) -> None:
        await asyncio.create_task(self.plain(error))

    async def task_later(self, error: type[BaseException]) -> None:
        """Exit in a task behind its first step."""

        async def later() -> None:
            await asyncio.sleep(0)
            raise error(3)

        await asyncio.create_task(later())

    async def gather(self, error: type[BaseException]) -> None:
        await asyncio.gather(self.plain(error), self.plain(error))

    async def wait_for(self, error: type[BaseException]) -> None:
        await asyncio.wait_for(self.plain(error), PATIENCE)

    async def group(self, error: type[BaseException]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.plain(error))

    async def reference(self, error: type[BaseException]) -> None:
        """Exit in a task that is made of a reference."""
        me: Any = zc.current_actor().handle
        await asyncio.create_task(me.exit_as_read(error))

    async def get(self, error: type[BaseException]) -> None:
        """Exit in a task of `zc.get`."""
        me: Any = zc.current_actor().handle
        await asyncio.create_task(zc.get([me.exit_as_read(error)]))

    async def exit_as_read(self, error: type[BaseException]) -> Any:
        return ExitsAsRead(error)

    async def leave_a_task(self, error: type[BaseException]) -> None:
        """Exit in a task that nobody awaits."""
        task = asyncio.create_task(self.plain(error))
        await asyncio.wait([task])

    async def generators(self) -> int:
        """Begin an async generator, and count those that are closed with the actor."""
        _left.append(self.generate())
        return await anext(_left[-1])

    async def generate(self) -> AsyncGenerator[int, None]:
        try:
            yield os.getpid()
        finally:
            _closed.set()

    async def closed(self) -> None:
        """Wait until a generator has been closed."""
        async with asyncio.timeout(PATIENCE):
            await _closed.wait()

    async def pid(self) -> int:
        return os.getpid()


_left: list[AsyncGenerator[int, None]] = []
_closed = asyncio.Event()


class ExitsAsRead:
    """A value that exits where it is unpickled."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _raise, (self.error,)


def _raise(error: type[BaseException]) -> None:
    raise error(3)


WAYS = ("plain", "task", "task_later", "gather", "wait_for", "group", "reference", "get")


@pytest.mark.parametrize("process", ["own", "shared"])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
async def test_an_exit_in_a_task_is_raised_where_it_is_awaited_and_ends_nobody(
    error: type[BaseException], process: Literal["own", "shared"]
) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(num_cpus=2):
        exiting: Any = await Exiting.options(process=process).spawn()
        pid = await exiting.pid()
        for way in WAYS:
            with pytest.raises(zc.RemoteError, match=error.__name__):
                await getattr(exiting, way)(error)
            assert await exiting.pid() == pid, way
        if process == "shared":  # behind the exits, too
            beside: Any = await Exiting.spawn()
            while await beside.pid() != pid:
                beside = await Exiting.spawn()
            await exiting.generators()
            await zc.stop(exiting)
            await beside.closed()


async def test_an_exit_in_a_task_that_nobody_awaits_is_logged(capfd: pytest.CaptureFixture[str]) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(num_cpus=2):
        exiting: Any = await Exiting.spawn()
        await exiting.leave_a_task(SystemExit)
        await exiting.pid()
        said = ""
        while "Task exception was never retrieved" not in said or "SystemExit: 3" not in said:
            said += capfd.readouterr().err
            await asyncio.sleep(0.001)


@zc.actor
class Handling:
    """An actor with a handler of its own for SIGTERM."""

    async def handle(self) -> int:
        """Exit at a signal."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        return os.getpid()

    async def forever(self) -> None:
        await asyncio.Event().wait()


async def test_an_exit_by_a_signal_ends_the_process() -> None:
    async with asyncio.timeout(PATIENCE), zc.init(num_cpus=2):
        handling: Any = await Handling.spawn()
        os.kill(await handling.handle(), signal.SIGTERM)
        with pytest.raises(zc.ActorDied, match="status"):
            await handling.forever()
