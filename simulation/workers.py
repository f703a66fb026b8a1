"""Workers of a simulated node: a fork is an event, and so is the end of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor import ids
from zcactor.workers.worker_table import WorkerRecord, WorkerTable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from simulation.loop import SimLoop
    from zcactor.ids import ProcessId

__all__ = ["SimWorkers"]

FORK: Final = (2e-3, 6e-3)
"""Virtual seconds that the zygote takes for a fork."""
REAP: Final = (0.1e-3, 2e-3)
"""Virtual seconds from the end of a process to the zygote's report of it."""


class _Worker(WorkerRecord):
    """One simulated worker."""

    def __init__(self, workers: SimWorkers, process: ProcessId, label: str, driver: ProcessId, *, shared: bool) -> None:
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


class SimWorkers(WorkerTable):
    """The workers of one node: starts and ends them. Satisfies `zcactor.control.node_table.OwnWorkers`.

    Args:
        loop: of the node's agent.
        work: ``work(record)`` makes the process of a worker that was just forked.
        kill: ``kill(loop, cause)`` ends a process.
        ended: called once for each worker that ended, after `WorkerRecord.ended` is set.
    """

    loop: SimLoop

    def __init__(
        self, loop: SimLoop, work: Callable[[WorkerRecord], SimLoop], kill: Callable[[SimLoop, str], None],
        ended: Callable[[WorkerRecord], None],
    ) -> None:  # fmt: skip
        super().__init__(loop, ended)
        self.kill = kill
        self._work = work
        self._drawn = loop.world.random(f"forks/{loop.name}")

    def start(
        self, label: str, env: Mapping[str, str], driver: ProcessId, *, shared: bool, process: ProcessId | None = None
    ) -> WorkerRecord:
        """See `zcactor.workers.pool.Pool.start`."""
        del env
        record = _Worker(self, process or ids.new_process(), label, driver, shared=shared)
        self.by_process[record.process] = record
        self.loop.at(self.loop.world.now + self._drawn.uniform(*FORK), self._fork, record)
        return record

    def _fork(self, record: _Worker) -> None:
        if record.doomed:
            self._end(record, "it was not needed any more")
        else:
            record.its_loop = self._work(record)

    def gone(self, loop: SimLoop, cause: str) -> None:
        """Note that a process of this node has ended; its zygote is about to report it."""
        for record in self.by_process.values():
            assert isinstance(record, _Worker)
            if record.its_loop is loop:
                self.loop.at(self.loop.world.now + self._drawn.uniform(*REAP), self._end, record, cause)

    def drain_output(self) -> None:
        """Return at once: in a simulation only the package itself prints."""

    def close(self) -> None:
        """See `zcactor.control.node_table.OwnWorkers.close`."""
        self.kill_all(None)
