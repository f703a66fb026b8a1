"""The zygote, driven by hand: forks, reports, and the end of all processes that come from it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.driver.programs import Program, alive, until
from zcactor.workers.zygote import kill_group, run_zygote, wait_for_end

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


def behave(request: dict[str, Any]) -> float:
    """The work of a child, in the place of a worker."""
    _behave(request)
    return time.monotonic() + PATIENCE


def _behave(request: dict[str, Any]) -> None:
    match request["do"]:
        case "report":
            print(os.getpid(), os.getpgid(0), os.getsid(0), os.read(0, 1), Path("/proc/self/comm").read_text().strip())
            print("an error", file=sys.stderr)
        case "exit":
            os._exit(request["status"])
        case "raise":
            raise ValueError("mine")
        case "descriptors":
            print(sorted(int(fd) for fd in os.listdir("/proc/self/fd")))
        case "share":
            subprocess.Popen([sys.executable, "-c", SHARING.format(kept=request["kept"])])
            signal.pause()
        case "sleep":
            for own_session in (False, True):
                pid = os.fork()
                if pid == 0:
                    if own_session:
                        os.setsid()
                    os.write(1, b"%d\n" % os.getpid())
                    signal.pause()
            signal.pause()


SHARING = """
import signal, subprocess
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
tracker = resource_tracker._resource_tracker
if {kept}:  # by a process that is not killed
    subprocess.Popen(["sleep", "1000"], start_new_session=True, pass_fds=[tracker._fd], stdout=2)
print(memory.name, tracker._pid, flush=True)
signal.pause()
"""
"""A program of a worker's that shares memory."""


class Zygote:
    """A zygote to talk to."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.sock.close()
                run_zygote(theirs, lambda: behave)
            finally:
                os._exit(0)
        theirs.close()

    def start(self, **request: Any) -> tuple[int, int, int]:
        """Ask for a child; return its process id, and the descriptors of its output and errors."""
        (out, out_end), (error, error_end) = os.pipe(), os.pipe()
        socket.send_fds(self.sock, [msgspec.msgpack.encode({"label": "test", **request})], [out_end, error_end])
        os.close(out_end)
        os.close(error_end)
        return self.heard()["pid"], out, error

    def heard(self) -> dict[str, int]:
        """The zygote's next report."""
        return msgspec.msgpack.decode(self.sock.recv(4096))  # type: ignore[no-any-return]


def everything(fd: int) -> str:
    """Read a pipe to its end."""
    with os.fdopen(fd) as file:
        return file.read()


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.sock.close()
    os.waitpid(made.pid, 0)


@pytest.mark.slow
def test_a_child_is_a_process_of_its_own(zygote: Zygote) -> None:
    pid, out, error = zygote.start(do="report", label="Shard mirror and more")
    assert everything(out) == f"{pid} {pid} {pid} b'' zc Shard mirror\n"
    assert everything(error) == "an error\n"
    assert zygote.heard() == {"pid": pid, "status": 0}


@pytest.mark.slow
def test_ends_are_reported(zygote: Zygote) -> None:
    pid, *fds = zygote.start(do="exit", status=5)
    assert os.waitstatus_to_exitcode(zygote.heard()["status"]) == 5
    other, out, error = zygote.start(do="raise")
    assert other != pid
    report = zygote.heard()
    assert (report["pid"], os.waitstatus_to_exitcode(report["status"])) == (other, 1)
    assert "ValueError: mine" in everything(error)
    third, *more = zygote.start(do="sleep")
    os.kill(third, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(zygote.heard()["status"]) == -signal.SIGTERM
    for fd in (*fds, out, *more):
        os.close(fd)


@pytest.mark.slow
def test_children_inherit_nothing_but_their_streams(zygote: Zygote) -> None:
    spare = os.open("/dev/null", os.O_RDONLY)
    _, out, error = zygote.start(do="descriptors")
    listed = everything(out)
    first = {int(word) for word in listed.strip("[]\n").split(",")}
    assert {0, 1, 2} <= first
    assert zygote.heard()["status"] == 0
    _, again, more = zygote.start(do="descriptors")
    assert everything(again) == listed, "a second child has no descriptors of the first"
    for fd in (spare, error, more):
        os.close(fd)


def grandchildren(out: int) -> list[int]:
    """Read the two process ids that a sleeping child has printed."""
    text = ""
    while text.count("\n") < 2:
        assert select.select([out], [], [], PATIENCE)[0]
        text += os.read(out, 100).decode()
    return [int(word) for word in text.split()]


@pytest.mark.slow
def test_when_the_agent_is_gone_everything_ends(zygote: Zygote) -> None:
    pid, out, error = zygote.start(do="sleep")
    below = grandchildren(out)
    zygote.sock.close()
    until(lambda: not any(alive(each) for each in (pid, *below, zygote.pid)), "all processes end")
    os.close(out)
    os.close(error)


@pytest.mark.slow
def test_when_it_is_killed_its_children_die(zygote: Zygote) -> None:
    pid, out, error = zygote.start(do="sleep")
    below = grandchildren(out)
    os.kill(zygote.pid, signal.SIGKILL)
    until(lambda: not alive(pid), "the child dies")
    for each in below:  # no process is left to end them, as the node agent does in a node
        os.kill(each, signal.SIGKILL)
    os.close(out)
    os.close(error)


@pytest.mark.slow
def test_killing_a_group(zygote: Zygote) -> None:
    pid, out, error = zygote.start(do="sleep")
    same, other = sorted(grandchildren(out), key=lambda each: os.getsid(each) == each)
    kill_group(pid)
    assert os.waitstatus_to_exitcode(zygote.heard()["status"]) == -signal.SIGKILL
    until(lambda: not alive(same), "its group dies")
    assert alive(other), "a daemon may outlive its actor; not the node"
    kill_group(pid)
    os.close(out)
    os.close(error)


@pytest.mark.slow
def test_a_fork_that_fails_is_reported() -> None:
    source = """
import resource, socket, msgspec
from zcactor.workers.zygote import run_zygote
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
def fail(): raise BlockingIOError(11, "Resource temporarily unavailable")
if os.fork() == 0:
    ours.close()
    os.fork = fail
    run_zygote(theirs, lambda: print)
    os._exit(0)
socket.send_fds(ours, [msgspec.msgpack.encode({"label": "x"})], [1, 2])
tell(report=msgspec.msgpack.decode(ours.recv(4096)))
ours.close()
tell(status=os.wait()[1])
"""
    with Program(source) as program:
        report = program.told("report")
        assert report["pid"] == 0
        assert "unavailable" in report["error"]
        assert program.told("status") == 0
        program.assert_clean()


def test_waiting_for_an_end() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        pidfd = os.pidfd_open(process.pid)
        assert not wait_for_end(pidfd, 0.0) and not wait_for_end(pidfd, -1.0)
        process.kill()
        assert wait_for_end(pidfd, PATIENCE)
        os.close(pidfd)


@pytest.mark.slow
def test_a_worker_is_reaped_when_what_it_started_is_dead() -> None:
    """If the zygote is killed meanwhile, the adopting process finds the rest by the worker's session."""
    source = """
from zcactor.workers.zygote import adopt_orphans, children_of_ours, kill_orphans
adopt_orphans()
ready, go = os.pipe()
worker = os.fork()
if worker == 0:
    os.setsid()
    child = subprocess.Popen(["sleep", "1000"], env={})
    os.write(go, b"%d" % child.pid)
    signal.pause()
child = int(os.read(ready, 20))
kill, killed = os.kill, []
def look(pid, number):
    killed.append((pid, worker in children_of_ours()))
    kill(pid, number)
os.kill = look
kill_orphans()
tell(all=dict(worker=worker, child=child, killed=killed, left=children_of_ours()))
"""
    with Program(source) as program:
        told = program.told("all")
        assert told["killed"] == [[told["worker"], True], [told["child"], True]]
        assert told["left"] == []
        assert program.status() == 0


@pytest.mark.slow
def test_what_a_worker_has_started_is_dead_when_its_end_is_reported(zygote: Zygote) -> None:
    pid, out, error = zygote.start(do="sleep")
    with os.fdopen(out) as file:
        same_group = int(file.readline())
        file.readline()
        os.kill(pid, signal.SIGTERM)
        assert zygote.heard()["pid"] == pid
        until(lambda: not alive(same_group), "what is left of its group ends", PATIENCE)
    os.close(error)


def shares(zygote: Zygote, *, kept: bool = False) -> tuple[int, Path, int]:
    """Start a worker that shares memory. Returns its pid, the file, and the pid of the resource tracker."""
    pid, out, error = zygote.start(do="share", kept=kept)
    os.close(error)
    with os.fdopen(out) as file:
        name, tracker = file.readline().split()
    return pid, Path("/dev/shm", name), int(tracker)


@pytest.mark.slow
def test_shared_memory_of_a_killed_worker_is_gone_when_its_end_is_reported(zygote: Zygote) -> None:
    pid, memory, tracker = shares(zygote)
    assert memory.exists()
    os.kill(pid, signal.SIGKILL)
    assert zygote.heard() == {"pid": pid, "status": signal.SIGKILL}
    assert not memory.exists() and not alive(tracker)


@pytest.mark.slow
def test_shared_memory_of_workers_is_gone_when_the_zygote_has_ended(zygote: Zygote) -> None:
    _, memory, tracker = shares(zygote)
    zygote.sock.close()
    until(lambda: not alive(zygote.pid), "the zygote ends")
    assert not memory.exists() and not alive(tracker)


@pytest.mark.slow
def test_a_resource_tracker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcactor.workers.zygote._CLEARING", 0.0)
    zygote = Zygote()
    pid, memory, tracker = shares(zygote, kept=True)
    os.kill(pid, signal.SIGKILL)
    assert zygote.heard() == {"pid": pid, "status": signal.SIGKILL}
    until(lambda: not alive(tracker), "the tracker is killed")
    zygote.sock.close()
    os.waitpid(zygote.pid, 0)
    memory.unlink(missing_ok=True)


OUTLIVING = """
from zcactor.workers.zygote import outlive_sigterm
outlive_sigterm()
def signalled(again):
    pid = os.fork()
    if pid == 0:
        if again:
            outlive_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGHUP)
started = subprocess.run(["/bin/sh", "-c", "kill -TERM $$"]).returncode
tell(facts=[signalled(False), signalled(True), started])
"""


@pytest.mark.slow
def test_a_process_of_a_run_outlives_the_launchers_signals() -> None:
    with Program(OUTLIVING) as program:
        assert program.told("facts") == [-signal.SIGTERM, 0, -signal.SIGTERM]
        assert program.status() == 0
