"""The ways in which ranks find the head: ports, strangers at them, files in a shared folder."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from zcactor.cluster import rendezvous
from zcactor.cluster.rendezvous import (
    PORTS,
    Meeting,
    address_text,
    addresses_of,
    bindable,
    cluster_of,
    first_port,
    folder_of,
    living,
    outward,
    seek,
    sweep_meetings,
)
from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError, VersionMismatch, ZcactorError
from zcactor.transport.stream.probe import Identity

TOKEN, RUN = b"t" * 32, "17.0"
HEAD = Identity(cluster_of(RUN, TOKEN), "10.0.0.1", 20001, "10.0.0.9", 0)
OTHER = Identity(cluster_of("18.0", TOKEN), "10.0.0.1", 20000, "10.0.0.9", 0)


def test_ports_of_a_run() -> None:
    ports = {first_port(f"{job}.0") for job in range(1000)}
    assert min(ports) >= 20000 and max(ports) + PORTS < 32768
    assert len(ports) > 900
    assert first_port(RUN) == first_port(RUN)


def test_the_id_of_a_cluster() -> None:
    assert len(cluster_of(RUN, TOKEN)) == 16
    assert len({cluster_of(RUN, TOKEN), cluster_of("17.1", TOKEN), cluster_of(RUN, b"u" * 32)}) == 3


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses_of("127.0.0.1") == ["127.0.0.1"]
    assert addresses_of("::1") == ["::1"]
    assert (address_text("10.0.0.1", 7), address_text("::1", 7)) == ("10.0.0.1:7", "[::1]:7")
    with pytest.raises(ConnectionLost, match="no host is called 'no such host'"):
        addresses_of("no such host")
    with pytest.raises(ConnectionLost, match="no host is called"):
        addresses_of("a" * 70)
    monkeypatch.setattr(rendezvous, "outward", lambda: "10.0.0.7")
    assert addresses_of("127.0.1.1") == ["10.0.0.7"]
    assert bindable(outward(), 0)


def test_ports_that_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not bindable("127.0.0.1", port)
    with pytest.raises(OSError, match="assign"):
        bindable("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"ZCACTOR_RENDEZVOUS": "/shared"}, "/shared"),
        ({"XDG_STATE_HOME": "/state"}, "/state/zcactor/runs"),
        ({}, os.path.expanduser("~/.local/state/zcactor/runs")),
    ],
)
def test_the_folder(environ: dict[str, str], path: str) -> None:
    assert str(folder_of(environ)) == path


def test_a_file(tmp_path: Path) -> None:
    meeting, other = Meeting(tmp_path / "runs", RUN), Meeting(tmp_path / "runs", "18.0")
    assert meeting.look() is None
    meeting.publish("10.0.0.1:7")
    assert (meeting.look(), other.look()) == ("10.0.0.1:7", None)
    assert stat.S_IMODE(meeting.path.stat().st_mode) == 0o600
    assert [path.name for path in meeting.path.parent.iterdir()] == [meeting.path.name]
    meeting.publish("10.0.0.1:8")
    meeting.remove("10.0.0.1:7")
    assert meeting.look() == "10.0.0.1:8"
    meeting.remove("10.0.0.1:8")
    meeting.remove("10.0.0.1:8")
    assert meeting.look() is None


def test_files_that_are_wrong(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, RUN)
    for text in ("", "{", '{"run": "another", "address": "a:1", "host": "", "pid": 1}', "[]"):
        meeting.path.write_text(text)
        meeting.path.chmod(0o600)
        assert meeting.look() is None
    meeting.path.chmod(0o620)
    with pytest.raises(AuthenticationError, match="with mode 0620: only this user may write"):
        meeting.look()
    meeting.path.unlink()
    meeting.path.symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic links"):
        meeting.look()


def test_old_files_are_swept(tmp_path: Path) -> None:
    old, young, foreign = Meeting(tmp_path, "old"), Meeting(tmp_path, "young"), tmp_path / "notes"
    for meeting in (old, young):
        meeting.publish("a:1")
    foreign.touch()
    for path in (old.path, foreign):
        os.utime(path, (0, 0))
    sweep_meetings(tmp_path, time.time())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([young.path.name, "notes"])
    sweep_meetings(tmp_path / "missing", time.time())


class Network:
    """Processes at addresses: each answers, raises, or is silent for ever (None)."""

    def __init__(self, **processes: Identity | ZcactorError | None) -> None:
        self.processes = processes
        self.asked: list[str] = []
        self.silent = asyncio.Event()

    async def identify(self, address: str, _token: bytes, _tls: object) -> Identity:
        self.asked.append(address)
        found = self.processes[address]
        if found is None:
            await self.silent.wait()
        if isinstance(found, Exception):
            raise found
        assert found is not None
        return found


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The pauses between looks, which take no time here."""
    pauses: list[float] = []

    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    yield pauses


async def look(
    network: Network, monkeypatch: pytest.MonkeyPatch, places: Sequence[str], *, exact: bool = False, over: bool = False
) -> str:
    monkeypatch.setattr(rendezvous, "identify", network.identify)
    deadline = time.monotonic() + (0.0 if over else 600.0)
    return await seek(lambda: places, RUN, lambda: TOKEN, None, deadline, exact=exact)


async def test_the_head_among_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(
        a=OTHER, b=ProtocolError("no"), c=AuthenticationError("another token"), d=None, e=VersionMismatch("old"), f=HEAD
    )
    assert await look(network, monkeypatch, "abcdef") == "f"
    assert sorted(network.asked) == list("abcdef")


async def test_a_head_that_comes_later(monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    network = Network(a=ConnectionLost("a: nobody listens"))
    looks = 0

    def places() -> Sequence[str]:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise ConnectionLost("no name yet")
        if looks == 5:
            network.processes["a"] = HEAD
        return "a"

    monkeypatch.setattr(rendezvous, "identify", network.identify)
    assert await seek(places, RUN, lambda: TOKEN, None, time.monotonic() + 600.0, exact=True) == "a"
    assert looks == 5
    assert slept == sorted(slept) and len(slept) == 4


async def test_a_token_that_comes_later(monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    network = Network(a=HEAD)
    monkeypatch.setattr(rendezvous, "identify", network.identify)
    tokens = [None, None, TOKEN]
    assert await seek(lambda: "a", RUN, lambda: tokens.pop(0), None, time.monotonic() + 600.0, exact=True) == "a"
    assert network.asked == ["a"]
    assert len(slept) == 2


async def test_no_head_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(a=OTHER, b=ProtocolError("no"), c=ConnectionLost("c: nobody listens"))
    with pytest.raises(ConnectionLost) as raised:
        await look(network, monkeypatch, "abc", over=True)
    assert "a: the head of another run or cluster is there" in str(raised.value)
    assert "b: a program listens there that is not zcactor's" in str(raised.value)
    assert "c: nobody listens" in str(raised.value)
    with pytest.raises(ConnectionLost, match="no process has said where it is"):
        await look(network, monkeypatch, "", over=True)
    with pytest.raises(AuthenticationError, match="there is no token"):
        await seek(lambda: "a", RUN, lambda: None, None, time.monotonic(), exact=True)


@pytest.mark.parametrize("error", [AuthenticationError("a: another token"), VersionMismatch("a: version 3")])
async def test_a_head_that_refuses(monkeypatch: pytest.MonkeyPatch, error: ZcactorError) -> None:
    with pytest.raises(type(error)):
        await look(Network(a=error), monkeypatch, "a", exact=True)
    with pytest.raises(ConnectionLost, match="a: (another token|version 3)"):
        await look(Network(a=error), monkeypatch, "a", over=True)


async def test_whether_a_head_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(a=HEAD, b=OTHER, c=ConnectionLost("no"))
    monkeypatch.setattr(rendezvous, "identify", network.identify)
    assert [await living(address, RUN, TOKEN, None) for address in "abc"] == [True, False, False]
