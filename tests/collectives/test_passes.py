"""Plans that pass sums from rank to rank: their order of additions, and the bytes that each rank takes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import everywhere, ranks
from tests.collectives.test_folding import bits, drawn, written_by_terms, written_out
from zcactor.collectives.hierarchy import part_bounds

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOST = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=8, log_to_driver=False, transports=("tcp",)) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def six() -> AsyncIterator[list[Any]]:
    async with ranks(MOST) as (_, actors):
        yield actors


def by_ring(op: str, inputs: list[Any]) -> Any:
    """Each part is reduced around the ring, from the rank of its number on."""
    size = len(inputs)
    bounds = part_bounds(inputs[0].size, inputs[0].itemsize, size)
    parts = [
        written_out(op, [inputs[(part + step) % size][bounds[part] : bounds[part + 1]] for step in range(size)])
        for part in range(size)
    ]
    return np.concatenate(parts)


def by_halving(op: str, inputs: list[Any]) -> Any:
    """Surplus ranks pair up first; then ranks at half the distance each time."""
    size = len(inputs)
    power = 1 << (size.bit_length() - 1)
    surplus = size - power
    order: list[Any] = [(2 * n, 2 * n + 1) for n in range(surplus)] + list(range(2 * surplus, size))

    def total(of: Any, dtype: Any) -> Any:
        if isinstance(of, int):
            return inputs[of].astype(dtype)
        first, second = (total(each, dtype) for each in of)
        return written_by_terms("sum" if op == "mean" else op, [first, second], [(0, 1)])

    while power > 1:
        power //= 2
        order = [(order[n], order[n + power]) for n in range(power)]
    narrow = inputs[0].dtype.itemsize < 4 and inputs[0].dtype.kind != "i"
    found = total(order[0], np.dtype(np.float32) if narrow else inputs[0].dtype)
    return (found / size if op == "mean" else found).astype(inputs[0].dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "written"), [("ring", by_ring), ("halving", by_halving)])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
async def test_each_plan_adds_in_its_order_and_all_ranks_have_the_same_bits(
    six: list[Any], plan: str, written: Any, size: int
) -> None:
    actors = six[:size]
    group = await zc.group(actors)
    rng = np.random.default_rng(size)
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int16):
        for count, op in ((1, "sum"), (20, "prod"), (9_999, "sum"), (9_999, "mean")):
            if op == "mean" and dtype is np.int16:
                continue
            inputs = [drawn(rng, dtype, count) for _ in range(size)]
            found = await zc.get([a.reduce(group, x, op, plan=plan) for a, x in zip(actors, inputs, strict=True)])
            wanted = bits(written(op, inputs))
            for result, writable, during, after in found:
                assert bits(result) == wanted, (dtype, count, op)
                assert not writable and not during and after


@pytest.mark.parametrize(("plan", "size"), [("ring", 4), ("ring", 6), ("halving", 4), ("halving", 6)])
async def test_volumes_are_those_of_the_table(six: list[Any], plan: str, size: int) -> None:
    actors = six[:size]
    group = await zc.group(actors)
    x = zc.ones(3 << 15)
    await everywhere(actors, "keep", "x", x)  # it is there
    taken = await everywhere(actors, "taken", group, "allreduce", x, plan=plan)
    others = 2 * x.nbytes * (size - 1) / size
    table = [others] * size
    if (plan, size) == ("halving", 6):  # two pairs, and four ranks that exchange
        table = [2.5 * x.nbytes, x.nbytes, 2.5 * x.nbytes, x.nbytes, 1.5 * x.nbytes, 1.5 * x.nbytes]
    assert [received for received, _ in taken] == pytest.approx(table, rel=0.01)
    assert [copied for _, copied in taken] == [0] * size
    assert (await group.explain(x.nbytes)).volume[plan] == pytest.approx(max(table), rel=0.01)
    await everywhere(actors, "drop", "x")
