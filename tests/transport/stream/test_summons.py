"""The word to a process that another head leads."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conformance.connection import turns
from tests.transport.certificates import Authority
from tests.transport.local_arena import TOKEN
from tests.transport.stream.test_head_word import both_ends
from tests.transport.tcp_arena import tcp_listener, tcp_side
from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError
from zcactor.transport.stream.handshake import Purpose
from zcactor.transport.stream.head_word import say
from zcactor.transport.stream.summons import summon, take_summons
from zcactor.transport.stream.tls import load_tls
from zcactor.transport.tcp.endpoint import TcpEndpoint

PATIENCE = 60.0


class Heard:
    """The words that a process has heard."""

    def __init__(self, endpoint: TcpEndpoint) -> None:
        self.words: list[tuple[str, int]] = []
        self.some = asyncio.Event()
        endpoint.summoned = self._note

    def _note(self, place: str, epoch: int) -> None:
        self.words.append((place, epoch))
        self.some.set()

    async def first(self) -> tuple[str, int]:
        """The first word."""
        async with asyncio.timeout(PATIENCE):
            await self.some.wait()
        return self.words[0]


@pytest.fixture(params=["127.0.0.1", "::1"])
async def member(request: pytest.FixtureRequest) -> AsyncIterator[TcpEndpoint]:
    async with tcp_listener(request.param) as endpoint:
        yield endpoint


async def test_a_process_hears_where_the_head_is(member: TcpEndpoint) -> None:
    heard = Heard(member)
    await summon(member.address, "[::1]:7433", (1 << 63) + 3, TOKEN)
    assert await heard.first() == ("[::1]:7433", (1 << 63) + 3)


async def test_a_process_that_nobody_asked_to_hear(member: TcpEndpoint) -> None:
    await summon(member.address, "a:1", 3, TOKEN)


async def test_by_tls(tmp_path: Path) -> None:
    folder = Authority().folder(tmp_path / "member")
    with tcp_side(tls=folder) as side:
        assert isinstance(side.endpoint, TcpEndpoint)
        await side.endpoint.start(lambda connection: connection.abort())
        heard = Heard(side.endpoint)
        await summon(side.endpoint.address, "a:1", 3, TOKEN, load_tls(folder))
        assert await heard.first() == ("a:1", 3)
        await side.endpoint.aclose()
        await turns()


async def test_another_process_is_not_told(member: TcpEndpoint) -> None:
    heard = Heard(member)
    place = member.address.partition("@")[2]
    with pytest.raises(AuthenticationError, match="answers in the place of"):
        await summon(f"{bytes(16).hex()}@{place}", "a:1", 3, TOKEN)
    with pytest.raises(AuthenticationError):
        await summon(member.address, "a:1", 3, secrets.token_bytes(32))
    await summon(member.address, "b:1", 3, TOKEN)
    assert await heard.first() == ("b:1", 3)


async def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionLost, match=f"127.0.0.1:{port} cannot be reached"):
        await summon(f"{bytes(16).hex()}@127.0.0.1:{port}", "a:1", 3, TOKEN)
    with pytest.raises(ValueError, match="too long"):
        await summon(f"{bytes(16).hex()}@127.0.0.1:{port}", "a" * 256, 3, TOKEN)


@pytest.mark.parametrize("place", [b"", b"a", b"a:0"])
async def test_a_place_of_another_form(place: bytes) -> None:
    async with both_ends(Purpose.SUMMONS) as (ours, calls, theirs, answers):
        await say(ours, calls, TOKEN, bytes(8) + place)
        with pytest.raises(ProtocolError, match="a message names a head: .* is no address"):
            await take_summons(theirs, answers, TOKEN)
