"""Out-of-band buffers: each byte of them is copied at most once, in any number of references."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.marshal.wire import LIMIT, Wire, address
from zcactor.errors import OutOfMemory
from zcactor.marshal.sharing import OUTSIDE, PIECE, share

MEMORY = np.random.default_rng(1).integers(0, 256, 100_000, np.uint8)
"""Memory outside the store."""


class Views:
    """A value that pickles pieces of memory out of band, as Arrow does."""

    def __init__(self, *pieces: Any) -> None:
        self.pieces = pieces

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Views, tuple(map(pickle.PickleBuffer, self.pieces))

    def bytes(self) -> list[bytes]:
        return list(map(bytes, self.pieces))


def pieces(*bounds: tuple[int, int]) -> Views:
    """Pieces of the memory, each from a first byte to a last."""
    return Views(*(MEMORY.data[low:high] for low, high in bounds))


@pytest.mark.parametrize(
    ("bounds", "count", "nbytes"),
    [
        ([(0, 5000), (0, 5000)], 1, 5000),
        ([(0, 5000), (100, 1000), (4000, 5000)], 1, 5000),
        ([(100, 1000), (0, 5000)], 1, 5000),
        ([(0, 5000), (4000, 9000), (8000, 9500)], 1, 9500),
        ([(0, 5000), (5000, 9000)], 2, 9000),
        ([(7000, 9000), (0, 600), (0, LIMIT - 1)], 2, 2600),
    ],
    ids=["same", "contained", "contained first", "overlapping", "adjacent", "apart"],
)
def test_bytes_are_copied_once(wire: Wire, bounds: list[tuple[int, int]], count: int, nbytes: int) -> None:
    sent = pieces(*bounds)
    assert wire.send(sent).bytes() == sent.bytes()
    copied = wire.left.copies.snapshot()[OUTSIDE]
    assert (copied.count, copied.nbytes) == (count, nbytes)


def test_also_by_several_values_of_a_message(wire: Wire) -> None:
    whole, part = pieces((0, 5000)), pieces((100, 1000), (3000, 5000))
    payload, parts, flags = wire.left.marshaller.pack_call((whole, part), {"again": whole})
    got = wire.right.marshaller.unpack(payload, [wire.imported(each, wire.right) for each in parts], flags)
    assert [got[0].bytes(), got[1].bytes(), got[2]["again"].bytes()] == [whole.bytes(), part.bytes(), whole.bytes()]
    assert wire.left.copies.snapshot()[OUTSIDE].nbytes == 5000
    wire.send(whole)
    assert wire.left.copies.snapshot()[OUTSIDE].nbytes == 10_000, "what lies elsewhere may have been written to since"


def test_what_lies_in_the_store_is_not_copied(wire: Wire) -> None:
    array = wire.left.store.empty(8000, np.uint8)
    array[:] = MEMORY[:8000]
    views = Views(array.data[100:4000], array.data[1000:])
    assert wire.send(views).bytes() == views.bytes()
    assert wire.left.copies.snapshot()[PIECE].nbytes == 7900, "what overlaps is copied once"
    assert share(wire.left.store, array) is not None
    got = wire.send(Views(array.data[100:4000], MEMORY.data[:600], array.data[1000:]))
    assert got.bytes() == [array[100:4000].tobytes(), MEMORY[:600].tobytes(), array[1000:].tobytes()]
    assert address(np.frombuffer(got.pieces[0], np.uint8)) == address(array) + 100
    assert wire.left.copies.snapshot()[OUTSIDE].nbytes == 600


def test_places_within_a_cache_line_stay(wire: Wire) -> None:
    sent = pieces((3, 5000), (4096, 6000))
    for piece, there in zip(sent.pieces, wire.send(sent).pieces, strict=True):
        assert address(np.frombuffer(piece, np.uint8)) % 64 == address(np.frombuffer(there, np.uint8)) % 64


def test_no_room(wire: Wire) -> None:
    capacity = wire.left.store.capacity
    used = wire.left.store.stats().used
    with pytest.raises(OutOfMemory):
        wire.left.marshaller.pack(Views(MEMORY.data, bytearray(capacity)))
    assert wire.left.store.stats().used == used


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 3000)), max_size=12), st.integers(0, 11))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_pieces(wire: Wire, drawn: list[tuple[int, int]], cut: int) -> None:
    bounds = [(low, low + nbytes) for low, nbytes in drawn]
    before = wire.left.bytes_copied
    sent = [pieces(*bounds[:cut]), pieces(*bounds[cut:])]
    assert [each.bytes() for each in wire.send(sent)] == [each.bytes() for each in sent]
    touched = np.zeros(30_000, bool)
    for low, high in bounds:
        if high - low >= LIMIT:
            touched[low:high] = True
    spilled = len(wire.payload) == 0 and wire.parts[0].nbytes if wire.parts else 0
    assert wire.left.bytes_copied - before in (touched.sum(), touched.sum() + spilled)
