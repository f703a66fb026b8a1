"""The background tasks of one process."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["Tasks"]

T = TypeVar("T")

logger = logging.getLogger("zcactor")


class Tasks:
    """Keeps tasks that nobody else keeps, until they have ended.

    Args:
        loop: that of the calling thread; all of them run there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread = threading.get_ident()
        """The loop's."""
        self.closing = False
        """The process ends: what fails from here on is not worth a line."""
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run `coroutine` in a task that this object keeps; from any thread. A failure is logged."""
        if threading.get_ident() != self.thread:
            self.loop.call_soon_threadsafe(self.start, coroutine)
            return
        self.begin(coroutine)

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """The same on the loop's thread, for somebody who wants the result."""
        task = self.loop.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self.closing:
            logger.error("a background task failed", exc_info=error)

    async def elsewhere(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await on the loop what was asked for on another thread's."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def cancel(self) -> None:
        """Cancel all of them; `settled` waits for their ends."""
        for task in list(self._tasks):
            task.cancel()

    async def settled(self, seconds: float) -> None:
        """Wait until all of them have ended, at most so long."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=seconds)
