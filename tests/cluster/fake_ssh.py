"""An ssh that runs its command here: a shell script, and a file with shell commands for each host that it knows."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping

import zcactor
from tests.cluster.hosts import CAPACITY, Hosts
from tests.driver.programs import ROOT
from zcactor.cluster.ssh_client import Ways

__all__ = ["VERSIONS", "FakeSsh"]

VERSIONS = (zcactor.__version__, f"{sys.version_info[0]}.{sys.version_info[1]}")
"""The versions of zcactor and of Python here."""

SCRIPT = """#!/bin/sh
# Each option has a value.
while [ "${1#-}" != "$1" ]; do shift 2; done
host=$1; shift
if [ ! -e FOLDER/$host ]; then
    echo "ssh: Could not resolve hostname $host: Name or service not known" >&2
    exit 255
fi
. FOLDER/$host
exec "$@"
"""


class FakeSsh:
    """An ssh that knows the hosts of `Hosts`, and more as `host` adds them.

    Args:
        hosts: made-up hosts.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._folder = hosts.directory / "ssh"
        self._folder.mkdir()
        self.command = self._folder / "ssh"
        self.command.write_text(SCRIPT.replace("FOLDER", shlex.quote(str(self._folder))))
        self.command.chmod(0o755)
        for name in "ab":
            self.host(name)

    def ways(self, python: str = sys.executable, patience: float = 120.0) -> Ways:
        """The way by this ssh."""
        return Ways((str(self.command),), python, VERSIONS, patience)

    def host(self, name: str, commands: str = "", environ: Mapping[str, str] | None = None) -> None:
        """Add or change a host.

        Args:
            name: its name; its processes have the environment of ``"a"`` or ``"b"`` by its first letter.
            commands: shell commands at its login.
            environ: further variables.
        """
        variables = {
            **self._hosts.variables(name[0]), "PYTHONPATH": str(ROOT), "ZCACTOR_NUM_GPUS": "0",
            "ZCACTOR_STORE_CAPACITY": str(CAPACITY), "ZCACTOR_SHUTDOWN_TIMEOUT": "20",
            "SSH_CONNECTION": "127.0.0.1 5 127.0.0.1 22", "ZCACTOR_HOST": "127.0.0.1", **(environ or {}),
        }  # fmt: skip
        lines = [f"export {key}={shlex.quote(value)}" for key, value in variables.items()]
        (self._folder / name).write_text("\n".join([*lines, commands, ""]))

    def interpreter(self, host: str, commands: str) -> None:
        """Give a host an interpreter ``fake-python`` of its own, a shell script."""
        folder = self._folder / f"bin-{host}"
        folder.mkdir(exist_ok=True)
        (folder / "fake-python").write_text(f"#!/bin/sh\n{commands}\n")
        (folder / "fake-python").chmod(0o755)
        self.host(host, environ={"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"})
