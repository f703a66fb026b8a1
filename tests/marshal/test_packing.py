"""Values on their way out: references, copies, and one object for a value that occurs twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.marshal.wire import Wire, address, assert_same


def through_a_view(array: Any, view: Any) -> None:
    """Write through a view that was made earlier."""
    view[:] = 2


def through_the_flag(array: Any, view: Any) -> None:
    """Write to an array that owns its memory, and leave no trace in its flags."""
    array.setflags(write=True)
    array[...] = 2
    array.setflags(write=False)


def test_container_may_change_after_packing(wire: Wire) -> None:
    value: dict[str, Any] = {"list": [1, 2], "bytes": bytearray(b"abc"), "odd": [{3}]}
    payload, parts, flags = wire.left.marshaller.pack(value)
    value["list"].append(3)
    value["bytes"][0] = 0
    value["odd"][0].add(4)
    assert wire.right.marshaller.unpack(payload, parts, flags) == {
        "list": [1, 2],
        "bytes": bytearray(b"abc"),
        "odd": [{3}],
    }


def test_big_strided_array_is_packed_when_copied(wire: Wire) -> None:
    array = np.arange(100_000, dtype="u4").reshape(100, 1000)[:, ::10]
    got = wire.send(array)
    assert_same(got, array)
    assert wire.left.bytes_copied == array.nbytes
    assert wire.left.store.stats().used < 2 * array.nbytes


def test_view_of_the_store_is_never_copied(wire: Wire) -> None:
    array = wire.left.store.empty((64, 64, 8), "f4")
    array[...] = np.arange(array.size).reshape(array.shape)
    for view in (
        array, array[3:, ::2], array[::-1], array.T, array[:, 5], array[..., None], array.reshape(-1), array.view("u2"),
        array.swapaxes(0, 2)[1:, ::-3], array["f4" and ...], array[10:20].view([("a", "f4"), ("b", "f4")]),
    ):  # fmt: skip
        got = wire.send({"view": view})["view"]
        assert_same(got, view)
        assert address(got) == address(view)
    assert wire.left.bytes_copied == 0
    assert wire.right.counters.bytes_mapped > 0


def test_same_array_is_one_object(wire: Wire) -> None:
    arrays = (wire.left.store.empty(1000), np.arange(1000.0), np.asfortranarray(np.ones((40, 50))))
    for array in arrays:
        first = second = wire.send(array)
        part = wire.parts[0]
        used = wire.left.store.stats().used
        second = wire.send([array, {"again": array}])
        assert {p.holder.id for p in wire.parts} == {part.holder.id}
        assert wire.left.store.stats().used == used
        assert_same(second[1]["again"], first)
    assert wire.left.bytes_copied == 8000 + 16000


def test_view_outside_the_store_is_copied_once_per_message(wire: Wire) -> None:
    owner = np.arange(2000.0)
    view = owner[10:]
    wire.send([view, {"again": view}, object])  # dtype object: a type is pickled, so all of the array is
    assert wire.left.bytes_copied == view.nbytes
    assert view.flags.writeable and owner.flags.writeable, "a piece of an open array stays as it is"


def test_changes_behind_our_back_are_not_missed(wire: Wire) -> None:
    array = np.zeros(1000)
    wire.send(array)
    array.flags.writeable = True  # memory outside the store is NumPy's, and NumPy allows that
    array[0] = 1
    assert wire.send(array)[0] == 1


@pytest.mark.parametrize("write", [through_a_view, through_the_flag])
@pytest.mark.parametrize("make", [lambda: np.zeros(5000), lambda: np.zeros((50, 100), order="F")], ids=["C", "F"])
def test_copy_of_what_was_written_to_since_is_made_again(
    wire: Wire, write: Callable[[Any, Any], None], make: Callable[[], Any]
) -> None:
    array = make()
    view = array.T[...]
    first = wire.send(array)
    again = wire.send(array)
    assert address(again) == address(first), "nothing has changed"
    assert wire.left.bytes_copied == array.nbytes
    write(array, view)
    second = wire.send(array)
    assert (second == 2).all() and (first == 0).all()
    assert address(wire.send(array)) == address(second)
    assert wire.left.bytes_copied == 2 * array.nbytes
    if write is through_a_view:
        view[-1] = 3  # one byte in the last elements is enough
        assert (wire.send(array) == array).all()
