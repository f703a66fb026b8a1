"""Start a coroutine at once, and make a task of it only if it has to wait.

Many async methods never suspend: they look something up and return. From Python 3.12 on asyncio starts such tasks
eagerly (``Task(eager_start=True)``); for 3.11 this module does the same by its own means. Measured on one core, a call
of an async method that returns at once takes 4 us less: no entry in the registry of tasks, no extra turn of the loop.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import types
from asyncio.tasks import _enter_task, _leave_task
from typing import TYPE_CHECKING, Any

from zcactor.exception_pickling import cause_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator
    from contextvars import Context

__all__ = ["start_eagerly"]

_new_task = asyncio.Task.__new__


def start_eagerly(
    coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop, context: Context
) -> asyncio.Task[None] | None:
    """Run `coroutine` up to its first suspension, as the current task.

    Args:
        coroutine: not started; the caller gets none of its exceptions, which the task holds as always.
        loop: the running loop.
        context: the context of all its steps.

    Returns:
        The task that goes on with the coroutine; None when the coroutine has ended.
    """
    if sys.version_info >= (3, 12):
        eager = asyncio.Task.__new__(asyncio.Task)
        try:
            eager.__init__(coroutine, loop=loop, context=context, eager_start=True)  # type: ignore[misc]
        except BaseException as error:  # of an awaitable of the user's own: its coroutine gets it
            eager._log_destroy_pending = False
            cause = cause_of(error) if type(error) is SystemError else None  # Python 3.12.1 wraps it in one
            begun = types.SimpleNamespace(ended=False, refused=error if cause is None else cause, waiting=None)
            rest = _as_coroutine(_rest(coroutine, begun))
            rest.send(None)  # as in `become`
            return asyncio.Task(rest, loop=loop, context=context)
        return None if eager.done() else eager
    task = _new_task(_EagerTask)
    task.begun = (coroutine, loop, context)
    running = None
    try:
        _enter_task(loop, task)
    except RuntimeError:  # the caller is in another task
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
    try:
        _mark(task.waiting, False)  # until the task takes its step, others may begin to await the same future
    except BaseException as error:  # of an awaitable of the user's own: its coroutine gets it
        task.refused = error
    if task.begun is not None:
        task.become()
    return task


class _EagerTask(asyncio.Task[None]):
    """The result of ``asyncio.current_task`` in the first step: a task that is not registered yet.

    It becomes a full task (registered, with a callback in the loop) when a second step follows, or when the first step
    uses any of its methods, as `asyncio.timeout` and ``TaskGroup`` do.
    """

    begun: tuple[Coroutine[Any, Any, None], asyncio.AbstractEventLoop, Context] | None = None
    """The arguments of the full task; None once it is one."""
    waiting: Any = None
    """The future that the first step suspended on."""
    refused: BaseException | None = None
    """The error of that future, where it cannot be waited for."""
    ended = False
    """Whether the first step was the last."""

    def become(self) -> None:
        """Become a full task. Its first turn in the loop comes after the first step."""
        assert self.begun is not None
        coroutine, loop, context = self.begun
        self.begun = None
        rest = _rest(coroutine, self)
        rest.send(None)  # into its ``try``, where a cancellation before its turn is thrown
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


def _mark(waiting: Any, awaited: bool) -> None:
    if asyncio.isfuture(waiting):
        waiting._asyncio_future_blocking = awaited


async def _as_coroutine(rest: Awaitable[None]) -> None:
    await rest


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], task: Any) -> Generator[Any, Any, None]:
    """The steps of `coroutine` after the first step of `task`, an `_EagerTask` or its fields."""
    cancelled: BaseException | None = None
    try:
        yield
    except GeneratorExit:  # the task was dropped; its coroutine may have been closed before it
        coroutine.close()
        raise
    except asyncio.CancelledError as early:  # before the task's turn
        cancelled = early
    if task.ended:
        return
    waiting: Any = task.waiting
    error: BaseException | None = task.refused
    task.waiting = task.refused = None
    if cancelled is not None and (error is not None or not asyncio.isfuture(waiting)):
        error, cancelled = cancelled, None
    elif cancelled is not None and waiting.cancel(*cancelled.args):
        cancelled = None  # the future's own end, which may take a while, tells the coroutine
    try:
        while True:
            if error is None:
                try:
                    _mark(waiting, True)  # as `await` leaves it for the step of a task
                    yield waiting
                except GeneratorExit:
                    coroutine.close()
                    raise
                except BaseException as raised:  # the future's outcome: the coroutine gets it
                    error = raised
                waiting = None  # its result is the coroutine's alone
                # Where the future took no cancelling, its outcome is dropped, as by a task.
                if cancelled is not None and not issubclass(type(error), asyncio.CancelledError):
                    error = cancelled
                cancelled = None
            if error is None:
                break
            try:
                waiting = coroutine.throw(error)
            except StopIteration:
                return
            error = None
        yield from coroutine
    finally:
        error = cancelled = None  # their tracebacks lead to this frame
