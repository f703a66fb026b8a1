"""The floors of a call and of a process.

Of a call: an echo over a unix socket between two processes, both on uvloop. It has two forms. `Echo` sends bytes and
gets them back: the least cost of a round trip. `FrameEcho` adds the needs of any pipelined request and response: frames
with a length and an id, and a future for each, found by the id; the server splits the received bytes and answers frame
by frame. Frames of one turn of the loop are written together on both sides. ``python -m benchmarks.floors bytes PATH``
and ``... frames PATH`` serve, ``... drive PATH ...`` calls several servers.

Of a process: a Python that has imported NumPy and asyncio, and forks on command. Its children say hello through a pipe
and then do nothing. ``python -m benchmarks.floors fork`` reads commands, a line each.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from struct import Struct
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Self, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


__all__ = ["Driver", "Echo", "Forker", "FrameEcho", "Server"]


# ---- of a call

_HEAD = Struct("<IQ")
"""Length of the whole frame, and its id."""
_IN_FLIGHT = 1000

ProtocolT = TypeVar("ProtocolT", bound=asyncio.Protocol)


class _Connected(asyncio.Protocol):
    """A protocol that keeps its transport."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)


class _EchoServer(_Connected):
    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class _Frames(_Connected):
    """A protocol that splits the received bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def frames(self, data: bytes) -> list[tuple[int, int]]:
        """Length and id of each complete frame."""
        if self._rest:
            data = self._rest + data
        found = []
        position, end = 0, len(data)
        while end - position >= _HEAD.size:
            nbytes, number = _HEAD.unpack_from(data, position)
            if end - position < nbytes:
                break
            found.append((nbytes, number))
            position += nbytes
        self._rest = data[position:]
        return found


class _FrameEchoServer(_Frames):
    def data_received(self, data: bytes) -> None:
        answers = [_HEAD.pack(nbytes, number) + bytes(nbytes - _HEAD.size) for nbytes, number in self.frames(data)]
        self.transport.write(b"".join(answers))


class Echo(_Connected):
    """An echo client with one round trip at a time, of `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._message = bytes(nbytes)
        self._left = 0
        self._waiter: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done when the server is gone."""

    def call(self) -> asyncio.Future[None]:
        """Send the message. The future is done when it has come back."""
        self._left = len(self._message)
        self._waiter = waiter = self._loop.create_future()
        self.transport.write(self._message)
        return waiter

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left <= 0:
            self._waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.closed.set_result(None)


class FrameEcho(_Frames):
    """An echo client with any number of round trips at a time, of `nbytes` each."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._nbytes = nbytes
        self._padding = bytes(nbytes - _HEAD.size)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._unsent: list[bytes] = []

    def call(self) -> asyncio.Future[None]:
        """Send a frame at the end of this turn of the loop. The future is done when its answer has come."""
        number = next(self._numbers)
        self._waiting[number] = waiter = self._loop.create_future()
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(_HEAD.pack(self._nbytes, number) + self._padding)
        return waiter

    def _flush(self) -> None:
        self.transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        for _, number in self.frames(data):
            self._waiting.pop(number).set_result(None)


class Server:
    """An echo server in a process of its own, as a context.

    Args:
        kind: ``"bytes"`` for `Echo`, ``"frames"`` for `FrameEcho`.
    """

    def __init__(self, kind: str) -> None:
        self._directory = Path(mkdtemp(prefix="zcactor-bench-"))
        self.path = self._directory / "echo"
        self.process = _started(kind, str(self.path))

    async def connect(self, make: Callable[[], ProtocolT]) -> ProtocolT:
        """Connect to the server, once it listens."""
        assert self.process.stdout is not None
        self.process.stdout.readline()
        _, protocol = await asyncio.get_running_loop().create_unix_connection(make, str(self.path))
        return protocol

    def listening(self) -> None:
        """Wait until the server listens, instead of `connect`."""
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _end(self.process)
        self.path.unlink(missing_ok=True)
        self._directory.rmdir()


class Driver:
    """A process that calls echo servers on command, as a context."""

    def __init__(self, servers: list[Server], nbytes: int) -> None:
        self.process = _started("drive", str(nbytes), *(str(server.path) for server in servers))
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def begin(self, calls: int) -> None:
        """Start so many calls, to the servers in turn, up to 1,000 at a time."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{calls}\n")
        self.process.stdin.flush()

    def wait(self) -> None:
        """Wait until the calls are done."""
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _end(self.process)


def _started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.floors", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _end(process: subprocess.Popen[str]) -> None:
    with process:  # closes the pipes, and waits
        process.kill()


async def _serve(kind: str, path: str) -> None:
    loop = asyncio.get_running_loop()
    parent_gone = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), parent_gone.set)
    await loop.create_unix_server(_EchoServer if kind == "bytes" else _FrameEchoServer, path)
    print("listening", flush=True)
    await parent_gone.wait()


async def _drive(nbytes: int, paths: list[str]) -> None:
    loop = asyncio.get_running_loop()
    echoes = [(await loop.create_unix_connection(lambda: FrameEcho(nbytes), path))[1] for path in paths]
    print("connected", flush=True)
    for line in sys.stdin:  # blocks the loop, which has no other work
        before = time.perf_counter()
        for start in range(0, int(line), _IN_FLIGHT):
            stop = min(start + _IN_FLIGHT, int(line))
            await asyncio.gather(*(echoes[i % len(echoes)].call() for i in range(start, stop)))
        print(time.perf_counter() - before, flush=True)


def _echo(kind: str, *arguments: str) -> None:
    """Serve or drive until the parent is gone."""
    import uvloop  # not in a process that forks

    uvloop.run(_drive(int(arguments[0]), list(arguments[1:])) if kind == "drive" else _serve(kind, arguments[0]))


# ---- of a process


class Forker:
    """The forking process, as a context."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.floors", "fork"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.fork(0)  # waits until it is up

    def _ask(self, command: str) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def fork(self, count: int) -> list[int]:
        """Fork so many children. Returns their pids when all have said hello."""
        return [int(pid) for pid in self._ask(f"fork {count}")]

    def kill(self) -> None:
        """Kill all children, and wait for their end."""
        self._ask("kill")

    def timed_fork(self, count: int) -> float:
        """The seconds of a `fork`."""
        before = time.perf_counter()
        self.fork(count)
        return time.perf_counter() - before

    def timed_kill(self) -> float:
        """The seconds of a `kill`."""
        before = time.perf_counter()
        self.kill()
        return time.perf_counter() - before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        with self.process:
            self.process.kill()


def _forked(hello: int) -> int:
    pid = os.fork()
    if pid == 0:
        os.write(hello, b"h")
        while True:
            signal.pause()
    return pid


def _fork() -> None:
    """Execute commands until the parent is gone."""
    import asyncio  # noqa: F401 - the children share it

    import numpy  # noqa: F401

    read_end, write_end = os.pipe()
    children: list[int] = []
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "fork":
            fresh = [_forked(write_end) for _ in range(int(arguments[0]))]
            for _ in fresh:
                os.read(read_end, 1)
            children += fresh
            print(*fresh, flush=True)
        else:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            for pid in children:
                os.waitpid(pid, 0)
            children.clear()
            print(flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "fork":
        _fork()
    else:
        _echo(*sys.argv[1:])
