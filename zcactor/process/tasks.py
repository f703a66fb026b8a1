"""The background tasks of one process."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from zcactor.logs import logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

__all__ = ["Tasks", "all_of"]

T = TypeVar("T")


async def all_of(steps: Iterable[Awaitable[T]]) -> list[T]:
    """Run coroutines at the same time. Returns their results once all have ended, so that none uses memory any more.

    Raises:
        BaseException: the first error, in their order, once all have ended.
    """
    found = await asyncio.gather(*steps, return_exceptions=True)
    for each in found:
        if issubclass(type(each), BaseException):
            raise each  # type: ignore[misc]
    return found  # type: ignore[return-value]


class Tasks:
    """Tasks that nobody else keeps, kept until they have ended.

    Args:
        loop: the loop of the calling thread, on which all tasks run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread = threading.get_ident()
        """Identifier of the loop's thread."""
        self.closing = False
        """Whether the process is ending: failures are not logged any more."""
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run `coroutine` in a task that this object keeps. Any thread may call this. A failure is logged."""
        if threading.get_ident() != self.thread:
            self.loop.call_soon_threadsafe(self.start, coroutine)
            return
        self.begin(coroutine)

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task like `start`, on the loop's thread, and return it for its result."""
        task = self.loop.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self.closing:
            logger.error("a background task failed", exc_info=error)

    async def elsewhere(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the process's loop, and await it on the loop of the calling thread."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    async def on_loop(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `make` returns on the process's loop, and await it on the loop of the calling
        thread."""
        if threading.get_ident() != self.thread:
            return await self.elsewhere(make())
        return await make()

    def cancel(self) -> None:
        """Cancel all tasks; `settled` waits for their ends."""
        for task in list(self._tasks):
            task.cancel()

    async def settled(self, seconds: float) -> None:
        """Wait until all tasks have ended, for at most `seconds`."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=seconds)
