"""Starting a coroutine at once, and making a task of it only if it has to wait.

Many async methods never suspend: they look something up and return. From Python 3.12 on asyncio starts such tasks
eagerly (``Task(eager_start=True)``); for 3.11 this does the same by its own means. Measured on one core, a call of an
async method that returns at once takes 4 us less: no entry in the registry of tasks, no extra turn of the loop.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import types
from asyncio.tasks import _enter_task, _leave_task
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from contextvars import Context

__all__ = ["start_eagerly"]

_new_task = asyncio.Task.__new__


def start_eagerly(
    coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop, context: Context
) -> asyncio.Task[None] | None:
    """Run `coroutine` up to its first suspension, as the current task.

    Args:
        coroutine: not started; its exceptions are its own business (a task holds them, as always).
        loop: the running loop.
        context: what it runs in, from the first step to the last.

    Returns:
        The task that goes on with it; None when it has ended already.
    """
    if sys.version_info >= (3, 12):
        task = asyncio.Task(coroutine, loop=loop, context=context, eager_start=True)
        return None if task.done() else task
    task = _new_task(_EagerTask)
    task.begun = (coroutine, loop, context)
    running = None
    try:
        _enter_task(loop, task)
    except RuntimeError:  # started from within another task
        running = asyncio.current_task(loop)
        assert running is not None
        _leave_task(loop, running)
        _enter_task(loop, task)
    try:
        task.waiting = context.run(coroutine.send, None)
    except StopIteration:
        task.ended = True
        return None
    finally:
        _leave_task(loop, task)
        if running is not None:
            _enter_task(loop, running)
    if task.begun is not None:
        task.become()
    return task


class _EagerTask(asyncio.Task[None]):
    """What ``asyncio.current_task`` gives in the first step: a task that is none yet.

    It becomes one in earnest (registered, with a callback in the loop) when there is a second step, or when somebody
    asks anything of it in the first; `asyncio.timeout` and ``TaskGroup`` do.
    """

    begun: tuple[Coroutine[Any, Any, None], asyncio.AbstractEventLoop, Context] | None = None
    """What it will be made of; None once it was."""
    waiting: Any = None
    """What the first step suspended on."""
    ended = False
    """The first step was the last."""

    def become(self) -> None:
        """Be a task from here on. Its first turn in the loop comes after the first step."""
        assert self.begun is not None
        coroutine, loop, context = self.begun
        self.begun = None
        rest = _rest(coroutine, self)
        rest.send(None)  # into its ``try``: a task that is cancelled before its turn throws there
        super().__init__(rest, loop=loop, context=context)


def _becoming(name: str) -> Callable[..., Any]:
    inherited = getattr(asyncio.Task, name)

    @functools.wraps(inherited)
    def method(self: _EagerTask, *args: Any, **kwargs: Any) -> Any:
        if self.begun is not None:
            self.become()
        return inherited(self, *args, **kwargs)

    return method


for _name in (
    "__await__", "__iter__", "__repr__", "add_done_callback", "cancel", "cancelled", "cancelling", "done", "exception",
    "get_coro", "get_loop", "get_name", "get_stack", "print_stack", "remove_done_callback", "result", "set_name",
    "uncancel",
):  # fmt: skip
    setattr(_EagerTask, _name, _becoming(_name))


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], task: _EagerTask) -> Generator[Any, Any, None]:
    """What is left of `coroutine` after the first step of `task`."""
    try:
        yield
        if task.ended:
            return
        yield task.waiting
    except GeneratorExit:  # nobody keeps the task; what it was to run may have been closed before it
        coroutine.close()
        raise
    except BaseException as error:
        if task.ended:
            return
        if isinstance(error, asyncio.CancelledError) and asyncio.isfuture(task.waiting):
            task.waiting.cancel()
        try:
            task.waiting = coroutine.throw(error)
        except StopIteration:
            return
        rest = _rest(coroutine, task)
        rest.send(None)
        yield from rest
    else:
        yield from coroutine
