"""Connections that wait at an endpoint's door: their number, and their time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conformance.connection import Recorder, connect, finish, send, turns
from tests.transport.local_arena import local_side, run_directory
from tests.transport.outsiders import ANSWERS, STRANGERS, rest
from zcactor.errors import ConnectionLost
from zcactor.transport.base import Connection
from zcactor.transport.local import unix
from zcactor.transport.local.endpoint import LocalEndpoint
from zcactor.transport.stream import handshake_io, listener
from zcactor.transport.stream.handshake import HandshakeStatus, preamble, refusal
from zcactor.transport.stream.listener import LOG_INTERVAL, MAX_PENDING, SILENT, SILENT_BY_TLS, Listener, Rebuff, _Place


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[LocalEndpoint]:
    with local_side(run_directory(tmp_path)) as side:
        assert isinstance(side.endpoint, LocalEndpoint)
        async with side.endpoint as endpoint:
            await endpoint.start(lambda connection: connection.abort())
            yield endpoint
        await turns()


@pytest.fixture
def path(endpoint: LocalEndpoint, tmp_path: Path) -> str:
    return str(tmp_path / "run" / f"{endpoint.address}.sock")


def call(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect(path)
    return sock


@pytest.mark.parametrize("opening", STRANGERS.values(), ids=STRANGERS.keys())
async def test_strangers(endpoint: LocalEndpoint, path: str, opening: bytes, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        with call(path) as sock:
            sock.send(opening)
            assert await rest(sock) in ANSWERS
    while endpoint.pending:
        await asyncio.sleep(0)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("sent", [b"", b"ZC", preamble(), preamble() + bytes(30)])
async def test_silence_ends(path: str, sent: bytes, endpoint: LocalEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 0.02)
    with call(path) as sock:
        sock.send(sent)
        assert await rest(sock) == b""
    while endpoint.pending:
        await asyncio.sleep(0)


async def test_no_more_than_so_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "SILENT", 1000.0)
    monkeypatch.setattr(handshake_io, "ADMITTED_WITHIN", 0.0)
    directory = run_directory(tmp_path)
    with local_side(directory) as left, local_side(directory) as right, contextlib.ExitStack() as crowd:
        pair = await connect(left, right)
        recorder = Recorder()
        pair.right.start(recorder)
        assert isinstance(right.endpoint, LocalEndpoint)
        path = str(directory / f"{right.endpoint.address}.sock")
        callers = [crowd.enter_context(call(path)) for _ in range(200)]
        for sock in callers[MAX_PENDING:]:
            assert await rest(sock) == refusal(HandshakeStatus.FULL)
        assert right.endpoint.pending == MAX_PENDING
        with pytest.raises(ConnectionLost, match="too many pending"):
            await left.endpoint.connect(right.endpoint.address)
        send(pair.left, [b"who is in, is in"])
        await recorder.wait_frames(1)
        crowd.close()
        while right.endpoint.pending:
            await asyncio.sleep(0)
        monkeypatch.undo()
        (await left.endpoint.connect(right.endpoint.address)).abort()
        (await pair.accepted.get()).abort()
        await finish(pair)


async def test_a_connector_waits_for_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "SILENT", 1000.0)
    directory = run_directory(tmp_path)
    with local_side(directory) as left, local_side(directory) as right, contextlib.ExitStack() as crowd:
        assert isinstance(right.endpoint, LocalEndpoint)
        async with right.endpoint:
            await right.endpoint.start(lambda connection: connection.abort())
            path = str(directory / f"{right.endpoint.address}.sock")
            for _ in range(MAX_PENDING):
                crowd.enter_context(call(path))
            while right.endpoint.pending < MAX_PENDING:
                await asyncio.sleep(0)
            refused: list[socket.socket] = []
            turn_away = Listener._turn_away

            def noted(door: Listener, sock: socket.socket, *args: Any, **settings: Any) -> None:
                refused.append(sock)
                turn_away(door, sock, *args, **settings)

            monkeypatch.setattr(Listener, "_turn_away", noted)
            connecting = asyncio.ensure_future(left.endpoint.connect(right.endpoint.address))
            while not refused:
                await asyncio.sleep(0)
            crowd.close()
            (await connecting).abort()
        await turns()


@pytest.mark.slow
async def test_so_many_are_begun_at_once(tmp_path: Path) -> None:
    directory = run_directory(tmp_path)
    with local_side(directory) as left, local_side(directory) as right:
        assert isinstance(right.endpoint, LocalEndpoint)
        async with right.endpoint as acceptor:
            most = 0

            def accepted(connection: Connection) -> None:
                nonlocal most
                most = max(most, acceptor.pending)
                connection.abort()

            await right.endpoint.start(accepted)
            for connection in await asyncio.gather(
                *[left.endpoint.connect(right.endpoint.address) for _ in range(3 * handshake_io.UNDER_WAY)]
            ):
                connection.abort()
            assert 1 < most <= handshake_io.UNDER_WAY
        await turns()


async def test_closing_ends_pending_handshakes(endpoint: LocalEndpoint, path: str) -> None:
    with call(path) as waiting, call(path) as fresh:
        while endpoint.pending < 2:
            await asyncio.sleep(0)
        await endpoint.aclose()
        assert await rest(waiting) == await rest(fresh) == b""
    assert endpoint.pending == 0
    assert not Path(path).exists()


async def test_handshake_that_never_ran_is_closed(tmp_path: Path) -> None:
    async def greet(sock: socket.socket) -> None:
        sock.close()

    door = Listener(unix.listen(tmp_path / "a.sock"), greet)
    with call(str(tmp_path / "a.sock")) as sock:
        door._on_readable()
        await door.aclose()
        assert await rest(sock) == b""


async def test_defect_in_greeting_is_reported(tmp_path: Path) -> None:
    reported: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.put_nowait(context))

    async def greet(sock: socket.socket) -> None:
        sock.close()
        raise KeyError("a defect")

    door = Listener(unix.listen(tmp_path / "a.sock"), greet)
    with call(str(tmp_path / "a.sock")):
        assert isinstance((await reported.get())["exception"], KeyError)
    await door.aclose()


async def test_out_of_descriptors(path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Accepting pauses and begins again; the loop does not spin meanwhile."""
    monkeypatch.setattr(listener, "PAUSE", 0.02)
    with call(path) as sock, contextlib.ExitStack() as limited:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        limited.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while not caplog.records:
            await asyncio.sleep(0)
        limited.close()
        assert "accepting no connections" in caplog.text
        sock.send(b"a stranger")
        assert await rest(sock) == b""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_closing_in_a_forked_child_leaves_the_parent_listening(endpoint: LocalEndpoint, path: str) -> None:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(StopIteration):
            endpoint.aclose().send(None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with call(path) as sock:
        sock.send(b"GET / HTTP/1.1")
        assert await rest(sock) == b""


def test_one_line_in_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    rebuff = Rebuff()
    with caplog.at_level(logging.WARNING, "zcactor.transport"):
        for now in (0.0, 0.1, LOG_INTERVAL - 0.1, LOG_INTERVAL, LOG_INTERVAL + 1.0):
            rebuff.report(now, "no")
    assert [record.getMessage() for record in caplog.records] == [
        "refused a connection: no",
        "refused a connection: no (2 more since the last such line)",
    ]


def test_who_is_late() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        place = _Place(ours, None, 0.0, known=False)
        assert not place.is_silent(SILENT / 2)
        assert place.is_silent(SILENT)
        state: Any = SimpleNamespace(messages=0, missing=8)
        place.patience = state
        theirs.send(bytes(7))
        assert place.is_silent(SILENT), "single bytes are no message"
        theirs.send(bytes(1))
        assert not place.is_silent(100 * SILENT), "this process has not read it yet"
        ours.recv(8)
        state.messages, state.missing = 1, 72
        assert place.is_silent(SILENT), "preamble and hello have one time"
        state.messages, state.missing = 2, 64
        assert not place.is_silent(SILENT), "the proof has one of its own"
        assert not place.is_silent(1.5 * SILENT)
        assert place.is_silent(2 * SILENT)
        theirs.close()
        assert place.is_silent(2 * SILENT)
        state.messages = 3
        assert place.proven
        assert not place.is_silent(100 * SILENT)
    state.messages = 0
    place = _Place(ours, None, 0.0, known=False)
    assert not place.is_silent((SILENT_BY_TLS - 1) * SILENT), "TLS has taken it over"
    assert place.is_silent(SILENT_BY_TLS * SILENT)
