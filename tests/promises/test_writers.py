"""Objects over the same memory that NumPy's write flag does not reach, one by one: no receiver sees their writes."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import pytest_asyncio
import uvloop

import zcactor as zc
from tests.promises.recipes import FRAMES, Boxed, digest, make, part_of, write
from tests.promises.weights import SERVED, Layers, Reader, Server, checksum

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

N = 100_000
LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}


@zc.actor
class Keeper:
    """Keep the last object that was received."""

    def keep(self, value: Any) -> int:
        """Keep an object. Returns its digest."""
        self.value = value
        return digest(value)

    def digest(self) -> int:
        """The digest of the last object."""
        return digest(self.value)

    def own(self, value: Any) -> None:
        """Own an array that was moved here, and write to it."""
        self.value = value
        value[:] = 5

    def twice(self, value: Any) -> tuple[int, int]:
        """Look twice."""
        self.value = value
        return digest(value), digest(value)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["local", "tcp"], autouse=True)
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A runtime for all tests: a process imports what a frame needs once."""
    async with zc.init(transports=[request.param], log_to_driver=False):
        yield request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keeper(transport: str) -> Any:
    """A reader on that transport."""
    return await Keeper.spawn()


# ---------------------------------------------------------------- servers that update in place


@pytest.mark.parametrize("how", [*SERVED, "moved"])
async def test_each_step_reads_the_weights_of_that_step(how: str) -> None:
    server: Any = await Server.spawn(how if how != "moved" else "")
    if how == "moved":
        await server.take(zc.move(np.zeros(2 * N)))
    kept = []
    for step in range(4):
        kept.append(await server.rows())
        reader: Any = await Reader.spawn()  # has never read before
        assert await reader.read(server) == step
        await server.update()
        assert [each[0, 0] for each in kept] == list(range(step + 1))
        assert await reader.sum() == checksum(kept[-1])


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("give", ["layer", "rows"])
async def test_a_layer_of_a_vector_is_a_snapshot(give: str, flat: bool) -> None:
    model: Any = await Layers.spawn()
    first = await getattr(model, give)()
    await model.step(flat)
    second = await getattr(model, give)()
    assert (first == 0).all() and (second == 1).all()


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize("part", ["frame", "column", "rows", "columns", "to_numpy", "values.T", "column.array"])
async def test_writes_to_a_frame_leave_what_was_passed_of_it(keeper: Any, part: str) -> None:
    wrong: list[Any] = []
    for maker in FRAMES:
        for value in range(4):  # four ways to write
            frame = make(maker, 8 * N, 0, 1)
            passed = frame if part == "frame" else part_of(frame, part)
            if passed is None:
                continue
            before = await keeper.keep(passed)
            assert before == digest(passed)
            write(frame, 40 + value)
            if await keeper.digest() != before:
                wrong.append((maker, value))
            again = part_of(frame, part) if part != "frame" else frame
            if await keeper.keep(again) != digest(again):
                wrong.append((maker, value, "passed again"))
    assert not wrong, wrong


async def test_a_column_that_is_passed_at_each_step_is_that_of_the_step(keeper: Any) -> None:
    frame = pd.DataFrame({"a": np.zeros(N), "b": np.ones(N)}) + 1
    for step in range(4):
        column = frame["a"]
        assert await keeper.keep(column) == digest(column)
        del column
        frame.loc[:, "a"] = float(step + 2)


# ---------------------------------------------------------------- buffers

LOOKS: dict[str, Callable[[Any], Any]] = {
    "memoryview": memoryview,
    "frombuffer": lambda x: np.frombuffer(x, float),
    "arrow": pa.array,
    "ctypes": lambda x: (ctypes.c_double * len(x)).from_buffer(x),
    "view": lambda x: x[1:],
    "dlpack": np.from_dlpack,
    "series": lambda x: pd.Series(x, copy=False),
}


@pytest.mark.parametrize("maker", [np.ones, zc.ones])
@pytest.mark.parametrize("how", ["memoryview", "ctypes", "view"])
async def test_a_buffer_that_is_filled_anew_is_passed_as_it_is(keeper: Any, maker: Any, how: str) -> None:
    x = maker(N)
    writer = LOOKS[how](x)
    for step in range(4):
        assert await keeper.keep(x) == digest(x), step
        writer[0] = step + 2.0


@pytest.mark.parametrize("maker", [np.ones, zc.ones])
@pytest.mark.parametrize("how", LOOKS)
async def test_what_was_moved_is_reached_from_one_side_only(keeper: Any, maker: Any, how: str) -> None:
    x = maker(N)
    look = LOOKS[how](x)
    before = digest(look)
    moved = zc.move(x)
    try:
        await keeper.own(moved)
    except ValueError:
        return  # refused
    if how == "series":  # it holds the array itself, which is unusable then
        with pytest.raises((ValueError, TypeError), match="zc.move"):
            look.sum()
        return
    seen = digest(look)  # outside the assertion, whose report would read memory that is gone by then
    assert seen == before
    there = await keeper.digest()
    write(look, 77)
    assert await keeper.digest() == there


def ones() -> Any:
    """An array of NumPy's."""
    return np.ones(N)


def zc_ones() -> Any:
    """An array of the store's."""
    return zc.ones(N)


BOXES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "array": lambda: (lambda a: (Boxed(a), a))(ones()),
    "memoryview": lambda: (lambda a: (Boxed(memoryview(a)), a))(ones()),
    "slice, by the slice": lambda: (lambda a: (lambda b: (Boxed(b), b))(a[10:]))(ones()),
    "slice, by the owner": lambda: (lambda a: (Boxed(a[: N - 10]), a))(ones()),
    "slice, by the reshaped": lambda: (lambda a: (Boxed(a[:90]), a.reshape(-1)))(ones().reshape(100, -1)),
    "memoryview of zc.ones": lambda: (lambda a: (Boxed(memoryview(a)), a))(zc_ones()),
    "memoryview.cast": lambda: (lambda a: (Boxed(memoryview(a).cast("B")), a))(ones()),
    "bytearray": lambda: (lambda b: (Boxed(b), np.frombuffer(b)))(bytearray(8 * N)),
    "ctypes": lambda: (lambda a: (Boxed((ctypes.c_double * N).from_buffer(a)), a))(ones()),
}
"""Objects with buffers of PEP 574, and what is written to."""


@pytest.mark.parametrize("how", BOXES)
async def test_buffers_out_of_band_are_snapshots(keeper: Any, how: str) -> None:
    boxed, writer = BOXES[how]()
    for value in (41, 42):
        before = await keeper.keep(boxed)
        assert before == digest(boxed)
        write(writer, value)
        assert await keeper.digest() == before


@pytest.mark.parametrize("maker", [np.ones, zc.ones])
async def test_a_table_over_an_array_is_a_snapshot(keeper: Any, maker: Any) -> None:
    x = maker(N)
    for value in (41, 42):
        table = pa.table({"x": x})
        before = await keeper.keep(table)
        assert before == digest(table)
        write(x, value)
        assert await keeper.digest() == before


# ---------------------------------------------------------------- threads, and bad input


async def test_writes_of_a_thread_during_the_call_end_with_bytes_that_stay(keeper: Any) -> None:
    keepers = [keeper, await Keeper.spawn()]
    flat = np.zeros(2 * N)
    over, ready = threading.Event(), threading.Event()

    def fill() -> None:
        value = 0.0
        while not over.is_set():
            value += 1
            flat[:] = value
            ready.set()

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        ready.wait()
        refs = [zc.put(flat[:N]) for _ in range(5)]
        seen = [[await keeper.twice(ref) for keeper in keepers] for ref in refs]
    finally:
        over.set()
        thread.join()
    for ref, looks in zip(refs, seen, strict=True):
        assert {each for look in looks for each in look} == {digest(await ref)}


FREEZE: Any = getattr(zc, "freeze", None)


@pytest.mark.parametrize("bad", [np.array([{}, []], object), [1.0, 2.0], None, 3, "text"], ids=repr)
async def test_freeze_takes_arrays_of_plain_bytes(bad: Any) -> None:
    with pytest.raises(TypeError, match="freeze"):
        FREEZE(bad)


async def test_freeze_refuses_what_was_moved(keeper: Any) -> None:
    x = zc.ones(N)
    await keeper.own(zc.move(x))
    with pytest.raises(ValueError, match=r"zc\.move"):
        FREEZE(x)


def by_variable(look: Any) -> tuple[Any, Any, Any]:
    x = np.ones(N)
    seen = look(x)
    return FREEZE(x), seen, x


def by_attribute(look: Any) -> tuple[Any, Any, Any]:
    holder = SimpleNamespace(x=np.ones(N))
    seen = look(holder.x)
    return FREEZE(holder.x), seen, holder.x


def by_element(look: Any) -> tuple[Any, Any, Any]:
    holder = [np.ones(N)]
    seen = look(holder[0])
    return FREEZE(holder[0]), seen, holder[0]


def by_global(look: Any) -> tuple[Any, Any, Any]:
    names = {"x": np.ones(N), "look": look, "freeze": FREEZE}
    exec("seen = look(x)\nfrozen = freeze(x)", names)
    return names["frozen"], names["seen"], names["x"]


def by_keyword(look: Any) -> tuple[Any, Any, Any]:
    x = np.ones(N)
    seen = look(x)
    return FREEZE(x=x), seen, x


@pytest.mark.parametrize("named", [by_variable, by_attribute, by_element, by_global, by_keyword])
async def test_freeze_never_takes_what_has_other_views(named: Any) -> None:
    """However the interpreter counts references: where it cannot tell a name from a view there is a copy."""
    frozen, view, x = named(lambda x: x[1:])
    view[:] = 2
    assert (frozen == 1).all() and not frozen.flags.writeable and (x[1:] == 2).all()
    frozen, _, x = named(lambda _: None)
    assert (frozen == 1).all() and not frozen.flags.writeable
    told_apart = sys.version_info < (3, 14) or named in (by_variable, by_keyword)
    assert (frozen is x) is told_apart and x.flags.writeable is not told_apart
    copied = zc.stats().bytes_copied
    assert (FREEZE(np.ones(N)) == 1).all() and zc.stats().bytes_copied == copied, "a temporary is nobody's"


@pytest.mark.parametrize("n", [0, 1, 2047, 2048, 2049, N])
async def test_what_was_frozen_stays_and_its_pieces_are_no_copies(keeper: Any, n: int) -> None:
    x = np.arange(2.0 * n).reshape(2, n)
    row = x[1]
    frozen = FREEZE(x)
    before = digest(frozen)
    assert before == digest(x) and not frozen.flags.writeable
    copies = zc.stats().copies.get("piece of an open array")
    piece = frozen[1]
    there = await keeper.keep(piece)
    assert zc.stats().copies.get("piece of an open array") == copies
    for each in (x, row):
        write(each, 41)
    assert (digest(frozen), await keeper.digest()) == (before, there)
    with pytest.raises(ValueError, match="read-only"):
        frozen[0] = 1
