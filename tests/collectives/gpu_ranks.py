"""The actor of groups whose arrays lie on fake GPUs, with a stand-in for NCCL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

import zcactor as zc
from tests.collectives.nccl_stand_in import StandInNccl
from zcactor.process.context import current
from zcactor.testing import until

__all__ = ["SIZE", "GpuRank", "gpu_ranks", "running"]

SIZE = 3
"""Ranks of most groups."""


@zc.actor
class GpuRank:
    """A member of groups."""

    def __init__(self, nccl: bool = True, fails: str = "") -> None:
        self.kept: Any = None
        self.copied: Any = None
        self.called = asyncio.Event()
        if nccl:
            self.use(fails)

    def use(self, fails: str) -> None:
        """Use a stand-in for NCCL."""
        driver: Any = current().store.devices().driver
        current().groups().nccl = StandInNccl(driver, fails)

    def fail(self, method: str) -> None:
        """Let a method of the stand-in in use fail from here on."""
        nccl: Any = current().groups().nccl
        nccl.fails = method

    async def call(self, group: zc.Group, operation: str, x: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Call a collective with an array on this rank's GPU. Returns the type of the result, its values, and whether
        it is read-only."""
        return _described(await getattr(group, operation)(x if x is None else zc.gpu.to_device(x), **kwargs))

    def call_plain(self, group: zc.Group, operation: str, x: Any) -> tuple[Any, Any, bool]:
        """As `call`, in a plain method."""
        return _described(getattr(group, operation)(zc.gpu.to_device(x)).result())

    async def call_as(self, group: zc.Group, library: str, operation: str, x: Any) -> tuple[Any, Any, bool]:
        """As `call`, with an array of a library."""
        own = zc.gpu.to_device(x)
        return _described(await getattr(group, operation)(own.as_cupy() if library == "cupy" else own))

    async def from_host(self, group: zc.Group, x: Any) -> Any:
        """Call a broadcast of rank 1's array on the host."""
        return await group.broadcast(x, root=1)

    async def turned(self, group: zc.Group, x: Any) -> tuple[Any, Any]:
        """Reduce a view with gaps, and overwrite the array. Returns the values of both."""
        own = zc.gpu.to_device(x)
        result = await group.allreduce(own.T[::-1, ::2])
        own.fill(7)
        return np.array(zc.gpu.to_host(result)), np.array(zc.gpu.to_host(own))

    async def into(self, group: zc.Group, kind: str, x: Any) -> tuple[bool, Any, bool]:
        """Reduce into an array. Returns whether that is the result, its values, and whether it is writable."""
        room = zc.zeros(4 * len(x), x.dtype, device="cuda")
        own: Any = room[: len(x)]
        if kind == "gaps":
            own = room[::4]
        own.copy_from(x)
        out = {"another": room[200:300], "overlapping": room[50:150]}.get(kind, own)
        given = out.as_cupy() if kind == "cupy" else out
        result = await group.allreduce(own, out=given)
        if kind == "cupy":
            return result is given, np.array(zc.gpu.to_host(out)), True
        values = np.array(zc.gpu.to_host(result))
        result.fill(0)
        return result is given, values, True

    async def late(self, group: zc.Group, rank: int) -> tuple[list[float], list[float]]:
        """Reduce an array that is not computed yet, and overwrite it. Returns the elements of the result and of it."""
        x = zc.zeros(5, "f4", device="cuda")
        with zc.gpu.stream():
            x.fill(rank + 1)
            reference = group.allreduce(x)
        result = await reference
        with zc.gpu.stream():
            x.fill(9)
        with zc.gpu.stream():
            copied = result.copy()
        return zc.gpu.to_host(copied).tolist(), zc.gpu.to_host(x).tolist()

    async def held(self, group: zc.Group, value: float) -> tuple[bool, float]:
        """Reduce an array while the GPU does nothing. Returns whether the result was computed, and an element."""
        x = zc.zeros(5, "f4", device="cuda")
        gate, driver = threading.Event(), current().store.devices().driver
        with zc.gpu.stream() as stream:
            driver.hold(0, stream.ptr, gate.is_set)
            x.fill(value)
            result: Any = await group.allreduce(x)
        done = all(moment.done() for moment in result.holder.work._writes)
        gate.set()
        return done, float(zc.gpu.to_host(result)[0])

    async def borrows(self, group: zc.Group) -> float:
        """Reduce an array that is kept. Returns an element of the result."""
        self.kept = zc.ones(10, "f4", device="cuda")
        reference = group.allreduce(self.kept)
        self.called.set()
        return float(zc.gpu.to_host(await reference)[0])

    async def next_call(self) -> None:
        """Wait until `borrows` or `watched` has called a collective."""
        await self.called.wait()
        self.called.clear()

    async def writes(self) -> str:
        """Write to the array that is kept. Returns the type of the error."""
        try:
            self.kept.fill(5)
        except ValueError as error:
            return type(error).__name__
        return ""

    async def keep(self, group: zc.Group, x: Any) -> None:
        """Reduce an array, and keep the result."""
        self.kept = await group.allreduce(zc.gpu.to_device(x))

    async def relay(self, other: Any) -> list[float]:
        """Pass the result that is kept on. Returns the elements that the other actor sees."""
        return await other.elements(self.kept)  # type: ignore[no-any-return]

    def elements(self, x: Any) -> list[float]:
        """The elements of an array."""
        return zc.gpu.to_host(x).tolist()  # type: ignore[no-any-return]

    def elements_kept(self) -> list[float]:
        """The elements of the array that is kept."""
        return zc.gpu.to_host(self.kept).tolist()  # type: ignore[no-any-return]

    async def rank_by_host(self, group: zc.Group) -> int:
        """Add ones on the host. Returns the sum."""
        return int((await group.allreduce([1]))[0])

    def seen(self) -> list[str]:
        """The UUIDs of the GPUs here."""
        return [gpu.uuid for gpu in zc.gpu.gpus()]

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    def drop(self) -> None:
        """Forget what is kept."""
        self.kept = self.copied = None

    async def raises(self, group: zc.Group, operation: str, x: Any, **kwargs: Any) -> tuple[str, str]:
        """Call a collective that fails. Returns the type and the text of its error."""
        try:
            await getattr(group, operation)(x if x is None else zc.gpu.to_device(x), **kwargs)
        except Exception as error:
            return type(error).__name__, str(error)
        raise AssertionError(f"{operation} did not fail")

    async def raises_on_host(self, group: zc.Group, operation: str, x: Any) -> tuple[str, str]:
        """Call a collective that fails, with an array on the host. Returns the type and the text of its error."""
        try:
            await getattr(group, operation)(x)
        except Exception as error:
            return type(error).__name__, str(error)
        raise AssertionError(f"{operation} did not fail")

    async def exchange(self, group: zc.Group, parts: Sequence[Any], on_gpu: bool = True) -> list[Any]:
        """Send a part to each rank. Returns the types and values from all."""
        sent = [zc.gpu.to_device(part) if on_gpu else part for part in parts]
        return [_described(await each) for each in await group.alltoall(sent)]

    def call_on(self, group: zc.Group, device: str, x: Any) -> Any:
        """Reduce an array on a GPU. Returns the values, or the error. In a process of several ranks the wait for the
        values must not hold up their loop."""
        try:
            return np.array(zc.gpu.to_host(group.allreduce(zc.gpu.to_device(x, device)).result()))
        except ValueError as error:
            return str(error)

    async def exchange_on(self, group: zc.Group, device: str, parts: Sequence[Any]) -> list[float]:
        """Send a part on a GPU to each rank. Returns the first elements of those from all."""
        found = await group.alltoall([zc.gpu.to_device(part, device) for part in parts])
        return [float(zc.gpu.to_host(await each)[0]) for each in found]

    async def watched(self, group: zc.Group) -> tuple[int, str]:
        """Reduce an array while a member ends. Returns the rank and the text of the error."""
        reference = group.allreduce(zc.ones(10, "f4", device="cuda"))
        self.called.set()
        try:
            await reference
        except zc.GroupBroken as error:
            return error.rank, str(error)
        raise AssertionError("the group did not break")

    async def broken(self, group: zc.Group) -> tuple[int, str]:
        """Wait until the group is broken. Returns the rank and the text of the error."""
        while True:
            try:
                await group.barrier(timeout=0.05)
            except zc.GroupBroken as error:
                return error.rank, str(error)
            except zc.GroupTimeout:
                continue

    async def hold_and_reduce(self, group: zc.Group) -> None:
        """Hold the work of this rank's GPU back, and queue an exchange that is kept."""
        x, self.gate = zc.ones(10, "f4", device="cuda"), threading.Event()
        with zc.gpu.stream() as stream:
            current().store.devices().driver.hold(0, stream.ptr, self.gate.is_set)
            x.fill(3)
            self.kept = await group.allreduce(x)
            self.copied = self.kept.copy()

    async def hold_and_reduce_into(self, group: zc.Group) -> str:
        """Reduce into every second element of an array, which takes the way through the host, while this rank's GPU is
        held. Returns the type of the error."""
        x, self.gate = zc.ones((20, 20, 20), "f4", device="cuda"), threading.Event()
        self.kept = zc.zeros((40, 40, 40), "f4", device="cuda")
        self.copied = self.kept[::2, ::2, ::2]
        with zc.gpu.stream() as stream:
            current().store.devices().driver.hold(0, stream.ptr, self.gate.is_set)
            x.fill(3)
        (made,) = current().groups().nccl.made
        before = len(made.calls)
        reference = group.allreduce(x, out=self.copied)
        await until(lambda: len(made.calls) > before, "the exchange did not begin")  # its abort leaves the array else
        self.called.set()
        try:
            await reference
        except zc.GroupBroken as error:
            return type(error).__name__
        raise AssertionError("the group did not break")

    async def forget(self, other: Any) -> None:
        """Forget this rank's groups, as where their founder tells it that nobody holds them. Returns when another rank
        has heard of it."""
        groups = current().groups()
        for key in list(groups._members):
            groups.forget(key)
        await other.stats()

    def kept_connections(self) -> int:
        """The number of reasons to keep connections to other processes."""
        process: Any = current()
        return sum(process.sessions.kept.values())

    def never(self) -> Any:
        """An array that is not computed while this actor lives."""
        self.gate = threading.Event()
        driver: Any = current().store.devices().driver
        driver.hold(0, 0, self.gate.is_set)
        return zc.ones(10, "f4", device="cuda")

    async def reduce_copy(self, group: zc.Group, x: Any) -> tuple[int, str]:
        """Reduce a copy of an array while its maker ends. Returns the rank and the text of the error."""
        reference = group.allreduce(zc.ones(10, "f4", device="cuda") if x is None else x.copy())
        self.called.set()
        try:
            await reference
            await group.barrier()
        except zc.GroupBroken as error:
            return error.rank, str(error)
        raise AssertionError("the group did not break")

    def let_go(self) -> None:
        """Let the GPU's work go on."""
        self.gate.set()

    async def lost(self) -> list[str]:
        """Read the array that is kept, and pass it on. Returns the types of the errors."""
        found = []
        for read in (
            lambda: zc.gpu.to_host(self.kept), lambda: zc.gpu.to_host(self.copied), lambda: self.kept.copy(),
            lambda: zc.put(self.kept),
        ):  # fmt: skip
            try:
                read()
            except zc.ObjectLost as error:
                found.append(type(error).__name__)
        return found

    def refuses_out(self, group: zc.Group, kind: str) -> str:
        """Reduce into an array that does not fit. Returns the error."""
        length, dtype, device = {"shape": (3, "f4", 0), "dtype": (4, "i4", 0), "device": (4, "f4", 1)}.get(
            kind, (4, "f4", 0)
        )
        out: Any = zc.zeros(length, dtype, device=f"cuda:{device}")
        if kind == "read-only":
            self.kept = zc.put(out)
        try:
            group.allreduce(zc.zeros(4, "f4", device="cuda"), out=out)
        except ValueError as error:
            return str(error)
        raise AssertionError("out was taken")

    async def adds(self, group: zc.Group, x: Any) -> str:
        """Add an array on a GPU to a reducer. Returns the error."""
        given: Any = zc.gpu.to_device(x)
        try:
            async with group.reducer() as reducer:
                reducer.add("x", given)
        except TypeError as error:
            return str(error)
        raise AssertionError("the array was taken")

    def made(self) -> list[tuple[list[str], str]]:
        """The calls of each communicator that was made here, and its end."""
        return [(each.calls, each.ended) for each in current().groups().nccl.made]

    def ends(self) -> list[str]:
        """The ends of all communicators that were made here, once all have ended."""
        made = current().groups().nccl.made
        for each in made:
            if not each.was_ended.wait(20):
                raise AssertionError("a communicator was not ended")
        return [each.ended for each in made]

    def stats(self) -> zc.Stats:
        """The figures of this process."""
        return zc.stats()


def _described(result: Any) -> tuple[Any, Any, bool]:
    if isinstance(result, list):
        return [_described(each) for each in result], None, True
    values = zc.gpu.to_host(result)
    name = f"{type(result).__module__.partition('.')[0]}.{type(result).__name__}"
    return name, np.array(values), bool(getattr(result, "readonly", False))


def running(options: str = "devices=3,late=2", **more: Any) -> Any:
    """A runtime with fake GPUs."""
    return zc.init(num_cpus=8, log_to_driver=False, config=zc.Config(gpu=f"fake:{options}", **more))


@contextlib.asynccontextmanager
async def gpu_ranks(size: int = SIZE, *, num_gpus: float = 1, **arguments: Any) -> AsyncIterator[tuple[zc.Group, Any]]:
    """A group of so many actors, each with a GPU of its own."""
    actors: list[Any] = [await GpuRank.options(num_gpus=num_gpus).spawn(**arguments) for _ in range(size)]
    yield await zc.group(actors), actors
    for actor in actors:
        await zc.kill(actor)
