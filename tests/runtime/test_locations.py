"""Where bytes are taken from: the owner's decisions against a model, and processes that pull from each other."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import zcactor as zc
from tests.runtime.test_process_verbs import TOKEN, ByAddress, _same
from zcactor import context
from zcactor.errors import ConnectionLost, ObjectLost
from zcactor.future import ObjectRef
from zcactor.handle import RemoteActor
from zcactor.interface import Interface
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.objectstore.store import Block, Store
from zcactor.runtime import locations
from zcactor.runtime.locations import (
    AT_ONCE,
    LOCATED_NBYTES,
    MAX_COPIES,
    OWNER,
    Copy,
    LostPart,
    Origins,
    Spread,
    own_machine,
)
from zcactor.runtime.process import Process
from zcactor.transport.base import RemoteRegion
from zcactor.transport.loopback import LoopbackConnection, LoopbackEndpoint, LoopbackNetwork
from zcactor.transport.verbs.endpoint import VerbsEndpoint
from zcactor.transport.verbs.fake import FakeFabric

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
LARGE = LOCATED_NBYTES
SMALL = 80_000

Array = np.ndarray[Any, Any]


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


# ---------------------------------------------------------------- the owner's decisions

readers = st.integers(1, 12).map(name)
machines = st.sampled_from(["", "", "a", "b"])


class Spreading(RuleBasedStateMachine):
    """What readers do in any order, next to what they know themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = Spread()
        self.machines: dict[bytes, str] = {}
        self.transfers: dict[bytes, Copy] = {}
        self.copies: dict[bytes, int] = {}
        self.dead: set[tuple[bytes, int]] = set()
        self.direct = 0
        self.ids = 0

    def decide(self) -> None:
        direct = self.direct
        had_copies = bool(self.copies)
        for reader, copy in self.spread.decide():
            assert (copy.process, copy.id) not in self.dead, "what was reported gone is not handed out"
            if copy is OWNER:
                self.direct += 1
            else:
                assert self.copies[copy.process] == copy.id
            if copy.machine and copy.machine == self.machines[reader]:
                continue  # it maps, and is done
            assert reader not in self.transfers
            self.transfers[reader] = copy
        if had_copies:
            assert self.direct <= max(direct, AT_ONCE)

    @rule(reader=readers, machine=machines)
    def ask(self, reader: bytes, machine: str) -> None:
        self.transfers.pop(reader, None)
        self.copies.pop(reader, None)
        self.machines[reader] = machine
        self.spread.ask(reader, machine)
        self.decide()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), well=st.booleans())
    def end(self, data: st.DataObject, well: bool) -> None:
        reader = data.draw(st.sampled_from(sorted(self.transfers)))
        del self.transfers[reader]
        self.ids += 1
        if well:
            self.copies[reader] = self.ids
        self.spread.ended(reader, Copy(reader, self.ids, 0, self.machines[reader]) if well else None)
        self.decide()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def find_a_location_dead(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(sorted(self.transfers)))
        failed = self.transfers.pop(reader).process
        if failed in self.copies:
            self.dead.add((failed, self.copies.pop(failed)))
        self.spread.gone(failed)
        self.spread.ask(reader, self.machines[reader])
        self.decide()

    @rule(reader=readers)
    def lose(self, reader: bytes) -> None:
        self.transfers.pop(reader, None)
        if reader in self.copies:
            self.dead.add((reader, self.copies.pop(reader)))
        self.spread.left(reader)
        self.decide()

    @invariant()
    def no_place_is_overrun(self) -> None:
        assert all(count <= AT_ONCE for count in Counter(copy.process for copy in self.transfers.values()).values())

    @invariant()
    def who_waits_waits_for_somebody(self) -> None:
        assert self.transfers or not self.spread.waiting

    @invariant()
    def it_knows_what_is_so(self) -> None:
        assert {reader: copy for reader, (copy, _) in self.spread.running.items()} == self.transfers
        assert {process: copy.id for process, copy in self.spread.copies.items()} == self.copies

    def teardown(self) -> None:
        """Everyone is served in the end."""
        while self.transfers:
            reader = min(self.transfers)
            del self.transfers[reader]
            self.ids += 1
            self.copies[reader] = self.ids
            self.spread.ended(reader, Copy(reader, self.ids, 0, self.machines[reader]))
            self.decide()
        assert not self.spread.waiting


Spreading.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSpreading = Spreading.TestCase


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64, 300])
def test_a_broadcast_takes_few_rounds_and_two_transfers_from_the_owner(count: int) -> None:
    spread = Spread()
    for number in range(1, count + 1):
        spread.ask(name(number), "")
    rounds = direct = 0
    while running := spread.decide():
        rounds += 1
        direct += sum(copy is OWNER for _, copy in running)
        for reader, _ in running:
            spread.ended(reader, Copy(reader, 1, 0, ""))
    assert not spread.waiting
    assert direct == min(count, AT_ONCE)
    # Each round, every copy makes two more.
    assert rounds <= 1 + max(0, (count - 1).bit_length() - 1)


def test_one_transfer_for_each_machine() -> None:
    spread = Spread()
    for number in range(1, 7):
        spread.ask(name(number), "ab"[number % 2])
    first = spread.decide()
    assert [copy for _, copy in first] == [OWNER, OWNER]
    assert not spread.decide()
    for reader, _ in first:
        spread.ended(reader, Copy(reader, 1, 0, spread.running[reader][1]))
    rest = spread.decide()
    assert len(rest) == 4 and not spread.running, "who maps transfers nothing"
    assert all(copy.machine == "ab"[reader[0] % 2] for reader, copy in rest)


def test_copies_that_are_remembered_are_bounded() -> None:
    spread = Spread()
    for number in range(1, MAX_COPIES + 3):
        spread.ended(name(number), Copy(name(number), 1, 0, ""))
    assert len(spread.copies) == MAX_COPIES and name(1) not in spread.copies


@pytest.fixture
def store() -> Any:
    store = Store(16 << 20, os.urandom(16))
    yield store
    store.close()


def asked(origins: Origins, block: Block, number: int, machine: str = "", failed: bytes = b"") -> asyncio.Task[Copy]:
    return asyncio.get_running_loop().create_task(
        origins.source(name(number), block, block.offset, block.nbytes, machine, failed)
    )


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_questions_wait_for_their_answer(store: Store) -> None:
    origins, block = Origins(), store.allocate(100)
    tasks = [asked(origins, block, number) for number in range(1, 6)]
    await turns()
    assert [task.done() for task in tasks] == [True, True, False, False, False]
    copy = Copy(name(1), 7, 64, "")
    origins.ended(name(1), block, block.offset, block.nbytes, copy)
    assert await tasks[2] == copy and await tasks[3] == copy
    assert not tasks[4].done()
    origins.left(name(3))
    assert await tasks[4] == copy
    spread = origins.spread(block, block.offset, block.nbytes)
    assert spread is not None and set(spread.running) == {name(2), name(4), name(5)}
    assert origins.spread(block, block.offset, 50) is None
    origins.ended(name(1), block, block.offset, 50, copy)  # of what nobody has asked for


async def test_a_question_that_is_cancelled_holds_nobody_up(store: Store) -> None:
    origins, block = Origins(), store.allocate(100)
    tasks = [asked(origins, block, number) for number in range(1, 5)]
    await turns()
    tasks[2].cancel()
    origins.ended(name(1), block, block.offset, block.nbytes, None)  # before it could notice
    assert await tasks[3] == OWNER
    await asyncio.wait(tasks)
    spread = origins.spread(block, block.offset, block.nbytes)
    assert spread is not None and set(spread.running) == {name(2), name(4)} and not spread.waiting
    again = asked(origins, block, 5)
    await turns()
    again.cancel()
    await asyncio.wait([again])
    assert not spread.waiting
    first, second = asked(origins, block, 6), asked(origins, block, 6)
    assert await first == OWNER, "who asks again has given up what it asked before"
    origins.left(name(2))
    assert await second == OWNER and set(spread.running) == {name(4), name(6)}


async def test_whoever_waits_too_long_is_served_by_the_owner(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "PATIENCE", 0)
    origins, block = Origins(), store.allocate(100)
    assert [await asked(origins, block, number) for number in range(1, 5)] == [OWNER] * 4
    monkeypatch.setattr(locations, "PATIENCE", PATIENCE)
    monkeypatch.setattr(locations, "MAX_WAITING", 1)
    waits, served = asked(origins, block, 5), asked(origins, block, 6)
    assert await served == OWNER
    assert not waits.done()
    origins.left(name(1))
    assert await waits == OWNER


async def test_what_is_known_goes_with_the_object(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "MAX_VIEWS", 2)
    origins, block = Origins(), store.allocate(100)
    for nbytes in (10, 20, 30):
        assert await origins.source(name(1), block, block.offset, nbytes, "") == OWNER
    assert [origins.spread(block, block.offset, nbytes) is None for nbytes in (10, 20, 30)] == [False, False, True]
    del block
    assert not origins._asked
    origins.left(name(1))


def test_a_machine_has_a_name_where_its_processes_prefer_to_map(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    name = own_machine(zc.Config(), tmp_path)
    assert name and name == own_machine(zc.Config(transports="local"), tmp_path)
    assert name != own_machine(zc.Config(), other)
    assert own_machine(zc.Config(transports="tcp"), tmp_path) == ""
    assert own_machine(zc.Config(transports="tcp,local"), tmp_path) == ""


def test_what_is_lost_says_why() -> None:
    lost = LostPart("it is gone")
    for use in (lambda: np.asarray(lost), lambda: lost.grant(None)):
        with pytest.raises(ObjectLost, match="it is gone"):
            use()
    with pytest.raises(ConnectionLost, match="no way"):
        LostPart("it is gone", ConnectionLost("no way")).raise_error()


# ---------------------------------------------------------------- processes


class Keeper:
    """Takes arrays, keeps and makes some."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.kept: list[Any] = []

    async def keep(self, array: Array) -> float:
        self.kept.append(array)
        return float(array.sum())

    async def total(self, array: Array) -> float:
        return float(array.sum())

    async def drop(self) -> None:
        self.kept.clear()

    async def made(self, nbytes: int) -> Array:
        array = self.store.empty(nbytes // 8)
        array[:] = 1
        self.kept.append(array)
        return array


class _Endpoint(LoopbackEndpoint):
    """Maps the arenas of processes with the same machine, and of no others."""

    peers: Peers

    async def connect(self, address: str) -> LoopbackConnection:
        if address not in self.peers.by_name:
            raise ConnectionLost(f"nobody knows {address}")
        ours, theirs = (self.peers.by_name[process].machine for process in (self.address, address))
        self._network.maps = bool(ours) and ours == theirs
        return self.peers.watched(await super().connect(address))


class Peers:
    """Processes in this one: the first, with the arrays, and one with a `Keeper` for each further machine."""

    def __init__(self, *machines: str) -> None:
        self.machines = ("", *machines)
        self.by_name: dict[str, Process] = {}
        self.sources: list[bytes] = []
        """Of each pull, in the order in which they begin."""
        self.gate: Callable[[bytes], Any] | None = None
        """Awaited before each pull, with the process that it is from."""

    async def __aenter__(self) -> Self:
        network = LoopbackNetwork(seed=11, maps=False)
        for machine in self.machines:
            process_name = os.urandom(16)
            store = Store(64 << 20, process_name)
            endpoint: Any = _Endpoint(network, process_name, (store.arena.address, store.arena.nbytes), 64, 4096)
            endpoint.peers = self
            config = zc.Config(eager_limit=4096, recv_depth=64)
            process = Process(process_name, "worker", config, asyncio.get_running_loop(), store, endpoint)
            process.machine = machine
            await endpoint.start(partial(self.accepted, process))
            self.by_name[process_name.hex()] = process
        self.owner, *self.others = self.by_name.values()
        context.set_current(self.owner)
        self.keepers, self.actors = [], []
        for process in self.others:
            keeper = Keeper(process.store)
            process.add_host(index := process.take_index(), Keeper, "Keeper").adopt(keeper)
            self.keepers.append(keeper)
            self.actors.append(self.actor(self.owner, process, index))
        return self

    def actor(self, caller: Process, process: Process, index: int = 2) -> RemoteActor:
        place = process.process, index
        return RemoteActor(caller, os.urandom(16), Interface.of(Keeper), place, None, "default", 100, 0)

    def accepted(self, process: Process, connection: Any) -> None:
        process.accepted(self.watched(connection))

    def watched(self, connection: LoopbackConnection) -> LoopbackConnection:
        """The connection, whose pulls are noted from now on."""
        pull, source = connection.pull, connection.peer.process

        async def counted(region: RemoteRegion, address: int, keep: object) -> None:
            self.sources.append(source)
            if self.gate is not None:
                await self.gate(source)
            await pull(region, address, keep)

        connection.pull = counted  # type: ignore[method-assign]
        return connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        context.clear_current()
        for process in self.by_name.values():
            await process.close()

    def array(self, nbytes: int = LARGE) -> Array:
        array = self.owner.store.empty(nbytes // 8)
        array[:] = 1
        return array

    def received(self) -> list[int]:
        return [process.counters.bytes_received for process in self.others]

    def mapped(self) -> list[int]:
        return [process.counters.bytes_mapped for process in self.others]


def call(actor: RemoteActor, method: str, *args: Any) -> ObjectRef[Any]:
    return ObjectRef(actor.call(actor.interface.by_name[method], args, {}, None, 0))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        gc.collect()
        await asyncio.sleep(0)


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
async def test_what_is_wanted_several_times_at_once_comes_once(nbytes: int) -> None:
    async with asyncio.timeout(PATIENCE), Peers("") as peers:
        array = peers.array(nbytes)
        sums = await asyncio.gather(*(call(peers.actors[0], "keep", array) for _ in range(3)))
        assert sums == [nbytes / 8] * 3
        assert peers.received() == [nbytes]
        first, *others = peers.keepers[0].kept
        assert all(np.shares_memory(first, other) for other in others)
        assert await call(peers.actors[0], "total", array) == nbytes / 8
        assert peers.received() == [nbytes], "it is still here"
        assert await call(peers.actors[0], "total", array[: nbytes // 16]) == nbytes / 16
        assert peers.received() == [nbytes + nbytes // 2], "another stretch of the object is another copy"
        del first, others
        peers.keepers[0].kept.clear()
        await until(lambda: not peers.others[0].store.stats().used - peers.others[0].placements.idle_nbytes)
        assert await call(peers.actors[0], "total", array) == nbytes / 8
        assert peers.received() == [2 * nbytes + nbytes // 2]
        await until(lambda: sum(session.leases.total for session in peers.owner.all_sessions()) == 0)


async def test_a_moved_array_is_each_receivers_own() -> None:
    async with asyncio.timeout(PATIENCE), Peers("") as peers:
        for _ in range(2):
            assert await call(peers.actors[0], "keep", zc.move(peers.array())) == LARGE / 8
        one, other = peers.keepers[0].kept
        assert one.flags.writeable and other.flags.writeable and not np.shares_memory(one, other)


async def test_results_and_what_third_processes_pass_on_are_the_same_copy() -> None:
    async with asyncio.timeout(PATIENCE), Peers("", "") as peers:
        maker, reader = peers.actors
        one, other = await asyncio.gather(call(maker, "made", SMALL), call(maker, "made", SMALL))
        assert not np.shares_memory(one, other)
        ref = call(maker, "made", LARGE)
        await until(ref.done)  # then it is passed on by the name of who made it
        assert await asyncio.gather(*(call(reader, "keep", ref) for _ in range(3))) == [LARGE / 8] * 3
        assert peers.others[1].counters.bytes_received == LARGE
        assert await call(reader, "total", ref) == LARGE / 8
        assert peers.others[1].counters.bytes_received == LARGE


async def test_a_waiter_that_is_cancelled_leaves_the_transfer_to_the_others() -> None:
    async with asyncio.timeout(PATIENCE), Peers("") as peers:
        (reader,) = peers.others
        session = await reader.connect(peers.owner.process)
        array = peers.array(SMALL)
        found = peers.owner.store.block_of(array)
        assert found is not None
        block = found[0]
        peers.owner.store.seal(block, found[1])
        peers.owner.store.export(block)
        opened = asyncio.Event()
        peers.gate = lambda _: opened.wait()

        async def read() -> Any:
            assert await reader.ask(session, "lease", block.id)
            region = Region(RegionKind.ARRAY, peers.owner.process, block.id, block.offset, SMALL, 0)
            return await reader.locations.read(reader.locations.remote(session, region))

        waiters = [asyncio.create_task(read()) for _ in range(3)]
        await until(lambda: peers.sources)
        await turns()
        waiters[0].cancel()
        await asyncio.wait(waiters[:1])
        waiters[1].cancel()
        opened.set()
        part = await waiters[2]
        assert np.asarray(part.holder).view("f8").sum() == SMALL / 8
        assert len(peers.sources) == 1
        again = await read()
        assert again.holder is part.holder and len(peers.sources) == 1
        del part, again, waiters
        await until(lambda: not reader.locations._here)
        assert not reader.locations._coming


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
async def test_a_copy_that_did_not_come_is_forgotten(nbytes: int) -> None:
    async with asyncio.timeout(PATIENCE), Peers("") as peers:
        array = peers.array(nbytes)

        async def fail(_: bytes) -> None:
            await asyncio.sleep(0)
            raise ConnectionLost("the data socket broke")

        peers.gate = fail
        ends = await asyncio.gather(
            *(call(peers.actors[0], "keep", array) for _ in range(2)), return_exceptions=True
        )  # fmt: skip
        assert all("the data socket broke" in str(end) for end in ends) and len(peers.sources) <= 2
        peers.gate = None
        assert await call(peers.actors[0], "keep", array) == nbytes / 8
        filling = peers.others[0].store.empty(peers.others[0].store.stats().largest_free - (1 << 20), "u1")
        with pytest.raises(zc.OutOfMemory):
            await call(peers.actors[0], "keep", peers.array(2 << 20))
        del filling
        assert await call(peers.actors[0], "keep", peers.array(2 << 20)) == (2 << 20) / 8


async def test_an_array_that_is_written_to_again_is_another_object() -> None:
    """Flags that were set back, and memory that somebody else's library writes to: peers get what is there now."""
    async with asyncio.timeout(PATIENCE), Peers("") as peers:
        handler = peers.owner.use_numpy()
        array = np.full(SMALL // 8, 1.0)
        del handler
        assert zc.in_store(array)
        for number in (1.0, 2.0, 3.0):
            array.flags.writeable = True
            array[:] = number
            for _ in range(2):
                assert await call(peers.actors[0], "keep", array) == number * (SMALL / 8)
        assert peers.received() == [3 * SMALL], "what did not change came once"


class _Foreign:
    """Another library's object over memory that NumPy allocated: it asks nobody before it writes."""

    def __init__(self, memory: Array) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


async def test_memory_that_another_library_writes_to_is_another_object_each_time() -> None:
    async with asyncio.timeout(PATIENCE), Peers("") as peers:
        handler = peers.owner.use_numpy()
        memory = np.full(SMALL // 8, 1.0)
        del handler
        foreign = _Foreign(memory)
        for number in (1.0, 2.0):
            memory[:] = number
            assert await call(peers.actors[0], "keep", np.asarray(foreign)) == number * (SMALL / 8)
            await until(lambda: sum(session.leases.total for session in peers.owner.all_sessions()) == 0)


async def test_a_broadcast_leaves_the_owner_twice() -> None:
    async with asyncio.timeout(PATIENCE), Peers(*[""] * 7) as peers:
        array = peers.array()
        assert await asyncio.gather(*(call(actor, "keep", array) for actor in peers.actors)) == [LARGE / 8] * 7
        assert peers.received() == [LARGE] * 7 and peers.mapped() == [0] * 7
        load = Counter(peers.sources)
        assert load[peers.owner.process] == 2 and sum(load.values()) == 7
        copied = sum(c.nbytes for process in peers.by_name.values() for c in process.copies.snapshot().values())
        assert copied == 0
        for keeper in peers.keepers:
            keeper.kept.clear()
        await until(lambda: all(p.store.stats().used == p.placements.idle_nbytes for p in peers.others))
        assert await call(peers.actors[0], "keep", array) == LARGE / 8, "all copies are gone, and the owner still there"
        assert Counter(peers.sources)[peers.owner.process] == 3


async def test_small_arrays_are_pulled_without_a_question() -> None:
    async with asyncio.timeout(PATIENCE), Peers("", "") as peers:
        array = peers.array(SMALL)
        before = [process.counters.calls for process in peers.others]
        await asyncio.gather(*(call(actor, "keep", array) for actor in peers.actors))
        assert [process.counters.calls for process in peers.others] == before
        assert peers.sources == [peers.owner.process] * 2


async def test_the_second_process_of_a_machine_maps_the_first_ones_copy() -> None:
    async with asyncio.timeout(PATIENCE), Peers("a", "a", "b", "a") as peers:
        array = peers.array()
        assert await asyncio.gather(*(call(actor, "keep", array) for actor in peers.actors)) == [LARGE / 8] * 4
        received, mapped = peers.received(), peers.mapped()
        assert sorted(zip(received, mapped, strict=True)) == [(0, LARGE), (0, LARGE), (LARGE, 0), (LARGE, 0)]
        assert received[2] == LARGE
        place = next(number for number in (0, 1, 3) if not received[number])
        assert await call(peers.actors[place], "total", array) == LARGE / 8
        assert peers.received() == received and peers.mapped()[place] == 2 * LARGE
        holder = peers.keepers[place].kept[0]
        while not isinstance(holder, Lease):
            holder = holder.base
        assert (holder.owner, holder.nbytes) == (peers.owner.process, LARGE)
        with pytest.raises(ValueError, match="read-only"):
            peers.keepers[place].kept[0][0] = 5


async def test_a_mapped_copy_is_passed_on_though_its_process_is_gone() -> None:
    async with asyncio.timeout(PATIENCE), Peers("a", "a", "") as peers:
        array = peers.array()
        for actor in peers.actors[:2]:
            await call(actor, "keep", array)
        assert peers.mapped() == [0, LARGE, 0]
        first, second, _ = peers.others
        await first.close()
        assert peers.keepers[1].kept[0].sum() == LARGE / 8, "what is mapped stays"
        context.set_current(second)
        onward = peers.actor(second, peers.others[2])
        assert await call(onward, "keep", peers.keepers[1].kept[0]) == LARGE / 8
        assert peers.received()[2] == LARGE
        back = await call(peers.actor(second, peers.others[2]), "made", SMALL)
        assert back.sum() == SMALL / 8
        context.set_current(peers.owner)


async def test_a_copy_that_was_dropped_is_found_out_and_another_place_is_told() -> None:
    async with asyncio.timeout(PATIENCE), Peers("", "", "", "") as peers:
        array = peers.array()
        for actor in peers.actors[:2]:
            await call(actor, "keep", array)
        peers.keepers[0].kept.clear()
        first = peers.others[0]
        await until(lambda: first.store.stats().used == first.placements.idle_nbytes)
        peers.sources.clear()
        assert await asyncio.gather(*(call(actor, "keep", array) for actor in peers.actors[2:])) == [LARGE / 8] * 2
        assert peers.owner.process not in peers.sources and first.process not in peers.sources
        found = peers.owner.store.block_of(array)
        assert found is not None
        spread = peers.owner.origins.spread(found[0], found[0].offset, LARGE)
        assert spread is not None and first.process not in spread.copies


async def test_a_location_that_dies_costs_time_and_nothing_else() -> None:
    async with asyncio.timeout(PATIENCE), Peers("", "", "", "") as peers:
        array = peers.array()
        for actor in peers.actors[:2]:
            await call(actor, "keep", array)
        first = peers.others[0]

        async def die(source: bytes) -> None:
            if source == first.process:
                for session in list(first.all_sessions()):
                    session.connection.abort()
                await asyncio.sleep(0)

        peers.gate = die
        assert await asyncio.gather(*(call(actor, "keep", array) for actor in peers.actors[2:])) == [LARGE / 8] * 2
        assert first.process in peers.sources and peers.owner.process not in peers.sources[2:]


async def test_readers_that_die_give_their_places_back() -> None:
    async with asyncio.timeout(PATIENCE), Peers("", "", "") as peers:
        array = peers.array()
        stuck = asyncio.Event()
        peers.gate = lambda _: stuck.wait()
        lost = [call(actor, "keep", array) for actor in peers.actors[:2]]
        await until(lambda: len(peers.sources) == 2)
        last = call(peers.actors[2], "keep", array)
        await turns()
        assert len(peers.sources) == 2, "it waits"
        peers.gate = None
        for process in peers.others[:2]:
            for session in list(process.all_sessions()):
                session.connection.abort()
        assert await last == LARGE / 8
        stuck.set()
        await asyncio.gather(*lost, return_exceptions=True)


async def test_a_reader_finishes_though_the_owner_has_died() -> None:
    async with asyncio.timeout(PATIENCE), Peers("", "", "") as peers:
        array = peers.array()
        for actor in peers.actors[:2]:
            await call(actor, "keep", array)
        reader = peers.others[2]
        opened = asyncio.Event()
        peers.gate = lambda _: opened.wait()
        ending = call(peers.actors[2], "keep", array)
        await until(lambda: len(peers.sources) == 3)
        assert peers.sources[2] != peers.owner.process
        for session in list(peers.owner.all_sessions()):
            session.connection.abort()
        await asyncio.gather(ending, return_exceptions=True)
        opened.set()
        await until(lambda: reader.counters.bytes_received == LARGE)


async def test_an_owner_that_lost_track_serves_by_itself() -> None:
    async with asyncio.timeout(PATIENCE), Peers("", "", "") as peers:
        array = peers.array()
        for actor in peers.actors[:2]:
            await call(actor, "keep", array)
        peers.owner.origins = Origins()
        assert await call(peers.actors[2], "keep", array) == LARGE / 8
        assert peers.sources == [peers.owner.process] * 3


async def test_locations_that_all_fail_are_followed_by_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(PATIENCE), Peers("", "", "") as peers:
        array = peers.array()

        async def nonsense(self: Origins, *_: Any) -> Copy:
            del self
            return Copy(os.urandom(16), 5, 0, "")

        monkeypatch.setattr(Origins, "source", nonsense)
        assert await call(peers.actors[0], "keep", array) == LARGE / 8

        async def wrong(self: Origins, reader: bytes, *_: Any) -> Copy:
            del self, reader
            return Copy(peers.others[0].process, 12345, 0, "")

        monkeypatch.setattr(Origins, "source", wrong)
        assert await call(peers.actors[1], "keep", array) == LARGE / 8
        assert peers.sources == [peers.owner.process] * 2


# ---------------------------------------------------------------- by RDMA


async def test_by_rdma_a_copy_is_read_as_the_object_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, addresses = FakeFabric(), dict[str, str]()
    made: list[Process] = []
    for number in range(4):
        fabric.add_nic(f"fake{number}")
        process_name, binding = os.urandom(16), fabric.binding(f"fake{number}")
        store = Store(64 << 20, process_name)
        endpoint: Any = ByAddress(
            VerbsEndpoint(
                "127.0.0.1", process_name, TOKEN, store.arena, store.arena.fd, 64, 4096, lookup=store.lookup,
                verbs_eager_limit=4096, binding=partial(_same, binding),
            )
        )  # fmt: skip
        endpoint.addresses = addresses
        config = zc.Config(eager_limit=4096, recv_depth=64)
        process = Process(process_name, "worker", config, asyncio.get_running_loop(), store, endpoint)
        await endpoint.start(process.accepted)
        addresses[process_name.hex()] = endpoint.address
        made.append(process)
    owner, *others = made
    context.set_current(owner)
    actors = []
    for process in others:
        process.add_host(2, Keeper, "Keeper").adopt(Keeper(process.store))
        place = process.process, 2
        actors.append(RemoteActor(owner, os.urandom(16), Interface.of(Keeper), place, None, "default", 100, 0))
    async with asyncio.timeout(PATIENCE):
        for expected in (None, others[0].process):
            array = owner.store.empty(LARGE // 8)
            array[:] = 1
            for actor in actors:
                assert await call(actor, "keep", array) == LARGE / 8
            found = owner.store.block_of(array)
            assert found is not None
            spread = owner.origins.spread(found[0], found[0].offset, LARGE)
            assert (spread is None) == (expected is None), "an array of this size is read without a question"
            monkeypatch.setattr(locations, "LOCATED_READ_NBYTES", LARGE)
        assert spread is not None and spread.direct == 2 and set(spread.copies) == {p.process for p in others}
        assert [process.counters.bytes_read for process in others] == [2 * LARGE] * 3
        assert others[2].sessions[others[0].process].connection.kind == "verbs"
        context.clear_current()
        for process in made:
            await process.close()
