"""The process that ssh starts on a host: its commands for a shell, its greeting, and its address."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from tests.cluster.fake_ssh import VERSIONS
from tests.driver.programs import ROOT
from zcactor.cluster.rendezvous import outward
from zcactor.cluster.ssh_remote import MARK, FarAnswer, listening_host, script


def answers(shell: str, python: str, given: str = "") -> list[FarAnswer]:
    """The lines of a far end that a shell starts, and then reads `given`."""
    done = subprocess.run(
        [shell, "-s"], input=script(python) + given, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert all(line.startswith(MARK) for line in lines)
    return [msgspec.json.decode(line.removeprefix(MARK), type=FarAnswer) for line in lines]


@pytest.mark.slow
def test_it_greets_and_ends_without_an_order() -> None:
    assert answers("sh", sys.executable) == [FarAnswer(versions=VERSIONS)]


@pytest.mark.parametrize("python", ["/no/such/python", 'it\'s not "there" $HOME `id` \\'])
def test_no_interpreter(python: str) -> None:
    assert answers("sh", python) == [
        FarAnswer(failed=f"there is no {python}: name the interpreter of that host by --python")
    ]


@pytest.mark.parametrize(
    ("connection", "alone", "host"),
    [
        ("10.0.0.9 50022 10.0.0.1 22", False, "10.0.0.1"),
        ("10.0.0.9 50022 10.0.0.1 22", True, "10.0.0.1"),
        ("fd00::9 50022 fd00::1 22", False, "fd00::1"),
        ("127.0.0.1 50022 127.0.0.1 22", True, "127.0.0.1"),
        ("127.0.0.1 50022 127.0.0.1 22", False, None),  # others could not reach it there
        ("", False, None),
        ("UNKNOWN 65535 UNKNOWN 65535", False, None),  # of a connection that is no network's
    ],
)
def test_the_address_of_a_head(connection: str, *, alone: bool, host: str | None) -> None:
    assert listening_host({"SSH_CONNECTION": connection}, alone=alone) == (host or outward())
