"""Arrow arrays on their way out, cut to the rows that they show, as Arrow's own IPC format does it.

An Arrow array pickles as a tree of nodes, each with its whole buffers: ten rows of a table would bring all of it. Here
each node is cut to the rows that it shows. Slicing cuts most buffers without a copy. Offsets, which count from the
beginning of another buffer, and bits, which have no address of their own, are written anew, which is little beside the
values. Source: Arrow columnar format, "Physical memory layout"; arrow/ipc/writer.cc, ``RecordBatchSerializer``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zcactor.lazy_numpy import np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Allocate = Callable[[int, Any], Array]
    """``allocate(count, dtype)``: uninitialised memory for buffers that are written anew."""

__all__ = ["reduce_array"]

_INLINE_NBYTES: Final = 12
"""Bytes of a string that a view holds itself; a longer string lies in a buffer that the view names."""


class _Node(NamedTuple):
    """The reduction of an Arrow array (``pyarrow.lib._reduce_array_data``)."""

    type: Any
    length: int
    nulls: int
    """Number of nulls; -1 where they have not been counted."""
    offset: int
    """Rows in the buffers before the first row that is shown."""
    buffers: Sequence[Any]
    children: Sequence[Any]
    dictionary: Any


def reduce_array(array: Any, allocate: Allocate) -> Any:
    """Reduce a ``pyarrow.Array``, cut to its rows.

    Returns:
        The reduction; NotImplemented where Arrow has to reduce the array itself: memory of a device, and types that
        this module does not know.
    """
    reduced = array.__reduce__()
    if len(reduced) != 2 or len(reduced[1]) != 1 or not _is_known(reduced[1][0]):
        return NotImplemented
    restore, (node,) = reduced
    return restore, (tuple(_Cut(allocate).node(node, 0, node[1])),)


def _is_known(node: Any) -> bool:
    if len(node) != len(_Node._fields):
        return False
    known = _Node(*node)
    return (
        (_layout(known.type).id in _kinds() or _width(known.type) is not None)
        and all(buffer is None or buffer.is_cpu for buffer in known.buffers)
        and all(map(_is_known, known.children))
        and (known.dictionary is None or _is_known(known.dictionary))
    )


def _layout(kind: Any) -> Any:
    """The type that defines the layout of the buffers: the type itself, or the storage type of an extension type."""
    while hasattr(kind, "storage_type"):
        kind = kind.storage_type
    return kind


def _width(kind: Any) -> int | None:
    """Bytes of one value; None for types without a fixed size."""
    try:
        bits: int = _layout(kind).bit_width
    except ValueError:
        return None
    return bits // 8


def _arrow() -> Any:
    return sys.modules["pyarrow"]


class _Cut:
    """Cuts nodes. Each method takes the buffers of a node and returns those of `length` rows from row `start` on."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate

    def node(self, node: Any, start: int, length: int) -> _Node:
        """Cut `node` to `length` rows, beginning with row `start` of the rows that it shows."""
        kind, rows, nulls, offset, buffers, children, dictionary = node
        start += offset
        validity = buffers[0] if buffers and nulls != 0 else None
        if (start, length) != (offset, rows):
            nulls = -1 if validity is not None else 0
        cut = _kinds().get(_layout(kind).id, _Cut.fixed)
        rest, children = cut(self, _Node(kind, rows, nulls, offset, buffers, children, dictionary), start, length)
        if dictionary is not None:
            dictionary = tuple(self.node(dictionary, 0, dictionary[1]))
        if cut is _Cut.nothing:
            nulls = length
        return _Node(
            kind, length, nulls, 0, [self.bits(validity, start, length), *rest], list(map(tuple, children)), dictionary
        )

    # ---------------------------------------------------------------- buffers

    def part(self, buffer: Any, low: int, nbytes: int) -> Any:
        """Slice `nbytes` out of `buffer`, without a copy."""
        if buffer is None or (low == 0 and nbytes == buffer.size):
            return buffer
        return buffer.slice(low, nbytes)

    def bits(self, buffer: Any, start: int, length: int) -> Any:
        """Cut `length` bits out of `buffer`, without a copy where they begin with a byte."""
        if buffer is None:
            return None
        low, shift = divmod(start, 8)
        nbytes = (length + 7) // 8
        if not shift:
            return self.part(buffer, low, nbytes)
        source = np.frombuffer(buffer, np.uint8, (shift + length + 7) // 8, low)
        made = self._allocate(nbytes, np.uint8)
        np.right_shift(source[:nbytes], shift, out=made)
        following = source[1 : nbytes + 1]
        made[: following.size] |= following << (8 - shift)
        return _arrow().py_buffer(made)

    def offsets(self, buffer: Any, start: int, length: int, dtype: Any) -> tuple[Any, int, int]:
        """Return the offsets of `length` rows, counted from 0, with the first and the last original offset. No copy is
        made where the original offsets begin with 0."""
        if not length:
            return _arrow().py_buffer(np.zeros(1, dtype)), 0, 0
        size = np.dtype(dtype).itemsize
        values = np.frombuffer(buffer, dtype, length + 1, start * size)
        first, last = int(values[0]), int(values[-1])
        if not first:
            return self.part(buffer, start * size, (length + 1) * size), 0, last
        return self._written(np.subtract, values, first), first, last

    def _written(self, function: Any, values: Array, operand: Any) -> Any:
        made = self._allocate(values.size, values.dtype)
        function(values, operand, out=made)
        return _arrow().py_buffer(made)

    # ---------------------------------------------------------------- layouts

    def fixed(self, node: _Node, start: int, length: int) -> Any:
        """Layout with values of one size; for a dictionary array, its indices."""
        kind = _layout(node.type)
        width = _width(kind.index_type if node.dictionary is not None else kind)
        assert width is not None
        return [self.part(node.buffers[1], start * width, length * width)], ()

    def boolean(self, node: _Node, start: int, length: int) -> Any:
        """Layout with values of one bit."""
        return [self.bits(node.buffers[1], start, length)], ()

    def nothing(self, node: _Node, start: int, length: int) -> Any:
        """Layout whose rows are all null."""
        return (), ()

    def text(self, node: _Node, start: int, length: int) -> Any:
        """Layout of strings and bytes behind each other."""
        offsets, first, last = self.offsets(node.buffers[1], start, length, np.int32)
        return [offsets, self.part(node.buffers[2], first, last - first)], ()

    def large_text(self, node: _Node, start: int, length: int) -> Any:
        """Layout of `text`, with offsets of 64 bits."""
        offsets, first, last = self.offsets(node.buffers[1], start, length, np.int64)
        return [offsets, self.part(node.buffers[2], first, last - first)], ()

    def views(self, node: _Node, start: int, length: int) -> Any:
        """Layout of strings and bytes in any order, each row a view of 16 bytes: length, prefix, number of the buffer,
        offset."""
        views, *data = node.buffers[1:]
        if not data or not length or (start == 0 and views.size == 16 * length):
            return [self.part(views, 16 * start, 16 * length), *data], ()
        rows = np.frombuffer(views, np.int32, 4 * length, 16 * start).reshape(length, 4)
        elsewhere = rows[:, 0] > _INLINE_NBYTES
        if node.buffers[0] is not None:  # the view of a null row has no meaning
            low, shift = divmod(start, 8)
            held = np.frombuffer(node.buffers[0], np.uint8, (shift + length + 7) // 8, low)
            elsewhere &= np.unpackbits(held, bitorder="little")[shift : shift + length].astype(bool)
        numbers, lows = rows[elsewhere, 2], rows[elsewhere, 3].astype(np.int64)
        spans = np.zeros((len(data), 2), np.int64)
        spans[np.unique(numbers), 0] = np.iinfo(np.int64).max
        np.minimum.at(spans[:, 0], numbers, lows)
        np.maximum.at(spans[:, 1], numbers, lows + rows[elsewhere, 0])
        kept = [self.part(buffer, int(low), int(high - low)) for buffer, (low, high) in zip(data, spans, strict=True)]
        if not spans[:, 0].any():
            return [self.part(views, 16 * start, 16 * length), *kept], ()
        made = self._allocate(4 * length, np.int32)
        made[:] = rows.reshape(-1)
        made.reshape(length, 4)[elsewhere, 3] = lows - spans[numbers, 0]
        return [_arrow().py_buffer(made), *kept], ()

    def lists(self, node: _Node, start: int, length: int) -> Any:
        """Layout of lists behind each other, also of maps."""
        offsets, first, last = self.offsets(node.buffers[1], start, length, np.int32)
        return [offsets], [self.node(node.children[0], first, last - first)]

    def large_lists(self, node: _Node, start: int, length: int) -> Any:
        """Layout of `lists`, with offsets of 64 bits."""
        offsets, first, last = self.offsets(node.buffers[1], start, length, np.int64)
        return [offsets], [self.node(node.children[0], first, last - first)]

    def list_views(self, node: _Node, start: int, length: int) -> Any:
        """Layout of lists in any order, each with its offset and size."""
        return self._list_views(node, start, length, np.dtype(np.int32))

    def large_list_views(self, node: _Node, start: int, length: int) -> Any:
        """Layout of `list_views`, with offsets and sizes of 64 bits."""
        return self._list_views(node, start, length, np.dtype(np.int64))

    def _list_views(self, node: _Node, start: int, length: int, dtype: np.dtype[Any]) -> Any:
        low, nbytes = start * dtype.itemsize, length * dtype.itemsize
        parts = [self.part(buffer, low, nbytes) for buffer in node.buffers[1:]]
        if not length:
            return parts, [self.node(node.children[0], 0, 0)]
        offsets, sizes = (np.frombuffer(part, dtype, length) for part in parts)
        held = sizes > 0
        first = int(offsets[held].min()) if held.any() else 0
        last = int((offsets[held] + sizes[held]).max()) if held.any() else 0
        if first or int(offsets.max()) > last:  # an empty list may have a larger offset
            made = self._allocate(length, dtype)
            made[:] = np.where(held, offsets - first, 0)
            parts[0] = _arrow().py_buffer(made)
        return parts, [self.node(node.children[0], first, last - first)]

    def fixed_lists(self, node: _Node, start: int, length: int) -> Any:
        """Layout of lists of one size."""
        size = _layout(node.type).list_size
        return (), [self.node(node.children[0], start * size, length * size)]

    def struct(self, node: _Node, start: int, length: int) -> Any:
        """Layout of rows of fields."""
        return (), [self.node(child, start, length) for child in node.children]

    def sparse_union(self, node: _Node, start: int, length: int) -> Any:
        """Layout of a union with one child per type, each with all rows."""
        types = self.part(node.buffers[1], start, length)
        return [types], [self.node(child, start, length) for child in node.children]

    def dense_union(self, node: _Node, start: int, length: int) -> Any:
        """Layout of a union with one child per type, each with the rows of that type."""
        types, offsets = self.part(node.buffers[1], start, length), self.part(node.buffers[2], 4 * start, 4 * length)
        if not length:
            return [types, offsets], [self.node(child, 0, 0) for child in node.children]
        rows = np.frombuffer(offsets, np.int32, length)
        made, children = self._allocate(length, np.int32), []
        made[:] = rows
        for code, child in zip(_layout(node.type).type_codes, node.children, strict=True):
            mine = np.frombuffer(types, np.int8, length) == code
            first, last = (int(rows[mine].min()), int(rows[mine].max()) + 1) if mine.any() else (0, 0)
            made[mine] -= first
            children.append(self.node(child, first, last - first))
        return [types, _arrow().py_buffer(made)], children

    def runs(self, node: _Node, start: int, length: int) -> Any:
        """Layout of runs of equal rows: the end of each run, and its value."""
        ends = _Node(*node.children[0])
        width = _width(ends.type)
        rows = np.frombuffer(ends.buffers[1], f"i{width}", ends.length, ends.offset * width)  # type: ignore[operator]
        first = last = 0
        if length:
            first = int(np.searchsorted(rows, start, "right"))
            last = int(np.searchsorted(rows, start + length - 1, "right")) + 1
        made = self._allocate(last - first, rows.dtype)
        made[:] = np.minimum(rows[first:last].astype(np.int64) - start, length)
        cut = _Node(ends.type, last - first, 0, 0, [None, _arrow().py_buffer(made)], [], None)
        return (), [cut, self.node(node.children[1], first, last - first)]


_found: Final[dict[int, Any]] = {}


def _kinds() -> dict[int, Any]:
    """The methods that cut types without a fixed size, by Arrow's number of the type. Types that the installed Arrow
    lacks are left out."""
    if not _found:
        lib = _arrow().lib
        for name, cut in (
            ("NA", _Cut.nothing), ("BOOL", _Cut.boolean), ("DICTIONARY", _Cut.fixed),
            ("STRING", _Cut.text), ("BINARY", _Cut.text),
            ("LARGE_STRING", _Cut.large_text), ("LARGE_BINARY", _Cut.large_text),
            ("STRING_VIEW", _Cut.views), ("BINARY_VIEW", _Cut.views),
            ("LIST", _Cut.lists), ("MAP", _Cut.lists), ("LARGE_LIST", _Cut.large_lists),
            ("LIST_VIEW", _Cut.list_views), ("LARGE_LIST_VIEW", _Cut.large_list_views),
            ("FIXED_SIZE_LIST", _Cut.fixed_lists), ("STRUCT", _Cut.struct),
            ("SPARSE_UNION", _Cut.sparse_union), ("DENSE_UNION", _Cut.dense_union), ("RUN_END_ENCODED", _Cut.runs),
        ):  # fmt: skip
            number = getattr(lib, f"Type_{name}", None)
            if number is not None:
                _found[number] = cut
    return _found
