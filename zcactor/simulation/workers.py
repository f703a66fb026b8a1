"""Workers of a simulated node: a fork is an event, and so is the end of a process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from zcactor import ids
from zcactor.runtime.pool import WorkerRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zcactor.simulation.loop import SimLoop

__all__ = ["SimWorkers"]

FORK: Final = (2e-3, 6e-3)
"""Virtual seconds that the zygote takes for a fork."""
REAP: Final = (0.1e-3, 2e-3)
"""Virtual seconds from the end of a process to the zygote's word on it."""


class _Worker(WorkerRecord):
    """One simulated worker."""

    def __init__(self, workers: SimWorkers, process: bytes, label: str, driver: bytes, *, shared: bool) -> None:
        super().__init__(process, workers.loop, label, driver, shared=shared)
        self.workers = workers
        self.its_loop: SimLoop | None = None

    def kill(self, cause: str | None = None) -> None:
        """See `WorkerRecord.kill`."""
        if self.ended.done():
            return
        self.doomed = True
        self.cause = self.cause or cause
        if self.its_loop is not None:
            self.workers.kill(self.its_loop, "its process was killed by signal 9 (SIGKILL)")


class SimWorkers:
    """Starts and ends the workers of one node. Satisfies `zcactor.runtime.nodes.OwnWorkers`.

    Args:
        loop: of the node's agent.
        work: ``work(record)`` makes the process of a worker that was just forked.
        kill: ``kill(loop, cause)`` ends a process.
        ended: called once for each worker that ended, after `WorkerRecord.ended` is set.
    """

    def __init__(
        self, loop: SimLoop, work: Callable[[WorkerRecord], SimLoop], kill: Callable[[SimLoop, str], None],
        ended: Callable[[WorkerRecord], None],
    ) -> None:  # fmt: skip
        self.loop = loop
        self.kill = kill
        self.by_process: dict[bytes, WorkerRecord] = {}
        self._work = work
        self._ended = ended
        self._drawn = loop.world.random(f"forks/{loop.name}")

    def start(
        self, label: str, env: Mapping[str, str], driver: bytes, *, shared: bool, process: bytes = b""
    ) -> WorkerRecord:
        """See `zcactor.runtime.pool.Pool.start`."""
        del env
        record = _Worker(self, process or ids.token(), label, driver, shared=shared)
        self.by_process[record.process] = record
        self.loop.at(self.loop.world.now + self._drawn.uniform(*FORK), self._fork, record)
        return record

    def _fork(self, record: _Worker) -> None:
        if record.doomed:
            self._end(record, "it was not needed any more")
        else:
            record.its_loop = self._work(record)

    def gone(self, loop: SimLoop, cause: str) -> None:
        """A process of this node has ended; its zygote is about to tell."""
        for record in self.by_process.values():
            assert isinstance(record, _Worker)
            if record.its_loop is loop:
                self.loop.at(self.loop.world.now + self._drawn.uniform(*REAP), self._end, record, cause)

    def _end(self, record: WorkerRecord, cause: str) -> None:
        if self.by_process.pop(record.process, None) is None:
            return
        cause = record.cause or cause
        if not record.ready.done():
            record.ready.set_exception(RuntimeError(cause))
            record.ready.exception()
        record.ended.set_result(cause)
        self._ended(record)

    def kill_all(self, cause: str | None) -> None:
        """See `zcactor.runtime.nodes.Workers.kill_all`."""
        for record in list(self.by_process.values()):
            record.kill(cause)

    async def wait_all(self, timeout: float) -> None:
        """See `zcactor.runtime.nodes.OwnWorkers.wait_all`."""
        ending = [record.ended for record in self.by_process.values()]
        if ending:
            await asyncio.wait(ending, timeout=timeout)

    def drain_output(self) -> None:
        """Nothing is printed in a simulation but by the package itself."""

    def close(self) -> None:
        """See `zcactor.runtime.nodes.OwnWorkers.close`."""
        self.kill_all(None)
