"""Control groups: those that bound a process, the memory they have left, and a store that stays within."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import pytest

from tests.objectstore.faked_groups import Usage, groups_of, write
from zcactor.errors import OutOfMemory
from zcactor.objectstore.arena import Arena
from zcactor.objectstore.groups import MemoryGroup, default_capacity, memory_of_machine, own_groups, smallest
from zcactor.objectstore.store import Store

MIB = 1 << 20
GIB = 1 << 30
versions = pytest.mark.parametrize("version", [1, 2])


@versions
def test_its_own_and_all_parents_count(tmp_path: Path, version: int) -> None:
    levels = {"a": Usage(limit=5 * GIB), "a/b": Usage(limit=GIB), "a/b/c": Usage()}
    groups = groups_of(tmp_path, levels, version)
    assert [group.folder.name for group in groups] == ["c", "b", "a"]
    assert [group.limit for group in groups] == [None, GIB, 5 * GIB]
    assert smallest(groups) is groups[1]


@versions
def test_a_group_that_is_mounted_as_the_root(tmp_path: Path, version: int) -> None:
    (group,) = groups_of(tmp_path, {"": Usage(limit=GIB)}, version, root="/docker/0123")
    assert group.limit == GIB


@versions
@pytest.mark.parametrize("root", ["/docker/01", "/elsewhere"])
def test_a_group_outside_of_the_mount_shows_the_mounts_own(tmp_path: Path, version: int, root: str) -> None:
    groups_of(tmp_path, {"": Usage(limit=GIB)}, version, root=root)
    (tmp_path / "proc" / "cgroup").write_text("4:memory:/docker/0123\n" if version == 1 else "0::/docker/0123\n")
    (group,) = own_groups(tmp_path / "proc")
    assert group.limit == GIB


@pytest.mark.parametrize("path", ["/", "/.."])
def test_nothing_is_found_where_there_are_no_files(tmp_path: Path, path: str) -> None:
    assert own_groups(tmp_path / "missing") == ()
    groups_of(tmp_path, {"a": Usage()})
    (tmp_path / "proc" / "cgroup").write_text(f"0::{path}\n")
    assert own_groups(tmp_path / "proc") == ()


@versions
def test_what_is_left(tmp_path: Path, version: int) -> None:
    (group,) = groups_of(tmp_path, {"a": Usage(limit=GIB, used=900 * MIB, inactive=100 * MIB)}, version)
    assert group.left == GIB - 800 * MIB
    write(group.folder, Usage(limit=GIB, used=2 * GIB), version)
    assert group.left == 0
    write(group.folder, Usage(used=2 * GIB), version)
    assert group.left is None


def test_a_group_that_is_gone_bounds_nothing(tmp_path: Path) -> None:
    (group,) = groups_of(tmp_path, {"a": Usage(limit=GIB)})
    for name in ("memory.current", "memory.max"):
        (group.folder / name).unlink()
        assert group.left is None
    assert group.limit is None


@versions
def test_the_default_capacity_is_of_the_least(tmp_path: Path, version: int) -> None:
    page = mmap.PAGESIZE
    assert default_capacity([]) == int(memory_of_machine() * 0.3) // page * page
    groups = groups_of(tmp_path, {"a": Usage(limit=300 * MIB), "a/b": Usage(limit=GIB)}, version)
    assert default_capacity(groups) == 90 * MIB
    assert default_capacity(groups, memory=100 * MIB) == 30 * MIB
    assert default_capacity(groups_of(tmp_path / "other", {"a": Usage()}, version), memory=100 * MIB) == 30 * MIB


def arena_in(*groups: MemoryGroup) -> Arena:
    return Arena(GIB, groups=groups)


@versions
def test_a_commit_beyond_what_is_left_is_refused_and_names_the_group(tmp_path: Path, version: int) -> None:
    levels = {"a": Usage(limit=300 * MIB, used=250 * MIB), "a/b": Usage(limit=GIB)}
    groups = groups_of(tmp_path, levels, version)
    arena = arena_in(*groups)
    with pytest.raises(OutOfMemory) as caught:
        arena.commit(0, 64 * MIB)
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    assert f"{name} of control group {groups[1].folder} allows {300 * MIB:,} bytes" in caught.value.note
    assert f"{50 * MIB:,} are left" in caught.value.note
    assert arena.committed == 0
    assert os.fstat(arena.fd).st_blocks == 0
    write(groups[1].folder, Usage(limit=300 * MIB, used=250 * MIB, inactive=100 * MIB), version)
    arena.commit(0, 64 * MIB)
    assert arena.committed == 64 * MIB
    arena.close()


def test_small_commits_add_up(tmp_path: Path) -> None:
    (group,) = groups_of(tmp_path, {"a": Usage(limit=GIB, used=GIB)})
    arena = arena_in(group)
    done = 0
    with pytest.raises(OutOfMemory, match="control group"):
        for done in range(8):
            arena.commit(done * 4 * MIB, 4 * MIB)
    assert done == 3
    with pytest.raises(OutOfMemory, match="control group"):
        arena.commit(100 * MIB, 2 * MIB)  # no later commit slips through either
    arena.close()


def test_memory_that_is_there_already_is_not_asked_for_again(tmp_path: Path) -> None:
    (group,) = groups_of(tmp_path, {"a": Usage(limit=GIB)})
    arena = arena_in(group)
    arena.commit(0, 64 * MIB)
    write(group.folder, Usage(limit=GIB, used=GIB))
    arena.commit(0, 64 * MIB)
    arena.close()


@pytest.mark.slow
def test_arrays_of_a_store(tmp_path: Path) -> None:
    (group,) = groups_of(tmp_path, {"a": Usage(limit=300 * MIB)})
    store = Store(GIB, bytes(16), arena=arena_in(group))
    with pytest.raises(OutOfMemory, match="control group"):
        store.empty(800 * MIB, np.uint8)
    assert store.stats().used == 0
    assert store.empty(200 * MIB, np.uint8).nbytes == 200 * MIB
    store.close()


def test_groups_are_given_once(tmp_path: Path) -> None:
    arena = arena_in(*groups_of(tmp_path, {"a": Usage()}))
    with pytest.raises(ValueError, match="already"):
        arena.heap.limit_by([])
    arena.close()


@pytest.mark.parametrize("wrong", [5, [("a", "b", "c")], [("a", "b", "c", "d"), ("a", "b", "c", 4)], [None]])
def test_groups_are_paths(wrong: object) -> None:
    arena = arena_in()
    with pytest.raises(TypeError):
        arena.heap.limit_by(wrong)  # type: ignore[arg-type]
    arena.close()


class Texts(Sequence[str]):
    """Four texts that are made on access, and that no other object holds."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 4

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if not isinstance(index, int) or index >= 4:
            raise IndexError(index)
        return f"{self.name}{'/' * 100}{('limit', 'usage', 'statistics', 'inactive')[index]}"


def test_texts_that_end_while_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "limit").write_text(f"{64 * MIB}\n")
    (tmp_path / "usage").write_text(f"{64 * MIB}\n")
    arena = arena_in()
    arena.heap.limit_by([Texts(str(tmp_path))])  # type: ignore[list-item]
    with pytest.raises(OSError, match="quota"):
        arena.heap.commit(0, 32 * MIB)
    arena.close()


def test_groups_that_are_given_while_others_are_read() -> None:
    arena = arena_in()

    def groups() -> Iterator[tuple[str, str, str, str]]:
        arena.heap.limit_by([("a", "b", "c", "d")])
        yield ("e", "f", "g", "h")

    with pytest.raises(ValueError, match="already"):
        arena.heap.limit_by(groups())  # type: ignore[arg-type]
    arena.close()


# ---- in a real one

PROGRAM = """
import asyncio, sys
import zcactor as zc

@zc.actor
class Maker:
    def make(self, n):
        return zc.ones(n)

async def main():
    async with zc.init(store_capacity=int(sys.argv[1]) or None):
        for attempt in (lambda: zc.ones(100 << 20), lambda: maker.make(100 << 20)):
            maker = await Maker.spawn()
            try:
                made = attempt()
                await made
            except zc.OutOfMemory as error:
                print("OutOfMemory", *str(error).split(), flush=True)
            except zc.RemoteError as error:
                print(error.type_name, *str(error).split(), flush=True)
        print("living", await maker.make(3), flush=True)

asyncio.run(main())
"""


@contextlib.contextmanager
def real_group(limit: int) -> Iterator[Path]:
    """Make a control group of this host with that limit, or skip the test where that is not allowed."""
    found = own_groups()
    version = 1 if found and found[0].limit_file == "memory.limit_in_bytes" else 2
    base = found[-1].folder if version == 1 else Path("/sys/fs/cgroup")
    folder = base / f"zcactor-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("capacity", [0, GIB])
def test_a_program_in_a_group_of_300_mib_gets_an_exception(capacity: int) -> None:
    with real_group(300 * MIB) as folder:
        child = subprocess.run(
            ["/bin/sh", "-c", f'echo $$ > "{folder}/cgroup.procs"; exec "$0" "$@"', sys.executable, "-c", PROGRAM,
             str(capacity)],
            capture_output=True, text=True, timeout=50,
        )  # fmt: skip
        assert child.returncode == 0, child.stdout + child.stderr
        lines = child.stdout.splitlines()
        assert [line.split()[0] for line in lines] == ["OutOfMemory", "OutOfMemory", "living"]
        if capacity:
            assert all(f"control group {folder} allows" in line for line in lines[:2])
