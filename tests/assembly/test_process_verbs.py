"""Two processes in this one that reach each other by RDMA on a fake fabric: the cost of calls with arrays."""

from __future__ import annotations

import asyncio
import gc
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.assembly.test_process import PATIENCE, Sums, _call, _settled
from tests.transport.verbs.entitlements import entitlements
from tests.transport.verbs.sides import host_cards
from zcactor.api.remote_actor import RemoteActor
from zcactor.api.remote_method import RemoteMethod
from zcactor.assembly.endpoints import may_read
from zcactor.assembly.process import Process
from zcactor.collectives.sources import lendable
from zcactor.errors import ObjectLost
from zcactor.ids import ActorId
from zcactor.interface import Interface
from zcactor.objectstore.copies import CopyCount
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.objectstore.store import Store
from zcactor.observe.stats import stats_of
from zcactor.process import context
from zcactor.rpc.services import Services
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.stream.record_layer import Integrity
from zcactor.transport.verbs.driver.base import Binding
from zcactor.transport.verbs.driver.bindings import Absent, Reason
from zcactor.transport.verbs.driver.codes import EventType
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.endpoint import VerbsEndpoint
from zcactor.transport.verbs.peer.pulling import PIECE_NBYTES

__all__ = ["entitlements"]

MIB = 1 << 20
TOKEN = bytes(32)


def _same(binding: Binding | Absent) -> Binding | Absent:
    return binding


class ByAddress:
    """An endpoint that connects by process name, with addresses from the test in place of a run directory."""

    addresses: dict[str, str]

    def __init__(self, endpoint: VerbsEndpoint) -> None:
        self._endpoint = endpoint
        endpoint.authorize = may_read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    async def connect(self, address: str) -> Any:
        """Connect to the address of the process of that name."""
        return await self._endpoint.connect(self.addresses[address])


async def over_verbs(addresses: dict[str, str], binding: Binding | Absent, capacity: int, **options: Any) -> Process:
    """Start a process on an adapter.

    Args:
        addresses: those of all processes by their names in hexadecimal digits; this one adds its own.
        binding: finds the adapter.
        capacity: of its store, in bytes.
        options: of its endpoint.
    """
    name = os.urandom(16)
    store = Store(capacity, name)
    endpoint: Any = ByAddress(
        VerbsEndpoint(
            "127.0.0.1", name, TOKEN, store.arena, store.arena.fd, 64, 4096, binding=partial(_same, binding),
            lookup=store.lookup, verbs_eager_limit=4096, **options,
        )
    )  # fmt: skip
    endpoint.addresses = addresses
    config = zc.Config(eager_limit=4096, recv_depth=64)
    process = Process(name, "worker", config, asyncio.get_running_loop(), store, endpoint)
    await endpoint.start(process.connections.accepted)
    addresses[name.hex()] = endpoint.address
    return process


class Pair:
    """A caller and the owner of a `Sums` actor, with an adapter each; `rdma` says which of them have a device. A fabric
    may have more adapters: those whose names end with 0 are the caller's.
    """

    def __init__(
        self, rdma: tuple[bool, bool] = (True, True), capacity: int = 160 * MIB, *, sealing: bool = False,
        integrity: Integrity = Integrity.AUTO, fabric: FakeFabric | None = None,
    ) -> None:  # fmt: skip
        self.fabric = fabric or FakeFabric()
        self._rdma = rdma
        self._capacity = capacity
        self._sealing = sealing
        self._integrity = integrity

    async def __aenter__(self) -> tuple[Process, Process, RemoteActor]:
        addresses: dict[str, str] = {}
        made = []
        for number, has in enumerate(self._rdma):
            if f"fake{number}" not in self.fabric.nics:
                self.fabric.add_nic(f"fake{number}")
            binding: Binding | Absent = (
                host_cards(self.fabric, number) if has else Absent((Reason("fake", "no device", "buy one"),))
            )
            made.append(
                await over_verbs(addresses, binding, self._capacity, sealing=self._sealing, integrity=self._integrity)
            )
        self.made = caller, owner = made
        context.set_current(caller)  # for both processes: unpacking does not ask to which of them a value belongs
        index = owner.hosts.take_index()
        owner.hosts.add(index, Sums, "Sums").adopt(Sums())
        place = (owner.process, index)
        return (
            caller,
            owner,
            RemoteActor(caller, ActorId(b"a" * 16), Interface.of(Sums), place, None, "default", 100, 0),
        )

    async def __aexit__(self, *_: object) -> None:
        context.clear_current()
        for process in self.made:
            await process.close()


def frames(process: Process) -> int:
    """Frames sent and received."""
    return process.counters.frames_sent + process.counters.frames_received


async def ready(caller: Process, actor: RemoteActor) -> Any:
    """The caller's connection to the actor's process, after a first call has opened it."""
    await _call(actor, "total", caller.store.empty(4096))
    (session,) = (s for s in caller.sessions.all() if s.peer_process == actor.location[0])
    return session.connection


async def test_calls_of_a_finalizer_that_do_not_fit_the_slot() -> None:
    """As from one that runs where this thread changes slots: they are sent in a later turn, and none is lost."""
    async with asyncio.timeout(PATIENCE), Pair() as (caller, _, actor):
        same = RemoteMethod(actor, actor.interface.by_name["same"], {})
        assert await same(0) == 0
        assert actor.route is not None
        sender = actor.route[0].connection._sender
        with sender._lock:
            calls = [same(bytes([number]) * 3000) for number in range(50)]
            calls += [same({number: "x" * 3000}) for number in range(50)]
        assert [len(value) for value in await zc.get(calls)] == [3000] * 50 + [1] * 50
        given_up = same(1)
        with sender._lock:
            given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await caller.requests.ask(actor.route[0], Services.ping)


@pytest.mark.parametrize("nbytes", [8192, MIB, MIB + 8, 20 * MIB])
async def test_an_array_is_one_frame_each_way_and_one_list_of_reads(nbytes: int) -> None:
    pair = Pair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        connection = await ready(caller, actor)
        assert connection.kind == "verbs"
        array = caller.store.empty(nbytes // 8)
        array[...] = 2
        (theirs,) = (s.connection for s in owner.sessions.all())
        before = frames(caller), theirs.puller.reads, pair.fabric.statistics()
        assert await _call(actor, "total", array) == (nbytes / 4, False, True)
        seal = 1
        assert frames(caller) - before[0] == 2
        assert theirs.puller.reads - before[1] == -(-nbytes // PIECE_NBYTES)
        assert pair.fabric.statistics().reads - before[2].reads == -(-nbytes // PIECE_NBYTES) + seal
        assert owner.counters.bytes_read >= nbytes and owner.counters.bytes_mapped == 0
        assert owner.counters.bytes_received == 0
        assert not caller.copies.snapshot() and not owner.copies.snapshot(), "no byte was touched"
        assert pair.fabric.statistics().rnr == pair.fabric.statistics().retries == 0
        owner.hosts.by_index[max(owner.hosts.by_index)].instance.kept = None
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])


class Labelled(np.ndarray[Any, Any]):
    """An array that travels as a pickle, with a reference to its elements."""


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [8192, MIB + 8])
async def test_what_a_pickle_refers_to_is_authenticated_and_plain_arrays_are_not(nbytes: int) -> None:
    async with asyncio.timeout(PATIENCE), Pair(sealing=True) as (caller, owner, actor):
        connection = await ready(caller, actor)
        assert (connection.kind, connection.sealed, connection.integrity) == ("verbs", True, "frames")
        array = caller.store.empty(nbytes // 8)
        array[...] = 2
        assert (await _call(actor, "total", array))[0] == nbytes / 4
        assert owner.counters.bytes_authenticated == 0
        assert (await _call(actor, "total", array.view(Labelled)))[0] == nbytes / 4
        assert owner.counters.bytes_authenticated == nbytes


@pytest.mark.slow
@pytest.mark.parametrize("rdma", [True, False])
@pytest.mark.parametrize("integrity", [Integrity.FRAMES, Integrity.ARRAYS])
async def test_a_payload_above_the_eager_limit_is_ciphertext_in_the_store_and_has_its_tag_in_its_frame(
    rdma: bool, integrity: Integrity
) -> None:
    pair = Pair((rdma, rdma), sealing=True, integrity=integrity)
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        if rdma:
            await ready(caller, actor)
        before = [process.counters.bytes_authenticated for process in pair.made]
        numbers = Numbers([1, 2] * 20_000)
        assert (await _call(actor, "total", numbers))[0] == 60_000
        assert await _call(actor, "doubled", numbers) == numbers + numbers
        assert [process.copies.snapshot()["payload opened"].count for process in pair.made] == [1, 2]
        assert [process.counters.bytes_authenticated for process in pair.made] == before, "by no further tags"
        array = caller.store.empty(1 << 16)
        array[...] = 2
        assert (await _call(actor, "total", array))[0] == 1 << 17
        expected = array.nbytes if integrity is Integrity.ARRAYS else 0
        assert owner.counters.bytes_authenticated - before[1] == expected


class Numbers(list[int]):
    """A list with the attributes of an array that the actor uses; it travels as a pickle."""

    flags = SimpleNamespace(writeable=False)

    def sum(self) -> int:
        return sum(self)


@pytest.mark.slow
async def test_repeated_calls_use_one_destination_and_register_nothing() -> None:
    pair = Pair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        await ready(caller, actor)
        array = caller.store.empty(MIB)
        array[...] = 1
        # These are views, because a reader does not read an array again that it still has. The actor keeps the last one
        # only.
        for start in range(3):
            await _call(actor, "total", array[start : start - 1000])
        before, registered = stats_of(owner), pair.fabric.statistics().registrations
        assert before.registrations >= 1
        for start in range(20):
            assert (await _call(actor, "total", array[start : start - 1000]))[0] == MIB - 1000
        after = stats_of(owner)
        assert after.placements - before.placements == 20
        assert after.registrations == before.registrations
        assert pair.fabric.statistics().registrations == registered
        assert after.store_used <= before.store_used, "what is kept for the next one is not in use"


@pytest.mark.slow
async def test_memory_that_grows_is_registered_before_it_is_asked_for() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, _, actor):
        connection = await ready(caller, actor)
        await _settled(lambda: stats_of(caller).registrations, 1)
        array = caller.store.empty(70 * MIB, "u1")
        array[:] = 1
        await _settled(lambda: connection.extents.find(0, 1) is not None, True)
        await _settled(lambda: stats_of(caller).registrations, 2)
        block = caller.store.block_of(array)
        assert block is not None
        assert connection.extents.registered(block[0].offset, 70 * MIB)
        assert (await _call(actor, "total", array))[0] == 70 * MIB


@pytest.mark.slow
async def test_a_moved_array_is_read_and_comes_back_writable() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        array = caller.store.empty(50_000)
        array[...] = 3
        result = await _call(actor, "doubled", zc.move(array))
        assert float(result.sum()) == 300_000 and not result.flags.writeable
        del array, result
        gc.collect()
        await _settled(lambda: (caller.store.stats().used, owner.store.stats().used), (0, 0))


async def test_an_array_of_numpys_own_is_read_in_place() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        await ready(caller, actor)
        caller.use_numpy()
        array = np.arange(100_000.0)
        assert (await _call(actor, "total", array))[0] == array.sum()
        assert not caller.copies.snapshot() and not owner.copies.snapshot()


@pytest.mark.slow
@pytest.mark.parametrize("rdma", [(True, True), (False, False)], ids=["verbs", "tcp"])
async def test_an_array_of_numpys_own_cannot_be_written_to_once_it_was_pulled(rdma: tuple[bool, bool]) -> None:
    """Flags that are set and set back do not make it writable: the reader may keep its copy under the object's id."""
    async with asyncio.timeout(PATIENCE), Pair(rdma) as (caller, _, actor):
        connection = await ready(caller, actor)
        assert connection.native_out is not None and connection.kind == ("verbs" if rdma[0] else "tcp")
        caller.use_numpy()
        array = np.arange(100_000.0)
        expected = array.sum()
        for _ in range(2):
            assert (await _call(actor, "total", array))[0] == expected
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True
        assert not array.flags.owndata and caller.store.stats().of_numpy == 0
        assert not caller.copies.snapshot()


@pytest.mark.parametrize("rdma", [(True, False), (False, True), (False, False)])
async def test_where_one_end_has_no_device_arrays_come_over_tcp(rdma: tuple[bool, bool]) -> None:
    async with asyncio.timeout(PATIENCE), Pair(rdma) as (caller, owner, actor):
        connection = await ready(caller, actor)
        assert connection.kind == "tcp"
        assert "no device" in connection.rejected["verbs"]
        array = caller.store.empty(MIB)
        array[...] = 1
        assert (await _call(actor, "total", array))[0] == MIB
        assert owner.counters.bytes_received >= array.nbytes and owner.counters.bytes_read == 0


@pytest.mark.slow
async def test_a_port_that_goes_down_moves_calls_and_arrays_to_tcp_and_explain_says_why() -> None:
    pair = Pair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        connection = await ready(caller, actor)
        assert connection.kind == "verbs"
        array = caller.store.empty(MIB)
        array[...] = 1
        assert (await _call(actor, "total", array))[0] == MIB
        nic = pair.fabric.nics["fake0"]
        nic.set_active(False)
        nic.tell(EventType.PORT_ERR)
        await _settled(lambda: len([*caller.sessions.all(), *owner.sessions.all()]), 0)
        read = owner.counters.bytes_read
        array = caller.store.empty(MIB)
        array[...] = 2
        assert (await _call(actor, "total", array))[0] == 2 * MIB
        assert owner.counters.bytes_read == read and owner.counters.bytes_received >= array.nbytes
        for (session,), who in ((caller.sessions.all(), ""), (owner.sessions.all(), "the peer cannot use RDMA: ")):
            assert session.connection.kind == "tcp"
            why = session.connection.rejected["verbs"]  # `zc.explain` shows the same text
            assert why.startswith(f"{who}queue pairs cannot be made: fake0 port 1 is DOWN, not ACTIVE; connect the")


@pytest.mark.slow
async def test_a_key_that_is_revoked_loses_the_array_and_nothing_else() -> None:
    pair = Pair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        connection = await ready(caller, actor)
        array = caller.store.empty(MIB)
        array[...] = 1
        assert (await _call(actor, "total", array))[0] == MIB
        # The reader lets go of its copy, because it would not read the array again otherwise.
        owner.hosts.by_index[max(owner.hosts.by_index)].instance.kept = None
        (region,) = connection.extents._regions.values()
        region.revoke()
        with pytest.raises(zc.ObjectLost, match="rkey"):
            await _call(actor, "total", array)
        (theirs,) = (s.connection for s in owner.sessions.all())
        await _settled(lambda: theirs.generation, 1)
        region.device.regions[region.lkey] = region  # register the memory as before
        assert (await _call(actor, "total", array))[0] == MIB


@pytest.mark.parametrize("rdma", [(True, True), (False, False)], ids=["verbs", "tcp"])
@pytest.mark.parametrize("sealing", [False, True], ids=["plain", "sealed"])
async def test_peers_are_told_of_what_they_hold_a_lease_on_and_no_more(rdma: tuple[bool, bool], sealing: bool) -> None:
    async with asyncio.timeout(PATIENCE), Pair(rdma, sealing=sealing) as (caller, owner, actor):
        connection = await ready(caller, actor)
        assert connection.kind == ("verbs" if rdma[0] else "tcp")
        (session,) = owner.sessions.all()
        (ours,) = (s for s in caller.sessions.all() if s.peer_process == owner.process)
        array = caller.store.empty(100_000)
        array[...] = 3
        found = caller.store.block_of(array)
        assert found is not None
        block = found[0]
        caller.store.seal(block, found[1])
        caller.store.export(block)
        place = owner.store.empty(100_000)
        place[...] = 0

        def wanted(authenticate: bool) -> RemoteRegion:
            return RemoteRegion(block.id, block.offset, block.nbytes, authenticate=authenticate)

        for authenticate in (False, True) if sealing else (False,):
            with pytest.raises(ObjectLost, match="no lease" if rdma[0] else None):
                await session.connection.pull(wanted(authenticate), place.ctypes.data, place)
            assert not place.any()
        block.grant(ours)
        for authenticate in (False, True) if sealing else (False,):
            place[...] = 0
            await session.connection.pull(wanted(authenticate), place.ctypes.data, place)
            assert (place == 3).all()
        ours.leases.release(block.id, 1)
        with pytest.raises(ObjectLost):
            await session.connection.pull(wanted(False), place.ctypes.data, place)


def _register_nothing_more(pair: Pair, connection: Any) -> None:
    """Unregister the arena of a connection's process, and let it pin no page more than now."""
    for region in connection.extents._regions.values():
        region.close()
    connection.extents._regions.clear()
    nic = pair.fabric.nics[connection.pairs.engine.device.name]
    nic.pin_limit = nic.pinned


@pytest.mark.slow
async def test_arrays_whose_owner_cannot_register_them_come_by_the_socket() -> None:
    pair = Pair(sealing=True)
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        connection = await ready(caller, actor)
        _register_nothing_more(pair, connection)
        array = caller.store.empty(MIB)
        array[...] = 2
        assert (await _call(actor, "total", array))[0] == 2 * MIB
        (counted,) = owner.copies.snapshot().items()
        assert counted == ("owner cannot register its memory", CopyCount(1, array.nbytes))
        (theirs,) = (s.connection for s in owner.sessions.all())
        assert "ulimit -l" in theirs.describe() and "ulimit -l" in connection.describe()


async def test_arrays_that_cannot_be_registered_come_with_a_counted_copy() -> None:
    pair = Pair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        await ready(caller, actor)
        array = caller.store.empty(MIB)
        array[...] = 1
        assert (await _call(actor, "total", array))[0] == MIB
        assert not owner.copies.snapshot()
        (theirs,) = (s.connection for s in owner.sessions.all())
        _register_nothing_more(pair, theirs)
        array = caller.store.empty(MIB)
        array[...] = 2
        assert (await _call(actor, "total", array))[0] == 2 * MIB
        (counted,) = owner.copies.snapshot().items()
        assert counted == ("destination cannot be registered", CopyCount(1, array.nbytes))
        assert "ulimit -l" in theirs.describe()


@pytest.mark.parametrize("rdma", [(True, True), (False, False)], ids=["verbs", "tcp"])
async def test_lent_bytes_are_read_again_each_time_and_register_nothing(rdma: tuple[bool, bool]) -> None:
    pair = Pair(rdma)
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        await ready(caller, actor)
        (session,) = owner.sessions.all()
        (theirs,) = (each for each in caller.sessions.all() if each.peer_process == owner.process)
        array = owner.store.empty(MIB, "u1")
        _, piece = lendable(owner, array)
        registered = 0
        for number in range(5):
            array[:] = number  # its owner may write to it
            with session.lock:
                piece.grant(session)
            region = Region(RegionKind.ARRAY, owner.process, piece.id, piece.offset, piece.nbytes, 0)
            lease = caller.locations.remote(theirs, region).holder
            block = caller.placements.take(owner.process, MIB)
            before = caller.counters.bytes_read + caller.counters.bytes_received
            await caller.locations.fetch(lease, 4096, 8192, block.address + 64, block)
            assert caller.counters.bytes_read + caller.counters.bytes_received == before + 8192
            assert (np.asarray(block)[64 : 64 + 8192] == number).all()
            if number > 1:
                assert pair.fabric.statistics().registrations == registered
            registered = pair.fabric.statistics().registrations
            del lease, block
        assert array.flags.writeable and not caller.copies.snapshot() and not owner.copies.snapshot()
