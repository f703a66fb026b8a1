"""The choice among several ways to a peer: the first that works, and the reasons against the others."""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.transport.local_arena import run_directory
from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError
from zcactor.transport.base import Endpoint
from zcactor.transport.frames import PeerInfo
from zcactor.transport.selector import LONGEST_REST, SelectingEndpoint, _Resting

NAME = bytes(range(16))
PEER = "ab" * 16


class Reached:
    """The part of a connection that selecting needs."""

    def __init__(self, kind: str, rejected: Mapping[str, str]) -> None:
        self.kind = kind
        self.rejected = rejected
        self.peer = PeerInfo(bytes.fromhex(PEER), 1, 0, 0)
        self.closed = asyncio.Event()

    async def aclose(self) -> None:
        self.closed.set()


class Way(Endpoint):
    """An endpoint that works or does not, and records requests."""

    def __init__(self, kind: str, error: Exception | None = None, **rejected: str) -> None:
        self.kind, self.by_name = kind, kind == "local"
        self.address = f"address of {kind}"
        self.seals_payloads = kind != "local"
        self.error = error
        self.rejected = rejected
        self.problem: str | None = None
        self.fallback = ""
        self.asked: list[str] = []
        self.calls: list[str] = []
        self.accepted: Callable[[Any], None] | None = None

    @property
    def far_address(self) -> str:
        return self.address

    def find_by(self, find: Any) -> None:
        self.calls.append("find_by")

    def viability(self) -> str | None:
        return self.problem

    async def start(self, accepted: Callable[[Any], None]) -> None:
        self.calls.append("start")
        self.accepted = accepted

    async def connect(self, address: str) -> Any:
        self.asked.append(address)
        if self.error is not None:
            raise self.error
        self.made = Reached(self.fallback or self.kind, self.rejected)
        return self.made

    def abandon(self) -> None:
        self.calls.append("abandon")

    async def aclose(self) -> None:
        self.calls.append("aclose")

    def dispose(self) -> None:
        self.calls.append("dispose")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return run_directory(tmp_path)


def selecting(directory: Path, *ways: Way, process: bytes = NAME) -> SelectingEndpoint:
    return SelectingEndpoint(directory, process, ways)


def publish(directory: Path, kind: str, address: str = "where it is", process: str = PEER) -> None:
    (directory / f"{process}.{kind}").write_text(address)


def test_is_an_endpoint(directory: Path) -> None:
    endpoint: Endpoint = selecting(directory, Way("local"))
    assert endpoint.address == NAME.hex()
    assert endpoint.kind == "any"


async def test_published_addresses(directory: Path) -> None:
    local, tcp = Way("local"), Way("tcp")
    async with selecting(directory, local, tcp) as endpoint:
        await endpoint.start(lambda _: None)
        (path,) = directory.iterdir()
        assert path.name == f"{NAME.hex()}.tcp"
        assert path.read_text() == "address of tcp"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await endpoint.aclose()
        assert not list(directory.iterdir())
    assert local.calls == tcp.calls == ["start", "aclose", "aclose"]


async def test_mode_whatever_the_umask_says(directory: Path) -> None:
    before = os.umask(0)
    try:
        await selecting(directory, Way("tcp")).start(lambda _: None)
    finally:
        os.umask(before)
    (path,) = directory.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_what_is_left_of_an_address_is_no_address(directory: Path) -> None:
    publish(directory, "part", process=NAME.hex())
    with pytest.raises(FileExistsError):
        await selecting(directory, Way("tcp")).start(lambda _: None)
    assert not (directory / f"{NAME.hex()}.tcp").exists()


async def test_closing_before_it_listens(directory: Path) -> None:
    await selecting(directory, Way("tcp")).aclose()


async def test_accepted_is_every_ways(directory: Path) -> None:
    ways = Way("local"), Way("tcp")
    accepted: list[Any] = []
    await selecting(directory, *ways).start(accepted.append)
    for way in ways:
        assert way.accepted is not None
        way.accepted(way)
    assert accepted == [*ways]


async def test_the_first_that_works(directory: Path) -> None:
    publish(directory, "tcp")
    local, tcp = Way("local"), Way("tcp")
    connection = await selecting(directory, local, tcp).connect(PEER)
    assert (connection.kind, connection.rejected) == ("local", {})
    assert (local.asked, tcp.asked) == ([PEER], [])


async def test_the_next_and_why(directory: Path) -> None:
    publish(directory, "tcp")
    local, tcp = Way("local", ConnectionLost("no socket")), Way("tcp", verbs="no device")
    connection = await selecting(directory, local, tcp).connect(PEER)
    assert connection.kind == "tcp"
    assert connection.rejected == {"local": "no socket", "verbs": "no device"}
    assert tcp.asked == ["where it is"]


async def test_order_is_the_callers(directory: Path) -> None:
    publish(directory, "tcp")
    connection = await selecting(directory, Way("tcp"), Way("local")).connect(PEER)
    assert connection.kind == "tcp"


async def test_none_works(directory: Path) -> None:
    ways = Way("local", ConnectionLost("no socket", True)), Way("tcp")
    with pytest.raises(ConnectionLost) as caught:
        await selecting(directory, *ways).connect(PEER)
    expected = f"process {PEER} cannot be reached: local: no socket; tcp: process {PEER} does not listen by tcp"
    assert caught.value.args[0].startswith(expected)
    assert not caught.value.maybe_executed


async def test_who_is_on_another_host_is_asked_for(directory: Path) -> None:
    async def find(process: str) -> str:
        if process != PEER:
            raise ConnectionLost("nobody knows it")
        return "far away"

    tcp = Way("tcp")
    endpoint = selecting(directory, Way("local", ConnectionLost("no socket")), tcp)
    endpoint.find = find
    await endpoint.connect(PEER)
    publish(directory, "tcp")
    await endpoint.connect(PEER)
    assert tcp.asked == ["far away", "where it is"]
    with pytest.raises(ConnectionLost, match="tcp: nobody knows it"):
        await endpoint.connect("cd" * 16)


async def test_who_may_have_moved_is_looked_for_there(directory: Path) -> None:
    local, tcp = Way("local"), Way("tcp")
    publish(directory, "tcp", "here")
    async with selecting(directory, local, tcp) as endpoint:
        endpoint.elsewhere = lambda name: "there" if name == PEER else ""
        found = await endpoint.connect(PEER)
        assert found.kind == "tcp"
        assert found.rejected == {"local": "it is elsewhere now"}
        assert (local.asked, tcp.asked) == ([], ["there"])
        endpoint.elsewhere = lambda _: "here"
        assert (await endpoint.connect(PEER)).kind == "local", "it has not moved, or is back"
        assert local.asked == [PEER]


@pytest.mark.parametrize("error", [AuthenticationError("stranger"), ProtocolError("rubbish")], ids=repr)
async def test_a_peer_that_is_not_to_be_trusted_is_not_tried_again(directory: Path, error: Exception) -> None:
    publish(directory, "tcp")
    tcp = Way("tcp")
    with pytest.raises(type(error)):
        await selecting(directory, Way("local", error), tcp).connect(PEER)
    assert not tcp.asked


@pytest.mark.parametrize("name", ["", "ab", PEER[:-1], PEER + "0", PEER.upper(), "../" + PEER[3:], PEER[:-1] + "\n"])
async def test_names_that_are_none(directory: Path, name: str) -> None:
    with pytest.raises(ProtocolError, match="no name of a process"):
        await selecting(directory, Way("tcp")).connect(name)


def test_viability(directory: Path) -> None:
    local, tcp = Way("local"), Way("tcp")
    endpoint = selecting(directory, local, tcp)
    assert endpoint.viability() is None
    local.problem = "no memfd"
    assert endpoint.viability() is None
    tcp.problem = "no network"
    assert endpoint.viability() == "local: no memfd; tcp: no network"


def test_all_ways_are_let_go_of(directory: Path) -> None:
    ways = Way("local"), Way("tcp")
    endpoint = selecting(directory, *ways, process=secrets.token_bytes(16))
    endpoint.abandon()
    endpoint.dispose()
    assert [way.calls for way in ways] == [["abandon", "dispose"]] * 2


# ---- addresses that have failed


async def test_an_address_that_failed_rests(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, tcp = Way("local", ConnectionLost("not here")), Way("tcp", ConnectionLost("nobody answers"))
    endpoint = selecting(directory, local, tcp)
    publish(directory, "tcp")
    for _ in range(3):
        with pytest.raises(ConnectionLost, match="nobody answers") as caught:
            await endpoint.connect(PEER)
    assert tcp.asked == ["where it is"]
    assert len(local.asked) == 3, "a file tells at once"
    assert "where it is is not tried again for " in str(caught.value)
    publish(directory, "tcp", "elsewhere")
    with pytest.raises(ConnectionLost, match="tcp: nobody answers"):
        await endpoint.connect(PEER)
    assert tcp.asked == ["where it is", "elsewhere"]
    monkeypatch.setattr(endpoint, "_resting", _Resting())
    tcp.error = None
    assert (await endpoint.connect(PEER)).kind == "tcp"


def test_rests_double_up_to_a_bound_and_end_with_success() -> None:
    resting = _Resting()
    now, rests = 100.0, []
    for _ in range(6):
        resting.check("a", now)
        resting.failed("a", now, "why")
        with pytest.raises(ConnectionLost, match="why"):
            resting.check("a", now)
        until = resting._failed["a"][0]
        rests.append(until - now)
        now = until
    assert rests == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    resting.check("b", now)
    resting.failed("b", now + 2 * LONGEST_REST, "why")
    assert list(resting._failed) == ["b"], "what has failed long ago is forgotten"
    resting.reached("b")
    resting.check("b", now + 2 * LONGEST_REST)
