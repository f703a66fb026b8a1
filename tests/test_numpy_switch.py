"""Whether NumPy allocates in the store: the rule of the context, the switch, and the runtime's beginning and end."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.actors_numpy import COUNT, computer, copied

pytestmark = pytest.mark.slow


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
    def used() -> int:
        return zc.stats().store_used

    held: list[Any] = []
    for number in range(3):
        async with zc.init():
            actor = await computer()
            assert used() == 0
            array = np.full(COUNT, float(number))
            assert zc.in_store(array) and used() >= array.nbytes
            _, result = await actor.sync(array, array)
            held += [array, result]
            assert await copied(actor) == [0, 0]
            for index, old in enumerate(held):
                assert (old == [0, 0, 1, 2, 2, 4][index]).all()
            if number:
                # The memory of an earlier runtime belongs to no store: passing it is a copy.
                before = held[0]
                _, result = await actor.sync(before, before)
                assert not result.any() and zc.stats().bytes_copied == before.nbytes
        after = np.ones(COUNT)
        assert not zc.in_store(after) and after.all()
        assert not zc.in_store(array)
        array.flags.writeable = True  # it owns its memory, and no reader of it is left
        array += 0
        with pytest.raises(zc.NotInitialized), zc.numpy_allocator(True):
            pass
    grown = held[0].copy()
    grown.resize(3 * COUNT, refcheck=False)
    assert not grown.any()
    del held, before, array, old, result
    gc.collect()
