"""References end to end: awaiting them, `zc.put`, and failures that no caller awaited."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.actors import Caller, Plain, Probe
from zcactor.peers import unretrieved_errors
from zcactor.process import context
from zcactor.rpc.call import Call

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=2, log_to_driver=False) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def actors() -> AsyncIterator[tuple[Any, Any, Any]]:
    """Actors that tests share and leave unchanged."""
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


# ---------------------------------------------------------------- put


async def test_put_of_many_kinds(actors: Any) -> None:
    plain, caller, _ = actors
    for value in (None, 1, 1 << 80, "x" * 100_000, b"y" * 100_000, [1, (2, {3})], {"a": np.float32(3)}):
        ref = zc.put(value)
        assert ref.done()
        assert await ref == value
        assert await plain.echo(ref) == value
        assert await caller.value([ref]) == value


# ---------------------------------------------------------------- failures that no caller awaited


@pytest.mark.slow
async def test_an_unseen_failure_is_logged_once(
    actors: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, _ = actors
    monkeypatch.setattr(unretrieved_errors, "QUIET", 0.01)

    async def errors() -> list[str]:
        gc.collect()
        async with asyncio.timeout(20):
            while context.current().unretrieved_errors._noted or context.current().unretrieved_errors._actors:
                await asyncio.sleep(0)
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    await errors()  # errors that earlier tests have left to the collector
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
        await plain.echo(passed)  # it is known by now that the call failed
    del passed
    assert await errors() == []


@pytest.mark.parametrize(
    "way", [lambda ref: ref, asyncio.ensure_future, asyncio.gather], ids=["await", "task", "gather"]
)
async def test_what_was_raised_keeps_no_frame_alive(actors: tuple[Any, Any, Any], way: Callable[[Any], Any]) -> None:
    """An array in a frame that an error passed through is freed at once, not by a later collection of cycles."""

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
        await asyncio.sleep(0)  # let the task's own callbacks run
        assert array() is None
    finally:
        gc.enable()


async def awaiting(ref: zc.ObjectRef[Any]) -> Any:
    """The value of `ref`, awaited in a coroutine."""
    return await ref


async def test_a_call_that_ends_while_another_thread_begins_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(b"", asyncio.new_event_loop(), 0)
    loop = asyncio.get_running_loop()

    class Late:
        """The loop, for which the call ends between the look at its state and the wait."""

        def create_future(self) -> asyncio.Future[None]:
            made = loop.create_future()
            call.complete_plain(7)
            return made

    monkeypatch.setattr("zcactor.api.future.asyncio.get_running_loop", Late)
    assert await asyncio.wait_for(awaiting(zc.ObjectRef(call)), 10) == 7
    assert call.loop is not None
    call.loop.close()


@pytest.mark.parametrize(
    "way", [awaiting, lambda ref: ref, lambda ref: asyncio.wait_for(ref, 60)], ids=["await", "task", "wait_for"]
)
async def test_a_result_that_came_with_the_cancel_is_freed_at_once(way: Callable[[Any], Any]) -> None:
    """The awaiting task was cancelled and has not run since when the result comes. No cycle of garbage keeps the
    result."""
    call = Call(b"", asyncio.get_running_loop(), threading.get_ident())
    gc.collect()
    gc.disable()
    try:
        task = asyncio.ensure_future(way(zc.ObjectRef(call)))
        await asyncio.sleep(0)
        while call.waiter is None:
            await asyncio.sleep(0)
        task.cancel()
        array = np.ones(4)
        call.complete_plain(array)
        result = weakref.ref(array)
        del call, array
        assert (await asyncio.wait([task]))[0].pop().cancelled()
        del task
        await asyncio.sleep(0)  # let its own callbacks run
        assert result() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------- blocking a thread


async def test_result_blocks_a_thread_until_the_value_is_there() -> None:
    probe: Any = await Probe.spawn()
    ref = probe.ahold("r")
    waiting = asyncio.create_task(asyncio.to_thread(ref.result))
    await probe.until("r began")
    with pytest.raises(TimeoutError, match=r"was not done after 0 s; it goes on"):
        await asyncio.to_thread(ref.result, 0)
    with pytest.raises(TimeoutError, match=r"after 0\.01 s"):
        await asyncio.to_thread(ref.result, 0.01)
    await probe.open("r")
    assert await waiting == "r"
    assert await asyncio.to_thread(ref.result, 0) == "r"
    assert await ref == "r"


async def test_result_raises_what_await_raises(actors: tuple[Any, Any, Any]) -> None:
    plain = actors[0]
    failing = plain.fail("broken")
    with pytest.raises(ValueError, match="broken"):
        await failing
    with pytest.raises(ValueError, match="broken"):
        await asyncio.to_thread(failing.result)
    assert await asyncio.to_thread(zc.put([1, 2]).result, 1) == [1, 2]


async def test_result_on_the_thread_of_a_loop_says_to_await() -> None:
    ref = zc.put(1)
    assert ref.done()
    with pytest.raises(RuntimeError, match="await the reference instead"):
        ref.result()
    with pytest.raises(RuntimeError, match="await the reference instead"):
        ref.result(0)


@pytest.mark.parametrize(
    ("timeout", "error"), [("1", TypeError), (True, TypeError), (-1, ValueError), (float("nan"), ValueError)]
)
async def test_result_takes_seconds(timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"result\(\): timeout is"):
        await asyncio.to_thread(zc.put(1).result, timeout)


async def test_result_waits_for_as_long_as_it_is_told(actors: Any) -> None:
    plain, _, _ = actors
    assert await asyncio.to_thread(plain.echo(1).result, 10**400) == 1
