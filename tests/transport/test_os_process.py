"""The process behind an id, and the proof that it has ended."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path

import pytest

from tests.descriptors import opened
from tests.driver.programs import until
from zcactor.transport import os_process
from zcactor.transport.os_process import OsProcess


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"])


def readable(fd: int, patience: float = 20.0) -> bool:
    return bool(select.select([fd], [], [], patience)[0])


def test_a_process_that_ends() -> None:
    child = sleeper()
    known = OsProcess.of(child.pid)
    assert known == OsProcess.of(child.pid) and known.pid == child.pid and known.started > 0
    fd = known.open()
    assert fd is not None and not readable(fd, 0)
    child.kill()
    assert readable(fd)
    os.close(fd)
    fd = known.open()  # a zombie has ended, as far as its memory is concerned
    assert fd is not None and readable(fd, 0)
    os.close(fd)
    child.wait()
    assert known.open() is None


def test_another_process_with_its_number() -> None:
    ours = OsProcess.of(os.getpid())
    before = opened()
    assert ours._replace(started=ours.started - 1).open() is None
    assert opened() <= before


def test_one_that_was_gone_already() -> None:
    child = sleeper()
    child.kill()
    child.wait()
    known = OsProcess.of(child.pid)
    assert known.pid == child.pid and known.open() is None


def test_one_that_has_no_number_here() -> None:
    assert OsProcess.of(0).pid == 0
    with pytest.raises(ProcessLookupError, match="without a number"):
        OsProcess.of(0).open()


def test_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = OsProcess.of(os.getpid())

    def refuse(_: int) -> int:
        raise OSError(24, "no descriptor is left")

    monkeypatch.setattr(os_process, "_started", refuse)
    assert OsProcess.of(os.getpid()).pid == 0
    before = opened()
    with pytest.raises(OSError, match="descriptor"):
        ours.open()
    assert opened() <= before


def test_a_name_with_everything_in_it(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b c"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "1000"])
    stat = Path(f"/proc/{child.pid}/stat")
    try:
        until(lambda: ") R" in stat.read_text().partition("(")[2][:5], "it to be the program")
        assert OsProcess.of(child.pid).started >= OsProcess.of(os.getpid()).started
    finally:
        child.kill()
        child.wait()
