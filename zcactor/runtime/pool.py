"""The node agent's worker processes: forked by the zygote, watched, and their output passed on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from zcactor.runtime.zygote import ZYGOTE_MESSAGE, kill_group

__all__ = ["Pool", "WorkerRecord", "describe_exit"]

_encode = msgspec.msgpack.encode
_OUTPUT_READ = 64 << 10
_LINE_LIMIT = 16 << 10
"""Bytes of output held back for the end of a line; a longer line is passed on in pieces."""


def describe_exit(status: int | None) -> str:
    """A wait status in words."""
    if status is None:
        return "its process ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hint = " (perhaps the kernel, out of memory)" if number == signal.SIGKILL else ""
        return f"its process was killed by signal {number} ({signal.Signals(number).name}){hint}"
    return f"its process exited with status {os.WEXITSTATUS(status)}"


class WorkerRecord:
    """One worker process."""

    def __init__(self, process: bytes, loop: asyncio.AbstractEventLoop, *, shared: bool) -> None:
        self.process = process
        self.shared = shared
        self.pid = 0
        self.label = "worker"
        self.actors: set[Any] = set()
        self.next_index = 2
        self.started: asyncio.Future[int] = loop.create_future()
        """The pid, once forked."""
        self.ready: asyncio.Future[None] = loop.create_future()
        """Set when the worker has reported; fails when it ends before."""
        self.ended: asyncio.Future[str] = loop.create_future()
        """Why it ended, once it has."""
        self.leaving = False

    def take_index(self) -> int:
        """A fresh actor index in this worker."""
        self.next_index += 1
        return self.next_index - 1

    def kill(self) -> None:
        """SIGKILL to it and to all it has started."""
        if self.pid and not self.ended.done():
            kill_group(self.pid)


class _Output:
    """Lines from one worker's standard output or error."""

    def __init__(self, fd: int, name: str, record: WorkerRecord, emit: Callable[[str, WorkerRecord, list[str]], None]) -> None:
        self.fd = fd
        self._name = name
        self._record = record
        self._emit = emit
        self._rest = b""

    def readable(self) -> bool:
        """Read what is there. False at the end of the output."""
        try:
            data = os.read(self.fd, _OUTPUT_READ)
        except BlockingIOError:
            return True
        *lines, rest = (self._rest + data).split(b"\n")
        if rest and (not data or len(rest) > _LINE_LIMIT):
            lines.append(rest)
            rest = b""
        self._rest = rest
        if lines:
            self._emit(self._name, self._record, [line.decode(errors="replace") for line in lines])
        return bool(data)


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
        self._forking: list[WorkerRecord] = []
        self._outputs: dict[int, _Output] = {}
        zygote.setblocking(False)
        loop.add_reader(zygote.fileno(), self._from_zygote)

    def start(self, env: Mapping[str, str], *, shared: bool) -> WorkerRecord:
        """Ask for a worker; `WorkerRecord.ready` tells when it serves."""
        record = WorkerRecord(secrets.token_bytes(16), self.loop, shared=shared)
        ends = []
        for name in ("stdout", "stderr"):
            read, write = os.pipe()
            os.set_blocking(read, False)
            output = _Output(read, name, record, self._output)
            self._outputs[read] = output
            self.loop.add_reader(read, self._output_readable, output)
            ends.append(write)
        request = _encode({**self._setup, "process": record.process, "env": dict(env)})
        if len(request) > ZYGOTE_MESSAGE:
            raise ValueError(f"the environment of an actor has {len(request)} bytes; at most {ZYGOTE_MESSAGE} are possible")
        self._zygote.setblocking(True)  # a fork takes milliseconds, a full queue of requests drains
        try:
            socket.send_fds(self._zygote, [request], ends)
        finally:
            self._zygote.setblocking(False)
            for fd in ends:
                os.close(fd)
        self._forking.append(record)
        self.by_process[record.process] = record
        return record

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
                return
            report = msgspec.msgpack.decode(message)
            pid = report["pid"]
            if "status" in report:
                record = self._by_pid.pop(pid, None)
                if record is not None:
                    self._end(record, describe_exit(report["status"]))
            else:
                record = self._forking.pop(0)
                record.pid = pid
                self._by_pid[pid] = record
                record.started.set_result(pid)

    def _end(self, record: WorkerRecord, cause: str) -> None:
        self.by_process.pop(record.process, None)
        kill_group(record.pid)  # what it has started and left behind
        if not record.ready.done():
            record.ready.set_exception(RuntimeError(f"a worker ended before it was ready: {cause}"))
            record.ready.exception()
        record.ended.set_result(cause)
        self._ended(record)

    def _output_readable(self, output: _Output) -> None:
        if not output.readable():
            self.loop.remove_reader(output.fd)
            del self._outputs[output.fd]
            os.close(output.fd)

    def drain_output(self) -> None:
        """Pass on what workers have printed up to now."""
        for output in list(self._outputs.values()):
            self._output_readable(output)

    def kill_all(self) -> None:
        """SIGKILL to every worker."""
        for record in self.by_process.values():
            record.kill()

    async def wait_all(self, timeout: float) -> None:  # noqa: ASYNC109 - bounds a shutdown
        """Wait until no worker is left, at most `timeout` seconds."""
        ending = [record.ended for record in self.by_process.values()]
        if ending:
            await asyncio.wait(ending, timeout=timeout)

    def close(self) -> None:
        """Let the zygote end, and with it every worker that is left."""
        with contextlib.suppress(ValueError):
            self.loop.remove_reader(self._zygote.fileno())
        self._zygote.close()
        for fd in self._outputs:
            self.loop.remove_reader(fd)
            os.close(fd)
        self._outputs.clear()
