"""Run directories: made, locked, and swept away when nobody holds them."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zcactor.runtime import directory as directory_module
from zcactor.runtime.directory import PREFIX, RunDirectory, base_directory, sweep


def test_made_and_removed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.path.parent == tmp_path
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((run.path / "lock").stat().st_mode) == 0o600
    assert not os.get_inheritable(run.lock_fd)
    (run.path / "some.sock").touch()
    run.remove()
    assert list(tmp_path.iterdir()) == []
    assert run.lock_fd == -1
    run.remove()


def test_only_what_nobody_holds_is_swept(tmp_path: Path) -> None:
    living, dead = RunDirectory(tmp_path), RunDirectory(tmp_path)
    inherited = os.dup(living.lock_fd)
    dead.forget()
    living.forget()  # another process, the agent, still has it
    (tmp_path / "zcactor-other").mkdir()
    (tmp_path / f"{PREFIX}file").touch()
    assert sweep(tmp_path) == [dead.path]
    assert sweep(tmp_path) == []
    os.close(inherited)
    assert sweep(tmp_path) == [living.path]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{PREFIX}file", "zcactor-other"]


def test_a_directory_without_a_lock_is_left_to_its_maker_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / f"{PREFIX}new"
    new.mkdir()
    assert sweep(tmp_path) == []
    os.utime(new, (1, 1))
    assert sweep(tmp_path) == [new]


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "lock").touch()
    trap = tmp_path / f"{PREFIX}trap"
    trap.mkdir()
    (trap / "lock").symlink_to(target / "lock")
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    sweep(tmp_path)
    assert (target / "lock").exists()
    assert trap.exists()


def test_a_directory_swept_between_making_and_locking_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = directory_module._lock
    turns: list[int] = []

    def swept_first(fd: int) -> bool:
        turns.append(fd)
        if len(turns) == 1:
            assert len(sweep(tmp_path)) == 1
        return lock(fd)

    monkeypatch.setattr(directory_module, "_lock", swept_first)
    run = RunDirectory(tmp_path)
    assert len(turns) == 2
    assert run.path.exists()
    run.remove()
    monkeypatch.setattr(directory_module, "_lock", lambda fd: False)
    with pytest.raises(OSError, match="vanished"):
        RunDirectory(tmp_path)


def test_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert base_directory() == tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert base_directory() == Path("/tmp")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert base_directory() == Path("/tmp")


@pytest.mark.root
def test_directories_of_others_are_left_alone(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.forget()
    os.chown(run.path, 12345, 12345)
    assert sweep(tmp_path) == []
    assert run.path.exists()


# ---- shared by the processes of one cluster

NAME = "c" * 32

HOLDER = f"""
import sys
from pathlib import Path
from zcactor.runtime.directory import RunDirectory
directory = RunDirectory.shared(Path(sys.argv[1]), "{NAME}")
print(directory.path, flush=True)
sys.stdin.read()
directory.remove()
"""


def test_shared_is_removed_by_the_last_one(tmp_path: Path) -> None:
    first = RunDirectory.shared(tmp_path, NAME)
    assert first.path == tmp_path / f"{PREFIX}{NAME}"
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((first.path / "lock").stat().st_mode) == 0o600
    assert not os.get_inheritable(first.lock_fd)
    (first.path / "some.sock").touch()
    second, other = RunDirectory.shared(tmp_path, NAME), RunDirectory.shared(tmp_path, "d" * 32)
    assert second.path == first.path != other.path
    assert sweep(tmp_path) == []
    first.remove()
    first.remove()
    assert first.lock_fd == -1
    assert (second.path / "some.sock").exists()
    assert sweep(tmp_path) == []
    second.remove()
    assert list(tmp_path.iterdir()) == [other.path]
    other.remove()
    assert list(tmp_path.iterdir()) == []


def test_shared_with_another_process(tmp_path: Path) -> None:
    ours = RunDirectory.shared(tmp_path, NAME)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(ours.path)
        ours.remove()
        assert ours.path.exists()
        assert sweep(tmp_path) == []
        process.communicate("")
    assert list(tmp_path.iterdir()) == []


def test_shared_and_let_go_of_is_left_to_the_others(tmp_path: Path) -> None:
    first, second = RunDirectory.shared(tmp_path, NAME), RunDirectory.shared(tmp_path, NAME)
    first.forget()
    assert sweep(tmp_path) == []
    second.forget()  # as if it had been killed
    assert second.path.exists()
    again = RunDirectory.shared(tmp_path, NAME)
    assert sorted(path.name for path in again.path.iterdir()) == ["lock"]
    again.remove()


@pytest.mark.parametrize("shared", [True, False])
def test_inherited(tmp_path: Path, shared: bool) -> None:
    makers = RunDirectory.shared(tmp_path, NAME) if shared else RunDirectory(tmp_path)
    inherited = RunDirectory.inherited(makers.path, os.dup(makers.lock_fd), shared=shared)
    makers.forget()
    assert sweep(tmp_path) == []
    if shared:
        other = RunDirectory.shared(tmp_path, NAME)
        inherited.remove()
        assert other.path.exists()
        other.remove()
    else:
        inherited.remove()
    assert list(tmp_path.iterdir()) == []


def open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o750)


def file_in_the_way(path: Path) -> None:
    path.touch(mode=0o600)


def link_in_the_way(path: Path) -> None:
    target = path.parent / "target"
    target.mkdir(mode=0o700)
    path.symlink_to(target)


def of_somebody_else(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    "obstacle",
    [open_to_others, file_in_the_way, link_in_the_way, pytest.param(of_somebody_else, marks=pytest.mark.root)],
)
def test_shared_is_not_what_others_can_use(tmp_path: Path, obstacle: Callable[[Path], None]) -> None:
    path = tmp_path / f"{PREFIX}{NAME}"
    obstacle(path)
    with pytest.raises(PermissionError, match=f"{path} is in the way"):
        RunDirectory.shared(tmp_path, NAME)
    assert path.lstat()
    assert not (path / "lock").exists()


def test_a_shared_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / f"{PREFIX}{NAME}"
    path.mkdir(mode=0o700)
    (path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="[Ss]ymbolic link"):
        RunDirectory.shared(tmp_path, NAME)
    assert not (tmp_path / "elsewhere").exists()


def test_shared_that_vanishes_between_making_and_locking_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    turns: list[int] = []
    often = 1

    def swept_first(fd: int, how: int) -> None:
        if how == fcntl.LOCK_SH:
            turns.append(fd)
            if len(turns) <= often:
                assert len(sweep(tmp_path)) == 1
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", swept_first)
    run = RunDirectory.shared(tmp_path, NAME)
    assert len(turns) == 2
    assert (run.path / "lock").exists()
    run.remove()
    often = 1000
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="vanished"):
        RunDirectory.shared(tmp_path, NAME)
    assert len(os.listdir("/proc/self/fd")) == before


def test_shared_that_vanishes_before_it_is_looked_at_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir
    turns: list[Path] = []

    def gone_again(path: Path, *args: Any, **kwargs: Any) -> None:
        turns.append(path)
        mkdir(path, *args, **kwargs)
        if len(turns) == 1:
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", gone_again)
    run = RunDirectory.shared(tmp_path, NAME)
    assert len(turns) == 2
    run.remove()


def test_a_directory_that_is_made_again_while_it_is_swept_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = RunDirectory.shared(tmp_path, NAME)
    left.forget()
    flock = fcntl.flock
    made: list[RunDirectory] = []

    def made_again_first(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        shutil.rmtree(left.path)  # another sweep
        made.append(RunDirectory.shared(tmp_path, NAME))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", made_again_first)
    assert sweep(tmp_path) == []
    assert (made[0].path / "lock").exists()
    made[0].remove()


def test_shared_waits_for_one_who_is_removing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removing = RunDirectory.shared(tmp_path, NAME)
    flock = fcntl.flock
    flock(removing.lock_fd, fcntl.LOCK_EX)
    asked = threading.Event()
    found: list[RunDirectory] = []

    def tell(fd: int, how: int) -> None:
        if how == fcntl.LOCK_SH:
            asked.set()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", tell)
    thread = threading.Thread(target=lambda: found.append(RunDirectory.shared(tmp_path, NAME)))
    thread.start()
    assert asked.wait(20)
    assert found == []
    removing.remove()
    thread.join()
    assert (found[0].path / "lock").exists()
    found[0].remove()
    assert list(tmp_path.iterdir()) == []
