"""The agent of a node that has joined a cluster: it starts and ends workers at the head's word.

It holds no actors' names and decides nothing. When it loses the head, it ends its workers and itself: the head has
given up their actors by then, or is about to, and may start them elsewhere. So no actor lives twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

from zcactor.errors import ZcactorError
from zcactor.interface import Interface
from zcactor.runtime.leaving import end_workers
from zcactor.runtime.output import Printers

if TYPE_CHECKING:
    from zcactor.context import Runtime
    from zcactor.rpc.session import Session
    from zcactor.runtime.nodes import OwnWorkers
    from zcactor.runtime.pool import WorkerRecord

__all__ = ["NodeMember", "member_interface"]

logger = logging.getLogger("zcactor")
_LAST_REPORT = 1.0
"""Seconds that the head gets to take in what was reported at the end."""


class NodeMember:
    """Index 1 of the process of such an agent. Its callers are the head and this node's workers.

    Args:
        process: the agent's own.
        pool: starts workers here.
    """

    def __init__(self, process: Runtime, pool: OwnWorkers) -> None:
        self._process = process
        self._pool = pool
        self._ending: asyncio.Task[None] | None = None
        self._reports: dict[asyncio.Task[None], None] = {}
        self._printers = Printers(self._show, process.tasks.start)
        self.finished: asyncio.Future[None] = process.loop.create_future()

    async def start_worker(self, worker: bytes, label: str, env: dict[str, str], driver: bytes, shared: bool) -> None:
        """Start a worker, which is called `worker` from now on; what becomes of it is reported."""
        if self._ending is not None:
            self._report("worker_ended", worker, "its node is shutting down")
            return
        try:
            self._pool.start(label, env, driver, shared=shared, process=worker)
        except (OSError, ValueError) as error:
            self._report("worker_ended", worker, f"no process could be started for {label}: {error}; see ulimit -n")

    async def kill_worker(self, worker: bytes, cause: str | None) -> None:
        """SIGKILL to a worker and to all that it has started."""
        record = self._pool.by_process.get(worker)
        if record is not None:
            record.kill(cause)

    async def worker_ready(self, worker: bytes, pid: int, address: str) -> None:
        """A worker of this node has started and listens."""
        record = self._pool.by_process.get(worker)
        if record is not None and not record.ready.done():
            record.ready.set_result(None)
            await self._process.head.ask_members("worker_ready", worker, pid, address)

    async def end(self, grace: float) -> None:
        """End every worker and then this node; does not wait for that."""
        if self._ending is None:
            self._ending = self._process.loop.create_task(self._end(grace))
        elif grace <= 0:
            self._pool.kill_all("the node was shut down")

    async def _end(self, grace: float) -> None:
        self._report("leave_node")  # before workers end: nothing is to be started here in their place
        await end_workers(self._process.sessions, self._process.requests, self._pool, grace, "the node was shut down")
        with contextlib.suppress(TimeoutError):  # the head does not take it in, and is told nothing more
            async with asyncio.timeout(_LAST_REPORT):
                await self._printers.flush()
                await asyncio.gather(*self._reports)
        self.finish()

    def finish(self) -> None:
        """End the agent's process."""
        if not self.finished.done():
            self.finished.set_result(None)

    # ---------------------------------------------------------------- what the pool and the process tell

    def worker_ended(self, record: WorkerRecord) -> None:
        """A worker's process is gone."""
        self._report("worker_ended", record.process, record.ended.result())

    def output(self, stream: str, record: WorkerRecord, lines: list[str]) -> None:
        """A worker has printed something."""
        self._printers.write(record.driver, stream, f"({record.label} pid={record.pid}) ", lines)

    async def _show(self, driver: bytes, stream: str, text: str) -> None:
        await self._process.head.ask_members("worker_said", driver, stream, text)

    def zygote_lost(self) -> None:
        """No worker can be started any more, and those there were have ended: so does the node."""
        self._process.loop.call_soon(self.finish)

    def session_lost(self, session: Session) -> None:
        peer = session.peer_process
        if self._process.tasks.closing:
            return
        if peer == self._process.sessions.head and self._process.sessions.used.get(peer) is None:
            if self._ending is None:
                logger.warning("the cluster's head is lost (%s); this node ends", session.closed)
            self._process.tasks.start(self.end(0.0))
        worker = self._pool.by_process.get(peer)
        if worker is not None and not worker.leaving:
            worker.kill()

    def _report(self, method: str, *args: Any) -> None:
        task = self._process.loop.create_task(self._tell_head(method, args))
        self._reports[task] = None
        task.add_done_callback(self._reports.pop)

    async def _tell_head(self, method: str, args: tuple[Any, ...]) -> None:
        try:
            await self._process.head.ask_members(method, *args)
        except ZcactorError as error:  # it is gone, or has given us up: what we have to tell is of no use to it
            logger.debug("the head was not told of %s: %s", method, error)


@functools.cache
def member_interface() -> Interface:
    """The methods of `NodeMember`."""
    return Interface.of(NodeMember)
