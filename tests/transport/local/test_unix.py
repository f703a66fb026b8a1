"""Unix sockets: descriptors, users, paths."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.descriptors import opened
from tests.hosts.netns import missing
from tests.transport.local_arena import run_directory
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.local import unix
from zcactor.transport.os_process import OsProcess

Ends = tuple[socket.socket, socket.socket]


async def test_descriptor_is_passed(ends: Ends) -> None:
    reader, writer = os.pipe()
    receiving = asyncio.create_task(unix.receive_descriptor(ends[1]))
    await asyncio.sleep(0)
    await unix.send_descriptor(ends[0], writer)
    received = await receiving
    assert received is not None
    assert not os.get_inheritable(received)
    os.write(received, b"through")
    assert os.read(reader, 10) == b"through"
    for fd in (reader, writer, received):
        os.close(fd)


async def test_word_that_there_is_none(ends: Ends) -> None:
    await unix.send_descriptor(ends[0], None)
    assert await unix.receive_descriptor(ends[1]) is None


@pytest.mark.parametrize(("word", "count"), [(b"\0", 1), (b"\1", 0), (b"\1", 2), (b"\1", 3), (b"\7", 1), (b"\7", 0)])
async def test_another_number_of_descriptors(ends: Ends, word: bytes, count: int) -> None:
    before = opened()
    socket.send_fds(ends[0], [word], [0] * count)
    with pytest.raises(ProtocolError, match="descriptors"):
        await unix.receive_descriptor(ends[1])
    assert opened() <= before


async def test_no_descriptor_is_left(ends: Ends) -> None:
    await unix.send_descriptor(ends[0], 0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            await unix.receive_descriptor(ends[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_descriptor_of_a_peer_that_is_gone(ends: Ends) -> None:
    ends[0].close()
    with pytest.raises(ConnectionLost):
        await unix.receive_descriptor(ends[1])


def test_peer_uid(ends: Ends) -> None:
    assert unix.peer_uid(ends[0]) == os.geteuid()


@pytest.mark.parametrize("depth", [1, 120])
async def test_listen_and_connect(tmp_path: Path, depth: int) -> None:
    directory = tmp_path / ("d" * depth)
    directory.mkdir()
    path = directory / "a.sock"
    before = opened()
    with unix.listen(path) as listener:
        with await unix.connect(path) as client, listener.accept()[0] as server:
            client.send(b"hello")
            assert server.recv(10) == b"hello"
        with pytest.raises(OSError, match="in use"):
            unix.listen(path)
    with pytest.raises(ConnectionRefusedError):
        await unix.connect(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        await unix.connect(path)
    assert opened() <= before


async def test_connect_waits_while_the_backlog_is_full(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with contextlib.ExitStack() as open_sockets:
        listener = open_sockets.enter_context(unix.listen(path))
        listener.listen(0)
        open_sockets.enter_context(await unix.connect(path))
        late = asyncio.create_task(unix.connect(path))
        await asyncio.sleep(0)
        assert not late.done()
        for _ in range(2):
            open_sockets.enter_context(listener.accept()[0])
            open_sockets.enter_context(await late)


def test_directory(tmp_path: Path) -> None:
    directory = run_directory(tmp_path)
    assert unix.directory_problem(directory) is None
    assert "create it" in str(unix.directory_problem(tmp_path / "missing"))
    (tmp_path / "file").touch()
    assert "not a directory" in str(unix.directory_problem(tmp_path / "file"))
    (tmp_path / "link").symlink_to(directory)
    assert "not a directory" in str(unix.directory_problem(tmp_path / "link"))
    for mode in (0o755, 0o701, 0o770, 0o500, 0o1700):
        directory.chmod(mode)
        assert f"{mode:04o}" in str(unix.directory_problem(directory))


@pytest.mark.root
def test_directory_of_another_user(tmp_path: Path) -> None:
    directory = run_directory(tmp_path)
    os.chown(directory, 65534, 65534)
    assert "uid 65534" in str(unix.directory_problem(directory))


SERVER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1])
    server.listen()
    print("ready", flush=True)
    connection, _ = server.accept()
    connection.recv(1)
"""


@pytest.mark.parametrize("known", [True, False], ids=["told", "by number"])
@pytest.mark.parametrize("apart", [False, True], ids=["here", "other namespace"])
def test_the_end_of_a_peer_is_seen(apart: bool, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if apart and (reason := missing()):
        pytest.skip(reason)
    if not known:
        monkeypatch.setattr(unix, "_SO_PEERPIDFD", 9999)  # as before Linux 6.5
    path = str(tmp_path / "s")
    command = [*(("unshare", "--pid", "--fork") if apart else ()), sys.executable, "-c", SERVER, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server, socket.socket(socket.AF_UNIX) as sock:
        assert server.stdout is not None
        server.stdout.readline()
        sock.connect(path)
        process = unix.peer_descriptor(sock)
        assert process is not None
        poll = select.poll()
        poll.register(process, select.POLLIN)
        assert not poll.poll(0)
        sock.close()
        assert poll.poll(60_000)
        os.close(process)


def test_a_peer_that_the_system_does_not_tell_of(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix, "_SO_PEERPIDFD", 9999)
    monkeypatch.setattr(unix, "peer_process", lambda _: OsProcess.of(0))  # in a namespace that is not seen
    assert unix.peer_descriptor(ends[0]) is None
