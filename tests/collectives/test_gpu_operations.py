"""Groups with arrays on GPUs: each result, to the bit, over fake GPUs and a stand-in for NCCL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.gpu_ranks import SIZE, gpu_ranks, running
from tests.collectives.nccl_stand_in import folded
from tests.collectives.test_folding import bits, drawn

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with running() as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(node: zc.Runtime) -> AsyncIterator[tuple[zc.Group, list[Any]]]:
    async with gpu_ranks() as made:
        yield made


async def everywhere(actors: list[Any], method: str, *args: Any, inputs: Any, **kwargs: Any) -> list[Any]:
    """Call a method of all actors at once, each with an input of its own behind `args`."""
    calls = [getattr(a, method)(*args, x, **kwargs) for a, x in zip(actors, inputs, strict=True)]
    return await zc.get(calls, timeout=60)


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.uint64])
async def test_allreduce(three: tuple[zc.Group, list[Any]], dtype: Any, op: str) -> None:
    if op == "mean" and np.dtype(dtype).kind in "iu":
        return
    group, actors = three
    rng = np.random.default_rng(1)
    inputs = [drawn(rng, dtype, 600).reshape(20, 30) for _ in range(SIZE)]
    for name, values, readonly in await everywhere(actors, "call", group, "allreduce", inputs=inputs, op=op):
        assert name == "zcactor.DeviceArray" and readonly
        assert (values.dtype, values.shape) == (inputs[0].dtype, (20, 30))
        assert bits(values) == bits(folded(op, inputs))


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("op", ["sum", "mean"])
async def test_complex_numbers_are_added_part_by_part(three: tuple[zc.Group, list[Any]], dtype: Any, op: str) -> None:
    group, actors = three
    rng = np.random.default_rng(2)
    inputs = [drawn(rng, dtype, 99) for _ in range(SIZE)]
    wanted = folded(op, [x.view(f"f{x.itemsize // 2}") for x in inputs])
    for _, values, _ in await everywhere(actors, "call", group, "allreduce", inputs=inputs, op=op):
        assert bits(values) == bits(wanted)


@pytest.mark.parametrize("op", ["min", "max"])
async def test_bools(three: tuple[zc.Group, list[Any]], op: str) -> None:
    group, actors = three
    inputs = [np.arange(12) % (rank + 2) == 0 for rank in range(SIZE)]
    wanted = np.logical_and.reduce(inputs) if op == "min" else np.logical_or.reduce(inputs)
    for _, values, _ in await everywhere(actors, "call", group, "allreduce", inputs=inputs, op=op):
        assert values.dtype == np.bool_ and np.array_equal(values, wanted)


@pytest.mark.parametrize("method", ["call", "call_plain"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (70_000,)])
async def test_any_shape(three: tuple[zc.Group, list[Any]], method: str, shape: tuple[int, ...]) -> None:
    group, actors = three
    inputs = [np.full(shape, rank + 1, "f4") for rank in range(SIZE)]
    for _, values, _ in await everywhere(actors, method, group, "allreduce", inputs=inputs):
        assert values.shape == shape and np.array_equal(values, np.full(shape, 6, "f4"))


async def test_inputs_may_have_any_strides(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    inputs = [np.arange(60, dtype="i4").reshape(6, 10) * (rank + 1) for rank in range(SIZE)]
    for values, after in await everywhere(actors, "turned", group, inputs=inputs):
        assert np.array_equal(values, inputs[0].T[::-1, ::2] * 6) and np.array_equal(after, np.full((6, 10), 7))


@pytest.mark.parametrize("kind", ["itself", "another", "overlapping", "gaps", "cupy"])
async def test_out_is_the_result(three: tuple[zc.Group, list[Any]], kind: str) -> None:
    group, actors = three
    inputs = [np.arange(100, dtype="f4") + rank for rank in range(SIZE)]
    for is_itself, values, writable in await everywhere(actors, "into", group, kind, inputs=inputs):
        assert is_itself and writable
        assert np.array_equal(values, np.arange(100, dtype="f4") * 3 + 3)


@pytest.mark.parametrize(("rows", "shards"), [(9, None), (7, None), (9, [0, 7, 2]), (2, None), (0, None)])
async def test_reduce_scatter(three: tuple[zc.Group, list[Any]], rows: int, shards: Any) -> None:
    group, actors = three
    inputs = [np.arange(rows * 4, dtype="f4").reshape(rows, 4) * (rank + 1) for rank in range(SIZE)]
    found = await everywhere(actors, "call", group, "reduce_scatter", inputs=inputs, shards=shards)
    whole = folded("sum", inputs)
    pieces = np.array_split(whole, SIZE) if shards is None else np.split(whole, np.cumsum(shards)[:-1])
    for (_, values, readonly), wanted in zip(found, pieces, strict=True):
        assert not readonly and values.shape == wanted.shape and bits(values) == bits(wanted)


@pytest.mark.parametrize("lengths", [(4, 4, 4), (2, 0, 5), (0, 0, 0), (0, 0, 3)])
async def test_allgather(three: tuple[zc.Group, list[Any]], lengths: tuple[int, ...]) -> None:
    group, actors = three
    inputs = [np.arange(n * 3, dtype="i2").reshape(n, 3) + 100 * rank for rank, n in enumerate(lengths)]
    for _, values, readonly in await everywhere(actors, "call", group, "allgather", inputs=inputs):
        assert readonly and np.array_equal(values, np.concatenate(inputs))


async def test_allgather_of_arrays_that_differ(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    inputs: list[Any] = [np.arange(10), np.ones((2, 3), np.float16), np.zeros(0, "c8")]
    for result, _, _ in await everywhere(actors, "call", group, "allgather", inputs=inputs, concat=False):
        for (name, values, readonly), wanted in zip(result, inputs, strict=True):
            assert name == "zcactor.DeviceArray" and readonly
            assert values.dtype == wanted.dtype and np.array_equal(values, wanted)


@pytest.mark.parametrize("root", [0, 2])
async def test_broadcast(three: tuple[zc.Group, list[Any]], root: int) -> None:
    group, actors = three
    x = np.arange(1000, dtype="i8").reshape(10, 100)
    inputs = [x if rank == root else None for rank in range(SIZE)]
    for name, values, readonly in await everywhere(actors, "call", group, "broadcast", inputs=inputs, root=root):
        assert name == "zcactor.DeviceArray" and readonly and np.array_equal(values, x)


async def test_broadcast_of_an_array_on_the_host_stays_as_it_was(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    for value in await zc.get([a.from_host(group, np.arange(9) if i == 1 else None) for i, a in enumerate(actors)]):
        assert type(value) is np.ndarray and np.array_equal(value, np.arange(9))


async def test_alltoall(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    parts = [[np.full(1 + source + 10 * to, 10 * source + to, "f8") for to in range(SIZE)] for source in range(SIZE)]
    parts[1][2] = np.zeros(0, "u1")
    await everywhere(actors, "call", group, "allreduce", inputs=[np.ones(3, "f4")] * SIZE)  # a communicator is there
    before = [(await actor.made())[0][0].count("send") for actor in actors]
    for to, found in enumerate(await everywhere(actors, "exchange", group, inputs=parts)):
        for source, (name, values, _) in enumerate(found):
            assert name == "zcactor.DeviceArray" and values.dtype == parts[source][to].dtype
            assert np.array_equal(values, parts[source][to])
    after = [(await actor.made())[0][0].count("send") for actor in actors]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 1, 2]


async def test_alltoall_goes_by_reference_where_a_rank_passes_something_else(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    parts = [[np.full(9, 10 * source + to) for to in range(SIZE)] for source in range(SIZE)]
    sides = zip(actors, parts, [True, False, True], strict=True)
    before = [await actor.made() for actor in actors]
    found = await zc.get([actor.exchange(group, mine, on_gpu) for actor, mine, on_gpu in sides])
    for to, received in enumerate(found):
        assert [int(values[0]) for _, values, _ in received] == [10 * source + to for source in range(SIZE)]
    assert [await actor.made() for actor in actors] == before


async def test_results_are_of_the_library_of_the_inputs(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    x = np.arange(30, dtype="f4")
    for operation, wanted in (("allreduce", x * 3), ("reduce_scatter", None), ("allgather", np.tile(x, 3))):
        found = await everywhere(actors, "call_as", group, "cupy", operation, inputs=[x] * SIZE)
        for rank, (name, values, _) in enumerate(found):
            assert name == "cupy.ndarray"
            assert np.array_equal(values, x[rank * 10 : rank * 10 + 10] * 3 if wanted is None else wanted)


async def test_work_of_the_streams_before_and_after_is_ordered(three: tuple[zc.Group, list[Any]]) -> None:
    """An input that is not computed yet, on a stream of its own; it is overwritten at once, and the result is read."""
    group, actors = three
    for sums, overwritten in await everywhere(actors, "late", group, inputs=range(SIZE)):
        assert sums == [6.0] * 5 and overwritten == [9.0] * 5


async def test_nobody_waits_for_the_gpu_on_the_host(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    assert await everywhere(actors, "held", group, inputs=[1.0, 2.0, 3.0]) == [(False, 6.0)] * SIZE


async def test_the_input_is_borrowed_until_its_reading_is_queued(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    first = [actors[rank].borrows(group) for rank in (0, 1)]
    await actors[0].next_call()
    await actors[1].next_call()
    assert await actors[0].writes() == await actors[1].writes() == "ValueError"
    assert await actors[2].borrows(group) == 3.0
    assert await zc.get(first) == [3.0, 3.0]
    assert [await actor.writes() for actor in actors] == [""] * SIZE
    await zc.get([actor.drop() for actor in actors])


async def test_results_are_passed_on_by_reference(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    await everywhere(actors, "keep", group, inputs=[np.full(50, rank, "f4") for rank in range(SIZE)])
    assert await actors[0].relay(actors[1]) == [3.0] * 50
    await zc.get([actor.drop() for actor in actors])


async def test_groups_leave_no_memory(three: tuple[zc.Group, list[Any]]) -> None:
    actors = three[1]
    group = await zc.group(actors)
    await everywhere(actors, "call", group, "allreduce", inputs=[np.ones(1000, "f4")] * SIZE)
    del group
    async with asyncio.timeout(30):
        while any([(await actor.stats()).device_used for actor in actors]):
            await asyncio.sleep(0.01)
