"""Run directories: made, locked, and swept away when no process holds them."""

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

from zcactor.workers.run_directory import PREFIX, RunDirectory, base_directory, sweep

NAME = "c" * 32
MARKER = "made-by-zcactor"


def test_made_and_removed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.path.parent == tmp_path
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((run.path / "lock").stat().st_mode) == 0o600
    assert not os.get_inheritable(run.lock_fd)
    (run.path / f"{NAME}.sock").touch()
    run.remove()
    assert list(tmp_path.iterdir()) == []
    assert run.lock_fd == -1
    run.remove()


def test_only_what_nobody_holds_is_swept(tmp_path: Path) -> None:
    living, dead = RunDirectory(tmp_path), RunDirectory(tmp_path)
    inherited = os.dup(living.lock_fd)
    dead.forget()
    living.forget()  # another process, as the agent would be, still has it
    (tmp_path / "zcactor-other").mkdir()
    (tmp_path / f"{PREFIX}file").touch()
    assert sweep(tmp_path) == [dead.path]
    assert sweep(tmp_path) == []
    os.close(inherited)
    assert sweep(tmp_path) == [living.path]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{PREFIX}file", "zcactor-other"]


def bytes_of(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize("name", ["notes", "0123abcd", "A" * 32, "a" * 31, "a" * 33, "a" * 32 + "~"])
def test_a_folder_of_the_users_own_is_left_alone(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"{PREFIX}{name}"
    (folder / "inner").mkdir(parents=True)
    for each in ("lock", "a.sock", "node-1.json", MARKER, "inner/thesis.txt"):
        (folder / each).write_text("mine")
    os.utime(folder, (1, 1))
    before = bytes_of(folder)
    RunDirectory(tmp_path).remove()
    assert bytes_of(folder) == before


@pytest.mark.parametrize("age", [0.0, 1.0])
def test_a_directory_without_the_marker_is_left_alone_however_old(tmp_path: Path, age: float) -> None:
    folder = tmp_path / f"{PREFIX}{NAME}"
    folder.mkdir()
    (folder / "lock").touch()
    if age:
        os.utime(folder, (age, age))
    assert sweep(tmp_path) == []
    assert (folder / "lock").exists()


def test_a_marker_that_is_a_link_is_none(tmp_path: Path) -> None:
    folder = tmp_path / f"{PREFIX}{NAME}"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / MARKER).symlink_to(folder / "lock")
    assert sweep(tmp_path) == []
    assert (folder / "lock").exists()


@pytest.mark.parametrize("swept", [True, False])
def test_what_is_not_ours_stays_and_so_does_its_folder(tmp_path: Path, swept: bool) -> None:
    run = RunDirectory(tmp_path)
    for suffix in ("sock", "tcp", "verbs", "part"):
        (run.path / f"{NAME}.{suffix}").touch()
    for suffix in ("json", "part"):
        (run.path / f"node-{NAME}.{suffix}").touch()
    (run.path / "notes.txt").write_text("mine")
    (run.path / "deep").mkdir()
    (run.path / "deep" / "b.sock").touch()
    (run.path / "folder.sock").mkdir()
    (run.path / "mine.sock").touch()
    (run.path / "node-notes.json").touch()
    if swept:
        run.forget()
        assert sweep(tmp_path) == [run.path]
        assert sweep(tmp_path) == []  # the marker is gone
    else:
        run.remove()
    left = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*"))
    assert left == ["deep", "deep/b.sock", "folder.sock", "mine.sock", "node-notes.json", "notes.txt"]


def test_living_directories_are_kept_whatever_the_clock_says(tmp_path: Path) -> None:
    private, common = RunDirectory(tmp_path), RunDirectory.shared(tmp_path, NAME)
    for run in (private, common):
        os.utime(run.path, (1, 1))
    assert sweep(tmp_path) == []
    private.remove()
    common.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "lock").touch()
    (target / MARKER).touch()
    trap = tmp_path / f"{PREFIX}{NAME}"
    trap.mkdir()
    (trap / "lock").symlink_to(target / "lock")
    (trap / MARKER).touch()
    (tmp_path / f"{PREFIX}{'d' * 32}").symlink_to(target)
    assert sweep(tmp_path) == []
    assert (target / "lock").exists()
    assert trap.exists()


def test_a_directory_that_is_not_marked_yet_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[list[Path]] = []
    mkdir, flock, mark = Path.mkdir, fcntl.flock, RunDirectory._mark

    def after_mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        mkdir(path, *args, **kwargs)
        swept.append(sweep(tmp_path))

    def before_lock(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        swept.append(sweep(tmp_path))
        flock(fd, how)

    def around_mark(run: RunDirectory) -> None:
        swept.append(sweep(tmp_path))
        mark(run)
        swept.append(sweep(tmp_path))

    monkeypatch.setattr(Path, "mkdir", after_mkdir)
    monkeypatch.setattr(fcntl, "flock", before_lock)
    monkeypatch.setattr(RunDirectory, "_mark", around_mark)
    run = RunDirectory(tmp_path)
    assert swept == [[]] * 4
    assert (run.path / MARKER).exists()
    run.remove()
    assert list(tmp_path.iterdir()) == []


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

HOLDER = f"""
import sys
from pathlib import Path
from zcactor.workers.run_directory import RunDirectory
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
    (first.path / f"{NAME}.sock").touch()
    second, other = RunDirectory.shared(tmp_path, NAME), RunDirectory.shared(tmp_path, "d" * 32)
    assert second.path == first.path != other.path
    assert sweep(tmp_path) == []
    first.remove()
    first.remove()
    assert first.lock_fd == -1
    assert (second.path / f"{NAME}.sock").exists()
    assert sweep(tmp_path) == []
    second.remove()
    assert list(tmp_path.iterdir()) == [other.path]
    other.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
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
    second.forget()  # as if the process had been killed
    assert second.path.exists()
    again = RunDirectory.shared(tmp_path, NAME)
    assert sorted(path.name for path in again.path.iterdir()) == ["lock", MARKER]
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
                (tmp_path / f"{PREFIX}{NAME}" / MARKER).touch()  # as another process that joined, and was killed
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
    assert len(os.listdir("/proc/self/fd")) <= before


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
        shutil.rmtree(left.path)  # as another sweep does
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


def test_the_directory_of_a_lock(tmp_path: Path) -> None:
    directory = RunDirectory.shared(tmp_path, "0" * 32)
    found = RunDirectory.of_lock(directory.lock_fd)
    assert found is not None
    assert found.path == directory.path
    found.remove()
    assert not directory.path.exists()
    with open(tmp_path / "lock", "w", encoding="utf-8") as file:
        assert RunDirectory.of_lock(file.fileno()) is None, "a lock in another folder"
