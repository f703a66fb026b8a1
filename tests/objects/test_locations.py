"""The sources of bytes: the owner's decisions against a model, and processes that pull from each other."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import numpy as np
import pytest

import zcactor as zc
from tests.assembly.test_process_verbs import over_verbs
from tests.control.agents import turns
from tests.transport.verbs.entitlements import entitlements
from zcactor.api.future import ObjectRef
from zcactor.api.remote_actor import RemoteActor
from zcactor.assembly.process import Process
from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError, ZcactorError
from zcactor.ids import new_actor
from zcactor.interface import Interface
from zcactor.marshal.sharing import share
from zcactor.objects import locations
from zcactor.objects.broadcast import Copy
from zcactor.objects.broadcast_directory import BroadcastDirectory, BroadcastService
from zcactor.objects.locations import LOCATED_NBYTES, LostPart
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.objectstore.store import Block, Store
from zcactor.peers.leases import Leases
from zcactor.process import context
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.loopback.endpoint import LoopbackConnection, LoopbackEndpoint, LoopbackNetwork
from zcactor.transport.mapping import Mapped
from zcactor.transport.verbs.driver.base import VerbsError
from zcactor.transport.verbs.driver.fake import FakeFabric

__all__ = ["entitlements"]

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
LARGE = LOCATED_NBYTES
SMALL = 80_000

Array = np.ndarray[Any, Any]


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_what_is_lost_says_why() -> None:
    lost = LostPart("it is gone")
    for use in (lambda: np.asarray(lost), lambda: lost.grant(None)):
        with pytest.raises(ObjectLost, match="it is gone"):
            use()
    with pytest.raises(ConnectionLost, match="no way"):
        LostPart("it is gone", ConnectionLost("no way")).raise_error()


# ---------------------------------------------------------------- processes


class Keeper:
    """An actor that takes arrays, and keeps and makes some."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.kept: list[Any] = []

    async def keep(self, array: Array) -> float:
        self.kept.append(array)
        return float(array.sum())

    async def total(self, array: Array) -> float:
        return float(array.sum())

    async def boxed(self, nbytes: int) -> Boxed:
        return Boxed(await self.made(nbytes))

    async def drop(self) -> None:
        self.kept.clear()

    async def made(self, nbytes: int) -> Array:
        array = self.store.empty(nbytes // 8)
        array[:] = 1
        self.kept.append(array)
        return array


class _Endpoint(LoopbackEndpoint):
    """An endpoint that maps the arenas of processes on the same machine, and of no others."""

    peers: Peers

    async def connect(self, address: str) -> LoopbackConnection:
        if address not in self.peers.by_name:
            raise ConnectionLost(f"nobody knows {address}")
        ours, theirs = (self.peers.by_name[process].locations.machine for process in (self.address, address))
        self._network.maps = bool(ours) and ours == theirs
        return self.peers.watched(await super().connect(address))


class Peers:
    """Processes in this one: the first has the arrays, and each further machine has a process with a `Keeper`."""

    def __init__(self, *machines: str, integrity: str = "frames") -> None:
        self.machines = ("", *machines)
        self.integrity = integrity
        self.by_name: dict[str, Process] = {}
        self.sources: list[bytes] = []
        """The source of each pull, in the order in which pulls begin."""
        self.authenticated: list[bool] = []
        """For each pull, whether it asked for authentication."""
        self.gate: Callable[[bytes], Any] | None = None
        """A function that is awaited before each pull, with the process that is the source."""

    async def __aenter__(self) -> Self:
        network = LoopbackNetwork(seed=11, maps=False)
        for machine in self.machines:
            process_name = os.urandom(16)
            store = Store(64 << 20, process_name)
            endpoint: Any = _Endpoint(
                network, process_name, (store.arena.address, store.arena.nbytes, store.arena), 64, 4096
            )
            endpoint.peers = self
            config = zc.Config(eager_limit=4096, recv_depth=64)
            process = Process(process_name, "worker", config, asyncio.get_running_loop(), store, endpoint)
            process.locations.machine = machine
            await endpoint.start(partial(self.accepted, process))
            self.by_name[process_name.hex()] = process
        self.owner, *self.others = self.by_name.values()
        context.set_current(self.owner)
        self.keepers, self.actors = [], []
        for process in self.others:
            keeper = Keeper(process.store)
            process.hosts.add(index := process.hosts.take_index(), Keeper, "Keeper").adopt(keeper)
            self.keepers.append(keeper)
            self.actors.append(self.actor(self.owner, process, index))
        return self

    def actor(self, caller: Process, process: Process, index: int = 2) -> RemoteActor:
        place = process.process, index
        return RemoteActor(caller, new_actor(), Interface.of(Keeper), place, None, "default", 100, 0)

    def accepted(self, process: Process, connection: Any) -> None:
        process.connections.accepted(self.watched(connection))

    def watched(self, connection: LoopbackConnection) -> LoopbackConnection:
        """Make a connection record its pulls from now on."""
        pull, source = connection.pull, connection.peer.process

        async def counted(
            region: RemoteRegion, address: int, keep: object, commit: Callable[[int, int], None] | None = None
        ) -> None:
            self.sources.append(source)
            self.authenticated.append(region.authenticate)
            if self.gate is not None:
                await self.gate(source)
            await pull(region, address, keep, commit)

        connection.pull = counted  # type: ignore[method-assign]
        connection.integrity = self.integrity
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

    def exported(self, array: Array) -> Block:
        """Seal the block of an array, and let it be looked up."""
        found = self.owner.store.block_of(array)
        assert found is not None
        self.owner.store.seal(*found)
        self.owner.store.export(found[0])
        return found[0]

    def received(self) -> list[int]:
        return [process.counters.bytes_received for process in self.others]

    def mapped(self) -> list[int]:
        return [process.counters.bytes_mapped for process in self.others]


def call(actor: RemoteActor, method: str, *args: Any) -> ObjectRef[Any]:
    return ObjectRef(actor.call(actor.interface.by_name[method], args, {}, None, 0))


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition, and collect garbage now and then.

    Collections are rare because a condition may take a thousand turns, and a collection takes a tenth of a second.
    """
    for turn in count():
        if condition():
            return
        if turn % 50 == 0:
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
        await until(lambda: sum(session.leases.total for session in peers.owner.sessions.all()) == 0)


class Way:
    """A stand-in of a connection and its session; pulls fail with the given error."""

    one_sided = False
    integrity = "none"

    def __init__(self, error: ZcactorError | None = None) -> None:
        self.error = error
        self.successor: Way | None = None
        self.then: Way | None = None
        """The successor from the first pull on."""
        self.pulled = 0

    @property
    def connection(self) -> Way:
        return self

    @property
    def is_replaced(self) -> bool:
        return self.successor is not None

    @property
    def in_use(self) -> Way:
        return self.successor or self

    def release_later(self, _: int, __: int) -> None:
        """Take back a lease, as `Session.release_later` does."""

    async def pull(self, *_: object) -> None:
        self.pulled += 1
        self.successor = self.then
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [ConnectionLost("it was closed"), ObjectLost("no lease by this connection")])
async def test_a_pull_goes_on_by_the_connection_that_replaces_its_own(error: ZcactorError) -> None:
    async with asyncio.timeout(PATIENCE), Peers() as peers:

        async def fetched(way: Way) -> None:
            await peers.owner.locations.fetch(
                RemoteLease(way, Region(RegionKind.ARRAY, b"o" * 16, 5, 0, 8, 0)), 0, 8, 0, None
            )

        goes, stays = Way(error), Way()
        goes.then = stays
        await fetched(goes)
        assert (goes.pulled, stays.pulled) == (1, 1), "it was replaced meanwhile"
        await fetched(goes)
        assert (goes.pulled, stays.pulled) == (1, 2), "it is replaced already"
        stays.error = error
        with pytest.raises(type(error)):
            await fetched(goes)


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
        await until(ref.done)  # then the reference is passed on by the name of its maker
        assert await asyncio.gather(*(call(reader, "keep", ref) for _ in range(3))) == [LARGE / 8] * 3
        assert peers.others[1].counters.bytes_received == LARGE
        assert await call(reader, "total", ref) == LARGE / 8
        assert peers.others[1].counters.bytes_received == LARGE


async def test_a_waiter_that_is_cancelled_leaves_the_transfer_to_the_others() -> None:
    async with asyncio.timeout(PATIENCE), Peers("") as peers:
        (reader,) = peers.others
        session = await reader.connections.connect(peers.owner.process)
        array = peers.array(SMALL)
        block = peers.exported(array)
        opened = asyncio.Event()
        peers.gate = lambda _: opened.wait()

        async def read() -> Any:
            assert await reader.requests.ask(session, Leases.lease, block.id)
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


DEFECTS = [RuntimeError, ValueError, VerbsError]


@pytest.mark.parametrize("error", DEFECTS)
@pytest.mark.parametrize("moved", [False, True], ids=["shared", "moved"])
async def test_any_error_is_the_outcome_of_the_part(
    error: type[Exception], moved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each reader gets the error, for an argument and for a result; no reader waits, and the next pull works."""
    async with asyncio.timeout(PATIENCE), Peers("", "") as peers:
        unhandled: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unhandled.append(what))

        async def fail(_: bytes) -> None:
            raise error("the ledger broke")

        def sent() -> Any:
            return zc.move(peers.array(SMALL)) if moved else peers.array(SMALL)

        peers.gate = fail
        with pytest.raises(ObjectLost, match="the ledger broke"):
            await call(peers.actors[0], "keep", sent())
        assert not peers.keepers[0].kept
        with pytest.raises(ObjectLost, match="the ledger broke"):
            (await call(peers.actors[0], "made", SMALL)).sum()
        assert "could not be brought here" in caplog.text, "an error that nobody foresaw is a defect"
        peers.gate = None
        assert await call(peers.actors[0], "keep", sent()) == SMALL / 8
        assert not unhandled


@pytest.mark.parametrize("error", DEFECTS)
async def test_any_error_on_the_way_to_a_third_process_is_the_outcome_too(error: type[Exception]) -> None:
    async with asyncio.timeout(PATIENCE), Peers("", "") as peers:
        unhandled: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unhandled.append(what))
        made = call(peers.actors[0], "made", SMALL)
        await until(made.done)  # then the reference is passed on by the name of its maker
        third = peers.others[1]

        async def fail(*_: object) -> None:
            raise error("the ledger broke")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(third.connections, "connect", fail)
            with pytest.raises(ObjectLost, match="the ledger broke"):
                await call(peers.actors[1], "keep", made)
        assert not peers.keepers[1].kept and not unhandled


async def test_an_array_that_was_pulled_cannot_be_written_to_again() -> None:
    """Flags that are set and set back do not make it writable: the reader keeps its copy under the object's id."""
    async with asyncio.timeout(PATIENCE), Peers("") as peers:
        handler = peers.owner.use_numpy()
        array = np.full(SMALL // 8, 1.0)
        del handler
        assert zc.in_store(array) and array.flags.owndata
        view = array[10:20]
        for _ in range(2):
            assert await call(peers.actors[0], "keep", array) == SMALL / 8
            for each in (array, array[1:]):
                with pytest.raises(ValueError, match="WRITEABLE"):
                    each.flags.writeable = True
        assert peers.received() == [SMALL], "it came once"
        assert view.base is array and array.sum() == SMALL / 8
        assert peers.owner.store.stats().of_numpy == 0
        del array, view, each
        await call(peers.actors[0], "drop")
        await until(lambda: peers.owner.store.stats().used == 0)


async def test_an_array_whose_name_was_passed_on_cannot_be_written_to_again() -> None:
    """One process maps the array; another leases it from its owner by the name that the first one got."""
    async with asyncio.timeout(PATIENCE), Peers("", "") as peers:
        _, reader = peers.others
        handler = peers.owner.use_numpy()
        array = np.full(SMALL // 8, 1.0)
        del handler
        block = share(peers.owner.store, array)
        assert isinstance(block, Block)
        peers.owner.store.export(block)
        array.flags.writeable = True
        session = await reader.connections.connect(peers.owner.process)
        assert await reader.requests.ask(session, Leases.lease, block.id)
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        session.release(block.id)


class _Foreign:
    """Another library's object over memory that NumPy allocated: it writes without asking."""

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
            await until(lambda: sum(session.leases.total for session in peers.owner.sessions.all()) == 0)


@pytest.mark.slow
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


async def test_a_lease_on_a_copy_goes_back_where_the_copy_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes then come from their owner."""
    async with asyncio.timeout(PATIENCE), Peers("a", "a") as peers:
        array = peers.array()
        assert await call(peers.actors[0], "keep", array) == LARGE / 8
        place = peers.others[0]

        mapped = LoopbackConnection.map

        def refuse(connection: LoopbackConnection, *args: int, **more: bool) -> Mapped:
            if connection.maps:
                raise ConnectionLost("not today")
            return mapped(connection, *args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(LoopbackConnection, "map", refuse)
            assert await call(peers.actors[1], "keep", array) == LARGE / 8
        assert peers.received() == [LARGE, LARGE]
        peers.keepers[0].kept.clear()
        await until(lambda: not place.store.stats().used - place.placements.idle_nbytes)


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


class Boxed:
    """A value that travels as a pickle."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def sum(self) -> float:
        return float(self.array.sum())


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
async def test_a_pickles_bytes_are_authenticated_and_come_again_where_they_were_not(nbytes: int) -> None:
    async with asyncio.timeout(PATIENCE), Peers("") as peers:
        array, boxed = peers.array(nbytes), Boxed(peers.array(nbytes))
        for value, wanted in (
            (array, [False]),
            (Boxed(array), [True]),
            (Boxed(array), []),
            (array[:], []),
            (boxed, [True]),
            (boxed.array, []),
        ):
            peers.authenticated.clear()
            assert await call(peers.actors[0], "keep", value) == nbytes / 8
            assert peers.authenticated == wanted


@pytest.mark.parametrize("integrity", ["arrays", "tls", "none"])
@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
async def test_where_arrays_are_no_other_than_pickles_their_bytes_come_once(integrity: str, nbytes: int) -> None:
    async with asyncio.timeout(PATIENCE), Peers("", integrity=integrity) as peers:
        array = peers.array(nbytes)
        for value in (array, Boxed(array), array[:]):
            assert await call(peers.actors[0], "keep", value) == nbytes / 8
        assert peers.received() == [nbytes]


@pytest.mark.parametrize("pickled", [True, False])
async def test_results_keep_on_their_way_that_they_are_to_be_authenticated(pickled: bool) -> None:
    async with asyncio.timeout(PATIENCE), Peers("", "") as peers:
        maker, reader = peers.actors
        for nbytes in (SMALL, LARGE):
            peers.authenticated.clear()
            ref = call(maker, "boxed" if pickled else "made", nbytes)
            await until(ref.done)
            assert await call(reader, "keep", ref) == nbytes / 8
            assert peers.authenticated == [pickled]


async def test_what_is_made_our_own_for_others_is_authenticated() -> None:
    async with asyncio.timeout(PATIENCE), Peers("") as peers:
        (reader,) = peers.others
        session = await reader.connections.connect(peers.owner.process)
        array = peers.array(SMALL)
        block = peers.exported(array)
        assert await reader.requests.ask(session, Leases.lease, block.id)
        region = Region(RegionKind.ARRAY, peers.owner.process, block.id, block.offset, SMALL, 0)
        part = reader.locations.remote(session, region)
        adopted, offset = await reader.adoptions.adopt(part.holder, part.kind)
        assert np.asarray(adopted)[offset - adopted.offset :][:SMALL].view("f8").sum() == SMALL / 8
        assert peers.authenticated == [True]


async def test_copies_for_arrays_are_no_places_for_pickles() -> None:
    async with asyncio.timeout(PATIENCE), Peers(*[""] * 6) as peers:
        array = peers.array()
        for actor in peers.actors[:3]:
            await call(actor, "keep", array)
        peers.sources.clear()
        assert await call(peers.actors[3], "keep", Boxed(array)) == LARGE / 8
        assert peers.sources == [peers.owner.process]
        for actor in peers.actors[4:]:
            await call(actor, "keep", Boxed(array))
        assert peers.sources == [peers.owner.process, peers.owner.process, peers.others[3].process]
        assert peers.authenticated == [False] * 3 + [True] * 3


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
                for session in list(first.sessions.all()):
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
            for session in list(process.sessions.all()):
                session.connection.abort()
        assert await last == LARGE / 8
        stuck.set()
        await asyncio.gather(*lost, return_exceptions=True)


@pytest.mark.slow
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
        for session in list(peers.owner.sessions.all()):
            session.connection.abort()
        await asyncio.gather(ending, return_exceptions=True)
        opened.set()
        await until(lambda: reader.counters.bytes_received == LARGE)


async def test_an_owner_that_lost_track_serves_by_itself() -> None:
    async with asyncio.timeout(PATIENCE), Peers("", "", "") as peers:
        array = peers.array()
        for actor in peers.actors[:2]:
            await call(actor, "keep", array)
        peers.owner.origins = BroadcastDirectory()
        peers.owner.serve(BroadcastService(0, peers.owner.store, peers.owner.origins))
        assert await call(peers.actors[2], "keep", array) == LARGE / 8
        assert peers.sources == [peers.owner.process] * 3


async def test_locations_that_all_fail_are_followed_by_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(PATIENCE), Peers("", "", "") as peers:
        array = peers.array()

        async def nonsense(self: BroadcastDirectory, *_: Any) -> Copy:
            del self
            return Copy(os.urandom(16), 5, 0, "")

        monkeypatch.setattr(BroadcastDirectory, "source", nonsense)
        assert await call(peers.actors[0], "keep", array) == LARGE / 8

        async def wrong(self: BroadcastDirectory, reader: bytes, *_: Any) -> Copy:
            del self, reader
            return Copy(peers.others[0].process, 12345, 0, "")

        monkeypatch.setattr(BroadcastDirectory, "source", wrong)
        assert await call(peers.actors[1], "keep", array) == LARGE / 8
        assert peers.sources == [peers.owner.process] * 2


# ---------------------------------------------------------------- by RDMA


@pytest.mark.slow
async def test_by_rdma_a_copy_is_read_as_the_object_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, addresses = FakeFabric(), dict[str, str]()
    made: list[Process] = []
    for number in range(4):
        fabric.add_nic(f"fake{number}")
        made.append(await over_verbs(addresses, fabric.binding(f"fake{number}"), 64 << 20))
    owner, *others = made
    context.set_current(owner)
    actors = []
    for process in others:
        process.hosts.add(2, Keeper, "Keeper").adopt(Keeper(process.store))
        place = process.process, 2
        actors.append(RemoteActor(owner, new_actor(), Interface.of(Keeper), place, None, "default", 100, 0))
    async with asyncio.timeout(PATIENCE):
        for expected in (None, others[0].process):
            array = owner.store.empty(LARGE // 8)
            array[:] = 1
            for actor in actors:
                assert await call(actor, "keep", array) == LARGE / 8
            found = owner.store.block_of(array)
            assert found is not None
            spread = owner.origins.spread(found[0], found[0].offset, LARGE, 1)
            assert (spread is None) == (expected is None), "an array of this size is read without a question"
            monkeypatch.setattr(locations, "LOCATED_READ_NBYTES", LARGE)
        assert spread is not None and spread.direct == 2 and set(spread.copies) == {p.process for p in others}
        assert [process.counters.bytes_read for process in others] == [2 * LARGE] * 3
        assert others[2].sessions.used[others[0].process].connection.kind == "verbs"
        context.clear_current()
        for process in made:
            await process.close()


# ---------------------------------------------------------------- flows


class FakeFlow:
    """A flow that notes how it ends."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def end(self) -> None:
        self.ends.append("end")

    def left(self) -> None:
        self.ends.append("left")


class Flowing:
    """A lease on bytes of a process, with the flow that its connection makes of them, or the error that it raises."""

    def __init__(self, outcome: Any) -> None:
        self.id, self.offset, self.seal, self.rkey = 7, 100, 0, 0
        self.session = self.in_use = self.connection = self
        self.outcome = outcome
        self.wanted: list[tuple[int, int, int]] = []

    async def flow(self, wanted: RemoteRegion) -> Any:
        self.wanted.append((wanted.object_id, wanted.offset, wanted.nbytes))
        await asyncio.sleep(0)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def bare_locations() -> tuple[Any, Any]:
    made: Any = locations.Locations.__new__(locations.Locations)
    made._counters = counters = SimpleNamespace(bytes_received=0)
    return made, counters


async def test_a_flow_from_each_owner() -> None:
    made, counters = bare_locations()
    leases = [Flowing(FakeFlow()) for _ in range(3)]
    assert await made.flows(leases, 8, 16) == [lease.outcome for lease in leases]
    assert [lease.wanted for lease in leases] == [[(7, 108, 16)]] * 3
    assert not any(lease.outcome.ends for lease in leases)
    made.flowed(48)
    assert counters.bytes_received == 48


@pytest.mark.parametrize("last", [None, ProtocolError("beyond the arena")])
async def test_no_flow_is_left_where_one_owner_has_none(last: Exception | None) -> None:
    made, _ = bare_locations()
    first = FakeFlow()
    leases = [Flowing(first), Flowing(last), Flowing(FakeFlow())]
    if last is None:
        assert await made.flows(leases, 0, 1) is None
    else:
        with pytest.raises(ProtocolError, match="beyond"):
            await made.flows(leases, 0, 1)
    assert first.ends == ["end", "left"]
    assert not leases[2].wanted


async def test_no_flow_is_left_where_the_wait_is_cancelled() -> None:
    made, _ = bare_locations()
    first = FakeFlow()
    waiting = asyncio.ensure_future(made.flows([Flowing(first), Flowing(FakeFlow())], 0, 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert first.ends == ["end", "left"]
