"""Results of NumPy lie in the store, in drivers and actors, and are shared and moved without a copy."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.actors_numpy import COUNT, MIB, computer, copied, library
from zcactor.marshal.arrays import byte_bounds
from zcactor.marshal.move import is_moved
from zcactor.process.context import current

pytestmark = pytest.mark.slow


def block_of(array: Any) -> int:
    """The id of the block around an array in this process's store."""
    store = current().store
    block = store.block_at(*byte_bounds(array))
    assert block is not None
    return block.id


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
        # A result that was computed from a received array is passed on.
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
        inside, result = await actor.sync(above, above)  # the setting holds for actors, too
        assert inside and result[-1] == 2
        inside, result = await actor.sync(below, below)
        assert not inside and result[-1] == 2
        objects = np.array([str(index) for index in range(1 << 17)], object)
        assert zc.in_store(objects)
        got = await actor.pass_on(objects, [])
        assert got.dtype == object and got[-1] == str((1 << 17) - 1)


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

        # Passed again, to the same and to another actor, whole and in part, it stays one object.
        where = (await one.keep(array))[1]
        assert (await one.keep(array[100:]))[1] == where + 800
        assert (await one.keep(array[::-2]))[1] == where + 8 * (COUNT - 1)
        await other.keep(array.reshape(100, -1).T[3:])
        assert block_of(array) == block_of(array[7:]) == number
        assert zc.stats().store_used == used
        assert await copied(one, other) == [0, 0, 0]

        # Back at its owner it has the same memory.
        back = await one.last()
        assert np.shares_memory(back, array) and not back.flags.writeable
        del back

        # The same holds when there was no lease in between.
        await one.drop()
        await other.drop()
        async with asyncio.timeout(20):
            while zc.stats().leases:
                await one.pid()
                await other.pid()
        assert zc.stats().store_used == used
        assert (await one.keep(array))[1] == where and block_of(array) == number

        # The memory is freed with the last holder, in either process.
        del array, each
        assert zc.stats().store_used == used
        await one.drop()
        await other.drop()
        async with asyncio.timeout(20):
            while zc.stats().store_used or zc.stats().leases:
                gc.collect()
                await one.pid()
                await other.pid()

        # The memory is used again, as another object.
        again = np.zeros(COUNT)
        await one.keep(again)
        assert block_of(again) != number
        assert not (await one.last()).any()


async def test_a_shared_array_cannot_be_resized_by_its_owner() -> None:
    """NumPy refuses to resize an array that has a weak reference, and sharing leaves one.

    Without the refusal the memory would still be the receivers' (tests/objectstore/test_heap_handler.py).
    """
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
    """NumPy reuses the memory of temporaries; a shared array is no temporary, even when its last name is gone."""
    async with zc.init():
        actor = await computer()
        boxes = [np.arange(COUNT) * 1.0]
        await actor.keep(boxes[0])
        result = boxes.pop() + 1.0 + fresh(2.0)
        assert result[1] == 4
        assert (await actor.last()).tolist() == list(range(COUNT))
        assert await copied(actor) == [0, 0]


def fresh(value: float) -> Any:
    """A fresh array without another name."""
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

        # Handed on to another actor and back to the driver, it stays writable all the way.
        given = await one.give()
        assert given.flags.writeable and (given == 3).all()
        given[0] = 4
        assert (await other.keep(zc.move(given)))[0]
        await other.fill(5)
        assert (await other.last() == 5).all()
        assert await copied(one, other) == [0, 0, 0]

        # A move takes no array that is shared or has another name or view.
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
    """Bytes of memory of a process, with its part of shared memory, and its minor page faults up to now."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    pss = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return pss, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


async def test_a_large_array_through_three_actors_takes_no_memory() -> None:
    nbytes = 256 * MIB
    async with zc.init(store_capacity=512 * MIB):
        actors = [await computer() for _ in range(3)]
        for _ in range(3):  # make connections, mappings and caches before measuring
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
