"""One of the two sides of `benchmarks.paired`: a program that measures the zcactor that it finds on its path.

It imports nothing of this repository but the public names of zcactor, so that it runs with the package of any revision.
Lines on its standard input name the item to measure; it answers each by a line with the seconds of one call, array or
spawn. With the argument ``fake`` the calls go between the runtimes of two processes in one, which reach each other by
RDMA on a fake fabric; only there are modules of the package's inside imported.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

import zcactor as zc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ARRAY_NBYTES = 8 << 20


@zc.actor
class Adder:
    """An actor with one method of each kind."""

    def sync(self, a: int, b: float) -> float:
        """Add in the actor's thread."""
        return a + b

    async def coro(self, a: int, b: float) -> float:
        """Add on the actor's loop."""
        return a + b

    @zc.method(inline=True)
    def inline(self, a: int, b: float) -> float:
        """Add on the loop as soon as the call has arrived."""
        return a + b

    def first(self, array: Any) -> float:
        """The first element: proof that the array is here."""
        return float(array[0])

    def length(self, value: Any) -> int:
        """The length of the text that was passed: proof that the object is here."""
        return len(value["text"])


@zc.actor(process="shared")
class SharedAdder(Adder):
    """An actor that shares its process with many others."""


async def _calls(method: Any, count: int) -> None:
    for _ in range(count):
        await method(3, 4.5)


async def _pipelined(method: Any, count: int) -> None:
    for _ in range(count // 1000):
        await zc.get([method(3, 4.5) for _ in range(1000)])


async def _arrays(method: Any, nbytes: int, count: int) -> None:
    array = zc.ones(nbytes // 8)
    for _ in range(count):
        await method(array)


async def _objects(method: Any, nbytes: int, count: int) -> None:
    value = {"text": "x" * nbytes}
    for _ in range(count):
        await method(value)


async def _shared(count: int) -> None:
    actors: list[Any] = await asyncio.gather(*[SharedAdder.spawn() for _ in range(count)])
    await asyncio.gather(*[actor.sync(3, 4.5) for actor in actors])
    await asyncio.gather(*[zc.kill(actor) for actor in actors])


async def _spawns(count: int) -> None:
    for _ in range(count):
        await zc.kill(await zc.spawn(Adder))


async def measured(adder: Any, item: str, count: int) -> float:
    """Run `item` so often; the seconds of one call, array or spawn."""
    subjects = {
        "sync": lambda: _calls(adder.sync, count),
        "async": lambda: _calls(adder.coro, count),
        "inline": lambda: _calls(adder.inline, count),
        "pipelined": lambda: _pipelined(adder.coro, count),
        "array": lambda: _arrays(adder.first, ARRAY_NBYTES, count),
        "array-16m": lambda: _arrays(adder.first, 16 << 20, count),
        "object-20k": lambda: _objects(adder.length, 20 << 10, count),
        "object-100k": lambda: _objects(adder.length, 100 << 10, count),
        "object-1m": lambda: _objects(adder.length, 1 << 20, count),
        "shared": lambda: _shared(count),
        "shared-1000": lambda: _shared(count),
        "spawn": lambda: _spawns(count),
    }
    before = time.perf_counter()
    await subjects[item]()
    return (time.perf_counter() - before) / count


@asynccontextmanager
async def _spawned() -> AsyncIterator[Any]:
    """An actor in a process of its own."""
    async with zc.init():
        adder: Any = await zc.spawn(Adder)
        await adder.first(np.ones(8))
        yield adder


def _module(name: str, name_in_base: str) -> Any:
    """The module of that name, or of its name in the base's package, which has other rooms."""
    try:
        return import_module(f"zcactor.{name}")
    except ModuleNotFoundError:
        return import_module(f"zcactor.{name_in_base}")


class _ByName:
    """An endpoint that finds processes in a mapping of addresses."""

    def __init__(self, endpoint: Any, addresses: dict[str, str]) -> None:
        self._endpoint = endpoint
        self._addresses = addresses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    async def connect(self, process: str) -> Any:
        """Connect to the process of that name."""
        return await self._endpoint.connect(self._addresses[process])


def _same(binding: Any) -> Any:
    return binding


@asynccontextmanager
async def _over_fake() -> AsyncIterator[Any]:
    """An actor of a second runtime in this process, over the fake device."""
    from zcactor.interface import Interface
    from zcactor.objectstore.store import Store
    from zcactor.transport.verbs.endpoint import VerbsEndpoint

    context: Any = _module("process.context", "context")
    fabric = _module("transport.verbs.driver.fake", "transport.verbs.fake").FakeFabric()
    addresses: dict[str, str] = {}
    processes: list[Any] = []
    for nic in ("fake0", "fake1"):
        fabric.add_nic(nic)
        binding, name = fabric.binding(nic), os.urandom(16)
        store = Store(64 << 20, name)
        made = VerbsEndpoint(
            "127.0.0.1", name, bytes(32), store.arena, store.arena.fd, 64, 4096, binding=partial(_same, binding),
            lookup=store.lookup, verbs_eager_limit=4096,
        )  # fmt: skip
        endpoint = _ByName(made, addresses)
        config = zc.Config(eager_limit=4096, recv_depth=64)
        make = _module("assembly.process", "runtime.process").Process
        process = make(name, "worker", config, asyncio.get_running_loop(), store, endpoint)
        # the base's process has no part of its own for connections
        await made.start(getattr(process, "connections", process).accepted)
        addresses[name.hex()] = made.address
        processes.append(process)
    caller, owner = processes
    context.set_current(caller)
    hosts: Any = owner if hasattr(owner, "take_index") else owner.hosts  # the base's process has no table of its own
    index = hosts.take_index()
    getattr(hosts, "add_host" if hosts is owner else "add")(index, Adder, "Adder").adopt(Adder())
    place = (owner.process, index)
    remote = _module("api.remote_actor", "handle").RemoteActor
    remote = remote(caller, b"a" * 16, Interface.of(Adder), place, None, "default", 1000, 0)
    adder: Any = _module("api.handle", "handle").ActorHandle(remote)
    await adder.coro(3, 4.5)
    (session,) = caller.sessions.all() if hasattr(caller, "connections") else caller.all_sessions()
    assert session.connection.kind == "verbs", "the fake device is not used"
    yield adder
    context.clear_current()
    for process in processes:
        await process.close()


async def main() -> None:
    """Answer lines until the input ends."""
    core, tree, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.sched_setaffinity(0, {core})
    assert zc.__file__.startswith(tree), f"{zc.__file__} does not lie in {tree}"
    async with _over_fake() if way == "fake" else _spawned() as adder:
        loop = asyncio.get_running_loop()
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            item, count = line.split()
            print(await measured(adder, item, int(count)), flush=True)


if __name__ == "__main__":
    zc.run(main())
