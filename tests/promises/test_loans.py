"""Inputs of a group's operations have the elements of the moment of the call, on all ranks."""

from __future__ import annotations

import array as arrays
import asyncio
import contextlib
import pickle
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import EAGER, everywhere
from zcactor.collectives.lending import SNAPSHOT
from zcactor.errors import ProtocolError
from zcactor.process.context import current

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = 3
PLACES = ["processes", *[pytest.param(place, marks=pytest.mark.slow) for place in ("one process", "tcp")]]
PATIENCE = 20
COUNTS = [1, EAGER // 8 - 1, EAGER // 8, EAGER // 8 + 1, 3000, 20_000, 200_000]
"""Elements of float64: around the eager limit, and above the size of arrays that NumPy allocates in the store."""


class Sub(np.ndarray):
    """A subclass without anything of its own."""


class Buffered:
    """An object that hands its buffer to pickle out of band, as PEP 574 says."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __reduce_ex__(self, protocol: Any) -> Any:
        """See `object.__reduce_ex__`."""
        return Buffered, (pickle.PickleBuffer(self.buffer),)


def read_only_view(owner: Any) -> Any:
    """A view that cannot be written to, of an array that can, as pandas gives."""
    view = owner[:]
    view.flags.writeable = False
    return view


def of_pandas(count: int, frame: bool) -> tuple[Any, Any]:
    """A column, or a frame, of pandas, and a function that writes to it."""
    pandas = pytest.importorskip("pandas")
    made = pandas.DataFrame({"a": np.ones(count)})

    def write() -> None:
        made.iloc[:, 0] = 5.0

    return made if frame else made["a"], write


def of_buffer(count: int) -> tuple[Any, Any]:
    """An array of the standard library, and a function that writes to it."""
    made = arrays.array("d", [1.0]) * count

    def write() -> None:
        made[:] = arrays.array("d", [5.0]) * count

    return made, write


def of_bytes(count: int) -> tuple[Any, Any]:
    """A view that cannot be written to, of bytes that can, and a function that writes to these."""
    owner = np.ones(count)
    raw = bytearray(owner.tobytes())

    def write() -> None:
        raw[:] = np.full(count, 5.0).tobytes()

    return np.frombuffer(memoryview(raw).toreadonly()), write


def of_file(count: int) -> tuple[Any, Any]:
    """A file that is mapped for reading, and a function that writes to it through another mapping."""
    with tempfile.NamedTemporaryFile() as file:
        owner = np.memmap(file, "f8", "w+", shape=(count,))
        owner.fill(1.0)
        return np.memmap(file, "f8", "r", shape=(count,)), lambda: owner.fill(5.0)


def with_owner(view: Callable[[Any], Any], *shape: int) -> tuple[Any, Any]:
    """A view of an array that has a name, and a function that writes to the owner."""
    owner = np.ones(shape)
    return view(owner), lambda: owner.fill(5.0)


PIECES: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "slice": lambda n: with_owner(lambda owner: owner[:n], 2 * n),
    "strided": lambda n: with_owner(lambda owner: owner[::2], 2 * n),
    "column": lambda n: with_owner(lambda owner: owner[:, 1], n, 3),
    "row of a reshaped array": lambda n: with_owner(lambda owner: owner.reshape(2, n)[0], 2 * n),
    "transposed": lambda n: with_owner(lambda owner: owner.T, n, 2),
    "reversed": lambda n: with_owner(lambda owner: owner[::-1], n),
    "read-only view": lambda n: with_owner(read_only_view, n),
    "windows": lambda n: with_owner(lambda owner: np.lib.stride_tricks.sliding_window_view(owner, 1)[:, 0], n),
    "read-only strides": lambda n: with_owner(
        lambda owner: np.lib.stride_tricks.as_strided(owner, (n,), (8,), writeable=False), n
    ),
    "read-only buffer": of_bytes,
    "file for reading": of_file,
    "subclass": lambda n: with_owner(lambda owner: owner.view(Sub), n),
    "memoryview": lambda n: with_owner(lambda owner: owner.data, n),
    "broadcast": lambda n: with_owner(lambda owner: np.broadcast_to(owner, (n,)), 1),
    "array.array": of_buffer,
    "Series": lambda n: of_pandas(n, False),
    "DataFrame": lambda n: of_pandas(n, True),
}
"""Inputs that share memory with something that can still be written to, by their kind."""
OPERATIONS = 9
"""Operations of the group that `Lender.claims` calls in vain."""
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("allreduce", {}),
    "eager": ("allreduce", {"plan": "eager"}),
    "naive": ("allreduce", {"plan": "naive"}),
    "shared": ("allreduce", {"plan": "shared"}),
    "ring": ("allreduce", {"plan": "ring"}),
    "halving": ("allreduce", {"plan": "halving"}),
    "reduce_scatter": ("reduce_scatter", {}),
    "allgather": ("allgather", {}),
    "allgather by reference": ("allgather", {"concat": False}),
    "broadcast": ("broadcast", {"root": 0}),
    "alltoall": ("alltoall", {}),
}

SUMS = {"auto", "eager", "naive", "shared", "ring", "halving", "reduce_scatter"}
"""The calls whose result is a sum."""


@zc.actor
class Holder:
    """A reader of an array."""

    def __init__(self) -> None:
        self.kept: Any = None

    def keep(self, x: Any) -> float:
        """Keep an array. Returns its first element."""
        self.kept = x
        return float(x.flat[0])

    def look(self) -> float:
        """The first element, now."""
        return float(self.kept.flat[0])


@zc.actor
class Lender:
    """A member of groups."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.called = asyncio.Event()

    async def release(self) -> None:
        """Let the late rank call."""
        self.go.set()

    async def has_called(self) -> None:
        """Wait for the call of `piece` or `whole`."""
        await self.called.wait()
        self.called.clear()

    async def _turn(self, late: bool) -> None:
        if late:
            await self.go.wait()
            self.go.clear()

    async def piece(self, group: zc.Group, kind: str, count: int, how: str, late: bool) -> tuple[float, float, Any]:
        """Give a piece of something to an operation, and write to all of it after the call. Returns the least and the
        greatest element of the result, and the copies of inputs here, with their bytes."""
        operation, options = CALLS[how]
        x, write = PIECES[kind](count)
        await self._turn(late)
        before = copies()
        work = getattr(group, operation)([x] * group.size if how == "alltoall" else x, **options)
        write()
        self.called.set()
        result = np.asarray(await zc.get(await work) if how == "alltoall" else await work)
        after = copies()
        return float(result.min()), float(result.max()), (after[0] - before[0], after[1] - before[1])

    async def other_header(
        self, group: zc.Group, change: str, count: int, how: str, late: bool
    ) -> tuple[str, Any, float]:
        """Change dtype or shape of an input behind the call, or hand it over, on one rank. Returns dtype and shape of
        the result, and its first element."""
        operation, options = CALLS[how]
        x = zc.full(count, 1.0)
        await self._turn(late)
        work = getattr(group, operation)(x, **options)
        if group.rank == 0:
            if change == "moved":
                with contextlib.suppress(ValueError):  # an array that is lent or was passed is not handed over
                    zc.put(zc.move(x))
            elif change == "dtype":
                x.dtype = np.dtype(np.int64)  # type: ignore[misc]
            else:
                x.shape = (1, count)
        self.called.set()
        result = await work
        if isinstance(result, list):
            result = result[0]
        return result.dtype.str, result.shape, float(result.flat[0])

    async def whole(self, group: zc.Group, count: int, view: bool, late: bool) -> tuple[float, bool, bool, int]:
        """Give an array that has no other views. Returns the first element of the result, whether the array was
        writable meanwhile and afterwards, and the number of copies here."""
        x = np.ones((2, count)).reshape(count, 2) if view else np.ones((count, 2))
        await self._turn(late)
        before = copies()[0]
        work = group.allreduce(x)
        meanwhile = x.flags.writeable
        if meanwhile:
            x.fill(5.0)
        self.called.set()
        result = await work
        return float(result[0, 0]), meanwhile, x.flags.writeable, copies()[0] - before

    def whole_plain(self, group: zc.Group, count: int, rounds: int) -> list[bool]:
        """Reduce an array again and again in a plain method. Returns whether it was writable behind each call."""
        x, found = np.ones(count), []
        for _ in range(rounds):
            group.allreduce(x).result()
            found.append(x.flags.writeable)
        return found

    async def passed(self, group: zc.Group, holder: Any, count: int, how: str, late: bool) -> tuple[bool, float, float]:
        """Pass an array on while a group borrows it, or a part of it. Returns whether it can be written to afterwards,
        and what the reader sees before and after that."""
        x = np.full(count, 1.0)
        await self._turn(late)
        work = group.allreduce(x)
        self.called.set()
        other: Any = None
        if how == "call":
            first = await holder.keep(x)
        elif how == "part":
            first = await holder.keep(x[: count // 2])
        elif how == "put":
            other = zc.put(x)
            first = 1.0
        elif how == "broadcast":
            other = group.broadcast(x, root=0)
            first = 1.0
        elif how == "allgather":
            other = group.allgather(x, concat=False)
            first = 1.0
        elif how == "container":
            first = await holder.keep(np.asarray({"x": [x]}["x"][0]))
        await work
        if other is not None:
            other = await other
        await group.barrier()
        writable = x.flags.writeable
        if writable:
            x.fill(77.0)
        await group.barrier()
        if other is None:
            return writable, first, await holder.look()
        seen = other[group.rank] if how == "allgather" else other
        return writable and how != "broadcast", first, float(seen[0])

    async def claims(self, group: zc.Group, holder: Any, count: int, late: bool) -> list[str]:
        """Use the array that takes a result in all other ways, while the operation is under way. Returns the errors."""
        out, x = np.zeros(count), np.ones(count)
        await self._turn(late)
        work = group.allreduce(x, out=out)
        self.called.set()
        said = []
        reducer = group.reducer()
        uses: list[Callable[[], Any]] = [
            lambda: group.allreduce(out), lambda: group.allreduce(out[:1]), lambda: group.allreduce(out.view(Sub)),
            lambda: group.allreduce(x, out=out), lambda: group.reduce_scatter(out), lambda: group.allgather(out),
            lambda: group.allgather(out, concat=False), lambda: group.broadcast(out, root=group.rank),
            lambda: holder.keep(out), lambda: holder.keep([{"x": out}]), lambda: holder.keep(out[:1]),
            lambda: zc.put(out), lambda: group.alltoall([out] * group.size), lambda: reducer.add("a", out),
            lambda: zc.put(Buffered(out)), lambda: holder.keep([Buffered(out[:1])]),
        ]  # fmt: skip
        reducer._state = "open"  # without a step, which other ranks would take part in
        for use in [] if late else uses:  # with the last call the operation is done
            try:
                use()
                said.append("no error")
            except ValueError as error:
                said.append(str(error))
        for _ in range(OPERATIONS if late else 0):  # the calls of the other ranks count
            with pytest.raises(ValueError, match="await that operation first"):
                await group.barrier()
        if not late:
            with pytest.raises(ValueError, match="read-only"):
                out[0] = 3.0
        result = await work
        assert result is out and float(out.min()) == float(out.max()) == group.size
        out[0] = 7.0  # it is the program's again
        assert await holder.keep(out) == 7.0
        return said

    async def three_ways(self, group: zc.Group, count: int, late: bool) -> tuple[list[str], list[float]]:
        """Use one array as input, as output and as an argument at once. Returns the errors, and sums in order."""
        y, said = np.ones(count), []
        await self._turn(late)
        first = group.allreduce(y)
        self.called.set()
        if count * 8 <= EAGER:
            second = group.allreduce(np.full(count, 2.0), out=y)
        else:
            try:
                if late:  # with the last call the operation is done
                    await group.barrier()
                else:
                    group.allreduce(np.full(count, 2.0), out=y)
            except ValueError as error:
                said.append(str(error))
            second = group.allreduce(np.full(count, 2.0))
        if not second.done() and count * 8 <= EAGER:
            try:
                zc.put(y)
            except ValueError as error:
                said.append(str(error))
        found = [float((await first)[0]), float((await second)[0])]
        await group.allreduce(y, out=y)
        return said, [*found, float(y[0])]

    async def many_adds(self, group: zc.Group, count: int, dtype: Any, bucket: Any) -> list[float]:
        """Add one buffer again and again, with other elements each time, where that is possible."""
        buffer = np.empty(count, dtype)
        async with group.reducer(op="sum", bucket=bucket) as reducer:
            for layer in range(40):
                if not buffer.flags.writeable:
                    buffer = np.empty(count, dtype)
                buffer[:] = layer + 1
                reducer.add(f"{layer}", buffer)
        return [float(each[-1]) for each in reducer.result().values()]

    async def offered(self, group: zc.Group, count: int) -> tuple[str, str]:
        """Concatenate, where the memory for the result has another size. Returns the error."""
        member: Any = current().groups().member(group._key, group.rank)
        lend = member.lend

        def lends(rank: int, seq: int, memory: Any) -> None:
            del memory
            lend(rank, seq, current().store.allocate(count * 8 * group.size - 8))

        if member.seat.next % group.size == group.rank:
            member.lend = lends
        try:
            await group.allgather(np.ones(count))
        except ProtocolError as error:
            return type(error).__name__, str(error)
        finally:
            member.lend = lend
        return "", "no error"

    async def sum(self, group: zc.Group, count: int) -> float:
        """A plain operation."""
        return float((await group.allreduce(np.ones(count)))[0])


def copies() -> tuple[int, int]:
    """Copies of inputs that this process has made, and their bytes."""
    found = zc.stats().copies.get(SNAPSHOT)
    return (0, 0) if found is None else (found.count, found.nbytes)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PLACES)
async def lenders(request: pytest.FixtureRequest) -> AsyncIterator[tuple[zc.Group, list[Any], Any]]:
    """Three members in processes of their own, in one, and over TCP; and a reader for each."""
    options: dict[str, Any] = {"transports": ("tcp",)} if request.param == "tcp" else {}
    async with zc.init(num_cpus=8, log_to_driver=False, store_capacity=256 << 20, **options):
        cls: Any = Lender.options(process="shared") if request.param == "one process" else Lender
        actors = [await cls.spawn() for _ in range(SIZE)]
        yield await zc.group(actors), actors, [await Holder.spawn() for _ in range(SIZE)]
        for actor in actors:
            await zc.kill(actor)


async def late(actors: Sequence[Any], method: str, *args: Any) -> list[Any]:
    """Call a method of all, of which the last one acts when the others have called their operation."""
    calls = [getattr(actor, method)(*args, actor is actors[-1]) for actor in actors]
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(actor.has_called() for actor in actors[:-1]))
        await actors[-1].release()
        found = list(await asyncio.gather(*calls))
        await actors[-1].has_called()
        return found


# ---------------------------------------------------------------- elements of the call


@pytest.mark.parametrize("kind", PIECES)
@pytest.mark.parametrize("count", COUNTS)
async def test_a_piece_of_what_is_open_is_copied_once_at_the_call(
    lenders: tuple[zc.Group, list[Any], Any], kind: str, count: int
) -> None:
    group, actors, _ = lenders
    found = await late(actors, "piece", group, kind, count, "auto")
    nbytes = count * 8 * (2 if kind == "transposed" else 1)
    shared = len({actor._remote.location[0] for actor in actors}) < SIZE
    for least, greatest, (copied, copied_nbytes) in found:
        assert least == greatest == SIZE
        if not shared:
            assert (copied, copied_nbytes) == (1, nbytes)


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("count", [EAGER // 8, EAGER // 8 + 1, 20_000])
async def test_every_operation_reads_the_elements_of_the_call(
    lenders: tuple[zc.Group, list[Any], Any], request: pytest.FixtureRequest, how: str, count: int
) -> None:
    group, actors, _ = lenders
    if how in ("ring", "halving") and (await group.explain(1 << 20)).plan not in ("direct", "naive"):
        return  # these are for several hosts
    wanted = SIZE if how in SUMS else 1
    for least, greatest, _ in await late(actors, "piece", group, "slice", count, how):
        assert least == greatest == wanted


@pytest.mark.parametrize("kind", [kind for kind in PIECES if kind not in {"Series", "DataFrame", "array.array"}])
@pytest.mark.parametrize("how", ["allgather by reference", "broadcast"])
@pytest.mark.parametrize("count", [EAGER // 8 - 1, EAGER // 8 + 1, 20_000])
async def test_what_is_given_by_reference_has_the_elements_of_the_call_on_all_ranks(
    lenders: tuple[zc.Group, list[Any], Any], kind: str, how: str, count: int
) -> None:
    group, actors, _ = lenders
    for least, greatest, _ in await late(actors, "piece", group, kind, count, how):
        assert least == greatest == 1


@pytest.mark.parametrize("how", ["auto", "shared", "allgather", "allgather by reference", "broadcast"])
@pytest.mark.parametrize("change", ["moved", "dtype", "shape"])
@pytest.mark.parametrize("count", [2, 5, EAGER // 8, EAGER // 8 + 1, 20_000])
async def test_the_header_of_an_input_is_that_of_the_call(
    lenders: tuple[zc.Group, list[Any], Any], count: int, change: str, how: str
) -> None:
    """Twice: the second call is made by the recipe of the first."""
    group, actors, _ = lenders
    for _ in range(2):
        found = await late(actors, "other_header", group, change, count, how)
        rows = count * SIZE if how == "allgather" else count
        assert found == [("<f8", (rows,), SIZE if how in SUMS else 1.0)] * SIZE


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("count", [1, EAGER // 16, EAGER // 16 + 1, 20_000])
async def test_an_array_that_nobody_else_has_is_lent(
    lenders: tuple[zc.Group, list[Any], Any], count: int, view: bool
) -> None:
    """A small one is copied, and stays the program's."""
    group, actors, _ = lenders
    small = count * 16 <= EAGER
    shared = len({actor._remote.location[0] for actor in actors}) < SIZE
    for total, meanwhile, after, copied in await late(actors, "whole", group, count, view):
        assert (total, meanwhile, after) == (SIZE, small, True)
        assert shared or copied == small


@pytest.mark.parametrize("count", [10, 3000, 20_000])
async def test_an_array_is_writable_when_its_result_is_there(
    lenders: tuple[zc.Group, list[Any], Any], count: int
) -> None:
    """Also in the thread of a plain method, which may be faster than the loop."""
    group, actors, _ = lenders
    if len({actor._remote.location[0] for actor in actors}) < SIZE:
        return
    for found in await everywhere(actors, "whole_plain", group, count, 50):
        assert all(found)


# ---------------------------------------------------------------- passed on meanwhile


@pytest.mark.parametrize("how", ["call", "part", "put", "broadcast", "allgather", "container"])
@pytest.mark.parametrize("count", [100, 3000, 20_000, 200_000])
async def test_an_array_that_is_passed_on_meanwhile_is_never_changed(
    lenders: tuple[zc.Group, list[Any], Any], how: str, count: int
) -> None:
    group, actors, holders = lenders
    calls = [a.passed(group, h, count, how, a is actors[-1]) for a, h in zip(actors, holders, strict=True)]
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(actor.has_called() for actor in actors[:-1]))
        await actors[-1].release()
        for writable, before, after in await asyncio.gather(*calls):
            assert before == after == 1.0
            assert not writable or count * 8 <= EAGER or how == "part"
        await actors[-1].has_called()


# ---------------------------------------------------------------- results into arrays


@pytest.mark.parametrize("count", [10, 3000, 20_000, 200_000])
async def test_an_array_that_takes_a_result_is_used_for_nothing_else(
    lenders: tuple[zc.Group, list[Any], Any], count: int
) -> None:
    group, actors, holders = lenders
    said_by = await late(actors, "claims", group, holders[0], count)
    assert [len(said) for said in said_by] == [16, 16, 0]
    for said in said_by:
        for text in said:
            assert "await that operation first" in text and "(out=)" in text, text


@pytest.mark.parametrize("count", [10, 3000, 20_000, 200_000])
async def test_one_array_that_is_used_in_three_ways_at_once(
    lenders: tuple[zc.Group, list[Any], Any], count: int
) -> None:
    group, actors, _ = lenders
    outcomes = await late(actors, "three_ways", group, count)
    small = count * 8 <= EAGER
    for said, found in outcomes:
        assert found == [SIZE, 2 * SIZE, (2 * SIZE if small else 1) * SIZE]
        assert all("await that operation first" in text for text in said)
    assert [len(said) for said, _ in outcomes] == [1, 1, 0 if small else 1]


# ---------------------------------------------------------------- reducers, and rows of all


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bucket", [1, "1KiB", "100KiB", "25MiB"])
@pytest.mark.parametrize("count", [1, 1000, (64 << 10) // 8 - 1, (64 << 10) // 8, 20_000])
async def test_a_reducer_takes_the_elements_of_the_moment(
    lenders: tuple[zc.Group, list[Any], Any], count: int, bucket: Any, dtype: Any
) -> None:
    group, actors, _ = lenders
    for found in await everywhere(actors, "many_adds", group, count, dtype, bucket):
        assert found == [SIZE * (layer + 1.0) for layer in range(40)]


async def test_memory_for_rows_of_another_size(lenders: tuple[zc.Group, list[Any], Any]) -> None:
    """The operation fails on all ranks, and the group goes on."""
    group, actors, _ = lenders
    if (await group.explain(1 << 20)).plan != "shared":
        return  # over several hosts each loan is checked when it is used
    for _ in range(SIZE):
        outcomes = await asyncio.wait_for(everywhere(actors, "offered", group, 20_000), PATIENCE)
        assert {name for name, _ in outcomes} == {"ProtocolError"}, outcomes
        assert "for the result of allgather(float64, rows of ()), which rank" in outcomes[0][1]
        assert await everywhere(actors, "sum", group, 20_000) == [SIZE] * SIZE
