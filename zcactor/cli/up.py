"""``zcactor up`` and ``zcactor down``: nodes on several hosts, by the system's ssh."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import sys
from typing import TYPE_CHECKING, Final

import click

import zcactor
from zcactor.cli.nodes import custom_resources, fail
from zcactor.errors import AuthenticationError
from zcactor.token import default_file, find_token, make_token_file

if TYPE_CHECKING:
    from zcactor.cluster.ssh_client import Ways

__all__ = ["down", "up"]

_HOST: Final = re.compile(r"[^\s\x00-\x1f-][^\s\x00-\x1f]*")
"""A name of a host: ssh takes one with a dash in front for an option."""

_hosts_option = click.option("--hosts", required=True, metavar="A,B,C", help="Hosts, as ssh takes them.")
_python_option = click.option(
    "--python", default=sys.executable, metavar="PATH", help="Interpreter on each host.  [the path of this one]"
)
_ssh_option = click.option(
    "--ssh", envvar="ZCACTOR_SSH", default="ssh", metavar="COMMAND", show_default=True, show_envvar=True,
    help="Command for ssh, with its options.",
)  # fmt: skip


def _names(text: str) -> list[str]:
    hosts = [name.strip() for name in text.split(",")]
    for name in hosts:
        if not _HOST.fullmatch(name):
            raise fail(
                f"--hosts is {text!r}, and {name!r} is no name of a host: give names with commas between them", 2
            )
        if hosts.count(name) > 1:
            raise fail(f"--hosts names {name} twice: a host has one node", 2)
    return hosts


def _ways(ssh: str, python: str) -> Ways:
    from zcactor.cluster.ssh_client import Ways

    try:
        command = shlex.split(ssh)
    except ValueError as error:
        raise fail(f"--ssh is {ssh!r}, which no shell could read: {error}", 2) from error
    if not command:
        raise fail("--ssh is empty: give a command, ssh -F file for instance", 2)
    if not python:
        raise fail("--python is empty: give the path of an interpreter", 2)
    if shutil.which(command[0]) is None:
        raise fail(f"there is no {command[0]}: install openssh-client, or name a command by --ssh or ZCACTOR_SSH")
    return Ways(tuple(command), python, (zcactor.__version__, f"{sys.version_info[0]}.{sys.version_info[1]}"))


def _tell(line: str) -> None:
    click.echo(f"zcactor: {line}")


@click.command()
@_hosts_option
@click.option("--head-host", metavar="HOST", help="The one with the head.  [the first]")
@_python_option
@_ssh_option
@click.option("--num-cpus", type=click.IntRange(min=0), help="CPUs that actors may reserve, on each host.")
@click.option("--resources", metavar="JSON", help="Custom resources of each host.")
def up(
    hosts: str, head_host: str | None, python: str, ssh: str, num_cpus: int | None, resources: str | None
) -> None:  # fmt: skip
    """Start a cluster on several hosts, by ssh.

    The head is started first, then a member on each other host, all at once. Either all nodes start or none stays: the
    exit status is 1 then, with a message for each host that failed. It is 2 for a wrong option. The cluster's token is
    this user's, which is made where there is none; it goes to the hosts through ssh's input.
    """
    names = _names(hosts)
    head_host = names[0] if head_host is None else head_host
    if head_host not in names:
        raise fail(f"--head-host is {head_host!r}, which --hosts does not name: {hosts}", 2)
    custom = custom_resources(resources)
    ways = _ways(ssh, python)
    from zcactor.cluster.ssh_client import HostsFailed, bring_up
    from zcactor.cluster.ssh_remote import FarOrder

    order = FarOrder("start", token=_token(), num_cpus=num_cpus, resources=custom)
    try:
        head = asyncio.run(bring_up(names, head_host, ways, order, _tell))
    except HostsFailed as error:
        raise _failed(error) from error
    click.echo(f'  programs       zc.init("{head}")')
    click.echo(f"  to end it      zcactor down --hosts {','.join(names)}")


@click.command()
@_hosts_option
@_python_option
@_ssh_option
def down(hosts: str, python: str, ssh: str) -> None:
    """End all your nodes on several hosts, by ssh: 'zcactor stop' on each of them.

    The exit status is 1 when a host failed, and 2 for a wrong option.
    """
    names = _names(hosts)
    ways = _ways(ssh, python)
    from zcactor.cluster.ssh_client import HostsFailed, take_down

    try:
        asyncio.run(take_down(names, ways, _tell))
    except HostsFailed as error:
        raise _failed(error) from error


def _token() -> str:
    """The token of this user's clusters, made where there is none."""
    try:
        found = find_token(None, os.environ)
        if found is not None:
            return found[0].hex()
        path = default_file(os.environ)
        token = make_token_file(path)
    except (AuthenticationError, OSError) as error:
        raise fail(error) from error
    _tell(f"a token is in {path}, where programs on this host find it")
    return token.hex()


def _failed(error: Exception) -> click.exceptions.Exit:
    for line in str(error).splitlines():
        click.echo(line if line.startswith(" ") else f"zcactor: {line}", err=True)
    return click.exceptions.Exit(1)
