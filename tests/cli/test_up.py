"""The options of ``zcactor up`` and ``zcactor down``, and the output of hosts that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from zcactor.cli.main import app
from zcactor.token import default_file, read_token_file


def run(*arguments: str, **environ: str) -> Result:
    result = CliRunner(env=environ).invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def fails(tmp_path: Path) -> str:
    """A command for ssh that prints its host, and fails."""
    command = tmp_path / "an ssh"
    command.write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift 2; done\necho "no way to $1" >&2\nexit 255\n')
    command.chmod(0o755)
    return f"'{command}' -F none"


@pytest.mark.parametrize("command", ["up", "down"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", ""), "--hosts is '', and '' is no name of a host"),
        (("--hosts", "a,,b"), "--hosts is 'a,,b', and '' is no name of a host"),
        (("--hosts", "a,-oProxyCommand=x"), "'-oProxyCommand=x' is no name of a host"),
        (("--hosts", "a b"), "'a b' is no name of a host"),
        (("--hosts", "a,b,a"), "--hosts names a twice: a host has one node"),
        (("--hosts", "a, a"), "--hosts names a twice"),
        (("--hosts", "a", "--ssh", "ssh 'x"), '--ssh is "ssh \'x", which no shell could read'),
        (("--hosts", "a", "--ssh", " "), "--ssh is empty"),
        (("--hosts", "a", "--python", ""), "--python is empty"),
    ],
)
def test_mistakes(command: str, arguments: tuple[str, ...], message: str) -> None:
    done = run(command, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--head-host", "c"), "--head-host is 'c', which --hosts does not name: a,b"),
        (("--resources", "tape"), "--resources is no JSON"),
        (("--num-cpus", "-1"), "--num-cpus"),
    ],
)
def test_mistakes_about_nodes(arguments: tuple[str, ...], message: str) -> None:
    done = run("up", "--hosts", "a,b", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


def test_hosts_that_fail(tmp_path: Path, fails: str) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "ZCACTOR_TOKEN": "", "ZCACTOR_TOKEN_FILE": ""}
    done = run("up", "--hosts", "a,me@b", "--ssh", fails, **environ)
    assert done.exit_code == 1
    command = f"{tmp_path}/an ssh failed"
    assert done.stderr == f"zcactor: a: {command}\n  no way to a\nzcactor: me@b: {command}\n  no way to me@b\n"
    path = default_file(environ)
    assert done.stdout.splitlines() == [
        f"zcactor: a token is in {path}, where programs on this host find it", "zcactor: connecting to a, me@b",
    ]  # fmt: skip
    assert read_token_file(path).hex() not in done.output


def test_the_command_for_ssh_is_a_variable(fails: str) -> None:
    done = run("down", "--hosts", "a", ZCACTOR_SSH=fails)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no way to a" in done.stderr


@pytest.mark.parametrize("command", ["up", "down"])
def test_no_ssh(command: str) -> None:
    done = run(command, "--hosts", "a,b", PATH="/nowhere", ZCACTOR_SSH="")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        "zcactor: there is no ssh: install openssh-client, or name a command by --ssh or ZCACTOR_SSH\n"
    )


def test_a_token_that_is_wrong(fails: str) -> None:
    done = run("up", "--hosts", "a", "--ssh", fails, ZCACTOR_TOKEN="short", ZCACTOR_TOKEN_FILE="")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("zcactor: ZCACTOR_TOKEN: a token is 64 hexadecimal digits")
