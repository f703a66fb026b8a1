"""Pulls on a pair of queue pairs: the posted READs, the arriving bytes, and any failure in the middle."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.conformance.connection import turns
from tests.transport.verbs.parts import Memory, Wire
from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.verbs.device.sizing import MAX_READS
from zcactor.transport.verbs.device.slots import SlotArea
from zcactor.transport.verbs.device.versions import SEAL_NBYTES, SealTable
from zcactor.transport.verbs.driver.base import MAX_U32, MAX_U64, Read
from zcactor.transport.verbs.driver.codes import CompletionStatus, QpState
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.peer import pulling
from zcactor.transport.verbs.peer.pulling import BUDGET, LIST_READS, RESTARTS, SETTLED, Puller

PIECE = 64
NBYTES = 1 << 16
LIST = LIST_READS * PIECE
"""Bytes of one list."""

FATAL = (
    CompletionStatus.LOC_LEN, CompletionStatus.LOC_QP_OP, CompletionStatus.LOC_PROT, CompletionStatus.LOC_ACCESS,
    CompletionStatus.REM_INV_REQ, CompletionStatus.REM_ACCESS, CompletionStatus.REM_OP,
)  # fmt: skip
"""Statuses of a request that is wrong in itself."""
PASSING = (
    CompletionStatus.RETRY_EXC, CompletionStatus.RNR_RETRY_EXC, CompletionStatus.GENERAL, CompletionStatus.FATAL,
    CompletionStatus.RESP_TIMEOUT, CompletionStatus.REM_ABORT, CompletionStatus.BAD_RESP,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pause, so that no test goes by the clock."""
    monkeypatch.setattr(pulling, "MAX_PAUSE", 0.0)


class PullKeeper:
    """An object for a pull to keep."""


class Desk:
    """A puller at the left end of a wire, and the owner's memory at the right one. Nothing moves by itself."""

    def __init__(self, *, piece: int = PIECE, seed: int = 0) -> None:
        self.fabric = FakeFabric(seed=seed, manual=True)
        self.wire = Wire(self.fabric, max_send_wr=MAX_READS)
        here, there = self.wire.devices
        self.target, self.source = Memory(NBYTES), Memory(NBYTES)
        self.data = self.source.bytes[:] = random.Random(seed).randbytes(NBYTES)
        self.local = here.register(self.target.address, NBYTES, remote_read=False)
        self.remote = there.register(self.source.address, NBYTES, remote_read=True)
        self.seals = SealTable(there)
        self.area = SlotArea(here, MAX_READS, SEAL_NBYTES)
        self.posted: list[list[Read]] = []
        self.broken = 0
        self.unusable: list[Exception] = []
        self.holder = PullKeeper()
        told = (self.seals.address, self.seals.rkey, self.seals.count)
        self.puller = Puller(
            self.wire.left, self.area, piece, self.source.address, told, self._broken, self.unusable.append
        )
        self.puller.up = True
        post = self.wire.left.post_reads

        def note(reads: Sequence[Read]) -> None:
            self.posted.append(list(reads))
            post(reads)

        self.wire.left.post_reads = note  # type: ignore[method-assign]

    def _broken(self) -> None:
        assert self.puller.drained
        self.broken += 1

    def region(self, offset: int, nbytes: int, **more: int) -> RemoteRegion:
        """A region of the owner's bytes, without a seal."""
        return replace(RemoteRegion(7, offset, nbytes, 0, self.remote.rkey), **more)

    def start(self, region: RemoteRegion, at: int | None = None, keep: object = None) -> asyncio.Task[None]:
        """Start a pull to the same offset, or to `at`."""
        address = self.target.address + (region.offset if at is None else at)
        return asyncio.ensure_future(self.puller.pull(region, address, ((region.nbytes, self.local.lkey),), keep))

    def start_sealed(self, count: int, nbytes: int, step: int) -> tuple[list[RemoteRegion], list[asyncio.Task[None]]]:
        """Start pulls of `count` regions of one sealed object, each `step` bytes after the last."""
        seal = self.seals.seal(7, 0, NBYTES, self.holder)
        regions = [self.region(i * step, nbytes, seal=seal) for i in range(count)]
        return regions, [self.start(region) for region in regions]

    def tell(self) -> int:
        """Hand on completions."""
        found = self.wire.completions()
        for completion in found:
            self.puller.completed(completion)
        return len(found)

    def run(self) -> None:
        """Let every possible step happen, and connect anew whenever the puller asks for it."""
        while True:
            self.fabric.drain()
            if not self.tell():
                if not self.broken:
                    return
                self.rebuild()

    async def succeed(self, regions: Iterable[RemoteRegion], pulls: Iterable[asyncio.Task[None]]) -> None:
        """Let every step happen; check that all `pulls` bring their `regions`, and that nothing is left."""
        self.run()
        await asyncio.gather(*pulls)
        assert all(map(self.arrived, regions))
        assert self.unused()

    def rebuild(self) -> None:
        """Recover from a failure, as a connection does."""
        assert self.broken == 1, "told twice"
        assert self.wire.left.state() == QpState.ERR
        self.broken = 0
        self.wire.rejoin()
        self.puller.resume()

    def arrived(self, region: RemoteRegion, at: int | None = None) -> bool:
        """Whether exactly the region's bytes have arrived."""
        start = region.offset if at is None else at
        return self.target.bytes[start : start + region.nbytes] == self.data[region.offset :][: region.nbytes]

    def drained(self) -> bool:
        """Whether the device writes to no memory from here on."""
        return self.puller.drained

    def unused(self) -> bool:
        """Whether the puller is as in the beginning."""
        puller: Any = self.puller
        return bool(
            self.drained() and not puller._ready and not puller._under_way and len(puller._free_seals) == MAX_READS
        )


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("nbytes", [1, PIECE - 1, PIECE, PIECE + 1, LIST - 1, LIST, LIST + 1, 5 * LIST + 7, 40 * LIST])
async def test_reads_of_one_pull(nbytes: int, sealed: bool) -> None:
    desk, holder = Desk(), PullKeeper()
    region = desk.region(13, nbytes)
    if sealed:
        region = replace(region, seal=desk.seals.seal(7, 0, NBYTES, holder))
    pull = desk.start(region, at=1)
    await turns()
    desk.run()
    await pull
    assert desk.arrived(region, at=1)
    assert desk.target.bytes[0] == 0 == desk.target.bytes[nbytes + 1], "wrote beside it"
    pieces = -(-nbytes // PIECE)
    reads = [read for posted in desk.posted for read in posted]
    assert desk.puller.reads == pieces == len(reads) - sealed
    assert desk.fabric.statistics().reads == pieces + sealed
    assert sum(read.nbytes for read in reads) == nbytes + sealed * SEAL_NBYTES
    for posted in desk.posted:
        assert [read.signalled for read in posted] == [False] * (len(posted) - 1) + [True]
    if sealed:
        assert reads[-1].remote_address == desk.seals.address + region.seal * SEAL_NBYTES
    assert desk.unused()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 3000)), min_size=1, max_size=20),
    st.sampled_from([1, 7, 64, 1000, 1 << 20]),
    st.integers(0, 2**32),
)
def test_exact_bytes(spans: list[tuple[int, int]], piece: int, seed: int) -> None:
    async def check() -> None:
        desk = Desk(piece=piece, seed=seed)
        at, pulls = 0, []
        for offset, nbytes in spans:
            pulls.append((desk.region(offset, nbytes), at))
            at += nbytes
        tasks = [desk.start(region, at=start) for region, start in pulls]
        await turns(2)
        desk.run()
        await asyncio.gather(*tasks)
        expected = b"".join(desk.data[offset : offset + nbytes] for offset, nbytes in spans)
        assert desk.target.bytes[:] == expected + bytes(NBYTES - len(expected))
        assert desk.puller.reads == sum(-(-nbytes // piece) for _, nbytes in spans)
        assert desk.unused()

    asyncio.run(check())


async def test_never_more_requests_than_the_queue_takes() -> None:
    desk = Desk()
    _, tasks = desk.start_sealed(60, 1000, 1000)
    await turns()
    assert len(desk.wire.left.work) <= MAX_READS
    while desk.fabric.step():
        desk.tell()
        assert len(desk.wire.left.work) <= MAX_READS
    await asyncio.gather(*tasks)
    assert desk.unused()


async def test_several_take_turns() -> None:
    desk = Desk()
    large = desk.start(desk.region(0, 30 * LIST))
    await turns()
    small = desk.start(desk.region(40_000, PIECE))
    await turns()
    before = desk.puller.reads
    while not small.done():
        assert desk.fabric.step() == 1
        desk.tell()
        await turns(1)
    more = desk.puller.reads - before
    assert more <= MAX_READS + LIST_READS, "the small one waited for more than one turn of the large one"
    assert not large.done()
    desk.run()
    await large


async def test_many_large_sealed_pulls_at_once() -> None:
    desk = Desk(piece=8)
    regions, tasks = desk.start_sealed(3 * MAX_READS, 200, 200)  # each pull takes four lists
    await turns()
    await desk.succeed(regions, tasks)


async def test_nothing_is_posted_before_it_is_up() -> None:
    desk = Desk()
    desk.puller.up = False
    pull = desk.start(desk.region(0, 10))
    await turns()
    assert not desk.posted
    desk.puller.resume()
    desk.run()
    await pull


# ---- failures


@pytest.mark.parametrize("position", [0, 1, 7, 8, 9, 20])
@pytest.mark.parametrize("status", FATAL, ids=lambda status: status.name)
async def test_the_pull_at_fault_fails_and_the_others_are_repeated(status: CompletionStatus, position: int) -> None:
    desk = Desk()
    regions, tasks = desk.start_sealed(3, 2 * LIST + PIECE, 2000)
    await turns()
    assert desk.fabric.step(position) == position
    at_fault = [reads for reads in desk.posted for _ in reads][position]
    desk.fabric.inject(desk.wire.left.qp_num, status)
    desk.run()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [i for i, outcome in enumerate(outcomes) if outcome is not None]
    assert len(failed) == 1
    (number,) = failed
    place = at_fault[0].remote_address - desk.source.address
    assert regions[number].offset <= place < regions[number].offset + regions[number].nbytes
    expected = OSError if status.name.startswith("LOC_") else ObjectLost  # the destination's fault, or the source's
    assert type(outcomes[number]) is expected and status.name in str(outcomes[number])
    assert all(desk.arrived(region) for i, region in enumerate(regions) if i != number)
    assert desk.unused()


@pytest.mark.parametrize("position", [0, 1, 7, 8, 9, 20])
@pytest.mark.parametrize("status", PASSING, ids=lambda status: status.name)
async def test_what_may_pass_is_repeated(status: CompletionStatus, position: int) -> None:
    desk = Desk()
    regions, tasks = desk.start_sealed(3, 2 * LIST + PIECE, 2000)
    await turns()
    desk.fabric.step(position)
    desk.fabric.inject(desk.wire.left.qp_num, status)
    await desk.succeed(regions, tasks)


async def test_what_fails_again_and_again_ends() -> None:
    desk = Desk()
    pull = desk.start(desk.region(0, 10))
    await turns()
    for _ in range(3):
        desk.fabric.inject(desk.wire.left.qp_num, CompletionStatus.RETRY_EXC)
        desk.fabric.drain()
        desk.tell()
        desk.rebuild()
    with pytest.raises(ConnectionLost, match="RETRY_EXC .*, 3 times"):
        await pull
    assert desk.unused()


async def test_others_faults_do_not_count() -> None:
    desk = Desk()
    good = desk.region(0, 6 * LIST)
    pull = desk.start(good)
    for _ in range(10):
        bad = desk.start(desk.region(0, 10, rkey=1), at=60_000)
        await turns(2)
        while not desk.broken:
            desk.fabric.drain()
            desk.tell()
        desk.rebuild()
        with pytest.raises(ObjectLost, match="REM_ACCESS"):
            await bad
    desk.run()
    await pull
    assert desk.arrived(good) and desk.unused()


@pytest.mark.parametrize("why", ["key", "beyond", "revoked"])
async def test_the_peer_has_no_such_memory(why: str) -> None:
    desk = Desk()
    region = {
        "key": desk.region(0, 10, rkey=desk.remote.rkey ^ 1),
        "beyond": desk.region(NBYTES - 5, 10),
        "revoked": desk.region(0, 10),
    }[why]
    if why == "revoked":
        desk.remote.close()
    pull = desk.start(region, at=0)
    await turns()
    desk.run()
    with pytest.raises(ObjectLost, match=f"reading 10 bytes at {region.offset} of the peer's arena failed: REM_ACCESS"):
        await pull
    assert desk.unused()


async def test_queue_pair_takes_no_requests() -> None:
    desk = Desk()
    first = desk.start(desk.region(0, LIST))
    await turns()
    post = desk.wire.left.post_reads

    def refuse(reads: Sequence[Read]) -> None:
        raise OSError(22, "the queue pair is in ERR")

    desk.wire.left.post_reads = refuse  # type: ignore[method-assign]
    second = desk.start(desk.region(LIST, LIST))
    await turns()
    assert desk.wire.left.state() == QpState.ERR
    desk.wire.left.post_reads = post  # type: ignore[method-assign]
    desk.run()
    await asyncio.gather(first, second)
    assert desk.arrived(desk.region(0, 2 * LIST)) and desk.unused()


@pytest.mark.parametrize("taken", [0, 1, 4, 8, 9])
@pytest.mark.parametrize("error", [OSError(12, "the queue is full"), RuntimeError("a defect")], ids=["ENOMEM", "any"])
async def test_a_list_of_which_some_are_posted(taken: int, error: Exception) -> None:
    """The posted READs count as under way until all have come back, and none is booked on another pull's list."""
    told: list[Exception] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    desk = Desk()
    regions, tasks = desk.start_sealed(2, 2 * LIST, 2000)
    post = desk.wire.left.post_reads

    def some(reads: Sequence[Read]) -> None:
        desk.wire.left.post_reads = post  # type: ignore[method-assign]
        post(reads[:taken])
        raise error

    desk.wire.left.post_reads = some  # type: ignore[method-assign]
    keeper = PullKeeper()
    third = desk.region(4000, LIST)
    tasks.append(desk.start(third, keep=keeper))
    await turns(1)
    tasks[0].cancel()
    await turns(1)
    assert not desk.drained(), "READs are under way"
    await desk.succeed(regions[1:], tasks[1:2])
    await tasks[2]
    assert desk.arrived(third) and desk.unused()
    assert told == ([error] if isinstance(error, RuntimeError) else [])


async def test_what_has_come_is_not_read_again() -> None:
    """Only READs that were under way at a fault are read twice, for a fault of either end."""
    desk = Desk()
    lists, faults = 40, 20
    good = desk.region(0, lists * LIST)
    pull = desk.start(good)
    await turns()
    for _ in range(faults):
        desk.fabric.step(2 * LIST_READS)
        desk.fabric.inject(desk.wire.left.qp_num, CompletionStatus.WR_FLUSH)  # as a fault of another pull does
        while not desk.broken:
            desk.fabric.drain()
            desk.tell()
        desk.rebuild()
    await desk.succeed([good], [pull])
    assert desk.puller.reads <= (lists + 3 * faults) * LIST_READS


@pytest.mark.parametrize("lists", [1, 2, 7, 40])
@pytest.mark.parametrize("seed", range(20))
async def test_what_is_read_in_all(lists: int, seed: int) -> None:
    """The pull reads at most twice the bytes, and one list for each failure, for failures at any time."""
    desk, draw = Desk(seed=seed), random.Random(seed)
    good = desk.region(0, lists * LIST)
    pull = desk.start(good)
    await turns()
    faults = 0
    while faults < 30 and not pull.done():
        for _ in range(draw.choice((0, 1, 2, 5, 9))):  # lists that may come before the failure
            desk.fabric.step(LIST_READS)
            desk.tell()
        if not desk.puller.drained:
            desk.fabric.inject(desk.wire.left.qp_num, CompletionStatus.WR_FLUSH)
            faults += 1
            while not desk.broken:
                desk.fabric.drain()
                desk.tell()
            desk.rebuild()
        await turns()
    await desk.succeed([good], [pull])
    assert desk.puller.reads <= (2 * lists + faults) * LIST_READS


async def test_a_pull_that_gets_nowhere_ends_and_the_connection_with_it() -> None:
    """The peer breaks the pair again and again, and never waits."""
    desk = Desk()
    pull = desk.start(desk.region(0, 4 * LIST))
    await turns()
    for number in range(RESTARTS + 1):
        assert not desk.unusable
        desk.fabric.inject(desk.wire.left.qp_num, CompletionStatus.WR_FLUSH)
        while not desk.broken:
            desk.fabric.drain()
            desk.tell()
        if number < RESTARTS:
            desk.rebuild()
    with pytest.raises(ConnectionLost, match=f"broken off {RESTARTS + 1} times before any byte came"):
        await pull
    assert [type(error) for error in desk.unusable] == [ConnectionLost], "the next connection goes another way"
    assert desk.puller.reads <= LIST_READS * 4 + RESTARTS


async def test_a_pull_that_gets_on_does_not_end() -> None:
    desk = Desk()
    good = desk.region(0, 4 * LIST)
    pull = desk.start(good)
    await turns()
    for number in range(3 * RESTARTS):
        if number % RESTARTS == RESTARTS - 1 and desk.puller.reads:
            desk.fabric.step(1)
            desk.tell()
        desk.fabric.inject(desk.wire.left.qp_num, CompletionStatus.WR_FLUSH)
        while not desk.broken:
            desk.fabric.drain()
            desk.tell()
        desk.rebuild()
    await desk.succeed([good], [pull])


@pytest.mark.parametrize(("good_ones", "waits"), [(1, True), (SETTLED - 1, True), (SETTLED, False)])
async def test_good_keys_between_stale_ones_are_no_reason_not_to_wait(
    good_ones: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "MAX_PAUSE", 1000.0)
    monkeypatch.setattr(pulling, "PAUSE", 1000.0)
    desk = Desk()
    for rkey in (1, *[desk.remote.rkey] * good_ones, 1):
        assert desk.puller.up
        pull = desk.start(desk.region(0, 10, rkey=rkey))
        await turns()
        desk.run()
        await asyncio.wait([pull])
        assert isinstance(pull.exception(), ObjectLost) == (rkey == 1)
    assert desk.puller.up != waits
    desk.puller.lose(ConnectionLost("over"))


@pytest.mark.parametrize(("seconds", "attempts"), [(0.0, 3), (BUDGET + 1, 1)])
async def test_a_path_that_is_dead_is_not_tried_for_long(
    seconds: float, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk()
    pull = desk.start(desk.region(0, LIST))
    await turns()
    monkeypatch.setattr(pulling, "monotonic", lambda: time.monotonic() + seconds)
    for number in range(1, attempts + 1):
        desk.fabric.inject(desk.wire.left.qp_num, CompletionStatus.RETRY_EXC)
        desk.fabric.drain()
        desk.tell()
        if number < attempts:
            desk.rebuild()
    with pytest.raises(ConnectionLost, match=f"RETRY_EXC.*{attempts} times"):
        await pull
    assert [type(error) for error in desk.unusable] == [ConnectionLost], "the next one would wait as long again"


async def test_pulls_that_fail_again_and_again_leave_others_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "MAX_PAUSE", 1000.0)
    monkeypatch.setattr(pulling, "PAUSE", 1000.0)
    desk = Desk()
    for number in range(3):
        bad = desk.start(desk.region(0, 10, rkey=1))
        await turns()
        assert desk.puller.up == (number < 2)
        if number < 2:
            desk.run()
            with pytest.raises(ObjectLost):
                await bad
    desk.puller.lose(ConnectionLost("over"))
    with pytest.raises(ConnectionLost):
        await bad


async def test_queue_pair_never_takes_requests() -> None:
    desk = Desk()

    def refuse(reads: Sequence[Read]) -> None:
        raise OSError(22, "the queue pair is in ERR")

    desk.wire.left.post_reads = refuse  # type: ignore[method-assign]
    pull = desk.start(desk.region(0, LIST))
    await turns()
    desk.run()
    assert [str(error) for error in desk.unusable] == ["[Errno 22] the queue pair is in ERR"]
    assert desk.puller.stuck and not desk.broken
    desk.puller.lose(ConnectionLost("broke"))
    desk.puller.destroyed()
    with pytest.raises(ConnectionLost, match="broke"):
        await pull
    assert desk.drained()


@pytest.mark.parametrize("steps", [0, 1, 8, 9, 30])
async def test_fence(steps: int) -> None:
    desk = Desk()
    region = desk.region(0, 10 * LIST)
    pull = desk.start(region)
    await turns()
    for _ in range(steps):
        desk.fabric.step()
        desk.tell()
    desk.puller.fence()
    assert desk.wire.left.state() == QpState.ERR
    assert not desk.drained()
    desk.fabric.drain()
    desk.tell()
    assert desk.drained() and desk.broken == 1
    assert not pull.done()
    desk.rebuild()
    desk.run()
    await pull
    assert desk.arrived(region) and desk.unused()


async def test_fence_with_nothing_under_way() -> None:
    desk = Desk()
    desk.puller.fence()
    assert desk.puller.drained and not desk.broken
    pull = desk.start(desk.region(0, 10))
    await turns()
    assert not desk.posted
    desk.wire.rejoin()
    desk.puller.resume()
    desk.run()
    await pull


# ---- kept objects


async def gone(held: weakref.ref[PullKeeper]) -> bool:
    """Whether the object was freed."""
    await turns(2)
    return held() is None


@pytest.mark.parametrize("lists", [1, 3, 20])
@pytest.mark.parametrize("before", [0, 1, 5])
async def test_keep_is_held_until_the_last_completion_though_cancelled(lists: int, before: int) -> None:
    desk, keeper = Desk(), PullKeeper()
    held = weakref.ref(keeper)
    pull = desk.start(desk.region(0, lists * LIST), keep=keeper)
    del keeper
    await turns()
    desk.fabric.step(before)
    desk.tell()
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    del pull
    beside = desk.start(desk.region(50_000, PIECE))  # makes the puller look for the next list
    await turns()
    mine = [w for w in desk.wire.left.work if w.request.address < desk.target.address + 50_000]
    assert mine, "nothing left to wait for"
    while [w for w in desk.wire.left.work if w.request.address < desk.target.address + 50_000]:
        assert not await gone(held), "READs may still write there"
        desk.fabric.step()
    assert not await gone(held), "nobody has seen the last completion yet"
    desk.run()
    assert await gone(held)
    await beside
    assert desk.unused()


async def test_cancelled_before_anything_was_posted() -> None:
    desk, keeper = Desk(), PullKeeper()
    desk.puller.up = False
    held = weakref.ref(keeper)
    pull = desk.start(desk.region(0, 10), keep=keeper)
    del keeper
    await turns()
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    del pull
    assert await gone(held)
    desk.puller.resume()
    desk.run()
    assert not desk.posted and desk.unused()


async def test_keep_is_let_go_of_after_failure() -> None:
    desk, keeper = Desk(), PullKeeper()
    held = weakref.ref(keeper)
    pull = desk.start(desk.region(0, 10, rkey=1), keep=keeper)
    del keeper
    await turns()
    desk.run()
    with pytest.raises(ObjectLost):
        await pull
    assert held() is None


async def test_failures_leave_no_cycles() -> None:
    """The objects of a waiting caller are freed with the exception, not by a later collection."""
    desk, keeper = Desk(), PullKeeper()
    held = weakref.ref(keeper)

    async def call(keeper: PullKeeper) -> None:
        await desk.puller.pull(desk.region(0, 10, rkey=1), desk.target.address, ((10, desk.local.lkey),), keeper)

    pull = asyncio.ensure_future(call(keeper))
    del keeper
    await turns()
    desk.run()
    gc.disable()
    try:
        (outcome,) = await asyncio.gather(pull, return_exceptions=True)
        assert isinstance(outcome, ObjectLost)
        del pull, outcome
        await turns()
        assert held() is None
    finally:
        gc.enable()


# ---- seals


async def pulled(desk: Desk, region: RemoteRegion) -> None:
    """Pull a region, with every step done as soon as possible."""
    pull = desk.start(region)
    await turns()
    desk.run()
    await pull


@pytest.mark.parametrize(("offset", "nbytes"), [(1000, 100), (1000, 1), (1099, 1), (1050, 20)])
async def test_parts_of_the_object(offset: int, nbytes: int) -> None:
    desk, holder = Desk(), PullKeeper()
    seal = desk.seals.seal(7, 1000, 100, holder)
    await pulled(desk, desk.region(offset, nbytes, seal=seal))
    assert desk.arrived(desk.region(offset, nbytes))


@pytest.mark.parametrize(("offset", "nbytes"), [(999, 1), (999, 101), (1000, 101), (1099, 2), (1100, 1), (0, 10)])
async def test_beyond_the_object(offset: int, nbytes: int) -> None:
    desk, holder = Desk(), PullKeeper()
    seal = desk.seals.seal(7, 1000, 100, holder)
    with pytest.raises(ObjectLost, match="freed"):
        await pulled(desk, desk.region(offset, nbytes, seal=seal))
    assert desk.unused()


async def test_freed_object() -> None:
    desk, holder = Desk(), PullKeeper()
    seal = desk.seals.seal(7, 0, 100, holder)
    del holder
    with pytest.raises(ObjectLost, match="the owner has no object where object 0x7 was: it has been freed"):
        await pulled(desk, desk.region(0, 100, seal=seal))
    assert desk.wire.left.state() == QpState.RTS, "nothing failed as far as the device goes"


async def test_other_object() -> None:
    desk, holder = Desk(), PullKeeper()
    seal = desk.seals.seal(0x99, 0, 100, holder)
    with pytest.raises(ObjectLost, match="the owner has object 0x99 where object 0x7 was"):
        await pulled(desk, desk.region(0, 100, seal=seal))


async def test_freed_while_it_is_read() -> None:
    desk, holder = Desk(), PullKeeper()
    seal = desk.seals.seal(7, 0, 20 * LIST, holder)
    pull = desk.start(desk.region(0, 20 * LIST, seal=seal))
    await turns()
    desk.fabric.step(5)
    desk.tell()
    del holder
    desk.run()
    with pytest.raises(ObjectLost):
        await pull
    assert desk.unused()


@pytest.mark.parametrize("pieces", [1, 3, LIST_READS, LIST_READS + 1])
async def test_freed_and_written_anew_while_it_is_read(pieces: int) -> None:
    """The owner's card may read the seal before bytes that were posted earlier: other bytes never pass for these."""
    for steps in range(pieces + 2):
        desk, holder = Desk(), PullKeeper()
        region = desk.region(0, pieces * PIECE, seal=desk.seals.seal(7, 0, pieces * PIECE, holder))
        pull = desk.start(region)
        await turns()
        desk.fabric.step(steps)
        desk.seals.clear(7)
        desk.source.bytes[:] = bytes(NBYTES)
        desk.run()
        (error,) = await asyncio.gather(pull, return_exceptions=True)
        assert isinstance(error, ObjectLost) if error is not None else desk.arrived(region)


async def test_table_that_cannot_be_read() -> None:
    desk, holder = Desk(), PullKeeper()
    seal = desk.seals.seal(7, 0, 100, holder)
    desk.seals.close()
    with pytest.raises(ObjectLost, match="REM_ACCESS"):
        await pulled(desk, desk.region(0, 100, seal=seal))
    assert desk.unused()


# ---- the end


@pytest.mark.parametrize("steps", [0, 1, 9, 30])
async def test_lose(steps: int) -> None:
    desk, keepers = Desk(), [PullKeeper() for _ in range(3)]
    held = [weakref.ref(keeper) for keeper in keepers]
    tasks = [desk.start(desk.region(i * 10_000, 10 * LIST), keep=keeper) for i, keeper in enumerate(keepers)]
    del keepers
    await turns()
    for _ in range(steps):
        desk.fabric.step()
        desk.tell()
    desk.puller.fence()
    desk.puller.lose(ConnectionLost("gone", True))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == [str(ConnectionLost("gone", True))] * 3
    assert len({id(outcome) for outcome in outcomes}) == 3
    del tasks, outcomes
    assert not await gone(held[0]), "READs may still write there"
    with pytest.raises(ConnectionLost, match="gone"):
        await desk.start(desk.region(0, 10))
    desk.fabric.drain()
    desk.tell()
    assert desk.puller.drained and desk.broken == 1
    for each in held:
        assert await gone(each)
    assert desk.unused()


async def test_lost_between_two_lists() -> None:
    """All posted READs have succeeded when the connection ends, and the pull has not heard of it."""
    desk, keeper = Desk(), PullKeeper()
    held = weakref.ref(keeper)
    pull = desk.start(desk.region(0, 20 * LIST), keep=keeper)
    del keeper
    await turns()
    desk.fabric.drain()
    desk.puller.lose(ConnectionLost("gone"))
    with pytest.raises(ConnectionLost):
        await pull
    del pull
    desk.tell()
    assert await gone(held)
    assert desk.unused()


async def test_device_that_gives_nothing_back() -> None:
    desk = Desk()
    pull = desk.start(desk.region(0, 10))
    await turns()
    desk.puller.lose(ConnectionLost("the device failed"))
    with pytest.raises(ConnectionLost, match="the device failed"):
        await pull
    assert not desk.puller.drained


@pytest.mark.parametrize(
    "wrong", [{"rkey": MAX_U32 + 1}, {"offset": MAX_U64}, {"nbytes": MAX_U64}, {"seal": 1 << 16}], ids=str
)
async def test_numbers_that_no_request_carries(wrong: dict[str, int]) -> None:
    desk = Desk()
    with pytest.raises(ProtocolError, match="nothing can lie there"):
        await desk.start(replace(desk.region(0, 10), **wrong), at=0)
    assert desk.unused() and not desk.posted
    await pulled(desk, desk.region(0, 10))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(0, 2**32))
def test_whatever_happens(data: st.DataObject, seed: int) -> None:
    """Pulls, failures, cancelling and rebuilding in any order: successful pulls are exact, and nothing is left over."""

    async def check() -> None:
        desk = Desk(seed=seed)
        running: list[tuple[asyncio.Task[None], RemoteRegion, bool]] = []
        at = 0
        for _ in range(data.draw(st.integers(1, 30))):
            act = data.draw(st.sampled_from(["pull", "pull", "bad", "step", "step", "tell", "fail", "cancel", "fence"]))
            if act in ("pull", "bad"):
                nbytes = data.draw(st.integers(1, 2000))
                region = desk.region(at, nbytes)
                at += nbytes
                task = desk.start(region if act == "pull" else replace(region, rkey=1))
                running.append((task, region, act == "bad"))
            elif act == "step":
                desk.fabric.step(data.draw(st.integers(1, 40)))
            elif act == "tell":
                desk.tell()
            elif act == "fail":
                desk.fabric.inject(desk.wire.left.qp_num, CompletionStatus.RETRY_EXC)
            elif act == "cancel" and running:
                data.draw(st.sampled_from(running))[0].cancel()
            elif act == "fence" and not desk.broken:
                desk.puller.fence()
                if desk.puller.drained:
                    desk.broken = 1
            if desk.broken and data.draw(st.booleans()):
                desk.rebuild()
            await turns(1)
        for _ in range(4 * len(running) + 4):
            desk.run()
            await turns(2)
        for task, region, bad in running:
            assert task.done()
            if task.cancelled():
                continue
            error = task.exception()
            if error is None:
                assert not bad and desk.arrived(region)
            else:
                assert "3 times" in str(error) or (bad and isinstance(error, ObjectLost))
        assert desk.unused()

    asyncio.run(check())
