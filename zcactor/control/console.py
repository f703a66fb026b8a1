"""The head's console: the output of all nodes' workers is shown at the programs for which they work."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final

from zcactor.errors import ConnectionLost
from zcactor.logs import logger
from zcactor.workers.output import Printers

if TYPE_CHECKING:
    from zcactor.ids import ProcessId
    from zcactor.process.context import LocalProcess
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["LAST_OUTPUT", "Console"]

LAST_OUTPUT: Final = 2.0
"""Seconds that the drivers get at the end to show the rest of the output."""


class Console:
    """The console that passes lines on to programs.

    Args:
        process: the head's process.
    """

    def __init__(self, process: LocalProcess) -> None:
        self._process = process
        self._printers = Printers(self._show, process.tasks.start)
        self.has_log = True
        """Lines for programs that are gone go to the agent's own output. That of an embedded node has no reader."""

    def output(self, stream: str, worker: WorkerRecord, lines: list[str]) -> None:
        """Take the output of a worker on the head's node."""
        self.show(worker.driver, stream, f"({worker.label} pid={worker.pid}) ", lines)

    def show(self, driver: ProcessId, stream: str, prefix: str, lines: list[str]) -> None:
        """Show lines, each with `prefix` before it, at a program; in our own log when the program is gone."""
        session = self._process.sessions.used.get(driver)
        if session is not None and session.closed is None:
            if self._process.config.log_to_driver:
                self._printers.write(driver, stream, prefix, lines)
        elif self.has_log:
            file = sys.stderr if stream == "stderr" else sys.stdout
            file.write("".join(f"{prefix}{line}\n" for line in lines))
            file.flush()

    async def _show(self, driver: ProcessId, stream: str, text: str) -> None:
        session = self._process.sessions.used.get(driver)
        if session is None or session.closed is not None:
            raise ConnectionLost("the driver is gone")
        await self._process.requests.ask(session, "log", stream, text)

    def forget(self, driver: ProcessId) -> None:
        """Drop the waiting lines of a program that is gone."""
        self._printers.forget(driver)

    async def show_all(self, driver: ProcessId | None = None) -> None:
        """Wait until a program, or each, has shown all output, at most `LAST_OUTPUT` seconds."""
        try:
            async with asyncio.timeout(LAST_OUTPUT):
                await (self._printers.flush() if driver is None else self._printers.flush_one(driver))
        except TimeoutError:
            logger.debug("a driver did not show all output in time")
