"""The search for the head of a cluster in an etcd, and at several addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.control.fake_etcd import FakeEtcd
from tests.transport.local_arena import TOKEN
from tests.transport.tcp_arena import tcp_listener
from zcactor.config import Config
from zcactor.control.etcd_log import EtcdLog
from zcactor.control.head_log import Candidate
from zcactor.driver.finding import check_reachable, find_head, is_one
from zcactor.errors import ConnectionLost
from zcactor.transport.stream.probe import Identity
from zcactor.transport.tcp.endpoint import TcpEndpoint

PATIENCE = 60.0


@pytest.fixture
async def etcd() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as made:
        yield made


@pytest.fixture
async def head() -> AsyncIterator[TcpEndpoint]:
    """A process that may be a head."""
    async with tcp_listener("127.0.0.1") as endpoint:
        yield endpoint


def place(endpoint: TcpEndpoint) -> str:
    return endpoint.address.partition("@")[2]


def test_what_is_one_address() -> None:
    assert is_one("host:7433")
    assert not is_one("host:7433,other:7433")
    assert not is_one("etcd://host:2379")


async def test_a_head_that_begins_to_lead_while_it_is_sought(etcd: FakeEtcd, head: TcpEndpoint) -> None:
    finding = asyncio.create_task(find_head(etcd.url, TOKEN, None, PATIENCE))
    while not etcd.count("watch"):
        await asyncio.sleep(0.01)
    assert not finding.done()
    log = EtcdLog.at(etcd.url, TOKEN, {})
    await log.campaign(Candidate(place(head), "host", 1))
    assert (await finding).address == head.address
    await log.aclose()


async def test_etcd_that_names_no_head(etcd: FakeEtcd) -> None:
    with pytest.raises(ConnectionLost, match="no head was found in 0 s: it names no head, or does not answer"):
        await find_head(etcd.url, TOKEN, None, 0.0)


async def test_etcd_with_a_cluster_of_another_token(etcd: FakeEtcd, head: TcpEndpoint) -> None:
    log = EtcdLog.at(etcd.url, TOKEN, {})
    await log.campaign(Candidate(place(head), "host", 1))
    with pytest.raises(ConnectionLost, match="with another token"):
        await find_head(etcd.url, bytes(32), None, PATIENCE)
    await log.aclose()


async def test_several_addresses(head: TcpEndpoint) -> None:
    assert (await find_head(f"{place(head)},{place(head)}", TOKEN, None, 0.0)).address == head.address


@pytest.mark.parametrize("address", ["host", "a:1,b", "etcd://host", "etcd://me:secret@host:1"])
async def test_what_has_another_form(address: str) -> None:
    with pytest.raises(ValueError, match="address|host:port|password"):
        await find_head(address, TOKEN, None, 0.0)


@pytest.mark.parametrize(
    ("host", "there", "ours", "good"),
    [
        ("127.0.0.1", "10.0.0.5", "10.0.0.7", False),
        ("::1", "fd00::5", "fd00::7", False),
        ("10.0.0.7", "10.0.0.5", "10.0.0.7", True),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "10.0.0.7", "10.0.0.7", True),  # the head is on this host, at its outward address
    ],
)
def test_a_host_that_only_this_one_reaches_is_refused_where_the_head_is_elsewhere(
    host: str, there: str, ours: str, good: bool
) -> None:
    head = Identity(b"x" * 16, there, 7433, ours, 1)
    if good:
        check_reachable(Config(host=host), head)
        return
    with pytest.raises(ValueError, match=f"host is {host}, .* on another one, {there}: leave host out, or give {ours}"):
        check_reachable(Config(host=host), head)
