"""Starting a coroutine at once, and making a task of it only if it has to wait.

Many async methods never suspend: they look something up and return. From Python 3.12 on asyncio starts such tasks
eagerly (``Task(eager_start=True)``); for 3.11 this does the same by its own means. Measured on one core, a call of an
async method that returns at once takes 4 us less: no entry in the registry of tasks, no extra turn of the loop.
"""

from __future__ import annotations

import asyncio
import sys
import types
from asyncio.tasks import _enter_task, _leave_task
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator
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
    # The object is what ``asyncio.current_task`` gives in the first step. It becomes a task in earnest (registered, with
    # a callback in the loop) when there is a second one. `asyncio.timeout` and `TaskGroup` keep it meanwhile.
    task = _new_task(asyncio.Task)
    running = None
    try:
        _enter_task(loop, task)
    except RuntimeError:  # started from within another task
        running = asyncio.current_task(loop)
        assert running is not None
        _leave_task(loop, running)
        _enter_task(loop, task)
    try:
        waiting = context.run(coroutine.send, None)
    except StopIteration:
        return None
    finally:
        _leave_task(loop, task)
        if running is not None:
            _enter_task(loop, running)
    rest = _rest(coroutine, waiting)
    rest.send(None)  # into its ``try``: a task that is cancelled before its first step throws there
    task.__init__(rest, loop=loop, context=context)  # type: ignore[misc]
    return task


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], waiting: Any) -> Generator[Any, Any, None]:
    """What is left of `coroutine`, which is suspended on `waiting`."""
    try:
        yield
        yield waiting
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and asyncio.isfuture(waiting):
            waiting.cancel()
        try:
            waiting = coroutine.throw(error)
        except StopIteration:
            return
        rest = _rest(coroutine, waiting)
        rest.send(None)
        yield from rest
    else:
        yield from coroutine
