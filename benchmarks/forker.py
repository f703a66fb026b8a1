"""The floor of a process: a Python that has imported NumPy and asyncio, and forks on command.

Its children say hello through a pipe and then do nothing. ``python -m benchmarks.forker`` reads commands, a line each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Forker"]


class Forker:
    """The forking process, as a context."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.forker"]
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


def _fork(hello: int) -> int:
    pid = os.fork()
    if pid == 0:
        os.write(hello, b"h")
        while True:
            signal.pause()
    return pid


def main() -> None:
    """Execute commands until the parent is gone."""
    import asyncio  # noqa: F401 - the children share it

    import numpy  # noqa: F401

    read_end, write_end = os.pipe()
    children: list[int] = []
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "fork":
            fresh = [_fork(write_end) for _ in range(int(arguments[0]))]
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
    main()
