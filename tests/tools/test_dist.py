"""`tools/dist.py`: the same files give the same bytes, and failures are said."""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tools import dist, sbom
from tools.dist import Failure, compiler, epoch, interpreter, left_out, machines, repack

ZIG = ["python", "-m", "ziglang", "cc"]


def archive(path: Path, names: Sequence[str], *, mode: int = 0o644, date: int = 0, owner: str = "") -> Path:
    with tarfile.open(path, "w:gz") as made:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime, member.uname, member.uid = len(name), mode, date, owner, len(owner)
            made.addfile(member, io.BytesIO(name.encode()))
    return path


def test_two_builders_give_the_same_sdist(tmp_path: Path) -> None:
    one = archive(tmp_path / "one.tar.gz", ["z-1/a", "z-1/b"], mode=0o600, date=100, owner="one")
    two = archive(tmp_path / "two.tar.gz", ["z-1/b", "z-1/a"], mode=0o664, date=200)
    for old, new in ((one, tmp_path / "one"), (two, tmp_path / "two")):
        repack(old, new, 300)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with tarfile.open(tmp_path / "one") as packed:
        assert [(each.name, each.mode, each.mtime, each.uname) for each in packed] == [
            ("z-1/a", 0o644, 300, ""), ("z-1/b", 0o644, 300, ""),
        ]  # fmt: skip


def test_programs_stay_executable(tmp_path: Path) -> None:
    repack(archive(tmp_path / "old.tar.gz", ["z-1/run"], mode=0o700), tmp_path / "new", 0)
    with tarfile.open(tmp_path / "new") as packed:
        assert packed.getmember("z-1/run").mode == 0o755


def test_a_file_that_the_manifest_leaves_out(tmp_path: Path) -> None:
    for name in ("a", "b/c"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).touch()
    assert left_out(tmp_path / "tree", archive(tmp_path / "old.tar.gz", ["z-1/a"])) == ["b/c"]


def test_the_date_is_that_of_the_commit(tree: Path, commit: Callable[[str], str]) -> None:
    made = commit("Begin")
    shown = subprocess.run(
        ["git", "-C", str(tree), "show", "-s", "--format=%ct", made], capture_output=True, text=True, check=True
    )
    assert epoch(tree, {}) == int(shown.stdout)
    assert epoch(tree, {"SOURCE_DATE_EPOCH": "12"}) == 12


def test_a_date_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="SOURCE_DATE_EPOCH is 'today'; valid values: seconds since 1970"):
        epoch(tmp_path, {"SOURCE_DATE_EPOCH": "today"})


def test_outside_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=f"packages are built from a git checkout, and {tmp_path} is none"):
        epoch(tmp_path, {})


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["-c", "zcactor/native/fold.c", "-o", "fold.o"], "gcc"),
        (["-shared", "build/temp/zcactor/native/fold.o", "-o", "build/lib/zcactor/native/_hot.so"], "gcc"),
        (["-c", "zcactor/objectstore/heap/pins.c", "-o", "pins.o"], "python"),
        (["-shared", "build/temp/zcactor/device/_torch.o", "-o", "build/lib/zcactor/device/_torch.so"], "python"),
    ],
)
def test_each_part_has_its_compiler(words: list[str], first: str) -> None:
    command = compiler(words, ZIG, "x86_64")
    assert command[0] == first
    assert command[-len(words) :] == words
    assert ("x86_64-linux-gnu.2.28" in command) is (first != "gcc")
    assert compiler(words, ZIG, "aarch64") == [*ZIG, "-target", "aarch64-linux-gnu.2.28", *words]


@pytest.mark.parametrize("here", ["x86_64", "aarch64", "riscv64"])
def test_only_a_machine_of_x86_64_builds_for_it(
    here: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machines(here) == (["x86_64", "aarch64"] if here == "x86_64" else ["aarch64"])
    monkeypatch.setattr(platform, "machine", lambda: here)
    monkeypatch.setattr(dist, "build", lambda pythons, manylinux: [])
    assert dist.main(["--manylinux", "{}.{}".format(*sys.version_info)]) == 0
    said = "" if here == "x86_64" else "dist: wheels for x86_64 are built on it alone: none is built here\n"
    assert capsys.readouterr().err == said


def test_without_the_packages_that_write_a_bill_of_materials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cyclonedx", None)
    with pytest.raises(SystemExit, match=r"^sbom: cyclonedx\S* is missing: pip install --group dist$"):
        sbom.main(["PKG-INFO", "bill"])


def test_interpreters_are_pyenvs_newest_and_no_free_threaded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("3.99.2", "3.99.10", "3.99.11t", "3.9.99"):
        folder = tmp_path / "versions" / name / "bin"
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert interpreter("3.99") == str(tmp_path / "versions" / "3.99.10" / "bin" / "python")
    assert interpreter("3.98") is None
