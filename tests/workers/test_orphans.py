"""The processes of a node that its program ends when no other process is left to do so."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.driver.programs import alive, until
from zcactor.workers.orphans import MARK, LastResort
from zcactor.workers.zygote import adopt_orphans, adopts_orphans

LEAVE = ["/bin/sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 & echo $!"]


@pytest.fixture
def last_resort() -> Iterator[LastResort]:
    made = LastResort("0123")
    yield made
    made.close()


def left_behind(environ: dict[str, str]) -> int:
    """Start a process and end its parent; return the process id."""
    return int(subprocess.run(LEAVE, capture_output=True, check=True, env={**os.environ, **environ}).stdout)


def test_it_adopts_until_it_is_closed() -> None:
    assert not adopts_orphans()
    last_resort = LastResort("0123")
    assert adopts_orphans()
    last_resort.close()
    last_resort.close()
    assert not adopts_orphans()


def test_a_program_that_adopts_anyway_goes_on() -> None:
    adopt_orphans()
    try:
        LastResort("0123").close()
        assert adopts_orphans()
    finally:
        adopt_orphans(yes=False)


def test_only_the_nodes_processes_are_ended_and_reaped(last_resort: LastResort) -> None:
    of_the_node = left_behind({MARK: "0123"})
    others = [left_behind({}), left_behind({MARK: "45"})]
    with subprocess.Popen(["sleep", "1000"]) as child:
        last_resort.end()
        assert not os.path.exists(f"/proc/{of_the_node}")
        assert all(map(alive, [*others, child.pid]))
        last_resort.end()
        child.kill()
    for pid in others:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_those_without_an_environment_go_with_their_session(last_resort: LastResort) -> None:
    code = (
        "import os, subprocess; print(subprocess.Popen(['sleep', '1000'], env={}, stdout=-3).pid, flush=True); input()"
    )
    with subprocess.Popen(
        ["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, MARK: "0123"},
    ) as leader:  # fmt: skip
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        last_resort.end()
        until(lambda: not alive(pid), "it ends with its leader")
        assert not os.path.exists(f"/proc/{pid}")
