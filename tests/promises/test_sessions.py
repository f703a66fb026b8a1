"""Nodes that were started in a login session, for cron, sudo and batch jobs, and after the logout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Hosts, beside
from tests.driver.programs import ROOT

PATIENCE = 50
"""Seconds after which a program counts as hanging: a watchdog, no statement about speed."""
PROGRAM = """
import asyncio, json, sys
import numpy as np
import zcactor as zc

@zc.actor
class Keeper:
    def total(self, array):
        return float(array.sum())

async def main():
    async with zc.init(sys.argv[1]):
        if sys.argv[2:]:
            await Keeper.spawn()
        keeper = await Keeper.options(name="k", lifetime="detached", get_if_exists=True).spawn()
        path = await zc.explain(keeper)
        print(json.dumps([path.transport, dict(path.rejected), await keeper.total(np.ones(100_000))]))

zc.run(main())
"""


ALONE = """
async def main():
    async with zc.init():
        tell(begun=True)
        await asyncio.Event().wait()
zc.run(main())
"""
"""A program with a node of its own."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as hosts:
        yield hosts


def without_session(hosts: Hosts) -> dict[str, str]:
    """The environment that cron has, with a temporary directory for the test alone."""
    folder = hosts.directory / "tmp"
    folder.mkdir(mode=0o700, exist_ok=True)
    return {"XDG_RUNTIME_DIR": "", "TMPDIR": str(folder)}


def started(hosts: Hosts, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in the environment of this process."""
    file = hosts.directory / "program.py"
    file.write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, str(file), *arguments],
        cwd=hosts.directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def described(hosts: Hosts, address: str, environ: Mapping[str, str]) -> tuple[str, dict[str, str], str]:
    """The transport to an actor, the reasons against others, and the lines of the log, of a program."""
    with hosts.on("a", environ):
        done = started(hosts, address)
    assert done.returncode == 0, done.stderr
    transport, rejected, total = json.loads(done.stdout)
    assert total == 100_000.0
    return transport, rejected, done.stderr


def addresses(hosts: Hosts, environ: Mapping[str, str]) -> Any:
    """The addresses of the nodes that ``zcactor status`` finds by itself."""
    done = hosts.zcactor("status", "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    return [node["address"].partition("@")[2] for node in json.loads(done.stdout)["nodes"]]


def kept(hosts: Hosts) -> list[str]:
    """The names of the records in the state folder."""
    return os.listdir(hosts.directory / "state" / "zcactor" / "nodes")


@pytest.mark.slow
def test_a_node_of_a_login_session_is_found_from_cron_and_met_locally(hosts: Hosts) -> None:
    head = hosts.start()
    cron = without_session(hosts)
    assert described(hosts, head.record.address, cron)[0] == "local"
    assert addresses(hosts, cron) == [beside(head).record.address]
    assert len(kept(hosts)) == 2
    done = hosts.zcactor("stop", environ=cron)
    assert done.returncode == 0 and done.stdout.count("has ended") == 2
    assert kept(hosts) == []
    hosts.assert_clean("a")


@pytest.mark.slow
def test_a_node_of_cron_is_found_from_a_login_session_and_met_locally(hosts: Hosts) -> None:
    cron = without_session(hosts)
    head = hosts.start(environ=cron)
    assert described(hosts, head.record.address, {})[0] == "local"
    joined = hosts.zcactor("start", "--address", head.record.address, "--num-cpus", "1")
    assert joined.returncode == 0, joined.stderr
    assert len(addresses(hosts, {})) == len(kept(hosts)) - 1 == 2
    assert hosts.zcactor("stop").stdout.count("has ended") == 3
    assert kept(hosts) == []
    hosts.assert_clean("a")


@pytest.mark.slow
@pytest.mark.parametrize("anew", [True, False])
def test_a_node_is_listed_and_stopped_after_the_logout_and_programs_say_why_it_is_not_local(
    hosts: Hosts, anew: bool
) -> None:
    head = hosts.start()
    assert described(hosts, head.record.address, {})[0] == "local"
    session = hosts.run_directories("a")
    shutil.rmtree(session)
    if anew:  # by the next login
        session.mkdir(mode=0o700)
    later = {} if anew else without_session(hosts)
    transport, rejected, log = described(hosts, head.record.address, later)
    assert transport == "tcp"
    for told in (rejected["local"], log):
        assert f"(pid {head.record.pid})" in told and f"has lost its run directory {head.record.directory}" in told
        assert "loginctl enable-linger" in told
    with hosts.on("a", later):
        refused = started(hosts, head.record.address, "spawn")
    assert "InsufficientResources" in refused.stderr
    assert f"run directory {beside(head).record.directory} is gone, as after a logout" in refused.stderr
    assert addresses(hosts, later) == [beside(head).record.address]
    done = hosts.zcactor("stop", environ=later)
    assert done.returncode == 0 and done.stdout.count("has ended") == 2
    assert kept(hosts) == []
    if anew:
        hosts.assert_clean("a")


@pytest.mark.slow
def test_a_node_in_another_named_folder_is_told_and_left_alone(hosts: Hosts) -> None:
    head = hosts.start()
    transport, rejected, log = described(hosts, head.record.address, hosts.variables("b"))
    assert transport == "tcp" and "lost" not in log
    assert f"has its run directory in XDG_RUNTIME_DIR={hosts.run_directories('a')}" in rejected["local"]
    for command in ("stop", "status"):
        done = hosts.zcactor(command, host="b")
        assert f"(pid {head.record.pid}) runs with XDG_RUNTIME_DIR={hosts.run_directories('a')}" in (
            done.stdout + done.stderr
        )
    with hosts.program(ALONE, host="b") as program:
        program.told("begun")
        done = hosts.zcactor("status", host="b")
        assert f"program {program.process.pid}, " in done.stdout
        assert f"(pid {head.record.pid}) runs with XDG_RUNTIME_DIR={hosts.run_directories('a')}" in done.stderr
    assert len(addresses(hosts, {})) == 1


@pytest.mark.slow
def test_a_node_without_a_state_folder_is_not_recorded(hosts: Hosts) -> None:
    file = hosts.directory / "file"
    file.touch()
    node = hosts.start(stays=False, environ={"XDG_STATE_HOME": str(file)})
    assert Path(node.record.directory).is_dir()
    assert len(addresses(hosts, {})) == 1
    assert not (hosts.directory / "state").exists()
