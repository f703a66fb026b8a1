"""Arrow arrays are cut to the rows that they show, and arrive equal."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.marshal.wire import Wire
from zcactor.marshal.arrow import reduce_array

pa = pytest.importorskip("pyarrow")
WORDS = ["", "a", "text", "a text of more than twelve bytes", "x" * 700, None, "äöü" * 9]
NUMBERS = [0, 1, None, 5, -7, 100, None, 3]
ROWS = 400


def texts(count: int = ROWS) -> list[str | None]:
    """Short strings, long strings and nulls."""
    return [WORDS[index * 7 % 11 % len(WORDS)] for index in range(count)]


def lists() -> list[Any]:
    """Lists of any length, some of them null."""
    return [None if index % 9 == 0 else [index, None, 3][: index % 4] for index in range(ROWS)]


def dense_union() -> Any:
    types = [index % 3 % 2 for index in range(ROWS)]
    counts, offsets = [0, 0], []
    for kind in types:
        offsets.append(counts[kind])
        counts[kind] += 1
    children = [pa.array(range(counts[0])), pa.array(texts(counts[1]))]
    return pa.UnionArray.from_dense(pa.array(types, pa.int8()), pa.array(offsets, pa.int32()), children)


def sparse_union() -> Any:
    types = pa.array([5 + index % 2 for index in range(ROWS)], pa.int8())
    return pa.UnionArray.from_sparse(types, [pa.array(range(ROWS)), pa.array(texts())], type_codes=[5, 6])


def list_views(kind: Any) -> Any:
    order = np.random.default_rng(3).permutation(ROWS)
    values = pa.array(texts(4 * ROWS))
    return kind.from_arrays(
        pa.array(order * 4).cast(kind_offsets(kind)), pa.array(order % 4).cast(kind_offsets(kind)), values
    )


def kind_offsets(kind: Any) -> Any:
    return pa.int64() if kind is pa.LargeListViewArray else pa.int32()


class Point(pa.ExtensionType):  # type: ignore[misc, name-defined]
    """An extension type of the program's own."""

    def __init__(self) -> None:
        super().__init__(pa.list_(pa.float64(), 2), "tests.point")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: Any, serialized: bytes) -> Point:
        return cls()


STRUCT = [
    None if index % 7 == 0 else {"a": index, "b": texts()[index], "c": [index] * (index % 3)} for index in range(ROWS)
]
MAKE: dict[str, Any] = {
    "int64": lambda: pa.array(NUMBERS * (ROWS // 8)),
    "no nulls": lambda: pa.array(np.arange(ROWS, dtype="i2")),
    "bool": lambda: pa.array([None, True, False, True, True] * (ROWS // 5)),
    "half": lambda: pa.array(np.arange(ROWS).astype("f2")),
    "decimal": lambda: pa.array([decimal.Decimal(index) / 4 for index in range(ROWS)]),
    "time": lambda: pa.array([datetime.datetime(2026, 1, 1) + datetime.timedelta(index) for index in range(ROWS)]),
    "fixed binary": lambda: pa.array([b"%05d" % index for index in range(ROWS)], pa.binary(5)),
    "null": lambda: pa.nulls(ROWS),
    "string": lambda: pa.array(texts()),
    "all null string": lambda: pa.nulls(ROWS, pa.string()),
    "large string": lambda: pa.array(texts(), pa.large_string()),
    "binary": lambda: pa.array(texts()).cast(pa.binary()),
    "string view": lambda: pa.array(texts(), pa.string_view()),
    "binary view": lambda: pa.array(texts(), pa.string_view()).cast(pa.binary_view()),
    "list": lambda: pa.array(lists()),
    "large list": lambda: pa.array(lists(), pa.large_list(pa.int64())),
    "list of strings": lambda: pa.array(
        [None if index % 5 == 0 else texts()[index : index + index % 4] for index in range(ROWS)]
    ),
    "list of bools": lambda: pa.array([[index % 2 == 0] * (index % 5) for index in range(ROWS)]),
    "list view": lambda: list_views(pa.ListViewArray),
    "large list view": lambda: list_views(pa.LargeListViewArray),
    "fixed list": lambda: pa.array([[index, None, 7] for index in range(ROWS)], pa.list_(pa.int32(), 3)),
    "map": lambda: pa.array([[("a", index)] * (index % 3) for index in range(ROWS)], pa.map_(pa.string(), pa.int64())),
    "struct": lambda: pa.array(STRUCT),
    "dictionary": lambda: pa.array(texts()).dictionary_encode(),
    "sliced dictionary": lambda: pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None, 2] * (ROWS // 4)), pa.array(texts()).slice(2, 3)
    ),
    "nested dictionary": lambda: pa.StructArray.from_arrays([pa.array(texts()).dictionary_encode()], ["d"]),
    "runs": lambda: pa.RunEndEncodedArray.from_arrays([*range(3, 3 * 133, 3), ROWS], texts(133)),
    "dense union": dense_union,
    "sparse union": sparse_union,
    "extension": lambda: pa.ExtensionArray.from_storage(
        Point(), pa.array([[1.0, index] for index in range(ROWS)], pa.list_(pa.float64(), 2))
    ),
}


def in_numpy(count: int, dtype: Any) -> Any:
    return np.empty(count, dtype)


def rebuilt(array: Any) -> Any:
    """Take an array apart by `reduce_array` and build it again, without pickle in between."""
    restore, arguments = reduce_array(array, in_numpy)
    return restore(*arguments)


def nbytes_of(array: Any) -> int:
    return sum(buffer.size for buffer in array.buffers() if buffer is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_slices_of_slices_are_equal_and_valid(name: str, data: st.DataObject) -> None:
    array = MAKE[name]()
    for _ in range(data.draw(st.integers(0, 3), "slices")):
        start = data.draw(st.integers(0, len(array)), "start")
        array = array.slice(start, data.draw(st.integers(0, len(array) - start), "length"))
    got = rebuilt(array)
    got.validate(full=True)
    assert got.type == array.type
    assert len(got) == len(array)
    assert got.equals(array)
    assert got.null_count == array.null_count
    assert got.offset == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MAKE) - {"string view", "binary view"}))
def test_as_little_as_arrows_own_format_writes(name: str) -> None:
    array = MAKE[name]()
    for start, length in ((0, ROWS), (0, 10), (7, 10), (ROWS - 11, 11), (8, 32)):
        part = array.slice(start, length)
        batch = pa.record_batch([part], ["x"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        assert nbytes_of(rebuilt(part)) <= sink.getvalue().size


@pytest.mark.slow
def test_of_views_less_than_that() -> None:
    array = pa.array([f"{index:030}" for index in range(10_000)], pa.string_view())
    got = rebuilt(array.slice(5000, 10))
    assert got.to_pylist() == [f"{index:030}" for index in range(5000, 5010)]
    assert nbytes_of(got) <= 10 * (16 + 30)
    everywhere = array.slice(5, 10).to_pylist()[::-1] + array.to_pylist()[::1000]
    parts = pa.chunked_array([array.slice(5, 3), array.slice(9990, 2)]).combine_chunks()
    for each in (pa.array(everywhere, pa.string_view()).slice(8), parts.slice(1)):
        assert rebuilt(each).equals(each)


@pytest.mark.parametrize("name", MAKE)
def test_as_part_of_anything(wire: Wire, name: str) -> None:
    array = MAKE[name]()
    batch = pa.record_batch([array, array], ["x", "y"])
    table = pa.Table.from_batches([batch.slice(3, 100), batch.slice(50, 7), batch])
    for value in (
        array,
        array.slice(9, 80),
        batch.slice(3, 100),
        table,
        table.slice(90, 60),
        table["x"],
        table["x"].slice(5),
    ):
        got = wire.send([value])[0]
        assert type(got) is type(value)
        assert got.equals(value)


@pytest.mark.slow
def test_ten_rows_bring_ten_rows(wire: Wire) -> None:
    table = pa.table({"x": np.arange(1_000_000.0), "s": [f"{index:020}" for index in range(1_000_000)]})
    for value in (table.slice(500_001, 10), table.slice(500_001, 10).to_batches()[0], table["s"].slice(3, 10)):
        assert wire.send(value).equals(value)
        assert sum(part.nbytes for part in wire.parts) + len(wire.payload) < 4096


def big_table() -> Any:
    """A table of 35 MB in the chunks of eight batches, which are slices of one batch."""
    rows = 680_000
    words = pa.array([f"{index:012}" for index in range(rows)])
    codes = pa.array([f"{index % 1000:012}" for index in range(rows)]).dictionary_encode()
    batch = pa.record_batch(
        [np.arange(rows) * 1.5, pa.array(range(rows), mask=np.arange(rows) % 3 == 0), words, codes,
         pa.array(np.arange(rows) % 7 == 0), words.cast(pa.string_view())],
        ["float", "int", "string", "dictionary", "bool", "view"],
    )  # fmt: skip
    return pa.Table.from_batches([batch.slice(index * rows // 8, rows // 8) for index in range(8)])


@pytest.mark.slow
def test_a_table_is_copied_once(wire: Wire) -> None:
    table = big_table()
    assert table.nbytes > 35e6
    got = wire.send(table)
    assert got.equals(table)
    got.validate(full=True)
    assert wire.left.bytes_copied <= 1.05 * table.nbytes + (64 << 10)
    before = wire.left.bytes_copied
    del got
    wire.parts = ()
    again = wire.send((table, {"of the same": table, "part": table.slice(10_000, 100_000)}, table))
    assert again[0].equals(again[1]["of the same"]) and again[2].equals(table)
    assert again[1]["part"].equals(table.slice(10_000, 100_000))
    assert wire.left.bytes_copied - before <= 1.05 * table.nbytes + 2 * (64 << 10)


@pytest.mark.slow
def test_frames_over_arrow(wire: Wire) -> None:
    pandas = pytest.importorskip("pandas")
    table = big_table().drop_columns("view")
    frame = table.to_pandas(types_mapper=pandas.ArrowDtype)
    part = frame.iloc[100_000:100_010]
    pandas.testing.assert_frame_equal(wire.send(part), part)
    assert wire.left.bytes_copied < 64 << 10
    got = wire.send(frame)
    pandas.testing.assert_frame_equal(got, frame)
    assert wire.left.bytes_copied <= 1.05 * table.nbytes + 2 * (64 << 10)


def test_what_is_unknown_is_left_to_arrow() -> None:
    class Strange:
        def __reduce__(self) -> Any:
            return int, (1, 2)

    assert reduce_array(Strange(), in_numpy) is NotImplemented
