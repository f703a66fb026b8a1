"""Made-up hosts on this machine: each has a folder for run directories of its own, so they reach each other over TCP.

Every process that is started here inherits a mark in its environment. Tests find it by the mark, also under another
parent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.driver.programs import MARK, ROOT, Program, processes, until
from zcactor.cluster.daemon import EtcdState, KeptState, StartedNode, start_node, stop_nodes
from zcactor.cluster.records import NodeFile
from zcactor.config import Config
from zcactor.token import default_file

__all__ = ["CLOSING_ACTOR", "GRACE", "KEEPER", "Hosts", "beside", "stop"]

GRACE = 5.0
"""Seconds that actors have to end."""

CAPACITY = 1 << 26
"""Bytes of each process's arena: small, because the machine may have little memory."""
KEEPER = """
@zc.actor
class Keeper:
    def __init__(self): self.count = 0
    def add(self): self.count += 1; return self.count
    def pid(self): return os.getpid()
"""
"""The source of an actor that counts."""
CLOSING_ACTOR = """
@zc.actor
class Closing:
    def __init__(self, path): self.path = path
    def pid(self): return os.getpid()
    def close(self): open(self.path, "w").close()

"""
"""A part of programs: an actor that leaves a file when it is closed in order."""


class Hosts:
    """Hosts ``"a"`` and ``"b"`` of one user with one configuration.

    As a context manager they end all their processes.
    """

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.directory = Path(tempfile.mkdtemp(prefix="zct-", dir="/tmp"))
        for host in "ab":
            (self.directory / host).mkdir(mode=0o700)
        self._shm = set(os.listdir("/dev/shm"))
        self._started: list[StartedNode] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for node in self._started:  # these come first, so that they can be reaped
            node.control.close()
            node.process.kill()
            node.process.wait()
        until(self._kill_all, "processes that cannot be killed")
        if error is not None:
            for log in sorted(self.logs()):
                sys.stderr.write(f"--- {log}\n{log.read_text()}")
        shutil.rmtree(self.directory, ignore_errors=True)

    def _kill_all(self) -> bool:
        found = processes(self.mark)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    def run_directories(self, host: str) -> Path:
        """The folder of a host's run directories."""
        return self.directory / host

    def logs(self) -> list[Path]:
        """The log files of nodes."""
        return list((self.directory / "state" / "zcactor" / "logs").glob("*"))

    @property
    def token_file(self) -> Path:
        """The user's token file."""
        return default_file(self.variables("a"))

    def variables(self, host: str) -> dict[str, str]:
        """The environment variables of a host."""
        return {
            MARK: self.mark,
            "XDG_CONFIG_HOME": str(self.directory / "config"),
            "XDG_STATE_HOME": str(self.directory / "state"),
            "XDG_RUNTIME_DIR": str(self.run_directories(host)),
        }

    @contextlib.contextmanager
    def on(self, host: str, environ: Mapping[str, str] | None = None) -> Iterator[None]:
        """Give this process the environment of `host` inside the block, without any of this machine's own settings."""
        before = dict(os.environ)
        for name in before:
            if name.startswith("ZCACTOR_"):
                del os.environ[name]
        os.environ.update(self.variables(host))
        os.environ.update(environ or {})
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def start(
        self, where: str = "a", head: StartedNode | str | None = None, *, environ: Mapping[str, str] | None = None,
        own_host: bool = False, port: int = 0, resources: Mapping[str, float] | None = None, stays: bool = True,
        state: KeptState | EtcdState | None = None, **settings: Any,
    ) -> StartedNode:  # fmt: skip
        """Start a node on the host `where`, a head where `head` is None; its agent is a child of this process."""
        config = Config(**{"num_cpus": 2, "num_gpus": 0, "store_capacity": CAPACITY, **settings})
        address = head.record.address if isinstance(head, StartedNode) else head
        with self.on(where, environ):
            node = start_node(
                config, own_host=own_host, head=address, port=port, resources=resources or {}, stays=stays,
                state=state,
            )  # fmt: skip
        self._started.extend(node.all)
        return node

    def zcactor(
        self, *arguments: str, host: str = "a", environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python -m zcactor`` with `arguments`."""
        with self.on(host, environ):
            return subprocess.run(
                [sys.executable, "-m", "zcactor", *arguments],
                cwd=self.directory,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=50,
            )

    def program(
        self, source: str, address: str = "", host: str = "a", argv: Sequence[str] = (sys.executable, "{file}")
    ) -> Program:
        """Start a program on `host`; its variable ``ADDRESS`` is `address`."""
        with self.on(host):
            return Program(f"ADDRESS = {address!r}\n{source}", argv=argv, env=self.variables(host))

    def processes(self) -> dict[int, str]:
        """The living processes on every host: command lines by process id."""
        return processes(self.mark)

    def processes_of(self, host: str) -> list[int]:
        """The ids of the living processes on `host`."""
        place = f"XDG_RUNTIME_DIR={self.run_directories(host)}".encode()
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):  # the process may have ended meanwhile
                if place in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def left(self, host: str) -> dict[str, Any]:
        """Files, sockets and shared memory that `host` has left; empty when all is clean."""
        base = self.run_directories(host)
        left = {
            "files": sorted(str(path.relative_to(base)) for path in base.rglob("*")),
            "sockets": [line for line in Path("/proc/net/unix").read_text().splitlines() if f"{base}/" in line],
            "shared memory": sorted(name for name in set(os.listdir("/dev/shm")) - self._shm if "zcactor" in name),
        }
        return {kind: found for kind, found in left.items() if found}

    def assert_clean(self, *hosts: str) -> None:
        """Wait until no process lives, and check that nothing is left on `hosts`."""
        until(lambda: not self.processes(), "processes to end")
        left = {host: found for host in hosts if (found := self.left(host))}
        assert not left, left


def stop(hosts: Hosts, host: str = "a") -> list[tuple[NodeFile, bool]]:
    """Stop the nodes of a host. Returns the record of each, and whether it ended in order."""
    return stop_nodes(GRACE, hosts.run_directories(host))


def beside(head: StartedNode) -> StartedNode:
    """The node beside a head."""
    assert head.member is not None
    return head.member
