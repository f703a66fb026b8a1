"""The last step of an actor: its own ``__aexit__`` or ``close()``."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, Final

from zcactor.exception_pickling import bare
from zcactor.execution.failure import log_failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["OF_AN_END", "TAKEN_IN", "close_instance"]

TAKEN_IN: Final = 5.0
"""Seconds that peers have to receive the last answers of an actor that stops while its program goes on."""
OF_AN_END: Final = 0.2
"""The share of the time of a program's end that they have: exit functions of the actor's process run behind that."""


async def close_instance(
    instance: Any, label: str, run: Callable[[Callable[[], Any]], Awaitable[Any]],
    begin: Callable[[Awaitable[Any]], Awaitable[Any]],
) -> None:  # fmt: skip
    """Run ``__aexit__`` or ``close()`` of an actor, where it has one, and await an awaitable that it returns. Its
    exception is logged.

    Args:
        instance: the actor.
        label: its name in messages.
        run: calls a function in the actor's thread.
        begin: awaits in a task in the actor's context.
    """
    try:
        leave: Any = None
        arguments: tuple[Any, ...] = ()
        # As ``async with`` asks: not an instance that answers for any name.
        if getattr(type(instance), "__aexit__", None) is not None:
            leave, arguments = instance.__aexit__, (None, None, None)
        elif (found := inspect.getattr_static(instance, "close", None)) is not None:  # nor one of ``__getattr__``
            leave = getattr(instance, "close", None) if inspect.ismemberdescriptor(found) else instance.close
        if not callable(leave):
            return
        if inspect.iscoroutinefunction(leave):
            left = leave(*arguments)
        else:
            left = await run(lambda: leave(*arguments))
        if inspect.isawaitable(left):  # a decorator, for example, makes a plain function of an async one
            await begin(left)
    except BaseException as error:  # a user's close() may raise anything; the actor ends all the same
        task = asyncio.current_task()
        if type(error) is asyncio.CancelledError and task is not None and task.cancelling():
            raise
        log_failure(f"{label} raised while it was being closed", error)
        bare(error, None)  # else its frames and it keep each other, and the instance
