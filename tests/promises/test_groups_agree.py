"""All ranks of a group get the same: the same result, or the same error; and the next call finds them together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import EAGER, Rank, everywhere
from zcactor.collectives.steps import MOST, ReducerStep, step_of
from zcactor.hooks import Gather, Sum
from zcactor.process.context import current

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = 3
PLACES = ["processes", *[pytest.param(place, marks=pytest.mark.slow) for place in ("one process", "both", "tcp")]]
HOOKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "bf16": zc.hooks.BF16,
    "int8": lambda: zc.hooks.Int8(stochastic=True),
    "fp8": zc.hooks.FP8,
    "topk": lambda: zc.hooks.TopK(0.05),
    "powersgd": lambda: zc.hooks.PowerSGD(2, start_after=1),
}
PATIENCE = 20
"""Seconds after which a rank that waits for ever is given up."""


class Raises:
    """A hook that raises on one rank, before any exchange or behind the first."""

    def __init__(self, behind: bool, raises: bool) -> None:
        self.behind, self.raises = behind, raises

    def reduce(self, name: str, grad: Any, size: int) -> Generator[Any, Any, Any]:
        if self.raises and not self.behind and name == "b":
            raise ZeroDivisionError("a hook of mine")
        (total,), _ = (yield Sum([grad])), (yield Gather([grad, grad]))
        if self.raises and self.behind and name == "b":
            raise ZeroDivisionError("a hook of mine")
        (again,) = yield Sum([grad])
        assert np.array_equal(total, again)
        return np.array(total)


class Endless:
    """A hook that never ends."""

    def reduce(self, name: str, grad: Any, size: int) -> Generator[Any, Any, Any]:
        while True:
            yield Sum([grad])


class Uneven:
    """A hook that exchanges once more on one rank."""

    def __init__(self, more: bool) -> None:
        self.more = more

    def reduce(self, name: str, grad: Any, size: int) -> Generator[Any, Any, Any]:
        (total,) = yield Sum([grad])
        if self.more:
            yield Sum([grad])
        return np.array(total)


def _add(reducer: Any, adds: Sequence[tuple[str, Any]]) -> None:
    for name, grad in adds:
        if isinstance(grad, Exception):
            raise grad
        reducer.add(name, grad)


@zc.actor
class Trainer:
    """A member that reduces gradients."""

    def __init__(self) -> None:
        self.hook: Any = None

    async def renew(self, hook: str) -> None:
        """Begin with a new hook."""
        self.hook = HOOKS[hook]()

    async def step(self, group: zc.Group, adds: Sequence[tuple[str, Any]], hook: Any = None, **options: Any) -> Any:
        """One step. Returns the results, or the error."""
        try:
            async with group.reducer(**{"op": "sum", "hook": hook or self.hook, **options}) as reducer:
                _add(reducer, adds)
        except Exception as error:
            return type(error).__name__, str(error)
        return {name: np.array(each) for name, each in reducer.result().items()}

    def step_plain(self, group: zc.Group, adds: Sequence[tuple[str, Any]], **options: Any) -> Any:
        """The same in a plain method."""
        try:
            with group.reducer(**{"op": "sum", "hook": self.hook, **options}) as reducer:
                _add(reducer, adds)
        except Exception as error:
            return type(error).__name__, str(error)
        return {name: np.array(each) for name, each in reducer.result().items()}

    async def steps_of_one(self, group: zc.Group, bucket: Any) -> list[str]:
        """Make a reducer, and begin two steps with it. Returns the types of the errors."""
        found = []
        try:
            reducer = group.reducer(bucket=bucket)
            for _ in range(2):
                try:
                    async with reducer:
                        reducer.add("a", np.ones(100))
                except (RuntimeError, ValueError) as error:
                    found.append(type(error).__name__)
        except ValueError as error:
            found.append(type(error).__name__)
        return found

    async def step_among_others(self, group: zc.Group, adds: Sequence[tuple[str, Any]]) -> tuple[Any, list[float]]:
        """One step, with operations of the group between the arrays. Returns their results, too."""
        found, error = [], None
        try:
            async with group.reducer(op="sum", hook=self.hook) as reducer:
                found.append(float((await group.allreduce(np.ones(3)))[0]))
                for name, grad in adds:
                    reducer.add(name, grad)
                found.append(float((await group.allreduce(np.ones(30_000)))[0]))
        except zc.GroupMismatch as failed:
            error = str(failed)
        found.append(float((await group.allreduce(np.ones(3)))[0]))
        return error, found

    async def two_steps(self, group: zc.Group, first: Sequence[str], second: Sequence[str]) -> list[Any]:
        """Two reducers at the same time. Returns the outcome of each."""
        one, other = group.reducer(op="sum"), group.reducer(op="sum")
        found: list[Any] = []
        await one.__aenter__()
        await other.__aenter__()
        for names, reducer in ((second, other), (first, one)):
            for name in names:
                reducer.add(name, np.ones(20_000))
        for reducer in (one, other):
            try:
                await reducer.__aexit__(None, None, None)
                found.append(sorted(reducer.result()))
            except zc.GroupMismatch as error:
                found.append(type(error).__name__)
        return found

    async def is_cancelled(self, group: zc.Group, hook: Any) -> str:
        """Wait for the end of a step, and give up. Returns the type of the error."""

        async def steps() -> None:
            async with group.reducer(hook=hook) as reducer:
                reducer.add("a", np.ones(100))

        task = asyncio.ensure_future(steps())
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "CancelledError"
        return "no error"

    def _begin(self, group: zc.Group, case: str) -> Any:
        """Call an operation, on rank 1 with other arguments."""
        operation, other, _ = REFUSED[case]
        return getattr(group, operation)(**{**GOOD[operation], **(other if group.rank == 1 else {})})

    async def refused(self, group: zc.Group, case: str) -> tuple[str, list[str]]:
        """Call an operation. Returns the type of its error, and its notes."""
        try:
            await self._begin(group, case)
        except Exception as error:
            return type(error).__name__, getattr(error, "__notes__", [])
        return "no error", []

    def refused_plain(self, group: zc.Group, case: str) -> tuple[str, list[str]]:
        """The same in a plain method."""
        try:
            self._begin(group, case).result()
        except Exception as error:
            return type(error).__name__, getattr(error, "__notes__", [])
        return "no error", []

    async def sum(self, group: zc.Group, count: int = 10) -> float:
        """A plain operation of the group."""
        return float((await group.allreduce(np.ones(count)))[0])

    async def facts(self) -> tuple[int, int]:
        """The number of operations that members here have not ended, and of publications for others."""
        groups = current().groups()
        members = [member for each in groups._members.values() for member in each.values()]
        return sum(len(member.operations) for member in members), sum(len(member._early) for member in members)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PLACES)
async def placed(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Any]]:
    """A maker of groups of trainers in processes of their own, in one, with two of them in one, and over TCP."""
    options: dict[str, Any] = {"transports": ("tcp",)} if request.param == "tcp" else {}
    shared = {"processes": 0, "tcp": 0, "one process": SIZE, "both": 2}[request.param]
    made: dict[Any, list[Any]] = {}
    async with zc.init(num_cpus=12, log_to_driver=False, store_capacity=256 << 20, **options):

        async def make(hook: str = "none", cls: Any = Trainer) -> tuple[zc.Group, list[Any]]:
            if cls not in made:
                made[cls] = [
                    await (cls.options(process="shared") if rank < shared else cls).spawn() for rank in range(SIZE)
                ]
            if cls is Trainer:
                await everywhere(made[cls], "renew", hook)
            return await zc.group(made[cls]), made[cls]

        yield make


async def each(calls: Sequence[Any]) -> list[Any]:
    """The outcomes of calls, none of which may wait for ever."""
    return list(await asyncio.wait_for(asyncio.gather(*calls), PATIENCE))


async def at_rest(actors: Sequence[Any]) -> None:
    """Nothing is left of operations."""
    async with asyncio.timeout(PATIENCE):
        while any(found != (0, 0) for found in await everywhere(actors, "facts")):
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------- calls that raise


class Hostile:
    """A value that no array can be made of."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise LookupError("no array of mine")


class Slotted(Exception):
    """An exception that takes no notes."""

    __notes__ = 7  # type: ignore[assignment]


class Unnoted(Hostile):
    """The same, with an exception of that kind."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise Slotted("no array of mine")


GOOD: dict[str, dict[str, Any]] = {
    "allreduce": {"x": np.ones(4)},
    "reduce_scatter": {"x": np.ones(4)},
    "allgather": {"x": np.ones(4)},
    "broadcast": {"x": np.ones(4), "root": 1},
    "alltoall": {"parts": [1, 2, 3]},
    "barrier": {},
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "objects": ("allreduce", {"x": np.array([None])}, "TypeError"),
    "large objects": ("allreduce", {"x": np.full(50_000, None)}, "TypeError"),
    "hostile": ("allreduce", {"x": Hostile()}, "LookupError"),
    "unnoted": ("allreduce", {"x": Unnoted()}, "Slotted"),
    "op": ("allreduce", {"op": "median"}, "ValueError"),
    "out": ("allreduce", {"out": np.ones(5)}, "ValueError"),
    "plan": ("allreduce", {"plan": "best"}, "ValueError"),
    "timeout": ("allreduce", {"timeout": -1}, "ValueError"),
    "shards": ("reduce_scatter", {"shards": [1, 1, 1]}, "ValueError"),
    "no axis": ("reduce_scatter", {"x": 1.0}, "ValueError"),
    "allgather": ("allgather", {"x": np.ma.masked_array([1.0])}, "TypeError"),
    "allgather of each": ("allgather", {"x": np.array([None]), "concat": False}, "TypeError"),
    "root's array": ("broadcast", {"x": {"a": 1}}, "TypeError"),
    "no array": ("broadcast", {"x": None}, "TypeError"),
    "root": ("broadcast", {"root": 3}, "ValueError"),
    "parts": ("alltoall", {"parts": [1, 2]}, "ValueError"),
    "a part": ("alltoall", {"parts": [1, 2, (each for each in "abc")]}, "TypeError"),
    "barrier": ("barrier", {"timeout": float("nan")}, "ValueError"),
    **{f"unknown argument of {name}": (name, {"operation": "sum"}, "TypeError") for name in GOOD},
}


async def test_each_collective_is_refused_here_and_has_its_row_on_the_page() -> None:
    returned = {name: getattr(each, "__annotations__", {}).get("return", "") for name, each in vars(zc.Group).items()}
    assert {name for name, text in returned.items() if text.startswith("ObjectRef[") and name[0] != "_"} == set(GOOD)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "groups.md").read_text()
    assert [name for name in GOOD if f"| `{name}(" not in page] == []


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize("case", REFUSED)
async def test_a_call_that_raises_on_one_rank_raises_on_all(placed: Callable[..., Any], case: str, plain: bool) -> None:
    group, actors = await placed()
    method = "refused_plain" if plain else "refused"
    for name, notes in await each([getattr(actor, method)(group, case) for actor in actors]):
        assert name == REFUSED[case][2]
        assert case == "unnoted" or any("rank 1 has raised this in Group." in note for note in notes)
    assert await each([actor.sum(group) for actor in actors]) == [SIZE] * SIZE
    await at_rest(actors)


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("plan", ["auto", "eager", "naive", "shared", "direct", "ring", "halving"])
async def test_every_plan_ends_for_every_size(placed: Callable[..., Any], plan: Any) -> None:
    group, actors = await placed(cls=Rank)
    for nbytes in (0, 1, 8, 1000, EAGER - 1, EAGER, EAGER + 1, 24_000, 400_000):
        inputs = [np.full(nbytes, rank + 1, np.uint8) for rank in range(SIZE)]
        if plan in ("ring", "halving") and (await group.explain(1 << 20)).plan == "shared":
            return  # these are for several hosts
        calls = [actor.call(group, "allreduce", x, plan=plan) for actor, x in zip(actors, inputs, strict=True)]
        results = await each(calls)
        assert all(np.array_equal(result, np.full(nbytes, 6, np.uint8)) for result in results), nbytes


# ---------------------------------------------------------------- steps of reducers


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("rank", range(SIZE))
async def test_a_hook_that_raises_on_one_rank(placed: Callable[..., Any], rank: int, behind: bool) -> None:
    group, actors = await placed()
    adds = [("a", np.ones(100)), ("b", np.ones(100)), ("c", np.ones(100))]
    for _ in range(2):
        calls = [actor.step(group, adds, Raises(behind, number == rank)) for number, actor in enumerate(actors)]
        assert await each(calls) == [("ZeroDivisionError", "a hook of mine")] * SIZE
        assert await each([actor.sum(group) for actor in actors]) == [SIZE] * SIZE
    for results in await each([actor.step(group, adds, Raises(behind, False)) for actor in actors]):
        assert [float(results[name][0]) for name in "abc"] == [SIZE] * 3
    await at_rest(actors)


@pytest.mark.parametrize("hook", ["int8", "fp8"])
async def test_an_overflow_that_a_hook_refuses_on_one_rank(placed: Callable[..., Any], hook: str) -> None:
    """Such a hook exchanges two arrays for each gradient."""
    group, actors = await placed(hook)
    good, bad = [("w", np.ones(2000, "f4"))], [("w", np.full(2000, np.inf, "f4"))]
    for name, text in await each([a.step(group, bad if a is actors[1] else good) for a in actors]):
        assert name == "ValueError" and "cannot encode infinity or NaN" in text
    for results in await each([actor.step(group, good) for actor in actors]):
        np.testing.assert_allclose(results["w"], SIZE, rtol=0.01)
    assert await each([actor.sum(group) for actor in actors]) == [SIZE] * SIZE


def of(*names: str, count: int = 100) -> list[tuple[str, Any]]:
    return [(name, np.ones(count)) for name in names]


@pytest.mark.parametrize("hook", ["none", "int8", "powersgd"])
@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (of("a", "b"), of("a"), "add('b', float64, (100,)), and rank 1 called the end of its block after 1 arrays"),
        (of("a", "b", count=50_000), of("a", count=50_000), "rank 1 called the end of its block after 1 arrays"),
        (of("a"), of(), "rank 1 called the end of its block after 0 arrays"),
        (of("a"), of("a", "b"), "rank 0 called the end of its block after 1 arrays, and rank 1 called add('b'"),
        (of("a", "b"), of("b", "a"), "rank 0 called add('a', float64, (100,)), and rank 1 called add('b'"),
        (of("a", "b"), of("a", "c"), "rank 0 called add('b', float64, (100,)), and rank 1 called add('c'"),
        (of("a") + of("c", count=200), of("a", count=200) + of("c"), "and rank 1 called add('a', float64, (200,))"),
        ([("a", np.ones((4, 25)))], [("a", np.ones((25, 4)))], ", and rank 1 called add('a', float64, (25, 4))"),
        ([("a", np.ones((300, 100)))], [("a", np.ones((100, 300)))], "and rank 1 called add('a', float64, (100, 300))"),
        ([("a", np.ones(100))], [("a", np.ones(100, "f4"))], "float64, (100,)), and rank 1 called add('a', float32, ("),
        (of("a", count=50_000), of("a"), "add('a', float64, (50000,)), and rank 1 called add('a', float64, (100,))"),
    ],
)  # fmt: skip
async def test_ranks_that_add_other_arrays(
    placed: Callable[..., Any], hook: str, ours: Any, theirs: Any, said: str
) -> None:
    """All ranks get the first difference, and the group stays usable."""
    group, actors = await placed(hook)
    for different in (1, 2):
        await everywhere(actors, "renew", hook)
        calls = [a.step(group, theirs if rank == different else ours) for rank, a in enumerate(actors)]
        outcomes = await each(calls)
        assert len({*outcomes}) == 1 and outcomes[0][0] == "GroupMismatch", outcomes
        assert said.replace("rank 1", f"rank {different}") in outcomes[0][1], outcomes[0][1]
        assert await each([actor.sum(group, 50_000) for actor in actors]) == [SIZE] * SIZE
    same = [("w", np.ones((30, 20), "f4"))]
    for results in await each([actor.step(group, same) for actor in actors]):
        assert np.all(results["w"] >= 0)
    await at_rest(actors)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (zc.hooks.Int8(), zc.hooks.FP8(), "hook=FP8(kind='e4m3', block=128, error_feedback=True)"),
        (zc.hooks.Int8(), zc.hooks.Int8(block=128), "hook=Int8(block=128, stochastic=True, error_feedback=True)"),
        (zc.hooks.TopK(0.1), zc.hooks.TopK(0.2), "hook=TopK(fraction=0.2, error_feedback=True)"),
        (zc.hooks.PowerSGD(2), zc.hooks.PowerSGD(2, seed=1), "seed=1"),
        (zc.hooks.BF16(), None, "rank 2 called reducer(op='sum', bucket=26214400)"),
        (Raises(False, False), zc.hooks.BF16(), "rank 0 called reducer(op='sum', hook=Raises)"),
    ],
)
async def test_ranks_with_other_hooks(placed: Callable[..., Any], ours: Any, theirs: Any, said: str) -> None:
    group, actors = await placed()
    adds = [("a", np.ones((300, 100))), ("b", np.ones(7))]
    calls = [actor.step(group, adds, theirs if rank == 2 else ours) for rank, actor in enumerate(actors)]
    outcomes = await each(calls)
    assert len({*outcomes}) == 1 and outcomes[0][0] == "GroupMismatch", outcomes
    assert said in outcomes[0][1]
    assert await each([actor.sum(group) for actor in actors]) == [SIZE] * SIZE


async def test_seeds_of_rounding_may_differ(placed: Callable[..., Any]) -> None:
    group, actors = await placed()
    adds = of("a", "b")
    for results in await each([a.step(group, adds, zc.hooks.Int8(seed=rank)) for rank, a in enumerate(actors)]):
        np.testing.assert_allclose(results["a"], SIZE, rtol=0.01)


async def test_a_hook_that_exchanges_more_on_one_rank(placed: Callable[..., Any]) -> None:
    group, actors = await placed()
    for rank in range(SIZE):
        outcomes = await each([a.step(group, of("a", "b"), Uneven(n == rank)) for n, a in enumerate(actors)])
        assert len({*outcomes}) == 1 and outcomes[0][0] == "GroupMismatch", outcomes
        assert await each([actor.sum(group) for actor in actors]) == [SIZE] * SIZE


@pytest.mark.parametrize("method", ["step", "step_plain"])
@pytest.mark.parametrize("count", [100, 50_000])
async def test_a_block_that_raises_on_one_rank(placed: Callable[..., Any], method: str, count: int) -> None:
    group, actors = await placed()
    for rank in range(SIZE):
        mine = [("a", np.ones(count)), ("b", KeyError("mine"))]
        calls = [
            getattr(a, method)(group, mine if n == rank else of("a", "b", count=count)) for n, a in enumerate(actors)
        ]
        assert await each(calls) == [("KeyError", "'mine'")] * SIZE
        for results in await each([getattr(a, method)(group, of("a", count=count)) for a in actors]):
            assert results["a"].sum() == SIZE * count
    await at_rest(actors)


@pytest.mark.parametrize("method", ["step", "step_plain"])
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"bucket": "25 MB!"}, "ValueError"),
        ({"op": "max"}, "ValueError"),
        ({"hook": 3}, "TypeError"),
        ({"hok": None}, "TypeError"),
    ],
)
async def test_a_reducer_that_is_refused_on_one_rank_fails_the_step_on_all(
    placed: Callable[..., Any], options: Any, kind: str, method: str
) -> None:
    group, actors = await placed()
    for rank in range(SIZE):
        for count in (100, 50_000):
            adds = of("a", count=count)
            calls = [getattr(a, method)(group, adds, **(options if n == rank else {})) for n, a in enumerate(actors)]
            outcomes = await each(calls)
            assert len({*outcomes}) == 1 and outcomes[0][0] == kind, outcomes
        for value in (10, 100):
            adds = [("a", np.full(100, value))]
            for results in await each([getattr(actor, method)(group, adds) for actor in actors]):
                assert results["a"][0] == SIZE * value
    assert await each([actor.sum(group) for actor in actors]) == [SIZE] * SIZE
    await at_rest(actors)


async def test_steps_of_a_reducer_that_one_rank_was_refused_meet_no_other_step(placed: Callable[..., Any]) -> None:
    group, actors = await placed()
    outcomes = await each([a.steps_of_one(group, 0 if n == 1 else 100) for n, a in enumerate(actors)])
    assert outcomes == [["ValueError", "RuntimeError"], ["ValueError"], ["ValueError", "RuntimeError"]]
    for results in await each([actor.step(group, of("a")) for actor in actors]):
        assert results["a"].sum() == SIZE * 100
    await at_rest(actors)


@pytest.mark.parametrize("method", ["step", "step_plain"])
async def test_a_block_that_adds_nothing(placed: Callable[..., Any], method: str) -> None:
    group, actors = await placed()
    assert await each([getattr(actor, method)(group, []) for actor in actors]) == [{}] * SIZE
    outcomes = await each([getattr(a, method)(group, of("a") if n == 1 else []) for n, a in enumerate(actors)])
    assert {name for name, _ in outcomes} == {"GroupMismatch"}
    assert await each([actor.sum(group) for actor in actors]) == [SIZE] * SIZE
    await at_rest(actors)


async def test_a_rank_that_gives_up_the_wait(placed: Callable[..., Any]) -> None:
    group, actors = await placed()
    calls = [actor.step(group, of("a"), Endless()) for actor in actors[1:]]
    outcomes = await each([actors[0].is_cancelled(group, Endless()), *calls])
    assert outcomes[0] == "CancelledError"
    for name, text in outcomes[1:]:
        assert name == "RuntimeError" and "a rank has left the block of its reducer by CancelledError" in text
    assert await each([actor.sum(group) for actor in actors]) == [SIZE] * SIZE


@pytest.mark.parametrize("hook", ["none", "int8"])
async def test_operations_of_the_group_within_a_step(placed: Callable[..., Any], hook: str) -> None:
    """Their order is kept, also where the step fails."""
    group, actors = await placed(hook)
    sums = [SIZE, SIZE, SIZE]
    for adds in (of("a", "b"), of("c", "d", count=50_000)):
        assert await each([a.step_among_others(group, adds) for a in actors]) == [(None, sums)] * SIZE
        calls = [a.step_among_others(group, adds[:1] if n == 1 else adds) for n, a in enumerate(actors)]
        for error, found in await each(calls):
            assert "rank 1 called the end of its block" in error and found == sums


async def test_two_steps_at_once(placed: Callable[..., Any]) -> None:
    group, actors = await placed()
    assert await each([a.two_steps(group, ["a", "b"], ["c"]) for a in actors]) == [[["a", "b"], ["c"]]] * SIZE
    calls = [a.two_steps(group, ["a", "b"] if n else ["a"], ["c"]) for n, a in enumerate(actors)]
    assert await each(calls) == [["GroupMismatch", ["c"]]] * SIZE
    await at_rest(actors)


async def test_a_step_has_so_many_operations_at_most() -> None:
    step: Any = ReducerStep(None, None)  # type: ignore[arg-type]
    step.number = 5
    first = step.next_place()
    step._started = MOST - 1
    assert step.next_place() == first + MOST - 1
    with pytest.raises(ValueError, match=f"{MOST} operations at most"):
        step.next_place()
    assert step_of(first + MOST - 1) == 5


# ---------------------------------------------------------------- the state of hooks


def gradient(rank: int, step: int) -> Any:
    return np.random.default_rng([rank, step]).standard_normal((40, 50)).astype("f4")


@pytest.mark.parametrize("hook", [name for name in HOOKS if name != "none"])
@pytest.mark.parametrize("bad", [np.inf, np.nan, 3.4e38])
@pytest.mark.parametrize("everything", [False, True])
async def test_a_step_that_is_not_finite_is_as_if_it_had_not_been(
    placed: Callable[..., Any], hook: str, bad: float, everything: bool
) -> None:
    wanted: list[Any] = []
    for overflows in (False, True):
        group, actors = await placed(hook)
        found = []
        for step in range(3):
            if overflows and step == 1:
                adds = [[("w", gradient(rank, 9)), ("b", gradient(rank, 8))] for rank in range(SIZE)]
                adds[1][0][1][(...) if everything else (3, 4)] = bad
                outcomes = await each([a.step(group, x) for a, x in zip(actors, adds, strict=True)])
                failed = {type(outcome) for outcome in outcomes}
                assert failed == {tuple} or not np.isfinite(outcomes[0]["w"]).all() or bad == 3.4e38
                if failed == {dict} and np.isfinite(outcomes[0]["w"]).all():
                    return  # the hook can send such numbers
            calls = [a.step(group, [("w", gradient(n, step)), ("b", gradient(n, 7))]) for n, a in enumerate(actors)]
            results = await each(calls)
            assert all(np.array_equal(results[0][name], each_[name]) for each_ in results for name in ("w", "b"))
            assert np.isfinite(results[0]["w"]).all()
            found.append(results[0])
        wanted = wanted or found
    for before, after in zip(wanted, found, strict=True):
        assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("hook", [name for name in HOOKS if name != "none"])
async def test_a_step_that_failed_is_done_again(placed: Callable[..., Any], hook: str) -> None:
    """The failed attempt adds nothing to the rests of gradients."""
    wanted: list[Any] = []
    for fails in (False, True):
        group, actors = await placed(hook)
        found = []
        for step in range(3):
            adds = [[("w", gradient(rank, step)), ("b", gradient(rank, step + 5))] for rank in range(SIZE)]
            if fails and step:
                attempt = [x if rank else [*x, ("c", KeyError("mine"))] for rank, x in enumerate(adds)]
                outcomes = await each([a.step(group, x) for a, x in zip(actors, attempt, strict=True)])
                assert outcomes == [("KeyError", "'mine'")] * SIZE
            found.append((await each([a.step(group, x) for a, x in zip(actors, adds, strict=True)]))[0])
        wanted = wanted or found
    for before, after in zip(wanted, found, strict=True):
        assert all(np.array_equal(before[name], after[name]) for name in before)


# ---------------------------------------------------------------- more than elements


class Length(np.ndarray):
    """An array with a unit."""

    unit: str | None = None


class Plain(np.ndarray):
    """A subclass without anything of its own."""


@pytest.mark.parametrize("operation", ["allreduce", "reduce_scatter", "allgather", "broadcast"])
@pytest.mark.parametrize("count", [4, 50_000])
async def test_an_array_that_carries_more_than_its_elements(
    placed: Callable[..., Any], operation: str, count: int
) -> None:
    group, actors = await placed(cls=Rank)
    masked = np.ma.masked_array(np.ones(count), mask=np.arange(count) % 2 == 0)
    length = np.ones(count).view(Length)
    length.unit = "m"
    for x, said in (
        (masked, "pass x.filled(value)"), (np.ma.masked_array(np.ones(count)), "pass x.filled(value)"),
        (length, "would not see unit of a Length; pass np.asarray(x)"),
    ):  # fmt: skip
        for name, text in await each([actor.raises(group, operation, x) for actor in actors]):
            assert name == "TypeError" and said in text and f"Group.{operation}" in text
    for bare in (np.ones(count).view(Plain), np.ones(count).view(Length)):
        for result in await each([actor.call(group, operation, bare) for actor in actors]):
            assert type(result) is np.ndarray


async def test_a_reducer_and_out_take_no_masks(placed: Callable[..., Any]) -> None:
    group, actors = await placed()
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    outcomes = await each([actor.step(group, [("a", masked)]) for actor in actors])
    assert {name for name, _ in outcomes} == {"TypeError"} and "x.filled" in outcomes[0][1]
    group, actors = await placed(cls=Rank)
    for name, text in await each([actor.raises(group, "allreduce", np.ones(2), out=masked) for actor in actors]):
        assert name == "TypeError" and "Group.allreduce: out" in text and "x.filled" in text
