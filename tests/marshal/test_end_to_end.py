"""Arrays between a driver and actors: sharing, handing over, and the moment when their bytes come back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.marshal.actors import Doubler, Keeper, MyError, Scaled
from tests.marshal.wire import address, assert_same
from zcactor.api.remote_actor import RemoteActor
from zcactor.rpc.session import Session

COUNT = 100_000
"""Elements of an array that goes by reference."""


async def keepers(count: int, **options: Any) -> list[Any]:
    """Spawn actors; their handles are untyped, because these tests are not about types."""
    made: Any = Keeper
    return list(await asyncio.gather(*(made.options(**options).spawn() for _ in range(count))))


async def until(condition: Callable[[], bool], actor: Any) -> None:
    """Wait until messages to this process have an effect, and call `actor` meanwhile: releases ride on its answers."""
    async with asyncio.timeout(20):
        while not condition():
            gc.collect()
            await actor.ping()


def settled(used: int = 0, leases: int = 0) -> Callable[[], bool]:
    """A condition: the store and the leases are back to these figures."""
    return lambda: (zc.stats().store_used, zc.stats().leases) == (used, leases)


@pytest.mark.slow
async def test_sharing() -> None:
    async with zc.init():
        one, other = await keepers(2)
        await until(settled(), one)

        array = zc.full((100, COUNT // 100), 2.0)
        used = zc.stats().store_used
        assert not (await one.keep(array))[0]
        # The array is read-only here from now on, and so are new views of it.
        for each in (array, array[1:], array.T):
            with pytest.raises(ValueError, match="read-only"):
                each[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                each.flags.writeable = True
        # The array is read-only there; an actor that wants to write takes x.copy().
        with pytest.raises(ValueError, match="read-only") as caught:
            await one.write_to(array)
        assert isinstance(caught.value, zc.RemoteError)
        with pytest.raises(ValueError, match="WRITEABLE"):
            await one.make_writable(array)
        assert await one.copy_and_write(zc.ones(COUNT)) == 2

        # The same array sent again, whole or in part, to the same or another actor, is one object.
        await asyncio.gather(one.keep(array), other.keep(array[5:, ::2]))
        assert zc.stats().store_used == used
        assert zc.stats().bytes_copied == 0

        # Back at its owner it has the same memory.
        back = await other.get()
        assert np.shares_memory(back, array)
        assert address(back) == address(array[5:])
        assert not back.flags.writeable
        del back

        # The memory is freed with the last view anywhere: one actor keeps a small part.
        await one.narrow()
        await other.drop()
        del array, each
        await until(settled(used, 1), one)
        assert (await one.get())[0, 0] == 2
        await one.drop()
        await until(settled(), one)

        # The owner's own view is the last.
        array = zc.ones(COUNT)
        await one.keep(array)
        await one.drop()
        await until(settled(used, 0), one)
        del array
        assert zc.stats().store_used == 0


@pytest.mark.slow
async def test_third_process_and_killed_holders() -> None:
    async with zc.init():
        one, other, third = await keepers(3)
        array = zc.ones(COUNT)
        used = zc.stats().store_used

        # From here to one, and on to other, which maps this process's memory itself.
        assert not (await one.pass_on(other, array))[0]
        del array
        await until(settled(used, 1), one)
        assert await other.first() == 1
        # And back to this process, by way of third.
        await other.pass_on(third, await other.get())
        assert address(await third.get()) == address(await other.get())
        await other.drop()
        await until(settled(used, 1), third)
        await zc.kill(third)
        await until(settled(), one)

        # An array that an actor owns: the driver and other hold it.
        made = await one.make(COUNT, 3.0)
        await other.keep(made)
        held = await zc.stats(one)
        assert held.store_used >= COUNT * 8
        assert held.leases == 2
        await zc.kill(other)

        async def released(leases: int) -> None:
            async with asyncio.timeout(20):
                while (await zc.stats(one)).leases != leases:
                    gc.collect()

        await released(1)
        assert made[0] == 3
        del made
        await released(0)
        assert (await zc.stats(one)).store_used == 0

        # The owner dies: a mapped array stays, and is passed on.
        made = await one.make(COUNT, 4.0)
        await zc.kill(one)
        assert made.sum() == 4 * COUNT
        (again,) = await keepers(1)
        await again.keep(made)
        assert (await again.get()).sum() == 4 * COUNT


@pytest.mark.slow
async def test_moving() -> None:
    async with zc.init():
        one, other = await keepers(2)
        await until(settled(), one)

        array = zc.ones(COUNT)
        where = address(array)
        assert (await one.keep(zc.move(array)))[0]
        for use in (lambda: array + 1, lambda: float(array[0]), lambda: np.asarray(array, float), lambda: array.sum()):
            with pytest.raises(ValueError, match=r"zc\.move"):
                use()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        for value in (array, [array, {1}]):
            with pytest.raises(ValueError, match=r"zc\.move"):
                other.keep(value)
        with pytest.raises(ValueError, match="moved before"):
            zc.move(array)
        await one.fill(5)

        # Handed over to other, then back to its owner; no step copies the array.
        assert (await one.move_on(other))[0]
        assert await other.first() == 5
        await other.fill(6)
        back = await other.give()
        assert back.flags.writeable
        assert address(back) == where
        assert back[-1] == 6
        back[:] = 7
        assert [(await zc.stats(each)).bytes_copied for each in (one, other)] == [0, 0]
        assert zc.stats().bytes_copied == 0

        # Shared from here, the array cannot be handed over by any process.
        await other.keep(back)
        with pytest.raises(ValueError, match=r"shared before.*x\.copy\(\)"):
            one.keep(zc.move(back))
        with pytest.raises(ValueError, match=r"read-only here.*x\.copy\(\)"):
            await other.give_twice()
        view = back[1:]
        del array, value, back, view  # the dead array goes, too: other objects may look at its memory
        await other.drop()
        await until(settled(), other)

        array = zc.ones(COUNT)
        view = array[1:]
        with pytest.raises(ValueError, match="other views"):
            one.keep(zc.move(array))
        del view
        assert (await one.keep(zc.move(array)))[0]

        # Small arrays, and arrays outside the store, which are copied once.
        small, outside = np.arange(3.0), np.arange(float(COUNT))
        before = zc.stats().bytes_copied
        assert (await one.keep(zc.move(small)))[0]
        assert zc.stats().bytes_copied == before
        assert (await other.keep(zc.move(outside)))[0]
        assert zc.stats().bytes_copied <= before + COUNT * 8
        for moved in (small, outside):
            with pytest.raises(ValueError, match=r"zc\.move"):
                moved * 2
        assert (await other.get())[-1] == COUNT - 1

        # Results, items and constructor arguments.
        made = await one.new(COUNT, 2.0)
        made += 1
        assert made[0] == 3
        values = []
        async for item in one.items(5):
            item += 1
            values.append(float(item[0]))
        assert values == [1, 2, 3, 4, 5]
        first = zc.full(COUNT, 8.0)
        third: Any = await zc.spawn(Keeper, zc.move(first))
        await third.fill(9)
        assert await third.first() == 9
        with pytest.raises(ValueError, match=r"zc\.move"):
            first + 1


@pytest.mark.slow
async def test_moved_result_with_several_holders_is_shared() -> None:
    async with zc.init():
        one, other, third = await keepers(3)
        # Not awaited here: with several holders, none may write.
        ref = one.new(COUNT, 2.0)
        assert [each[0] for each in await asyncio.gather(other.keep(ref), third.keep(ref))] == [False, False]
        assert not (await ref).flags.writeable
        # Awaited here first, and written to: the written array is passed on, and is shared from then on.
        ref = one.new(COUNT, 2.0)
        here = await ref
        here[0] = 5
        assert not (await other.keep(ref))[0]
        assert await other.first() == 5
        with pytest.raises(ValueError, match="read-only"):
            here[0] = 6


@pytest.mark.slow
async def test_call_that_is_refused_hands_nothing_over() -> None:
    async with zc.init():
        (one,) = await keepers(1, max_pending_calls=1)
        array = zc.ones(COUNT)
        call = one.ping()
        with pytest.raises(zc.MailboxFull):
            one.keep(zc.move(array))
        with pytest.raises(TypeError):
            one.keep(zc.move(array), 5)
        await call
        array[0] = 2
        assert (await one.keep(zc.move(array)))[0]


def arrays() -> Iterator[Any]:
    """One array of each kind that is handed over in a way of its own."""
    yield zc.full(COUNT, 1.0)
    yield zc.full((100, COUNT // 100), 1.0)[:, 1:]
    yield np.ones(COUNT)
    yield np.ones(4)
    with zc.numpy_allocator(enabled=False):
        yield np.ones(COUNT)


def assert_given_back(array: Any) -> None:
    """Check that the array can be read, written to, and handed over again."""
    assert array.sum() == array.size
    array[...] = 2
    array[...] = 1
    zc.move(array)


@pytest.mark.slow
async def test_arrays_of_a_call_that_did_not_run_are_given_back() -> None:
    async with zc.init():
        dead, living = await keepers(2)
        await dead.ping()
        await zc.stop(dead)
        await living.ping()
        await until(settled(), living)
        for array in arrays():
            for value in (zc.move(array), [zc.move(array), {1}]):  # pickled, too
                ref = dead.keep(value)
                if not ref.done():
                    with pytest.raises(ValueError, match=r"zc\.move"):
                        array.sum()
                with pytest.raises(zc.ActorDied) as died:
                    await ref
                assert not died.value.maybe_executed
                assert_given_back(array)
                del value, ref, died
            assert (await living.keep(zc.move(array)))[0]
            await living.drop()
        del array
        await until(settled(), living)


@pytest.mark.slow
async def test_arrays_of_a_call_that_ends_before_it_is_sent_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, connect = asyncio.Event(), RemoteActor._open

    async def later(self: RemoteActor) -> None:
        await gate.wait()
        await connect(self)

    monkeypatch.setattr(RemoteActor, "_open", later)
    async with zc.init():
        (one,) = await keepers(1)
        marks = []
        for array in arrays():
            mark = zc.move(array)
            ref = one.keep(mark)
            with pytest.raises(ValueError, match=r"zc\.move"):
                array.sum()
            ref.cancel()
            assert_given_back(array)
            with pytest.raises(zc.DeadlineExceeded):
                await one.keep.options(timeout=1e-3)(mark)
            assert_given_back(array)
            marks.append(mark)
        gate.set()
        for mark in marks:
            assert (await one.keep(mark))[0], "the mark is what it was, too"


@pytest.mark.slow
async def test_arrays_of_a_call_that_cannot_be_sent_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise zc.ObjectLost("injected")

    async with zc.init():
        (one,) = await keepers(1)
        await one.ping()
        with monkeypatch.context() as patched:
            patched.setattr(Session, "send_call", fails)
            for array in arrays():
                with pytest.raises(zc.ObjectLost, match="injected"):
                    await one.keep(zc.move(array))  # raises at the call, or from the await where the call is queued
                assert_given_back(array)
        assert (await one.keep(zc.move(array)))[0]


@pytest.mark.slow
async def test_arrays_of_calls_beyond_the_credit_are_given_back() -> None:
    async with zc.init():
        (one,) = await keepers(1)
        await one.ping()
        (record,) = await zc.actors()
        os.kill(record.pid, signal.SIGSTOP)  # no credit comes back from here on
        arrays = [np.ones(4) for _ in range(2000)]
        refs = [one.keep(zc.move(array)) for array in arrays]
        await zc.kill(one)
        outcomes = await asyncio.gather(*refs, return_exceptions=True)
        ran = [not isinstance(outcome, zc.ActorDied) or outcome.maybe_executed for outcome in outcomes]
        assert False in ran
        for array, handed_over in zip(arrays, ran, strict=True):
            if handed_over:
                with pytest.raises(ValueError, match=r"zc\.move"):
                    array.sum()
            else:
                assert_given_back(array)


@pytest.mark.slow
async def test_retried_call_gets_the_arrays_as_they_were(tmp_path: Path) -> None:
    """Each run gets copies of its own, which are counted: the second run does not read the first one's writes."""
    async with zc.init():
        actor: Any = await Doubler.options(max_restarts=3, max_retries=3).spawn()
        handed_over = list(arrays())
        sizes = [array.size for array in handed_over]
        first, *others = map(zc.move, handed_over)
        ref = actor.double([first, {"pickled": (others, {1})}], tmp_path / "runs", 2)
        for array in handed_over:
            with pytest.raises(ValueError, match=r"zc\.move"):
                array.sum()
        assert await ref == sizes
        assert len((tmp_path / "runs").read_bytes()) == 3
        copied = zc.stats().copies["moved argument of a retried call"]
        assert copied.count == 3 * 4, "of each run, the arrays that go by reference"

        # Arrays of a call that was never sent are given back.
        await zc.kill(actor)
        array = np.ones(COUNT)
        with pytest.raises(zc.ActorDied):
            await actor.double([zc.move(array), {"pickled": ([], {1})}], tmp_path / "runs", 0)
        assert_given_back(array)


@pytest.mark.slow
async def test_restarted_constructor_gets_the_arrays_as_they_were() -> None:
    """Each life gets copies of its own, which are counted: the second life does not read the first one's writes."""
    async with zc.init():
        made: Any = Scaled
        handed_over = list(arrays())
        sizes = [array.size for array in handed_over]
        first, *others = map(zc.move, handed_over)
        actor = await made.options(max_restarts=2).spawn(first, {"pickled": (others, {1})})
        for array in handed_over:
            with pytest.raises(ValueError, match=r"zc\.move"):
                array.sum()
        for _ in range(2):
            assert await actor.as_they_came() == (sizes, 4), "those that go by reference"
            with pytest.raises(zc.ActorUnavailable):
                await actor.die()
            async with asyncio.timeout(20):
                while True:
                    with contextlib.suppress(zc.ActorUnavailable):
                        assert await actor.as_they_came() == (sizes, 4)
                        break


@pytest.mark.slow
async def test_arrays_of_an_older_runtime() -> None:
    async with zc.init():
        (one,) = await keepers(1)
        old = [zc.full(COUNT, 5.0), await one.make(COUNT, 5.0), await one.new(COUNT, 5.0)]
    async with zc.init():
        (one,) = await keepers(1)
        new = np.full(COUNT, 42.0)
        await one.keep(new)
        for array in old:
            assert not zc.in_store(array)
            await one.keep(array)
            assert await one.first() == 5
            if array.flags.writeable:
                assert (await one.keep(zc.move(array)))[0]
                assert await one.first() == 5
        assert new[0] == 42


@pytest.mark.slow
async def test_moved_array_is_shared_with_its_owner() -> None:
    async with zc.init():
        (one,) = await keepers(1)
        await one.keep(zc.move(zc.ones(COUNT)))
        back = await one.get()
        with pytest.raises(ValueError, match="read-only"):
            back[0] = 1
        with pytest.raises(ValueError, match="read-only"):
            await one.fill(3)


@pytest.mark.slow
async def test_same_process() -> None:
    async with zc.init():
        one, other = await keepers(2, process="shared")
        array = zc.ones(COUNT)
        await one.keep(array)
        assert (await one.pass_on(one, array))[0] is False
        await asyncio.gather(one.pass_on(other, array), other.ping())
        assert await other.first() == 1
        await one.keep(zc.move(zc.full(COUNT, 3.0)))
        assert (await one.move_on(other))[0]
        await other.fill(4)
        assert (await other.give())[0] == 4


@pytest.mark.slow
async def test_out_of_memory() -> None:
    capacity = 1 << 20
    async with zc.init(store_capacity=capacity):
        (one,) = await keepers(1)
        held = zc.ones(capacity // 16)
        with pytest.raises(zc.OutOfMemory) as caught:
            zc.empty(capacity // 8)
        error = caught.value
        assert (error.requested, error.used, error.capacity) == (capacity, held.nbytes, capacity)
        assert 0 < error.largest_free <= capacity - held.nbytes
        # An argument does not fit: the call raises, and sends nothing.
        calls = zc.stats().calls
        for argument in (np.zeros(capacity), [np.zeros(capacity), {1}], "x" * (2 * capacity)):
            with pytest.raises(zc.OutOfMemory):
                one.describe(argument)
        assert zc.stats().calls == calls
        # A result does not fit the actor's store: the caller gets the error.
        with pytest.raises(zc.OutOfMemory) as there:
            await one.huge(2 * capacity)
        assert (there.value.requested, there.value.capacity) == (2 * capacity, capacity)
        # Both processes live on.
        assert not (await one.keep(held))[0]
        assert await one.first() == 1
        assert (await one.huge(capacity // 2)).nbytes == capacity // 2


@pytest.mark.slow
async def test_a_failure_gets_through_a_store_that_is_full() -> None:
    class Needy(Exception):
        def __init__(self, text: str, number: int) -> None:
            super().__init__(text, number)

    class Full:
        def __init__(self) -> None:
            self.kept: list[Any] = []

        def fill(self) -> None:
            for nbytes in (1 << 16, 1 << 12):
                with contextlib.suppress(zc.OutOfMemory):
                    while True:
                        self.kept.append(zc.empty(nbytes, np.uint8))

        def fail(self) -> None:
            raise Needy("x" * 50_000, 3)

        async def afail(self) -> None:
            self.fail()

        def items(self) -> Iterator[int]:
            yield 1
            self.fail()

    async with zc.init(store_capacity=1 << 20), asyncio.timeout(20):
        full: Any = await zc.spawn(Full)
        await full.fill()
        for call in (full.fail, full.afail):
            with pytest.raises(zc.RemoteError, match="Needy") as caught:
                await call()
            assert caught.value.message.startswith("('xxx")
            assert "OutOfMemory" in caught.value.remote_traceback
        with pytest.raises(zc.RemoteError, match="Needy"):
            [item async for item in full.items()]


@pytest.mark.slow
async def test_many_parts_in_one_message() -> None:
    async with zc.init():
        (one,) = await keepers(1)
        arrays = [zc.full(8192, float(index)) for index in range(1000)]
        assert await one.describe(arrays) == ("list", (1000, sum(range(1000))))
        assert zc.stats().bytes_copied == 0
        assert await one.describe(tuple(arrays)) == ("tuple", (1000, sum(range(1000))))
        back = await one.echo({"set": {1}, 1.5: arrays})  # pickled, as a third message
        assert [address(array) for array in back[1.5]] == [address(array) for array in arrays]
        del arrays, back
        await until(settled(), one)


@pytest.mark.slow
async def test_streams_of_arrays() -> None:
    async with zc.init():
        (one,) = await keepers(1)
        values = [array async for array in one.stream(20)]
        assert [float(array[0]) for array in values] == [float(index) for index in range(20)]
        assert not any(array.flags.writeable for array in values)


@pytest.mark.slow
async def test_container_may_change_after_the_call() -> None:
    async with zc.init():
        (one,) = await keepers(1)
        held: list[Any] = [zc.full(COUNT, 1.0), np.ones(3)]
        call = one.describe(held)
        held[1][0] = 100
        held.append(1)
        assert await call == ("list", (2, 2.0))


@pytest.mark.slow
async def test_exception_class_of_the_program() -> None:
    async with zc.init():
        (one,) = await keepers(1)
        with pytest.raises(MyError) as caught:
            await one.fail()
        assert caught.value.args == ("mine", 5)
        assert isinstance(caught.value, zc.RemoteError)


@pytest.mark.slow
async def test_values_end_to_end() -> None:
    async with zc.init():
        (one,) = await keepers(1)
        for value in (
            zc.full((3, 4, 5000), 1, "i2")[:, ::-2], np.zeros(30_000, [("a", "i4"), ("b", "M8[s]")]), np.zeros(0),
            np.float32(3), np.array(["a", "b"] * 10_000), np.broadcast_to(np.float16(3), (100, 10_000)),
            zc.zeros(20_000, [("x", "f4"), ("y", "u1", (3,))])["y"],
        ):  # fmt: skip
            await one.keep(np.asarray(value))
            assert_same(await one.get(), np.asarray(value))
