"""Real launchers: their commands with the environment of a made-up user, and the programs that they start."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tests.driver.programs import MARK, ROOT, processes, until

PATIENCE = 120.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
RUN = (sys.executable, "-m", "zcactor", "run", "--timeout", "100", "--grace", "20")
"""The beginning of a run's command, patient enough for a slow machine."""

_NOT_OURS = ("ZCACTOR_", "SLURM_", "PYTHONDONTWRITEBYTECODE")
"""Beginnings of variables that a made-up user does not have. Users keep bytecode, or each start compiles NumPy anew."""

SUM = """
import asyncio, os, sys
import numpy as np
import zcactor as zc

@zc.actor
class Sum:
    def of(self, x): return float(x.sum())

async def main():
    async with zc.init():
        nodes = await zc.nodes()
        actors = [await Sum.options(node=node.node_id).spawn() for node in nodes]
        print(len(nodes), sum([await actor.of(np.ones(100_000)) for actor in actors]), sys.argv[1:], flush=True)

zc.run(main())
sys.exit(int(os.environ["STATUS"]))
"""
"""A program that uses every node."""

WAITING = """
import asyncio
import zcactor as zc

@zc.actor
class Closing:
    def __init__(self, path): self.path = path
    def close(self): open(self.path, "w").close()

async def main():
    async with zc.init():
        nodes = await zc.nodes()
        actors = [
            await Closing.options(node=node.node_id).spawn(f"closed-{number}") for number, node in enumerate(nodes)
        ]
        print("up", len(nodes), flush=True)
        while len(await zc.nodes()) == len(nodes):
            await asyncio.sleep(0.05)
        print("left", len(await zc.nodes()), flush=True)
zc.run(main())
"""
"""A program that waits until a node is lost. Its actors leave files when they are closed in order."""


def unused_ports(count: int) -> list[int]:
    """Ports of the loopback address at which nobody listens."""
    with contextlib.ExitStack() as undo:
        servers = [undo.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


class User:
    """A user with a folder of its own. As a context manager it ends all that its commands have started."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="zce-", dir="/tmp"))
        self.variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(_NOT_OURS)},
            MARK: self.mark,
            "PYTHONPATH": str(ROOT),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
            "ZCACTOR_NUM_GPUS": "0",
            "ZCACTOR_STORE_CAPACITY": str(1 << 26),
            "ZCACTOR_SHUTDOWN_TIMEOUT": "20",
            "STATUS": "0",
        }
        (self.folder / "run").mkdir(mode=0o700)
        for name, text in (("sum.py", SUM), ("waiting.py", WAITING)):
            (self.folder / name).write_text(text)
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        until(self._kill_all, "processes that cannot be killed", PATIENCE)
        for process in self._started:
            process.wait(PATIENCE)
        if error is not None:
            for path in sorted(self.folder.glob("*.out")):
                sys.stderr.write(f"--- {path.name}\n{path.read_text(errors='replace')}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_all(self) -> bool:
        found = {*processes(self.mark), *self._here()}
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    def _here(self) -> list[int]:
        """The pids of processes in the folder. Slurm's step daemons are found by that alone: they write their titles
        over their environment, and ignore SIGTERM."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if Path(os.readlink(directory / "cwd")).is_relative_to(self.folder):
                    found.append(int(directory.name))
        return found

    def start(self, *command: str, name: str = "command", **environ: str) -> subprocess.Popen[str]:
        """Start a command, whose output goes to a file; see `text`."""
        with open(self.folder / f"{name}.out", "w") as file:
            self._started.append(self._popen(command, file, environ))
        return self._started[-1]

    def _popen(self, command: Sequence[str], file: IO[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=self.folder, env={**self.variables, **environ}, stdin=subprocess.DEVNULL, stdout=file,
            stderr=file, text=True, start_new_session=True,
        )  # fmt: skip

    def done(self, *command: str, **environ: str) -> tuple[int, str]:
        """Run a command to its end; return its status and its output."""
        status = self.start(*command, **environ).wait(PATIENCE)
        return status, self.text()

    def done_beside(self, *command: str) -> tuple[int, str]:
        """Run a command to its end while another runs; return its status and its output."""
        status = self.start(*command, name="beside").wait(PATIENCE)
        return status, self.text("beside")

    def text(self, name: str = "command") -> str:
        """The output of a command up to now."""
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def says(self, words: str) -> None:
        """Wait until the command's output has these words."""
        until(lambda: words in self.text(), f"the words {words!r}", PATIENCE)

    def closed(self) -> list[str]:
        """The files that actors have left, in order."""
        return sorted(path.name for path in self.folder.glob("closed-*"))

    def ended(self, environ: Mapping[str, str]) -> None:
        """Wait until no process is left whose environment has these variables."""
        until(lambda: not self.having(environ), "processes to end", PATIENCE)

    def having(self, environ: Mapping[str, str]) -> list[int]:
        """The pids of processes of ours whose environment has these variables."""
        wanted = {f"{name}={value}".encode() for name, value in environ.items()}
        found = []
        for pid in processes(self.mark):
            with contextlib.suppress(OSError):
                if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                    found.append(pid)
        return found
