"""A real etcd: one member or three on loopback ports, with TLS or without."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from functools import partial
from typing import Any

import pytest

from tests.driver.programs import until
from tests.engines.launching import PATIENCE, User, unused_ports
from tests.transport.certificates import Authority


def missing() -> str | None:
    """The reason why no etcd can run here; None where one can."""
    if importlib.util.find_spec("aiohttp") is None:
        return "aiohttp is not installed: pip install 'zcactor[etcd]'"
    return None if shutil.which("etcd") else "etcd is not installed: make test-engines does that as root on Debian"


class Etcd:
    """The members of one etcd.

    Args:
        user: its owner, whose end is theirs.
        count: the number of members.
        authority: of the certificates for clients; None for traffic without TLS.
        arguments: of each member.
    """

    def __init__(self, user: User, count: int = 1, authority: Authority | None = None, *arguments: str) -> None:
        reason = missing()
        if reason is not None:
            pytest.skip(reason)
        path = str(shutil.which("etcd"))
        ports = unused_ports(2 * count)
        self.folder = user.folder
        self.ports, self.peer_ports = ports[:count], ports[count:]
        self._user = user
        self._scheme = "http" if authority is None else "https"
        self._context: ssl.SSLContext | None = None
        members = [f"m{number}=http://127.0.0.1:{port}" for number, port in enumerate(self.peer_ports)]
        tls: tuple[str, ...] = ()
        if authority is not None:
            files = authority.folder(user.folder / "tls", address="127.0.0.1")
            cert, key, ca = (str(files / f"{name}.pem") for name in ("cert", "key", "ca"))
            self._context = ssl.create_default_context(cafile=ca)
            self._context.load_cert_chain(cert, key)
            tls = "--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", ca
        self._commands = [
            (
                path, "--name", f"m{number}", "--data-dir", str(self.folder / f"m{number}"),
                "--listen-client-urls", f"{self._scheme}://127.0.0.1:{port}",
                "--advertise-client-urls", f"{self._scheme}://127.0.0.1:{port}",
                "--listen-peer-urls", f"http://127.0.0.1:{peer}",
                "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
                "--initial-cluster", ",".join(members), *tls, *arguments,
            )
            for number, (port, peer) in enumerate(zip(self.ports, self.peer_ports, strict=True))
        ]  # fmt: skip
        self.members: list[subprocess.Popen[str]] = []
        self.start()

    def start(self) -> None:
        """Start all members, and wait until each serves."""
        self.members = [self._user.start(*command, name=f"m{number}") for number, command in enumerate(self._commands)]
        for port in self.ports:
            until(partial(self._serves, port), "an etcd that serves", PATIENCE)

    def kill(self, *numbers: int) -> None:
        """Kill members, and wait for their ends."""
        for number in numbers:
            self.members[number].kill()
            self.members[number].wait(PATIENCE)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all members."""
        for member in self.members:
            member.send_signal(number)

    def _serves(self, port: int) -> bool:
        try:
            return "header" in self.call("kv/range", {"key": "YQ=="}, port)
        except urllib.error.HTTPError as error:
            return "user name is empty" in error.read().decode()
        except (OSError, ValueError):
            return False

    def url(self, name: str) -> str:
        """The URL of a cluster."""
        return f"etcd://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{name}"

    def call(self, path: str, body: dict[str, Any], port: int | None = None) -> Any:
        """Send a request past the package's own client."""
        request = urllib.request.Request(
            f"{self._scheme}://127.0.0.1:{port or self.ports[0]}/v3/{path}", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=PATIENCE, context=self._context) as answer:
            return json.load(answer)
