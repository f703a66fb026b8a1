"""`zcactor.collectives.reducer`: sums of many named arrays, buckets, and hooks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from zcactor.collectives.reducer import PACKED
from zcactor.hooks import Gather, Sum

SIZE = 3
SHAPES: dict[str, tuple[int, ...]] = {"w": (300, 200), "b": (200,), "deep": (4, 5, 6), "scalar": (), "v": (70_000,)}
pytestmark = pytest.mark.asyncio(loop_scope="module")


def gradients(rank: int, step: int = 0, dtype: Any = np.float32) -> dict[str, Any]:
    random = np.random.default_rng([rank, step])
    return {name: np.asarray(random.standard_normal(shape), dtype) for name, shape in SHAPES.items()}


class Stops(Sum):
    """A request whose arrays raise the error that ends a generator."""

    def __init__(self) -> None:
        pass

    def __getattribute__(self, name: str) -> Any:
        if name == "arrays":
            raise StopIteration("of the request")
        return super().__getattribute__(name)


class Bad:
    """A hook that does wrong in one way on one rank."""

    def __init__(self, how: str) -> None:
        self.how = how

    def snapshot(self) -> str:
        if self.how == "no snapshot":
            raise ZeroDivisionError("a hook of mine")
        return self.how

    def restore(self, saved: str) -> None:
        assert saved == self.how

    def reduce(self, name: str, grad: Any, size: int) -> Generator[Any, Any, Any]:
        if name == "b":
            if self.how == "raises":
                raise ZeroDivisionError("a hook of mine")
            if self.how == "nonsense":
                yield "nonsense"
            if self.how == "nothing":
                yield Sum([])
            if self.how == "stops":
                yield Stops()
            if self.how == "lists":
                yield Gather([[1.0]])  # type: ignore[list-item]
            if self.how == "other request":
                yield Gather([grad])
            if self.how == "other count":
                yield Sum([grad, grad])
            if self.how == "later":
                yield Sum([grad])
                raise ZeroDivisionError("a hook of mine")
            if self.how == "other shape":
                yield Sum([grad])
                return grad[:1]
            if self.how == "no array":
                yield Sum([grad])
                return None
        (total,) = yield Sum([grad])
        if self.how == "fine" and name == "b":
            (total,) = yield Sum([grad])
        return np.array(total)


class Failing:
    """A hook that raises at one place.

    Args:
        where: the place; empty for a hook that does not.
        kind: the error.
    """

    def __init__(self, where: str, kind: type[BaseException]) -> None:
        self.where = where
        self.kind = kind

    def _at(self, place: str) -> None:
        if self.where == place:
            raise self.kind("of the hook")

    def snapshot(self) -> None:
        self._at("snapshot")

    def restore(self, saved: None) -> None:
        self._at("restore")

    def reduce(self, name: str, grad: Any, size: int) -> Generator[Any, Any, Any]:
        try:
            (total,) = yield Sum([grad])
        except GeneratorExit:
            self._at("close")
            raise
        self._at("wait")
        return np.array(total)


@contextlib.contextmanager
def naming() -> Iterator[list[str]]:
    """Note the name of the error that ends the block, or of the type that its text names; "" where none does."""
    names = [""]
    try:
        yield names
    except BaseException as error:
        names.append(str(error).rpartition(" by ")[2] if type(error) is RuntimeError else type(error).__name__)


def add_failing(reducer: zc.Reducer, raises: bool) -> None:
    """Add an array, and raise where this is the rank to do so."""
    reducer.add("w", np.ones(20_000))
    if raises:
        raise LookupError("of the block")


@zc.actor
class Trainer:
    """A member that reduces gradients."""

    def __init__(self) -> None:
        self.hook: Any = None

    async def step(self, group: zc.Group, step: int = 0, **options: Any) -> tuple[dict[str, Any], int, bool]:
        """One step of all gradients. Returns the results, the bytes published, and whether a result is writable."""
        async with group.reducer(**options) as reducer:
            for name, grad in gradients(group.rank, step).items():
                reducer.add(name, grad)
        result = reducer.result()
        return {name: np.array(one) for name, one in result.items()}, reducer.nbytes, result["w"].flags.writeable

    def step_plain(self, group: zc.Group) -> dict[str, Any]:
        """The same in a plain method."""
        with group.reducer(op="sum") as reducer:
            for name, grad in gradients(group.rank).items():
                reducer.add(name, grad)
        return {name: np.array(one) for name, one in reducer.result().items()}

    async def steps_with(self, group: zc.Group, make: Any, count: int) -> tuple[list[Any], int]:
        """Several steps with a hook made here. Returns the results for one array, and the bytes of the last step."""
        hook = make()
        found = []
        for step in range(count):
            async with group.reducer(hook=hook) as reducer:
                for name, grad in gradients(group.rank, step).items():
                    reducer.add(name, grad)
            found.append(np.array(reducer.result()["w"]))
        return found, reducer.nbytes

    async def bad(self, group: zc.Group, how: str, rank: int) -> tuple[str, str]:
        """A step in which the hook of one rank does wrong. Returns the error."""
        try:
            async with group.reducer(hook=Bad(how if group.rank == rank else "fine")) as reducer:
                for name, grad in gradients(group.rank).items():
                    reducer.add(name, grad)
        except Exception as error:
            with pytest.raises(RuntimeError, match="behind the reducer's block"):
                reducer.result()
            return type(error).__name__, str(error)
        raise AssertionError(f"{how} did not fail")

    async def failing(self, group: zc.Group, where: str, kind: type[BaseException], by: int) -> str:
        """A step in which the hook of rank 1 raises at a place, and the block of rank `by`. Returns the name of the
        error, or of the type that its text names."""
        with naming() as names:
            async with group.reducer(hook=Failing(where if group.rank == 1 else "", kind)) as reducer:
                add_failing(reducer, group.rank == by)
        return names.pop()

    def failing_plain(self, group: zc.Group, where: str, kind: type[BaseException], by: int) -> str:
        """The same in a plain method."""
        with naming() as names, group.reducer(hook=Failing(where if group.rank == 1 else "", kind)) as reducer:
            add_failing(reducer, group.rank == by)
        return names.pop()

    async def other_name(self, group: zc.Group) -> tuple[str, str]:
        """A step in which the ranks add arrays of different names. Returns the error."""
        try:
            async with group.reducer() as reducer:
                reducer.add(f"of {group.rank}", np.ones(100_000))
        except zc.GroupMismatch as error:
            return type(error).__name__, str(error)
        raise AssertionError("other names did not fail")

    async def misuse(self, group: zc.Group) -> list[str]:
        """Calls that are refused at once. Returns the errors' texts."""
        said = []

        def refused(kind: Any, call: Any) -> None:
            with pytest.raises(kind) as caught:
                call()
            said.append(str(caught.value))

        refused(ValueError, lambda: group.reducer(op="max"))  # type: ignore[arg-type]
        refused(ValueError, lambda: group.reducer(bucket="many"))
        refused(ValueError, lambda: group.reducer(bucket=0))
        refused(TypeError, lambda: group.reducer(bucket=2.5))  # type: ignore[arg-type]
        refused(TypeError, lambda: group.reducer(hook="int8"))  # type: ignore[arg-type]
        reducer = group.reducer()
        refused(RuntimeError, lambda: reducer.add("w", np.ones(3)))
        refused(RuntimeError, reducer.result)
        async with reducer:
            refused(RuntimeError, reducer.__enter__)
            refused(RuntimeError, reducer.result)
            reducer.add("w", np.ones(3))
            refused(ValueError, lambda: reducer.add("w", np.ones(3)))
            refused(TypeError, lambda: reducer.add(3, np.ones(3)))  # type: ignore[arg-type]
            refused(TypeError, lambda: reducer.add("i", np.ones(3, np.int32)))
            refused(TypeError, lambda: reducer.add("o", np.array(["a"])))
        refused(RuntimeError, lambda: reducer.add("x", np.ones(3)))
        return said

    async def raising(self, group: zc.Group) -> str:
        """A block that raises before anything is added. Returns the error's text of a later look at the result."""
        reducer = group.reducer()
        with pytest.raises(KeyError, match="mine"):
            async with reducer:
                raise KeyError("mine")
        with pytest.raises(RuntimeError) as caught:
            reducer.result()
        return str(caught.value)

    async def packed(self, group: zc.Group) -> tuple[int, int]:
        """Operations and copied bytes of a step with buckets of 1 KiB."""
        before = zc.stats()
        async with group.reducer(bucket="1KiB") as reducer:
            for number in range(10):
                reducer.add(f"{number}", np.full(100, number + group.rank, np.float32))
                reducer.add(f"double {number}", np.full(10, number, np.float64))
        result = reducer.result()
        assert list(result) == [f"{kind}{number}" for number in range(10) for kind in ("", "double ")]
        assert all((result[f"{number}"] == number + (group.size - 1) / 2).all() for number in range(10))
        assert all((result[f"double {number}"] == number).all() for number in range(10))
        after = zc.stats()
        copied = sum(
            stats.copies[PACKED].nbytes * sign for stats, sign in ((after, 1), (before, -1)) if PACKED in stats.copies
        )
        return after.collectives - before.collectives, copied


async def all_of(actors: list[Any], method: str, *args: Any, **kwargs: Any) -> list[Any]:
    return list(await asyncio.gather(*(getattr(actor, method)(*args, **kwargs) for actor in actors)))


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=8, log_to_driver=False) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainers(node: Any) -> AsyncIterator[tuple[Any, list[Any]]]:
    actors: list[Any] = [await Trainer.spawn() for _ in range(SIZE)]
    yield await zc.group(actors), actors
    for actor in actors:
        await zc.kill(actor)


def exact(op: str = "mean", step: int = 0) -> dict[str, Any]:
    """The sums in the order of ranks, as float32."""
    totals = gradients(0, step)
    for rank in range(1, SIZE):
        for name, grad in gradients(rank, step).items():
            totals[name] = np.asarray(totals[name] + grad)
    return totals if op == "sum" else {name: np.asarray(total / np.float32(SIZE)) for name, total in totals.items()}


@pytest.mark.parametrize("bucket", [1, "1KiB", "25MiB"])
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_all_ranks_get_the_same_bits_for_every_bucket(trainers: Any, op: str, bucket: Any) -> None:
    group, actors = trainers
    for results, nbytes, writable in await all_of(actors, "step", group, op=op, bucket=bucket):
        assert list(results) == list(SHAPES)
        for name, expected in exact(op).items():
            assert (results[name].dtype, results[name].shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(results[name], expected)
        assert nbytes == sum(grad.nbytes for grad in gradients(0).values())
        assert not writable


async def test_plain_methods(trainers: Any) -> None:
    group, actors = trainers
    for results in await all_of(actors, "step_plain", group):
        for name, expected in exact("sum").items():
            np.testing.assert_array_equal(results[name], expected)


async def test_small_arrays_share_operations(trainers: Any) -> None:
    group, actors = trainers
    for operations, copied in await all_of(actors, "packed", group):
        assert operations == 4 + 1 + 1, "buckets of three arrays of 400 bytes, one of float64, and the end of the step"
        assert copied == 10 * 480


@pytest.mark.parametrize(
    "make", [zc.hooks.BF16, zc.hooks.Int8, zc.hooks.FP8, lambda: zc.hooks.TopK(0.1), lambda: zc.hooks.PowerSGD(4)],
    ids=["bf16", "int8", "fp8", "topk", "powersgd"],
)  # fmt: skip
async def test_hooks(trainers: Any, make: Any) -> None:
    group, actors = trainers
    told = await all_of(actors, "steps_with", group, make, 3)
    for steps, nbytes in told:
        for step, found in enumerate(steps):
            np.testing.assert_array_equal(found, told[0][0][step])
            expected = exact(step=step)["w"]
            assert found.shape == expected.shape
            assert np.linalg.norm(found - expected) < 1.5 * np.linalg.norm(expected)
        assert 0 < nbytes < sum(grad.nbytes for grad in gradients(0).values())


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("raises", "ZeroDivisionError", "a hook of mine"),
        ("later", "ZeroDivisionError", "a hook of mine"),
        ("no snapshot", "ZeroDivisionError", "a hook of mine"),
        ("nonsense", "TypeError", "Bad.reduce('b') yielded str: a hook yields Sum or Gather"),
        ("nothing", "TypeError", "yielded Sum of nothing: it takes arrays"),
        ("lists", "TypeError", "yielded Gather of list: it takes arrays"),
        ("other request", "GroupMismatch", "name='b'"),
    ],
)
async def test_a_hook_that_does_wrong_on_one_rank(trainers: Any, how: str, kind: str, said: str, rank: int) -> None:
    """All ranks get the error, and the group goes on."""
    group, actors = trainers
    for found, text in await all_of(actors, "bad", group, how, rank):
        assert found == kind, text
        assert said in text
    await test_plain_methods(trainers)


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize("kind", [OSError, SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("where", ["snapshot", "wait", "close", "restore"])
async def test_a_hook_that_raises_anywhere_ends_the_step_of_all_ranks(
    trainers: Any, where: str, kind: type[BaseException], plain: bool
) -> None:
    group, actors = trainers
    method, first = "failing_plain" if plain else "failing", kind.__name__
    for by in (-1, 0, 1):
        async with asyncio.timeout(30):
            found = await all_of(actors, method, group, where, kind, by)
        if by < 0:  # no block raises: there is nothing to close or to undo
            assert found == ["" if where in {"close", "restore"} else first] * SIZE
        elif where in {"close", "restore"}:  # the error of the block, but for an end of more than the step
            own = "LookupError" if kind is OSError else first
            assert [each for rank, each in enumerate(found) if rank != 1] == ["LookupError"] * (SIZE - 1)
            assert found[1] in {own, "LookupError"}
        else:
            assert set(found) <= {first, "LookupError"}
    await test_plain_methods(trainers)


async def test_a_request_that_raises_stop_iteration_is_no_end_of_its_hook(trainers: Any) -> None:
    group, actors = trainers
    for found, text in await all_of(actors, "bad", group, "stops", 1):
        assert "StopIteration" in found + text and "returned" not in text, (found, text)
    await test_plain_methods(trainers)


@pytest.mark.parametrize(("how", "kind"), [("other shape", "ValueError"), ("no array", "TypeError")])
async def test_a_hook_that_returns_nonsense(trainers: Any, how: str, kind: str) -> None:
    """On all ranks alike, as hooks are of one kind."""
    group, actors = trainers
    told = await asyncio.gather(*(actor.bad(group, how, rank) for rank, actor in enumerate(actors)))
    assert [found for found, _ in told] == [kind] * SIZE
    assert all("Bad.reduce('b') returned" in text for _, text in told)


async def test_other_names_on_the_ranks(trainers: Any) -> None:
    group, actors = trainers
    for found, text in await all_of(actors, "other_name", group):
        assert found == "GroupMismatch"
        assert "rank 0 called add('of 0', float64, (100000,)), and rank 1 called add('of 1'," in text


async def test_misuse_is_refused(trainers: Any) -> None:
    group, actors = trainers
    for said in await all_of(actors, "misuse", group):
        for text, part in zip(
            said,
            ["'mean' or 'sum'", "'many' is no size", "at least 1 byte", "not 2.5", "type str is no hook", "inside of",
             "behind the reducer's block", "one block", "behind", "was added before", "a name is a string", "mean",
             "Reducer.add", "inside of"],
            strict=True,
        ):  # fmt: skip
            assert part in text


async def test_a_block_that_raises(trainers: Any) -> None:
    group, actors = trainers
    for said in await all_of(actors, "raising", group):
        assert "behind the reducer's block, where that has not raised" in said


async def test_only_members_have_reducers(trainers: Any) -> None:
    with pytest.raises(RuntimeError, match="is not a member"):
        trainers[0].reducer()
