"""Cancelling calls: by their references, by the tasks that await them, at every stage of the call."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

import tests.api.test_future as awaiting
import zcactor as zc
from tests.actors import Caller, Plain, Probe
from tests.api.test_future import cancelled

pytestmark = pytest.mark.asyncio(loop_scope="module")

node, actors = awaiting.node, awaiting.actors


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


async def test_a_cancelled_task_that_never_ran_cancels_its_call() -> None:
    probe: Any = await Probe.spawn()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(probe.ahold("at once"), 0)
    task = asyncio.create_task(probe.ahold("task"))
    await cancelled(task)
    ref = probe.ahold("held")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ref, 0)
    await cancelled(asyncio.create_task(ref))
    await probe.open("held")
    assert await ref == "held"
    await probe.until("at once cancelled", "task cancelled")


async def test_cancelling_what_waits_by_wait_for() -> None:
    probe: Any = await Probe.spawn()

    async def waits(ref: Any, key: str) -> None:
        await probe.until(f"{key} began")
        await asyncio.wait_for(asyncio.wait_for(ref, 60), None)

    async def makes(key: str) -> None:
        await asyncio.wait_for(asyncio.wait_for(probe.ahold(key), None), 60)

    made = asyncio.create_task(makes("made"))
    await probe.until("made began")
    await cancelled(made)
    await probe.until("made cancelled")
    both = [asyncio.create_task(asyncio.wait_for(ref, 60)) for ref in (probe.ahold("one"),) for _ in range(2)]
    ref = probe.ahold("held")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waits(ref, "held"), 0.2)
    await cancelled(asyncio.create_task(asyncio.wait_for(ref, 60)))
    await probe.open("held")
    assert await ref == "held"
    await probe.until("one began")
    await cancelled(both[0])
    await probe.note("one goes on")
    await cancelled(both[1])
    await probe.until("one cancelled")


async def by_variable(made: Any) -> AsyncIterator[Any]:
    while True:
        yield made


async def by_attribute(made: Any) -> AsyncIterator[Any]:
    holder = SimpleNamespace(made=made)
    del made
    while True:
        yield holder.made


async def by_element(made: Any) -> AsyncIterator[Any]:
    holder = [made]
    del made
    while True:
        yield holder[0]


async def by_closure(made: Any) -> AsyncIterator[Any]:
    while True:
        yield (lambda: made)()


async def by_global(made: Any) -> AsyncIterator[Any]:
    globals()["held"] = made
    del made
    try:
        while True:
            yield held  # type: ignore[name-defined]  # noqa: F821
    finally:
        del globals()["held"]


@pytest.mark.parametrize("holder", [by_variable, by_attribute, by_element, by_closure, by_global])
async def test_whoever_holds_a_reference_keeps_its_call(holder: Any) -> None:
    probe: Any = await Probe.spawn()
    async with aclosing(holder(probe.ahold("k"))) as held:
        await probe.until("k began")

        async def plainly() -> None:
            await (await anext(held))

        async def by_wait_for() -> None:
            await asyncio.wait_for(await anext(held), 60)

        for how in (plainly, by_wait_for):
            task = asyncio.create_task(how())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await cancelled(task)
        for steps in range(2):
            task = asyncio.create_task(await anext(held))
            for _ in range(steps):
                await asyncio.sleep(0)
            await cancelled(task)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(await anext(held), 0.01 * steps)
        await probe.note("a round trip later")
        assert not (await anext(held)).done()
        await probe.open("k")
        assert await (await anext(held)) == "k"


async def test_awaits_in_a_loop_of_another_thread_are_cancelled_alike() -> None:
    probe: Any = await Probe.spawn()
    held = probe.ahold("held")

    async def elsewhere() -> None:
        for wait in (0, 0.05):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(held, wait)
        await cancelled(asyncio.create_task(held))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(refs.pop(), 0.05)
        await cancelled(asyncio.create_task(refs.pop()))

    refs = [probe.ahold("task"), probe.ahold("wait_for")]
    await probe.until("task began", "wait_for began")
    await asyncio.to_thread(asyncio.run, elsewhere())
    await probe.until("task cancelled", "wait_for cancelled")
    await probe.open("held")
    assert await held == "held"


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
