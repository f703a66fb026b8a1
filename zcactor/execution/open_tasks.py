"""The tasks and async generators that the code of an actor has begun, and leaves to its end.

Both are noted in the context of their maker, in which `current_host` is the actor: a new task by the task factory of
the loop, an async generator by the hook for its first step. Calls start without a factory (`start_eagerly`), so they
cost nothing more. The runtime's own tasks that begin in an actor's context, to open a connection for example, serve
others, too: they are known by the file of their coroutine, and left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from zcactor.api.future import ObjectRef
from zcactor.exception_pickling import bare, traceback_of
from zcactor.execution.failure import log_failure
from zcactor.process.context import current_host

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from types import CodeType, FrameType, TracebackType

__all__ = ["OpenTasks", "is_ours", "leave_to_its_task", "watch_generators", "watch_tasks"]

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_ASYNCIO = f"{Path(asyncio.__file__).parent}{os.sep}"
_FOR_TASKS = tuple(f"{_PACKAGE}api{os.sep}{name}.py" for name in ("future", "waiting"))
"""Files of references, `zcactor.get` and `zcactor.wait`: users make tasks of these, and the runtime makes none."""
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR
_STEPS = frozenset((ObjectRef.send.__code__, ObjectRef.throw.__code__))
"""The steps of a reference in a task of its own."""
_watched: asyncio.AbstractEventLoop | None = None
"""The loop whose tasks are noted: a worker's process has one."""


def _is_of_the_package(code: CodeType) -> bool:
    """Whether a function is one of the package's own, and runs in no task but the runtime's."""
    return code.co_filename.startswith(_PACKAGE) and code.co_filename not in _FOR_TASKS


def is_ours(task: asyncio.Task[Any]) -> bool:
    """Whether a task runs a coroutine of the package itself."""
    coroutine = task.get_coro()
    code = getattr(coroutine, "cr_code", None) or getattr(coroutine, "gi_code", None)
    return code is not None and _is_of_the_package(code)


def leave_to_its_task(error: BaseException) -> bool:
    """Take the frames of the loop off the traceback of an exception that has left it. One of them has the task, which
    would keep itself, and be logged late.

    Returns:
        Whether a coroutine of the user's has raised it, or let it through: such a one runs in a task of the user's, or
        in one that takes all exceptions. Otherwise it came to the loop in another way, or has ended a task of the
        runtime.
    """
    trace: TracebackType | None = traceback_of(error)
    of_loop: list[FrameType] = []
    first, found = None, False
    while trace is not None and not found:
        code = trace.tb_frame.f_code
        is_asyncio = code.co_filename.startswith(_ASYNCIO)
        if code.co_flags & _COROUTINE or code in _STEPS:
            first = first or trace
            found = not (is_asyncio or _is_of_the_package(code))
        elif first is None and is_asyncio:
            of_loop.append(trace.tb_frame)
        trace = trace.tb_next
    if found:
        bare(error, first)
        for frame in of_loop:
            frame.clear()  # from Python 3.12 on those that are left refer to them, by `f_back`
    return found


def watch_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Note from now on which actors begin the tasks of a loop, which is that of a worker's process."""
    global _watched
    _watched = loop
    loop.set_task_factory(_make_task)


def watch_generators() -> None:
    """Note from now on which actors begin async generators. Called on the loop, which sets hooks of its own whenever it
    begins to run."""
    hooks = sys.get_asyncgen_hooks()

    def begins(generator: AsyncGenerator[Any, Any]) -> None:
        open_tasks = getattr(current_host.get(), "open_tasks", None)
        if open_tasks is not None:
            open_tasks.generators.add(generator)
        if hooks.firstiter is not None:
            hooks.firstiter(generator)

    sys.set_asyncgen_hooks(firstiter=begins)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(coroutine, loop=loop, **options)
    open_tasks = getattr(current_host.get(), "open_tasks", None)
    if open_tasks is not None:
        open_tasks.tasks.add(task)
    return task


class OpenTasks:
    """The tasks and async generators of one actor.

    Args:
        loop: the actor's loop.
        label: the actor's name in messages.
        shared: whether other actors run on the loop. Where none does, each task is the actor's that is not the
            runtime's: also one that no factory of ours has made.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, label: str, *, shared: bool) -> None:
        self._loop = loop
        self._label = label
        self._shared = shared

    @cached_property
    def tasks(self) -> WeakSet[asyncio.Task[Any]]:
        """The tasks that were noted. Most actors begin none."""
        return WeakSet()

    @cached_property
    def generators(self) -> WeakSet[AsyncGenerator[Any, Any]]:
        """The async generators that were noted."""
        return WeakSet()

    def _running(self) -> list[asyncio.Task[Any]]:
        found = set(vars(self).get("tasks", ()))
        if self._loop is _watched and not self._shared:
            found |= asyncio.all_tasks(self._loop)
        return [task for task in found if not (task.done() or is_ours(task))]

    def cancel(self) -> None:
        """Cancel the tasks, without waiting for their ends."""
        for task in self._running():
            task.cancel()

    async def end(self, seconds: float, begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """Do what `asyncio.run` does at its end: cancel the tasks, wait for them, and then close the async generators
        that are suspended. Those that have not ended after `seconds` are left.

        Args:
            seconds: the time of all that.
            begin: makes a task in the actor's context.
        """
        until = self._loop.time() + seconds
        told: set[asyncio.Task[Any]] = set()
        while tasks := self._running():  # those that are being cancelled may begin others
            for task in tasks:
                if task not in told:
                    task.cancel()
            told.update(tasks)
            left = until - self._loop.time()
            if left <= 0:
                break
            await asyncio.wait(tasks, timeout=left)
        for task in told:
            if task.cancelled():
                with contextlib.suppress(asyncio.CancelledError):
                    task.exception()  # it gives up the error, by whose traceback a task and its actor keep each other
        closing = [begin(self._close(each)) for each in list(vars(self).get("generators", ())) if _is_suspended(each)]
        if closing:
            _, late = await asyncio.wait(closing, timeout=max(until - self._loop.time(), 0.0))
            for task in late:
                task.cancel()

    async def _close(self, generator: AsyncGenerator[Any, Any]) -> None:
        try:
            await generator.aclose()
        except BaseException as error:  # of the user's; or the cancelling of this task, which has no time left
            log_failure(f"an async generator of {self._label} raised while it was being closed", error)


def _is_suspended(generator: Any) -> bool:
    frame = generator.ag_frame
    return frame is not None and not generator.ag_running and not _is_of_the_package(frame.f_code)
