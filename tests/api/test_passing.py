"""References passed on: as arguments, inside arguments, as results; pending, ready, failed and cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tests.api.test_future as awaiting
import zcactor as zc
from tests.actors import Plain, Probe
from zcactor.api.remote_actor import RemoteActor
from zcactor.process.context import current

pytestmark = pytest.mark.asyncio(loop_scope="module")

node, actors = awaiting.node, awaiting.actors


async def test_references_as_arguments_are_resolved(actors: Any) -> None:
    plain, _, _ = actors
    ready = plain.echo(1)
    await ready
    pending = plain.echo("x")
    array = np.arange(100_000.0)
    big = plain.echo(array)
    assert await plain.types(ready, pending, zc.put([3]), big, key=pending, other=zc.put(2.5)) == [
        "int",
        "str",
        "list",
        "ndarray",
        "str",
        "float",
    ]
    np.testing.assert_array_equal(await plain.echo(big), array)
    assert await plain.echo(named=zc.put(3)) == {"named": 3}


@pytest.mark.parametrize("value", [None, True, -3, 2.5, "text", b"bytes"])
async def test_a_finished_scalar_goes_as_its_value(actors: Any, value: Any) -> None:
    plain, _, _ = actors
    ref = plain.echo(value)
    await ref
    marshaller = current().marshaller
    assert marshaller.pack_call((1, ref), {"key": ref}) == marshaller.pack_call((1, value), {"key": value})
    assert await plain.echo(ref) == value


async def test_calls_with_finished_scalars_take_the_short_way(actors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _, _ = actors
    number, text = plain.echo(1), plain.echo("x")
    await zc.get([number, text])

    def refuse(*_: object) -> None:
        raise AssertionError("the call was not sent by the native path")

    monkeypatch.setattr(RemoteActor, "call", refuse)
    assert await plain.types(number, 2, text) == ["int", "int", "str"]
    with pytest.raises(AssertionError, match="not sent by the native path"):
        plain.types(number, [text])


async def test_a_reference_beyond_the_limit_of_pending_calls_is_refused(actors: Any) -> None:
    plain, _, _ = actors
    number = plain.echo(1)
    await number
    probe: Any = await Probe.options(max_pending_calls=1).spawn()
    late = probe.hold("door")
    with pytest.raises(zc.MailboxFull):
        probe.hold(number)
    await zc.kill(probe)
    with pytest.raises(zc.ActorDied):
        await late


async def test_nested_references_stay_references(actors: Any) -> None:
    plain, caller, _ = actors
    ref = plain.echo("inside")
    assert await plain.types([ref]) == ["list"]
    assert await caller.value([ref]) == "inside"
    assert await caller.value([zc.put("put")]) == "put"
    (back,) = await plain.echo([ref])
    assert isinstance(back, zc.ObjectRef)
    assert await back == "inside"
    box = await plain.echo({"k": (ref, ref)})
    assert await box["k"][0] == await box["k"][1] == "inside"


async def test_references_are_pickled_by_nobody_else(actors: Any) -> None:
    plain, _, _ = actors
    ref = plain.echo(1)
    with pytest.raises(TypeError, match="an ObjectRef travels inside calls.*await it and pickle the value"):
        pickle.dumps(ref)
    assert await ref == 1


async def test_pending_references_travel(actors: Any) -> None:
    _, first, second = actors
    probe: Any = await Probe.spawn()
    late = probe.ahold("late")
    results = [
        first.value([late]),  # nested, awaited inside
        first.give_to(second, [late]),  # A to B to C
        first.call(second, "value", [late]),
        second.keep(late),  # resolved for the callee
    ]
    await probe.until("late began")
    await probe.open("late")
    async with asyncio.timeout(20):
        assert await zc.get(results) == ["late", "late", "late", 1]
    assert await second.kept() == ["late"]
    await second.drop()


async def test_a_reference_as_a_result(actors: Any) -> None:
    plain, first, second = actors
    (ref,) = await first.start(plain, "echo", "from afar")
    assert isinstance(ref, zc.ObjectRef)
    assert await ref == "from afar"
    assert await ref == "from afar"
    (ref,) = await first.start(plain, "fail", "from afar")
    for _ in range(2):
        with pytest.raises(ValueError, match="from afar"):
            await ref
    (ref,) = await first.start(plain, "echo", np.ones(50_000))
    assert (await second.call(plain, "types", ref)) == ["ndarray"]
    np.testing.assert_array_equal(await ref, np.ones(50_000))

    class Returner:
        async def plain_ref(self, handle: Any) -> Any:
            return handle.echo("unwrapped")

    returner: Any = await zc.spawn(Returner)
    inner = await returner.plain_ref(plain)
    assert isinstance(inner, zc.ObjectRef)
    assert await inner == "unwrapped"


async def test_failed_references_as_arguments(actors: Any) -> None:
    plain, first, _ = actors
    known = plain.fail("known")
    await zc.wait([known])
    for ref in (known, plain.fail("not yet")):
        with pytest.raises(ValueError, match="known|not yet"):
            await plain.echo(ref)
        with pytest.raises(ValueError, match="known|not yet"):
            await plain.echo(key=ref)
        with pytest.raises(ValueError, match="known|not yet"):
            await first.call(plain, "echo", ref)
        with pytest.raises(ValueError, match="known|not yet"):
            await first.value([ref])
    probe: Any = await Probe.spawn()
    with pytest.raises(ValueError, match="known"):
        async for _ in probe.acount(known):
            pass
    with pytest.raises(ValueError, match="streamed"):
        async for _ in probe.count(plain.fail("streamed")):
            pass
    gone: Any = await Probe.spawn()
    lost = gone.ahold("k")
    await gone.until("k began")
    task = asyncio.create_task(first.value([lost]))
    await zc.kill(gone)
    with pytest.raises(zc.ActorDied):
        await task
    with pytest.raises(zc.ActorDied):
        await plain.echo(lost)


async def test_a_failed_argument_is_let_go_without_a_collection(actors: Any) -> None:
    plain, *_ = actors
    enabled = gc.isenabled()
    gc.disable()
    try:
        known = plain.fail("known")
        await zc.wait([known])
        kept = weakref.ref(known._call)
        passed = plain.echo(known)
        assert passed.done()
        del known, passed
        assert kept() is None, "the error of the second call, which nobody has awaited, does not hold the first"
    finally:
        if enabled:
            gc.enable()


async def test_cancelled_references_as_arguments(actors: Any) -> None:
    plain, first, _ = actors
    probe: Any = await Probe.spawn()
    late = probe.ahold("late")
    waiting = plain.echo(late)
    inside = first.value([late])
    await probe.until("late began")
    late.cancel()
    for ref in (waiting, inside, plain.echo(late)):
        async with asyncio.timeout(20):
            with pytest.raises((asyncio.CancelledError, zc.RemoteError)):
                await ref


async def test_a_pending_argument_holds_its_place_in_a_sync_actor(actors: Any) -> None:
    probe: Any = await Probe.spawn()
    plain: Any = await Plain.spawn()
    late = probe.ahold("late")
    refs = [plain.echo(1), plain.echo(late), plain.echo(2), plain.echo(key=3)]
    await refs[0]
    await probe.until("late began")
    other: Any = actors[1]
    await other.call(plain, "echo", "another caller")  # not held up
    await probe.open("late")
    assert await zc.get(refs) == [1, "late", 2, {"key": 3}]
    assert [args for args, _ in await plain.seen()] == [(1,), ("another caller",), ("late",), (2,), ()]


async def test_a_pending_argument_steps_aside_in_an_async_actor() -> None:
    probe: Any = await Probe.spawn()
    async_actor: Any = await Probe.spawn()
    late = probe.ahold("late")
    waiting = [async_actor.anote(late), async_actor.note(late)]
    assert await async_actor.anote("overtakes") == "overtakes"
    assert await async_actor.note("overtakes too") == "overtakes too"
    await probe.open("late")
    assert await zc.get(waiting) == ["late", "late"]
    assert await async_actor.entries() == ["overtakes", "overtakes too", "late", "late"]


# ---------------------------------------------------------------- small arrays of arguments


class Writer:
    """An actor that writes to its arguments, and returns their sums from before."""

    def __init__(self, array: Any = None) -> None:
        self.given = None if array is None else self.write(array)

    def write(self, *values: Any, **named: Any) -> list[float]:
        seen = []
        for value in [*values, *named.values()]:
            array = value
            while not isinstance(array, np.ndarray):
                array = array["a"] if isinstance(array, dict) else array.array if isinstance(array, Held) else array[0]
            seen.append(float(array.sum()))
            array[...] = 2
        return seen

    async def awrite(self, *values: Any) -> list[float]:
        return self.write(*values)

    def result(self, array: Any) -> Any:
        return array

    def first(self) -> Any:
        return self.given


@dataclass
class Held:
    array: Any


SMALL: dict[str, Any] = {
    "whole": lambda n: np.ones(n, np.uint8),
    "in a list": lambda n: [np.ones(n, np.uint8)],
    "in a dict": lambda n: {"a": np.ones(n, np.uint8)},
    "in an object": lambda n: Held(np.ones(n, np.uint8)),
    "strided": lambda n: np.ones(2 * n, np.uint8)[::2],
    "transposed": lambda n: np.ones((1, n), np.uint8).T,
    "masked": lambda n: np.ma.masked_array(np.ones(n, np.uint8)),
    "frozen": lambda n: zc.freeze(np.ones(n, np.uint8)),
}


@pytest.mark.parametrize("how", SMALL)
async def test_small_arrays_of_arguments_can_be_written_to(how: str) -> None:
    writer: Any = await zc.spawn(Writer, SMALL[how](7))
    assert await writer.first() == [7]
    limit = (await zc.explain(writer)).eager_limit
    for n in (0, 1, limit - 1):
        value = SMALL[how](n)
        for method in (writer.write, writer.awrite):
            assert await method(value) == [n]
            assert await method(value, value) == [n, n], "what the first call wrote to is not the caller's"
        assert await writer.write(3 * [value], named=value) == [n, n]
    for n in (limit, limit + 1):
        with pytest.raises(ValueError, match="read-only"):
            await writer.write(SMALL[how](n))


def nested(kind: type, depth: int) -> Any:
    """Containers of one kind within each other."""
    value: Any = {} if kind is dict else kind()
    for _ in range(depth):
        value = {"in": value} if kind is dict else kind([value])
    return value


class Deep:
    """An object that arrives as containers within each other, deeper than a pickle can describe."""

    def __init__(self, kind: type, depth: int) -> None:
        self.made = kind, depth

    def __reduce__(self) -> Any:
        return nested, self.made


@zc.actor
class Nesting:
    """An actor that makes deep values, and measures them."""

    def make(self, kind: str, depth: int) -> Any:
        return Deep({"list": list, "tuple": tuple, "dict": dict}[kind], depth)

    def depth(self, value: Any) -> int:
        depth = 0
        while value:
            (value,) = value.values() if type(value) is dict else value
            depth += 1
        return depth


async def test_an_awaited_result_that_holds_itself_is_passed_on(actors: Any) -> None:
    plain, _, _ = actors
    for array in ((), (np.ones(3),)):
        value: list[Any] = [{}, *array]
        value[0]["in"] = (value,)
        ref = plain.echo(value)
        for _ in range(2):
            got = await ref
            assert got[0]["in"][0] is got
            again = await plain.echo(ref)
            assert again[0]["in"][0] is again


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
async def test_an_awaited_result_of_any_depth_is_passed_on(kind: str) -> None:
    nesting: Any = await Nesting.spawn()
    ref = nesting.make(kind, 100_000)
    await ref
    assert await nesting.depth(ref) == 100_000
    async with zc.graph() as graph:
        graph.output(nesting.depth.bind(ref))
    run = await graph.compile()
    assert await run() == 100_000
    await run.close()


async def test_results_and_values_of_references_are_read_only_at_any_size() -> None:
    """All awaits of a reference get the same object."""
    writer: Any = await zc.spawn(Writer)
    for ref in (writer.result(np.ones(3)), writer.result([np.ones(3)]), zc.put(np.ones(3)), zc.put(Held(np.ones(3)))):
        got = await ref
        while not isinstance(got, np.ndarray):
            got = got.array if isinstance(got, Held) else got[0]
        with pytest.raises(ValueError, match="read-only"):
            got += 1
        for _ in range(2):  # the value is fetched, or comes in the call
            with contextlib.suppress(ValueError):
                assert await writer.write(ref) == [3]
        assert float(got.sum()) == 3
