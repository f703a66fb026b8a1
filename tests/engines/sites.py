"""A cluster with a head, a standby and an etcd on hosts that are namespaces, so that their network can be cut."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.driver.programs import ROOT, alive, until
from tests.engines.beats import Life, lives, twice
from tests.hosts.netns import Host, Network, Program, has_rules, missing

__all__ = ["PATIENCE", "Site", "reason"]

PATIENCE = 120.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
TOKEN = "5a" * 32


def reason() -> str | None:
    """The reason why this machine plays no cuts, and the remedy; None where it does."""
    if missing() is not None:
        return missing()
    if not has_rules():
        return "cuts need nftables that work: install nftables, as root"
    if shutil.which("etcd") is None:
        return "etcd is not installed: make test-engines does that as root on Debian"
    return None


def _child(process: subprocess.Popen[Any]) -> int:
    """The pid, here, of a program that was started on a host."""

    def found() -> int:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    pid: int = until(found, "a program that has started", PATIENCE)
    return pid


class Site:
    """Hosts ``a`` and ``b`` with a head or a standby and a node each, ``c`` and ``d`` with a node, and ``e`` with etcd.

    Args:
        etcds: the number of members of etcd.
        settings: variables of all nodes, without ``ZCACTOR_``.
    """

    def __init__(self, etcds: int = 1, **settings: str) -> None:
        self._network = Network(5)
        self._count = etcds
        self._variables = {
            "ZCACTOR_TOKEN": TOKEN, "ZCACTOR_STORE_CAPACITY": str(1 << 26), "ZCACTOR_NUM_GPUS": "0",
            "ZCACTOR_SPAWN_TIMEOUT": "100", "ZCACTOR_SHUTDOWN_TIMEOUT": "20",
            **{f"ZCACTOR_{name.upper()}": value for name, value in settings.items()},
        }  # fmt: skip
        self.etcds: list[int] = []
        """The pids of etcd's members, here."""
        self._etcd_started = [0] * etcds
        self._outputs = contextlib.ExitStack()
        self._pids: set[int] = set()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.hosts = stack.enter_context(self._network)
            stack.enter_context(self._outputs)
            self.a, self.b, self.c, self.d, self.e = self.hosts
            self.beats = self.e.directory / "beats"
            self.beats.mkdir()
            self.etcds = [self._etcd(number) for number in range(self._count)]
            for number in range(self._count):
                self._serves(number)
            self.start(self.a, head=True)
            with ThreadPoolExecutor() as pool:
                begun = [pool.submit(self.start, host, head=host is self.b) for host in self.hosts[1:-1]]
                for each in begun:
                    each.result()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            for host in self.hosts:
                for log in sorted((host.directory / "state").rglob("*.log")):
                    sys.stderr.write(f"--- {host.name} {log.name}\n{log.read_text(errors='replace')}")
        self._pids.update(pid for host in self.hosts for pid in host.pids().values())
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stack.close()
        until(lambda: not any(map(alive, self._pids)), "processes to end", PATIENCE)

    # ---------------------------------------------------------------- etcd

    @property
    def url(self) -> str:
        """The URL of the cluster."""
        return f"etcd://{','.join(f'{self.e.address}:{2379 + 10 * each}' for each in range(self._count))}/site"

    def _etcd(self, number: int) -> int:
        """Start a member of etcd, with the data that it has; return its pid."""
        places = [f"http://{self.e.address}:{2380 + 10 * each}" for each in range(self._count)]
        client = f"http://{self.e.address}:{2379 + 10 * number}"
        output = self._outputs.enter_context(self._etcd_log(number).open("ab"))
        process = self.e.start(
            "etcd", "--name", f"m{number}", "--data-dir", str(self.e.directory / f"m{number}"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", places[number], "--initial-advertise-peer-urls", places[number],
            "--initial-cluster", ",".join(f"m{each}={place}" for each, place in enumerate(places)),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
        self._etcd_started[number] += 1
        return _child(process)

    def _etcd_log(self, number: int) -> Path:
        return self.e.directory / f"m{number}.log"

    def _serves(self, number: int) -> None:
        log, times = self._etcd_log(number), self._etcd_started[number]
        until(
            lambda: log.read_text(errors="replace").count("serving insecure client requests") >= times
            or log.read_text(errors="replace").count("serving client traffic insecurely") >= times,
            "an etcd that serves", PATIENCE,
        )  # fmt: skip

    def kill_etcd(self, *numbers: int) -> None:
        """Kill members of etcd, and wait for their ends."""
        for number in numbers:
            os.kill(self.etcds[number], signal.SIGKILL)
        until(lambda: not any(alive(self.etcds[number]) for number in numbers), "an etcd that ends", PATIENCE)

    def start_etcd(self, *numbers: int) -> None:
        """Start members again that were killed."""
        for number in numbers:
            self.etcds[number] = self._etcd(number)
        for number in numbers:
            self._serves(number)

    # ---------------------------------------------------------------- the cluster

    @property
    def heads(self) -> str:
        """The addresses of both heads."""
        return f"{self.a.address}:7433,{self.b.address}:7433"

    def zcactor(self, host: Host, *arguments: str) -> tuple[int, str, str]:
        """Run ``zcactor`` on a host; return its status, its output and its errors."""
        process = self._begin(host, *arguments)
        output, errors = process.communicate(timeout=PATIENCE)
        return process.returncode, output, errors

    def _begin(self, host: Host, *arguments: str) -> subprocess.Popen[str]:
        return host.start(
            sys.executable, "-m", "zcactor", *arguments, env=self._environment(host), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _environment(self, host: Host) -> dict[str, str]:
        return {**self._variables, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(host.directory / "state")}

    def join(self, *hosts: Host) -> None:
        """Start a node on each of these hosts, at the same time."""
        with ThreadPoolExecutor() as pool:
            for each in [pool.submit(self.start, host, head=False) for host in hosts]:
                each.result()

    def start(self, host: Host, *, head: bool) -> None:
        """Start a head, or a standby where another head leads, and a node where there is none; or a node alone."""
        arguments = ["start", "--num-cpus", "2"]
        if head:
            arguments += ["--head", "--host", host.address, "--directory", self.url, "--standby"]
        else:
            arguments += ["--address", self.heads]
        status, _, errors = self.zcactor(host, *arguments)
        assert not status, errors
        self._pids.update(host.pids().values())

    @contextlib.contextmanager
    def program(self, host: Host, address: str = "") -> Iterator[Program]:
        """A program on a host, of `tests.engines.far_load`, that has joined."""
        path = str(Path(__file__).with_name("far_load.py"))
        environ = {**self._environment(host), "ZCACTOR_HEAD_TIMEOUT": "60"}
        with host.python(path, address or self.heads, str(self.beats), env=environ) as program:
            program.answer(0, PATIENCE)
            yield program

    def head_pid(self, host: Host) -> int:
        """The pid, here, of the head or standby of a host."""
        records = [json.loads(path.read_text()) for path in (host.directory / "run").rglob("node-*.json")]
        (found,) = [record["pid"] for record in records if record["role"] != "member"]
        return host.pids()[found]

    def log(self, host: Host) -> str:
        """All that the nodes of a host have logged."""
        logs = sorted((host.directory / "state" / "zcactor" / "logs").glob("*.log"))
        return "".join(log.read_text(errors="replace") for log in logs)

    def said(self, host: Host, words: str, times: int = 1, patience: float = PATIENCE) -> None:
        """Wait until the logs of a host have these words so many times."""
        until(lambda: self.log(host).count(words) >= times, f"the words {words!r} of {host.name}", patience)

    # ---------------------------------------------------------------- lives

    def living(self) -> dict[str, list[Life]]:
        """The instances of actors that live at this moment, by name."""
        pids = {host.name: host.pids() for host in self.hosts}
        found: dict[str, list[Life]] = {}
        for life in lives(self.beats):
            if life.pid in pids[life.host] and alive(pids[life.host][life.pid]):
                found.setdefault(life.name, []).append(life)
        return found

    def check_lives(self, names: Sequence[str]) -> None:
        """Check that each of these names has one living instance, and that none has ever had two."""
        counts = {name: len(found) for name, found in self.living().items()}
        assert counts == dict.fromkeys(names, 1), lives(self.beats)
        assert not twice(lives(self.beats))

    def _quiet(self, host: Host) -> bool:
        return not any(map(alive, host.pids().values()))

    def end(self) -> None:
        """End the cluster in order, and check that etcd alone is left."""
        status, _, errors = self.zcactor(self.b, "stop", "--cluster", "--address", self.heads)
        assert not status, errors
        for host in self.hosts[:-1]:
            until(partial(self._quiet, host), f"the processes of {host.name} to end", PATIENCE)
            rules = host.command("nft", "list", "tables")
            assert not rules, rules
