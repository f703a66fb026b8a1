"""The communicators of groups: which ranks get one, and their end with the group's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import uvloop

import zcactor as zc
from tests.collectives.gpu_ranks import GpuRank, gpu_ranks, running
from tests.device.helpers import array_on, seen
from zcactor.collectives.gpu_exchange import GpuExchange, GpuOutcome
from zcactor.collectives.gpu_operations import AllReduceOnGpus
from zcactor.collectives.gpu_sources import GpuInput
from zcactor.collectives.nccl import Element
from zcactor.device.driver import GpuDriver
from zcactor.device.fake import FakeGpuDriver
from zcactor.device.memory import GpuMemory
from zcactor.device.store import DeviceStore
from zcactor.errors import ProtocolError

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop: nothing here depends on its kind, and most tests start processes."""

ONES = np.ones(10, "f4")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with running("devices=4,late=1") as node:
        yield node


async def all_raise(group: zc.Group, actors: list[Any], operation: str, *inputs: Any) -> tuple[str, str]:
    """Call a collective that fails on all ranks in the same way. Returns the type and the text of the error."""
    calls = [actor.raises(group, operation, x) for actor, x in zip(actors, inputs, strict=True)]
    first, *others = await zc.get(calls, timeout=30)
    assert all(each == first for each in others)
    await zc.get([actor.rank_by_host(group) for actor in actors], timeout=30)  # the group stays usable
    return first  # type: ignore[no-any-return]


# ---------------------------------------------------------------- the ranks' GPUs


async def test_ranks_with_one_gpu() -> None:
    async with gpu_ranks(2, num_gpus=0.5) as (group, actors):
        for _ in range(2):
            name, text = await all_raise(group, actors, "allreduce", ONES, ONES)
            uuid = (await actors[0].seen())[0]
            assert name == "ValueError"
            assert text == (
                f"ranks 0 and 1 have their arrays on one GPU, {uuid}, and NCCL takes one rank a GPU: spawn the actors "
                "with num_gpus=1, or pass zc.gpu.to_host(x)"
            )
        assert [await actor.made() for actor in actors] == [[], []]


async def test_a_receiver_without_nccl() -> None:
    actors: list[Any] = [await GpuRank.options(num_gpus=1).spawn(nccl=nccl) for nccl in (True, False)]
    name, text = await all_raise(await zc.group(actors), actors, "broadcast", ONES, None)
    assert name == "TypeError"
    assert text == (
        "rank 1 cannot take part in an exchange of arrays on GPUs: NCCL does not know fake GPUs; or pass "
        "zc.gpu.to_host(x)"
    )
    for actor in actors:
        await zc.kill(actor)


async def test_a_receiver_without_a_gpu() -> None:
    sender, receiver = (
        await GpuRank.options(num_gpus=1).spawn(),
        await GpuRank.options(env={"CUDA_VISIBLE_DEVICES": ""}).spawn(nccl=False),
    )
    actors: list[Any] = [sender, receiver]
    name, text = await all_raise(await zc.group(actors), actors, "broadcast", ONES, None)
    assert name == "TypeError" and text.startswith("rank 1 cannot take part") and "DeviceUnavailable" in text
    for actor in actors:
        await zc.kill(actor)


async def test_ranks_whose_arrays_are_on_the_host() -> None:
    async with gpu_ranks(2) as (group, actors):
        for operation in ("allreduce", "reduce_scatter", "allgather"):
            calls = [actors[0].raises(group, operation, ONES), actors[1].raises_on_host(group, operation, ONES)]
            for name, text in await zc.get(calls, timeout=30):
                assert name == "GroupMismatch"
                assert "rank 0 called" in text and ", on GPUs), and rank 1" in text
        assert [values[0] for _, values, _ in await zc.get([a.call(group, "allreduce", ONES) for a in actors])] == [
            2,
            2,
        ]


async def test_an_array_on_another_gpu_than_before() -> None:
    async with gpu_ranks(2, num_gpus=2) as (group, actors):
        on = ("cuda:1", "cuda:0")
        found = await zc.get([actor.call_on(group, device, ONES) for actor, device in zip(actors, on, strict=True)])
        assert all(values[0] == 2 for values in found)
        texts = await zc.get([actor.call_on(group, "cuda:0", ONES) for actor in actors])
        wanted = (
            "rank 0 has an array on cuda:0, and had its arrays on cuda:1 before: NCCL takes one GPU a rank; copy the "
            "array there, or make another group"
        )
        assert texts == [wanted] * 2
        found = await zc.get([actor.call_on(group, device, ONES) for actor, device in zip(actors, on, strict=True)])
        assert all(values[0] == 2 for values in found)


async def test_parts_on_another_gpu_than_before_go_by_reference() -> None:
    async with gpu_ranks(2, num_gpus=2) as (group, actors):
        await zc.get([actor.call_on(group, "cuda:0", ONES) for actor in actors])
        before = [await actor.made() for actor in actors]
        for devices, by_nccl in (("cuda:1", "cuda:0"), False), (("cuda:0", "cuda:0"), True):
            calls = [a.exchange_on(group, d, [ONES * 3, ONES * 4]) for a, d in zip(actors, devices, strict=True)]
            assert await zc.get(calls, timeout=30) == [[3.0, 3.0], [4.0, 4.0]]
            assert ([await actor.made() for actor in actors] != before) == by_nccl


async def test_ranks_of_one_process() -> None:
    actors: list[Any] = [await GpuRank.options(process="shared").spawn() for _ in range(3)]
    assert len({await actor.pid() for actor in actors}) < 3
    group = await zc.group(actors)
    for _ in range(3):
        calls = [actor.call_on(group, f"cuda:{rank}", ONES * rank) for rank, actor in enumerate(actors)]
        assert [values.tolist() for values in await zc.get(calls, timeout=30)] == [[3.0] * 10] * 3
    for actor in actors:
        await zc.kill(actor)


async def test_a_group_of_one() -> None:
    async with gpu_ranks(1) as (group, (actor,)):
        for operation in ("allreduce", "reduce_scatter", "allgather", "broadcast"):
            assert np.array_equal((await actor.call(group, operation, ONES))[1], ONES)


# ---------------------------------------------------------------- the end


async def test_the_end_of_a_member_aborts_and_reform_makes_anew() -> None:
    async with gpu_ranks(3) as (group, actors):
        await zc.get([actor.call(group, "allreduce", ONES) for actor in actors])
        calls = [actor.watched(group) for actor in actors[:2]]
        await zc.get([actor.next_call() for actor in actors[:2]])
        os.kill(await actors[2].pid(), signal.SIGKILL)
        for rank, text in await zc.get(calls, timeout=30):
            assert rank == 2 and "is gone" in text
        assert [await actor.ends() for actor in actors[:2]] == [["aborted"], ["aborted"]]
        actors[2] = await GpuRank.options(num_gpus=1).spawn()
        again = await group.reform(replace={2: actors[2]})
        found = await zc.get([actor.call(again, "allreduce", ONES) for actor in actors], timeout=30)
        assert [values[0] for _, values, _ in found] == [3, 3, 3]
        assert [len(await actor.made()) for actor in actors] == [2, 2, 1]
        fewer = await again.without(2)
        found = await zc.get([actor.call(fewer, "allreduce", ONES) for actor in actors[:2]], timeout=30)
        assert [values[0] for _, values, _ in found] == [2, 2]


async def test_a_result_that_was_not_computed_is_lost() -> None:
    async with gpu_ranks(2) as (group, actors):
        await zc.get([actor.hold_and_reduce(group) for actor in actors], timeout=30)
        await actors[0].let_go()
        os.kill(await actors[1].pid(), signal.SIGKILL)
        assert (await actors[0].broken(group))[0] == 1
        assert await actors[0].ends() == ["aborted"]
        assert await actors[0].lost() == ["ObjectLost"] * 4
        await actors[0].drop()
        async with asyncio.timeout(30):
            while (await actors[0].stats()).device_used:  # the memory is given back all the same
                await asyncio.sleep(0.01)


async def test_an_array_for_a_result_that_was_not_computed_is_lost() -> None:
    async with gpu_ranks(2) as (group, actors):
        await zc.get([actor.call(group, "allreduce", ONES) for actor in actors], timeout=30)
        calls = [actor.hold_and_reduce_into(group) for actor in actors]
        await zc.get([actor.next_call() for actor in actors], timeout=30)
        await actors[0].let_go()
        os.kill(await actors[1].pid(), signal.SIGKILL)
        assert await calls[0] == "GroupBroken"
        async with asyncio.timeout(30):  # the thread that waits for the work notes its end
            while await actors[0].lost() != ["ObjectLost"] * 4:
                await asyncio.sleep(0.01)


class BrokenGroup:
    is_aborted = False

    def is_cut_off(self) -> bool:
        return False


@pytest.mark.parametrize("noted", [False, True])
async def test_work_is_lost_where_the_abort_comes_before_the_loop_knows_of_the_work(noted: bool) -> None:
    group: Any = BrokenGroup()
    moment: Any = SimpleNamespace(driver=None, device=0, event=0, is_unknown=False, done=lambda: True)
    outcome = GpuOutcome(moment, group)
    assert outcome.done()
    if noted:
        outcome.note()
    group.is_aborted = True
    outcome.lose()
    assert (outcome.done(), outcome.is_lost()) == (noted, not noted)


@pytest.mark.parametrize("done", [False, True])
async def test_a_reader_that_asks_first_sees_the_loss_of_work_that_the_loop_does_not_know_of(done: bool) -> None:
    group: Any = BrokenGroup()
    moment: Any = SimpleNamespace(driver=None, device=0, event=0, is_unknown=False, done=lambda: done)
    outcome = GpuOutcome(moment, group)
    assert not outcome.is_lost()
    group.is_aborted = True
    assert (outcome.is_lost(), outcome.is_lost(), outcome.done()) == (True, True, False)


class WatchedDriver(FakeGpuDriver):
    """Fake GPUs that let a reader look before each record of an event."""

    look: Callable[[], None] | None = None

    def record(self, device: int, event: int, stream: int) -> None:
        look, self.look = self.look, None
        if look is not None:
            look()
            self.look = look
        super().record(device, event, stream)


class EndedGroup(BrokenGroup):
    """The exchange of a group that is broken while NCCL works."""

    def __init__(self, driver: GpuDriver) -> None:
        self.driver = driver

    def bind(self, gpu: GpuMemory) -> None:
        pass

    def all_reduce(self, source: int, target: int, count: int, element: str, op: str, stream: int) -> None:
        """Leave what a reader must never see, as the work of an abort."""
        self.driver.fill(0, target, bytes([9]), count, stream)
        self.is_aborted = True


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x[::2], id="rows"),
        pytest.param(lambda x: x[::-1], id="backwards"),
        pytest.param(lambda x: x.reshape((40, 40, 40))[::2, ::2, ::2], id="scattered"),
    ],
)
async def test_a_reader_sees_the_old_elements_or_the_loss_at_any_moment(view: Callable[[Any], Any]) -> None:
    driver = WatchedDriver()
    store = DeviceStore(driver, None, 0, asyncio.get_running_loop())
    out = view(array_on(store.gpu(0), np.zeros(64_000, "u1")))
    source = array_on(store.gpu(0), np.ones(out.shape, "u1"))
    group: Any = EndedGroup(driver)
    process: Any = None
    operation = AllReduceOnGpus(
        process, process, GpuInput(source, "", [], source), Element("uint8", 1), "sum",
        (GpuInput(out.copy(), "", [], out), out, (0, None)),
    )  # fmt: skip
    member: Any = SimpleNamespace(exchange=group)
    operation.begin(member, 0)
    looks = list[str]()

    def look() -> None:
        try:
            looks.append("old" if not seen(out).any() else "wrong")
        except zc.ObjectLost:
            looks.append("lost")

    driver.look = look
    queued = operation.queue(group, store.gpu(0), 0)
    driver.look = None
    look()
    assert "wrong" not in looks and looks[-1] == "lost"
    queued.outcome.note()
    look()
    assert looks[-1] == "lost"


async def test_an_array_that_is_never_computed_breaks_the_group() -> None:
    actors: list[Any] = [await GpuRank.options(num_gpus=share).spawn() for share in (1, 0.5)]
    maker: Any = await GpuRank.options(num_gpus=0.5).spawn()  # on the GPU of rank 1
    group = await zc.group(actors)
    await zc.get([actor.call(group, "allreduce", ONES) for actor in actors], timeout=30)
    calls = [actors[0].reduce_copy(group, None), actors[1].reduce_copy(group, await maker.never())]
    await zc.get([actor.next_call() for actor in actors], timeout=30)
    os.kill(await maker.pid(), signal.SIGKILL)
    for rank, text in await zc.get(calls, timeout=30):
        assert rank == 1
        assert "an exchange on the GPUs failed there: ObjectLost: " in text and "compute the value again" in text


async def test_a_result_that_was_computed_stays() -> None:
    async with gpu_ranks(2) as (group, actors):
        await zc.get([actor.keep(group, ONES) for actor in actors], timeout=30)
        assert await actors[0].elements_kept() == [2.0] * 10
        os.kill(await actors[1].pid(), signal.SIGKILL)
        await actors[0].broken(group)
        assert await actors[0].elements_kept() == [2.0] * 10


@pytest.mark.parametrize("fails", ["connect", "all_reduce"])
async def test_a_failure_of_nccl_breaks_the_group(fails: str) -> None:
    async with gpu_ranks(2) as (group, actors):
        await actors[1].use(fails)
        other = actors[0].keep(group, ONES)  # it may have queued its part before it hears of the failure
        await actors[1].watched(group)
        with contextlib.suppress(zc.GroupBroken):
            await other
        for actor in actors:
            rank, text = await actor.broken(group)
            assert rank == 1
            assert "an exchange on the GPUs failed there: RuntimeError: NCCL_ERROR" in text
        await actors[1].use("")
        again = await group.reform()
        found = await zc.get([actor.call(again, "allreduce", ONES) for actor in actors], timeout=30)
        assert [values[0] for _, values, _ in found] == [2, 2]


async def test_a_link_that_is_lost_while_the_gpus_exchange_breaks_the_group() -> None:
    async with gpu_ranks(2) as (group, actors):
        await zc.get([actor.hold_and_reduce(group) for actor in actors], timeout=30)
        await actors[1].fail("check")
        for actor in actors:
            rank, text = await actor.broken(group)
            assert rank == 1
            assert "an exchange on the GPUs failed there: RuntimeError: NCCL_ERROR_REMOTE_ERROR: a link is lost" in text
            await actor.let_go()
            assert await actor.ends() == ["aborted"]
            assert await actor.lost() == ["ObjectLost"] * 4
            await actor.drop()


async def test_a_new_epoch_of_a_healthy_group_aborts_the_former_one() -> None:
    async with gpu_ranks(2) as (group, actors):
        await zc.get([actor.call(group, "allreduce", ONES) for actor in actors])
        again = await group.reform()
        assert [await actor.ends() for actor in actors] == [["aborted"], ["aborted"]]
        found = await zc.get([actor.call(again, "allreduce", ONES) for actor in actors], timeout=30)
        assert [values[0] for _, values, _ in found] == [2, 2]


async def test_the_last_value_of_a_group_destroys_after_all_work() -> None:
    async with gpu_ranks(2) as (first, actors):
        group = await zc.group(actors)
        assert group != first
        await zc.get([actor.hold_and_reduce(group) for actor in actors], timeout=30)
        del group
        await zc.get([actor.let_go() for actor in actors])
        assert [await actor.elements_kept() for actor in actors] == [[6.0] * 10] * 2
        assert [await actor.ends() for actor in actors] == [["destroyed"], ["destroyed"]]


async def test_a_communicator_that_does_not_end_keeps_no_connections() -> None:
    async with gpu_ranks(2) as (first, actors):
        before = [await actor.kept_connections() for actor in actors]
        group = await zc.group(actors)
        assert group != first
        await zc.get([actor.call(group, "allreduce", ONES) for actor in actors], timeout=30)
        for actor in actors:
            await actor.fail("destroy")
        del group
        async with asyncio.timeout(30):
            while [await actor.kept_connections() for actor in actors] != before:
                await asyncio.sleep(0.01)


async def test_a_rank_that_hears_of_the_end_from_another_one_does_its_work() -> None:
    async with gpu_ranks(2) as (group, actors):
        await zc.get([actor.hold_and_reduce(group) for actor in actors], timeout=30)
        await actors[0].forget(actors[1])  # the founder's word comes to the other one later
        await zc.get([actor.let_go() for actor in actors])
        assert [await actor.elements_kept() for actor in actors] == [[6.0] * 10] * 2
        assert [await actor.ends() for actor in actors] == [["destroyed"], ["destroyed"]]


@pytest.mark.parametrize("end", ["member", "link"])
async def test_a_result_that_outlives_its_group_is_lost_with_a_rank(end: str) -> None:
    async with gpu_ranks(2) as (group, actors):
        await zc.get([actor.hold_and_reduce(group) for actor in actors], timeout=30)
        await actors[0].forget(actors[1])
        if end == "member":
            await actors[0].let_go()
            os.kill(await actors[1].pid(), signal.SIGKILL)
            del actors[1]
        else:
            await actors[1].fail("check")
        assert [await actor.ends() for actor in actors] == [["aborted"]] * len(actors)
        for actor in actors:
            await actor.let_go()
            assert await actor.lost() == ["ObjectLost"] * 4


async def test_a_loop_that_waits_for_an_exchange_learns_of_the_end_of_a_rank() -> None:
    async with gpu_ranks(2) as (group, actors):
        await zc.get([actor.hold_and_reduce(group) for actor in actors], timeout=30)
        await actors[0].let_go()
        lost = actors[0].lost()  # an async method, which waits on its loop
        os.kill(await actors[1].pid(), signal.SIGKILL)
        assert await asyncio.wait_for(lost, 30) == ["ObjectLost"] * 4


async def test_a_timeout_ends_the_waiting_only() -> None:
    async with gpu_ranks(2) as (group, actors):
        name, text = await actors[0].raises(group, "allreduce", ONES, timeout=0.05)
        assert name == "GroupTimeout" and "missing ranks: 1" in text
        assert (await actors[1].call(group, "allreduce", ONES))[1][0] == 2
        found = await zc.get([actor.call(group, "allreduce", ONES * 2) for actor in actors], timeout=30)
        assert [values[0] for _, values, _ in found] == [4, 4]


# ---------------------------------------------------------------- from peers


async def test_what_no_rank_can_tell_is_refused() -> None:
    class Member:
        rank, size, groups = 0, 3, None

        class process:
            loop = None

    exchange = GpuExchange(Member())  # type: ignore[arg-type]
    exchange.take(1, 1, "GPU-1", "", None)
    with pytest.raises(ProtocolError, match="rank 1 told its GPU for attempt 1 of a group twice"):
        exchange.take(1, 1, "GPU-2", "", None)
    with pytest.raises(ProtocolError, match="attempt 0"):
        exchange.take(0, 2, "GPU-2", "", None)
