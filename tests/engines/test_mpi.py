"""Runs under real MPI launchers. `make test-engines` installs them."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.engines.launching import PATIENCE, RUN, User
from zcactor.cluster.rendezvous import folder_of

pytestmark = pytest.mark.slow

LAUNCHERS = {
    "Open MPI": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "3"),
    "MPICH": ("mpiexec.hydra", "-n", "3"),
}


@pytest.fixture
def user() -> Iterator[User]:
    with User() as made:
        yield made


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The beginning of a launcher's command line for three ranks."""
    command = LAUNCHERS[request.param]
    path = shutil.which(command[0])
    if path is None:
        pytest.skip(f"{command[0]} is not installed: make test-engines does that as root on Debian")
    return path, *command[1:]


@pytest.mark.parametrize("status", [0, 5])
def test_a_program(user: User, launcher: tuple[str, ...], status: int) -> None:
    found, text = user.done(*launcher, *RUN, "--", sys.executable, "sum.py", "a b", "*", "$HOME", STATUS=str(status))
    assert found == status
    assert text.count("3 300000.0 ['a b', '*', '$HOME']") == 1, text
    assert not list(folder_of(user.variables).glob("*"))


def test_a_program_that_is_not_there(user: User, launcher: tuple[str, ...]) -> None:
    status, text = user.done(*launcher, *RUN, "--", "/no/such/program")
    assert status == 127
    assert "'/no/such/program' is not there" in text


def test_the_launcher_is_told_to_end(user: User, launcher: tuple[str, ...]) -> None:
    process = user.start(*launcher, *RUN, "--", sys.executable, "waiting.py")
    user.says("up 3")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) != 0
    user.ended({})
    assert user.closed() == ["closed-0", "closed-1", "closed-2"]


def test_one_rank(user: User, launcher: tuple[str, ...]) -> None:
    status, text = user.done(*launcher[:-1], "1", *RUN, "--", sys.executable, "sum.py")
    assert status == 0
    assert text.startswith("1 100000.0 []"), text
