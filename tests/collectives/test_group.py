"""Groups end to end: the result of each collective, and the arguments that it refuses."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import SIZE, Rank, everywhere, ranks
from tests.collectives.test_folding import bits, drawn, written_out

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL, LARGE = 100, 50_000
"""Elements of arrays that travel in frames, and that are read in place."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=8, log_to_driver=False) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["processes", "one process", "both"])
async def placed(request: pytest.FixtureRequest) -> AsyncIterator[tuple[zc.Group, list[Any]]]:
    """Three ranks in processes of their own, in one, and two of them in one."""
    if request.param == "processes":
        async with ranks(SIZE) as made:
            yield made
    elif request.param == "one process":
        async with ranks(SIZE, process="shared") as made:
            yield made
    else:
        actors = [await Rank.options(process="shared").spawn() for _ in range(2)] + [await Rank.spawn()]
        yield await zc.group(actors), actors
        for actor in actors:
            await zc.kill(actor)


# ---------------------------------------------------------------- values


async def test_a_group_is_a_value(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    assert group.size == SIZE and group.epoch == 0
    assert list(group.actors) == actors
    assert await everywhere(actors, "rank", group) == [0, 1, 2]
    await everywhere(actors, "keep", "group", {"nested": [group]})
    again = await zc.group(actors)
    assert again != group and group == group and len({group, again}) == 2
    assert "3 actors, epoch 0" in repr(group)
    await everywhere(actors, "drop", "group")


# ---------------------------------------------------------------- reductions


@pytest.mark.parametrize("count", [0, 1, SMALL, LARGE])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
async def test_allreduce_is_the_fold(placed: tuple[zc.Group, list[Any]], count: int, op: str) -> None:
    group, actors = placed
    rng = np.random.default_rng(count)
    inputs = [drawn(rng, np.float32, count) for _ in range(SIZE)]
    found = await zc.get([actor.reduce(group, x, op) for actor, x in zip(actors, inputs, strict=True)])
    wanted = bits(written_out(op, inputs))
    for result, writable, _, after in found:
        assert bits(result) == wanted
        assert result.dtype == np.float32 and result.shape == (count,)
        assert not writable and after


@pytest.mark.parametrize("count", [SMALL, LARGE])
async def test_the_input_is_borrowed_until_the_end(three: tuple[zc.Group, list[Any]], count: int) -> None:
    group, actors = three
    for _, _, during, after in await everywhere(actors, "reduce", group, np.ones(count)):
        assert not during and after


@pytest.mark.parametrize("plan", ["eager", "naive", "shared", "direct"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int16, np.complex64])
async def test_every_plan_gives_the_same_bits(three: tuple[zc.Group, list[Any]], plan: str, dtype: Any) -> None:
    group, actors = three
    rng = np.random.default_rng(5)
    inputs = [drawn(rng, dtype, 9_999).reshape(99, 101) for _ in range(SIZE)]
    found = await zc.get([a.reduce(group, x, plan=plan) for a, x in zip(actors, inputs, strict=True)])
    for result, writable, _, _ in found:
        assert bits(result) == bits(written_out("sum", inputs))
        assert not writable and result.flags.c_contiguous and result.shape == (99, 101)


@pytest.mark.parametrize("cut", [slice(None, None, -1), slice(None, None, 2), slice(5, None, 3)])
async def test_inputs_may_have_any_strides(placed: tuple[zc.Group, list[Any]], cut: slice) -> None:
    group, actors = placed
    rng = np.random.default_rng(6)
    inputs = [drawn(rng, np.float64, 3 * LARGE).reshape(300, -1) for _ in range(SIZE)]
    found = await zc.get([a.reduce(group, x, "sum", [slice(None), cut]) for a, x in zip(actors, inputs, strict=True)])
    wanted = bits(written_out("sum", [x[:, cut] for x in inputs]))
    assert all(bits(result) == wanted for result, *_ in found)


@pytest.mark.parametrize("count", [SMALL, LARGE])
async def test_in_place_the_result_is_the_input(placed: tuple[zc.Group, list[Any]], count: int) -> None:
    group, actors = placed
    for array, is_itself in await everywhere(actors, "in_place", group, np.arange(count, dtype=np.int32)):
        assert is_itself
        assert np.array_equal(array, np.arange(count, dtype=np.int32) * SIZE)


@pytest.mark.parametrize("count", [SMALL, LARGE])
async def test_plain_methods_wait_for_the_result(placed: tuple[zc.Group, list[Any]], count: int) -> None:
    group, actors = placed
    for result in await everywhere(actors, "call_plain", group, "allreduce", np.ones(count)):
        assert np.array_equal(result, np.full(count, float(SIZE)))


@pytest.mark.parametrize("rows", [7, 60_000])
@pytest.mark.parametrize("shards", [None, "uneven"])
async def test_reduce_scatter_gives_each_rank_its_rows(
    placed: tuple[zc.Group, list[Any]], rows: int, shards: str | None
) -> None:
    group, actors = placed
    lengths = None if shards is None else [0, rows - 2, 2]
    rng = np.random.default_rng(rows)
    inputs = [drawn(rng, np.float32, rows * 2).reshape(rows, 2) for _ in range(SIZE)]
    found = await zc.get(
        [a.call(group, "reduce_scatter", x, shards=lengths) for a, x in zip(actors, inputs, strict=True)]
    )
    whole = written_out("sum", inputs)
    pieces = np.array_split(whole, SIZE) if lengths is None else np.split(whole, np.cumsum(lengths)[:-1])
    for piece, wanted in zip(found, pieces, strict=True):
        assert piece.shape == wanted.shape
        assert bits(piece) == bits(wanted)


async def test_arrays_that_came_as_arguments_are_read_where_they_lie(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    x = zc.full(LARGE, 2.0)
    before = [(await zc.stats(actor)).bytes_copied for actor in actors]
    found = await everywhere(actors, "call", group, "allreduce", x)
    assert all(np.array_equal(result, np.full(LARGE, 6.0)) for result in found)
    assert [(await zc.stats(actor)).bytes_copied for actor in actors] == before


# ---------------------------------------------------------------- exchanges


@pytest.mark.parametrize("lengths", [(2, 0, 5), (LARGE, 0, 3), (LARGE, LARGE, LARGE), (0, 0, 0)])
async def test_allgather_puts_the_rows_behind_each_other(
    placed: tuple[zc.Group, list[Any]], lengths: tuple[int, ...]
) -> None:
    group, actors = placed
    inputs = [np.arange(n * 2, dtype=np.int64).reshape(n, 2) + rank for rank, n in enumerate(lengths)]
    found = await zc.get([a.call(group, "allgather", x) for a, x in zip(actors, inputs, strict=True)])
    for result in found:
        assert np.array_equal(result, np.concatenate(inputs))
        assert not result.flags.writeable


async def test_allgather_by_reference_copies_nothing(placed: tuple[zc.Group, list[Any]]) -> None:
    group, actors = placed
    inputs: list[Any] = [np.arange(LARGE), np.ones(3, np.float32), np.array([b"abc"])]
    before = [(await zc.stats(actor)).bytes_copied for actor in actors]
    found = await zc.get([a.call(group, "allgather", x, concat=False) for a, x in zip(actors, inputs, strict=True)])
    assert [(await zc.stats(actor)).bytes_copied for actor in actors] == before
    for arrays in found:
        for array, wanted in zip(arrays, inputs, strict=True):
            assert np.array_equal(array, wanted) and array.dtype == wanted.dtype and not array.flags.writeable


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("root", [0, 2])
async def test_broadcast_gives_all_the_array_of_the_root(
    placed: tuple[zc.Group, list[Any]], count: int, root: int
) -> None:
    group, actors = placed
    inputs = [np.arange(count) if rank == root else None for rank in range(SIZE)]
    for result in await zc.get([a.call(group, "broadcast", x, root=root) for a, x in zip(actors, inputs, strict=True)]):
        assert np.array_equal(result, np.arange(count)) and not result.flags.writeable


async def test_alltoall_gives_a_value_of_each_rank_to_each(placed: tuple[zc.Group, list[Any]]) -> None:
    group, actors = placed
    parts = [[f"{source} to {to}" if to else np.full(LARGE, source) for to in range(SIZE)] for source in range(SIZE)]
    found = await zc.get([a.exchange(group, mine) for a, mine in zip(actors, parts, strict=True)])
    for to in (1, 2):
        assert found[to] == [f"{source} to {to}" for source in range(SIZE)]
    assert [array[0] for array in found[0]] == [0, 1, 2]


async def test_a_barrier_ends_when_all_have_called(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    first = [actors[0].call(group, "barrier"), actors[1].call(group, "barrier")]
    await everywhere(actors, "pid")
    assert not any(each.done() for each in first)
    assert await actors[2].call(group, "barrier") is None
    assert await zc.get(first) == [None, None]


async def test_a_group_of_one(three: tuple[zc.Group, list[Any]]) -> None:
    actor = three[1][0]
    group = await zc.group([actor])
    for count in (SMALL, LARGE):
        assert np.array_equal(await actor.call(group, "allreduce", np.arange(count), "max"), np.arange(count))
        assert np.array_equal(await actor.call(group, "allgather", np.arange(count)), np.arange(count))
    assert np.array_equal((await actor.call(group, "broadcast", np.arange(LARGE))), np.arange(LARGE))


async def test_explain_says_what_auto_takes(three: tuple[zc.Group, list[Any]]) -> None:
    group, _ = three
    small, large = await group.explain(1000), await group.explain(1 << 20)
    assert (small.plan, large.plan) == ("eager", "shared")
    assert large.volume["naive"] == 2 << 20
    assert "parameter server" in str(large) and "shared" in str(large)
    with pytest.raises(ValueError, match="nbytes is -1"):
        await group.explain(-1)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("operation", "args", "kwargs", "said"),
    [
        ("allreduce", ([None, "x"],), {}, "dtype object is not plain bytes"),
        ("allreduce", (np.zeros(3, "i4,f4"),), {}, "no sum of dtype"),
        ("allreduce", (np.array(["a"]),), {}, "no sum of dtype <U1"),
        ("allreduce", (np.arange(3), "mean"), {}, "no mean of dtype int64; ops of int64 are sum"),
        ("allreduce", (np.ones(3, bool),), {}, "no sum of dtype bool; ops of bool are min, max"),
        ("allreduce", (np.ones(3, complex), "max"), {}, "no max of dtype complex128"),
        ("allreduce", (np.zeros(3, "M8[s]"),), {}, "no sum of dtype datetime64"),
        ("allreduce", (np.ones(3), "median"), {}, "no op 'median'; ops are sum"),
        ("allreduce", (np.ones(3),), {"plan": "best"}, "no plan 'best'; plans are auto"),
        ("allreduce", (np.ones(3),), {"plan": "ring"}, "passes pieces from host to host"),
        ("allreduce", (np.ones(3),), {"out": [1, 2, 3]}, "out is of type list"),
        ("allreduce", (np.ones(3),), {"out": np.ones(4)}, "shape \\(4,\\), and the result has dtype float64"),
        ("allreduce", (np.ones(3),), {"out": np.ones(3, "f4")}, "out has dtype float32"),
        ("allreduce", (np.ones(3),), {"timeout": "1"}, "timeout is '1'"),
        ("allreduce", (np.ones(3),), {"timeout": -1.0}, "timeout is -1.0"),
        ("allreduce", (np.ones(3),), {"timeout": float("nan")}, "timeout is nan"),
        ("reduce_scatter", (np.ones(7),), {"shards": [1, 2, 3]}, "add up to 6 rows in 3 pieces"),
        ("reduce_scatter", (np.ones(7),), {"shards": [3, 4]}, "in 2 pieces"),
        ("reduce_scatter", (np.ones(7),), {"shards": [-1, 4, 4]}, "at least 0"),
        ("reduce_scatter", (np.float64(1),), {}, "without axes"),
        ("allgather", (np.float64(1),), {}, "without axes"),
        ("allgather", ([object()],), {}, "dtype object"),
        ("broadcast", (), {}, "has passed no array"),
        ("broadcast", (np.ones(3),), {"root": 3}, "root is 3, and ranks are 0 to 2"),
        ("alltoall", ([1, 2],), {}, "2 parts for 3 ranks"),
        ("alltoall", ([1, 2, 3, 4],), {}, "4 parts for 3 ranks"),
    ],
)
async def test_bad_arguments_are_refused_at_the_call(
    three: tuple[zc.Group, list[Any]], operation: str, args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    group, actors = three
    calls = [actors[0].raises(group, operation, *args, **kwargs)]
    for name, text in await zc.get([*calls, *(actor.raises(group, "barrier") for actor in actors[1:])]):
        assert name in ("TypeError", "ValueError")
        assert re.search(said, text), text
    assert await everywhere(actors, "call", group, "barrier") == [None] * SIZE


async def test_out_must_be_writable(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    out = zc.ones(LARGE)  # arrives read-only
    calls = [actors[0].raises(group, "allreduce", np.ones(LARGE), out=out)]
    for name, text in await zc.get([*calls, *(actor.raises(group, "barrier") for actor in actors[1:])]):
        assert name == "ValueError" and "out is read-only" in text


async def test_only_members_call_collectives(three: tuple[zc.Group, list[Any]]) -> None:
    group, _ = three
    with pytest.raises(RuntimeError, match="not a member of this group of 3"):
        group.allreduce(np.ones(3))
    with pytest.raises(RuntimeError, match="not a member"):
        group.rank
    other: Any = await Rank.spawn()
    name, text = await other.raises(group, "barrier")
    assert name == "RuntimeError" and "is not a member of this group of 3" in text


async def test_the_order_of_ranks_comes_from_a_topology(three: Any) -> None:
    actors = three[1]
    ring = zc.topology.ring(SIZE)
    group = await zc.group(actors, order=ring)
    assert group.actors == tuple(actors[place] for place in ring.ranks(ring.hosts))
    assert (await zc.group(actors, order="topology")).actors == tuple(actors), "one node: nothing to measure"
    with pytest.raises(TypeError, match="order must be 'given', 'topology' or a zc.topology.Topology"):
        await zc.group(actors, order=3)  # type: ignore[arg-type]


async def test_actors_that_make_no_group(three: tuple[zc.Group, list[Any]]) -> None:
    _, actors = three
    with pytest.raises(ValueError, match="there are no actors"):
        await zc.group([])
    with pytest.raises(ValueError, match="is there twice"):
        await zc.group([actors[0], actors[1], actors[0]])
    with pytest.raises(TypeError, match=r"actors\[1\] is of type str"):
        await zc.group([actors[0], "actor"])
    dead: Any = await Rank.spawn()
    await zc.kill(dead)
    with pytest.raises(zc.ActorDied):
        await zc.group([actors[0], dead])
    for options in ({"order": "best"}, {"reproducible": "never"}, {"spin_us": -5.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            await zc.group(actors, **options)
    with pytest.raises(TypeError, match="spin_us is '1', and must be a number"):
        await zc.group(actors, spin_us="1")  # type: ignore[arg-type]


async def test_members_that_stay_awake_get_the_same() -> None:
    actors: list[Any] = [await Rank.spawn() for _ in range(2)]
    group = await zc.group(actors, spin_us=100.0)
    for _ in range(20):
        assert [each.tolist() for each in await everywhere(actors, "call", group, "allreduce", [1.0, 2.0])] == [
            [2, 4]
        ] * 2
    group = await group.reform()
    assert group._options.spin_us == 100.0
    assert await everywhere(actors, "call", group, "barrier") == [None, None]
    for actor in actors:
        await zc.kill(actor)


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([("allreduce", [1.0]), ("allreduce", [1.0]), ("barrier",)], "barrier()"),
        ([("allreduce", [1.0]), ("allreduce", [1]), ("allreduce", [1.0])], "int64, (1,)"),
        ([("allreduce", [1.0]), ("allreduce", [1.0, 2.0]), ("allreduce", [1.0])], "(2,)"),
        ([("allreduce", [1.0]), ("allreduce", [1.0], "max"), ("allreduce", [1.0])], "'max'"),
        ([("broadcast", [1.0], 0), ("broadcast", [1.0], 1), ("broadcast", [1.0], 0)], "broadcast(root=1)"),
    ],
)
async def test_different_calls_are_told_to_all_ranks(
    three: tuple[zc.Group, list[Any]], calls: list[tuple[Any, ...]], said: str
) -> None:
    group, actors = three
    made = []
    for actor, (operation, *args) in zip(actors, calls, strict=True):
        kwargs = {"root": args.pop()} if operation == "broadcast" else {}
        made.append(actor.raises(group, operation, *args, **kwargs))
    for name, text in await zc.get(made):
        assert name == "GroupMismatch"
        assert calls[0][0] in text and said.strip("'").split("'")[0] in text, text
    assert await everywhere(actors, "call", group, "barrier") == [None] * SIZE


async def test_a_timeout_names_the_ranks_that_are_missing(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    for rank, missing in ((0, "1, 2"), (2, "1")):  # one after the other: the second one's call finds the first one's
        name, text = await actors[rank].raises(group, "allreduce", np.ones(LARGE), timeout=0.05)
        assert name == "GroupTimeout" and f"missing ranks: {missing};" in text
    # The operation goes on, and its place in the order is kept.
    assert (await actors[1].call(group, "allreduce", np.ones(LARGE)))[0] == SIZE
    assert await everywhere(actors, "call", group, "barrier") == [None] * SIZE


async def test_a_collective_inherits_the_deadline_of_its_method(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    before = await actors[0].called()
    while await actors[0].called() == before:  # the deadline may also pass before the method begins
        with pytest.raises(zc.DeadlineExceeded):
            await actors[0].call.options(timeout=0.05)(group, "barrier")
    await zc.get([actor.call(group, "barrier") for actor in actors[1:]])
    assert await everywhere(actors, "call", group, "barrier") == [None] * SIZE


async def test_cancelling_ends_the_waiting_only(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    called = actors[0].next_call()
    call = actors[0].call(group, "allreduce", np.ones(LARGE))
    await called
    call.cancel()
    found = await zc.get([actor.call(group, "allreduce", np.ones(LARGE)) for actor in actors[1:]])
    assert all(result[0] == SIZE for result in found)
    assert await everywhere(actors, "call", group, "barrier") == [None] * SIZE


@pytest.mark.slow
async def test_groups_of_one_to_five_ranks_give_the_bits_of_the_fold(rounds: int) -> None:
    rng = np.random.default_rng(17)
    dtypes = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8, np.complex128)
    async with ranks(5) as (_, actors):
        for size in range(1, 6):
            members = actors[:size]
            group = await zc.group(members)
            for _ in range(6 * rounds):
                dtype = dtypes[rng.integers(len(dtypes))]
                shape = tuple(rng.integers(0, 60, rng.integers(1, 4)).tolist())
                inputs = [drawn(rng, dtype, int(np.prod(shape))).reshape(shape) for _ in members]
                op = "sum" if np.dtype(dtype).kind in "iu" else ("sum", "mean", "prod")[rng.integers(3)]
                wanted = written_out(op, inputs)
                found = await zc.get([a.reduce(group, x, op) for a, x in zip(members, inputs, strict=True)])
                assert all(bits(result) == bits(wanted) for result, *_ in found), (dtype, shape, op)
                cuts = np.sort(rng.integers(0, shape[0] + 1, size - 1)).tolist()
                shards = np.diff([0, *cuts, shape[0]]).tolist()
                pieces = await zc.get(
                    [
                        a.call(group, "reduce_scatter", x, op, shards=shards)
                        for a, x in zip(members, inputs, strict=True)
                    ]
                )
                for piece, part in zip(pieces, np.split(wanted, cuts), strict=True):
                    assert bits(piece) == bits(part), (dtype, shape, op, shards)
