"""The node agent's worker processes: forked by the zygote, watched, and their output passed on."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from zcactor import ids
from zcactor.runtime.output import LineReader
from zcactor.runtime.zygote import ZYGOTE_MESSAGE, kill_group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Pool", "WorkerRecord", "describe_exit"]

_SIGNALS = frozenset(int(number) for number in signal.Signals)
_encode = msgspec.msgpack.encode
_FORKING = 8
"""Requests that the zygote has at once: enough that it never waits, and few enough that neither side's socket fills
up, on which both would wait for each other."""
_LAST_READS = 64
"""Reads of one pipe at the end; bounded because something that a worker left behind may go on printing."""


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


class WorkerRecord:
    """One worker process."""

    def __init__(
        self, process: bytes, loop: asyncio.AbstractEventLoop, label: str, driver: bytes, *, shared: bool
    ) -> None:
        self.process = process
        self.driver = driver
        """The program that it was started for, which is shown what it prints."""
        self.shared = shared
        self.pid = 0
        """0 until it is forked."""
        self.label = label
        """How its output is marked."""
        self.actors: dict[Any, None] = {}
        """In the order in which they came."""
        self.next_index = 2
        self.ready: asyncio.Future[None] = loop.create_future()
        """Set when the worker has reported; fails when it ends before."""
        self.ended: asyncio.Future[str] = loop.create_future()
        """Why it ended, once it has."""
        self.leaving = False
        self.doomed = False
        """It is to be killed, as soon as it exists."""
        self.cause: str | None = None
        """Why it was killed; None when the kernel's word on its end is the best there is."""

    def take_index(self) -> int:
        """A fresh actor index in this worker."""
        self.next_index += 1
        return self.next_index - 1

    def kill(self, cause: str | None = None) -> None:
        """SIGKILL to it and to all it has started, now or when it is forked.

        Args:
            cause: what `ended` is to tell; None for what the kernel reports.
        """
        if self.ended.done():
            return
        self.doomed = True
        self.cause = self.cause or cause
        if self.pid:
            kill_group(self.pid)


class Pool:
    """Starts, watches and ends workers.

    Args:
        loop: the agent's loop.
        zygote: the socket to the zygote.
        setup: what every worker is told; see `zcactor.runtime.worker.become_worker`.
        output: ``output(stream name, worker, lines)`` for what workers print.
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
        self.loop = loop
        self.by_process: dict[bytes, WorkerRecord] = {}
        self._zygote = zygote
        self._setup = dict(setup)
        self._output = output
        self._ended = ended
        self._lost = lost
        self._by_pid: dict[int, WorkerRecord] = {}
        self._directory = Path(self._setup["directory"])
        self._requests: deque[tuple[WorkerRecord, bytes, list[int]]] = deque()
        self._forking: deque[WorkerRecord] = deque()
        self._outputs: dict[int, LineReader] = {}
        zygote.setblocking(False)
        loop.add_reader(zygote.fileno(), self._from_zygote)

    def start(
        self, label: str, env: Mapping[str, str], driver: bytes, *, shared: bool, process: bytes = b""
    ) -> WorkerRecord:
        """Ask for a worker; `WorkerRecord.ready` tells when it serves.

        Args:
            label: how its output is marked.
            env: further variables of its environment.
            driver: the program that it is for.
            shared: whether it is for several actors.
            process: its name, 16 bytes; by default a new one.

        Raises:
            ValueError: `env` is too large.
            OSError: no descriptors are left.
        """
        record = WorkerRecord(process or ids.token(), self.loop, label, driver, shared=shared)
        request = _encode({**self._setup, "process": record.process, "env": dict(env), "label": label})
        if len(request) > ZYGOTE_MESSAGE:
            raise ValueError(
                f"the environment of an actor has {len(request)} bytes; at most {ZYGOTE_MESSAGE} are possible"
            )
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

    def _request(self) -> None:
        """Send what the zygote can take."""
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
                    return  # its next report brings us back
                self._zygote.setblocking(True)  # one large message, and a zygote that has nothing else to do
                try:
                    socket.send_fds(self._zygote, [request], ends)
                finally:
                    self._zygote.setblocking(False)
            except OSError:  # the zygote is gone, and `_from_zygote` is about to read so
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

    def _end(self, record: WorkerRecord, cause: str) -> None:
        self.by_process.pop(record.process, None)
        cause = record.cause or cause
        if not record.ready.done():
            record.ready.set_exception(RuntimeError(cause))
            record.ready.exception()
        record.ended.set_result(cause)
        self._directory.joinpath(f"{record.process.hex()}.sock").unlink(missing_ok=True)
        self._ended(record)

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
        """Pass on what workers have printed up to now, and read no more."""
        for output in list(self._outputs.values()):
            for _ in range(_LAST_READS):
                if not self._output_readable(output):
                    break
            if output.fd in self._outputs:
                self._close_output(output)

    def kill_all(self, cause: str | None) -> None:
        """SIGKILL to every worker and to all they have started."""
        for record in self.by_process.values():
            record.kill(cause)

    async def wait_all(self, timeout: float) -> None:
        """Wait until no worker is left, at most `timeout` seconds."""
        ending = [record.ended for record in self.by_process.values()]
        if ending:
            await asyncio.wait(ending, timeout=timeout)

    def close(self) -> None:
        """Let the zygote end, and with it every worker that is left. No loop is needed any more."""
        self._zygote.close()
        for output in list(self._outputs.values()):
            output.end()
        self._outputs.clear()
        for _, _, ends in self._requests:
            for fd in ends:
                os.close(fd)
        self._requests.clear()
