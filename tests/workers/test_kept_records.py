"""Records of nodes in the state folder: which of them count, where they are written, and where processes meet."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zcactor.cluster.records import NodeFile, nodes_here
from zcactor.node.agent_main import _remove_record
from zcactor.transport.os_process import pid_space, started_at
from zcactor.workers.kept_records import keep, kept_nodes, kept_path, meeting_base, nodes_apart, out_of_reach
from zcactor.workers.run_directory import PREFIX, RunDirectory, shared_names

NAMES = shared_names("c" * 32, b"t" * 32)


@pytest.fixture(autouse=True)
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ``XDG_RUNTIME_DIR`` of this session, and a state folder beside it."""
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return path


def record(number: int = 1, **changed: Any) -> NodeFile:
    """The record of this process as a node."""
    made = NodeFile(
        f"{number:032x}", os.getpid(), started_at(os.getpid()) or 0, "member", "127.0.0.1:1", "127.0.0.1:7433", "",
        space=pid_space(), directory="/gone",
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


def kept(number: int = 1, **changed: Any) -> NodeFile:
    """Write such a record to the state folder."""
    made = record(number, **changed)
    assert keep(kept_path(made.node, os.environ), msgspec.json.encode(made))
    return made


def run_directory(base: Path) -> Path:
    """A run directory in `base`, with the socket of node 1."""
    base.mkdir(mode=0o700, exist_ok=True)
    path = base / f"{PREFIX}{NAMES[0]}"
    path.mkdir(mode=0o700)
    (path / f"{1:032x}.sock").touch()
    return path


# ---- writing


def test_a_record_is_written_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = kept()
    finally:
        os.umask(before)
    path = tmp_path / "state" / "zcactor" / "nodes" / f"node-{1:032x}.json"
    assert os.listdir(path.parent) == [path.name]
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
    assert nodes_here() == [made]
    assert kept() == made
    assert nodes_here() == [made]


def test_where_nothing_can_be_written_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(file))
    assert not keep(kept_path("1" * 32, os.environ), b"")
    assert kept_nodes(os.environ) == []
    no_home = {"HOME": "relative"}
    monkeypatch.setattr("zcactor.folders.pwd.getpwuid", _nobody)
    assert kept_path("1" * 32, no_home) == ""
    assert not keep("", b"")
    assert kept_nodes(no_home) == []


def _nobody(_: int) -> None:
    raise KeyError


@pytest.mark.parametrize("how", ["open to others", "a link", "a file"])
def test_a_folder_that_is_not_ours_alone_is_neither_written_nor_read(tmp_path: Path, how: str) -> None:
    kept()
    folder = tmp_path / "state" / "zcactor" / "nodes"
    if how == "open to others":
        folder.chmod(0o750)
    else:
        folder.rename(tmp_path / "elsewhere")
        if how == "a link":
            folder.symlink_to(tmp_path / "elsewhere")
        else:
            folder.touch()
    assert nodes_here() == []
    assert not keep(kept_path("2" * 32, os.environ), msgspec.json.encode(record(2)))
    if folder.is_dir():
        assert len(os.listdir(folder)) == 1


def test_a_link_in_the_place_of_a_record_is_not_followed(tmp_path: Path) -> None:
    kept()
    path = Path(kept_path(f"{1:032x}", os.environ))
    target = tmp_path / "target"
    path.rename(target)
    path.symlink_to(target)
    assert nodes_here() == []
    part = path.with_name(f"{path.name}.part")
    part.symlink_to(target)
    content = target.read_bytes()
    assert not keep(str(path), b"other")
    assert target.read_bytes() == content


def test_records_of_killed_processes_go_when_the_next_one_is_written(child: subprocess.Popen[bytes]) -> None:
    started = started_at(child.pid) or 0
    kept(2, pid=child.pid, started=started)
    kept(3, pid=child.pid, started=started, space="elsewhere")
    kept(4, pid=child.pid, started=started)
    folder = Path(kept_path("", os.environ)).parent
    assert len(os.listdir(folder)) == 3
    child.kill()
    child.wait()
    ours = kept()
    elsewhere = f"node-{3:032x}.json"
    assert sorted(os.listdir(folder)) == [f"node-{ours.node}.json", elsewhere]


def test_many_records_need_few_descriptors(tmp_path: Path) -> None:
    for number in range(1, 61):
        kept(number)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, before[1]))
    try:
        assert len(kept_nodes(os.environ)) == 60
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        with pytest.raises(OSError, match="Too many open files"):
            kept_nodes(os.environ)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# ---- which records count


def test_a_record_counts_as_long_as_its_process_lives(child: subprocess.Popen[bytes]) -> None:
    made = kept(pid=child.pid, started=started_at(child.pid))
    assert nodes_here() == [made]
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert nodes_here() == [], "a process that nobody has reaped has ended, too"
    child.wait()
    assert nodes_here() == []


@pytest.mark.parametrize(
    "changed",
    [
        {"started": 0},
        {"started": (started_at(os.getpid()) or 0) - 1},
        {"space": ""},
        {"space": f"{pid_space()}0"},
        {"pid": 0},
        {"pid": -1},
        {"pid": 1 << 40},
    ],
)
def test_a_record_of_another_process_boot_or_host_does_not_count(changed: dict[str, Any]) -> None:
    kept(**changed)
    assert nodes_here() == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"pid": 1}', b'{"pid": "x"}'])
def test_what_is_no_record_is_passed_over(content: bytes) -> None:
    made = kept()
    assert keep(kept_path("2" * 32, os.environ), content)
    assert nodes_here() == [made]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_record_that_others_can_get_at_does_not_count(mode: int) -> None:
    made = kept()
    Path(kept_path(made.node, os.environ)).chmod(mode)
    assert nodes_here() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away, as root can")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_record_of_another_user_does_not_count(what: str) -> None:
    path = Path(kept_path(kept().node, os.environ))
    os.chown(path if what == "file" else path.parent, 65534, 65534)
    assert nodes_here() == []


def test_a_node_is_listed_once(session: Path) -> None:
    path = run_directory(session)
    made = kept(directory=str(path))
    (path / f"node-{1:032x}.json").write_bytes(msgspec.json.encode(made))
    (path / f"node-{1:032x}.json").chmod(0o600)
    assert nodes_here() == nodes_here(NAMES) == [made]
    assert nodes_here(["d" * 32]) == []


# ---- removing


@pytest.mark.parametrize(
    ("changed", "stays"),
    [
        ({}, False),
        ({"started": 1}, True),
        ({"pid": 1}, True),
        ({"space": "of another host"}, True),
    ],
)
def test_a_process_removes_only_what_names_itself(changed: dict[str, Any], stays: bool) -> None:
    path = Path(kept_path(kept(**changed).node, os.environ))
    _remove_record(path)
    assert path.exists() is stays
    _remove_record(path)
    _remove_record(path.parent / "missing" / "record")


# ---- sessions


def test_nodes_of_a_session_are_found_without_one(
    session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_directory(session)
    made = kept(directory=str(path), session=str(session))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert nodes_here() == nodes_here(NAMES) == [made]
    assert meeting_base(NAMES, os.environ) == session
    assert out_of_reach(NAMES, path, os.environ) == ("", False)
    assert meeting_base(["d" * 32], os.environ) == tmp_path, "another cluster"


def test_nodes_without_a_session_are_found_in_one(session: Path, tmp_path: Path) -> None:
    base = tmp_path / "temporary"
    made = kept(directory=str(run_directory(base)))
    assert nodes_here() == [made]
    assert meeting_base(NAMES, os.environ) == base


def test_a_run_directory_in_the_own_folder_comes_first(session: Path, tmp_path: Path) -> None:
    kept(directory=str(run_directory(tmp_path / "temporary")))
    kept(2, directory=str(run_directory(session)), session=str(session))
    assert meeting_base(NAMES, os.environ) == session


def test_two_folders_that_were_named_keep_their_nodes_apart(session: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    path = run_directory(other)
    made = kept(directory=str(path), session=str(other))
    assert nodes_here() == nodes_here(NAMES) == []
    assert meeting_base(NAMES, os.environ) == session
    assert (
        nodes_apart(os.environ)
        == f"the node at 127.0.0.1:1 (pid {os.getpid()}) runs with XDG_RUNTIME_DIR={other}, here it is {session}"
    )
    told, gone = out_of_reach(NAMES, session, os.environ)
    assert not gone
    assert told == (
        f"the node at 127.0.0.1:1 (pid {os.getpid()}) on this host has its run directory in XDG_RUNTIME_DIR={other}, "
        f"and this process in {session}"
    )
    (path / f"{1:032x}.sock").unlink()
    path.rmdir()
    assert nodes_here() == [made], "a node that has lost its folder is found from each session"
    assert nodes_apart(os.environ) == ""


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.chmod(0o770),
        lambda path: path.rename(path.with_name("elsewhere")),
        lambda path: (path.rename(path.with_name("elsewhere")), path.symlink_to(path.with_name("elsewhere"))),
        lambda path: (path.rename(path.with_name("elsewhere")), path.touch()),
    ],
)
def test_processes_meet_in_a_directory_of_their_own_only(
    session: Path, tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    path = run_directory(tmp_path / "temporary")
    kept(directory=str(path))
    spoil(path)
    assert meeting_base(NAMES, os.environ) == session
    directory = RunDirectory.shared(session, *NAMES)
    told, gone = out_of_reach(NAMES, directory.path, os.environ)
    directory.remove()
    assert gone
    assert told == (
        f"the node at 127.0.0.1:1 (pid {os.getpid()}) on this host has lost its run directory {path}, as after a "
        "logout: start it again where XDG_RUNTIME_DIR names a folder that stays, or have it stay by 'loginctl "
        "enable-linger'"
    )


def test_a_directory_that_was_made_anew_has_no_sockets_of_the_node(session: Path) -> None:
    path = run_directory(session)
    kept(directory=str(path), session=str(session))
    kept(2, directory=str(path), session=str(session))
    told, gone = out_of_reach(NAMES, path, os.environ)
    assert gone and told.count("the node at") == 1, "node 2"
    (path / f"{1:032x}.sock").unlink()
    told, gone = out_of_reach(NAMES, path, os.environ)
    assert gone and told.count("the node at") == 2
    assert told.count("loginctl") == 1


def test_a_standby_that_leads_by_now_is_told_of_as_a_head(session: Path, tmp_path: Path) -> None:
    apart = run_directory(tmp_path / "other session")
    kept(2, directory=str(apart), session=str(apart.parent), role="standby")
    own = run_directory(session)
    assert out_of_reach(NAMES, own, os.environ) == ("", False)
    (apart / f"{2:032x}.sock").touch()
    told, gone = out_of_reach(NAMES, own, os.environ)
    assert f"has its run directory in XDG_RUNTIME_DIR={apart.parent}" in told and not gone
    shutil.rmtree(apart)
    told, gone = out_of_reach(NAMES, own, os.environ)
    assert f"has lost its run directory {apart}" in told and gone


def test_a_standby_that_has_no_sockets_yet_has_lost_nothing(tmp_path: Path) -> None:
    path = run_directory(tmp_path / "run")
    kept(2, directory=str(path), role="standby")
    assert out_of_reach(NAMES, path, os.environ) == ("", False)
    kept(2, directory=str(path))
    assert out_of_reach(NAMES, path, os.environ)[1]
