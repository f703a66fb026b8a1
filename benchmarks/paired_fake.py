"""One of the two sides of a comparison over the fake device: the runtimes of two processes in one, which reach each
other by RDMA on a fake fabric. It answers lines as `benchmarks.paired_side` does, with the package that it finds on its
path."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import zcactor as zc
from zcactor.interface import Interface
from zcactor.objectstore.store import Store
from zcactor.transport.verbs.endpoint import VerbsEndpoint

if TYPE_CHECKING:
    from zcactor.transport.verbs.driver.base import Binding


def _module(name: str, name_in_base: str) -> Any:
    """The module of that name, or of its name in the base's package, which has other rooms."""
    try:
        return import_module(f"zcactor.{name}")
    except ModuleNotFoundError:
        return import_module(f"zcactor.{name_in_base}")


ActorHandle: Any = _module("api.handle", "handle").ActorHandle
RemoteActor: Any = _module("api.remote_actor", "handle").RemoteActor
Process: Any = _module("assembly.process", "runtime.process").Process
FakeFabric: Any = _module("transport.verbs.driver.fake", "transport.verbs.fake").FakeFabric
context: Any = _module("process.context", "context")


class Adder:
    """An actor that is called over the fabric."""

    async def coro(self, a: int, b: float) -> float:
        """Add on the loop."""
        return a + b


class _ByName:
    """An endpoint that finds processes in a mapping of addresses."""

    def __init__(self, endpoint: VerbsEndpoint, addresses: dict[str, str]) -> None:
        self._endpoint = endpoint
        self._addresses = addresses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    async def connect(self, process: str) -> Any:
        """Connect to the process of that name."""
        return await self._endpoint.connect(self._addresses[process])


def _same(binding: Binding) -> Binding:
    return binding


async def _serve() -> None:
    fabric = FakeFabric()
    addresses: dict[str, str] = {}
    processes = []
    for nic in ("fake0", "fake1"):
        fabric.add_nic(nic)
        binding, name = fabric.binding(nic), os.urandom(16)
        store = Store(64 << 20, name)
        made = VerbsEndpoint(
            "127.0.0.1", name, bytes(32), store.arena, store.arena.fd, 64, 4096, binding=partial(_same, binding),
            lookup=store.lookup, verbs_eager_limit=4096,
        )  # fmt: skip
        endpoint: Any = _ByName(made, addresses)
        config = zc.Config(eager_limit=4096, recv_depth=64)
        process = Process(name, "worker", config, asyncio.get_running_loop(), store, endpoint)
        parts: Any = process  # the base's process has no part of its own for connections
        await endpoint.start(getattr(parts, "connections", parts).accepted)
        addresses[name.hex()] = made.address
        processes.append(process)
    caller, owner = processes
    context.set_current(caller)
    hosts: Any = owner if hasattr(owner, "take_index") else owner.hosts  # the base's process has no table of its own
    index = hosts.take_index()
    getattr(hosts, "add_host" if hosts is owner else "add")(index, Adder, "Adder").adopt(Adder())
    place = (owner.process, index)
    adder: Any = ActorHandle(RemoteActor(caller, b"a" * 16, Interface.of(Adder), place, None, "default", 1000, 0))
    await adder.coro(3, 4.5)
    side: Any = caller  # the base's process has no part of its own for connections
    (session,) = side.sessions.all() if hasattr(side, "connections") else side.all_sessions()
    assert session.connection.kind == "verbs", "the fake device is not used"
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        item, number = line.split()
        count = int(number)
        before = time.perf_counter()
        if item == "pipelined":
            for _ in range(count // 1000):
                await zc.get([adder.coro(3, 4.5) for _ in range(1000)])
        else:
            for _ in range(count):
                await adder.coro(3, 4.5)
        print((time.perf_counter() - before) / count, flush=True)
    context.clear_current()
    for process in processes:
        await process.close()


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})
    assert zc.__file__.startswith(sys.argv[2]), f"{zc.__file__} does not lie in {sys.argv[2]}"
    zc.run(_serve())
