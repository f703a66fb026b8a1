"""References end to end: awaiting, waiting, cancelling, passing on, and streams as their consumers see them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.actors import Caller, Plain, Probe

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Node]:
    async with zc.init(num_cpus=2, log_to_driver=False) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def actors() -> AsyncIterator[tuple[Any, Any, Any]]:
    """Actors that tests share which leave them as they were."""
    yield await Plain.spawn(), await Caller.spawn(), await Caller.spawn()


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


# ---------------------------------------------------------------- get and wait


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


# ---------------------------------------------------------------- cancelling


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_the_only_await_cancels_the_call() -> None:
    probe: Any = await Probe.spawn()

    async def waits(key: str) -> None:
        await probe.ahold(key)

    async def gathers(key: str) -> None:
        await asyncio.gather(probe.ahold(key), probe.ahold(f"{key} too"))

    async def times_out(key: str) -> None:
        async with asyncio.timeout(60):
            await probe.ahold(key)

    for how in (waits, gathers, times_out):
        key = how.__name__
        task = asyncio.create_task(how(key))
        await probe.until(f"{key} began")
        await cancelled(task)
        await probe.until(f"{key} cancelled")
    await probe.until("gathers too cancelled")

    task = asyncio.create_task(probe.ahold("task"))
    await probe.until("task began")
    await cancelled(task)
    await probe.until("task cancelled")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(probe.ahold("wait_for"), 0.05)
    await probe.until("wait_for cancelled")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await probe.ahold("timeout")
    await probe.until("timeout cancelled")
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(probe.ahold("group"))
            await probe.until("group began")
            raise ValueError
    await probe.until("group cancelled")


async def test_a_held_reference_survives_a_cancelled_await() -> None:
    probe: Any = await Probe.spawn()
    ref = probe.ahold("k")
    await probe.until("k began")

    async def wait() -> Any:
        return await ref

    first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    await cancelled(first)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ref, 0.02)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await ref
    await cancelled(asyncio.create_task(ref))
    task = asyncio.create_task(ref)
    await asyncio.sleep(0)
    await cancelled(task)
    assert not ref.done()
    await probe.open("k")
    assert await ref == "k"
    assert await second == "k"
    assert "k cancelled" not in await probe.entries()


async def test_a_dropped_reference_cancels_nothing() -> None:
    probe: Any = await Probe.spawn()
    probe.ahold("k")
    await probe.until("k began")
    gc.collect()
    await probe.open("k")
    await probe.until("k ended")


async def test_cancel_of_a_queued_call() -> None:
    probe: Any = await Probe.spawn()
    held = probe.hold("h")
    refs = [probe.note(i) for i in range(5)]
    behind = probe.anote("async behind")
    more = [probe.anote(f"more {i}") for i in range(3)]
    await probe.until("h began")
    assert refs[1].cancel()
    assert refs[3].cancel()
    assert more[1].cancel()
    for ref in (refs[1], refs[3], more[1]):
        assert ref.done()
        with pytest.raises(asyncio.CancelledError):
            await ref
        assert not ref.cancel()
    await probe.open("h")
    assert await zc.get([held, refs[0], refs[2], refs[4], behind]) == ["h", 0, 2, 4, "async behind"]
    assert [e for e in await probe.entries() if e in range(5)] == [0, 2, 4]
    assert "more 1" not in await probe.entries()


async def test_cancel_of_running_calls() -> None:
    probe: Any = await Probe.spawn()
    ref = probe.ahold("a")
    await probe.until("a began")
    assert ref.cancel()
    await probe.until("a cancelled")
    with pytest.raises(asyncio.CancelledError):
        await ref
    running = probe.hold("s")
    await probe.until("s began")
    assert running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    behind = probe.note("behind")
    await probe.open("s")
    assert await behind == "behind"
    assert "s ended" in await probe.entries(), "a running sync method finishes"


async def test_cancel_right_after_the_call() -> None:
    probe: Any = await Probe.spawn()
    await probe.note("connected")
    for method in (probe.anote, probe.note, probe.inote, probe.ahold, probe.acount, probe.count):
        for _ in range(20):
            ref = method(5)
            if isinstance(ref, zc.ObjectRef):
                ref.cancel()
            else:
                await ref.aclose()
    async with asyncio.timeout(20):
        assert await probe.anote("async works") == "async works"
        assert await probe.note("sync works") == "sync works"
        assert [i async for i in probe.count(3)] == [0, 1, 2]
        await zc.stop(probe)


async def test_cancel_before_there_is_a_connection() -> None:
    probe: Any = await Probe.spawn()
    first, second = probe.note("first"), probe.note("second")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == "second"
    assert await probe.entries() == ["second"]


async def test_cancel_of_a_finished_call(actors: Any) -> None:
    plain, _, _ = actors
    ref = plain.echo(1)
    await ref
    assert not ref.cancel()
    assert await ref == 1
    failed = plain.fail("x")
    await zc.wait([failed])
    assert not failed.cancel()
    with pytest.raises(ValueError, match="x"):
        await failed
    put = zc.put(3)
    assert not put.cancel()
    assert await put == 3


async def test_methods_that_catch_the_cancellation() -> None:
    class Stubborn:
        async def catch(self, probe: Any) -> str:
            try:
                await probe.ahold("inside")
            except asyncio.CancelledError:
                await probe.anote("caught")
            return "went on"

        async def raise_it(self) -> None:
            raise asyncio.CancelledError("my own")

    probe: Any = await Probe.spawn()
    stubborn: Any = await zc.spawn(Stubborn)
    ref = stubborn.catch(probe)
    await probe.until("inside began")
    ref.cancel()
    await probe.until("caught", "inside cancelled")
    with pytest.raises(zc.RemoteError, match="CancelledError: my own"):
        await stubborn.raise_it()


async def test_a_stopped_wait_for_an_argument_can_be_cancelled() -> None:
    probe: Any = await Probe.spawn()
    caller: Any = await Caller.spawn()
    plain: Any = await Plain.spawn()
    late = probe.ahold("late")
    for actor, method in ((caller, caller.keep), (plain, plain.echo)):
        waiting, behind = method(late), method("behind")
        await probe.until("late began")
        if actor is caller:
            await behind
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(20):
            await behind
    await probe.open("late")
    assert await late == "late"
    assert await caller.kept() == ["behind"]
    assert await plain.seen() == [(("behind",), {})]
    held = probe.ahold("held")
    pending = caller.call(probe, "ahold", "held")
    await probe.open("held")
    await zc.stop(caller)
    assert await pending == await held == "held"


# ---------------------------------------------------------------- what nobody saw


async def test_an_unseen_failure_is_logged_once(actors: Any, caplog: pytest.LogCaptureFixture) -> None:
    plain, _, _ = actors

    def errors() -> list[str]:
        gc.collect()
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    plain.fail("dropped at once")
    await plain.echo(1)
    (text,) = errors()
    assert "Plain.fail" in text
    assert "dropped at once" in text
    ref = plain.fail("dropped later")
    await plain.echo(1)
    assert errors() == []
    del ref
    (text,) = errors()
    assert "dropped later" in text
    seen = plain.fail("seen")
    with pytest.raises(ValueError, match="seen"):
        await seen
    del seen
    assert errors() == []
    for refs in ([plain.fail("gathered")], [plain.fail("gathered"), plain.echo(1)]):
        await asyncio.gather(*refs, return_exceptions=True)
    del refs
    assert errors() == []
    cancelled_ref = plain.fail("cancelled")
    cancelled_ref.cancel()
    await plain.echo(1)
    del cancelled_ref
    assert errors() == []
    passed = plain.fail("passed on")
    with pytest.raises(ValueError, match="passed on"):
        await plain.echo(passed)
    await zc.wait([passed])
    with pytest.raises(ValueError, match="passed on"):
        await plain.echo(passed)  # known to have failed by now
    del passed
    assert errors() == []


# ---------------------------------------------------------------- promises as arguments


async def test_references_as_arguments_are_resolved(actors: Any) -> None:
    plain, _, _ = actors
    ready = plain.echo(1)
    await ready
    pending = plain.echo("x")
    array = np.arange(100_000.0)
    big = plain.echo(array)
    assert await plain.types(ready, pending, zc.put([3]), big, key=pending, other=zc.put(2.5)) == [
        "int",
        "str",
        "list",
        "ndarray",
        "str",
        "float",
    ]
    np.testing.assert_array_equal(await plain.echo(big), array)
    assert await plain.echo(named=zc.put(3)) == {"named": 3}


async def test_nested_references_stay_references(actors: Any) -> None:
    plain, caller, _ = actors
    ref = plain.echo("inside")
    assert await plain.types([ref]) == ["list"]
    assert await caller.value([ref]) == "inside"
    assert await caller.value([zc.put("put")]) == "put"
    (back,) = await plain.echo([ref])
    assert isinstance(back, zc.ObjectRef)
    assert await back == "inside"
    box = await plain.echo({"k": (ref, ref)})
    assert await box["k"][0] == await box["k"][1] == "inside"


async def test_pending_references_travel(actors: Any) -> None:
    _, first, second = actors
    probe: Any = await Probe.spawn()
    late = probe.ahold("late")
    results = [
        first.value([late]),  # nested, awaited inside
        first.give_to(second, [late]),  # A to B to C
        first.call(second, "value", [late]),
        second.keep(late),  # resolved for the callee
    ]
    await probe.until("late began")
    await probe.open("late")
    async with asyncio.timeout(20):
        assert await zc.get(results) == ["late", "late", "late", 1]
    assert await second.kept() == ["late"]
    await second.drop()


async def test_a_reference_as_a_result(actors: Any) -> None:
    plain, first, second = actors
    (ref,) = await first.start(plain, "echo", "from afar")
    assert isinstance(ref, zc.ObjectRef)
    assert await ref == "from afar"
    assert await ref == "from afar"
    (ref,) = await first.start(plain, "fail", "from afar")
    for _ in range(2):
        with pytest.raises(ValueError, match="from afar"):
            await ref
    (ref,) = await first.start(plain, "echo", np.ones(50_000))
    assert (await second.call(plain, "types", ref)) == ["ndarray"]
    np.testing.assert_array_equal(await ref, np.ones(50_000))

    class Returner:
        async def plain_ref(self, handle: Any) -> Any:
            return handle.echo("unwrapped")

    returner: Any = await zc.spawn(Returner)
    inner = await returner.plain_ref(plain)
    assert isinstance(inner, zc.ObjectRef)
    assert await inner == "unwrapped"


async def test_failed_references_as_arguments(actors: Any) -> None:
    plain, first, _ = actors
    known = plain.fail("known")
    await zc.wait([known])
    for ref in (known, plain.fail("not yet")):
        with pytest.raises(ValueError, match="known|not yet"):
            await plain.echo(ref)
        with pytest.raises(ValueError, match="known|not yet"):
            await plain.echo(key=ref)
        with pytest.raises(ValueError, match="known|not yet"):
            await first.call(plain, "echo", ref)
        with pytest.raises(ValueError, match="known|not yet"):
            await first.value([ref])
    probe: Any = await Probe.spawn()
    with pytest.raises(ValueError, match="known"):
        async for _ in probe.acount(known):
            pass
    with pytest.raises(ValueError, match="streamed"):
        async for _ in probe.count(plain.fail("streamed")):
            pass
    gone: Any = await Probe.spawn()
    lost = gone.ahold("k")
    await gone.until("k began")
    task = asyncio.create_task(first.value([lost]))
    await zc.kill(gone)
    with pytest.raises(zc.ActorDied):
        await task
    with pytest.raises(zc.ActorDied):
        await plain.echo(lost)


async def test_cancelled_references_as_arguments(actors: Any) -> None:
    plain, first, _ = actors
    probe: Any = await Probe.spawn()
    late = probe.ahold("late")
    waiting = plain.echo(late)
    inside = first.value([late])
    await probe.until("late began")
    late.cancel()
    for ref in (waiting, inside, plain.echo(late)):
        async with asyncio.timeout(20):
            with pytest.raises((asyncio.CancelledError, zc.RemoteError)):
                await ref


async def test_a_pending_argument_holds_its_place_in_a_sync_actor(actors: Any) -> None:
    probe: Any = await Probe.spawn()
    plain: Any = await Plain.spawn()
    late = probe.ahold("late")
    refs = [plain.echo(1), plain.echo(late), plain.echo(2), plain.echo(key=3)]
    await refs[0]
    await probe.until("late began")
    other: Any = actors[1]
    await other.call(plain, "echo", "another caller")  # not held up
    await probe.open("late")
    assert await zc.get(refs) == [1, "late", 2, {"key": 3}]
    assert [args for args, _ in await plain.seen()] == [(1,), ("another caller",), ("late",), (2,), ()]


async def test_a_pending_argument_steps_aside_in_an_async_actor() -> None:
    probe: Any = await Probe.spawn()
    async_actor: Any = await Probe.spawn()
    late = probe.ahold("late")
    waiting = [async_actor.anote(late), async_actor.note(late)]
    assert await async_actor.anote("overtakes") == "overtakes"
    assert await async_actor.note("overtakes too") == "overtakes too"
    await probe.open("late")
    assert await zc.get(waiting) == ["late", "late"]
    assert await async_actor.entries() == ["overtakes", "overtakes too", "late", "late"]


async def test_the_value_outlives_its_actor_where_it_was_received() -> None:
    plain: Any = await Plain.spawn()
    ref = plain.echo("kept")
    await ref
    await zc.kill(plain)
    assert await ref == "kept"


async def test_put_of_many_kinds(actors: Any) -> None:
    plain, caller, _ = actors
    for value in (None, 1, 1 << 80, "x" * 100_000, b"y" * 100_000, [1, (2, {3})], {"a": np.float32(3)}):
        ref = zc.put(value)
        assert ref.done()
        assert await ref == value
        assert await plain.echo(ref) == value
        assert await caller.value([ref]) == value


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("method", ["acount", "count"])
async def test_a_stream(method: str) -> None:
    probe: Any = await Probe.spawn()
    stream = getattr(probe, method)
    assert isinstance(stream(0), zc.ObjectStream)
    assert [item async for item in stream(0)] == []
    assert [item async for item in stream(100)] == list(range(100))
    both = [[item async for item in s] for s in (stream(50), stream(30))]
    assert both == [list(range(50)), list(range(30))]
    ended = stream(1)
    assert [item async for item in ended] == [0]
    with pytest.raises(StopAsyncIteration):
        await anext(ended)


@pytest.mark.parametrize("method", ["acount", "count"])
async def test_the_producer_stays_within_its_window(method: str) -> None:
    from zcactor.rpc.stream import STREAM_WINDOW

    probe: Any = await Probe.spawn()
    stream = getattr(probe, method)(10_000)
    for taken in range(1, 60):
        await anext(stream)
        produced = sum(type(entry) is tuple for entry in await probe.entries())
        assert taken <= produced <= taken + STREAM_WINDOW
    await probe.until(("item", 59))
    await stream.aclose()
    await probe.until("stream closed")


@pytest.mark.parametrize("method", ["acount", "count"])
@pytest.mark.parametrize("how", ["break", "aclose", "drop", "raise", "cancel"])
async def test_leaving_closes_the_generator(method: str, how: str) -> None:
    probe: Any = await Probe.spawn()
    stream = getattr(probe, method)(10_000)
    if how == "break":
        async for item in stream:
            if item == 3:
                break
        del stream
    elif how == "aclose":
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    elif how == "drop":
        del stream
    elif how == "raise":
        with pytest.raises(LookupError):
            async for _ in stream:
                raise LookupError
        del stream
    else:

        async def consume() -> None:
            async for item in getattr(probe, method)(10_000):
                if item == 20:
                    await asyncio.Event().wait()

        await anext(stream)
        task = asyncio.create_task(consume())
        await probe.until(("item", 20))
        await cancelled(task)
        del task
        await stream.aclose()
    gc.collect()
    if how != "drop" or "stream closed" in await probe.entries() or await probe.note("x"):
        async with asyncio.timeout(20):
            if any(type(entry) is tuple for entry in await probe.entries()):
                await probe.until("stream closed")
    assert await probe.note("alive") == "alive"


async def test_cancelling_anext_loses_no_item() -> None:
    probe: Any = await Probe.spawn()
    stream = probe.astall_at(3)
    assert await anext(stream) == 0
    await probe.until("stalled")
    for _ in range(2):
        assert await anext(stream) in (1, 2)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
    await probe.open("stall")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("method", ["afail_at", "fail_at"])
@pytest.mark.parametrize("n", [0, 1, 40])
async def test_an_exception_arrives_at_its_own_item(method: str, n: int) -> None:
    probe: Any = await Probe.spawn()
    stream = getattr(probe, method)(n)
    got = []
    with pytest.raises(ValueError, match=f"at {n}") as caught:
        async for item in stream:
            got.append(item)
    assert got == list(range(n))
    assert isinstance(caught.value, zc.RemoteError)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_an_actor_killed_in_the_middle_of_a_stream() -> None:
    probe: Any = await Probe.spawn()
    stream = probe.astall_at(5)
    assert await anext(stream) == 0
    await probe.until("stalled")
    await zc.kill(probe)
    got = []
    with pytest.raises(zc.ActorDied) as died:
        async for item in stream:
            got.append(item)
    assert got == [1, 2, 3, 4]
    assert died.value.maybe_executed
    with pytest.raises(zc.ActorDied):
        async for _ in probe.acount(3):
            pass


async def test_two_tasks_on_one_stream() -> None:
    probe: Any = await Probe.spawn()
    stream = probe.astall_at(0)
    await probe.until("stalled")
    first = asyncio.create_task(stream.__anext__())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two tasks"):
        await anext(stream)
    await probe.open("stall")
    with pytest.raises(StopAsyncIteration):
        await first


async def test_streams_of_arrays_and_references(actors: Any) -> None:
    class Source:
        async def arrays(self, n: int) -> AsyncIterator[Any]:
            for i in range(n):
                yield np.full(20_000, float(i))

        async def refs(self, handle: Any, n: int) -> AsyncIterator[Any]:
            for i in range(n):
                yield handle.echo(i)

    plain, _, _ = actors
    source: Any = await zc.spawn(Source)
    async for i, array in _enumerate(source.arrays(40)):
        np.testing.assert_array_equal(array, np.full(20_000, float(i)))
    assert [await ref async for ref in source.refs(plain, 40)] == list(range(40))


async def _enumerate(stream: Any) -> AsyncIterator[tuple[int, Any]]:
    i = 0
    async for item in stream:
        yield i, item
        i += 1
