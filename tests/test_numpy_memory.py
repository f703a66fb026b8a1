"""What NumPy computes lies in the store: in drivers and actors, shared and moved, forked, killed and ended."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import random
import select
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.runtime.programs import Program, until
from zcactor.context import current
from zcactor.marshal.arrays import root_of
from zcactor.marshal.move import is_moved

pytestmark = pytest.mark.slow

COUNT = 50_000
MIB = 1 << 20


def library(name: str) -> ModuleType:
    """The module, or a skip that says what is missing."""
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install {name}")  # type: ignore[no-any-return]


@zc.actor
class Computer:
    """Computes, in every kind of method. Results come with whether they lie in this process's store."""

    def __init__(self) -> None:
        self.first = np.arange(COUNT) * 2.0
        self.kept: list[Any] = []

    def sync(self, a: Any, b: Any) -> tuple[bool, Any]:
        """In the actor's thread."""
        result = a + b
        return zc.in_store(result), result

    async def awaiting(self, a: Any, b: Any) -> tuple[bool, Any]:
        """On the loop, across an await."""
        await asyncio.sleep(0)
        result = a + b
        return zc.in_store(result), result

    @zc.method(inline=True)
    def inline(self, a: Any, b: Any) -> tuple[bool, Any]:
        """On the loop."""
        result = a + b
        return zc.in_store(result), result

    def items(self, a: Any, b: Any) -> Iterator[tuple[bool, Any]]:
        """In the thread, one after the other."""
        for _ in range(3):
            result = a + b
            yield zc.in_store(result), result

    async def aitems(self, a: Any, b: Any) -> AsyncIterator[tuple[bool, Any]]:
        """On the loop, one after the other."""
        for _ in range(3):
            await asyncio.sleep(0)
            result = a + b
            yield zc.in_store(result), result

    async def in_a_task(self, a: Any, b: Any) -> tuple[bool, Any]:
        """In a task of the method's own."""
        return await asyncio.create_task(self.awaiting(a, b))

    def in_a_thread(self, a: Any, b: Any) -> tuple[bool, bool]:
        """Whether results of a thread of the program's own lie in the store, without and with the switch."""
        found: list[bool] = []

        def work() -> None:
            found.append(zc.in_store(a + b))
            with zc.numpy_allocator(True):
                found.append(zc.in_store(a + b))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return found[0], found[1]

    def switched_off(self, a: Any, b: Any) -> tuple[bool, Any]:
        """Without the store."""
        with zc.numpy_allocator(False):
            result = a + b
        return zc.in_store(result), result

    def initial(self) -> tuple[bool, Any]:
        """What the constructor made."""
        return zc.in_store(self.first), self.first

    def keep(self, value: Any) -> tuple[bool, int, Any]:
        """Keep a value; whether it can be written to, where it lies, and what its owner calls the block."""
        self.kept.append(value)
        return value.flags.writeable, value.ctypes.data, getattr(root_of(value), "object_id", None)

    def drop(self) -> None:
        """Forget what was kept."""
        self.kept.clear()

    def last(self) -> Any:
        """What was kept last."""
        return self.kept[-1]

    def give(self) -> Any:
        """What was kept last, handed over."""
        value = self.kept.pop()
        return zc.move(value)

    def fill(self, number: float) -> None:
        """Write to what was kept last."""
        self.kept[-1][...] = number

    def make(self, nbytes: int) -> Any:
        """An array of that size."""
        array = np.empty(nbytes // 8)
        array.fill(7)
        return array

    async def pass_on(self, array: Any, others: list[Any]) -> Any:
        """Give `array` to the first of the others, which passes it on; give back what comes back."""
        return await others[0].pass_on(array, others[1:]) if others else array

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def fill_up(self, count: int) -> tuple[int, float, bool, bool]:
        """Allocate more than the store holds; how many lie there, a sum over all, and what is so afterwards."""
        arrays = [np.full(MIB // 8, float(index)) for index in range(count)]
        grown = np.arange(MIB // 8)
        grown.resize(MIB // 4, refcheck=False)
        total = float(sum(array.sum() for array in arrays)) / (MIB // 8)
        inside = sum(map(zc.in_store, arrays))
        full = not zc.in_store(np.zeros(MIB // 8)) and not zc.in_store(np.ones(MIB // 8) + 1)
        arrays.clear()
        return inside, total, full, zc.in_store(np.ones(MIB // 8))

    def frame(self, frame: Any) -> tuple[Any, int]:
        """Twice the frame, and bytes copied here."""
        return frame * 2, zc.stats().bytes_copied

    def fitted(self, x: Any, y: Any) -> tuple[Any, Any, Any, int]:
        """A model, its predictions, scaled data, and bytes copied here."""
        linear = library("sklearn.linear_model")
        scaled = library("sklearn.preprocessing").StandardScaler().fit_transform(x)
        model = linear.LinearRegression().fit(x, y)
        return model, model.predict(x), scaled, zc.stats().bytes_copied


async def computer() -> Any:
    """The handle of a new actor, untyped."""
    return await zc.spawn(Computer)


def block_of(array: Any) -> int:
    """The id of the block around an array in this process's store."""
    store = current().store
    block = store.block_at(*store.bounds(array))
    assert block is not None
    return block.id


async def copied(*actors: Any) -> list[int]:
    """Bytes copied, in this process and in those of the actors."""
    return [zc.stats().bytes_copied, *[(await zc.stats(actor)).bytes_copied for actor in actors]]


# ---------------------------------------------------------------- where results lie


async def test_results_of_every_kind_of_method_lie_in_the_store() -> None:
    async with zc.init():
        actor = await computer()
        a, b = np.arange(COUNT) * 1.0, np.ones(COUNT) * 2
        assert zc.in_store(a) and zc.in_store(b) and zc.in_store(a[5:])
        expected = a + b
        for name in ("sync", "awaiting", "inline", "in_a_task"):
            inside, result = await getattr(actor, name)(a, b)
            assert inside and zc.in_store(result), name
            np.testing.assert_array_equal(result, expected)
        for name in ("items", "aitems"):
            count = 0
            async for inside, result in getattr(actor, name)(a, b):
                assert inside and zc.in_store(result), name
                np.testing.assert_array_equal(result, expected)
                count += 1
            assert count == 3
        inside, result = await actor.initial()
        assert inside and result[-1] == 2 * COUNT - 2
        assert await actor.in_a_thread(a, b) == (False, True)
        # What was computed of what was received is passed on.
        inside, again = await actor.sync(result, result + a)
        assert inside and again[10] == 50
        assert await copied(actor) == [0, 0]

        inside, result = await actor.switched_off(a, b)
        assert not inside
        np.testing.assert_array_equal(result, expected)
        assert await copied(actor) == [0, 8 * COUNT]


async def test_small_arrays_and_objects_are_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCACTOR_STORE_MIN_NBYTES", str(1 << 20))
    async with zc.init():
        actor = await computer()
        below, above = np.ones((1 << 17) - 1), np.ones(1 << 17)
        assert not zc.in_store(below) and zc.in_store(above)
        inside, result = await actor.sync(above, above)  # the setting is the actors', too
        assert inside and result[-1] == 2
        inside, result = await actor.sync(below, below)
        assert not inside and result[-1] == 2
        objects = np.array([str(index) for index in range(1 << 17)], object)
        assert zc.in_store(objects)
        got = await actor.pass_on(objects, [])
        assert got.dtype == object and got[-1] == str((1 << 17) - 1)


async def test_the_rule_of_the_context() -> None:
    async def task() -> bool:
        await asyncio.sleep(0)
        return zc.in_store(np.ones(COUNT))

    def here() -> bool:
        return zc.in_store(np.ones(COUNT))

    threads: list[bool] = []

    def thread() -> None:
        threads.append(here())
        with zc.numpy_allocator(True):
            threads.append(here())
        threads.append(here())

    async with zc.init():
        assert here() and await asyncio.create_task(task())
        assert await asyncio.to_thread(here), "to_thread runs in a copy of the context"
        with zc.numpy_allocator(False):
            inside = asyncio.create_task(task())
            assert not here()
            context = contextvars.copy_context()
            with zc.numpy_allocator(True):
                assert here() and await asyncio.create_task(task())
                with zc.numpy_allocator(True), zc.numpy_allocator(False):
                    assert not here()
                assert here()
            assert not here()
            with zc.numpy_allocator(False):
                assert not here()
            assert not here()
        assert not await inside, "the task was made inside the block"
        assert here() and not context.run(here)
        with pytest.raises(ZeroDivisionError), zc.numpy_allocator(False):
            1 / 0
        assert here()
        own = threading.Thread(target=thread)
        own.start()
        own.join()
        assert threads == [False, True, False]


async def test_the_switch_refuses_what_is_wrong() -> None:
    def wrong() -> None:
        for value in (1, None, "yes", np.True_):
            with pytest.raises(TypeError, match="True or False"):
                zc.numpy_allocator(value)  # type: ignore[arg-type]

    wrong()
    with pytest.raises(zc.NotInitialized), zc.numpy_allocator(True):
        pass
    with zc.numpy_allocator(False):
        assert not zc.in_store(np.ones(COUNT))
    async with zc.init():
        wrong()
        assert zc.in_store(np.ones(COUNT))


async def test_off_after_the_end_and_on_again() -> None:
    async def used() -> int:
        return zc.stats().store_used

    held: list[Any] = []
    for number in range(3):
        async with zc.init():
            actor = await computer()
            assert await used() == 0
            array = np.full(COUNT, float(number))
            assert zc.in_store(array) and await used() >= array.nbytes
            _, result = await actor.sync(array, array)
            held += [array, result]
            assert await copied(actor) == [0, 0]
            for index, old in enumerate(held):
                assert (old == [0, 0, 1, 2, 2, 4][index]).all()
            if number:
                # The memory of an earlier runtime is nobody's store any more: passing it is a copy.
                before = held[0]
                _, result = await actor.sync(before, before)
                assert not result.any() and zc.stats().bytes_copied == before.nbytes
        after = np.ones(COUNT)
        assert not zc.in_store(after) and after.all()
        assert not zc.in_store(array)
        array.flags.writeable = True  # it owns its memory, which nobody else looks at any more
        array += 0
        with pytest.raises(zc.NotInitialized), zc.numpy_allocator(True):
            pass
    grown = held[0].copy()
    grown.resize(3 * COUNT, refcheck=False)
    assert not grown.any()
    del held, before, array, old, result
    gc.collect()


async def test_a_full_store_lets_user_code_go_on() -> None:
    async with zc.init(store_capacity=8 * MIB):
        actor = await computer()
        inside, total, full, again = await actor.fill_up(30)
        assert 5 <= inside <= 8
        assert (total, full, again) == (sum(range(30)), True, True)
        ok, result = await actor.sync(np.ones(COUNT), np.ones(COUNT))
        assert ok and (result == 2).all()
        arrays = [np.full(MIB // 8, float(index)) for index in range(30)]
        assert [float(array[0]) for array in arrays] == list(range(30))
        with pytest.raises(zc.OutOfMemory):
            await actor.keep(arrays[-1])
        del arrays
        assert (await actor.keep(np.ones(MIB // 8)))[0] is False


# ---------------------------------------------------------------- other libraries' results


async def test_pandas_results_are_not_copied() -> None:
    pandas = library("pandas")
    async with zc.init():
        actor = await computer()
        frame = pandas.DataFrame({name: np.arange(COUNT) * 1.0 for name in "abc"}) + 1
        result, there = await actor.frame(frame)
        pandas.testing.assert_frame_equal(result, frame * 2)
        assert there == 0
        joined = pandas.concat([frame, result], ignore_index=True).sort_values("a", ignore_index=True)
        twice, there = await actor.frame(joined)
        pandas.testing.assert_frame_equal(twice, joined * 2)
        sums = frame.groupby(frame["a"] // 2).sum()
        pandas.testing.assert_frame_equal((await actor.frame(sums))[0], sums * 2)
        assert "argument outside the store" not in zc.stats().copies
        assert "argument outside the store" not in (await zc.stats(actor)).copies
        assert await copied(actor) == [0, 0]


async def test_scikit_learn_results_are_not_copied() -> None:
    library("sklearn")
    async with zc.init():
        actor = await computer()
        random_numbers = np.random.default_rng(0)
        x = random_numbers.normal(size=(20_000, 5))
        y = x @ np.arange(5.0)
        assert zc.in_store(x) and zc.in_store(y)
        model, predicted, scaled, there = await actor.fitted(x, y)
        assert there == 0
        np.testing.assert_allclose(model.coef_, np.arange(5.0), atol=1e-9)
        np.testing.assert_allclose(predicted, y, atol=1e-9)
        np.testing.assert_allclose(scaled.std(axis=0), 1)
        assert await copied(actor) == [0, 0]


# ---------------------------------------------------------------- sharing and moving


async def test_what_was_passed_is_read_only_and_passed_again_as_the_same_object() -> None:
    async with zc.init():
        one, other = await computer(), await computer()
        array = np.arange(COUNT) * 1.0
        used = zc.stats().store_used
        writable, _, _ = await one.keep(array)
        assert not writable
        number = block_of(array)
        for each in (array, array[3:], array.T, array.view("u8")):
            with pytest.raises(ValueError, match="read-only"):
                each[0] = 1
        assert (await one.last())[5] == 5

        # Again, to the same and to another actor, whole and in part: one object.
        where = (await one.keep(array))[1]
        assert (await one.keep(array[100:]))[1] == where + 800
        assert (await one.keep(array[::-2]))[1] == where + 8 * (COUNT - 1)
        await other.keep(array.reshape(100, -1).T[3:])
        assert block_of(array) == block_of(array[7:]) == number
        assert zc.stats().store_used == used
        assert await copied(one, other) == [0, 0, 0]

        # Back at its owner it is the same memory.
        back = await one.last()
        assert np.shares_memory(back, array) and not back.flags.writeable
        del back

        # Also when nobody has a lease in between.
        await one.drop()
        await other.drop()
        async with asyncio.timeout(20):
            while zc.stats().leases:
                await one.pid()
                await other.pid()
        assert zc.stats().store_used == used
        assert (await one.keep(array))[1] == where and block_of(array) == number

        # Freed with the last holder, here or there.
        del array, each
        assert zc.stats().store_used == used
        await one.drop()
        await other.drop()
        async with asyncio.timeout(20):
            while zc.stats().store_used or zc.stats().leases:
                gc.collect()
                await one.pid()
                await other.pid()

        # Its memory is used again, and is another object.
        again = np.zeros(COUNT)
        await one.keep(again)
        assert block_of(again) != number
        assert not (await one.last()).any()


async def test_a_shared_array_cannot_be_resized_by_its_owner() -> None:
    """NumPy refuses it where a weak reference to the array exists, which sharing leaves there. If it did not, the
    memory would still be the receivers' (tests/objectstore/test_heap.py)."""
    async with zc.init():
        actor = await computer()
        array = np.arange(COUNT) * 1.0
        await actor.keep(array)
        for nbytes in (2 * COUNT, COUNT // 2):
            with pytest.raises(ValueError, match="cannot resize"):
                array.resize(nbytes, refcheck=False)
        other = array.copy()
        other.resize(2 * COUNT, refcheck=False)
        other[:] = -1
        assert (await actor.last()).tolist() == array.tolist() == list(range(COUNT))
        assert await copied(actor) == [0, 0]


async def test_temporaries_are_not_computed_into_what_was_passed() -> None:
    """NumPy reuses the memory of temporaries; what others look at is none, whoever has the only name for it."""
    async with zc.init():
        actor = await computer()
        boxes = [np.arange(COUNT) * 1.0]
        await actor.keep(boxes[0])
        result = boxes.pop() + 1.0 + boxes_of(2.0)
        assert result[1] == 4
        assert (await actor.last()).tolist() == list(range(COUNT))
        assert await copied(actor) == [0, 0]


def boxes_of(value: float) -> Any:
    """A fresh array that nobody else has a name for."""
    return np.full(COUNT, value)


async def test_moving_what_numpy_allocated() -> None:
    async with zc.init():
        one, other = await computer(), await computer()
        array = np.arange(COUNT) + 0.5
        used = zc.stats().store_used
        writable, _, _ = await one.keep(zc.move(array))
        assert writable
        assert is_moved(array)
        for use in (lambda: array + 1, lambda: array.sum(), lambda: zc.move(array)):
            with pytest.raises(ValueError, match="handed over|moved before"):
                use()
        await one.fill(3)
        assert zc.stats().store_used == used

        # On to another actor and back to us, with write access all the way.
        given = await one.give()
        assert given.flags.writeable and (given == 3).all()
        given[0] = 4
        assert (await other.keep(zc.move(given)))[0]
        await other.fill(5)
        assert (await other.last() == 5).all()
        assert await copied(one, other) == [0, 0, 0]

        # What is shared, or has another name or view, is not taken from those who have it.
        shared = np.ones(COUNT)
        await one.keep(shared)
        with pytest.raises(ValueError, match="read-only"):
            await one.keep(zc.move(shared))
        viewed = np.ones(COUNT)
        view = viewed[:]
        assert (await one.keep(zc.move(viewed)))[0]
        await one.fill(9)
        assert (view == 1).all()
        assert zc.stats().bytes_copied == COUNT * 8, "the one that somebody else looks at"


def memory(pid: int) -> tuple[int, int]:
    """Bytes of memory of a process, its part of what is shared included, and its minor page faults up to now."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    pss = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return pss, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


async def test_a_large_array_through_three_actors_takes_no_memory() -> None:
    nbytes = 256 * MIB
    async with zc.init(store_capacity=512 * MIB):
        actors = [await computer() for _ in range(3)]
        for _ in range(3):  # connections, mappings and caches
            warm = await actors[0].make(MIB)
            await actors[0].pass_on(warm, actors[1:])
        pids = [os.getpid(), *[await actor.pid() for actor in actors]]
        large = await actors[0].make(nbytes)
        gc.collect()
        before = [memory(pid) for pid in pids]
        back = await actors[0].pass_on(large, actors[1:])
        after = [memory(pid) for pid in pids]
        assert np.shares_memory(back, large)
        for (pss, faults), (pss_after, faults_after) in zip(before, after, strict=True):
            assert pss_after - pss < 2 * MIB, "of 256 MiB"
            assert faults_after - faults < 500, "of 65,536 pages"
        assert await copied(*actors) == [0, 0, 0, 0]
        assert back[0] == back[-1] == 7


# ---------------------------------------------------------------- ends and forks


@pytest.mark.parametrize("way", ["os.fork", "multiprocessing"])
@pytest.mark.parametrize("where", ["driver", "actor"])
def test_a_forked_child_has_arrays_of_its_own(way: str, where: str) -> None:
    source = """
def child(array, view):
    assert (array == 3).all() and (view == 3).all(), "reads"
    array[:] = 4; view[0] = 5
    assert array[1] == 4 and array[5] == 5, "writes"
    for number in range(20):
        made = np.full(300_000, number) + array[0]
        zeros = np.zeros(2_000_000)
        assert not zeros.any() and made[-1] == number + 4, "allocates"
        zeros[:] = 1
    grown = np.arange(100_000); grown.resize(500_000, refcheck=False)
    assert grown[99_999] == 99_999 and not grown[100_000:].any()
    array.resize(10, refcheck=False)  # the child frees what the parent still uses
    assert array.tolist() == [4] * 5 + [5] + [4] * 4
    assert not zc.in_store(made)

def forked(way, *arrays):
    if way == "multiprocessing":
        import multiprocessing
        process = multiprocessing.get_context("fork").Process(target=child, args=arrays)
        process.start(); process.join()
        return process.exitcode
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child(*arrays)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def work(way):
    array = np.full(1_000_000, 3.0)
    view, kept = array[5:], np.arange(900_000)
    assert zc.in_store(array)
    used = zc.stats().store_used
    outcome = forked(way, array, view)
    assert (array == 3).all() and (view == 3).all() and (np.arange(900_000) == kept).all()
    assert zc.stats().store_used == used
    result = array + 1
    assert zc.in_store(result)
    return outcome, result

class Forks:
    def work(self, way): return work(way)

async def main():
    async with zc.init():
        actor = await zc.spawn(Forks)
        for _ in range(2):
            outcome, result = await actor.work(WAY) if WHERE == "actor" else work(WAY)
            tell(outcome=outcome, right=bool((result == 4).all()), copied=zc.stats().bytes_copied)
        tell(copied=(await zc.stats(actor)).bytes_copied)
WAY, WHERE = {way!r}, {where!r}
zc.run(main())
""".replace("{way!r}", repr(way)).replace("{where!r}", repr(where))
    with Program(source) as program:
        for _ in range(2):
            assert program.told("outcome") == 0
        assert program.told("copied") == 0
        assert program.status() == 0
        program.assert_clean()
        assert program.stderr() == ""


def test_a_child_forked_after_the_end_finalizes_its_interpreter() -> None:
    source = """
async def main():
    global kept
    async with zc.init():
        kept = [np.full(1_000_000, number) for number in range(4)]
zc.run(main())
pid = os.fork()
if pid == 0:
    kept[0][:] = 7
    del kept[1]
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
tell(status=status, right=[bool((array == number).all()) for number, array in enumerate(kept)])
"""
    with Program(source) as program:
        assert program.told("right") == [True] * 4
        assert program.status() == 0
        program.assert_clean()
        assert program.stderr() == ""


LIVE = """
import contextvars, weakref
class Cycle:
    def __init__(self): self.me, self.array = self, np.ones(100_000)
class Late:
    def __init__(self): self.array = np.ones(200_000)
    def __del__(self): self.array = self.array + 1 if np is not None and self.array is not None else None
variable = contextvars.ContextVar("variable")
local = threading.local()
class Maker:
    def __init__(self): self.held = [np.ones(70_000) for _ in range(10)]; self.late = Late()
    def make(self): return np.ones(100_000) * 2
async def main():
    global kept, cycle, late
    {begin}
        actor = await zc.spawn(Maker)
        kept = [np.arange(100_000) * number for number in range(5)]
        kept.append(np.array([object()] * 100_000))
        cycle, late = Cycle(), Late()
        variable.set(np.ones(90_000)); local.array = np.ones(80_000)
        given = await actor.make()
        {keep}
        view = kept[0][3:].T; sys.modules["held"] = view
        assert zc.in_store(kept[1]) and zc.in_store(given)
    tell(ready=1)
"""


NO_SHUTDOWN = "await zc.init()\n    if 1:"


@pytest.mark.parametrize("begin", ["async with zc.init():", NO_SHUTDOWN], ids=["shutdown", "none"])
@pytest.mark.parametrize("run", ["zc.run(main())", "asyncio.run(main())"])
@pytest.mark.parametrize("after", ["", "late.array = late.array * 2; np.zeros(10**6)\n", "sys.exit(3)\n"])
def test_the_interpreter_ends_with_arrays_alive(begin: str, run: str, after: str) -> None:
    # A received array that is alive without a shutdown is a case of its own: below.
    keep = "kept.append(given)" if "async with" in begin else "pass"
    with Program(f"{LIVE.format(begin=begin, keep=keep)}\n{run}\n{after}") as program:
        program.told("ready")
        assert program.status() == (3 if "exit" in after else 0)
        program.assert_clean()
        assert program.stderr() == ""


def test_the_interpreter_ends_with_a_received_array_and_no_shutdown() -> None:
    source = """
class Maker:
    def make(self): return np.ones(100_000) * 2
async def main():
    global kept, actor
    await zc.init()
    actor = await zc.spawn(Maker)  # it lives, so that its connection does
    kept = await actor.make()
asyncio.run(main())
kept = None
tell(ready=1)
"""
    with Program(source) as program:
        program.told("ready")
        assert program.status() == 0
        program.assert_clean()
        assert program.stderr() == ""


ALLOCATING = """
class Allocator:
    def arena(self):
        from zcactor.context import current
        return os.fstat(current().store.arena.fd).st_ino
    def work(self, seed):
        tell(working=os.getpid())
        allocate(seed)
    def result(self, array): return array + 1
def allocate(seed):
    random = np.random.default_rng(seed)
    held = []
    while True:
        held.append(np.full(int(random.integers(10_000, 3_000_000)), 1.0) + np.zeros(1))
        if len(held) > 5: del held[int(random.integers(5))]
async def main():
    async with zc.init(store_capacity=1 << 28):
        actor, other = await zc.spawn(Allocator), await zc.spawn(Allocator)
        kept = await other.result(np.ones(1_000_000))
        from zcactor.context import current
        tell(arenas=[await actor.arena(), await other.arena(), os.fstat(current().store.arena.fd).st_ino])
        task = actor.work(SEED)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.to_thread(allocate, SEED + 1))
                await task
        except* zc.ActorDied:
            os._exit(0)
zc.run(main())
"""


def mapped(inodes: list[int]) -> list[str]:
    """Where arenas of these inodes are still mapped or open, in any process."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                lines = (directory / "maps").read_text().splitlines()
            except OSError:
                continue
            found += [line for line in lines if "memfd:zcactor-arena" in line and int(line.split()[4]) in inodes]
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("victim", ["driver", "actor", "group"])
def test_killed_while_it_allocates_it_leaves_nothing(seed: int, victim: str) -> None:
    with Program(ALLOCATING.replace("SEED", str(seed))) as program:
        inodes = program.told("arenas")
        assert len(set(inodes)) == 3 and mapped(inodes)
        worker = program.told("working")
        # No wait for anything: the moment is to be any.
        select.select([], [], [], random.Random(f"{seed} {victim}").uniform(0, 0.03))
        if victim == "group":
            os.killpg(program.pid, signal.SIGKILL)
        else:
            os.kill(program.pid if victim == "driver" else worker, signal.SIGKILL)
        assert program.status() == (0 if victim == "actor" else -signal.SIGKILL)
        program.assert_clean()
        until(lambda: not mapped(inodes), "the arenas are mapped nowhere, so their memory is back")
