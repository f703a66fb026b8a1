"""The beginning of heads whose log is in a made-up etcd."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.control.fake_etcd import FakeEtcd
from tests.transport.local_arena import TOKEN
from tests.transport.tcp_arena import tcp_listener
from zcactor.config import Config
from zcactor.control import election
from zcactor.control.entries import ClusterEntry, DriverEntry, MemberEntry, closed_change, opened_change
from zcactor.control.head_log import Deposed, LogUnusable
from zcactor.ids import ProcessId
from zcactor.node import standby as standby_module
from zcactor.node.agent_main import launch, send_setup
from zcactor.node.standby import StandbyBootstrap, written
from zcactor.process.tasks import Tasks
from zcactor.transport.stream.probe import Standby, identify
from zcactor.transport.version import PROTOCOL_VERSION
from zcactor.workers.run_directory import RunDirectory

PATIENCE = 60.0
CLUSTER = ProcessId(b"c" * 16)
Make = Callable[..., StandbyBootstrap]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election, "_LOOK", 0.02)
    monkeypatch.setattr(election, "_PAUSE", 0.02)


@pytest.fixture
async def etcd() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as made:
        yield made


@pytest.fixture
async def make(etcd: FakeEtcd, tmp_path: Path) -> AsyncIterator[Make]:
    """A maker of beginnings, which note in ``stood`` that they stand by."""
    made: list[StandbyBootstrap] = []

    def beginning(*, waits: bool = False, fresh: bool = False, stood: list[str] | None = None) -> StandbyBootstrap:
        setup = {
            "etcd": (etcd.url, fresh, waits), "token": TOKEN, "agent": CLUSTER, "port": 0, "directory": str(tmp_path),
            "beside": True,
        }  # fmt: skip
        places: list[str] = [] if stood is None else stood
        made.append(StandbyBootstrap(setup, Config(), places.append))
        return made[-1]

    yield beginning
    for each in made:
        await each.aclose()


class FakeHead:
    """A head that ends when it is told so."""

    def __init__(self, beginning: StandbyBootstrap) -> None:
        loop = asyncio.get_running_loop()
        self.closing = False
        self.finished = asyncio.Event()
        self.deposed: list[int] = []
        tasks = Tasks(loop)
        self.process = SimpleNamespace(tasks=tasks, config=Config())
        self.members = SimpleNamespace(patience=0.0, log="", fence=8.0, leader_lease=None, tell_heads=None)
        self.heads = SimpleNamespace(own="", all=[], standbys=[], tell=self._tell)
        self.told = asyncio.Event()
        self.recorder: Any = self
        self.epoch, self.is_deposed = 0, False
        self._beginning = beginning

    async def _tell(self) -> None:
        self.told.set()

    def leads(self, term: Any) -> None:
        """Note the term."""
        self._term, self.epoch = term, term.epoch

    async def record(self, *changes: Any) -> None:
        """Record changes."""
        await self._beginning.log.record(self._term, changes)

    def depose(self, known: int) -> None:
        """Note a later head."""
        self.deposed.append(known)
        self.is_deposed = True

    def finish(self) -> None:
        """End."""
        self.finished.set()


async def led(beginning: StandbyBootstrap) -> Any:
    """Lead, and begin the term. Returns the head."""
    async with asyncio.timeout(PATIENCE):
        await beginning.take()
        head: Any = FakeHead(beginning)
        await beginning.begin(head, f"127.0.0.1:{beginning.port}")
    return head


async def one_waits(
    make: Make,
) -> tuple[StandbyBootstrap, Any, StandbyBootstrap, asyncio.Task[None], list[str]]:
    """A head that leads, and one that waits: the beginning and the head of the first, the beginning of the second, its
    wait, and where it stands by."""
    first, stood = make(), list[str]()
    head = await led(first)
    second = make(waits=True, stood=stood)
    taking = asyncio.create_task(second.take())
    await until(lambda: stood)
    return first, head, second, taking, stood


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def test_places() -> None:
    assert written("10.0.0.1", 7) == "10.0.0.1:7"
    assert written("::1", 7) == "[::1]:7"


async def test_a_new_cluster(make: Make) -> None:
    first = make(waits=True)
    head = await led(first)
    assert first.entries is None
    assert head.members.leader_lease.age() == 0.0
    async with asyncio.timeout(PATIENCE):
        await head.told.wait()
    assert head.heads.own == f"127.0.0.1:{first.port}"
    head.process.tasks.cancel()


async def test_a_standby_tells_who_leads_and_leads_after_it(etcd: FakeEtcd, make: Make) -> None:
    first, head, second, taking, stood = await one_waits(make)
    with pytest.raises(Standby) as found:
        await identify(stood[0], TOKEN)
    assert found.value.leader == f"127.0.0.1:{first.port}"
    await until(lambda: stood[0] in head.heads.all)
    head.heads.standbys = [stood[0]]
    assert await first.resign(head)
    assert head.finished.is_set()
    head.process.tasks.cancel()
    await first.aclose()
    async with asyncio.timeout(PATIENCE):
        await taking
    assert stood == [f"127.0.0.1:{second.port}"]
    assert second.entries is not None
    assert not second.is_over


async def test_a_head_that_has_resigned_does_not_stand_by(etcd: FakeEtcd, make: Make) -> None:
    first, head, _, taking, stood = await one_waits(make)
    head.heads.standbys = [stood[0]]
    assert await head.resign()
    etcd.expire_all()
    await until(lambda: head.deposed)  # it sees the end of its term before it has ended
    assert not first.again
    head.process.tasks.cancel()
    await first.aclose()
    async with asyncio.timeout(PATIENCE):
        await taking


async def test_a_standby_that_was_killed_gets_no_term(make: Make) -> None:
    first = make()
    head = await led(first)
    head.heads.standbys = ["127.0.0.1:1"]
    assert not await head.resign()
    assert not head.finished.is_set()
    head.process.tasks.cancel()


@pytest.mark.parametrize("how", ["lost", "deposed"])
async def test_a_head_whose_term_is_over_stands_by(etcd: FakeEtcd, make: Make, how: str) -> None:
    first = make()
    head = await led(first)
    if how == "lost":
        etcd.expire_all()
    else:
        head.is_deposed = True
    async with asyncio.timeout(PATIENCE):
        await head.finished.wait()
    assert first.again
    assert head.deposed
    assert head.members.leader_lease.age() is None
    head.process.tasks.cancel()


async def test_a_head_whose_term_is_over_before_it_has_begun(etcd: FakeEtcd, make: Make) -> None:
    first = make()
    await first.take()
    etcd.expire_all()
    head: Any = FakeHead(first)
    await first.begin(head, f"127.0.0.1:{first.port}")
    assert head.finished.is_set()
    assert first.again
    head.process.tasks.cancel()


async def test_a_head_that_ends_in_order_does_not_stand_by(etcd: FakeEtcd, make: Make) -> None:
    first = make()
    head = await led(first)
    head.closing = True
    etcd.expire_all()
    await until(lambda: head.deposed)
    assert not first.again
    head.process.tasks.cancel()


async def test_a_head_that_is_no_standby_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    head = await led(make())
    monkeypatch.setattr(standby_module, "_LEFT", 0.3)
    with pytest.raises(LogUnusable, match="the head at .* leads the cluster of etcd://.* --standby"):
        await make().take()
    head.process.tasks.cancel()


async def test_a_standby_whose_cluster_has_ended(make: Make) -> None:
    first, head, second, taking, _ = await one_waits(make)
    await head.record(closed_change())
    head.process.tasks.cancel()
    await first.aclose()
    async with asyncio.timeout(PATIENCE):
        await taking
    assert second.is_over


def newer_cluster() -> Any:
    """The change by which a head of a later version begins its term."""
    entry = ClusterEntry(False, CLUSTER, "127.0.0.1:1", PROTOCOL_VERSION + 1)
    return opened_change(CLUSTER, "127.0.0.1:1")._replace(value=msgspec.msgpack.encode(entry))


async def test_a_standby_that_is_older_than_the_head_that_leads_says_so_at_once(make: Make) -> None:
    """The user is not told that it stands by."""
    head, stood = await led(make()), list[str]()
    await head.record(newer_cluster())
    older = make(waits=True, stood=stood)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(LogUnusable, match=f"speaks protocol {PROTOCOL_VERSION + 1}, and this zcactor speaks"):
            await older.take()
    assert not stood
    head.process.tasks.cancel()


async def test_a_standby_ends_once_a_newer_head_leads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_module, "_ABLE", 0.02)
    _, head, older, taking, stood = await one_waits(make)
    await head.record(newer_cluster())
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(LogUnusable, match=f"speaks protocol {PROTOCOL_VERSION + 1}, and this zcactor speaks"):
            await taking
    assert older.stood and stood
    head.process.tasks.cancel()


async def test_a_standby_stands_by_though_etcd_tells_nothing_of_the_log(etcd: FakeEtcd, make: Make) -> None:
    head, stood = await led(make()), list[str]()
    etcd.fail("entry", (400, 3, "etcdserver: no"))
    taking = asyncio.create_task(make(waits=True, stood=stood).take())
    await until(lambda: stood)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    head.process.tasks.cancel()


async def test_a_standby_whose_log_cannot_be_read_tries_again(etcd: FakeEtcd, make: Make) -> None:
    first, head, _, taking, _ = await one_waits(make)
    etcd.fail("page", (400, 3, "etcdserver: no"))
    head.process.tasks.cancel()
    await first.aclose()
    async with asyncio.timeout(PATIENCE):
        await taking
    assert etcd.count("lead") == 3


async def test_a_cluster_is_begun_anew(make: Make, tmp_path: Path) -> None:
    first = make()
    head = await led(first)
    await head.record(opened_change(CLUSTER, "host:1"))
    head.process.tasks.cancel()
    await first.aclose()
    again = make(fresh=True)
    left = tmp_path / f"{CLUSTER.hex()}.sock"
    left.touch()
    await again.take()
    assert again.entries is None
    assert not left.exists(), "the cluster has the same id as the one before"
    with pytest.raises(Deposed):
        await head.record(opened_change(CLUSTER, "host:1"))


async def test_nodes_and_programs_are_called_until_they_have_come(make: Make) -> None:
    first = make()
    head = await led(first)
    come: set[ProcessId] = set()
    taking: Any = SimpleNamespace(
        done=asyncio.Event(), awaits=lambda process: process not in come, await_beside=lambda _: None,
        ended=lambda _: None,
    )  # fmt: skip
    async with tcp_listener("127.0.0.1") as member, tcp_listener("127.0.0.1") as driver:
        members = {member.process.hex(): MemberEntry({"address": member.address}, {})}
        drivers = {
            driver.process.hex(): DriverEntry(driver.address, "b"),
            bytes(16).hex(): DriverEntry("", "b"),  # it reaches its own host only
            b"\1".hex() * 16: DriverEntry(f"{'01' * 16}@{member.address.partition('@')[2]}", "b"),  # it has ended
        }
        words: list[tuple[ProcessId, str, int]] = []
        some = asyncio.Event()

        def hear(process: bytes, place: str, epoch: int) -> None:
            words.append((ProcessId(process), place, epoch))
            some.set()

        for each in (member, driver):
            each.summoned = functools.partial(hear, each.process)
        entries: Any = SimpleNamespace(members=members, drivers=drivers)
        first.expect(head, taking, entries)
        for process in (member.process, driver.process):  # each is told again until it has come
            async with asyncio.timeout(PATIENCE):
                while sum(each[0] == process for each in words) < 2:
                    some.clear()
                    await some.wait()
            come.add(ProcessId(process))
        taking.done.set()
        assert {each[1:] for each in words} == {(f"127.0.0.1:{first.port}", head.epoch)}
        head.process.tasks.cancel()
        await head.process.tasks.settled(PATIENCE)


async def test_a_standby_that_is_cancelled(make: Make) -> None:
    _, head, _, taking, _ = await one_waits(make)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    head.process.tasks.cancel()


async def test_a_standby_that_cannot_lead_says_so_to_its_user(etcd: FakeEtcd, make: Make, tmp_path: Path) -> None:
    """In its log and by its status: the command that has started it ended when it stood by."""
    first = make()
    head = await led(first)
    directory = RunDirectory(tmp_path)
    config = Config()
    with open(tmp_path / "log", "wb", buffering=0) as log:
        agent, control = launch(directory.lock_fd, log)
    with control:
        send_setup(
            control,
            {
                "directory": str(directory.path), "token": TOKEN, "agent": CLUSTER, "driver": b"",
                "head": (CLUSTER, ""), "clustered": True, "port": 0, "stays": True, "loop": "asyncio",
                "config": asdict(config), "cwd": str(tmp_path), "heartbeat": 1.0, "hang_after": 1.0, "rank": None,
                "resources": {}, "gpus": [], "state": None, "beside": False, "etcd": (etcd.url, False, True),
                "follows": "", "again": {}, "record": bytes(16).hex(), "worker": {},
            },
        )  # fmt: skip
        assert (await asyncio.to_thread(control.recv, 1000))[:1] == b"s"
        control.close()
        await head.record(newer_cluster())
        head.process.tasks.cancel()
        await first.aclose()
        assert await asyncio.to_thread(agent.wait, PATIENCE) == 1
    text = (tmp_path / "log").read_text()
    assert f"this head cannot stand by: the log {etcd.url} is of a cluster that speaks protocol" in text, text
