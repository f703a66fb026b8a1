"""Machines as their owners leave them: closed descriptors, homes of other users, quotas, missing system calls.

Programs run there, or end with a sentence that says where, which limit, and the next step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Hosts
from tests.driver.programs import ROOT, Program

LOOPS = ("uvloop", "asyncio")

JOB = """
@zc.actor
class Scaler:
    def scale(self, x): return 2 * x
    def say(self): print("a line of an actor")

async def main():
    async with zc.init(num_cpus=2, store_capacity=1 << 26):
        scaler = await Scaler.spawn()
        assert (await scaler.scale(np.ones(50_000))).sum() == 100_000
        await scaler.say()
    open("done", "w").close()

if __name__ == "__main__":
    zc.run(main())
"""
"""A program that calls an actor with an array, and leaves the file ``done`` at its end."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as found:
        yield found


def closed(which: str) -> str:
    """The redirections of a shell that close descriptors, each given as a digit."""
    return " ".join(f"{fd}<&-" if fd == "0" else f"{fd}>&-" for fd in which)


# ---------------------------------------------------------------- descriptors that are closed


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("which", ["0", "1", "2", "012"])
def test_a_program_runs_with_standard_descriptors_closed(which: str, loop: str) -> None:
    shell = ("sh", "-c", f'exec "$0" "$1" {closed(which)}', sys.executable, "{file}")
    with Program(JOB, argv=shell, env={"ZCACTOR_LOOP": loop}) as program:
        assert program.status() == 0
        assert (program.directory / "done").exists()
        assert program.stderr() == ""
        program.assert_clean()


@pytest.mark.parametrize("which", ["0", "1", "012"])
def test_a_head_that_was_started_with_standard_descriptors_closed_is_found_and_stopped(
    hosts: Hosts, which: str
) -> None:
    command = [sys.executable, "-m", "zcactor", "start", "--head", "--port", "0", "--num-cpus", "1"]
    shell = ["sh", "-c", f'exec "$@" {closed(which)}', "sh", *command]
    with hosts.on("a"):
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = subprocess.run(
        shell, env=environ, cwd=hosts.directory, capture_output=True, text=True, timeout=50, check=False
    )
    assert (started.returncode, started.stderr) == (0, "")
    assert ("head ready" in started.stdout) == ("1" not in which)
    assert "head: pid" in hosts.zcactor("status").stdout
    assert "the head at" in hosts.zcactor("stop").stdout
    hosts.assert_clean("a")


def test_a_run_with_standard_descriptors_closed_has_its_programs_status(hosts: Hosts) -> None:
    code = "import sys; sys.exit(7)"
    shell = ["sh", "-c", f'exec "$@" {closed("012")}', "sh", sys.executable, "-m", "zcactor", "run", "--"]
    with hosts.on("a"):
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*shell, sys.executable, "-c", code], env=environ, timeout=50, check=False)
    assert done.returncode == 7
    hosts.assert_clean("a")
