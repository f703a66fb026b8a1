"""`zcactor.cluster.child`: a forked child, and an agent in one. `tests.cluster.test_daemon` tests whole nodes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.driver.programs import Program
from zcactor.cluster.child import Child


@pytest.fixture
def forked() -> Iterator[Callable[[int | None], Child]]:
    """A function that forks children, which exit with a status or pause."""
    children = []

    def fork(status: int | None) -> Child:
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                while status is None:
                    signal.pause()
            finally:
                os._exit(status or 0)
        children.append(Child(pid))
        return children[-1]

    yield fork
    for child in children:
        child.kill()
        child.wait()


@pytest.mark.parametrize("status", [0, 3])
def test_its_status(forked: Callable[[int | None], Child], status: int) -> None:
    child = forked(status)
    assert child.wait() == status
    assert child.wait(0.0) == status


def test_one_that_runs_on(forked: Callable[[int | None], Child]) -> None:
    child = forked(None)
    with pytest.raises(subprocess.TimeoutExpired, match=f"the agent {child.pid}"):
        child.wait(0.01)
    child.terminate()
    assert child.wait(20) == -signal.SIGTERM


def test_nothing_is_sent_to_one_that_has_ended(
    forked: Callable[[int | None], Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = forked(None)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("the number may be another process's by now"))
    child.kill()
    child.terminate()


@pytest.mark.slow
def test_an_agent_that_is_told_nothing_ends() -> None:
    source = """
import tempfile
from zcactor.cluster.child import fork_agent
os.environ["ZCACTOR_TOKEN"] = "secret"
with tempfile.TemporaryFile() as lock, tempfile.TemporaryFile() as output:
    agent, control = fork_agent(lock.fileno(), output)
    control.close()
    tell(status=agent.wait())
    tell(kept=os.environ["ZCACTOR_TOKEN"])
    output.seek(0)
    tell(output=output.read().decode())
"""
    with Program(source) as program:
        assert program.told("status") == 0
        assert program.told("kept") == "secret"
        assert program.told("output") == ""
        program.assert_clean()


@pytest.mark.slow
def test_an_agent_that_is_forked_later_keeps_no_socket_of_an_earlier_one() -> None:
    source = """
import tempfile
from zcactor.cluster.child import fork_agent
with tempfile.TemporaryFile() as lock:
    (first, control), (second, other) = [fork_agent(lock.fileno()) for _ in range(2)]
    control.close()
    tell(first=first.wait())
    other.close()
    tell(second=second.wait())
"""
    with Program(source) as program:
        assert program.told("first") == 0, "it has noticed the end of its launcher's socket while the second lives"
        assert program.told("second") == 0
        program.assert_clean()
