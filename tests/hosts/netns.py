"""Hosts on one machine: namespaces joined by virtual cables, whose links fail when a test says so.

A `Host` has a network, a process table, a host name and a run directory of its own, so processes of two hosts reach
each other through the network and in no other way. The hosts of a `Network` hang on a switch, which is one more
namespace; two hosts may also be joined directly. Nothing is made in the machine's own network, so networks that exist
side by side may have the same addresses and never meet.

Nothing has to be cleaned up either: each namespace lives as long as its first process, and that process ends when this
one closes a pipe, or dies. With the first process of a process table the kernel kills all others in it. Only where this
process is killed do the hosts' directories stay, in ``/tmp``.

Hosts need root, and the programs of the packages iproute2 and util-linux; `missing` names the absent ones. Packets are
lost by rules of nftables where it works. Otherwise all packets of one direction are sent to an address that no card
has, or a program between two cables loses a part of them (`tests.hosts.lossy`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

__all__ = ["PATIENCE", "Host", "Network", "Program", "has_rules", "missing"]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 30.0
"""Seconds after which the wait for an answer ends: a watchdog, no statement about speed."""
CARD = "eth0"
"""The network card of every host."""
SUBNET = "10.79.0"

_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_NOBODY = "02:00:00:00:00:ff"
"""An address that no card has."""
_NEW_NAMESPACE = ("unshare", "--net", "--uts", "--ipc", "--mount-proc", "--pid", "--fork", "--kill-child")
_FIRST_PROCESS = ("sh", "-c", "trap '' CHLD; exec cat")
"""The first process of a namespace: it lives until its input ends.

It ignores the deaths of its children, so that orphans do not stay as zombies.
"""
_TRIAL = """set -e
ip link add zc0 type veth peer name zc1
ip link add zcb type bridge
tc qdisc add dev zc0 root tbf rate 10mbit burst 32kbit latency 100ms
"""
_TRIAL_OF_RULES = (
    "nft 'table inet zc { chain in { type filter hook input priority 0; numgen random mod 9 < 5 drop; }; }'"
)


@functools.cache
def missing() -> str | None:
    """The reason why this machine makes no hosts, and the remedy; None where it does."""
    if os.geteuid() != 0:
        return "hosts on one machine need root"
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"hosts on one machine need {program}: install {package}"
    trial = subprocess.run([*_NEW_NAMESPACE, "sh", "-c", _TRIAL], capture_output=True, text=True, check=False)
    if trial.returncode:
        return f"this machine makes no hosts: {trial.stderr.strip() or 'unshare failed'}"
    return None


@functools.cache
def has_rules() -> bool:
    """Whether nftables is installed and works."""
    if shutil.which("nft") is None:
        return False
    trial = subprocess.run([*_NEW_NAMESPACE, "sh", "-c", _TRIAL_OF_RULES], capture_output=True, check=False)
    return trial.returncode == 0


def _children(pid: int) -> list[int]:
    """The process ids of a process's children."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


class _Namespace:
    """The namespaces of a host, for the length of the block."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._holder: subprocess.Popen[str] | None = None
        self.pid = 0
        """The process id of its first process, as this process sees it."""

    def __enter__(self) -> Self:
        holder = self._holder = subprocess.Popen(
            [*_NEW_NAMESPACE, *_FIRST_PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # unshare complains there when its child is killed
            text=True,
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        holder.stdin.write("ready\n")
        holder.stdin.flush()
        if holder.stdout.readline() != "ready\n":
            with holder:
                raise OSError(f"no namespace could be made: {holder.stderr.read().strip()}")
        (self.pid,) = _children(holder.pid)
        self.command("hostname", self.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._holder is not None
        with self._holder as holder:  # closes the pipes, and waits
            os.kill(self.pid, signal.SIGKILL)  # the kernel then kills all later processes, before `unshare` ends
            holder.wait(PATIENCE)

    def entering(self, *names: str) -> list[str]:
        """The beginning of a command line that runs inside these namespaces."""
        return ["nsenter", f"--target={self.pid}", *(f"--{name}" for name in names), "--"]

    def command(self, *line: str, given: str | None = None) -> str:
        """Run a program with this network and host name, but with this process's files; return its output.

        Raises:
            OSError: the program fails; the message has its own words.
        """
        done = subprocess.run(
            [*self.entering("net", "uts"), *line], input=given, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise OSError(f"{self.name}: {' '.join(line)} failed: {done.stderr.strip()}")
        return done.stdout


class Host(_Namespace):
    """A host of a `Network`, which makes it.

    Attributes:
        name: its host name.
        address: its IP address.
        directory: the home of its processes; their run directory and their folder of temporary files are inside.
    """

    def __init__(self, name: str, address: str) -> None:
        super().__init__(name)
        self.address = address
        self.directory = Path()
        self.others: list[Host] = []
        """The other hosts on the same network."""
        self.switch: _Namespace | None = None
        """The switch that it hangs on; None on a direct cable."""
        self._rules = 0
        self._misled: Counter[str] = Counter()
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        super().__enter__()
        self.directory = Path(tempfile.mkdtemp(prefix=f"zch-{self.name}-", dir="/tmp"))
        for folder in ("run", "tmp"):
            (self.directory / folder).mkdir(mode=0o700)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        for process in self._started:
            process.wait(PATIENCE)
        shutil.rmtree(self.directory, ignore_errors=True)

    # ---- processes

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of its processes: the variables of this process, with the host's own directories."""
        return {
            **os.environ,
            "HOME": str(self.directory),
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.directory / "tmp"),
            "XDG_RUNTIME_DIR": str(self.directory / "run"),
            **(more or {}),
        }

    def start(self, *line: str, env: Mapping[str, str] | None = None, **settings: Any) -> subprocess.Popen[Any]:
        """Start a program on this host, in its root directory.

        The returned process passes the program's exit status on; `pids` has the program itself.

        Args:
            line: its command line.
            env: further variables.
            settings: as `subprocess.Popen` takes them.
        """
        entering = self.entering("net", "uts", "ipc", "mount", "pid")
        process = subprocess.Popen([*entering, *line], env=self.environment(env), **settings)
        self._started.append(process)
        return process

    def python(self, *arguments: str, env: Mapping[str, str] | None = None) -> Program:
        """Start a Python program that takes commands; it ends with the block."""
        return Program(self, *arguments, env=env)

    def pids(self) -> dict[int, int]:
        """The host's processes except for the first: their ids in this process, by their ids on the host."""
        ours = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for directory in Path("/proc").iterdir():
            if not directory.name.isdigit() or int(directory.name) == self.pid:
                continue
            with contextlib.suppress(OSError):  # the process may have ended meanwhile
                if os.readlink(directory / "ns/pid") != ours:
                    continue
                for line in (directory / "status").read_text().splitlines():
                    if line.startswith("NSpid:"):
                        found[int(line.split()[-1])] = int(directory.name)
        return found

    def kill_all(self) -> None:
        """Send SIGKILL to every process of the host except for the first; the network stays."""
        while pids := [pid for pid in self.pids().values() if not _is_zombie(pid)]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # ---- faults, each until the end of its block

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Take the link down: no packet comes or goes. Behind the switch the other end's link stays up."""
        self.command("ip", "link", "set", CARD, "down")
        try:
            yield
        finally:
            self.command("ip", "link", "set", CARD, "up")

    @contextlib.contextmanager
    def dropping(
        self, direction: Literal["in", "out"], percent: float = 100, *, regular: bool = False, other: Host | None = None
    ) -> Iterator[None]:
        """Lose packets that come in or go out, without notice to either end.

        Args:
            direction: ``"in"`` for packets that come to this host, ``"out"`` for packets that it sends.
            percent: the share of lost packets, in percent, chosen at random.
            regular: lose every n-th packet, instead of packets by chance.
            other: lose only packets from, or to, that host.
        """
        if not has_rules():
            with self._losing(direction, percent, regular=regular, others=self.others if other is None else [other]):
                yield
            return
        hook, card, side = {"in": ("input", "iifname", "saddr"), "out": ("output", "oifname", "daddr")}[direction]
        place = "" if other is None else f"ip {side} {other.address} "
        which = f"numgen {'inc' if regular else 'random'} mod {round(100 / percent)} == 0 " if percent < 100 else ""
        with self._filtering(f"type filter hook {hook} priority 0; {card} {CARD} {place}{which}drop;"):
            yield

    @contextlib.contextmanager
    def _filtering(self, rules: str) -> Iterator[None]:
        self._rules += 1
        table = f"zcactor{self._rules}"
        self.command("nft", f"table inet {table} {{ chain c {{ {rules} }}; }}")
        try:
            yield
        finally:
            self.command("nft", "delete", "table", "inet", table)

    @contextlib.contextmanager
    def guarded(self, *ports: range) -> Iterator[None]:
        """Accept no connection, except at these ports: packets of others are lost without notice. Connections that this
        host has opened work in both directions. This needs nftables."""
        opened = "".join(f"tcp dport {each.start}-{each.stop - 1} accept; " for each in ports)
        accepted = f"ct state established,related accept; iif lo accept; {opened}"
        with self._filtering(f"type filter hook input priority 0; policy drop; {accepted}"):
            yield

    @contextlib.contextmanager
    def _losing(
        self, direction: Literal["in", "out"], percent: float, *, regular: bool, others: Sequence[Host]
    ) -> Iterator[None]:
        """Do the same as `dropping`, without nftables."""
        with contextlib.ExitStack() as stack:
            if percent < 100:
                stack.enter_context(self._lossy(direction, percent, regular=regular))
            else:
                for other in others:
                    sender, receiver = (other, self) if direction == "in" else (self, other)
                    stack.enter_context(sender._misleading(receiver))
            yield

    @contextlib.contextmanager
    def _misleading(self, other: Host) -> Iterator[None]:
        """Send packets for `other` to an address that no card has."""
        if not self._misled[other.address]:
            line = ("neigh", "replace", other.address, "lladdr", _NOBODY, "dev", CARD, "nud", "permanent")
            self.command("ip", *line)
        self._misled[other.address] += 1
        try:
            yield
        finally:
            self._misled[other.address] -= 1
            if not self._misled[other.address]:
                self.command("ip", "neigh", "del", other.address, "dev", CARD)

    @contextlib.contextmanager
    def _lossy(self, direction: Literal["in", "out"], percent: float, *, regular: bool) -> Iterator[None]:
        """Put a program into the cable between this host and the switch."""
        if self.switch is None:
            raise ValueError("there is no place for a program in a cable without a switch")
        self._rules += 1
        outer = f"port-{self.name}" if self._rules == 1 else f"l{self._rules - 1}-{self.name}-1"
        inner = [f"l{self._rules}-{self.name}-{end}" for end in (0, 1)]
        lines = [
            f"link set {outer} nomaster", f"link set {outer} promisc on",
            f"link add {inner[0]} type veth peer name {inner[1]}",
            f"link set {inner[0]} promisc on up", f"link set {inner[1]} master bridge up",
        ]  # fmt: skip
        self.switch.command("ip", "-batch", "-", given="\n".join(lines) + "\n")
        cards = (inner[0], outer) if direction == "in" else (outer, inner[0])
        how = "regular" if regular else "random"
        with subprocess.Popen(
            [*self.switch.entering("net"), sys.executable, "-m", "tests.hosts.lossy", *cards, str(percent), how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as passing:  # fmt: skip
            assert passing.stdin is not None
            assert passing.stdout is not None
            if passing.stdout.readline() != b"ready\n":
                raise OSError(f"no program can be put into the cable of {self.name}")
            try:
                yield
            finally:
                passing.stdin.close()
                passing.wait(PATIENCE)
                lines = [f"link del {inner[0]}", f"link set {outer} promisc off", f"link set {outer} master bridge"]
                self.switch.command("ip", "-batch", "-", given="\n".join(lines) + "\n")
                self._rules -= 1

    @contextlib.contextmanager
    def apart(self, other: Host) -> Iterator[None]:
        """Cut this host and another off from each other; all other hosts reach both."""
        with contextlib.ExitStack() as stack:
            for here, there in ((self, other), (other, self)):
                here.command("ip", "route", "add", "blackhole", f"{there.address}/32")
                stack.callback(here.command, "ip", "route", "del", "blackhole", f"{there.address}/32")
            yield

    @contextlib.contextmanager
    def limited(self, mbit: float) -> Iterator[None]:
        """Send at this rate at most, in millions of bits per second; 0.4 s of packets queue, and further ones are lost.

        The bucket holds the bytes of one tick of the system's clock, 4 ms, and a frame of 16 KiB at the least: with
        less the rate is not reached (tc-tbf(8)).
        """
        rate = f"{round(mbit * 1000)}kbit"
        burst = f"{max(16 << 10, round(mbit * 500))}b"
        self.command("tc", "qdisc", "add", "dev", CARD, "root", "tbf", "rate", rate, "burst", burst, "latency", "400ms")
        try:
            yield
        finally:
            self.command("tc", "qdisc", "del", "dev", CARD, "root")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Network:
    """Hosts that reach each other, for the length of the block: ``a``, ``b``, ... at 10.79.0.1 and on.

    Args:
        count: the number of hosts.
        direct: join two hosts by one cable, without a switch: then each host notices when the other's link goes down.
        offload: let packets of up to 64 KiB pass through the cables, as cards do; without it each packet has one
            segment,
            and a loss of packets means the same as on a real cable.
    """

    def __init__(self, count: int = 2, *, direct: bool = False, offload: bool = True) -> None:
        if direct and count != 2:
            raise ValueError(f"one cable joins two hosts, not {count}")
        self._direct = direct
        self._offload = offload
        self._stack = contextlib.ExitStack()
        self.hosts = [Host(chr(ord("a") + number), f"{SUBNET}.{1 + number}") for number in range(count)]

    def __enter__(self) -> list[Host]:
        with contextlib.ExitStack() as stack:
            for host in self.hosts:
                stack.enter_context(host)
            if self._direct:
                left, right = self.hosts
                left.command("ip", "link", "add", CARD, "type", "veth", "peer", "name", CARD, "netns", str(right.pid))
            else:
                switch = stack.enter_context(_Namespace("switch"))
                lines = ["link add bridge type bridge", "link set bridge up"]
                for host in self.hosts:
                    lines.append(f"link add port-{host.name} type veth peer name {CARD} netns {host.pid}")
                    lines.append(f"link set port-{host.name} master bridge up")
                switch.command("ip", "-batch", "-", given="\n".join(lines) + "\n")
                for host in self.hosts:
                    host.switch = switch
            for host in self.hosts:
                host.others = [other for other in self.hosts if other is not host]
                lines = ["link set lo up", f"address add {host.address}/24 dev {CARD}", f"link set {CARD} up"]
                if not self._offload:
                    lines.append(f"link set {CARD} gso_max_segs 1")
                host.command("ip", "-batch", "-", given="\n".join(lines) + "\n")
            self._stack = stack.pop_all()
        return self.hosts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


class Program:
    """A Python program on a host, which takes commands as lines of JSON and answers each by one; it ends with the
    block.

    A command is an object with ``do``, its arguments and ``id``, which the answer repeats; answers come in any order.
    An answer with ``error`` makes `answer` raise.

    Args:
        host: the host that it runs on.
        arguments: the arguments of the interpreter.
        env: further variables.
    """

    def __init__(self, host: Host, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.host = host
        self._errors = (host.directory / f"stderr-{time.monotonic_ns()}").open("w+b")
        self.process = host.start(
            sys.executable, *arguments, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._rest = b""
        self._sent = 0
        self._answers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        if error is not None:
            sys.stderr.write(f"--- standard error of {self.host.name}\n{self.stderr()}")
        for pipe in (self._stdin, self._stdout, self._errors):
            pipe.close()

    def kill(self) -> None:
        """Send SIGKILL to the program, and wait for its end, but not for its children's. Idempotent."""
        if self.process.poll() is None:
            for pid in _children(self.process.pid):  # the program itself, inside the namespaces
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(PATIENCE)

    def stderr(self) -> str:
        """The program's standard error up to now."""
        return Path(self._errors.name).read_text(errors="replace")

    def send(self, do: str, **arguments: Any) -> int:
        """Give a command; return the number by which `answer` asks for its answer."""
        self._sent += 1
        self._stdin.write(json.dumps({"do": do, "id": self._sent, **arguments}).encode() + b"\n")
        self._stdin.flush()
        return self._sent

    def answer(self, number: int, patience: float = PATIENCE) -> Any:
        """Wait for the answer to a command.

        Raises:
            TimeoutError: no answer comes in time.
            OSError: the program has ended, or the command failed; the message has the program's standard error.
        """
        deadline = time.monotonic() + patience
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while number not in self._answers:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"{self.host.name} says nothing for {patience:g} s:\n{self.stderr()}")
                data = os.read(self._stdout.fileno(), 1 << 16)
                if not data:
                    raise OSError(f"the program at {self.host.name} has ended:\n{self.stderr()}")
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    found = json.loads(line)
                    self._answers[found["id"]] = found
        found = self._answers.pop(number)
        if "error" in found:
            raise OSError(f"{self.host.name} failed: {found['error']}\n{self.stderr()}")
        return found["value"]

    def ask(self, do: str, **arguments: Any) -> Any:
        """Give a command and return its answer. Raises as `answer`."""
        return self.answer(self.send(do, **arguments))
