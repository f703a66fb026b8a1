"""Reductions of members that do not map each other's memory, each on a host of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import SIZE, everywhere
from tests.collectives.test_folding import bits, drawn, written_out

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL, LARGE = 100, 50_000
"""Elements of arrays that travel in frames, and that are read by other ranks."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=4, log_to_driver=False, transports=("tcp",), store_capacity=64 << 20) as node:
        yield node


@pytest.mark.parametrize("plan", ["auto", "eager", "naive", "direct"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int16, np.complex64])
async def test_every_plan_gives_the_bits_of_the_fold(three: tuple[zc.Group, list[Any]], plan: str, dtype: Any) -> None:
    group, actors = three
    rng = np.random.default_rng(5)
    inputs = [drawn(rng, dtype, 9_999).reshape(99, 101) for _ in range(SIZE)]
    found = await zc.get([a.reduce(group, x, plan=plan) for a, x in zip(actors, inputs, strict=True)])
    for result, writable, during, after in found:
        assert bits(result) == bits(written_out("sum", inputs))
        assert not writable and not during and after and result.shape == (99, 101)


@pytest.mark.parametrize("op", ["mean", "min", "prod"])
@pytest.mark.parametrize("count", [1, SMALL, LARGE])
async def test_ops_and_sizes(three: tuple[zc.Group, list[Any]], op: str, count: int) -> None:
    group, actors = three
    rng = np.random.default_rng(count)
    inputs = [drawn(rng, np.float32, count) for _ in range(SIZE)]
    for plan in ("auto", "naive", "direct"):
        found = await zc.get([a.reduce(group, x, op, plan=plan) for a, x in zip(actors, inputs, strict=True)])
        assert all(bits(result) == bits(written_out(op, inputs)) for result, *_ in found)


@pytest.mark.parametrize("cut", [slice(None, None, -1), slice(None, None, 2)])
async def test_inputs_may_have_any_strides(three: tuple[zc.Group, list[Any]], cut: slice) -> None:
    group, actors = three
    rng = np.random.default_rng(6)
    inputs = [drawn(rng, np.float64, 3 * LARGE).reshape(300, -1) for _ in range(SIZE)]
    found = await zc.get([a.reduce(group, x, "sum", [slice(None), cut]) for a, x in zip(actors, inputs, strict=True)])
    assert all(bits(result) == bits(written_out("sum", [x[:, cut] for x in inputs])) for result, *_ in found)


async def test_exchanges(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    rng = np.random.default_rng(1)
    for count in (SMALL, LARGE):
        inputs = [drawn(rng, np.float32, count) for _ in range(SIZE)]
        whole = await zc.get([a.call(group, "allgather", x) for a, x in zip(actors, inputs, strict=True)])
        assert all(bits(each) == bits(np.concatenate(inputs)) for each in whole)
        listed = await everywhere(actors, "call", group, "allgather", inputs[0], concat=False)
        assert all(bits(each) == bits(inputs[0]) for found in listed for each in found)
        found = await everywhere(actors, "call", group, "broadcast", inputs[0], root=1)
        assert all(bits(each) == bits(inputs[0]) for each in found)
