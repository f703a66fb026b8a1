"""The actor whose groups the tests of collectives use."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

import zcactor as zc
from tests.filling import fill_store
from zcactor.collectives.operations import Publication
from zcactor.collectives.service import GroupService
from zcactor.process.context import current

__all__ = ["SIZE", "Rank", "at_rest", "everywhere", "ranks", "settled"]

EAGER = 16 << 10
"""Bytes of the largest input that travels in frames."""
SIZE = 3
"""Ranks of the group that tests share."""


def _fail(kind: Callable[[], BaseException]) -> None:
    raise kind()


class Unreadable:
    """An object whose unpickling fails, or whose pickling does.

    Args:
        kind: makes the error.
        written: whether it can be pickled.
    """

    def __init__(self, kind: Callable[[], BaseException], written: bool) -> None:
        self.kind = kind
        self.written = written

    def __reduce__(self) -> Any:
        if not self.written:
            _fail(self.kind)
        return _fail, (self.kind,)


@zc.actor
class Rank:
    """A member of groups."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.calls = 0
        self.another = asyncio.Event()

    async def call(self, group: zc.Group, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Call a collective, and await it."""
        reference = getattr(group, operation)(*args, **kwargs)
        self.calls += 1
        self.another.set()
        self.another = asyncio.Event()
        try:
            return await reference
        finally:
            del reference  # it keeps the error, whose traceback keeps this frame and those above, with their arrays

    async def garble(self, group: zc.Group, to: int, values: Any, operation: str, *args: Any) -> Any:
        """Call a collective, of which one rank gets other values than our publication; or pieces, and no bytes."""
        member: Any = current().groups().member(group._key, group.rank)
        publish = member._publish

        def garbled(rank: int, seq: int, begun: Any, own: Publication) -> None:
            if rank != to:
                publish(rank, seq, begun, own)
                return
            session, sent = member._session(rank), values
            if sent == "pieces":
                current().requests.send(session, GroupService.piece, (group._key, rank, member.rank, seq, bytes(80)))
                sent = "signature", 7, b"", 0, b""
            assert session.wire.publish(seq + 1 << 20 | member.rank, member._words[rank], sent, True)

        def to_all(seq: int, begun: Any, data: Any) -> None:
            for rank in member._others:
                garbled(rank, seq, begun, Publication(begun.signature, data))

        member._publish, member.publish_to_all = garbled, to_all
        try:
            return await self.call(group, operation, *args)
        finally:
            del member._publish, member.publish_to_all

    async def leave_connection(self, group: zc.Group, rank: int, replaced: bool) -> None:
        """Note the end of one of two connections to the process of another rank."""
        session: Any = SimpleNamespace(peer_process=group.actors[rank]._remote.location[0], is_replaced=replaced)
        current().groups().session_left(session, session)

    async def next_call(self) -> int:
        """Wait until `call` has called a collective."""
        await self.another.wait()
        return self.calls

    async def called(self) -> int:
        """The number of collectives that `call` has called."""
        return self.calls

    def call_plain(self, group: zc.Group, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Call a collective in a plain method."""
        return getattr(group, operation)(*args, **kwargs).result()

    async def raises(self, group: zc.Group, operation: str, *args: Any, **kwargs: Any) -> tuple[str, str]:
        """Call a collective that fails. Returns the type and the text of its error."""
        try:
            await self.call(group, operation, *args, **kwargs)
        except Exception as error:
            return type(error).__name__, str(error)
        raise AssertionError(f"{operation} did not fail")

    async def unreadable(
        self, group: zc.Group, operation: str, count: int, kind: Callable[[], BaseException], written: bool
    ) -> str:
        """Call a collective with an array whose dtype cannot be unpickled, or pickled. Returns the name of the error's
        type; nothing without an error."""
        dtype = np.dtype("f8", metadata={"unit": Unreadable(kind, written)})
        array = np.zeros(count).view(dtype)
        try:
            await (group.broadcast(array) if operation == "broadcast" else group.allgather(array, concat=False))
        except BaseException as error:
            return type(error).__name__
        return ""

    async def raises_full(self, group: zc.Group, operation: str, count: int, full: bool) -> tuple[str, str]:
        """Call a collective, with a full store where wanted. Returns the type and the text of its error."""
        array = zc.ones(count)
        if full:
            await self.fill()
        try:
            return await self.raises(group, operation, array)
        finally:
            self.kept.pop("filling", None)

    async def reduce(
        self, group: zc.Group, x: Any, op: str = "sum", strides: Sequence[slice] = (), **kwargs: Any
    ) -> tuple[Any, bool, bool, bool]:
        """Reduce a private array, of which a small one is overwritten at once. Returns the result, whether that is
        writable, and whether the input was writable while it was lent, and afterwards."""
        array = np.array(x)[tuple(strides)] if strides else np.array(x)
        reference = group.allreduce(array, op, **kwargs)  # type: ignore[arg-type]
        during = array.flags.writeable and not reference.done()
        if during and (array.nbytes <= EAGER or kwargs.get("plan") == "eager"):
            array.fill(0)
            during = False
        result = await reference
        return result, result.flags.writeable, during, array.flags.writeable

    async def again(self, group: zc.Group, count: int, plan: Any) -> list[float]:
        """Reduce one array three times, with other elements each time. Returns the first elements of the results."""
        array = zc.zeros(count)
        found = []
        for _ in range(3):
            array += 1
            found.append(float((await group.allreduce(array, plan=plan))[0]))
        return found

    async def taken(self, group: zc.Group, operation: str, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Call a collective. Returns the bytes that this process has received for it, and those that it has copied."""
        before = zc.stats()
        await getattr(group, operation)(*args, **kwargs)
        after = zc.stats()
        return after.bytes_received - before.bytes_received, after.bytes_copied - before.bytes_copied

    async def in_place(self, group: zc.Group, x: Any) -> tuple[Any, bool]:
        """Reduce into the input. Returns it, and whether the result is the input itself."""
        array = np.array(x)
        result = await group.allreduce(array, out=array)
        return array, result is array and array.flags.writeable

    async def exchange(self, group: zc.Group, parts: Sequence[Any]) -> list[Any]:
        """Send a part to each rank. Returns the values from all."""
        return [await reference for reference in await group.alltoall(parts)]

    async def fill(self) -> int:
        """Fill the store. Returns the number of arrays that it took."""
        filling = self.kept["filling"] = fill_store()
        return len(filling)

    async def shares(self, group: zc.Group, count: int) -> tuple[bool, list[float]]:
        """Gather an array by reference, and change it afterwards where that is possible. Returns whether it is, and
        the first elements of all arrays."""
        array = np.full(count, 7.0)
        found = await group.allgather(array, concat=False)
        writable = array.flags.writeable
        if writable:
            array[:] = 0
        await group.barrier()
        return writable, [float(each[0]) for each in found]

    async def forget_write_access(self) -> None:
        """Make all connections as they are before write access is requested."""
        for session in current().sessions.all():
            session.connection._writable_open = False

    def give(self, value: Any) -> Any:
        """Give a value back."""
        return value

    def polls(self, group: zc.Group) -> tuple[str, ...]:
        """Call a barrier, and give up waiting for it twice. Returns the types of the errors."""
        reference = self.kept["reference"] = group.barrier()
        names = []
        for timeout in (0, 0.01):
            try:
                reference.result(timeout)
            except TimeoutError as error:
                names.append(type(error).__name__)
        return tuple(names)

    def finishes(self) -> Any:
        """Wait for the barrier of `polls`."""
        return self.kept.pop("reference").result(20)

    def rank(self, group: zc.Group) -> int:
        """The rank of this actor."""
        return group.rank

    def keep(self, name: str, value: Any) -> None:
        """Keep a value."""
        self.kept[name] = value

    def drop(self, name: str) -> None:
        """Drop a value that was kept."""
        del self.kept[name]

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    async def facts(self) -> tuple[int, int, int, int]:
        """Bytes of the store that are used, leases, descriptors, and groups with members here."""
        stats = zc.stats()
        groups = current().groups()
        return stats.store_used, stats.leases, len(os.listdir("/proc/self/fd")), len(groups._members)

    async def watched(self, group: zc.Group, operation: str, *args: Any, **kwargs: Any) -> tuple[str, Any, float]:
        """Call a collective in which a member ends. Returns the type of the error, its facts, and the time of it."""
        reference = getattr(group, operation)(*args, **kwargs)
        self.calls += 1
        self.another.set()
        self.another = asyncio.Event()
        try:
            await reference
        except zc.GroupBroken as error:
            return type(error).__name__, (error.rank, error.actor, error.epoch, str(error)), time.monotonic()
        raise AssertionError(f"{operation} did not fail")

    def last_operation(self, group: zc.Group) -> int:
        """The number of the operation that this rank has called last."""
        member: Any = current().groups().member(group._key, group.rank)
        return int(member.seat.next) - 1

    async def many(self, group: zc.Group, count: int, elements: int, plan: Any = "auto") -> int:
        """Reduce again and again. Returns how many results were right before the group broke; all are, until then."""
        for number in range(count):
            try:
                result = await group.allreduce(np.full(elements, number, np.float32), plan=plan, timeout=20)
            except zc.GroupBroken:
                return number
            if not np.array_equal(result, np.full(elements, number * group.size, np.float32)):
                raise AssertionError(f"result {number} is {result}")
            del result
        return count


@contextlib.asynccontextmanager
async def ranks(size: int, **options: Any) -> AsyncIterator[tuple[zc.Group, list[Any]]]:
    """A group of so many actors, each in a process of its own unless the options say otherwise."""
    actors: list[Any] = [await Rank.options(**options).spawn() for _ in range(size)]
    yield await zc.group(actors), actors
    for actor in actors:
        await zc.kill(actor)


async def everywhere(actors: Sequence[Any], method: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Call a method of all actors at once, and await all results."""
    return await zc.get([getattr(actor, method)(*args, **kwargs) for actor in actors], timeout=60)


async def at_rest(actors: list[Any]) -> list[Any]:
    """The facts of all actors, once no byte of their stores is used and no lease exists. Releases that no frame has
    taken along go by themselves after a second."""
    async with asyncio.timeout(20):
        while True:
            facts = await everywhere(actors, "facts")
            if not any(used or leases for used, leases, _, _ in facts):
                return facts


async def settled(actors: list[Any], wanted: list[Any]) -> list[Any]:
    """The facts of all actors after a while; those that are wanted, once none is greater. A connection that was about
    to end may have had a descriptor before."""
    end = time.monotonic() + 15
    while True:
        gc.collect()
        found = await everywhere(actors, "facts")
        if all(now <= then for pair in zip(found, wanted, strict=True) for now, then in zip(*pair, strict=True)):
            return wanted
        if time.monotonic() > end:
            return found
        await asyncio.sleep(0.01)
