"""The candidates of a cluster in a made-up etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.conformance.head_log import ONE, PATIENCE, TWO
from tests.control.fake_etcd import FakeEtcd
from zcactor.control import etcd_log
from zcactor.control.etcd_log import EtcdLog
from zcactor.control.head_log import LogUnavailable


@pytest.fixture
async def etcd() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as made:
        yield made


async def known(log: EtcdLog, *addresses: str) -> None:
    """Wait until the candidates are at these addresses."""
    async with asyncio.timeout(PATIENCE):
        while await log.candidates() != sorted(addresses):
            await asyncio.sleep(0.01)


async def test_candidates_are_known_until_they_are_gone(etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_log, "KNOWN", 1)
    first, second = (EtcdLog.at(etcd.url, bytes(32), {}) for _ in range(2))
    await known(first)
    first.announce(ONE)
    second.announce(TWO)
    await known(first, ONE.address, TWO.address)
    await known(second, ONE.address, TWO.address)
    await second.aclose()
    await known(first, ONE.address)
    etcd.expire_all()
    await known(first, ONE.address)
    assert etcd.count("announce") == 3, "it is made known again"
    etcd.fail("announce", "lost")
    etcd.fail("keepalive", (404, 5, "etcdserver: requested lease not found"))
    while etcd.count("announce") < 5:
        await asyncio.sleep(0.01)
    await known(first, ONE.address)
    etcd.fail("view*", "lost")
    with pytest.raises(LogUnavailable):
        await first.candidates()
    del etcd.faults["view*"]
    await first.aclose()
    assert not any(b"/candidates/" in key for key in etcd.keys)
