"""Packing and unpacking: every value comes back equal and of its own type, and arrays by reference where possible."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import fractions
import gc
import pathlib
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import zcactor as zc
from tests.marshal.dtypes import DTYPES, NESTED, filled
from tests.marshal.wire import LIMIT, Wire, address, assert_same, assert_same_elements, strides
from zcactor.errors import OutOfMemory, ProtocolError
from zcactor.marshal import Marshaller
from zcactor.marshal.packed import Packed, pack_resolved
from zcactor.marshal.packing import Packing
from zcactor.marshal.spilling import ENVELOPE_NBYTES
from zcactor.native import hot
from zcactor.objectstore.copies import CopyCount, CopyCounter
from zcactor.objectstore.store import Store
from zcactor.rpc.messages import Flags

in_one_wire = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

# ------------------------------------------------------------------------------------------------ plain values

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1])
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=()), max_size=20)
    | st.binary(max_size=20)
    | st.datetimes()
    | st.fractions()
)
keys = st.text(max_size=5) | st.integers(-(2**65), 2**65) | st.booleans() | st.binary(max_size=3) | st.none()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
        | st.sets(st.text(max_size=3), max_size=3)
    ),
    max_leaves=30,
)


@pytest.mark.slow
@in_one_wire
@given(values)
@example([(), ((),), [[]], {}, {"a": ()}])
@example({1: "a", "1": "b", False: "c"})
@example("\ud800 \udfff lone surrogates")
@example({"\ud800": 1})
@example([float("nan"), float("inf"), -0.0])
@example("x" * 10_000)
@example(b"x" * 10_000)
@example(["x" * LIMIT] * 3)
def test_any_value_comes_back(wire: Wire, value: Any) -> None:
    assert_same(wire.send(value), value)


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass
class Holder:
    name: str
    array: Any
    more: list[Any] = dataclasses.field(default_factory=list)


class MyInt(int):
    pass


class MyDict(dict[str, int]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED, Point(1, [2]), MyInt(3), MyDict(a=1), collections.OrderedDict(b=1, a=2), collections.Counter("aab"),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), pathlib.PurePosixPath("/a"), range(3), slice(1, 2),
        Ellipsis, bytearray(b"ab"), int, len, Holder("a", 1, [2]), fractions.Fraction(1, 3), np.dtype("f4"), np.float32,
        {1, 2}, type(lambda: 0), bytearray(10_000), datetime.timedelta(days=1), {None: 1, (1, 2): (3,)},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_types_are_pickled_with_their_type(wire: Wire, value: Any) -> None:
    for sent in (value, [value, (value, {"k": value})]):
        assert_same(wire.send(sent), sent)


def test_deep_and_cyclic_containers(wire: Wire) -> None:
    deep: Any = 1
    for level in range(200):
        deep = [deep] if level % 2 else (deep,)
    assert wire.send(deep) == deep
    cycle: list[Any] = [1]
    cycle.append(cycle)
    got = wire.send(cycle)
    assert got[0] == 1
    assert got[1] is got


def test_arguments_and_keywords(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    sender, receiver = wire.left.marshaller, wire.right.marshaller
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((1, "a"), {}),
        ((1, (2,)), {"k": [3]}),
        ((2**80,), {"a": None}),
        ((array,), {"b": array}),
    ]
    for args, kwargs in calls:
        payload, parts, flags = sender.pack_call(args, kwargs)
        assert bool(flags & Flags.KWARGS) == bool(kwargs)
        got = receiver.unpack(payload, [wire.imported(part, wire.right) for part in parts], flags)
        assert_same(got, [*args, kwargs] if kwargs else list(args))


def iter_of_nothing() -> Iterator[int]:
    """A generator, which cannot be pickled."""
    yield from ()


def test_value_that_cannot_be_pickled_sends_nothing(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    with pytest.raises(TypeError, match="pickle"):
        wire.left.marshaller.pack([array, iter_of_nothing()])
    assert array.base is not None


# ------------------------------------------------------------------------------------------------ scalars

np_scalars: list[Any] = [
    np.bool_(True), np.int8(-3), np.uint64(2**64 - 1), np.float16(1.5), np.float32("nan"), np.longdouble("1.1"),
    np.complex64(1 + 2j), np.clongdouble(1j), np.datetime64("2026-01-01"), np.float64(2.5),
    np.datetime64(5, ("s", 25)), np.timedelta64(3, "ms"), np.str_("añ"), np.str_(""), np.bytes_(b"ab"),
    np.array([-(2**63)]).view("M8")[0], np.array([3]).view("m8")[0],  # without a unit, which constructors warn of
    np.bytes_(b""), np.void(b"ab\0"),
]  # fmt: skip


@pytest.mark.parametrize("scalar", np_scalars, ids=lambda s: f"{type(s).__name__}")
def test_numpy_scalar_keeps_its_type(wire: Wire, scalar: Any) -> None:
    for sent in (scalar, [scalar], {"a": (scalar,)}, {1.5: scalar}):
        assert_same(wire.send(sent), sent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scalar_of_any_dtype(wire: Wire, dtype: np.dtype[Any]) -> None:
    scalar = filled((), dtype)[()]
    got = wire.send(scalar)
    assert type(got) is type(scalar)
    assert_same_elements(np.asarray(got), np.asarray(scalar))
    if dtype.kind == "V" and dtype.num < 24:
        assert got.flags.writeable == scalar.flags.writeable


# ------------------------------------------------------------------------------------------------ arrays

SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7,), (300,), (2, 3, 4), (31, 3, 17)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("place", ["heap", "store"])
def test_array_of_any_dtype_and_shape(wire: Wire, dtype: np.dtype[Any], order: Any, place: str) -> None:
    for shape in SHAPES:
        array = filled(shape, dtype, order)
        if place == "store":
            inside = wire.left.store.empty(shape, dtype, order)
            inside.reshape(-1, order=order).view(np.dtype((np.void, dtype.itemsize)) if dtype.itemsize else dtype)[
                ...
            ] = array.reshape(-1, order=order).view(np.dtype((np.void, dtype.itemsize)) if dtype.itemsize else dtype)
            array = inside
        got = wire.send(array)
        assert_same(got, array)
        assert not got.flags.writeable
        by_reference = array.nbytes >= LIMIT
        assert array.flags.writeable != by_reference
        if array.size:
            assert strides(got) == strides(array)
        if by_reference and place == "store":
            assert address(got) == address(array)
            assert wire.left.bytes_copied == wire.right.bytes_copied == 0
    if place == "heap":
        assert wire.left.copies.snapshot().keys() <= {"argument outside the store"}


@st.composite
def strided(draw: st.DrawFn) -> tuple[tuple[int, ...], str, Callable[[Any], Any]]:
    """A shape, a dtype, and a function that takes a view of an array of them."""
    shape = draw(npst.array_shapes(min_dims=1, max_dims=4, max_side=12))
    forwards = st.builds(slice, st.integers(0, 3), st.none(), st.sampled_from([1, 2, 3]))
    backwards = st.builds(slice, st.none(), st.none(), st.sampled_from([-1, -2]))
    steps = tuple(draw(st.just(slice(None)) | forwards | backwards) for _ in shape)
    axes = draw(st.permutations(range(len(shape))))
    repeat = draw(st.sampled_from([0, 0, 1, 40]))

    def view(array: Any) -> Any:
        array = array[steps].transpose(axes)
        return np.broadcast_to(array, (repeat, *array.shape)) if repeat else array

    return shape, draw(st.sampled_from(["u1", "<i4", ">f8", "c16", "M8[s]", "S3"])), view


@pytest.mark.slow
@in_one_wire
@given(strided(), st.booleans())
def test_view_of_any_strides(wire: Wire, case: tuple[tuple[int, ...], str, Callable[[Any], Any]], inside: bool) -> None:
    shape, dtype, view = case
    array = filled(shape, np.dtype(dtype))
    if inside:
        array, source = wire.left.store.empty(shape, dtype), array
        array[...] = source
    sent = view(array)
    del array
    assume(sent.size)
    before = wire.left.bytes_copied
    got = wire.send([sent])[0]
    assert_same(got, sent)
    assert not got.flags.writeable
    if inside and sent.nbytes >= LIMIT:
        assert wire.left.bytes_copied == before
        assert address(got) == address(sent)
        assert strides(got) == strides(sent)


def test_elements_that_overlap_stay_overlapped(wire: Wire) -> None:
    row = np.arange(1000.0)
    many = np.broadcast_to(row, (1 << 40, 1000))
    got = wire.send(many)
    assert got.shape == many.shape
    assert got.strides == (0, 8)
    assert got[1 << 39].tolist() == row.tolist()
    windows = np.lib.stride_tricks.sliding_window_view(row, 900)[:, ::-1]
    got = wire.send(windows)
    assert_same(got, windows)
    assert wire.left.bytes_copied <= 2 * row.nbytes
    inside = wire.left.store.empty((), "f8")
    inside[...] = 7
    got = wire.send(np.broadcast_to(inside, (1000, 1000)))
    assert got.strides == (0, 0)
    assert float(got.sum()) == 7e6
    assert wire.left.bytes_copied <= 2 * row.nbytes + inside.nbytes


def test_received_array_passed_on_is_not_copied(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    got = wire.send(array)
    back = wire.send(got[10:900:3], back=True)
    assert np.shares_memory(back, array)
    assert address(back) == address(array[10:])
    assert not back.flags.writeable
    assert wire.right.bytes_copied == wire.left.bytes_copied == 0


def test_object_arrays_and_variable_strings_are_pickled(wire: Wire) -> None:
    objects = np.array([1, "a", None, [2]], object)
    strings = np.array(["a", "longer than that", ""], np.dtypes.StringDType())
    for value in (objects, [objects, 1], {"s": strings}, np.zeros(3, [("a", object), ("b", "i4")])):
        assert_same(wire.send(value), value)
    both = wire.send([objects, wire.left.store.empty(1000, "u1")])
    assert_same(both[0], objects)
    assert wire.left.bytes_copied == 0


# ------------------------------------------------------------------------------------------------ subclasses


class Signal(np.ndarray[Any, Any]):
    """A subclass of ndarray with an attribute."""

    rate: float

    def __array_finalize__(self, other: Any) -> None:
        self.rate = getattr(other, "rate", 0.0)


def subclasses(store: Store) -> Iterator[np.ndarray[Any, Any]]:
    """Arrays in the store, of subclasses of ndarray."""
    yield store.empty((20, 20)).view(np.matrix)
    structure = [("a", "i4"), ("b", "f8")]
    yield store.empty(200, structure).view(np.recarray)
    yield store.empty(200, structure).view(np.dtype((np.record, structure)))
    signal: Any = store.empty((10, 100)).view(Signal)[:, ::2]
    signal.rate = 44.1
    yield signal


def test_subclass_of_ndarray_arrives_as_itself(wire: Wire) -> None:
    """A view of the subclass is copied and stays open; a plain array whose dtype has the records' type is shared."""
    for array in subclasses(wire.left.store):
        array.view(np.ndarray).view("u1").fill(1) if array.flags.c_contiguous else array.fill(1)
        got = wire.send([array])[0]
        assert_same(got, array)
        assert getattr(got, "rate", None) == getattr(array, "rate", None)
        assert not got.flags.writeable
        assert (address(got) == address(array)) is (type(array) is np.ndarray) is not array.flags.writeable


def test_memmap(wire: Wire, tmp_path: pathlib.Path) -> None:
    mapped = np.memmap(tmp_path / "m", "i4", "w+", shape=(50, 50))
    mapped[...] = np.arange(2500).reshape(50, 50)
    got = wire.send(mapped)
    assert_same(got, mapped)
    assert wire.left.bytes_copied == mapped.nbytes


@pytest.mark.parametrize("mask", [np.ma.nomask, True, [True, False] * 500], ids=["none", "scalar", "array"])
@pytest.mark.parametrize("hard", [False, True])
def test_masked_array(wire: Wire, mask: Any, hard: bool) -> None:
    data = wire.left.store.empty(1000)
    data[...] = np.arange(1000)
    array = np.ma.MaskedArray(data, mask=mask, fill_value=-5, hard_mask=hard)
    got = wire.send(array)
    assert type(got) is np.ma.MaskedArray
    assert got.filled().tolist() == array.filled().tolist()
    assert np.array_equal(got.mask, array.mask)
    assert (got.fill_value, got.hardmask) == (array.fill_value, array.hardmask)
    assert wire.left.bytes_copied in (8000, 9000)  # a view of a subclass, and the mask


def test_subclass_with_its_own_pickling_uses_it(wire: Wire) -> None:
    class Own(np.ndarray[Any, Any]):
        def __reduce__(self) -> Any:
            return list, ((1, 2),)

    assert wire.send(np.zeros(1000).view(Own)) == [1, 2]


# ------------------------------------------------------------------------------------------------ sharing


def test_shared_array_is_read_only_for_good(wire: Wire) -> None:
    array = wire.left.store.empty((100, 100))
    got = wire.send(array)
    for shared in (array, array[3:], array.T, got, got[::2]):
        with pytest.raises(ValueError, match="read-only"):
            shared[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            shared.flags.writeable = True
    copied = got.copy()
    copied[0] = 1
    assert copied.flags.writeable


def test_an_array_that_is_passed_whole_is_read_only_with_later_views(wire: Wire) -> None:
    array = wire.left.store.empty((100, 100))
    wire.send(array[::2])
    assert array[1:].flags.writeable, "a piece of an open array was copied"
    wire.send(array)
    view = array[1:]
    assert not view.flags.writeable
    wire.send(array)
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_bytes_are_freed_with_the_last_view(wire: Wire) -> None:
    store = wire.left.store
    base = store.stats().used
    array = store.empty(10_000)
    got = wire.send([array, object])[0]
    view = got[5:]
    del array, got
    wire.parts = ()
    gc.collect()
    assert store.stats().used > base
    del view
    assert store.stats().used == base
    assert len(wire.released) == 1


def test_oversize_array_and_payload(wire: Wire) -> None:
    small = Marshaller(Store(1 << 20, b"s" * 16), CopyCounter(), hot.Counters(), LIMIT)
    for value in (np.zeros(1 << 20), b"x" * (2 << 20), [np.zeros(1 << 20), object]):
        with pytest.raises(OutOfMemory) as caught:
            small.pack(value)
        assert caught.value.requested >= 1 << 20
        assert caught.value.capacity == 1 << 20
    assert small.pack(1) == (b"\x01", (), 0)
    assert small.store.stats().used == 0
    small.store.close()


def test_payload_above_the_limit_is_spilled_and_counted(wire: Wire) -> None:
    array = wire.left.store.empty(1000, "u1")
    array.fill(1)
    value = {"text": "y" * 10_000, "array": array}
    assert_same(wire.send(value), value)
    copies = wire.left.copies.snapshot()
    assert list(copies) == ["payload above the eager limit"]
    assert wire.payload == b""
    assert [part.authenticate for part in wire.parts] == [1, 0]
    nbytes = wire.parts[0].nbytes
    assert wire.right.counters.bytes_mapped == nbytes + 1000
    assert wire.right.copies.snapshot() == {"values above the eager limit": CopyCount(1, nbytes)}


@pytest.fixture
def sealing() -> Iterator[Wire]:
    wire = Wire(seals=True)
    yield wire
    wire.close()


def test_a_sealed_payload_is_opened_into_private_memory_and_counted(sealing: Wire) -> None:
    array = sealing.left.store.empty(1000, "u1")
    array.fill(1)
    value = {"text": "easy to find " * 1000, "array": array, "set": {1}}
    for back in (False, True):
        assert_same(sealing.send(value, back=back), value)
        assert len(sealing.payload) == ENVELOPE_NBYTES
        assert [part.authenticate for part in sealing.parts] == [0, 1], "ciphertext needs nothing else, its parts do"
        spilled = sealing.parts[0]
        assert b"easy" not in np.asarray(spilled.holder).tobytes()
        receiver, sender = (sealing.left, sealing.right) if back else (sealing.right, sealing.left)
        assert sender.copies.snapshot()["payload above the eager limit"] == CopyCount(1, spilled.nbytes)
        assert receiver.copies.snapshot()["payload opened"] == CopyCount(1, spilled.nbytes)
    assert sealing.right.counters.bytes_mapped == spilled.nbytes + 1000


def test_a_sealed_payload_is_passed_on_unopened(sealing: Wire) -> None:
    inner = Packed(*sealing.left.marshaller.pack(["x" * 10_000, {1}]))
    got = sealing.send([inner, 1])[0]
    packing = Packing(sealing.right.store, sealing.right.copies, LIMIT)
    packed = msgspec.msgpack.encode([pack_resolved(packing, got)])
    assert b"xxx" not in packed and "payload opened" not in sealing.right.copies.snapshot()
    back = [sealing.imported(part, sealing.left) for part in packing.parts]
    assert sealing.left.marshaller.unpack(packed, back, 0) == [["x" * 10_000, {1}]]


def test_a_sealed_payload_that_was_changed_gives_no_value(sealing: Wire) -> None:
    envelope, parts, flags = sealing.left.marshaller.pack("x" * 1000)
    imported = [sealing.imported(part, sealing.right) for part in parts]
    block = parts[0].holder
    block.sealed = False
    memory = np.asarray(block)
    for at in range(parts[0].nbytes):
        memory[at] ^= 1
        with pytest.raises(ProtocolError, match="changed on its way"):
            sealing.right.marshaller.unpack(envelope, imported, flags)
        memory[at] ^= 1
    for wrong in (envelope[1:], envelope + b"x", envelope[:-1] + bytes([envelope[-1] ^ 1])):
        with pytest.raises(ProtocolError, match="envelope|changed on its way"):
            sealing.right.marshaller.unpack(wrong, imported, flags)
    with pytest.raises(ProtocolError, match="no key, and its bytes were not authenticated"):
        sealing.right.marshaller.unpack(b"", imported, flags)
    assert sealing.right.marshaller.unpack(envelope, imported, flags) == "x" * 1000


def test_a_payload_for_any_connection_is_sealed_as_well(sealing: Wire) -> None:
    wide = sealing.left.marshaller.pack("x" * 1000, eager_limit=4096)
    assert wide[2] == 0
    assert sealing.left.marshaller.fit(wide, 4096) is wide
    fitting = sealing.left.marshaller.fit(wide, 512)
    assert len(fitting[0]) == ENVELOPE_NBYTES and fitting[2] == Flags.SPILLED
    assert sealing.left.marshaller.fit(fitting, 512) == fitting


# ------------------------------------------------------------------------------------------------ objects with arrays


def test_arrays_inside_objects_go_by_reference(wire: Wire) -> None:
    array = wire.left.store.empty((100, 10))
    array[...] = 3
    holder = Holder("a", array[:, ::2], [array, {"x": (array.T,)}])
    wire.send(array)
    got = wire.send({"h": holder, "s": {1, 2}})["h"]
    assert type(got) is Holder
    for one, other in ((got.array, holder.array), (got.more[0], array), (got.more[1]["x"][0], array.T)):
        assert_same(one, other)
        assert address(one) == address(other)
        assert not one.flags.writeable
    assert wire.left.bytes_copied == 0


class Buffered:
    """A value that hands its bytes over out of band (PEP 574)."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: int) -> Any:  # type: ignore[override]
        return Buffered, (pickle.PickleBuffer(self.data),)


def test_what_a_pickle_refers_to_is_to_be_authenticated(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    array.fill(1)
    for value, wanted in (
        (array, [0]),
        ({"a": [array, (array,)]}, [0, 0]),
        (Holder("a", array, [array.T]), [1, 1]),
        (Buffered(np.ones(1000)), [1]),
        ([array, {1, 2}], [1]),
        (Holder("a", zc.move(np.ones(1000)), []), [1]),
    ):
        wire.send(value)
        assert [part.authenticate for part in wire.parts] == wanted
    packing = Packing(wire.left.store, wire.left.copies, LIMIT)
    for value in (array, Holder("a", array, []), array):
        packing.pack_argument(value)
    assert [part.authenticate for part in packing.parts] == [0, 1, 0]
    with pytest.raises(TypeError, match="pickle"):
        packing.pack([array, threading.Lock()])
    packing.pack(array)
    assert packing.parts[-1].authenticate == 0, "a pickle that failed leaves nothing behind"


def test_small_arrays_inside_objects(wire: Wire) -> None:
    holder = Holder("a", np.arange(3), [filled((2,), NESTED)])
    got = wire.send(holder)
    assert_same(got.array, holder.array)
    assert_same(got.more, holder.more)
    assert holder.array.flags.writeable


def test_a_payload_that_is_to_be_a_value_in_another_message(wire: Wire) -> None:
    """A recipe of an actor stays in one piece, so that it can be recorded."""
    sender, receiver = wire.left.marshaller, wire.right.marshaller
    text, array = "x" * (3 * LIMIT), wire.left.store.empty(LIMIT)
    payload, parts, flags = sender.pack_call((text, array), {}, payload_limit=4 * LIMIT)
    assert len(parts) == 1, "the array"
    assert len(payload) > 3 * LIMIT
    assert len(sender.pack_call((text,), {}, payload_limit=2 * LIMIT)[1]) == 1
    got = receiver.unpack(payload, [wire.imported(part, wire.right) for part in parts], flags)
    assert_same(got, [text, array])
