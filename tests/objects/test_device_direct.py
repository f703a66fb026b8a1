"""Arrays that fake network cards carry between the fake GPUs of two processes, which are both in this one."""

from __future__ import annotations

import asyncio
import errno
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import uvloop

import zcactor as zc
from tests.assembly.test_process import PATIENCE, _call, _settled
from tests.assembly.test_process_verbs import Pair
from tests.callers import asked_by
from tests.device.helpers import drawn_options, held, settle
from tests.transport.verbs.sides import drawn_network
from zcactor.api.device_paths import device_path
from zcactor.api.remote_actor import RemoteActor
from zcactor.assembly.devices import device_opener
from zcactor.assembly.process import Process
from zcactor.device.array import empty_array
from zcactor.device.lease import DeviceLease
from zcactor.errors import ObjectLost, OutOfMemory
from zcactor.ids import ActorId
from zcactor.interface import Interface
from zcactor.marshal.devices import pass_arrays
from zcactor.objects import device_direct
from zcactor.objects.device_direct import DirectReads
from zcactor.objectstore.copies import CopyCount
from zcactor.observe.stats import stats_of
from zcactor.transport.stream.record_layer import Integrity
from zcactor.transport.verbs.driver.codes import CompletionStatus
from zcactor.transport.verbs.driver.fake import FakeFabric

pytestmark = pytest.mark.slow
LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop: nothing here depends on its kind, and each test takes extents of GPU memory."""
MIB = 1 << 20
NBYTES = 9 * MIB + 12_345
"""Bytes of an array: several READs, and more than one list of them."""
HOST = "through host memory"


class Keeper:
    """An actor with arrays on its GPU."""

    def __init__(self) -> None:
        self.process: Any = None
        self.kept: Any = None
        self.shelf: dict[int, Any] = {}

    async def put(self, number: int, x: Any) -> None:
        """Keep an array by its number."""
        self.shelf[number] = x

    async def keep(self, x: Any) -> None:
        """Keep an array."""
        self.kept = x

    async def give(self) -> Any:
        """Give the array."""
        return self.kept


class GpuPair(Pair):
    """Two processes with a card and a fake GPU each, and a `Keeper` in the second.

    Args:
        options: of the fake GPUs of both.
        keep: as ``device_keep_nbytes``.
        more: as for `Pair`.
    """

    def __init__(self, options: tuple[str, str] = ("", ""), keep: int = 0, **more: Any) -> None:
        super().__init__(**more)
        self._settings = [zc.Config(gpu=f"fake:{each}", device_keep_nbytes=keep) for each in options]
        self.keeper = Keeper()

    async def __aenter__(self) -> tuple[Process, Process, RemoteActor]:
        caller, owner, _ = await super().__aenter__()
        pass_arrays()
        for process, config in zip(self.made, self._settings, strict=True):
            process.store.open_devices = device_opener(config, asyncio.get_running_loop())
        index = owner.hosts.take_index()
        owner.hosts.add(index, Keeper, "Keeper").adopt(self.keeper)
        place = (owner.process, index)
        actor = RemoteActor(caller, ActorId(b"g" * 16), Interface.of(Keeper), place, None, "default", 100, 0)
        return caller, owner, actor

    def regions(self, number: int) -> list[int]:
        """The keys of GPU memory that is registered with a card."""
        return [
            region.lkey
            for nic in self.fabric.devices
            if nic.name.endswith(str(number))
            for device in nic.devices
            for region in device.regions.values()
            if region.address == 0
        ]

    async def nothing_left(self) -> None:
        """Wait until both processes have given back everything."""
        self.keeper.kept = None
        for process in self.made:
            await _settled(lambda process=process: _left(process), (0, 0, 0))
        for number in range(2):
            await _settled(lambda number=number: self.regions(number), [])


def _left(process: Process) -> tuple[int, int, int]:
    gc.collect()
    devices = process.store.devices()
    stats = stats_of(process)
    return stats.leases, stats.device_used, sum(gpu.arena.taken for gpu in devices.gpus)


def on_gpu(process: Process, nbytes: int = NBYTES, seed: int = 1) -> tuple[Any, Any]:
    """An array on a process's GPU, and its values."""
    values = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    made = empty_array(process.store.devices().gpus[0], values.shape, values.dtype)
    made.copy_from(values)
    return made, values


def values_of(x: Any) -> Any:
    """The values of an array that has come."""
    target = np.empty(x.shape, x.dtype)
    x.copy_to_host(target)
    return target


def leased(giver: Process, taker: Process, x: Any) -> DeviceLease:
    """A lease on an array of one process, which the other one has."""
    ((here,), (there,)) = giver.sessions.all(), taker.sessions.all()
    block = x.holder
    block.share(giver.store)
    with here.lock:
        block.grant(here)
    return DeviceLease(giver.process, block.id, block.offset, block.nbytes, there.release_later)


def direct(process: Process) -> DirectReads:
    found: DirectReads = process.resolver.devices.direct
    return found


def driver(process: Process) -> Any:
    return process.store.devices().driver


@pytest.mark.parametrize("nbytes", [1, 4096, MIB + 1, NBYTES])
async def test_from_gpu_to_gpu_and_back(nbytes: int) -> None:
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, values = on_gpu(caller, nbytes)
        await _call(actor, "keep", x)
        assert type(pair.keeper.kept) is zc.gpu.DeviceArray and pair.keeper.kept.readonly
        assert np.array_equal(values_of(pair.keeper.kept), values)
        pair.keeper.kept, others = on_gpu(owner, nbytes, 2)
        came = await _call(actor, "give")
        assert np.array_equal(values_of(came), others)
        for process in (caller, owner):
            stats = stats_of(process)
            assert (stats.bytes_device_pulled, stats.bytes_device_mapped) == (nbytes, 0)
            assert (stats.bytes_copied, stats.copies, stats.bytes_read) == (0, {}, 0)
            assert process.resolver.devices.pieces.nbytes == 0, "nothing is staged"
            assert not direct(process).rejected
        assert [len(pair.regions(number)) for number in range(2)] == [1, 1], "each extent is registered once"
        del x, came
        await pair.nothing_left()


async def test_cards_and_gpus_that_are_drawn(rounds: int) -> None:
    """Cards read from GPUs where both ends' drivers and cards can; otherwise it goes through host memory."""
    for seed in range(4 * rounds):
        pair = GpuPair((drawn_options(seed), drawn_options(seed + 1)), fabric=drawn_network(seed))
        async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
            x, values = on_gpu(caller, MIB + seed)
            await _call(actor, "keep", x)
            assert np.array_equal(values_of(pair.keeper.kept), values), seed
            pair.keeper.kept, values = on_gpu(owner, MIB + seed, 2)
            came = await _call(actor, "give")
            assert np.array_equal(values_of(came), values), seed
            ends = [(process, session.connection) for process in (caller, owner) for session in process.sessions.all()]
            able = all(
                driver(process).exports_to_cards and end.pairs.engine.device.nic.takes_dma_bufs for process, end in ends
            )
            pulled = [stats_of(process).bytes_device_pulled for process, _ in ends]
            assert pulled == [able * (MIB + seed)] * 2, seed
            del x, came, ends
            await pair.nothing_left()


@pytest.mark.parametrize("options", ["export=none,events=none,readonly=no", "late=3"])
async def test_many_at_once(options: str) -> None:
    """Memory that other processes of the host cannot map is memory that cards reach."""
    pair = GpuPair((options, options))
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        made = [on_gpu(caller, MIB + number, number) for number in range(8)]
        await asyncio.gather(*(_call(actor, "put", number, x) for number, (x, _) in enumerate(made)))
        for number, each in enumerate(made):
            assert np.array_equal(values_of(pair.keeper.shelf[number]), each[1])
        assert not owner.copies.snapshot() and not direct(owner).rejected
        assert [len(pair.regions(number)) for number in range(2)] == [1, 1]
        pair.keeper.shelf.clear()
        made.clear()
        del each
        await pair.nothing_left()


async def test_an_array_without_bytes() -> None:
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, _, actor):
        await _call(actor, "keep", empty_array(caller.store.devices().gpus[0], (0, 5), np.dtype("f4")))
        assert pair.keeper.kept.shape == (0, 5)


async def test_the_proof_is_done_once_at_each_end_and_told() -> None:
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        await _call(actor, "keep", None)
        (session,) = caller.sessions.all()
        for _ in range(2):
            path = await device_path(_as_configured(caller), session)
            assert path is not None
            assert (path.path, path.proven) == ("gpudirect", True)
            assert "unverified on hardware" in path.reason
            assert path.rejected == {"mapped": "memory of GPUs is mapped between processes of one host only"}
        for process in (caller, owner):
            (peer,) = process.sessions.all()
            (proof,) = peer.connection.gpu_reading.memory.proofs.values()
            assert await proof == ""


def _as_configured(process: Process) -> Any:
    """The process, with the setting that lets `zc.explain` look at GPUs."""
    process.config = zc.Config(gpu="fake")
    return process


FAILURES: dict[str, tuple[tuple[str, str], Callable[[GpuPair], object], str]] = {
    "the owner's driver": (("dmabuf=no", ""), lambda _: None, "at the owner: the GPU's driver exports no memory"),
    "the reader's driver": (("", "dmabuf=no"), lambda _: None, "the GPU's driver exports no memory"),
    "the owner's export": (("fail=dma_buf", ""), lambda _: None, "at the owner: dma_buf on GPU 0 failed"),
    "the reader's export": (("", "fail=dma_buf"), lambda _: None, "dma_buf on GPU 0 failed"),
    "the owner's flush": (("fail=flush", ""), lambda _: None, "at the owner: flush on GPU 0 failed"),
    "the reader's flush": (("", "fail=flush:2"), lambda _: None, "flush on GPU 0 failed"),
    "the owner's card": (
        ("", ""), lambda pair: setattr(pair.fabric.nics["fake0"], "takes_dma_bufs", False),
        "at the owner: [Errno 95] fake0 cannot register a dma-buf",
    ),
    "the reader's card": (
        ("", ""), lambda pair: setattr(pair.fabric.nics["fake1"], "takes_dma_bufs", False),
        "fake1 cannot register a dma-buf",
    ),
    "the first registration": (("", ""), lambda pair: _refuse(pair, 0), "no more"),
    "the second registration": (("", ""), lambda pair: _refuse(pair, 1), "no more"),
}  # fmt: skip


def _refuse(pair: GpuPair, after: int) -> None:
    pair.fabric.fail("register_dma_buf", OSError(errno.ENOSPC, "no more"), after=after)


@pytest.mark.parametrize("failure", FAILURES)
async def test_what_fails_leaves_it_to_host_memory(failure: str) -> None:
    options, prepare, reason = FAILURES[failure]
    pair = GpuPair(options)
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        await _call(actor, "keep", None)
        prepare(pair)
        for seed in range(2):
            x, values = on_gpu(caller, seed=seed)
            await _call(actor, "keep", x)
            assert np.array_equal(values_of(pair.keeper.kept), values)
        assert [*direct(owner).rejected] == [caller.process]
        assert reason in direct(owner).rejected[caller.process].reason
        for process in (caller, owner):
            assert process.copies.snapshot()[HOST] == CopyCount(2, 2 * NBYTES)
        assert stats_of(owner).bytes_device_pulled == 0
        (session,) = caller.sessions.all()
        path = await device_path(_as_configured(caller), session)
        assert path is not None
        assert (path.path, path.proven) == ("host", True)
        assert reason in path.rejected["gpudirect"]
        del x
        await pair.nothing_left()


@pytest.mark.parametrize("after", [0, 1], ids=["at the owner", "at the reader"])
async def test_a_refusal_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    monkeypatch.setattr(device_direct, "FIRST_PAUSE", 0.0)
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        await _call(actor, "keep", None)
        _refuse(pair, after)
        x, _ = on_gpu(caller)
        await _call(actor, "keep", x)
        assert pair.fabric.failed and "no more" in direct(owner).rejected[caller.process].reason
        assert stats_of(owner).bytes_device_pulled == 0
        y, values = on_gpu(caller, seed=1)
        await _call(actor, "keep", y)
        assert np.array_equal(values_of(pair.keeper.kept), values)
        assert not direct(owner).rejected and stats_of(owner).bytes_device_pulled == NBYTES
        del x, y
        await pair.nothing_left()


async def test_a_registration_that_fails_later() -> None:
    """Another extent than that of the proof."""
    pair = GpuPair()
    large = 70 * MIB
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, _ = on_gpu(caller)
        await _call(actor, "keep", x)
        for after in range(2):  # the owner registers first
            direct(owner).rejected.clear()
            _refuse(pair, after)
            y, values = on_gpu(caller, large)
            await _call(actor, "keep", y)
            assert pair.fabric.failed
            assert np.array_equal(values_of(pair.keeper.kept), values)
            reason = direct(owner).rejected[caller.process].reason
            assert reason.startswith("at the owner: ") is not bool(after)
        assert owner.copies.snapshot()[HOST] == CopyCount(2, 2 * large)
        del x, y
        await pair.nothing_left()


async def _passed_by(read: Any, monkeypatch: pytest.MonkeyPatch, pair: GpuPair, caller: Process, actor: Any) -> Any:
    """Pass an array while cards READ by `read`, and check its bytes. Returns the array."""
    await _call(actor, "keep", None)
    monkeypatch.setattr(FakeFabric, "_read", read)
    x, values = on_gpu(caller)
    await _call(actor, "keep", x)
    assert np.array_equal(values_of(pair.keeper.kept), values)
    return x


@pytest.mark.parametrize("end", ["reader", "owner"])
@pytest.mark.parametrize("way", [0, 1], ids=["from the GPU", "to the GPU"])
async def test_a_card_that_delivers_other_bytes(monkeypatch: pytest.MonkeyPatch, end: str, way: int) -> None:
    pair, done, number = GpuPair(), FakeFabric._read, int(end == "reader")
    seen: list[int] = []

    def read(fabric: FakeFabric, qp: Any, peer: Any, request: Any) -> CompletionStatus:
        if qp is peer and qp.device.nic.name == f"fake{number}" and request.nbytes == 64 << 10:
            seen.append(1)
            if len(seen) == way + 1:
                return CompletionStatus.SUCCESS  # and no byte has moved
        return done(fabric, qp, peer, request)

    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x = await _passed_by(read, monkeypatch, pair, caller, actor)
        assert "other bytes" in direct(owner).rejected[caller.process].reason
        assert (
            direct(owner).rejected[caller.process].reason.startswith("at the owner: " if end == "owner" else "fake1 ")
        )
        assert len(seen) == way + 1, "it is found out once"
        del x
        await pair.nothing_left()


async def test_a_proof_whose_read_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, done = GpuPair(), FakeFabric._read

    def read(fabric: FakeFabric, qp: Any, peer: Any, request: Any) -> CompletionStatus:
        return CompletionStatus.LOC_PROT if qp is peer else done(fabric, qp, peer, request)

    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x = await _passed_by(read, monkeypatch, pair, caller, actor)
        assert (
            "fake1 does not read memory of the GPU: a READ of 65536 bytes from itself failed"
            in direct(owner).rejected[caller.process].reason
        )
        del x
        await pair.nothing_left()


async def test_arrays_that_are_authenticated_go_through_host_memory() -> None:
    pair = GpuPair(sealing=True, integrity=Integrity.ARRAYS)
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, values = on_gpu(caller)
        await _call(actor, "keep", x)
        assert np.array_equal(values_of(pair.keeper.kept), values)
        assert owner.copies.snapshot()[HOST] == CopyCount(1, NBYTES)
        (session,) = owner.sessions.all()
        assert "authenticated" in direct(owner).reason(session)
        assert not session.connection.gpu_reading.memory.proofs


async def test_without_a_card() -> None:
    pair = GpuPair(rdma=(True, False))
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, values = on_gpu(caller)
        await _call(actor, "keep", x)
        assert np.array_equal(values_of(pair.keeper.kept), values)
        (session,) = owner.sessions.all()
        assert "go by tcp" in direct(owner).reason(session)
        (session,) = caller.sessions.all()
        lease = leased(caller, owner, x)
        assert await asked_by(session, direct(caller).keys(lease.id, lease.offset, 1)) == (
            "the owner has no connection by RDMA to the reader"
        )


# ---- order


async def test_an_array_that_is_not_computed_is_not_read() -> None:
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, _ = on_gpu(caller)
        await _call(actor, "keep", x)
        y = empty_array(caller.store.devices().gpus[0], (NBYTES,), np.dtype("u1"))
        with held(driver(caller)):
            y.fill(7)
            before = pair.fabric.statistics().reads
            coming = asyncio.ensure_future(_call(actor, "keep", y))
            settle(driver(caller))
            await _settled(lambda: len(owner.resolver.devices._coming), 1)
            assert pair.fabric.statistics().reads == before
        await coming
        assert (values_of(pair.keeper.kept) == 7).all()


async def test_bytes_that_are_still_in_use_are_not_written_to() -> None:
    """The destination had another owner, whose work is queued on a stream that the card does not know."""
    pair = GpuPair(keep=64 * MIB)
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, values = on_gpu(caller)
        await _call(actor, "keep", x)
        pair.keeper.kept = None
        await _settled(lambda: stats_of(owner).device_used, 0)
        y, others = on_gpu(caller, seed=2)
        with held(driver(owner)):
            old = empty_array(owner.store.devices().gpus[0], (60 * MIB,), np.dtype("u1"))  # all that is there
            old.fill(9)
            del old
            before = pair.fabric.statistics().reads
            coming = asyncio.ensure_future(_call(actor, "keep", y))
            await _settled(lambda: len(owner.resolver.devices._coming), 1)
            for _ in range(100):
                await asyncio.sleep(0)
            assert pair.fabric.statistics().reads == before
        await coming
        assert np.array_equal(values_of(pair.keeper.kept), others)
        assert np.array_equal(values_of(x), values)


async def test_each_read_is_flushed_before_the_array_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, _ = on_gpu(caller)
        await _call(actor, "keep", x)
        flushed: list[tuple[int, int]] = []
        theirs = driver(owner)
        monkeypatch.setattr(
            theirs, "flush", lambda device: flushed.append((device, pair.fabric.statistics().bytes_read)), raising=True
        )
        before = pair.fabric.statistics().bytes_read
        y, _ = on_gpu(caller)
        await _call(actor, "keep", y)
        ((device, read),) = flushed
        assert device == 0 and read - before >= NBYTES


# ---- lifetime


async def test_extents_are_deregistered_before_they_are_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, _ = on_gpu(caller)
        await _call(actor, "keep", x)
        unmapped: list[int] = []
        for number, process in enumerate((caller, owner)):
            gpus = driver(process)

            def unmap(device: int, address: int, nbytes: int, number: int = number, done: Any = gpus.unmap) -> None:
                unmapped.append(number)
                assert not pair.regions(number)
                done(device, address, nbytes)

            monkeypatch.setattr(gpus, "unmap", unmap)
        del x
        await pair.nothing_left()
        assert sorted(unmapped) == [0, 1]
        x, values = on_gpu(caller)
        await _call(actor, "keep", x)
        assert np.array_equal(values_of(pair.keeper.kept), values)
        assert not direct(owner).rejected and not owner.copies.snapshot()


async def test_memory_that_cannot_be_deregistered(caplog: pytest.LogCaptureFixture) -> None:
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, _, actor):
        x, _ = on_gpu(caller)
        await _call(actor, "keep", x)
        pair.fabric.fail("ibv_dereg_mr", OSError(errno.EBUSY, "busy"))
        del x
        pair.keeper.kept = None
        for process in pair.made:
            await _settled(lambda process=process: _left(process), (0, 0, 0))
        assert "could not be deregistered from fake" in caplog.text


@pytest.mark.parametrize("dies", ["owner", "reader"])
async def test_an_end_in_the_middle_of_a_read(dies: str) -> None:
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, _ = on_gpu(caller)
        await _call(actor, "keep", x)
        y, _ = on_gpu(caller, seed=2)
        lease = leased(caller, owner, y)
        ((here,), (there,)) = caller.sessions.all(), owner.sessions.all()
        puller: Any = there.connection.puller
        pair.fabric.manual = True  # frames do not arrive by themselves either
        coming = asyncio.ensure_future(direct(owner).read(there, lease, owner.store.devices().gpus[0]))
        while not puller._lists:
            pair.fabric.step()
            await asyncio.sleep(0)
        pair.fabric.step(2)
        assert stats_of(owner).device_used >= 2 * NBYTES, "the destination is there"
        read = pair.fabric.statistics().bytes_read
        (here if dies == "owner" else there).connection.abort()
        pair.fabric.manual = False
        pair.fabric.drain()
        assert await coming is None
        assert pair.fabric.statistics().bytes_read - read < NBYTES
        await _settled(lambda: puller.drained, True)
        assert not direct(owner).rejected, "the peer has gone, and nothing is to be said against the cards"
        del x, y, lease
        await pair.nothing_left()


async def test_a_destination_stays_until_the_card_has_written_to_it() -> None:
    """A reader that is not waited for any more: the card goes on, and nobody else gets these bytes meanwhile."""
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, _ = on_gpu(caller)
        await _call(actor, "keep", x)
        pair.keeper.kept = None
        await _settled(lambda: stats_of(owner).device_used, 0)
        lease = leased(caller, owner, x)
        (there,) = owner.sessions.all()
        puller: Any = there.connection.puller
        pair.fabric.manual = True
        coming = asyncio.ensure_future(direct(owner).read(there, lease, owner.store.devices().gpus[0]))
        while not puller._lists:
            pair.fabric.step()
            await asyncio.sleep(0)
        coming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await coming
        for _ in range(20):
            gc.collect()
            await asyncio.sleep(0)
        assert stats_of(owner).device_used >= NBYTES
        pair.fabric.manual = False
        pair.fabric.drain()
        await _settled(lambda: stats_of(owner).device_used, 0)
        del x, lease
        await pair.nothing_left()


# ---- bad input


ANSWERS: dict[str, Callable[[int, int], object]] = {
    "the extent behind it": lambda offset, nbytes: (offset + 1, nbytes, 0, 5, 0),
    "an extent that ends before": lambda offset, nbytes: (offset, nbytes - 1, 0, 5, 0),
    "another GPU": lambda offset, nbytes: (offset + (1 << 48), nbytes, 0, 5, 0),
    "an address beyond 64 bits": lambda offset, nbytes: (offset, nbytes, (1 << 64) - nbytes + 1, 5, 0),
    "a negative address": lambda offset, nbytes: (offset, nbytes, -1, 5, 0),
    "an extent beyond 64 bits": lambda offset, nbytes: (offset, 1 << 64, 0, 5, 0),
    "an rkey of 33 bits": lambda offset, nbytes: (offset, nbytes, 0, 1 << 32, 0),
    "a negative rkey": lambda offset, nbytes: (offset, nbytes, 0, -5, 0),
    "a seal behind the table": lambda offset, nbytes: (offset, nbytes, 0, 5, 1 << 16),
    "four numbers": lambda offset, nbytes: (offset, nbytes, 0, 5),
    "a float": lambda offset, nbytes: (offset, nbytes, 0.0, 5, 0),
    "a flag": lambda offset, nbytes: (offset, nbytes, False, 5, 0),
    "nothing": lambda offset, nbytes: None,
    "bytes": lambda offset, nbytes: b"12345",
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_an_owner_that_names_other_memory(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, _ = on_gpu(caller)
        await _call(actor, "keep", x)

        async def keys(object_id: int, offset: int, nbytes: int) -> Any:
            return ANSWERS[answer](offset, nbytes)

        monkeypatch.setattr(direct(caller), "keys", keys)
        caller.serve(direct(caller))
        before = pair.fabric.statistics().bytes_read
        y, _ = on_gpu(caller)
        with pytest.raises(ObjectLost, match="the array does not lie there"):
            await _call(actor, "keep", y)
        assert pair.fabric.statistics().bytes_read - before < NBYTES, "no byte of it"
        assert not direct(owner).rejected, "no word against the cards"
        del x, y
        await pair.nothing_left()


async def test_a_key_that_is_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's card refuses, the pair of queue pairs is connected anew, and the array comes on the other way."""
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, _ = on_gpu(caller)
        await _call(actor, "keep", x)
        made = direct(caller).keys

        async def keys(*what: int) -> Any:
            found: Any = await made(*what)
            return (*found[:3], found[3] ^ 0xFF, found[4])

        monkeypatch.setattr(direct(caller), "keys", keys)
        caller.serve(direct(caller))
        y, values = on_gpu(caller)
        await _call(actor, "keep", y)
        assert np.array_equal(values_of(pair.keeper.kept), values)
        assert owner.copies.snapshot()[HOST] == CopyCount(1, NBYTES)
        assert "reading" in direct(owner).rejected[caller.process].reason


async def test_a_seal_that_is_not_the_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner has freed the object, and its card still reads what is there by now."""
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, _ = on_gpu(caller)
        await _call(actor, "keep", x)
        (session,) = caller.sessions.all()
        made, seals = direct(caller).keys, session.connection._engine.seals

        async def keys(object_id: int, *what: int) -> Any:
            found = await made(object_id, *what)
            seals.clear(object_id)
            return found

        monkeypatch.setattr(direct(caller), "keys", keys)
        caller.serve(direct(caller))
        y, values = on_gpu(caller)
        await _call(actor, "keep", y)
        assert np.array_equal(values_of(pair.keeper.kept), values)
        assert owner.copies.snapshot()[HOST] == CopyCount(1, NBYTES)
        assert "it has been freed" in direct(owner).rejected[caller.process].reason


async def test_an_object_that_nobody_has_leased() -> None:
    pair = GpuPair()
    async with asyncio.timeout(PATIENCE), pair as (caller, _, actor):
        x, _ = on_gpu(caller)
        await _call(actor, "keep", x)
        (session,) = caller.sessions.all()
        number, offset = x.holder.id, x.holder.offset
        for what in ((number + 1, offset, 1), (number, offset - 1, 1), (number, offset, NBYTES + 1)):
            with pytest.raises(ObjectLost, match="is leased to the process"):
                await asked_by(session, direct(caller).keys(*what))


async def test_a_gpu_without_room_for_the_proof() -> None:
    """The proof is done once there is room."""
    pair = GpuPair(("", "memory=64MiB"))
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, values = on_gpu(caller)
        full = empty_array(owner.store.devices().gpus[0], (64 * MIB,), np.dtype("u1"))
        with pytest.raises(OutOfMemory):
            await _call(actor, "keep", x)
        (session,) = owner.sessions.all()
        assert not session.connection.gpu_reading.memory.proofs
        del full
        await _call(actor, "keep", x)
        assert np.array_equal(values_of(pair.keeper.kept), values)
        assert not owner.copies.snapshot() and not direct(owner).rejected


async def test_a_gpu_without_a_stream() -> None:
    pair = GpuPair(("fail=stream", ""))
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, values = on_gpu(caller)
        await _call(actor, "keep", x)
        assert np.array_equal(values_of(pair.keeper.kept), values)
        assert "at the owner: stream on GPU 0 failed" in direct(owner).rejected[caller.process].reason


async def test_a_gpu_without_room() -> None:
    pair = GpuPair(("", "memory=64MiB"))
    async with asyncio.timeout(PATIENCE), pair as (caller, owner, actor):
        x, _ = on_gpu(caller, 70 * MIB)
        with pytest.raises(OutOfMemory):
            await _call(actor, "keep", x)
        assert not direct(owner).rejected
