"""A runtime wholly in this process: all of the package works in it, and it leaves nothing."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from zcactor.driver import driver
from zcactor.process import context
from zcactor.testing import until
from zcactor.testing.runtime import LoopbackRuntime, end_runtime, start_runtime


@zc.actor
class Worker:
    def __init__(self, name: str = "") -> None:
        self.name = name
        self.kept: Any = None
        self.closed = threading.Event()

    def where(self) -> tuple[int, str]:
        return os.getpid(), threading.current_thread().name

    def keep(self, array: Any) -> float:
        self.kept = array
        return float(array.sum())

    def give(self) -> Any:
        return self.kept

    def ones(self, length: int) -> Any:
        array = np.ones(length)
        assert zc.in_store(array)
        return array

    def fill(self, array: Any) -> Any:
        array += 1
        return zc.move(array)

    def count(self, stop: int) -> Iterator[int]:
        yield from range(stop)

    async def acount(self, stop: int) -> AsyncIterator[int]:
        for number in range(stop):
            yield number

    async def sleep(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "rested"

    async def relay(self, other: Any, array: Any) -> float:
        total: float = await other.keep(array)
        return total

    async def bear(self, name: str) -> Any:
        made: Any = await Actors.spawn(name)
        return made, await made.describe()

    def describe(self) -> tuple[str, str, str]:
        me = zc.current_actor()
        return self.name, me.id, me.node

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def fail(self) -> None:
        raise ValueError(f"{self.name} fails")

    @zc.method(inline=True)
    def peek(self, handle: Any) -> Any:
        return handle


Actors: Any = Worker
"""The class without its types: a type checker does not know that its methods are called elsewhere."""


async def test_calls_of_every_kind(zc_runtime: LoopbackRuntime) -> None:
    worker = await Actors.spawn("a")
    pid, thread = await worker.where()
    assert pid == os.getpid() and thread != threading.current_thread().name
    assert await worker.sleep(0) == "rested"
    assert [number async for number in worker.count(4)] == [0, 1, 2, 3]
    assert [number async for number in worker.acount(4)] == [0, 1, 2, 3]
    assert await worker.peek(worker) == worker
    with pytest.raises(ValueError, match="a fails"):
        await worker.fail()
    with pytest.raises(zc.DeadlineExceeded):
        await worker.sleep.options(timeout=0.01)(60)
    call = worker.sleep(60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_arrays_are_mapped_and_read_only(zc_runtime: LoopbackRuntime) -> None:
    first, second = await Actors.spawn(), await Actors.spawn()
    array = zc.zeros(1 << 17)
    array += 2
    assert await first.keep(array) == 1 << 18
    assert await second.relay(first, await first.give()) == 1 << 18
    received = await second.ones(1 << 17)
    assert received.sum() == 1 << 17
    with pytest.raises(ValueError, match="read-only"):
        received[0] = 3
    moved = await first.fill(zc.move(zc.zeros(1 << 17)))
    moved += 1
    assert moved.sum() == 1 << 18
    assert zc.stats().bytes_copied == 0
    assert np.ones(1 << 17).sum() == 1 << 17 and zc.in_store(np.ones(1 << 17))


async def test_arrays_outlive_their_owner_and_the_runtime(zc_runtime: LoopbackRuntime) -> None:
    worker, other = await Actors.spawn(), await Actors.spawn()
    array = await worker.ones(1 << 17)
    await zc.kill(worker)
    assert array.sum() == 1 << 17
    assert await other.keep(array) == 1 << 17  # passed on, though its owner has ended
    await zc.shutdown()
    assert array.sum() == 1 << 17


async def test_references(zc_runtime: LoopbackRuntime) -> None:
    worker, other = await Actors.spawn(), await Actors.spawn()
    array = worker.ones(1 << 17)
    assert await other.keep(array) == 1 << 17
    assert await zc.get([zc.put(3), worker.sleep(0)]) == [3, "rested"]
    done, waiting = await zc.wait([worker.sleep(0), worker.sleep(60)], num_returns=1)
    assert await done[0] == "rested"
    waiting[0].cancel()


async def test_names_handles_and_ends(zc_runtime: LoopbackRuntime) -> None:
    worker = await Actors.options(name="w").spawn("w")
    assert await zc.get_actor("w") == worker
    with pytest.raises(zc.NameTaken):
        await Actors.options(name="w").spawn()
    assert await Actors.options(name="w", get_if_exists=True).spawn() == worker
    made, described = await worker.bear("inner")
    assert described[0] == "inner" and described[2] == zc_runtime.node_id
    assert await made.describe() == described
    call = worker.sleep(60)
    await worker.sleep(0)
    await zc.kill(worker)
    with pytest.raises(zc.ActorDied, match="killed by zc.kill"):
        await call
    with pytest.raises(zc.NoSuchActor):
        await zc.get_actor("w")
    with pytest.raises(zc.ActorDied):  # its spawner has ended
        await made.describe()


async def test_a_dropped_handle_ends_its_actor(zc_runtime: LoopbackRuntime) -> None:
    worker = await Actors.spawn()
    await worker.sleep(0)
    del worker
    loop = asyncio.get_running_loop()
    end = loop.time() + 10
    while [info.state for info in await zc.actors()] != ["dead"]:
        assert loop.time() < end, "the actor was not stopped"


async def test_restarts(zc_runtime: LoopbackRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await Actors.options(max_restarts=1).spawn("again")
    first = await worker.describe()
    zc_runtime.crash(worker)
    with pytest.raises(zc.ActorUnavailable):
        await worker.sleep(60)
    async with asyncio.timeout(30):
        while True:
            try:
                assert await worker.describe() == first
                break
            except zc.ActorUnavailable:
                await asyncio.sleep(0.01)


async def test_shared_actors_and_the_environment(zc_runtime: LoopbackRuntime) -> None:
    shared = [await Actors.options(process="shared").spawn(str(number)) for number in range(5)]
    assert [(await each.describe())[0] for each in shared] == list("01234")
    assert os.environ.get("ZC_TEST_VARIABLE") is None
    worker = await Actors.options(env={"ZC_TEST_VARIABLE": "on"}).spawn()
    assert await worker.env("ZC_TEST_VARIABLE") == "on"
    await zc.stop(worker)
    assert os.environ.get("ZC_TEST_VARIABLE") is None


async def test_inspection(zc_runtime: LoopbackRuntime) -> None:
    worker = await Actors.options(resources={}).spawn()
    (node,) = await zc.nodes()
    assert node.node_id == zc_runtime.node_id
    assert (await zc.cluster_resources())["CPU"] == len(os.sched_getaffinity(0))
    assert (await zc.stats(worker)).connections >= 1
    assert "loopback" in repr(await zc.explain(worker))


async def test_user_threads_belong_to_the_test(zc_runtime: LoopbackRuntime) -> None:
    def work() -> int:
        return int(zc.zeros(8).nbytes)

    assert await asyncio.to_thread(work) == 64
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    await until(lambda: found, "the thread has not ended")
    thread.join()


async def test_a_forked_child_is_refused(zc_runtime: LoopbackRuntime) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            zc.zeros(8)
        except zc.ZcactorError as error:
            os._exit(7 if type(error).__name__ == "ForkedProcess" else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    worker = await Actors.spawn()  # the parent's goes on
    assert await worker.sleep(0) == "rested"


async def test_start_and_end() -> None:
    runtime = await start_runtime(namespace="mine", num_cpus=3)
    assert runtime.config.num_cpus == 3 and not runtime.closed
    with pytest.raises(zc.AlreadyInitialized):
        await start_runtime()
    await end_runtime(runtime)
    await end_runtime(runtime)
    assert context.current_or_none() is None
    assert vars(runtime)["_over"]
    with pytest.raises(zc.NotInitialized):
        zc.zeros(3)


async def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match="store_capacity"):
        await start_runtime(store_capacity=-1)
    assert context.current_or_none() is None
    driver.check_free()


async def test_an_array_that_was_dropped_just_before_the_end(zc_runtime: LoopbackRuntime) -> None:
    """Its owner is told a moment later by a connection of its own, which a runtime that has ended does not open."""
    worker: Any = await Actors.spawn()
    array = await worker.ones(1 << 17)
    adoptions = zc_runtime.process.adoptions
    session = zc_runtime.process.sessions.used[worker._remote.location[0]]
    session.connection.abort()
    await until(lambda: session not in zc_runtime.process.sessions.all(), "the connection has not ended")
    del array
    adoptions.let_go(session.peer_process)
    await zc.shutdown()
    before = asyncio.all_tasks()
    adoptions._tell_later(session.peer_process)
    assert asyncio.all_tasks() == before
