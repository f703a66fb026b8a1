"""The table of a node's workers: a record for each, until it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import InsufficientResources

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.ids import ProcessId

__all__ = ["FIRST_INDEX", "WorkerRecord", "WorkerTable"]

FIRST_INDEX: Final = 2
"""The number of a worker's first actor. Lower ones are of the actors that the system has in each process."""


class WorkerRecord:
    """One worker process."""

    def __init__(
        self, process: ProcessId, loop: asyncio.AbstractEventLoop, label: str, driver: ProcessId, *, shared: bool
    ) -> None:
        self.process = process
        self.driver = driver
        """The program for which the worker was started, and to which its output goes."""
        self.shared = shared
        self.pid = 0
        """0 until the worker is forked."""
        self.label = label
        """The label before the worker's output."""
        self.actors: dict[Any, None] = {}
        """In the order of their arrival."""
        self.next_index = FIRST_INDEX
        self.ready: asyncio.Future[None] = loop.create_future()
        """Done when the worker has reported; fails when the worker ends before."""
        self.ended: asyncio.Future[str] = loop.create_future()
        """The cause of the worker's end, once it has ended."""
        self.leaving = False
        self.doomed = False
        """Whether the worker is to be killed as soon as its process exists."""
        self.cause: str | None = None
        """The cause of the kill; None when the kernel's report of the end is the best cause."""

    async def started(self, limit: float, label: str) -> None:
        """Wait until the worker has reported.

        Args:
            limit: seconds; after them the worker is killed.
            label: of the actor for which the worker is started.

        Raises:
            InsufficientResources: the worker did not report; the message says why.
        """
        try:
            async with asyncio.timeout(limit):
                await asyncio.shield(self.ready)
        except TimeoutError:
            cause = f"it did not start within {limit:g} s (spawn_timeout)"
            self.kill(cause)
            raise InsufficientResources(f"no process could be started for {label}: {cause}") from None
        except RuntimeError as error:
            raise InsufficientResources(f"no process could be started for {label}: {error}") from error

    def take_index(self) -> int:
        """A fresh actor index in this worker."""
        self.next_index += 1
        return self.next_index - 1

    def kill(self, cause: str | None = None) -> None:
        """Send SIGKILL to the worker, now or once it is forked. The zygote kills the processes that it has started, and
        gives time to those that remove its shared memory.

        Args:
            cause: the result of `ended`; None for the kernel's report.
        """
        if self.ended.done():
            return
        self.doomed = True
        self.cause = self.cause or cause
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


class WorkerTable:
    """The workers of one node: their records, and their ends. The base of all that start workers.

    Args:
        loop: on which the table is used.
        ended: called once for each worker that ended, after `WorkerRecord.ended` is set.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[[WorkerRecord], None]) -> None:
        self.loop = loop
        self.by_process: dict[ProcessId, WorkerRecord] = {}
        """The workers that have not ended, by process id."""
        self._ended = ended

    def _end(self, record: WorkerRecord, cause: str) -> None:
        """Note that a worker has ended, or could not be started. Only the first call for a worker has an effect.

        Args:
            record: of the worker.
            cause: the cause where the worker was not killed with a cause of its own.
        """
        if self.by_process.pop(record.process, None) is None:
            return
        self._leave(record)
        cause = record.cause or cause
        if not record.ready.done():
            record.ready.set_exception(RuntimeError(cause))
            record.ready.exception()  # perhaps without a waiter
        record.ended.set_result(cause)
        self._ended(record)

    def _leave(self, record: WorkerRecord) -> None:
        """Give up the things that a worker had on this node."""

    def kill_all(self, cause: str | None) -> None:
        """Send SIGKILL to every worker and to all processes that they have started."""
        for record in list(self.by_process.values()):
            record.kill(cause)

    async def wait_all(self, timeout: float) -> None:
        """Wait until every worker has ended, at most `timeout` seconds."""
        ending = [record.ended for record in self.by_process.values()]
        if ending:
            await asyncio.wait(ending, timeout=timeout)
