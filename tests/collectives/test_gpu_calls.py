"""Calls of groups with arrays on GPUs that are refused, before anything is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import uvloop

import zcactor as zc
from tests.collectives.gpu_ranks import GpuRank, gpu_ranks, running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop: nothing here depends on its kind."""

ONES = np.ones((4, 2), "f4")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with running("devices=4") as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(node: zc.Runtime) -> AsyncIterator[tuple[zc.Group, list[Any]]]:
    async with gpu_ranks(2) as made:
        yield made


@pytest.mark.parametrize("operation", ["allreduce", "reduce_scatter", "allgather", "broadcast"])
async def test_without_nccl_arrays_on_gpus_are_refused(operation: str) -> None:
    actor: Any = await GpuRank.options(num_gpus=1).spawn(nccl=False)
    group = await zc.group([actor])
    name, text = await actor.raises(group, operation, ONES)
    assert name == "TypeError"
    assert text == (
        f"Group.{operation}: groups exchange arrays on GPUs by NCCL. NCCL does not know fake GPUs; or pass "
        "zc.gpu.to_host(x)"
    )
    assert await actor.rank_by_host(group) == 1
    await zc.kill(actor)


async def test_without_nccl_alltoall_goes_by_reference() -> None:
    actors: list[Any] = [await GpuRank.options(num_gpus=1).spawn(nccl=False) for _ in range(2)]
    group = await zc.group(actors)
    found = await zc.get([actor.exchange(group, [ONES * rank, ONES * 2]) for rank, actor in enumerate(actors)])
    assert [int(values[0, 0]) for received in found for _, values, _ in received] == [0, 1, 2, 2]
    for actor in actors:
        await zc.kill(actor)


@pytest.mark.parametrize(
    ("operation", "x", "options", "name", "text"),
    [
        ("allreduce", np.ones(3, "i2"), {}, "TypeError", "NCCL has no sum of dtype int16 on GPUs; it reduces int8"),
        ("reduce_scatter", np.ones(3, "u2"), {"op": "max"}, "TypeError", "NCCL has no max of dtype uint16"),
        ("allreduce", np.ones(3, "i4"), {"op": "mean"}, "TypeError", "there is no mean of dtype int32"),
        ("allreduce", ONES, {"op": "median"}, "ValueError", "there is no op 'median'"),
        ("allreduce", ONES, {"plan": "ring"}, "ValueError", "plan is 'ring', and arrays on GPUs go by NCCL's own"),
        ("allreduce", ONES, {"plan": "none"}, "ValueError", "there is no plan 'none'; plans are auto"),
        ("allreduce", ONES, {"out": np.ones(3)}, "TypeError", "out is of type ndarray, and must be an array on a GPU"),
        ("allreduce", ONES, {"timeout": -1}, "ValueError", "timeout is -1"),
        ("reduce_scatter", ONES, {"shards": [1, 2]}, "ValueError", "shards [1, 2] add up to 3 rows in 2 pieces"),
        ("reduce_scatter", np.array(1, "f4"), {}, "ValueError", "an array without axes cannot be cut along axis 0"),
        ("allgather", np.array(1, "f4"), {}, "ValueError", "arrays without axes cannot be concatenated"),
        ("broadcast", ONES, {"root": 2}, "ValueError", "root is 2, and ranks are 0 to 1"),
        ("broadcast", None, {}, "TypeError", "rank 0 is the root, and has passed no array"),
    ],
)
async def test_arguments_that_are_refused(
    two: tuple[zc.Group, list[Any]], operation: str, x: Any, options: dict[str, Any], name: str, text: str
) -> None:
    group, actors = two
    found = await actors[0].raises(group, operation, x, **options)
    assert found[0] == name and found[1].startswith(f"Group.{operation}: {text}")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shape", "out has dtype float32 and shape (3,), and the result has dtype float32 and shape (4,)"),
        ("dtype", "out has dtype int32 and shape (4,), and the result has dtype float32 and shape (4,)"),
        ("read-only", "out is read-only; pass a writable array, or none and take the result"),
        ("device", "out is on cuda:1, and the array on cuda:0; it must be the same GPU"),
    ],
)
async def test_out_that_does_not_fit(kind: str, text: str) -> None:
    actor: Any = await GpuRank.options(num_gpus=2).spawn()
    assert await actor.refuses_out(await zc.group([actor]), kind) == f"Group.allreduce: {text}"
    await zc.kill(actor)


async def test_a_reducer_takes_arrays_on_the_host() -> None:
    actor: Any = await GpuRank.options(num_gpus=1).spawn()
    text = await actor.adds(await zc.group([actor]), ONES)
    assert text == "Reducer.add: the array is on a GPU; pass zc.gpu.to_host(x)"
    await zc.kill(actor)


async def test_the_driver_is_no_member(two: tuple[zc.Group, list[Any]]) -> None:
    with pytest.raises(RuntimeError, match="is not a member"):
        two[0].allreduce(zc.ones(3, device="cuda"))
