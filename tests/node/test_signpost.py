"""The listener of a standby, and the search for the head through it."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator

import pytest

from tests.conformance.connection import turns
from tests.transport.local_arena import TOKEN
from tests.transport.tcp_arena import tcp_listener
from zcactor.errors import AuthenticationError, ConnectionLost
from zcactor.node.standby import Signpost
from zcactor.transport.stream.head_word import HeadWord
from zcactor.transport.stream.probe import Standby, find_leader, identify
from zcactor.transport.tcp.endpoint import TcpEndpoint

PATIENCE = 60.0


@pytest.fixture(params=["127.0.0.1", "::1"])
async def signpost(request: pytest.FixtureRequest) -> AsyncIterator[Signpost]:
    standby = Signpost(request.param, 0, TOKEN)
    yield standby
    await standby.aclose()
    await standby.aclose()
    await turns()


@pytest.fixture
async def head() -> AsyncIterator[TcpEndpoint]:
    """A process that may be a head."""
    async with tcp_listener("127.0.0.1") as endpoint:
        yield endpoint


def place(of: Signpost | TcpEndpoint) -> str:
    if isinstance(of, TcpEndpoint):
        return of.address.partition("@")[2]
    sock = of._listener._sock
    host = sock.getsockname()[0]
    return f"[{host}]:{of.port}" if ":" in host else f"{host}:{of.port}"


def nowhere() -> str:
    """A place at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


async def test_a_standby_that_knows_a_head(signpost: Signpost, head: TcpEndpoint) -> None:
    signpost.leader = HeadWord(place(head), 3)
    with pytest.raises(Standby, match=f"is a standby, and the head is at {place(head)}") as found:
        await identify(place(signpost), TOKEN)
    assert (found.value.leader, found.value.epoch) == (place(head), 3)
    assert (await find_leader(place(signpost), TOKEN)).address == head.address


async def test_a_head_says_in_which_term_it_leads(head: TcpEndpoint) -> None:
    assert (await identify(place(head), TOKEN)).epoch == 0, "it is none"
    head.term = lambda: 4
    assert (await identify(place(head), TOKEN)).epoch == 4


async def test_a_standby_that_knows_none(signpost: Signpost) -> None:
    with pytest.raises(Standby, match="is a standby, and no head leads at present"):
        await find_leader(place(signpost), TOKEN)


async def test_a_standby_that_knows_one_later(signpost: Signpost, head: TcpEndpoint) -> None:
    finding = asyncio.create_task(find_leader(place(signpost), TOKEN, patience=PATIENCE))
    await turns()
    assert not finding.done()
    signpost.leader = HeadWord(place(head), 3)
    assert (await finding).process == head.process


async def test_another_token(signpost: Signpost) -> None:
    with pytest.raises(AuthenticationError, match="holds another token"):
        await find_leader(place(signpost), secrets.token_bytes(32), patience=PATIENCE)


async def test_several_addresses(signpost: Signpost, head: TcpEndpoint) -> None:
    signpost.leader = HeadWord(nowhere(), 3)
    given = f"{nowhere()}, {place(signpost)},{place(head)}"
    assert (await find_leader(given, TOKEN)).address == head.address
    assert (await find_leader(f"{place(head)},{place(head)}", TOKEN)).address == head.address


async def test_several_addresses_of_which_none_leads_to_a_head(signpost: Signpost) -> None:
    signpost.leader = HeadWord(nowhere(), 3)
    first = nowhere()
    with pytest.raises(ConnectionLost) as lost:
        await find_leader(f"{first},{place(signpost)}", TOKEN)
    reasons = lost.value.args[0].split("; ")
    assert len(reasons) == 3
    assert reasons[0].startswith(f"process {first} cannot be reached")
    assert reasons[1].endswith(f"is a standby, and the head is at {signpost.leader.place}")
    assert reasons[2].startswith(f"process {signpost.leader.place} cannot be reached")


@pytest.mark.parametrize("given", ["", "host:1,", "host:1,,host:2", "host"])
async def test_what_is_no_list_of_addresses(given: str) -> None:
    with pytest.raises(ValueError, match="is no address: "):
        await find_leader(given, TOKEN)
