"""The direct exchange: bytes that each rank takes, and inputs that change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import SIZE, Rank, everywhere
from tests.collectives.test_folding import bits, drawn, written_by_terms, written_out

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL, LARGE = 100, 50_000
"""Elements of arrays that travel in frames, and that are read by other ranks."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=4, log_to_driver=False, transports=("tcp",), store_capacity=64 << 20) as node:
        yield node


@pytest.mark.parametrize("shards", [None, [0, 59_998, 2]])
async def test_reduce_scatter_gives_each_rank_its_rows(
    three: tuple[zc.Group, list[Any]], shards: list[int] | None
) -> None:
    group, actors = three
    rng = np.random.default_rng(7)
    inputs = [drawn(rng, np.float32, 120_000).reshape(60_000, 2) for _ in range(SIZE)]
    pieces = await zc.get(
        [a.call(group, "reduce_scatter", x, shards=shards) for a, x in zip(actors, inputs, strict=True)]
    )
    whole = written_out("sum", inputs)
    wanted = np.array_split(whole, SIZE) if shards is None else np.split(whole, np.cumsum(shards)[:-1])
    assert all(bits(piece) == bits(each) for piece, each in zip(pieces, wanted, strict=True))


async def test_the_same_array_again_has_its_new_elements(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    for plan in ("naive", "direct"):
        assert await everywhere(actors, "again", group, LARGE, plan) == [[3.0, 6.0, 9.0]] * SIZE


@pytest.mark.parametrize("plan", ["naive", "direct"])
async def test_volumes_are_those_of_the_table(three: tuple[zc.Group, list[Any]], plan: str) -> None:
    group, actors = three
    x = zc.ones(1 << 17)
    await everywhere(actors, "keep", "x", x)  # it is there
    wanted = (await group.explain(x.nbytes)).volume[plan]
    table = {"naive": (SIZE - 1) * x.nbytes, "direct": 2 * x.nbytes * (SIZE - 1) / SIZE}
    for received, copied in await everywhere(actors, "taken", group, "allreduce", x, plan=plan):
        assert received == pytest.approx(table[plan], rel=0.01) == pytest.approx(wanted, rel=0.01)
        assert copied == 0
    for received, copied in await everywhere(actors, "taken", group, "reduce_scatter", x):
        assert received == pytest.approx(x.nbytes * (SIZE - 1) / SIZE, rel=0.01)
        assert copied == 0
    await everywhere(actors, "drop", "x")


async def test_explain_names_the_faster_plan(three: tuple[zc.Group, list[Any]]) -> None:
    group, _ = three
    small, large = await group.explain(1000), await group.explain(64 << 20)
    assert (small.plan, large.plan) == ("eager", "direct")
    assert large.predicted_s["direct"] < large.predicted_s["naive"]
    assert "the fewest bytes in two steps" in str(large) and "parameter server" in str(large)


@pytest.mark.parametrize("lengths", [(2, 0, 5), (LARGE, 0, 3), (LARGE, LARGE, LARGE), (0, 0, 0)])
async def test_allgather_puts_the_rows_behind_each_other(
    three: tuple[zc.Group, list[Any]], lengths: tuple[int, ...]
) -> None:
    group, actors = three
    inputs = [np.arange(n * 2, dtype=np.int64).reshape(n, 2) + rank for rank, n in enumerate(lengths)]
    for _ in range(2):
        found = await zc.get([a.call(group, "allgather", x) for a, x in zip(actors, inputs, strict=True)])
        for result in found:
            assert np.array_equal(result, np.concatenate(inputs)) and not result.flags.writeable
            assert result.shape == (sum(lengths), 2)


async def test_allgather_copies_a_ranks_own_rows_and_takes_those_of_the_others(
    three: tuple[zc.Group, list[Any]],
) -> None:
    group, actors = three
    x = zc.ones(LARGE)
    await everywhere(actors, "keep", "x", x)  # it is there
    taken = await everywhere(actors, "taken", group, "allgather", x)
    assert taken == [((SIZE - 1) * x.nbytes, x.nbytes)] * SIZE
    await everywhere(actors, "drop", "x")


@pytest.mark.slow
async def test_ranks_of_one_process_are_one_host() -> None:
    rng = np.random.default_rng(11)
    shared: list[Any] = [await Rank.options(process="shared").spawn() for _ in range(9)]
    by_process: dict[int, list[Any]] = {}
    for actor in shared:
        by_process.setdefault(await actor.pid(), []).append(actor)
    first, last = next(found for found in by_process.values() if len(found) > 1)[:2]
    actors = [first, await Rank.spawn(), last]
    group = await zc.group(actors)
    flat = await zc.group(actors, reproducible="everywhere")
    inputs = [drawn(rng, np.float32, LARGE) for _ in actors]
    for each, terms in ((group, ((0, 2), (1,))), (flat, ((0, 1, 2),))):
        for plan in ("direct", "naive", "eager"):
            found = await zc.get([a.reduce(each, x, plan=plan) for a, x in zip(actors, inputs, strict=True)])
            assert all(bits(result) == bits(written_by_terms("sum", inputs, terms)) for result, *_ in found), plan
    for actor in [actors[1], *shared]:
        await zc.kill(actor)
