"""The program of a run: its status as shells tell it, its arguments, and signals."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.programs import Program as Script
from tests.driver.programs import alive, until
from zcactor.cluster.program import CannotStart, RunProgram, Signals

PATIENCE_MS = 60_000


def ended(program: RunProgram) -> int:
    """The status of a program that is about to end."""
    poll = select.poll()
    poll.register(program.pidfd, select.POLLIN)
    assert poll.poll(PATIENCE_MS)
    status = program.status()
    assert status is not None
    program.close()
    return status


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """The usual effect of signals: a parent in the background ignores SIGINT."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137), ("kill -TERM $$", 143)]
)
def test_its_status(script: str, status: int) -> None:
    assert ended(RunProgram(["/bin/sh", "-c", script], os.environ)) == status


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    for name in ("no-such-program", str(tmp_path / "missing")):
        with pytest.raises(CannotStart, match="is not there") as raised:
            RunProgram([name], os.environ)
        assert raised.value.status == 127


def test_a_program_that_cannot_be_executed(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no program")
    text.chmod(0o644)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\0\1\2")
    binary.chmod(0o755)
    for path in (text, binary, tmp_path):
        with pytest.raises(CannotStart, match="cannot be executed") as raised:
            RunProgram([str(path)], os.environ)
        assert raised.value.status == 126


def test_arguments_arrive_as_given(tmp_path: Path) -> None:
    given = ["two words", "*", "$HOME", "", "--nodes", "'", "ä"]
    out = tmp_path / "out"
    code = f"import sys, json; open({str(out)!r}, 'w').write(repr(sys.argv[1:]))"
    assert ended(RunProgram([sys.executable, "-c", code, *given], os.environ)) == 0
    assert out.read_text() == repr(given)


def test_a_program_that_ignores_sigterm(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = RunProgram(["/bin/sh", "-c", f"trap '' TERM; : > {ready}; while :; do sleep 1000; done"], os.environ)
    until(ready.exists, "the program")
    assert program.patience() is None
    program.end(1000.0)
    left = program.patience()
    assert left is not None and left > 0
    assert program.status() is None
    program.close()
    other = RunProgram(["/bin/sh", "-c", "trap '' TERM; while :; do sleep 1000; done"], os.environ)
    other.end(0.0)
    assert other.patience() is None
    assert ended(other) in (137, 143)  # the shell may not have come to its trap
    assert program.status() == 137


def test_it_ends_with_its_parent() -> None:
    source = """
from zcactor.cluster.program import RunProgram
program = RunProgram(["sleep", "1000"], os.environ)
tell(pid=program._process.pid)
hang()
"""
    with Script(source) as script:
        pid = script.told("pid")
        assert alive(pid)
        script.process.kill()
        until(lambda: not alive(pid), "the program to end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_raises_at_first(usual_signals: None, number: signal.Signals) -> None:
    with Signals(), pytest.raises(SystemExit) as raised:
        os.kill(os.getpid(), number)
        signal.pause()
    assert raised.value.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_is_an_event_then(usual_signals: None) -> None:
    with Signals() as signals:
        signals.wait()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.number == signal.SIGINT
        assert signals.status == 130
        assert select.select([signals.fd], [], [], 0)[0]


def test_a_signal_ends_a_wait_that_it_does_not_interrupt(usual_signals: None) -> None:
    """As where it comes after the last step of the interpreter before the call that waits."""

    about_to = threading.Event()
    state = Path(f"/proc/self/task/{threading.get_native_id()}/stat")

    def send() -> None:
        about_to.wait()
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "S", "the main thread to wait")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # the call of the main thread is not interrupted
        os.kill(os.getpid(), signal.SIGTERM)

    with Signals() as signals:
        signals.wait()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            thread = threading.Thread(target=send)
            thread.start()
            about_to.set()
            assert select.select([signals.fd], [], [], PATIENCE_MS / 1000)[0]
            thread.join()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert signals.number == signal.SIGTERM


def test_a_signal_that_is_handed_on_is_no_event(usual_signals: None) -> None:
    taken: list[int] = []
    with Signals() as signals:
        signals.hand_on([signal.SIGINT], taken.append)
        signals.wait()
        os.kill(os.getpid(), signal.SIGINT)
        assert (taken, signals.number) == ([signal.SIGINT], 0)
        assert not select.select([signals.fd], [], [], 0)[0]
    assert signal.set_wakeup_fd(-1) == -1


def test_forks_do_not_take_part(usual_signals: None) -> None:
    with Signals():
        pid = os.fork()
        if pid == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except SystemExit:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_exit_status_of_a_shell_is_the_same() -> None:
    done = subprocess.run(["/bin/sh", "-c", "no-such-program-here"], stderr=subprocess.DEVNULL, check=False)
    assert done.returncode == 127
