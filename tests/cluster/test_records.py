"""The files that record the nodes of this host."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.driver.programs import until
from zcactor.cluster.records import NodeFile, list_nodes, parent_of, started_at, write_record
from zcactor.workers.run_directory import PREFIX


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run directory."""
    path = tmp_path / f"{PREFIX}{'c' * 32}"
    path.mkdir(mode=0o700)
    return path


def record(number: int = 1, role: str = "member", pid: int | None = None, started: int | None = None) -> NodeFile:
    pid = os.getpid() if pid is None else pid
    when = started if started is not None else started_at(pid)
    assert when is not None
    return NodeFile(f"{number:032x}", pid, when, role, f"127.0.0.1:{number}", "127.0.0.1:7433", "/log")


def test_written_and_listed(directory: Path, tmp_path: Path) -> None:
    assert list_nodes(tmp_path) == []
    write_record(directory, record())
    (path,) = directory.iterdir()
    assert path.name == f"node-{1:032x}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert msgspec.json.decode(path.read_bytes()) == msgspec.to_builtins(record())
    assert list_nodes(tmp_path) == [record()]
    write_record(directory, record())
    assert list_nodes(tmp_path) == [record()]


def test_heads_come_first_and_every_run_directory_counts(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / f"{PREFIX}{'d' * 32}"
    other.mkdir()
    written = [record(1), record(2, "head"), record(3), record(4, "head")]
    for each, place in zip(written, [directory, directory, other, other], strict=True):
        write_record(place, each)
    assert list_nodes(tmp_path) == [written[1], written[3], written[0], written[2]]


def test_those_that_have_ended_are_left_out(directory: Path, tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    write_record(directory, record(1, pid=child.pid))
    assert len(list_nodes(tmp_path)) == 1
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: its status was not collected yet
    assert started_at(child.pid) is None
    assert list_nodes(tmp_path) == []
    child.wait()
    assert started_at(child.pid) is None
    assert list_nodes(tmp_path) == []


def test_another_process_with_the_same_number_is_left_out(directory: Path, tmp_path: Path) -> None:
    now = started_at(os.getpid())
    assert now is not None
    write_record(directory, record(1, started=now - 1))
    write_record(directory, record(2, started=0))
    assert list_nodes(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"{}", b'{"node": 1}', b"\xff\xfe", b'{"node": "\xff"}', msgspec.json.encode(record())[:-5],
     msgspec.json.encode({**msgspec.to_builtins(record()), "pid": "many"})],
)  # fmt: skip
def test_what_is_no_record_is_left_out(directory: Path, tmp_path: Path, text: bytes) -> None:
    (directory / "node-0.json").write_bytes(text)
    write_record(directory, record(5))
    assert list_nodes(tmp_path) == [record(5)]


def test_other_files_are_left_out(directory: Path, tmp_path: Path) -> None:
    text = msgspec.json.encode(record())
    (directory / "node-1.part").write_bytes(text)
    (directory / "lock").write_bytes(text)
    (directory / "node-2.json").mkdir()
    (directory / "node-3.json").symlink_to(directory / "missing")
    (tmp_path / f"{PREFIX}file").write_bytes(text)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "node-4.json").write_bytes(text)
    assert list_nodes(tmp_path) == []
    assert list_nodes(tmp_path / "missing") == []


@pytest.mark.root
def test_those_of_others_are_left_out(directory: Path, tmp_path: Path) -> None:
    write_record(directory, record())
    os.chown(directory / f"node-{1:032x}.json", 12345, 12345)
    assert list_nodes(tmp_path) == []


def test_when_a_process_began(child: subprocess.Popen[bytes]) -> None:
    ours, childs = started_at(os.getpid()), started_at(child.pid)
    assert ours is not None and childs is not None
    assert ours <= childs == started_at(child.pid)
    assert started_at(1 << 30) is None
    assert started_at(-1) is None


def test_a_process_with_an_odd_name(tmp_path: Path) -> None:
    program = tmp_path / "a ) Z 1"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "1000"]) as process:
        # the new program's name appears a moment after it has begun
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "a ) Z 1\n", "the process's name")
        found = started_at(process.pid)
        process.kill()
    assert found is not None and found >= (started_at(os.getpid()) or 0)


def test_the_parent_of_a_process(child: subprocess.Popen[bytes]) -> None:
    assert parent_of(child.pid) == os.getpid()
    child.kill()
    child.wait()
    assert parent_of(child.pid) is None
