"""The workers of a runtime in one process: a fork is a new `InnerProcess`, and so is what would be its end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from zcactor import ids
from zcactor.node.worker_main import serve
from zcactor.workers.worker_table import WorkerRecord, WorkerTable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zcactor.ids import ProcessId
    from zcactor.testing.inner import InnerProcess

__all__ = ["InnerWorkers"]


class _Worker(WorkerRecord):
    """One worker. `WorkerRecord.pid` is that of this very process, so nothing may send it a signal."""

    def __init__(
        self, workers: InnerWorkers, process: ProcessId, label: str, driver: ProcessId, *, shared: bool
    ) -> None:
        super().__init__(process, workers.loop, label, driver, shared=shared)
        self.workers = workers
        self.inner: InnerProcess | None = None

    def kill(self, cause: str | None = None) -> None:
        """See `WorkerRecord.kill`."""
        if self.ended.done() or self.doomed:
            return
        self.doomed = True
        self.cause = cause
        if self.inner is not None:
            self.inner.kill()
            self.workers.end_soon(self, "its process was killed by signal 9 (SIGKILL)")


class InnerWorkers(WorkerTable):
    """The workers of the head's node. Satisfies `zcactor.control.node_table.OwnWorkers`.

    Args:
        head: the head's process.
        make: ``make(process id)`` makes the process of a worker.
        ended: called once for each worker that ended, after `WorkerRecord.ended` is set.
    """

    def __init__(
        self, head: InnerProcess, make: Callable[[bytes], InnerProcess], ended: Callable[[WorkerRecord], None]
    ) -> None:
        super().__init__(head.process.loop, ended)
        self._head = head
        self._make = make
        self._environment = Environment()

    def start(
        self, label: str, env: Mapping[str, str], driver: ProcessId, *, shared: bool, process: ProcessId | None = None
    ) -> WorkerRecord:
        """See `zcactor.workers.pool.Pool.start`. All processes share one environment: `env` is set in it until the
        worker ends."""
        record = _Worker(self, process or ids.new_process(), label, driver, shared=shared)
        self.by_process[record.process] = record
        self.loop.call_soon(self._fork, record, dict(env), context=self._head.context)
        return record

    def _fork(self, record: _Worker, env: Mapping[str, str]) -> None:
        if record.doomed:
            self._end(record, "it was not needed any more")
            return
        inner = record.inner = self._make(record.process)
        inner.label = record.label
        self._environment.enter(record, env)
        inner.start(self._work(record, inner))

    async def _work(self, record: _Worker, inner: InnerProcess) -> None:
        await serve(inner.process, self._head.process.process.hex())
        if not record.doomed:
            record.doomed = True
            await inner.end()
            self.end_soon(record, "its process exited with status 0")

    def end_soon(self, record: WorkerRecord, cause: str) -> None:
        """Report the end of a worker to the head, in the next turn of the loop."""
        self.loop.call_soon(self._end, record, cause, context=self._head.context)

    def _leave(self, record: WorkerRecord) -> None:
        self._environment.leave(record)

    def drain_output(self) -> None:
        """Return at once: actors print to the standard output of the test."""

    def close(self) -> None:
        """See `zcactor.control.node_table.OwnWorkers.close`. The processes end with their loop."""
        self._environment.restore()


class Environment:
    """The variables that actors have asked for, in the one environment of this process. The latest of several wishes
    holds while its worker lives."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}
        self._wishes: dict[Any, Mapping[str, str]] = {}

    def enter(self, worker: Any, env: Mapping[str, str]) -> None:
        """Set the variables of a worker."""
        for name in env:
            self._before.setdefault(name, os.environ.get(name))
        self._wishes[worker] = env
        os.environ.update(env)

    def leave(self, worker: Any) -> None:
        """Set each variable of a worker as others wish it, or as it was."""
        for name in self._wishes.pop(worker, ()):
            self._set(name)

    def _set(self, name: str) -> None:
        wished = [env[name] for env in self._wishes.values() if name in env]
        value = wished[-1] if wished else self._before[name]
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    def restore(self) -> None:
        """Set all variables as they were. Idempotent."""
        self._wishes.clear()
        for name in self._before:
            self._set(name)
