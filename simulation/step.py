"""The steps of a simulated process: one callback, once, at the end of a queue or at a time.

A step takes the place of asyncio's handle, which costs several times as much to make, and a run makes a hundred
thousand of them.
"""

from __future__ import annotations

import contextvars
from asyncio import format_helpers
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Step", "Timer"]


_NOWHERE = contextvars.Context()


def _nothing() -> None:
    """The callback of a step that is forgotten."""


class Step:
    """A callback that runs once, unless it is cancelled before.

    Args:
        callback: called with `args`.
        args: of the callback.
        context: the context in which it runs.
    """

    __slots__ = ("args", "callback", "context")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context) -> None:
        self.callback: Callable[..., object] | None = callback
        """None for a cancelled step."""
        self.args = args
        self.context = context

    def cancel(self) -> None:
        """See `asyncio.Handle.cancel`."""
        self.callback, self.args, self.context = None, (), _NOWHERE

    def cancelled(self) -> bool:
        """See `asyncio.Handle.cancelled`."""
        return self.callback is None

    def forget(self) -> None:
        """Make the step do nothing at its time, and keep no objects until then."""
        self.callback, self.args, self.context = _nothing, (), _NOWHERE

    def failure(self) -> str:
        """The message for a callback that has raised."""
        source: Any = format_helpers
        return f"Exception in callback {source._format_callback_source(self.callback, self.args)}"


class Timer(Step):
    """A step at a time of the process's clock.

    Args:
        when: seconds on that clock.
        callback: called with `args`.
        args: of the callback.
        context: the context in which it runs.
    """

    __slots__ = ("_when",)

    def __init__(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context
    ) -> None:
        self._when = when
        self.callback = callback
        self.args = args
        self.context = context

    def when(self) -> float:
        """See `asyncio.TimerHandle.when`."""
        return self._when
