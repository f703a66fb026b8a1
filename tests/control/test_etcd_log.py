"""The log in etcd, beside a fake of etcd's gateway: `tests/engines/test_etcd.py` has the real one."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from tests.conformance.head_log import ONE, PATIENCE, TWO, HeadLogTests, Make
from tests.control.fake_etcd import FakeEtcd, Held
from zcactor.control.etcd_log import MARGIN, TTL, EtcdLog
from zcactor.control.etcd_url import EtcdAccess, EtcdPlace
from zcactor.control.head_log import Change, Deposed, LeaderAt, LogInUse, LogUnavailable, LogUnusable
from zcactor.control.memory_log import MemoryLog

TOKEN = bytes(32)
A1, A2, B1 = Change("name", "a", b"1"), Change("name", "a", b"2"), Change("name", "b", b"1")


@pytest.fixture
async def etcd() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as made:
        yield made


@pytest.fixture
async def make(etcd: FakeEtcd) -> AsyncIterator[Callable[..., EtcdLog]]:
    """A maker of logs in `etcd`, which are closed at the end."""
    logs: list[EtcdLog] = []

    def made(token: bytes = TOKEN, patience: float = 5.0, clock: Callable[[], float] | None = None) -> EtcdLog:
        place = EtcdPlace(tuple(etcd.endpoints), "test")
        more = {} if clock is None else {"clock": clock}
        logs.append(EtcdLog(place, EtcdAccess(), token, patience=patience, **more))
        return logs[-1]

    yield made
    for log in logs:
        await log.aclose()


class TestEtcdLog(HeadLogTests):
    """The suite for `EtcdLog` beside the fake."""

    @pytest.fixture
    def make(self, make: Callable[..., EtcdLog]) -> Make:
        return make


async def until_seen(etcd: FakeEtcd, kind: str, count: int) -> None:
    """Wait until etcd has got so many requests of a kind."""
    async with asyncio.timeout(PATIENCE):
        while etcd.count(kind) < count:
            await asyncio.sleep(0.01)


async def test_a_term_lasts_from_before_the_request(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    times = iter([100.0])
    held = Held()
    etcd.fail("keepalive", held)
    term = await make(clock=lambda: next(times, 200.0)).campaign(ONE)
    assert term.valid_until() == 100.0 + TTL - MARGIN
    await held.arrived.wait()
    assert term.valid_until() == 100.0 + TTL - MARGIN
    held.go.set()
    async with asyncio.timeout(PATIENCE):
        while term.valid_until() != 200.0 + TTL - MARGIN:
            await asyncio.sleep(0.01)


async def test_a_live_head_loses_its_lease(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    log = make()
    term = await log.campaign(ONE)
    leaders = log.leaders()
    assert await anext(leaders) == LeaderAt(term.epoch, ONE.address)
    etcd.expire_all()
    assert await anext(leaders) is None
    with pytest.raises(Deposed):
        await log.record(term, [A1])
    assert term.valid_until() == -math.inf
    again = await log.campaign(ONE)
    assert again.epoch > term.epoch
    assert await log.load(again) == {}


async def test_a_renewal_tells_that_the_lease_has_ended(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    term = await make().campaign(ONE)
    etcd.expire_all()
    async with asyncio.timeout(PATIENCE):
        while term.valid_until() > 0:
            await asyncio.sleep(0.01)
    assert etcd.count("keepalive") > 0


@pytest.mark.slow
async def test_a_renewal_that_fails_is_tried_again(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    refused = (503, 14, "etcdserver: request timed out"), (400, 3, "etcdserver: strange")
    etcd.fail("keepalive", "lost", *refused)
    log = make()
    term = await log.campaign(ONE)
    await until_seen(etcd, "keepalive", 5)
    await log.record(term, [A1])


async def test_the_changes_of_one_turn_are_one_transaction(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    log = make()
    term = await log.campaign(ONE)
    await asyncio.gather(*(log.record(term, [Change("name", f"{number}", b"x")]) for number in range(100)))
    assert etcd.count("record") == 1
    await asyncio.gather(*(log.record(term, [Change("name", f"{number}", None)]) for number in range(200)))
    assert etcd.count("record") == 3
    assert await log.load(term) == {}


async def test_more_entries_than_a_page_has(make: Callable[..., EtcdLog]) -> None:
    log = make()
    term = await log.campaign(ONE)
    changes = [Change("actor", f"{number}/x", b"%d" % number) for number in range(600)]
    await asyncio.gather(*(log.record(term, [change]) for change in changes))
    assert await log.load(term) == {"actor": {f"{number}/x": b"%d" % number for number in range(600)}}


@pytest.mark.parametrize("fault", ["lost", "answer lost"])
async def test_an_answer_that_does_not_come(etcd: FakeEtcd, make: Callable[..., EtcdLog], fault: str) -> None:
    log = make()
    term = await log.campaign(ONE)
    etcd.fail("record", fault, fault)
    etcd.fail("touch", fault)
    await log.record(term, [A1, B1])
    await log.record(term, [A2])
    assert await log.load(term) == {"name": {"a": b"2", "b": b"1"}}
    assert etcd.count("touch") == 3


async def test_a_request_that_is_held_up(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    log = make()
    log._gateway().first_limit = 0.2
    term = await log.campaign(ONE)
    held = Held()
    etcd.fail("record", held)
    await log.record(term, [A1])
    await log.record(term, [A2])
    assert held.arrived.is_set() and not held.done.is_set()
    held.go.set()
    await held.done.wait()
    assert await log.load(term) == {"name": {"a": b"2"}}


async def test_a_touch_that_is_held_up(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    log = make()
    log._gateway().first_limit = 0.2
    term = await log.campaign(ONE)
    held = Held()
    etcd.fail("record", "lost")
    etcd.fail("touch", held)
    await log.record(term, [A1])
    held.go.set()
    await held.done.wait()
    await log.record(term, [A2])
    assert await log.load(term) == {"name": {"a": b"2"}}


@pytest.mark.parametrize("fault", ["lost", "answer lost"])
async def test_a_candidacy_without_an_answer(etcd: FakeEtcd, make: Callable[..., EtcdLog], fault: str) -> None:
    etcd.fail("lead", fault)
    log = make()
    term = await log.campaign(ONE)
    await log.record(term, [A1])
    assert await log.load(term) == {"name": {"a": b"1"}}
    assert etcd.count("lead") == (2 if fault == "lost" else 1)


async def test_a_candidate_whose_lease_ends_before_it_leads(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    etcd.fail("lead", (404, 5, "etcdserver: requested lease not found"))
    assert (await make().campaign(ONE)).epoch > 0
    assert etcd.count("grant") == 2


async def test_a_candidate_that_is_slower(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    first, second = make(), make()
    held = Held()
    etcd.fail("lead", held)
    campaign = asyncio.ensure_future(first.campaign(ONE))
    await held.arrived.wait()
    term = await second.campaign(TWO)
    held.go.set()
    await until_seen(etcd, "watch", 1)
    assert not campaign.done()
    await second.resign(term)
    async with asyncio.timeout(PATIENCE):
        assert (await campaign).epoch > term.epoch


async def test_a_candidate_that_gives_up(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    log = make()
    held = Held()
    etcd.fail("lead", held)
    campaign = asyncio.ensure_future(log.campaign(ONE))
    await held.arrived.wait()
    campaign.cancel()
    with pytest.raises(asyncio.CancelledError):
        await campaign
    await log.aclose()
    assert not etcd.leases


@pytest.mark.slow
async def test_etcd_is_away_while_a_candidate_waits(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    first, second = make(), make()
    term = await first.campaign(ONE)
    campaign = asyncio.ensure_future(second.campaign(TWO))
    await until_seen(etcd, "watch", 1)
    etcd.fail("view*", "lost")
    etcd.fail("watch*", "lost")
    count = etcd.count("view")
    await until_seen(etcd, "view", count + 3)
    assert not campaign.done()
    await first.resign(term)
    etcd.faults.clear()
    async with asyncio.timeout(PATIENCE):
        assert (await campaign).epoch > term.epoch


async def test_a_second_campaign_of_one_head(make: Callable[..., EtcdLog]) -> None:
    log = make()
    await log.campaign(ONE)
    with pytest.raises(LogInUse):
        await log.campaign(ONE)


async def test_etcd_is_out_of_space(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    alarm = (429, 8, "etcdserver: mvcc: database space exceeded")
    log = make()
    term = await log.campaign(ONE)
    etcd.fail("record", alarm)
    with pytest.raises(
        LogUnavailable, match=r"out of space .*compact and defragment it.*etcdctl alarm disarm"
    ) as raised:
        await log.record(term, [A1])
    assert raised.value.log == etcd.url
    await log.record(term, [B1])
    assert await log.load(term) == {"name": {"b": b"1"}}
    await log.resign(term)
    etcd.fail("grant", alarm)
    with pytest.raises(LogUnavailable, match="out of space"):
        await log.campaign(ONE)


async def test_what_runs_out_of_space_may_be_made(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    alarm = (429, 8, "etcdserver: mvcc: database space exceeded")
    made = [*alarm]
    log = make()
    term = await log.campaign(ONE)
    etcd.fail("record", made, made, alarm)
    etcd.fail("page", "lost", (503, 14, "etcdserver: no leader"))
    await log.record(term, [A1, B1])
    assert await log.load(term) == {"name": {"a": b"1", "b": b"1"}}
    gone = Change("name", "a", None)
    await log.record(term, [gone])
    assert await log.load(term) == {"name": {"b": b"1"}}
    with pytest.raises(LogUnavailable, match="out of space"):
        await log.record(term, [B1, A1])
    assert await log.load(term) == {"name": {"b": b"1"}}
    etcd.fail("record", made)
    etcd.fail("page", "lost")
    recording = asyncio.ensure_future(log.record(term, [A1]))
    while etcd.faults["page"]:
        await asyncio.sleep(0.001)
    etcd.expire_all()
    with pytest.raises(Deposed):
        await recording


async def test_etcd_does_not_answer(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    busy = (503, 14, "etcdserver: no leader")
    log = make(patience=0.3)
    etcd.fail("view*", busy)
    with pytest.raises(LogUnavailable, match=f"{etcd.endpoints[0]} answers: etcdserver: no leader"):
        await log.campaign(ONE)
    etcd.faults.clear()
    term = await log.campaign(ONE)
    etcd.fail("page*", busy)
    with pytest.raises(LogUnavailable, match="no leader"):
        await log.load(term)


async def test_nobody_listens() -> None:
    async with FakeEtcd() as etcd:
        url = etcd.url
    log = EtcdLog.at(url, TOKEN, {})
    log._patience = 0.2
    with pytest.raises(LogUnavailable, match=r"^etcd://.*/test: 127.0.0.1:\d+ cannot be reached: "):
        await log.campaign(ONE)
    await log.aclose()


async def test_changes_that_etcd_may_have_made_wait(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    log = make(patience=0.0)
    term = await log.campaign(ONE)
    etcd.fail("record", "answer lost")
    etcd.fail("touch*", "lost")
    recording = asyncio.ensure_future(log.record(term, [A1]))
    await until_seen(etcd, "touch", 3)
    assert not recording.done()
    etcd.faults.clear()
    async with asyncio.timeout(PATIENCE):
        await recording
    assert await log.load(term) == {"name": {"a": b"1"}}


async def test_a_log_is_closed_while_changes_wait(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    log = make()
    term = await log.campaign(ONE)
    etcd.fail("record", "answer lost")
    etcd.fail("touch*", "lost")
    recording = asyncio.ensure_future(log.record(term, [A1]))
    await until_seen(etcd, "touch", 2)
    await log.aclose()
    with pytest.raises(Deposed):
        await recording
    assert [leader async for leader in log.leaders()] == []


async def test_the_next_of_several_endpoints() -> None:
    async with FakeEtcd(3) as etcd:
        log = EtcdLog.at(etcd.url, TOKEN, {})
        held = Held()
        etcd.fail("view", held, (503, 14, "etcdserver: no leader"))
        term = await log.campaign(ONE)
        assert [endpoint for endpoint, kind in etcd.seen if kind == "view"][:3] == etcd.endpoints
        await log.record(term, [A1])
        assert await log.load(term) == {"name": {"a": b"1"}}
        held.go.set()
        await log.aclose()


async def test_two_clusters_of_one_name(make: Callable[..., EtcdLog]) -> None:
    first, second, third = make(), make(bytes([1]) * 32), make(bytes([1]) * 32)
    term = await first.campaign(ONE)
    refusal = "has a cluster named 'test' with another token: use that cluster's token, or another name"
    with pytest.raises(LogUnusable, match=refusal):
        await second.campaign(TWO)
    with pytest.raises(LogUnusable, match=refusal):
        await anext(second.leaders())
    await first.record(term, [A1])
    await first.resign(term)
    with pytest.raises(LogUnusable, match=refusal):
        await second.campaign(TWO)
    term = await first.campaign(ONE)
    await first.record(term, [Change("name", "a", None)])
    await first.resign(term)
    assert (await third.campaign(TWO)).epoch > term.epoch
    with pytest.raises(LogUnusable, match=refusal):
        await first.campaign(ONE)


async def test_somebody_else_writes_the_key(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    etcd._put({"key": "L3pjYWN0b3IvdGVzdC9oZWFk", "value": "eA=="})
    with pytest.raises(
        LogUnusable, match="the key /zcactor/test/head in etcd was written by somebody else.*etcdctl del --prefix"
    ):
        await make().campaign(ONE)


@pytest.mark.slow
async def test_following_over_an_outage(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    following, leading = make(), make()
    leaders = following.leaders()
    assert await anext(leaders) is None
    etcd.fail("view", (400, 3, "etcdserver: corrupt cluster"))
    etcd.fail("watch", "lost", (400, 11, "etcdserver: mvcc: required revision has been compacted"))
    await until_seen(etcd, "watch", 4)
    term = await leading.campaign(ONE)
    async with asyncio.timeout(PATIENCE):
        assert await anext(leaders) == LeaderAt(term.epoch, ONE.address)


async def test_a_slow_reader_misses_leaders(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    following, leading = make(), make()
    leaders = following.leaders()
    assert await anext(leaders) is None
    for _ in range(2):
        await leading.resign(await leading.campaign(ONE))
    term = await leading.campaign(TWO)
    async with asyncio.timeout(PATIENCE):
        while (leader := await anext(leaders)) is None or leader.epoch != term.epoch:
            pass
    assert leader.address == TWO.address


async def test_aiohttp_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "zcactor.control.etcd_gateway", raising=False)
    log = EtcdLog.at("etcd://h:1", TOKEN, {})
    with pytest.raises(LogUnusable, match=r"etcd://h:1/default needs aiohttp: pip install 'zcactor\[etcd\]'"):
        await log.campaign(ONE)
    await log.aclose()


def test_the_bound_of_recipes() -> None:
    assert EtcdLog.recipe_nbytes == 16 << 10
    assert MemoryLog.recipe_nbytes > 900 << 10


# ---- the cluster and its candidates


async def test_the_first_proposal_is_the_id_of_the_cluster(make: Callable[..., EtcdLog]) -> None:
    assert [await make().cluster(id) for id in (b"one", b"two")] == [b"one", b"one"]


async def test_an_id_is_not_given_where_etcd_is_silent(etcd: FakeEtcd, make: Callable[..., EtcdLog]) -> None:
    etcd.fail("mint*", "lost")
    with pytest.raises(LogUnavailable):
        await make(patience=0.0).cluster(b"one")
