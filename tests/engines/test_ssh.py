"""Nodes brought up by the real ssh, to real sshd on hosts that are namespaces of this machine.

`make test-engines` installs OpenSSH.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.driver.programs import ROOT, until
from tests.engines.launching import PATIENCE, SUM
from tests.hosts.netns import Host, Network, missing

SSHD = "/usr/sbin/sshd"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.skipif(
        not (Path(SSHD).exists() and shutil.which("ssh") and shutil.which("ssh-keygen")),
        reason="OpenSSH is not installed: make test-engines does that as root on Debian",
    ),
]

SERVER = """
ListenAddress {address}
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/authorized
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
SetEnv {variables}
"""
CLIENT = """
Host {name}
    HostName {address}
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    GlobalKnownHostsFile /dev/null
"""


PATIENT = "-o ConnectTimeout=90 -o ServerAliveInterval=60"
"""Options of ssh for a slow machine."""


class Site:
    """Hosts ``a`` and ``b`` with an sshd each, and ``c``, where the commands are given.

    Args:
        hosts: the three hosts.
    """

    def __init__(self, hosts: list[Host]) -> None:
        self.a, self.b, self.c = hosts
        self.folder = self.c.directory
        self.config = self.folder / "ssh_config"
        self._key(self.folder / "key")
        known, config = [], []
        for host in (self.a, self.b):
            public = self._key(host.directory / "host-key")
            (host.directory / "authorized").write_text((self.folder / "key.pub").read_text())
            known.append(f"{host.address} {public}")
            config.append(CLIENT.format(name=host.name, address=host.address, folder=self.folder))
            self._serve(host)
        (self.folder / "known").write_text("".join(known))
        self.config.write_text("".join(config))

    def _key(self, path: Path) -> str:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        return path.with_name(f"{path.name}.pub").read_text()

    def _serve(self, host: Host) -> None:
        variables = {
            "HOME": host.directory, "PYTHONPATH": ROOT, "XDG_RUNTIME_DIR": host.directory / "run",
            "TMPDIR": host.directory / "tmp", "XDG_STATE_HOME": host.directory / "state", "ZCACTOR_NUM_GPUS": 0,
            "ZCACTOR_STORE_CAPACITY": 1 << 26, "ZCACTOR_SHUTDOWN_TIMEOUT": 20,
        }  # fmt: skip
        settings = host.directory / "sshd_config"
        settings.write_text(
            SERVER.format(
                address=host.address, folder=host.directory,
                variables=" ".join(f"{name}={value}" for name, value in variables.items()),
            )
        )  # fmt: skip
        log = host.directory / "sshd.log"
        host.start(
            "sh", "-c", 'mount -t tmpfs tmpfs /run; mkdir /run/sshd; exec "$@"', "sh",
            SSHD, "-D", "-E", str(log), "-f", str(settings), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        until(lambda: log.exists() and "Server listening" in log.read_text(), "sshd", PATIENCE)

    def run(self, *command: str, **environ: str) -> tuple[int, str]:
        """Run a command on ``c``. Returns its status, and all that it prints."""
        process: subprocess.Popen[Any] = self.c.start(
            *command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        with process:
            output, _ = process.communicate(timeout=PATIENCE)
            return process.returncode, output

    def zcactor(self, *arguments: str, ssh: str = PATIENT) -> tuple[int, str]:
        """Run ``zcactor`` on ``c``, with these options of ssh."""
        command = f"ssh {ssh} -F {shlex.quote(str(self.config))}"
        return self.run(sys.executable, "-m", "zcactor", *arguments, ZCACTOR_SSH=command)

    def quiet(self) -> bool:
        """Whether no process of zcactor is left on ``a`` and ``b``, and no run directory."""
        for host in (self.a, self.b):
            for pid in host.pids().values():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    if b"zcactor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return False
            if any((host.directory / "run").iterdir()):
                return False
        return True


@pytest.fixture
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack.enter_context(Network(3)))


def test_up_and_down(site: Site) -> None:
    status, output = site.zcactor("up", "--hosts", "a,b", "--num-cpus", "2", "--resources", '{"tape": 1}')
    assert status == 0, output
    head = f"{site.a.address}:7433"
    assert f"zcactor: a: head ready at {head} (cluster " in output
    assert f"zcactor: b: member ready at {site.b.address}:" in output
    assert f'zc.init("{head}")' in output
    (site.folder / "sum.py").write_text(SUM)
    place = {"ZCACTOR_ADDRESS": head, "STATUS": "4", "ZCACTOR_STORE_CAPACITY": str(1 << 26)}
    status, output = site.run(sys.executable, str(site.folder / "sum.py"), **place)
    assert (status, output) == (4, "2 200000.0 []\n")
    status, output = site.zcactor("down", "--hosts", "a,b")
    assert status == 0, output
    assert f"zcactor: a: the head at {head} has ended\n" in output
    assert f"zcactor: b: the member at {site.b.address}:" in output
    until(site.quiet, "nodes to end", PATIENCE)


def test_the_head_on_another_host(site: Site) -> None:
    status, output = site.zcactor("up", "--hosts", "a,b", "--head-host", "b")
    assert status == 0, output
    assert f"zcactor: b: head ready at {site.b.address}:7433" in output
    status, output = site.zcactor("up", "--hosts", "a,b", "--head-host", "b")  # a second one
    assert status == 1, output
    assert "zcactor: b: " in output and "7433" in output
    status, output = site.zcactor("down", "--hosts", "b,a")
    assert status == 0, output
    until(site.quiet, "nodes to end", PATIENCE)


def test_a_host_key_that_has_changed(site: Site) -> None:
    known = site.folder / "known"
    first, second = known.read_text().splitlines()
    known.write_text(f"{first}\n{second.split()[0]} {' '.join(first.split()[1:])}\n")
    status, output = site.zcactor("up", "--hosts", "a,b")
    assert status == 1
    assert "zcactor: b: ssh failed\n" in output
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in output
    assert "zcactor: a: " not in output
    until(site.quiet, "all processes to end", PATIENCE)


def test_a_key_that_is_not_taken(site: Site) -> None:
    (site.b.directory / "authorized").write_text("")
    status, output = site.zcactor("up", "--hosts", "b")
    assert status == 1
    assert "zcactor: b: ssh failed\n  root@" in output and "Permission denied (publickey" in output


def test_a_host_that_refuses(site: Site) -> None:
    status, output = site.zcactor("up", "--hosts", "a,b", ssh=f"{PATIENT} -p 9")
    assert status == 1
    for host in (site.a, site.b):
        assert (
            f"zcactor: {host.name}: ssh failed\n  ssh: connect to host {host.address} port 9: Connection ref" in output
        )
    until(site.quiet, "all processes to end", PATIENCE)


def test_a_host_that_is_not_there(site: Site) -> None:
    with site.b.down():
        status, output = site.zcactor("up", "--hosts", "a,b")  # the kernel asks for its card for some seconds
        assert status == 1
        assert "zcactor: b: ssh failed\n  ssh: connect to host 10.79.0.2 port 22: " in output
        status, output = site.zcactor("down", "--hosts", "a,b")
        assert status == 1
        assert "zcactor: b: ssh failed" in output and "zcactor: a: no node of yours runs there" in output
    until(site.quiet, "all processes to end", PATIENCE)


SILENT = "import socket, sys; s = socket.create_server((sys.argv[1], 2222)); print('up', flush=True); sys.stdin.read()"


def test_a_host_that_hangs(site: Site) -> None:
    """Its kernel takes connections, and nobody says a word."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with site.b.start(sys.executable, "-c", SILENT, site.b.address, **pipes) as silent:
        assert silent.stdout is not None
        assert silent.stdout.readline() == b"up\n"
        status, output = site.zcactor("up", "--hosts", "b", ssh="-p 2222 -o ConnectTimeout=1")
        silent.communicate()
    assert status == 1
    assert "zcactor: b: ssh failed\n  " in output and "timed out" in output


def test_a_host_without_that_interpreter(site: Site) -> None:
    status, output = site.zcactor("up", "--hosts", "a,b", "--python", "/opt/no/python")
    assert status == 1
    for name in "ab":
        assert f"zcactor: {name}: there is no /opt/no/python: name the interpreter of that host by --python" in output


def test_a_member_that_fails(site: Site) -> None:
    """Its settings are wrong."""
    (site.b.directory / ".config" / "zcactor").mkdir(parents=True)
    (site.b.directory / ".config" / "zcactor" / "zcactor.toml").write_text("eager_limit = 1\n")
    status, output = site.zcactor("up", "--hosts", "a,b")
    assert status == 1
    assert "zcactor: b: " in output and "eager_limit" in output
    assert "zcactor: a: its node was ended again" in output
    until(site.quiet, "the head to end", PATIENCE)
