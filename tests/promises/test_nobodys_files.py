"""A process removes only what names itself, and what decodes as zcactor's own: never a user's file."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tests.cluster.hosts import GRACE, Hosts, stop
from tests.transport.local_arena import TOKEN, run_directory
from zcactor.cluster.daemon import KeptState
from zcactor.cluster.records import NodeFile, list_nodes, started_at, write_record
from zcactor.cluster.rendezvous import Meeting, sweep_meetings
from zcactor.errors import AuthenticationError, ConnectionLost
from zcactor.node.agent_main import _remove_record
from zcactor.transport.local.endpoint import LocalEndpoint
from zcactor.transport.selector import SelectingEndpoint
from zcactor.transport.tcp.endpoint import TcpEndpoint

NAME = bytes(range(16))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as found:
        yield found


def hexadecimal(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


OTHERS = {
    "my results of the run 2026-11-20.csv": b"1,2\n",  # 32 characters before its first dot
    hexadecimal("a"): b"",
    hexadecimal("b"): b"{}",
    hexadecimal("c"): b"\xff\xfe",
    hexadecimal("d"): b'{"run": "17", "address": "a:1", "host": "h", "pid": 1}',  # another run's name
    hexadecimal("e") + ".npy": b"\x93NUMPY",
    hexadecimal("f") + "." + "0" * 16: b'{"run": "17", "address": "a:1", "host": "h", "pid": 1}',
}
"""A user's own files, each with something of the file of a run."""


def test_old_files_of_a_user_stay_where_ranks_meet(tmp_path: Path) -> None:
    for name, data in OTHERS.items():
        (tmp_path / name).write_bytes(data)
    meeting = Meeting(tmp_path, "17")
    meeting.publish("a:1")
    more = tmp_path / hexadecimal("g")
    more.write_bytes(meeting.path.read_bytes()[:-1] + b', "mine": 1}')
    renamed = meeting.path.with_name(f"{meeting.path.name}.npy")
    renamed.write_bytes(meeting.path.read_bytes())
    left = meeting.path.with_name(f"{meeting.path.name}.{'0' * 16}")  # a rank was killed before it had its name
    left.write_bytes(meeting.path.read_bytes())
    (tmp_path / hexadecimal("h")).mkdir()
    (tmp_path / hexadecimal("i")).symlink_to(renamed)
    os.mkfifo(tmp_path / hexadecimal("j"))
    before = {path.name for path in tmp_path.iterdir()} - {meeting.path.name, left.name}
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    sweep_meetings(tmp_path, time.time())
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_a_head_that_is_started_again_leaves_the_living_one_its_record(hosts: Hosts) -> None:
    state = KeptState(hosts.directory / "log")
    head = hosts.start(state=state)
    before = list_nodes(hosts.run_directories("a"))
    assert len(before) == 2
    port = int(head.record.address.rpartition(":")[2])
    with pytest.raises(ConnectionLost):
        hosts.start(state=state, port=port)
    assert list_nodes(hosts.run_directories("a")) == before
    assert {record for record, _ in stop(hosts)} == set(before)
    for node in head.all:
        node.process.wait(GRACE)
    hosts.assert_clean("a")


def test_an_agent_removes_its_own_record_only(tmp_path: Path) -> None:
    started = started_at(os.getpid())
    assert started is not None
    own = NodeFile("a" * 32, os.getpid(), started, "head", "", "", "")
    path = tmp_path / f"node-{own.node}.json"
    for other in (replace(own, pid=own.pid + 1), replace(own, started=started + 1)):
        write_record(tmp_path, other)
        _remove_record(path)
        assert path.exists()
    for text in (b"", b"[]", b"\xff", b'{"pid": "x"}'):
        path.write_bytes(text)
        _remove_record(path)
        assert path.read_bytes() == text
    write_record(tmp_path, own)
    _remove_record(path)
    assert not path.exists()
    _remove_record(path)


async def test_a_later_head_keeps_the_files_by_which_it_is_found(tmp_path: Path) -> None:
    """A head that was stopped ends when another one leads the cluster on its host: both have the cluster's name."""

    def head() -> SelectingEndpoint:
        local = LocalEndpoint(directory, NAME, TOKEN, None, 0)
        return SelectingEndpoint(directory, NAME, [local, TcpEndpoint("127.0.0.1", NAME, TOKEN, None, 0)])

    directory = run_directory(tmp_path)
    async with head() as first:
        await first.start(lambda _: None)
        for path in directory.iterdir():
            path.unlink()  # the second one takes the first one's place
        async with head() as second:
            await second.start(lambda _: None)
            await first.aclose()
            assert {path.name for path in directory.iterdir()} == {f"{NAME.hex()}.sock", f"{NAME.hex()}.tcp"}
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(directory / f"{NAME.hex()}.sock"))
            await second.aclose()
        assert not list(directory.iterdir())


def test_a_note_is_what_the_file_of_a_run_has(tmp_path: Path) -> None:
    """The test above spells the file out."""
    meeting = Meeting(tmp_path, "17")
    meeting.publish("a:1")
    assert set(msgspec.json.decode(meeting.path.read_bytes())) == {"run", "address", "host", "pid"}


def test_a_pipe_where_ranks_meet_is_refused_at_once(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, "17")
    os.mkfifo(meeting.path, 0o600)  # nobody writes to it
    with pytest.raises(AuthenticationError, match="only this user may write the plain file by which ranks find each"):
        meeting.look()
    meeting.remove("a:1")
    assert meeting.path.exists()
