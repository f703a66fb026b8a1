"""`zc.Operation` in the thread of an event loop: it begins at the call, and is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import zcactor as zc
from tests.actors import Plain, Probe


class Counting:
    def count(self, number: int) -> Iterator[int]:
        yield from range(number)


async def test_a_loop_is_not_blocked() -> None:
    for enter in (zc.init().__enter__, zc.init().result):
        with pytest.raises(RuntimeError, match=r"write '(async with|await) zc.init\(\)(:|)' instead"):
            enter()
    async with zc.init(num_cpus=2):
        plain: Any = await Plain.spawn()
        done = plain.echo(1)
        assert await done == 1
        operation = zc.nodes()
        assert len(await operation) == 1
        for each in (done, plain.echo(2), operation, zc.nodes()):
            with pytest.raises(RuntimeError, match="would block the event loop that runs in this thread: await the"):
                each.result()
            with pytest.raises(RuntimeError, match="would block"):
                each.exception()
        counting: Any = await zc.spawn(Counting)
        with pytest.raises(RuntimeError, match="write 'async for item in ...' instead"):
            for _ in counting.count(3):
                pass
        with pytest.raises(RuntimeError, match="'async for"):
            counting.count(3).next()


async def test_it_begins_at_the_call_on_a_loop() -> None:
    async with zc.init(num_cpus=2):
        plain: Any = await Plain.spawn()
        operation = zc.kill(plain)
        while not operation.done():
            await asyncio.sleep(0)
        with pytest.raises(zc.ActorDied):
            await plain.echo(1)
        await operation
        await operation  # again
        other: Any = await asyncio.create_task(Plain.spawn())
        async with asyncio.TaskGroup() as group:
            listing = group.create_task(zc.nodes())
        assert len(listing.result()) == 1
        probe: Any = await Probe.spawn()
        held = probe.ahold("never")
        waiting = zc.get([held])
        task = asyncio.ensure_future(_await(waiting))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert waiting.done() and not held.done()
        early = zc.get([held])
        made = asyncio.create_task(early)
        made.cancel()  # before its first step
        with pytest.raises(asyncio.CancelledError):
            await made
        with pytest.raises(asyncio.CancelledError):
            await early
        assert not held.done()
        assert repr(waiting) == "<zc.get done>"
        with pytest.raises(TypeError, match="this is the promise of zc.get, not its result: await it"):
            len(waiting)  # type: ignore[arg-type]
        assert await other.echo(1) == 1


async def _await(operation: Any) -> Any:
    return await operation


async def test_a_shutdown_of_a_cancelled_task_ends_actors_in_order() -> None:
    async def main() -> None:
        await zc.init(num_cpus=2)
        plain: Any = await Plain.spawn()
        called = plain.echo(1)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await zc.shutdown()
        finally:
            assert called.done()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(main())
    with pytest.raises(zc.NotInitialized):
        zc.shutdown()


def test_a_loop_that_does_not_run_brings_nothing() -> None:
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(zc.init(num_cpus=2))
        plain: Any = loop.run_until_complete(Plain.spawn())
        call, listing = plain.echo(1), zc.nodes()
        for operation in (call, listing):
            for block in (operation.result, operation.exception):
                with pytest.raises(zc.NotInitialized, match="does not run, so nothing can come: await there, or"):
                    block()
        assert loop.run_until_complete(call) == 1
        assert len(loop.run_until_complete(listing)) == 1

        async def ended() -> list[Any]:
            operations: list[Any] = [zc.nodes(), zc.get_actor("nobody"), zc.get([plain.echo(2)])]
            operations[2].cancel()
            await asyncio.gather(*operations, return_exceptions=True)
            return operations

        nodes, missing, cancelled = loop.run_until_complete(ended())
        assert (call.result(), len(listing.result()), len(nodes.result())) == (1, 1, 1)
        assert isinstance(missing.exception(), zc.NoSuchActor)
        with pytest.raises(asyncio.CancelledError):
            cancelled.result()
        loop.run_until_complete(zc.shutdown())
    finally:
        loop.close()
