"""Two hosts with an attacker between them: three namespaces in a row, joined by virtual cables."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.hosts.netns import CARD, Host, Program

__all__ = ["Hosts", "cluster", "missing", "unattended"]

TOKEN = {"ZCACTOR_TOKEN": "5a" * 32, "ZCACTOR_STORE_CAPACITY": str(1 << 28)}
PORT = 7433
_TRIAL = ("unshare", "--net", "--uts", "--ipc", "--mount-proc", "--pid", "--fork", "--kill-child")


@functools.cache
def missing() -> str | None:
    """The reason why this machine makes no such hosts, and the remedy; None where it does."""
    if os.geteuid() != 0:
        return "hosts on one machine need root"
    for program, package in {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}.items():
        if shutil.which(program) is None:
            return f"hosts on one machine need {program}: install {package}"
    line = [*_TRIAL, "ip", "link", "add", "zc0", "type", "veth", "peer", "name", "zc1"]
    trial = subprocess.run(line, capture_output=True, text=True, check=False)
    return f"this machine makes no hosts: {trial.stderr.strip()}" if trial.returncode else None


@dataclass
class Hosts:
    """The two hosts, and the program between them."""

    a: Host
    b: Host
    between: Program


@contextlib.contextmanager
def unattended() -> Iterator[Hosts]:
    """Make two hosts, and a program between them that passes every packet on unchanged."""
    with contextlib.ExitStack() as stack:
        a, b, middle = (
            stack.enter_context(Host(name, f"10.79.0.{i}")) for i, name in enumerate(("a", "b", "between"), 1)
        )
        lines = []
        for card, host in (("left", a), ("right", b)):
            lines += [f"link add {card} type veth peer name {CARD} netns {host.pid}", f"link set {card} up"]
        middle.command("ip", "-batch", "-", given="\n".join(lines) + "\n")
        for host in (a, b):
            lines = ["link set lo up", f"address add {host.address}/24 dev {CARD}", f"link set {CARD} up"]
            lines.append(f"link set {CARD} gso_max_segs 1")  # each packet is one segment, and is passed on whole
            host.command("ip", "-batch", "-", given="\n".join(lines) + "\n")
        between = stack.enter_context(middle.python("-m", "tests.attacks.between"))
        between.ask("told")  # wait until the program answers
        yield Hosts(a, b, between)


def zcactor(host: Host, *arguments: str, env: Mapping[str, str]) -> None:
    """Run the `zcactor` command on a host."""
    line = [sys.executable, "-m", "zcactor", *arguments]
    with host.start(*line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


@contextlib.contextmanager
def cluster(more: Mapping[str, str]) -> Iterator[tuple[Hosts, str]]:
    """Start a node on each host, the head's on the first; yield the hosts and the head's address.

    `more` are environment variables of all processes.
    """
    env = {**TOKEN, **more}
    with unattended() as hosts:
        head = f"{hosts.a.address}:{PORT}"
        zcactor(hosts.a, "start", "--head", "--host", hosts.a.address, "--port", str(PORT), "--num-cpus", "2", env=env)
        zcactor(hosts.b, "start", "--address", head, "--num-cpus", "2", env=env)
        yield hosts, head
