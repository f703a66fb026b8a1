"""An actor that ends in order hands the values that it has to those who hold references to them, or are about to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.driver.programs import gone
from zcactor.config import Config
from zcactor.objects.locations import Locations
from zcactor.objects.promises import Promises
from zcactor.objects.succession import Succession
from zcactor.peers.leases import Leases
from zcactor.peers.requests import Requests

pytestmark = pytest.mark.slow
EAGER = Config().eager_limit // 8
"""Numbers in an array of the eager limit."""
COUNTS = [0, 1, EAGER - 1, EAGER, EAGER + 1, 1_000_000]


@zc.actor
class Maker:
    """An actor that makes values and gives references to them."""

    def put(self, count: int) -> list[Any]:
        """A reference to an array."""
        return [zc.put(np.arange(count, dtype=np.float64))]

    def put_all(self) -> list[Any]:
        """References to values that are no arrays, and to one with arrays in it."""
        return [zc.put({"a": 1}), zc.put("text" * 10_000), zc.put({"few": np.ones(3), "many": np.ones(100_000)})]

    def nested(self, count: int, depth: int) -> list[Any]:
        """A reference to a reference, and so on, to an array."""
        refs = self.put(count)
        for _ in range(depth):
            refs = [zc.put(refs)]
        return refs

    def array(self, count: int) -> Any:
        """An array."""
        return np.arange(count, dtype=np.float64)

    def moved(self, count: int) -> Any:
        """An array that is its receiver's."""
        return zc.move(np.arange(count, dtype=np.float64))

    def items(self, count: int) -> Iterator[list[Any]]:
        """Three references, one after the other."""
        for _ in range(3):
            yield self.put(count)

    def pid(self) -> int:
        """The process."""
        return os.getpid()

    def fails(self) -> None:
        """Raise."""
        raise ValueError("as it is")


@zc.actor
class Middle:
    """An actor that has references of others, and passes them on."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.open = asyncio.Event()

    async def opened(self, maker: Any, count: int) -> list[Any]:
        """References that this actor has unpacked."""
        refs: list[Any] = await maker.put(count)
        return refs

    async def unopened(self, maker: Any, count: int) -> list[Any]:
        """A promise of a list of references that this actor has not unpacked."""
        refs = maker.put(count)
        await zc.wait([refs])
        return [refs]

    async def made(self, count: int) -> list[Any]:
        """A reference to an array of an actor that ends with this call."""
        maker: Any = await Maker.spawn()
        return [maker.put(count)]

    def calls(self, other: Any) -> list[Any]:
        """A promise of a result that another actor has not made yet."""
        return [other.slow()]

    async def give(self, keeper: Any, other: Any) -> None:
        """Give a keeper such a promise."""
        await keeper.keep(self.calls(other))

    async def slow(self) -> int:
        """Wait for `go`."""
        await self.open.wait()
        return 7

    async def go(self) -> None:
        """End `slow`."""
        self.open.set()

    async def keep(self, value: Any) -> None:
        """Keep a value."""
        self.kept = value

    async def own(self, count: int, value: Any) -> list[Any]:
        """References to a value, as often as wanted."""
        return [zc.put(value) for _ in range(count)]

    async def compute(self, until: Path) -> None:
        """Compute on the loop until the process that writes to the FIFO `until` has opened it, and ended."""
        until.read_bytes()

    async def value(self) -> Any:
        """The kept value."""
        return self.kept

    async def outcome(self) -> Any:
        """The outcome of the kept promise."""
        return await self.kept[0]

    async def total(self, refs: Any = None) -> float:
        """The sum of an array that is referred to."""
        value = self.kept if refs is None else refs
        while not isinstance(value, np.ndarray):
            value = value[0] if isinstance(value, list) else await value
        return float(value.sum())


@pytest.fixture(params=["local", "tcp"])
async def runtime(request: pytest.FixtureRequest) -> AsyncIterator[zc.Runtime]:
    config = Config(num_cpus=4, num_gpus=0, store_capacity=1 << 26, shutdown_timeout=20.0)
    async with zc.init(config=config, transports=[request.param]) as runtime:
        yield runtime


def told(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """An event that is set once an actor that ends asks this process to take over."""
    ends, take_over = asyncio.Event(), Succession.take_over

    async def noted(self: Succession, *args: Any) -> None:
        ends.set()
        await take_over(self, *args)

    monkeypatch.setattr(Succession, "take_over", noted)
    return ends


async def known(*refs: Any) -> None:
    """Wait for outcomes, without the bytes: these stay where they are until somebody awaits the reference."""
    for ref in refs:
        while not ref.done():
            await asyncio.sleep(0)


async def end(actor: Any) -> None:
    await zc.stop(actor)
    gc.collect()


async def test_references_in_a_result_that_is_not_unpacked_yet(runtime: zc.Runtime) -> None:
    maker: Any = await Maker.spawn()
    made = [maker.put(count) for count in COUNTS]
    await known(*made)
    await end(maker)
    for count, refs in zip(COUNTS, made, strict=True):
        assert np.array_equal(await (await refs)[0], np.arange(count))


@pytest.mark.parametrize("how", ["stop", "drop"])
async def test_references_that_are_unpacked(runtime: zc.Runtime, how: str) -> None:
    maker: Any = await Maker.spawn()
    reader: Any = await Middle.spawn()
    made = [await maker.put(count) for count in COUNTS]
    if how == "stop":
        await end(maker)
    else:
        pid = await maker.pid()
        del maker
        gc.collect()
        await gone(pid)
    for count, refs in zip(COUNTS, made, strict=True):
        assert await reader.total(refs) == sum(range(count))
        assert np.array_equal(await refs[0], np.arange(count))


async def test_values_that_are_no_arrays(runtime: zc.Runtime) -> None:
    maker: Any = await Maker.spawn()
    refs = maker.put_all()
    await known(refs)
    await end(maker)
    mapping, text, both = await refs
    assert await mapping == {"a": 1}
    assert await text == "text" * 10_000
    value = await both
    assert (value["few"].sum(), value["many"].sum()) == (3, 100_000)


async def test_references_to_references(runtime: zc.Runtime) -> None:
    maker: Any = await Maker.spawn()
    both = [maker.nested(EAGER, 3), maker.nested(EAGER, 3)]
    await known(*both)
    await both[0]
    await end(maker)
    for refs in both:
        value = await refs
        for _ in range(4):
            value = await value[0]
        assert np.array_equal(value, np.arange(EAGER))


@pytest.mark.parametrize("count", [10, 100_000])
async def test_items_that_are_not_taken_yet(runtime: zc.Runtime, count: int) -> None:
    maker: Any = await Maker.spawn()
    items = maker.items(count)
    found = [await anext(items)]
    await end(maker)
    found += [each async for each in items]
    assert [float((await refs[0]).sum()) for refs in found] == [sum(range(count))] * 3


@pytest.mark.parametrize("method", ["array", "moved"])
async def test_results_that_are_not_read_yet(runtime: zc.Runtime, method: str) -> None:
    maker: Any = await Maker.spawn()
    made = [getattr(maker, method)(count) for count in COUNTS]
    await known(*made)
    await end(maker)
    for count, array in zip(COUNTS, made, strict=True):
        assert np.array_equal(await array, np.arange(count))


@pytest.mark.parametrize("method", ["opened", "unopened"])
@pytest.mark.parametrize("count", [10, 100_000])
async def test_what_goes_through_another_actor(runtime: zc.Runtime, method: str, count: int) -> None:
    maker: Any = await Maker.spawn()
    middle: Any = await Middle.spawn()
    reader: Any = await Middle.spawn()
    refs = getattr(middle, method)(maker, count)
    await known(refs)
    await reader.keep(refs)
    await end(maker)
    assert await reader.total() == sum(range(count))
    await end(middle)
    assert await reader.total(await refs) == sum(range(count))
    assert await reader.total(refs) == sum(range(count))


@pytest.mark.parametrize("how", ["opened", "unopened"])
@pytest.mark.parametrize("count", [10, 100_000])
async def test_what_is_leased_after_its_owner_has_ended(
    runtime: zc.Runtime, monkeypatch: pytest.MonkeyPatch, how: str, count: int
) -> None:
    maker: Any = await Maker.spawn()
    middle: Any = await Middle.spawn()
    ask = Requests.ask
    met: list[Any] = []

    def meet(self: Requests, session: Any, method: Any, *args: Any) -> Any:
        if method is not Leases.lease or met or session.peer_process != maker._remote.location[0]:
            return ask(self, session, method, *args)
        met.append(method)

        async def late() -> Any:
            await zc.stop(maker)
            return await ask(self, session, method, *args)

        return late()

    monkeypatch.setattr(Requests, "ask", meet)
    # Each step is unpacked only now, so that the driver has no reference to the maker's values before.
    value = await getattr(middle, how)(maker, count)
    while not isinstance(value, np.ndarray):
        value = value[0] if isinstance(value, list) else await value
    assert met
    assert np.array_equal(value, np.arange(count))


@pytest.mark.parametrize("count", [10, 100_000])
async def test_what_is_leased_while_its_owner_ends(
    runtime: zc.Runtime, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The owner has granted the lease, and the answer is still under way when the owner asks whether it may go."""
    maker: Any = await Maker.spawn()
    middle: Any = await Middle.spawn()
    other = (await maker.put(1))[0]  # so that the owner has something to hand over here
    ends = told(monkeypatch)
    ask = Requests.ask
    stopping: list[asyncio.Future[None]] = []

    def meet(self: Requests, session: Any, method: Any, *args: Any) -> Any:
        asked = ask(self, session, method, *args)
        if method is not Leases.lease or stopping or session.peer_process != maker._remote.location[0]:
            return asked

        async def late() -> Any:
            granted = await asked
            stopping.append(asyncio.ensure_future(zc.stop(maker)))
            await ends.wait()
            return granted

        return late()

    monkeypatch.setattr(Requests, "ask", meet)
    refs = await middle.opened(maker, count)
    await stopping[0]
    assert np.array_equal(await refs[0], np.arange(count))
    assert await other == [0]


@pytest.mark.parametrize("count", [10, 100_000])
async def test_what_an_actor_passes_on_that_ends_with_the_call(runtime: zc.Runtime, count: int) -> None:
    middle: Any = await Middle.spawn()
    for _ in range(5):
        refs = await (await middle.made(count))[0]
        assert np.array_equal(await refs[0], np.arange(count))


@pytest.mark.parametrize("method", ["opened", "unopened"])
@pytest.mark.parametrize("count", [10, 100_000])
async def test_two_owners_that_end_at_once(runtime: zc.Runtime, method: str, count: int) -> None:
    maker: Any = await Maker.spawn()
    middle: Any = await Middle.spawn()
    reader: Any = await Middle.spawn()
    refs = getattr(middle, method)(maker, count)
    value = await refs
    await reader.keep(refs)
    await asyncio.gather(zc.stop(middle), zc.stop(maker))
    assert await reader.total(value) == sum(range(count))
    assert await reader.total() == sum(range(count))


@pytest.mark.parametrize("leave", [zc.stop, zc.kill])
async def test_a_holder_that_ends_with_the_owner(runtime: zc.Runtime, leave: Any) -> None:
    maker: Any = await Maker.spawn()
    holder: Any = await Middle.spawn()
    refs = await maker.put(100_000)
    await holder.keep(refs)
    await asyncio.gather(leave(holder), zc.stop(maker))
    assert (await refs[0]).sum() == sum(range(100_000))


async def test_one_after_the_other(runtime: zc.Runtime) -> None:
    """Each holder is the owner from then on, and hands on in its turn."""
    maker: Any = await Maker.spawn()
    holder: Any = await Middle.spawn()
    await holder.keep(await maker.put(100_000))
    await end(maker)
    for _ in range(2):
        following: Any = await Middle.spawn()
        await following.keep(await holder.value())
        await end(holder)
        holder = following
    (ref,) = await holder.value()
    await end(holder)
    assert ref.owner == runtime.process.process.hex()
    assert (await ref).sum() == sum(range(100_000))


@pytest.mark.parametrize("count", [10, 1_000_000])
async def test_what_is_being_pulled(runtime: zc.Runtime, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    maker: Any = await Maker.spawn()
    (ref,) = await maker.put(count)
    ends = told(monkeypatch)
    stopping: list[asyncio.Future[None]] = []
    ask = Requests.ask
    pulled = Locations._pulled

    async def pull(self: Locations, *args: Any) -> Any:
        if not stopping:
            stopping.append(asyncio.ensure_future(zc.stop(maker)))
            await ends.wait()
        return await pulled(self, *args)

    def fetch(self: Requests, session: Any, method: Any, *args: Any) -> Any:
        if method is Promises.fetch and not stopping:
            stopping.append(asyncio.ensure_future(zc.stop(maker)))
        return ask(self, session, method, *args)

    if list(runtime.config.transports) == ["tcp"] and count > EAGER:
        monkeypatch.setattr(Locations, "_pulled", pull)
    else:
        monkeypatch.setattr(Requests, "ask", fetch)
    assert (await ref).sum() == sum(range(count))
    await stopping[0]


@pytest.mark.parametrize("runtime", ["tcp"], indirect=True)
async def test_a_holder_without_room_says_that_the_owner_has_ended(runtime: zc.Runtime) -> None:
    maker: Any = await Maker.spawn()
    (ref,) = await maker.put(1_000_000)
    made = maker.array(1_000_001)
    await known(made)
    filling = zc.empty((1 << 26) - (1 << 20), "u1")
    await end(maker)
    for lost in (ref, made):
        with pytest.raises(zc.ObjectLost, match=r"its owner, .*, has ended in order.*no room"):
            await lost
    del filling
    gc.collect()
    with pytest.raises(zc.ObjectLost, match="has ended in order"):
        await ref


async def test_a_failure_is_handed_over(runtime: zc.Runtime) -> None:
    maker: Any = await Maker.spawn()
    middle: Any = await Middle.spawn()
    await middle.keep([maker.fails()])
    refs = await middle.value()
    reader: Any = await Middle.spawn()
    await reader.keep(refs)
    await end(maker)
    await end(middle)
    with pytest.raises(ValueError, match="as it is"):
        await refs[0]


async def test_a_promise_without_an_outcome_is_waited_for(runtime: zc.Runtime) -> None:
    middle: Any = await Middle.spawn()
    other: Any = await Middle.spawn()
    (ref,) = await middle.calls(other)
    stopping = asyncio.ensure_future(zc.stop(middle))
    await asyncio.wait({stopping}, timeout=0.5)  # an actor that does not wait has ended by then
    await other.go()
    await stopping
    assert await ref == 7


async def test_an_argument_without_an_outcome_is_waited_for(runtime: zc.Runtime) -> None:
    middle: Any = await Middle.spawn()
    other: Any = await Middle.spawn()
    keeper: Any = await Middle.spawn()
    (ref,) = await middle.calls(other)
    kept = keeper.keep(ref)
    stopping = asyncio.ensure_future(zc.stop(middle))
    await asyncio.wait({stopping}, timeout=0.5)  # an actor that does not wait has ended by then
    await other.go()
    await stopping
    await kept
    assert await keeper.value() == 7


async def test_an_outcome_that_does_not_come_says_that_its_owner_has_ended() -> None:
    config = Config(num_cpus=4, num_gpus=0, store_capacity=1 << 26, shutdown_timeout=1.0)
    async with zc.init(config=config):
        middle: Any = await Middle.spawn()
        other: Any = await Middle.spawn()
        (ref,) = await middle.calls(other)
        await end(middle)
        with pytest.raises(zc.ObjectLost, match=r"Middle\.slow had no outcome when its owner, pid \d+, ended in order"):
            await ref
        await other.go()


@contextlib.asynccontextmanager
async def computing(actor: Any, path: Path) -> AsyncIterator[None]:
    """Have an actor compute on its loop meanwhile."""
    os.mkfifo(path)
    computing = actor.compute(path)
    end = await asyncio.get_running_loop().run_in_executor(None, os.open, path, os.O_WRONLY)
    try:
        yield
    finally:
        os.close(end)
        await computing


@pytest.fixture
async def brief() -> AsyncIterator[None]:
    config = Config(num_cpus=4, num_gpus=0, store_capacity=1 << 26, shutdown_timeout=2.0)
    async with zc.init(config=config):
        yield


async def test_values_that_wait_for_a_third_process_hold_up_no_others(brief: None, tmp_path: Path) -> None:
    third: Any = await Middle.spawn()
    owner: Any = await Middle.spawn()
    held = await owner.own(8, await third.own(1, "of the third"))
    refs = await owner.own(3, {"a": 1})
    async with computing(third, tmp_path / "until"):
        await end(owner)
        assert [await ref for ref in refs] == [{"a": 1}] * 3
    del held


async def test_a_holder_that_computes_holds_up_no_other(brief: None, tmp_path: Path) -> None:
    actors: list[Any] = [await Middle.spawn() for _ in range(4)]
    owner, keeper, slow, other = actors
    await slow.keep(await owner.own(1, {"a": 1}))
    await owner.give(keeper, other)
    async with computing(slow, tmp_path / "until"):
        stopping = asyncio.ensure_future(end(owner))
        await asyncio.wait({stopping}, timeout=0.5)  # the one that computes has been told by then
        await other.go()
        await stopping
        assert await keeper.outcome() == 7


async def test_after_the_end_of_all_actors_all_is_here(runtime: zc.Runtime) -> None:
    makers: list[Any] = [await Maker.spawn() for _ in range(3)]
    unpacked = [await maker.put(count) for maker in makers for count in COUNTS[:-1]]
    packed = [maker.put(count) for maker in makers for count in COUNTS[:-1]]
    await known(*packed)
    await asyncio.gather(*map(zc.stop, makers))
    totals = [float(sum(range(count))) for count in COUNTS[:-1]] * 3
    assert [float((await refs[0]).sum()) for refs in unpacked] == totals
    assert [float((await (await refs)[0]).sum()) for refs in packed] == totals


async def test_what_was_put_in_a_process_that_is_killed_is_lost(runtime: zc.Runtime) -> None:
    maker: Any = await Maker.spawn()
    (ref,) = await maker.put(10)
    await zc.kill(maker)
    with pytest.raises(zc.ObjectLost, match="the process that owns .* is gone"):
        await ref
