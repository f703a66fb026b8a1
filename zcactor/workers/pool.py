"""The node agent's worker processes: the zygote forks them, the pool watches them and passes on their output."""

from __future__ import annotations

import functools
import os
import signal
import socket
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from zcactor import ids
from zcactor.workers.output import LineReader
from zcactor.workers.worker_table import WorkerRecord, WorkerTable
from zcactor.workers.zygote import ZYGOTE_MESSAGE, kill_group

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from zcactor.ids import ProcessId

__all__ = ["Pool", "describe_exit"]

_SIGNALS = frozenset(int(number) for number in signal.Signals)
_encode = msgspec.msgpack.encode
_FORKING = 8
"""Requests that the zygote has at the same time: enough that it never waits, and few enough that neither side's socket
fills up, on which both would wait for each other."""
_LAST_READS = 64
"""Reads of one pipe at the end. The number is bounded because a process that a worker left behind may go on
printing."""


def describe_exit(status: int | None) -> str:
    """A wait status in words."""
    if status is None:
        return "its process ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in _SIGNALS:  # a real-time signal
            return f"its process was killed by signal {number}"
        hint = " (perhaps the kernel, out of memory)" if number == signal.SIGKILL else ""
        return f"its process was killed by signal {number} ({signal.Signals(number).name}){hint}"
    return f"its process exited with status {os.WEXITSTATUS(status)}"


class Pool(WorkerTable):
    """Starts, watches and ends workers.

    Args:
        loop: the agent's loop.
        zygote: the socket to the zygote.
        setup: the setup that every worker gets; see `zcactor.node.worker_main.become_worker`.
        output: called with workers' output: ``output(stream name, worker, lines)``.
        ended: called once for each worker that ended, after `WorkerRecord.ended` is set.
        lost: called when the zygote is gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        zygote: socket.socket,
        setup: Mapping[str, Any],
        *,
        output: Callable[[str, WorkerRecord, list[str]], None],
        ended: Callable[[WorkerRecord], None],
        lost: Callable[[], None],
    ) -> None:
        super().__init__(loop, ended)
        self._zygote = zygote
        self._setup = dict(setup)
        self._output = output
        self._lost = lost
        self._by_pid: dict[int, WorkerRecord] = {}
        self._directory = Path(self._setup["directory"])
        self._made = self._directory.stat()
        self._requests: deque[tuple[WorkerRecord, bytes, list[int]]] = deque()
        self._forking: deque[WorkerRecord] = deque()
        self._outputs: dict[int, LineReader] = {}
        zygote.setblocking(False)
        loop.add_reader(zygote.fileno(), self._from_zygote)

    def start(
        self, label: str, env: Mapping[str, str], driver: ProcessId, *, shared: bool, process: ProcessId | None = None
    ) -> WorkerRecord:
        """Ask for a worker; `WorkerRecord.ready` is done when it serves.

        Args:
            label: the label before its output.
            env: further variables of its environment.
            driver: the program for which it runs, by its driver's process id.
            shared: whether it hosts several actors.
            process: its process id; None for a new one.

        Raises:
            ValueError: `env` is too large.
            OSError: no descriptors are left.
        """
        record = WorkerRecord(process or ids.new_process(), self.loop, label, driver, shared=shared)
        request = _encode({**self._setup, "process": record.process, "env": dict(env), "label": label})
        if len(request) > ZYGOTE_MESSAGE:
            raise ValueError(
                f"the environment of an actor has {len(request)} bytes; at most {ZYGOTE_MESSAGE} are possible"
            )
        if not self._has_directory():
            self.by_process[record.process] = record
            self.loop.call_soon(
                self._end, record, f"the node's run directory {self._directory} is gone, as after a logout: start the "
                "node again where XDG_RUNTIME_DIR names a folder that stays, or have it stay by 'loginctl "
                "enable-linger'",
            )  # fmt: skip
            return record
        pipes: list[tuple[int, int]] = []
        try:
            pipes.append(os.pipe())
            pipes.append(os.pipe())
        except OSError:
            for fd in (fd for pipe in pipes for fd in pipe):
                os.close(fd)
            raise
        for name, (read, _) in zip(("stdout", "stderr"), pipes, strict=True):
            os.set_blocking(read, False)
            self._outputs[read] = LineReader(read, functools.partial(self._output, name, record))
            self.loop.add_reader(read, self._output_readable, self._outputs[read])
        self.by_process[record.process] = record
        self._requests.append((record, request, [write for _, write in pipes]))
        self._request()
        return record

    def _has_directory(self) -> bool:
        """Whether the run directory is there, and not another one that was made in its place."""
        try:
            return os.path.samestat(self._directory.stat(), self._made)
        except FileNotFoundError:
            return False

    def _request(self) -> None:
        """Send as many requests as the zygote can take."""
        while self._requests and len(self._forking) < _FORKING:
            record, request, ends = self._requests[0]
            if record.doomed:
                self._requests.popleft()
                for fd in ends:
                    os.close(fd)
                self._end(record, "it was not needed any more")
                continue
            try:
                socket.send_fds(self._zygote, [request], ends)
            except BlockingIOError:
                if self._forking:
                    return  # the zygote's next report comes back here
                self._zygote.setblocking(True)  # one large message, and an idle zygote
                try:
                    socket.send_fds(self._zygote, [request], ends)
                finally:
                    self._zygote.setblocking(False)
            except OSError:  # the zygote is gone; `_from_zygote` is about to notice
                return
            self._requests.popleft()
            self._forking.append(record)
            for fd in ends:
                os.close(fd)

    def _from_zygote(self) -> None:
        while True:
            try:
                message = self._zygote.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self.loop.remove_reader(self._zygote.fileno())
                self._lost()
                for left in list(self.by_process.values()):
                    left.kill()
                    if left.pid:
                        kill_group(left.pid)
                    self._end(left, "the node's zygote ended, and all workers with it")
                return
            report = msgspec.msgpack.decode(message)
            pid = report["pid"]
            if "status" in report:
                record = self._by_pid.pop(pid, None)
                if record is not None:
                    self._end(record, describe_exit(report["status"]))
                continue
            record = self._forking.popleft()
            if pid:
                record.pid = pid
                self._by_pid[pid] = record
                if record.doomed:
                    record.kill()
            else:
                self._end(record, f"no process could be forked: {report['error']}")
            self._request()

    def _leave(self, record: WorkerRecord) -> None:
        self._directory.joinpath(f"{record.process.hex()}.sock").unlink(missing_ok=True)

    def _output_readable(self, output: LineReader) -> bool:
        more = output.read()
        if more is False:
            self._close_output(output)
        return bool(more)

    def _close_output(self, output: LineReader) -> None:
        self.loop.remove_reader(output.fd)
        del self._outputs[output.fd]
        output.end()

    def drain_output(self) -> None:
        """Pass on the output of workers up to now, and read no more."""
        for output in list(self._outputs.values()):
            for _ in range(_LAST_READS):
                if not self._output_readable(output):
                    break
            if output.fd in self._outputs:
                self._close_output(output)

    def close(self) -> None:
        """Let the zygote end, and with it every worker that is left. Needs no loop."""
        self._zygote.close()
        for output in list(self._outputs.values()):
            output.end()
        self._outputs.clear()
        for _, _, ends in self._requests:
            for fd in ends:
                os.close(fd)
        self._requests.clear()
