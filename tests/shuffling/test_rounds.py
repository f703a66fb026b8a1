"""`zcactor.shuffling.rounds`: every part reaches its reducer, in order and without a copy; nothing is left over."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

import zcactor as zc
from tests.cluster.hosts import Hosts
from tests.driver.programs import alive

PART = 1 << 18
"""Bytes of a part: above the eager limit, so it goes by reference."""
PATIENCE = 30
"""Seconds after which a shuffle that does not end is given up."""


@zc.actor
class Worker:
    """A mapper and reducer of parts that say where they come from."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rounds: list[list[tuple[int, ...]]] = []
        self.partitions = 0

    @zc.method
    def partition(self, count: int, item: Any = None) -> Any:
        """A part for each reducer, which begins with this worker's number, the item and the reducer's number."""
        self.partitions += 1
        if item == "raise":
            raise KeyError("mine")
        if item == "few":
            return [1] * (count - 1)
        if item == "array":
            return np.zeros((count, 2))
        if item == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        parts = []
        for reducer in range(count):
            part = np.zeros(PART, np.uint8)
            part[:3] = self.number, 0 if item is None else item, reducer
            parts.append(part)
        return parts

    @zc.method
    async def later(self, count: int, item: int) -> tuple[Any, ...]:
        """The parts of an async method: values that are not arrays, and a reference."""
        return (zc.put({"item": item}), *[f"{item} for {reducer}" for reducer in range(1, count)])

    @zc.method
    def merge(self, parts: list[Any]) -> Any:
        """Note the marks of the parts. Returns their sum."""
        self.rounds.append([tuple(part[:3].tolist()) for part in parts])
        assert not any(part.flags.writeable for part in parts)
        return np.concatenate(parts)

    @zc.method
    async def keep(self, parts: list[Any]) -> list[Any]:
        """The parts as they came."""
        return parts

    @zc.method
    def refuse(self, parts: list[Any]) -> None:
        """Raise."""
        raise ZeroDivisionError(f"{len(parts)} parts")

    @zc.method
    def seen(self) -> list[list[tuple[int, ...]]]:
        """The marks, by round."""
        return self.rounds

    @zc.method
    def partitioned(self) -> int:
        """The number of calls of `partition`."""
        return self.partitions

    @zc.method
    def stream(self, count: int) -> Any:
        """A generator, which no shuffle takes."""
        yield count


async def spawned(count: int) -> list[Any]:
    """Spawn that many workers."""
    return [await Worker.spawn(number) for number in range(count)]


async def used(workers: list[Any]) -> list[int]:
    """The bytes of objects in each worker's store, once they have stopped changing."""
    last: list[int] = []
    for _ in range(200):
        now = [(await zc.stats(worker)).store_used for worker in workers]
        if not any(now):
            break
        last = now
        await asyncio.sleep(0.01)
    else:
        return last
    return now


@pytest.mark.slow
async def test_each_part_reaches_its_reducer_and_not_the_driver() -> None:
    async with zc.init():
        workers = await spawned(3)
        refs = await zc.shuffle(workers, "partition", "merge")
        for reducer, worker in enumerate(workers):
            assert await worker.seen() == [[(mapper, 0, reducer) for mapper in range(3)]]
        mine = zc.stats()
        assert (mine.bytes_mapped, mine.bytes_received, mine.bytes_read, mine.bytes_copied) == (0, 0, 0, 0)
        assert mine.bytes_eager < 16384
        theirs = [await zc.stats(worker) for worker in workers]
        assert [each.bytes_copied for each in theirs] == [0, 0, 0]
        results = await zc.get(refs)  # only now
        assert [len(result) for result in results] == [3 * PART] * 3
        del results, refs
        assert await used(workers) == [0, 0, 0]


@pytest.mark.slow
async def test_rounds_of_items_with_other_reducers() -> None:
    async with zc.init():
        workers = await spawned(5)
        refs = await zc.shuffle(
            workers[:2], "partition", "merge", reducers=workers[2:], items=[1, 2, 3, 4, 5], in_flight=2
        )
        assert len(refs) == 3
        for reducer, worker in enumerate(workers[2:]):
            rounds = [[1, 2], [3, 4], [5]]
            marks = [[((item - 1) % 2, item, reducer) for item in items] for items in rounds]
            assert await worker.seen() == marks
        assert len(await refs[0]) == PART  # of the last round
        del refs
        assert await used(workers) == [0] * 5


@pytest.mark.slow
async def test_two_rounds_are_in_memory_at_most() -> None:
    async with zc.init():
        (worker,) = await spawned(1)
        ends: list[int] = []

        async def watch() -> None:
            while True:
                ends.append((await zc.stats(worker)).store_used)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await zc.shuffle([worker], "partition", "merge", items=list(range(20)), in_flight=1)
        watching.cancel()
        await asyncio.wait([watching])
        assert max(ends) <= 4 * PART  # two parts, and the results of two merges
        assert len(await worker.seen()) == 20


@pytest.mark.slow
async def test_any_values_and_async_methods() -> None:
    async with zc.init():
        workers = await spawned(2)
        refs = await zc.shuffle(workers, "later", "keep", items=[1, 2, 3])
        assert await zc.get(refs) == [
            [{"item": 1}, {"item": 2}, {"item": 3}],
            ["1 for 1", "2 for 1", "3 for 1"],
        ]


@pytest.mark.slow
async def test_a_reference_as_an_item_is_resolved_for_the_mapper() -> None:
    async with zc.init():
        workers = await spawned(2)
        await zc.shuffle(workers, "partition", "merge", items=[zc.put(7), 8])
        assert await workers[0].seen() == [[(0, 7, 0), (1, 8, 0)]]


@pytest.mark.slow
async def test_a_shuffle_inside_an_actor() -> None:
    @zc.actor
    class Starter:
        @zc.method
        async def start(self, workers: list[Any]) -> int:
            refs = await zc.shuffle(workers, "partition", "merge")
            return len(refs)

    async with zc.init():
        workers = await spawned(2)
        starter = await Starter.spawn()
        assert await starter.start(workers) == 2


@pytest.mark.slow
async def test_errors_of_a_mapper_free_the_parts_of_all() -> None:
    cases: list[tuple[str, type[Exception], str]] = [
        ("raise", KeyError, r"mine"),
        ("few", ValueError, r"partition\(\) of Worker\(\w+\) returned 1 parts for 2 reducers: return exactly one"),
        ("array", TypeError, r"partition\(\) of Worker\(\w+\) returned a ndarray, but a shuffle needs a list of 2"),
    ]
    async with zc.init():
        workers = await spawned(2)
        for item, error, message in cases:
            with pytest.raises(error, match=message):
                await zc.shuffle(workers, "partition", "merge", items=[1, 2, 3, item], in_flight=2)
            assert await used(workers) == [0, 0]
        await zc.shuffle(workers, "partition", "merge")  # and they work on


@pytest.mark.slow
async def test_the_error_of_a_reducer() -> None:
    async with zc.init():
        workers = await spawned(2)
        with pytest.raises(ZeroDivisionError, match="2 parts") as caught:
            await zc.shuffle(workers, "partition", "refuse")
        assert isinstance(caught.value, zc.RemoteError)
        assert "refuse" in caught.value.remote_traceback
        del caught
        assert await used(workers) == [0, 0]


@pytest.mark.slow
async def test_a_mapper_that_dies_is_named() -> None:
    async with zc.init():
        workers = await spawned(2)
        with pytest.raises(zc.ActorDied, match=r"actor Worker\(\w+\) died: .*SIGKILL"):
            await zc.shuffle(workers, "partition", "merge", items=[1, "die"])
        assert await used(workers[:1]) == [0]
        with pytest.raises(zc.NoSuchActor):
            await zc.shuffle(workers, "partition", "merge")


@zc.actor
class Gated:
    """A member whose `part` waits for a file after the first mapper's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pid(self) -> int:
        """The process."""
        return os.getpid()

    def part(self, count: int, number: int) -> list[Any]:
        """Parts; those of a number above 0 when nobody has locked the file ``gate`` any more."""
        (self.folder / str(number)).touch()
        with (self.folder / "gate").open() as gate:
            fcntl.flock(gate, fcntl.LOCK_SH if number else fcntl.LOCK_UN)
        return [np.zeros(PART, np.uint8) for _ in range(count)]

    def merge(self, parts: list[Any]) -> int:
        """The number of parts."""
        return len(parts)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["mapper", "reducer", "before"])
async def test_a_member_that_is_killed_at_any_time_is_named(
    tmp_path: Path, killed: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / "gate").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        await _killed(tmp_path, killed, gate)
    assert [record.message for record in caplog.records if "never awaited" in record.message] == []


async def _killed(folder: Path, killed: str, gate: TextIO) -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        mappers, reducers = [[await Gated.spawn(folder) for _ in range(2)] for _ in range(2)]
        victim: Any = mappers[0] if killed == "mapper" else reducers[1]
        pid = await victim.pid()
        if killed != "before":
            items = [0, 1]
            shuffling = asyncio.ensure_future(zc.shuffle(mappers, "part", "merge", reducers=reducers, items=items))
            while not all((folder / str(number)).exists() for number in items):
                await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        if killed == "before":
            shuffling = asyncio.ensure_future(zc.shuffle(mappers, "part", "merge", reducers=reducers, items=[0]))
        else:
            while alive(pid):
                await asyncio.sleep(0)
            fcntl.flock(gate, fcntl.LOCK_UN)
        with pytest.raises((zc.ActorDied, zc.NoSuchActor) if killed == "before" else zc.ActorDied, match="SIGKILL"):
            await shuffling
        del shuffling


@pytest.mark.slow
async def test_cancelling_frees_the_parts() -> None:
    async with zc.init():
        workers = await spawned(2)
        task = asyncio.create_task(zc.shuffle(workers, "partition", "merge", items=[1] * 1000, in_flight=2))
        while not await workers[0].partitioned():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        assert await used(workers) == [0, 0]
        assert await workers[0].partitioned() < 500


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mappers": 3}, TypeError, r"mappers must be a sequence of handles, not int"),
    ({"mappers": "one"}, TypeError, r"mappers must be a sequence of handles, not a single one"),
    ({"mappers": [1]}, TypeError, r"mappers must be handles of actors, not int"),
    ({"mappers": []}, ValueError, r"mappers is empty: give at least one actor"),
    ({"mappers": "twice"}, ValueError, r"<handle of Worker\(\w+\)> occurs twice in mappers"),
    ({"reducers": []}, ValueError, r"reducers is empty"),
    ({"partition": 3}, TypeError, r"a method is given by its name, not as int"),
    ({"partition": "split"}, AttributeError, r"Worker has no method 'split'"),
    ({"partition": "_split"}, AttributeError, r"is private"),
    ({"partition": "seen"}, TypeError, r"Worker.seen\(\): too many positional arguments"),
    ({"partition": "later"}, TypeError, r"Worker.later\(\): missing a required argument: 'item'"),
    ({"partition": "stream"}, TypeError, r"Worker.stream is a generator; it must return a value"),
    ({"merge": "seen"}, TypeError, r"Worker.seen\(\): too many"),
    ({"items": []}, ValueError, r"items is empty: there is nothing to merge"),
    ({"items": 3}, TypeError, r"items must be a sequence, not int"),
    ({"items": [1], "in_flight": 0}, ValueError, r"in_flight must be a whole number of items >= 1, or None, not 0"),
    ({"items": [1], "in_flight": 1.5}, ValueError, r"in_flight must be a whole number"),
    ({"in_flight": 2}, ValueError, r"in_flight is a number of items, and there are no items: give some"),
]
"""Arguments that replace good ones, the error, and a part of its message."""


@pytest.mark.slow
async def test_bad_input_sends_nothing() -> None:
    async with zc.init():
        workers = await spawned(1)
        for arguments, error, message in BAD:
            given: dict[str, Any] = {"mappers": workers, "partition": "partition", "merge": "merge", **arguments}
            given["mappers"] = {"one": workers[0], "twice": workers * 2}.get(str(given["mappers"]), given["mappers"])
            with pytest.raises(error, match=message):
                await zc.shuffle(**given)
        assert await workers[0].partitioned() == 0


@pytest.mark.slow
def test_between_nodes_each_byte_moves_once() -> None:
    with Hosts() as hosts:
        head = hosts.start(transports="tcp")
        hosts.start("b", head, transports="tcp")
        source = """
@zc.actor
class Worker:
    def partition(self, count):
        return [np.full(1 << 20, number, np.uint8) for number in range(count)]
    def merge(self, parts):
        self.total = sum(int(part.sum()) for part in parts)
    def result(self):
        return self.total
async def main():
    async with zc.init(ADDRESS, transports=("tcp",)):
        nodes = await zc.nodes()
        workers = [await Worker.options(node=node.node_id).spawn() for node in nodes]
        await zc.shuffle(workers, "partition", "merge")
        mine, *theirs = zc.stats(), *[await zc.stats(worker) for worker in workers]
        tell(found=dict(results=await zc.get([worker.result() for worker in workers]), mine=mine.bytes_received,
             theirs=[each.bytes_received for each in theirs], copied=[each.bytes_copied for each in (mine, *theirs)]))
zc.run(main())
"""
        with hosts.program(source, head.record.address) as program:
            found = program.told("found", 60.0)
            assert found["results"] == [0, 2 << 20]
            assert found["mine"] == 0
            assert found["theirs"] == [1 << 20, 1 << 20]  # the part of the other one
            assert found["copied"] == [0, 0, 0]
            assert program.status() == 0


@pytest.mark.slow
async def test_without_a_runtime() -> None:
    async with zc.init():
        workers = await spawned(1)
    with pytest.raises(zc.NotInitialized):
        await zc.shuffle(workers, "partition", "merge")
