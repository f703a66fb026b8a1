"""Run directories: made, locked, and swept away when nobody holds them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

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
