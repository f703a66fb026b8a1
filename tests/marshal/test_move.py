"""Handing over write access."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.marshal.wire import Wire, address
from zcactor.marshal.move import Move, has_other_views, is_held_elsewhere, is_moved, move, retire
from zcactor.marshal.packed import shared
from zcactor.objectstore.heap import use_handler
from zcactor.objectstore.ref import RegionKind

USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "iadd": lambda x: x.__iadd__(1),
    "element": lambda x: x[0] * 2,
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[1]),
    "bool": lambda x: bool(x[0]),
    "str": lambda x: str(x[0]),
    "format": lambda x: f"{x[0]:.3f}",
    "hash": lambda x: hash(x[0]),
    "compare": lambda x: x == 1,
    "less": lambda x: x < 1,
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "any": lambda x: x.any(),
    "dot": lambda x: x @ x,
    "sqrt": lambda x: np.sqrt(x),
    "abs": lambda x: abs(x),
    "astype": lambda x: x.astype(float),
    "asarray": lambda x: np.asarray(x, "f8"),
    "write": lambda x: x.__setitem__(0, 1),
    "fill": lambda x: x.fill(0),
    "sort": lambda x: x.sort(),
    "writeable": lambda x: np.copyto(x, 1),
    "norm": lambda x: np.linalg.norm(x),
    "move": move,
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_moved_array_raises(wire: Wire, use: str) -> None:
    array = wire.left.store.empty(1000)
    wire.left.marshaller.pack(move(array))
    with pytest.raises(ValueError, match=r"zc\.move|read-only"):
        USES[use](array)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"a": {1: (x,)}}, lambda x: [x, {1, 2}]])
def test_moved_array_cannot_be_passed_again(wire: Wire, wrap: Callable[[Any], Any]) -> None:
    array = wire.left.store.empty(1000)
    wire.left.marshaller.pack(move(array))
    with pytest.raises(ValueError, match=r"zc\.move"):
        wire.left.marshaller.pack(wrap(array))
    assert is_moved(array)
    assert repr(array) == "array([<moved>, <moved>], dtype=object)"


@pytest.mark.parametrize("nbytes", [8, 80, 8000])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("pickled", [False, True])
def test_receiver_gets_a_writable_array(wire: Wire, nbytes: int, inside: bool, pickled: bool) -> None:
    array = wire.left.store.empty(nbytes // 8) if inside else np.empty(nbytes // 8)
    array.fill(3)
    where = address(array)
    got = wire.send([move(array), {1}] if pickled else [move(array)])[0]
    assert is_moved(array)
    assert got.tolist() == [3] * (nbytes // 8)
    got += 1
    assert got[0] == 4
    by_reference = nbytes >= 512
    assert [part.kind for part in wire.parts] == [RegionKind.MOVED] * by_reference
    assert not by_reference or (address(got) == where) == inside
    assert wire.left.bytes_copied == (nbytes if by_reference and not inside else 0)


def test_moved_back_to_its_owner(wire: Wire) -> None:
    array = wire.left.store.empty((50, 50))
    array.fill(1)
    where = address(array)
    there = wire.send(move(array))
    there[1] = 5
    there = there[::2]  # only a view is left
    back = wire.send(move(there), back=True)
    assert is_moved(there)
    assert (back.shape, address(back)) == ((25, 50), where)
    back[...] = 7
    assert wire.left.bytes_copied == wire.right.bytes_copied == 0


def test_received_array_that_was_moved_to_us_may_be_moved_on_or_shared(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    there = wire.send(move(array))
    back = wire.send(move(there), back=True)
    assert is_moved(there)
    back.fill(9)
    again = wire.send(move(back))
    shared = wire.send(again, back=True)
    for each in (again, shared):
        with pytest.raises(ValueError, match="read-only"):
            each[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            each.flags.writeable = True
        with pytest.raises(ValueError, match=r"x\.copy\(\)"):
            wire.right.marshaller.pack(move(each))
    assert shared[0] == 9


@pytest.mark.parametrize("home", [False, True], ids=["received", "back home"])
@pytest.mark.parametrize("part", [np.s_[:500], np.s_[500:], np.s_[::2], np.s_[:]], ids=str)
def test_a_part_of_what_was_moved_to_us_is_a_snapshot_until_all_of_it_is_shared(
    wire: Wire, home: bool, part: slice
) -> None:
    ours = wire.send(move(wire.left.store.empty(1000)))
    if home:
        ours = wire.send(move(ours), back=True)
    ours.fill(3)
    shared = wire.send(ours[part], back=not home)
    ours[0] = ours[-1] = 5
    assert (shared == 3).all()
    whole = wire.send(ours, back=not home)
    with pytest.raises(ValueError, match="read-only"):
        ours[0] = 6
    with pytest.raises(ValueError, match="WRITEABLE"):
        ours.flags.writeable = True
    with pytest.raises(ValueError, match="shared before"):
        (wire.left if home else wire.right).marshaller.pack(move(ours))
    assert np.shares_memory(whole, wire.send(ours[part], back=not home))


def test_view_of_what_was_shared_cannot_be_moved(wire: Wire) -> None:
    """A view that was made before the sharing keeps its own flag."""
    ours = wire.send(move(wire.left.store.empty(1000)))
    view = ours[:500]
    wire.send(ours, back=True)
    assert view.flags.writeable, "NumPy has no way to reach it"
    del ours
    with pytest.raises(ValueError, match="shared before"):
        wire.right.marshaller.pack(move(view))


@pytest.mark.parametrize("home", [False, True], ids=["received", "back home"])
def test_moved_value_that_is_passed_on_unopened_is_read_only_for_who_opens_it(wire: Wire, home: bool) -> None:
    """Arrays that were taken out of it before become read-only, too."""
    array = wire.left.store.empty(1000)
    if home:
        array = wire.send(move(array))
    sender, receiver = (wire.right, wire.left) if home else (wire.left, wire.right)
    payload, parts, flags = sender.marshaller.pack(move(array))
    imported = [wire.imported(part, receiver) for part in parts]
    ours = receiver.marshaller.unpack(payload, imported, flags)
    assert ours.flags.writeable
    assert [part.kind for part in shared(imported)] == [RegionKind.ARRAY]
    with pytest.raises(ValueError, match="read-only"):
        ours[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        ours.flags.writeable = True
    with pytest.raises(ValueError, match="shared before"):
        receiver.marshaller.pack(move(ours))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("count", [4, 1000])
def test_read_only_array_cannot_be_moved(wire: Wire, inside: bool, count: int) -> None:
    array = wire.left.store.empty(count) if inside else np.empty(count)
    array.flags.writeable = False
    with pytest.raises(ValueError, match=r"read-only here.*x\.copy\(\)"):
        wire.left.marshaller.pack(move(array))
    assert not is_moved(array)


def test_shared_array_cannot_be_moved(wire: Wire) -> None:
    for array in (wire.left.store.empty(1000), np.empty(1000)):
        wire.send(array)
        with pytest.raises(ValueError, match="shared before"):
            wire.left.marshaller.pack([1, move(array)])
        with pytest.raises(ValueError, match="shared before"):
            wire.left.marshaller.pack(move(wire.send(array)))


@pytest.mark.parametrize("count", [4, 1000])
def test_array_with_other_views_cannot_be_moved(wire: Wire, count: int) -> None:
    array = wire.left.store.empty(count)
    view = array[1:]
    for either in (array, view):
        with pytest.raises(ValueError, match=r"other views.*delete them first"):
            wire.left.marshaller.pack(move(either))
    array[0] = 1
    del view, either
    wire.left.marshaller.pack(move(array))
    assert is_moved(array)
    only = wire.left.store.empty(count)[1:]
    assert wire.send(move(only)).shape == (count - 1,)


def test_one_message_hands_over_an_array_once(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    outside = np.empty(1000)
    for both in ([move(array), move(array)], [move(array), array], [{1}, move(array), array], [move(outside), outside]):
        with pytest.raises(ValueError, match="twice"):
            wire.left.marshaller.pack(both)
    array[0] = outside[0] = 1  # nothing was sent, so the arrays are as before
    with pytest.raises(ValueError, match="shared before"):
        wire.left.marshaller.pack([array, move(array)])


def test_failure_on_the_way_leaves_the_array_alone(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    nothing = (each for each in (1, 2))  # cannot be pickled
    for bad in (nothing, [{1}, nothing]):
        with pytest.raises(TypeError):
            wire.left.marshaller.pack([move(array), bad])
    array.fill(1)
    assert array.sum() == 1000


@pytest.mark.parametrize(
    "x", [1, [1], "a", np.float64(1), np.ma.zeros(3), np.zeros((1, 1)).view(np.matrix)], ids=lambda x: type(x).__name__
)
def test_only_plain_arrays_can_be_moved(x: Any) -> None:
    with pytest.raises(TypeError, match=r"zc\.move takes a numpy array"):
        move(x)


@pytest.mark.parametrize("dtype", [object, np.dtypes.StringDType(), [("a", object)]], ids=str)
def test_only_plain_bytes_can_be_moved(dtype: Any) -> None:
    with pytest.raises(TypeError, match="plain bytes"):
        move(np.zeros(3, dtype))


def test_memory_is_given_back_with_the_last_name(wire: Wire) -> None:
    store = wire.left.store
    base = store.stats().used
    got = wire.send(move(store.empty(1000)))
    wire.parts = ()
    del got
    gc.collect()
    assert store.stats().used == base, "nothing but the mark had it"
    array = store.empty(1000)
    got = wire.send(move(array))
    wire.parts = ()
    del got
    assert is_moved(array)
    assert store.stats().used > base, "something may look at it, for all we know"
    del array
    assert store.stats().used == base


@pytest.fixture
def numpy_in_store(wire: Wire) -> Iterator[None]:
    """Let NumPy allocate large arrays in the left store."""
    before = wire.left.store.heap.use(65536)
    yield
    use_handler(before)


def own(wire: Wire, count: int) -> Any:
    """An array that NumPy allocated."""
    return np.full(count, 7.0)


def stored(wire: Wire, count: int) -> Any:
    """An array that the store allocated."""
    array = wire.left.store.empty(count)
    array.fill(7)
    return array


@pytest.mark.parametrize(
    ("make", "look"),
    [(own, lambda x: x[:4]), (own, memoryview), (own, lambda x: np.frombuffer(x, "f8")), (stored, memoryview)],
    ids=["view", "buffer", "foreign", "buffer of the store"],
)
@pytest.mark.parametrize("count", [8, 1000, 100_000], ids=["inline", "outside", "store"])
@pytest.mark.usefixtures("numpy_in_store")
def test_what_looks_at_the_memory_never_sees_anothers(
    wire: Wire, make: Callable[[Wire, int], Any], look: Callable[[Any], Any], count: int
) -> None:
    """Once the array's own name is gone, a view or a buffer is the only reference to it."""
    array = make(wire, count)
    seen, where = look(array), address(array)
    used = wire.left.store.stats().used
    marked = move(array)
    del array
    got = wire.send(marked)
    del marked
    wire.parts = ()
    assert seen[0] == seen[3] == 7
    shared = address(got) == where
    got.fill(3)
    assert seen[0] == seen[3] == (3 if shared else 7)
    del got
    gc.collect()
    fresh = [np.full(count, 99.0) for _ in range(8)] + [wire.left.store.empty(count) for _ in range(8)]
    for each in fresh[8:]:
        each.fill(98)
    assert seen[0] == seen[3] == (3 if shared else 7)
    assert not any(each.ctypes.data == where for each in fresh)
    del fresh, each, seen
    gc.collect()
    assert wire.left.store.stats().used <= max(used - count * 8, 0) + 4096


def test_views_that_cannot_be_seen_keep_the_memory(wire: Wire) -> None:
    """A view, a buffer or another library's object over an array's own memory must not look at freed memory."""
    array = np.arange(100_000.0)
    view, buffer = array[10:20], array.data
    marked = move(array)
    assert is_held_elsewhere(Move(array))
    got = wire.send(marked)
    assert is_moved(array)
    got.fill(-1)
    del array
    np.full(100_000, 5.0)  # an array of that size would take freed memory
    assert view.tolist() == [*map(float, range(10, 20))]
    assert buffer[99_999] == 99_999


def test_second_name_dies_too(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    names = [array, array]
    used = wire.left.store.stats().used
    wire.send(move(array))
    assert is_moved(names[0])
    wire.parts = ()
    assert wire.left.store.stats().used == used  # other objects may still look at it
    del array
    names.clear()
    assert wire.left.store.stats().used < used


def test_counting(wire: Wire) -> None:
    array = wire.left.store.empty(3)
    assert not has_other_views(array)
    assert not has_other_views(np.zeros(3))
    view = array[:]
    assert has_other_views(array)
    assert has_other_views(view)
    del view
    assert not is_held_elsewhere(Move(array))
    assert not is_held_elsewhere(Move(np.zeros(3)))
    second = array
    assert is_held_elsewhere(Move(second))


def test_retired_array_of_any_kind() -> None:
    for array in (np.zeros(0), np.zeros(()), np.zeros((3, 4), "M8[s]")[1:, ::2], np.zeros(3, [("a", "i4")])):
        retire(array)
        assert is_moved(array)
        with pytest.raises(ValueError, match=r"zc\.move"):
            array.sum()


@pytest.mark.parametrize("received", [False, True], ids=["made", "received"])
@pytest.mark.parametrize("moved", [False, True], ids=["shared", "moved"])
@pytest.mark.parametrize("count", [4, 1000])
def test_array_of_an_older_runtime_is_memory_like_any_other(
    wire: Wire, received: bool, moved: bool, count: int
) -> None:
    older = Wire()
    older.left.store.process, older.right.store.process = b"L" * 16, b"R" * 16  # type: ignore[misc]
    array = older.right.store.empty(count)
    array.fill(3)
    if received:
        array = older.send(move(array), back=True)
    got = wire.send(move(array) if moved else array)
    assert (got == 3).all()
    assert got.flags.writeable == moved
    assert is_moved(array) == moved
    assert not np.shares_memory(got, array)
    assert wire.left.bytes_copied == (count * 8 if count == 1000 else 0)
    assert all(part.holder.store is wire.left.store for part in wire.parts)
    older.close()
