"""References, streams and spawns that were not awaited: each use of one as its value says what to write."""

from __future__ import annotations

import asyncio
import copy
import math
import operator
import pprint
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.actors import Plain
from zcactor.api.unawaited import Unawaited

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMISE = r"promise of Plain\.echo, not its result: await it, or use \.result\(\) in a plain method or a thread$"
STREAM = r"stream of Counting\.upto: iterate it by 'async for item in \.\.\.'"


@zc.actor
class Counting:
    def upto(self, n: int) -> Any:
        yield from range(n)


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=2, log_to_driver=False) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ref() -> Any:
    return (await Plain.spawn()).echo(7)


def unpacked(x: Any) -> None:
    _, _ = x


def added(x: Any) -> None:
    x += 1


USES: dict[str, Callable[[Any], Any]] = {
    "truth": bool,
    "if": lambda x: 1 if x else 2,
    "not": operator.not_,
    "len": len,
    "list": list,
    "loop": lambda x: [0 for _ in x],
    "unpack": unpacked,
    "in": lambda x: 1 in x,
    "sum": sum,
    "max": max,
    "index": lambda x: x[0],
    "key": lambda x: x["a"],
    "slice": lambda x: x[1:2],
    "set item": lambda x: operator.setitem(x, 0, 1),
    "add": lambda x: x + 1,
    "add from the right": lambda x: 1 + x,
    "add in place": added,
    "matmul": lambda x: np.ones((2, 2)) @ x,
    "power": lambda x: 2**x,
    "divmod": lambda x: divmod(x, 2),
    "or": lambda x: x | 1,
    "negative": operator.neg,
    "less": lambda x: x < 1,
    "greater": lambda x: x > 1,
    "float": float,
    "int": int,
    "sqrt": math.sqrt,
    "range": range,
    "round": round,
    "format": lambda x: f"{x:.3f}",
    "asarray": np.asarray,
    "array of two": lambda x: np.array([x, x]),
    "array of objects": lambda x: np.array([x], dtype=object),
    "array and reference": lambda x: np.ones(3) + x,
    "scalar and reference": lambda x: np.float64(1) * x,
    "function of NumPy": np.sqrt,
    "mean": np.mean,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_reference_that_is_used_as_its_value(ref: Any, use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=PROMISE):
        use(ref)


async def test_an_attribute_of_the_value(ref: Any) -> None:
    with pytest.raises(AttributeError, match=f"^no attribute 'shape': this is the {PROMISE}") as caught:
        ref.shape.count(1)
    assert caught.value.name == "shape"
    assert not hasattr(ref, "__array_interface__")
    with pytest.raises(AttributeError, match="'ObjectRef' object has no attribute '_private'"):
        ref._private


async def test_a_reference_to_a_value_that_was_put() -> None:
    with pytest.raises(TypeError, match=r"promise of put\(int\), not its result: await it"):
        zc.put(1) + 1  # type: ignore[operator]


async def test_a_reference_is_still_an_object_like_others(ref: Any) -> None:
    @dataclass
    class Holding:
        ref: Any

    assert ref is not None and ref == ref and ref != 7 and ref in [0, ref] and [0, ref].index(ref) == 1
    assert {ref: 1}[ref] == 1 and len({ref, ref}) == 1
    assert Holding(ref) == Holding(ref) != Holding(7)
    assert not isinstance(ref, Iterable)
    assert f"{ref}" == str(ref) == repr(ref) == pprint.pformat(ref)
    held = np.empty(2, object)
    held[0] = ref
    assert held[0] is ref
    with pytest.raises(TypeError, match="travels inside calls"):
        copy.copy(ref)
    watched = mock.Mock(return_value=ref)
    watched(ref)
    watched.assert_called_once_with(ref)
    assert await watched() == 7


async def test_the_ways_of_asyncio(ref: Any) -> None:
    assert list(await asyncio.gather(ref, asyncio.shield(ref))) == [7, 7]
    assert await asyncio.wait_for(asyncio.ensure_future(ref), 20) == 7
    done, _ = await asyncio.wait([asyncio.create_task(ref)])
    assert [task.result() for task in done] == [7]


async def test_a_stream_that_is_taken_for_a_list_or_a_result() -> None:
    stream: Any = (await Counting.spawn()).upto(3)
    uses: list[Callable[[], Any]] = [
        lambda: len(stream), lambda: stream[0], lambda: bool(stream)
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(TypeError, match=STREAM):
            use()
    with pytest.raises(TypeError, match=STREAM):
        await stream
    with pytest.raises(AttributeError, match=STREAM):
        stream.append(1)
    assert [item async for item in stream] == [0, 1, 2]


async def test_a_spawn_that_is_taken_for_a_handle() -> None:
    for made, name in (
        (Plain.spawn(), r"Plain\.spawn"),
        (Plain.options(num_cpus=0).spawn(), r"Plain\.spawn"),
        (zc.spawn(Plain), r"zc\.spawn"),
    ):
        spawning: Any = made
        with pytest.raises(AttributeError, match=rf"not awaited, not a handle: write 'handle = await {name}\(...\)'"):
            spawning.echo(1)
        with pytest.raises(TypeError, match="a spawn that was not awaited"):
            copy.copy(spawning)
        handle = await spawning
        assert await handle.echo(1) == 1


async def test_a_spawn_is_a_coroutine_for_asyncio() -> None:
    task = asyncio.create_task(Plain.spawn())
    assert "Task pending" in repr(task)
    (handle,) = await asyncio.gather(task)
    assert await handle.echo(2) == 2
    closed = Plain.spawn()
    closed.close()  # the spawn goes on
    assert await (await closed).echo(3) == 3


async def test_asyncio_shows_tasks_of_references() -> None:
    handle: Any = await Plain.spawn()
    reference = handle.echo(1)
    task = asyncio.ensure_future(reference)
    assert "Task pending" in repr(task)
    assert await task == 1
    for used in (reference, Plain.spawn()):
        with pytest.raises(TypeError, match="await"):
            bool(used)


async def test_a_condition_waits_for_no_reference() -> None:
    handle: Any = await Plain.spawn()
    condition = asyncio.Condition()
    async with condition:
        with pytest.raises(TypeError, match="await it"):
            await condition.wait_for(lambda: handle.echo(False))


async def test_a_method_that_returns_a_spawn_without_awaiting_it() -> None:
    class Making:
        def make(self) -> Any:
            return Plain.spawn()

    making = await zc.spawn(Making)  # held, as its end would be that of the actor that it owns
    made = await making.make()
    assert await made.echo(3) == 3


async def test_an_object_for_a_later_value_has_to_give_advice() -> None:
    class Silent(Unawaited, Coroutine[Any, Any, Any]):
        __slots__ = ()

        def send(self, value: Any) -> Any: ...

        def throw(self, *error: Any) -> Any: ...

        def close(self) -> None: ...

        def __await__(self) -> Any: ...

    with pytest.raises(TypeError, match="abstract.*_advice"):
        Silent()  # type: ignore[abstract]

    class Telling(Silent):
        __slots__ = ()

        def _advice(self) -> str:
            return "await it"

    telling = Telling()
    assert not hasattr(telling, "__dict__")
    with pytest.raises(TypeError, match="^await it$"):
        bool(telling)


async def test_init_that_is_not_awaited() -> None:
    with pytest.warns(RuntimeWarning, match="zc.init.. has started nothing yet: write 'with zc.init") as told:
        zc.init()
    assert told[0].filename == __file__
    made: Any = zc.init()
    assert "'async with zc.init():' or 'await zc.init()'" in repr(made)
    with pytest.raises(AttributeError, match="no attribute 'node_id': zc.init.. has started nothing"):
        made.node_id
    with pytest.raises(zc.AlreadyInitialized, match="go on with that, without zc.init"):
        await made
