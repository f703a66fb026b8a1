"""The agent's process, launched as a driver launches it."""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

import pytest

from tests.descriptors import opened
from tests.driver.programs import ROOT, alive, until
from zcactor.node.agent_main import launch, raise_descriptor_limit, search_path, send_setup
from zcactor.workers.run_directory import RunDirectory


def test_the_search_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "lib", "/abs", Path("/object"), None, "/a/../b"])
    assert search_path() == [str(tmp_path), str(tmp_path / "lib"), "/abs", "/b", str(ROOT)]
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    assert search_path() == [str(ROOT)]


@pytest.mark.slow
def test_it_ends_when_its_launcher_goes_before_telling_it_anything(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    agent, control = launch(directory.lock_fd)
    assert os.getsid(agent.pid) != os.getsid(0)
    control.close()
    assert agent.wait(20) == 0
    directory.remove()


@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True])
def test_one_whose_launcher_is_gone_lets_go_of_a_shared_directory(tmp_path: Path, held: bool) -> None:
    directory = RunDirectory.shared(tmp_path, "0" * 32)
    other = RunDirectory.shared(tmp_path, "0" * 32)
    if not held:
        other.forget()
    agent, control = launch(directory.lock_fd)
    directory.forget()
    control.close()
    assert agent.wait(20) == 0
    assert directory.path.exists() == held, "the last one removes it"
    other.remove()
    assert not directory.path.exists()


@pytest.mark.slow
def test_half_a_setup_is_none(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    agent, control = launch(directory.lock_fd)
    control.sendall(b"\xff\0\0\0half")
    control.close()
    assert agent.wait(20) == 0
    directory.remove()


def test_telling_one_that_has_ended() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    send_setup(ours, {"x": b"y" * 1000})
    ours.close()


def test_nothing_is_left_open_when_it_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    before = opened()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        launch(directory.lock_fd)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(RuntimeError, match=r"sys\.executable"):
        launch(directory.lock_fd)
    assert opened() <= before
    directory.remove()


def test_the_descriptor_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, 500))
            raise_descriptor_limit()
            status = 0 if resource.getrlimit(resource.RLIMIT_NOFILE) == (500, 500) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    until(lambda: not alive(pid), "the child is gone")
