"""Programs run as a user runs them, in a process of their own, and the things that they leave behind.

Every process that a program starts inherits a mark in its environment. Tests find it by the mark, also under another
parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
MARK = "ZC_TEST_MARK"

PRELUDE = '''
import asyncio, json, os, signal, subprocess, sys, threading, time
import numpy as np
import zcactor as zc

def tell(**facts):
    """One line that the test reads."""
    print("@" + json.dumps(facts), flush=True)

def hang():
    """Block this thread until the process is ended."""
    threading.Event().wait()

class Busy:
    def pid(self): return os.getpid()
    def block(self):
        tell(blocked=os.getpid())
        hang()
    async def wait(self):
        tell(waiting=os.getpid())
        await asyncio.Event().wait()
    def say(self, text, stream="stdout"):
        print(text, file=getattr(sys, stream))
    def child(self, own_session):
        return subprocess.Popen(["sleep", "1000"], start_new_session=own_session).pid
    def leave(self, status): os._exit(status)

'''


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Call ``condition()`` again and again, and return its first true value; fail the test when none comes in time."""
    deadline = time.monotonic() + patience
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"still waiting after {patience:g} s: {what}")
        select.select([], [], [], 0.005)


def processes(mark: str) -> dict[int, str]:
    """The living processes that bear the mark: command lines by process id."""
    found = {}
    needle = f"{MARK}={mark}".encode()
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if needle in (directory / "environ").read_bytes().split(b"\0"):
                state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(directory.name)] = f"{(directory / 'comm').read_text().strip()}: {command[-100:]}"
    return found


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid: int, patience: float = 30.0) -> None:
    """Wait for the end of a process of which only its pid is known, for so many seconds."""
    async with asyncio.timeout(patience):
        while alive(pid):
            await asyncio.sleep(0.01)


class Program:
    """A Python program, started at once.

    As a context manager it ends the program, and removes the things that it has left behind.

    Args:
        source: its text, which follows `PRELUDE`.
        argv: how to run it; ``{file}`` stands for a file with the program.
        env: further variables; None as a value removes one.
        terminal: whether the program has a terminal of its own, with its process group in the foreground.
        runtime_dir: whether it has an ``XDG_RUNTIME_DIR``.
    """

    def __init__(
        self,
        source: str,
        *,
        argv: Sequence[str] = (sys.executable, "{file}"),
        env: Mapping[str, str | None] | None = None,
        terminal: bool = False,
        runtime_dir: bool = False,
        prelude: str = PRELUDE,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.directory = Path(tempfile.mkdtemp(prefix="zct-", dir="/tmp"))
        self.temporary = self.directory / "tmp"
        self.runtime = self.directory / "run"
        for folder in (self.temporary, self.runtime):
            folder.mkdir(mode=0o700)
        self.file = self.directory / "program.py"
        self.file.write_text(prelude + source)
        self.shm = set(os.listdir("/dev/shm"))
        variables: dict[str, str | None] = {
            **os.environ,
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "XDG_RUNTIME_DIR": str(self.runtime) if runtime_dir else None,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": None,
            **(env or {}),
        }
        self.errors = (self.directory / "stderr").open("w+")
        self.terminal: int | None = None
        stdin: int = subprocess.DEVNULL
        if terminal:
            self.terminal, stdin = os.openpty()
        self.process = subprocess.Popen(
            [part.format(file=self.file) for part in argv],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={key: value for key, value in variables.items() if value is not None},
            cwd=self.directory,
            start_new_session=True,
            preexec_fn=_take_terminal if terminal else take_signals,
        )
        if terminal:
            os.close(stdin)
        assert self.process.stdout is not None
        self._out = self.process.stdout.fileno()
        self._rest = b""
        self._read: deque[str] = deque()
        self._ended = False
        self.printed: list[str] = []
        """Lines of standard output up to now, without the lines of ``tell``."""

    @property
    def pid(self) -> int:
        """The process id of the program itself."""
        return self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pid in processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        if error is not None:
            sys.stderr.write(f"--- standard output\n{self.text()}")
            sys.stderr.write(f"--- standard error\n{self.stderr()}")
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()
        if self.terminal is not None:
            os.close(self.terminal)
        shutil.rmtree(self.directory, ignore_errors=True)

    def text(self) -> str:
        """The standard output up to now."""
        return "".join(f"{line}\n" for line in self.printed)

    def stderr(self) -> str:
        """The standard error up to now."""
        return Path(self.errors.name).read_text()

    def _lines(self, patience: float) -> Iterator[str]:
        deadline = time.monotonic() + patience
        while True:
            while self._read:
                yield self._read.popleft()
            if self._ended:
                return
            ready, _, _ = select.select([self._out], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return
            data = os.read(self._out, 1 << 16)
            self._ended = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._read.extend(line.decode(errors="replace") for line in lines)

    def told(self, key: str, patience: float = PATIENCE) -> Any:
        """Wait for a line of ``tell`` with `key`, and return the key's value; earlier lines are dropped."""
        for line in self._lines(patience):
            if self._note(line, key):
                return self._found
        pytest.fail(f"the program did not tell {key!r}; its standard error:\n{self.stderr()}")

    def said(self, text: str, patience: float = PATIENCE) -> None:
        """Wait for a line of the standard output with `text` in it."""
        for line in self._lines(patience):
            self.printed.append(line)
            if text in line:
                return
        pytest.fail(f"the program did not say {text!r}; its standard error:\n{self.stderr()}")

    def _note(self, line: str, key: str) -> bool:
        head, mark, told = line.partition("@{")
        if not mark or (head and not head.startswith("(")):
            self.printed.append(line)
            return False
        facts = json.loads("{" + told)
        self._found = facts.get(key)
        return key in facts

    def status(self, patience: float = PATIENCE) -> int:
        """Wait for the program's end, reading its output; return its exit status, negative for a signal."""
        for line in self._lines(patience):
            self.printed.append(line)
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the program does not end; its standard error:\n{self.stderr()}")

    def left_behind(self) -> dict[str, Any]:
        """The processes, files, unix sockets and shared memory that the program has left; empty when all is clean."""
        files = [path for folder in (self.temporary, self.runtime) for path in sorted(folder.rglob("*"))]
        sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if str(self.directory) in line]
        left = {
            "processes": processes(self.mark),
            "files": [str(path.relative_to(self.directory)) for path in files],
            "sockets": sockets,
            "shared memory": sorted(name for name in set(os.listdir("/dev/shm")) - self.shm if "zcactor" in name),
        }
        return {kind: found for kind, found in left.items() if found}

    def assert_clean(self, patience: float = PATIENCE) -> None:
        """Wait until nothing is left of the program; fail with a list of the rest."""
        deadline = time.monotonic() + patience
        while left := self.left_behind():
            if time.monotonic() > deadline:
                pytest.fail(f"left behind after {patience:g} s: {left}\nstandard error:\n{self.stderr()}")
            select.select([], [], [], 0.005)


def take_signals() -> None:
    """Restore SIGINT and SIGHUP: a parent that runs tests in the background ignores them, and children would, too."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _take_terminal() -> None:
    import fcntl
    import termios

    take_signals()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
