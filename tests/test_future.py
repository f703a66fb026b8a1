"""References end to end: awaiting them, get, put and wait, and failures that nobody saw."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.actors import Caller, Plain, Probe
from zcactor import context
from zcactor.runtime import unseen

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Node]:
    async with zc.init(num_cpus=2, log_to_driver=False) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def actors() -> AsyncIterator[tuple[Any, Any, Any]]:
    """Actors that tests share which leave them as they were."""
    yield await Plain.spawn(), await Caller.spawn(), await Caller.spawn()


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# ---------------------------------------------------------------- awaiting


async def test_awaiting_many_times_and_by_many() -> None:
    probe: Any = await Probe.spawn()
    ref = probe.ahold("k")
    assert isinstance(ref, zc.ObjectRef)
    assert not ref.done()
    assert ref.nbytes is None
    assert "pending" in repr(ref)

    async def wait() -> Any:
        return await ref

    tasks = [asyncio.create_task(wait()) for _ in range(5)]
    await probe.until("k began")
    await probe.open("k")
    assert await asyncio.gather(*tasks) == ["k"] * 5
    assert await ref == "k"
    assert await ref == "k"
    assert ref.done()
    assert ref.nbytes
    assert len(ref.owner) == 32  # type: ignore[unreachable]
    assert "bytes" in repr(ref)


async def test_failures_are_raised_each_time(actors: Any) -> None:
    plain, _, _ = actors
    ref = plain.fail("no")
    for _ in range(3):
        with pytest.raises(ValueError, match="no") as caught:
            await ref
        assert isinstance(caught.value, zc.RemoteError)
    assert "failed" in repr(ref)
    assert ref.done()


async def test_the_ways_of_asyncio(actors: Any) -> None:
    plain, _, _ = actors
    assert await asyncio.gather(plain.echo(1), plain.echo(2)) == [1, 2]  # type: ignore[comparison-overlap]
    assert await asyncio.wait_for(plain.echo(3), 20) == 3
    async with asyncio.timeout(20):
        assert await plain.echo(4) == 4
    task = asyncio.create_task(plain.echo(5))
    assert await task == 5
    assert "echo" in repr(plain.echo(5))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(plain.echo(i)) for i in range(5)]
        nested = group.create_task(_twice(plain.echo(6)))
    assert [task.result() for task in tasks] == [0, 1, 2, 3, 4]
    assert nested.result() == (6, 6)
    assert await asyncio.shield(plain.echo(7)) == 7
    done, pending = await asyncio.wait([asyncio.ensure_future(plain.echo(8))])
    assert [task.result() for task in done] == [8]
    assert not pending
    outcomes = await asyncio.gather(plain.fail("x"), plain.echo(9), return_exceptions=True)
    assert isinstance(outcomes[0], ValueError)
    assert outcomes[1] == 9
    with pytest.raises(ExceptionGroup) as group_error:
        async with asyncio.TaskGroup() as group:
            group.create_task(plain.fail("in a group"))
    assert isinstance(group_error.value.exceptions[0], ValueError)
    for coroutine in asyncio.as_completed([plain.echo(1), plain.echo(2)]):
        assert await coroutine in (1, 2)


async def _twice(ref: Any) -> tuple[Any, Any]:
    return await ref, await ref


async def test_a_reference_in_several_tasks() -> None:
    probe: Any = await Probe.spawn()
    ref = probe.ahold("k")
    await probe.until("k began")
    tasks = [asyncio.create_task(ref) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ref, 0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ref, 0.01)
    await probe.open("k")
    assert await asyncio.gather(*tasks) == ["k"] * 3
    for _ in range(2):
        assert await asyncio.wait_for(ref, 20) == "k"
        assert await asyncio.gather(ref, ref) == ["k", "k"]  # type: ignore[comparison-overlap]
        assert await asyncio.create_task(ref) == "k"
    failed = probe.raising(ValueError("again"))
    for _ in range(2):
        with pytest.raises(ValueError, match="again"):
            await asyncio.wait_for(failed, 20)


async def test_from_another_loop() -> None:
    class Elsewhere:
        def run(self, handle: Any, n: int) -> int:
            async def many() -> int:
                total = 0
                for i in range(n):
                    total += await handle.echo(i)
                total += sum(await asyncio.gather(*(handle.echo(i) for i in range(10))))
                total += sum(await zc.get([handle.echo(i) for i in range(10)]))
                done, _ = await zc.wait([handle.echo(1)], timeout=20)
                total += await done[0]
                try:
                    await asyncio.wait_for(handle.echo_after(zc.put(1)), 0.01)
                except TimeoutError:
                    total += 1000
                return total  # type: ignore[no-any-return]

            return asyncio.run(many())

        def items(self, probe: Any, n: int) -> list[int]:
            async def collect() -> list[int]:
                return [item async for item in probe.acount(n)]

            return asyncio.run(collect())

        def spawn(self) -> Any:
            async def new() -> Any:
                plain: Any = await Plain.spawn()
                return await plain.echo(3), plain

            return asyncio.run(new())

    class Echo:
        async def echo(self, value: int) -> int:
            return value

        async def echo_after(self, value: int) -> int:
            await asyncio.Event().wait()
            return value

    elsewhere: Any = await zc.spawn(Elsewhere)
    echo: Any = await zc.spawn(Echo)
    async with asyncio.timeout(25):
        assert await elsewhere.run(echo, 500) == 500 * 499 // 2 + 45 + 45 + 1 + 1000
        probe: Any = await Probe.spawn()
        assert await elsewhere.items(probe, 100) == list(range(100))
        value, plain = await elsewhere.spawn()
        assert value == 3
        assert await plain.echo(4) == 4


async def test_the_value_outlives_its_actor_where_it_was_received() -> None:
    plain: Any = await Plain.spawn()
    ref = plain.echo("kept")
    await ref
    await zc.kill(plain)
    assert await ref == "kept"


# ---------------------------------------------------------------- get, put and wait


async def test_get(actors: Any) -> None:
    plain, _, _ = actors
    ref = plain.echo(1)
    assert await zc.get([ref, plain.echo(2), ref]) == [1, 2, 1]
    assert await zc.get([]) == []
    assert await zc.get((plain.echo(3),), timeout=20) == [3]
    assert await zc.get([zc.put(5)], timeout=0) == [5]
    with pytest.raises(TypeError, match="sequence"):
        await zc.get(ref)
    with pytest.raises(TypeError, match="expected ObjectRef, got int"):
        await zc.get([ref, 3])  # type: ignore[list-item]
    probe: Any = await Probe.spawn()
    held = probe.ahold("k")
    with pytest.raises(TimeoutError, match="1 of 2"):
        await zc.get([held, ref], timeout=0.01)
    with pytest.raises(TimeoutError, match="1 of 1"):
        await zc.get([held], timeout=0)
    async with asyncio.timeout(20):
        with pytest.raises(ValueError, match="early"):
            await zc.get([held, plain.fail("early")])  # does not wait for the other
        with pytest.raises(ValueError, match="first"):
            await zc.get([plain.fail("first"), plain.fail("second")])
    assert not held.done()
    await probe.open("k")
    assert await held == "k"


async def test_wait(actors: Any) -> None:
    plain, _, _ = actors
    probe: Any = await Probe.spawn()
    slow = [probe.ahold(str(i)) for i in range(3)]
    await probe.until("0 began", "1 began", "2 began")
    quick = plain.echo(1)
    refs = [slow[0], quick, slow[1], slow[2]]
    done, pending = await zc.wait(refs)
    assert done == [quick]
    assert pending == slow
    done, pending = await zc.wait(refs, num_returns=4, timeout=0)
    assert done == [quick]
    assert pending == slow
    done, pending = await zc.wait(slow, timeout=0.01)
    assert done == []
    assert pending == slow
    await probe.open("2")
    await slow[2]
    await probe.open("0")
    await slow[0]
    done, pending = await zc.wait(refs, num_returns=2)
    assert done == [slow[0], quick], "the input's order"
    assert pending == [slow[1], slow[2]]
    failed = plain.fail("counts as done")
    done, _ = await zc.wait([failed, slow[1]])
    assert done == [failed]
    with pytest.raises(ValueError, match="counts"):
        await failed
    for wrong in (0, -1, 5):
        with pytest.raises(ValueError, match=f"num_returns is {wrong}"):
            await zc.wait(refs, num_returns=wrong)
    with pytest.raises(ValueError, match="more than once"):
        await zc.wait([quick, quick])
    with pytest.raises(ValueError, match="num_returns"):
        await zc.wait([])
    for _ in range(20):
        await zc.wait([slow[1]], timeout=0)
    assert not slow[1]._call.callbacks, "polling leaves nothing behind"
    await probe.open("1")
    done, pending = await zc.wait(slow, num_returns=3, timeout=20)
    assert done == slow
    assert pending == []


async def test_cancelling_a_wait_cancels_no_call() -> None:
    probe: Any = await Probe.spawn()
    refs = [probe.ahold("k")]
    await probe.until("k began")
    for function in (zc.get, zc.wait):
        task = asyncio.create_task(function(refs))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await probe.open("k")
    assert await zc.get(refs) == ["k"]


async def test_put_of_many_kinds(actors: Any) -> None:
    plain, caller, _ = actors
    for value in (None, 1, 1 << 80, "x" * 100_000, b"y" * 100_000, [1, (2, {3})], {"a": np.float32(3)}):
        ref = zc.put(value)
        assert ref.done()
        assert await ref == value
        assert await plain.echo(ref) == value
        assert await caller.value([ref]) == value


# ---------------------------------------------------------------- what nobody saw


async def test_an_unseen_failure_is_logged_once(
    actors: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, _ = actors
    monkeypatch.setattr(unseen, "QUIET", 0.01)

    async def errors() -> list[str]:
        gc.collect()
        async with asyncio.timeout(20):
            while context.current().unseen._noted or context.current().unseen._actors:
                await asyncio.sleep(0)
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    await errors()  # of what tests before this one have left to the collector
    plain.fail("dropped at once")
    await plain.echo(1)
    assert await errors() == ["Plain.fail failed and its result was never awaited: ValueError: dropped at once"]
    ref = plain.fail("dropped later")
    await plain.echo(1)
    assert await errors() == []
    del ref
    (text,) = await errors()
    assert "dropped later" in text
    seen = plain.fail("seen")
    with pytest.raises(ValueError, match="seen"):
        await seen
    del seen
    assert await errors() == []
    for refs in ([plain.fail("gathered")], [plain.fail("gathered"), plain.echo(1)]):
        await asyncio.gather(*refs, return_exceptions=True)
    del refs
    assert await errors() == []
    cancelled_ref = plain.fail("cancelled")
    cancelled_ref.cancel()
    await plain.echo(1)
    del cancelled_ref
    assert await errors() == []
    passed = plain.fail("passed on")
    with pytest.raises(ValueError, match="passed on"):
        await plain.echo(passed)
    await zc.wait([passed])
    with pytest.raises(ValueError, match="passed on"):
        await plain.echo(passed)  # known to have failed by now
    del passed
    assert await errors() == []


@pytest.mark.parametrize(
    "way", [lambda ref: ref, asyncio.ensure_future, asyncio.gather], ids=["await", "task", "gather"]
)
async def test_what_was_raised_keeps_no_frame_alive(actors: tuple[Any, Any, Any], way: Callable[[Any], Any]) -> None:
    """An array in a frame that an error passed through is freed with it, not by the collector of cycles some time."""

    async def awaiting() -> weakref.ref[np.ndarray[Any, Any]]:
        array = np.ones(4)
        try:
            await way(actors[0].fail("text"))
        except ValueError:
            return weakref.ref(array)
        raise AssertionError("not raised")

    gc.collect()
    gc.disable()
    try:
        array = await awaiting()
        await asyncio.sleep(0)  # the task's own callbacks
        assert array() is None
    finally:
        gc.enable()
