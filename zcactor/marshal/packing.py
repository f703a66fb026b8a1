"""Values on their way out: their form in a message's payload, and the parts that the payload refers to."""

from __future__ import annotations

from bisect import bisect_right, insort
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from zcactor.exception_pickling import hides
from zcactor.lazy_numpy import np
from zcactor.marshal import pickling
from zcactor.marshal.arrays import (
    array_address,
    byte_bounds,
    dtype_code,
    innermost,
    is_shareable,
    packed_strides,
    plain_of,
    root_of,
)
from zcactor.marshal.foreign import pack_foreign, pack_moved_on_gpu
from zcactor.marshal.move import (
    NOT_OURS,
    OTHER_VIEWS,
    UNUSABLE,
    Move,
    has_other_views,
    is_held_elsewhere,
    is_moved,
)
from zcactor.marshal.on_gpu import may_be_on_gpu
from zcactor.marshal.placing import is_as_placed, place, placed, room_for
from zcactor.marshal.sharing import (
    CLAIMED,
    OUTSIDE,
    PIECE,
    closable,
    close_outside,
    is_of,
    reason_to_copy,
    reopen,
    seal_copy,
    share,
    snapshot,
)
from zcactor.marshal.values import (
    SCALARS,
    Code,
    NotPlain,
    arguments,
    encode,
    pack_scalar,
    registered,
)
from zcactor.native import hot
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.store import Block, Store
from zcactor.rpc.parts import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from zcactor.objectstore.checking import Checker
    from zcactor.objectstore.copies import CopyCounter

    Array = npt.NDArray[Any]

__tracebackhide__ = hides
__all__ = ["CheckedPacking", "Packing"]

Ext = msgspec.msgpack.Ext
_MAX_DEPTH = 64
"""Nesting of plain containers, at most; deeper and cyclic containers are pickled, which handles them."""
_INT64 = (-(1 << 63), (1 << 64) - 1)
"""Range of MessagePack's integers."""


class _Span(NamedTuple):
    """Memory outside the store that a message refers to, with its copy in the store."""

    low: int
    high: int
    copied: npt.NDArray[np.uint8]
    source: npt.NDArray[np.uint8] | None
    """The bytes that are still to be copied."""
    arrays: Sequence[Array]
    """The arrays over the memory. They are kept so that no other memory gets the address while the message is
    packed."""


_lowest = attrgetter("low")


class Packing:
    """One value on its way out: collects the parts. Short-lived, used by one thread."""

    __slots__ = (
        "_placed", "_spans", "authenticate", "closed", "copied", "copies", "direct", "eager_limit", "moved", "parts",
        "store",
    )  # fmt: skip

    def __init__(self, store: Store, copies: CopyCounter, eager_limit: int) -> None:
        self.store = store
        self.copies = copies
        self.eager_limit = eager_limit
        self.parts: list[Part] = []
        self.direct = False
        """Whether the message goes straight to the process that needs the outcomes of promises in it."""
        self.authenticate = 0
        """1 while a pickle is made: the data that it refers to must be authenticated, like the pickle itself."""
        self.moved: list[Move[Any]] = []
        """Arrays to hand over when the whole message is packed."""
        self.closed: list[Any] = []
        """The memory that was closed for this message; see `zcactor.marshal.sharing.reopen`."""
        self._placed: dict[tuple[int, bool], tuple[Array, Array]] = {}
        """Arrays that were copied for this message, each with its copy, by id and whether the array is moved. An array
        occurs again when it is in the message twice, or when the whole message has to be pickled."""
        self.copied: dict[int, tuple[Any, Any]] = {}
        """Other libraries' arrays on GPUs that were copied for this message, each with its copy, by id."""
        self._spans: list[_Span] = []
        """Memory that buffers were copied from for this message, by address."""

    def add(self, part: Part) -> int:
        """Add `part` to the message; returns its index."""
        self.parts.append(part)
        return len(self.parts) - 1

    def mark(self) -> tuple[int, int, int]:
        """The state of the message, for `go_back`."""
        return len(self.parts), len(self.moved), len(self.closed)

    def go_back(self, mark: tuple[int, int, int]) -> None:
        """Take back all that was added to the message since `mark`, for another attempt, or because it is left out."""
        parts, moved, closed = mark
        del self.parts[parts:], self.moved[moved:]
        reopen(self.closed[closed:])
        del self.closed[closed:]

    def pack_argument(self, value: Any) -> Any:
        """Pack one top-level argument: like `pack`, but values that are resolved for the callee are treated
        differently."""
        pack = arguments.get(type(value))
        return self.pack(value) if pack is None else pack(self, value)

    def pack(self, value: Any) -> Any:
        """Return the encodable form of one top-level value: plain where possible, otherwise pickled as a whole."""
        mark = self.mark()
        try:
            return self._plain(value, 0)
        except NotPlain:
            self.go_back(mark)
        stream, buffers = pickling.dumps(self, value)  # out of the handler, which errors would name
        return Ext(Code.PICKLE, encode((buffers, stream)))

    def _plain(self, value: Any, depth: int) -> Any:
        cls = type(value)
        if cls in SCALARS:
            if cls is int and not _INT64[0] <= value <= _INT64[1]:
                return Ext(Code.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
            if cls is str and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
                raise NotPlain  # UTF-8 cannot encode lone surrogates
            return value
        if cls is np.ndarray:
            return self.pack_array(value)
        if cls is Move:
            return self.pack_moved(value)
        entry = registered.get(cls)
        if entry is not None:
            return Ext(entry[0], entry[1](self, value))
        if depth > _MAX_DEPTH:
            raise NotPlain
        if cls is list:
            return [self._plain(item, depth + 1) for item in value]
        if cls is tuple:
            return Ext(Code.TUPLE, encode([self._plain(item, depth + 1) for item in value]))
        if cls is dict:
            if not all(type(key) is str or (type(key) is int and _INT64[0] <= key <= _INT64[1]) for key in value):
                raise NotPlain
            return {self._plain(key, depth): self._plain(item, depth + 1) for key, item in value.items()}
        if issubclass(cls, np.generic):
            return pack_scalar(value)
        if may_be_on_gpu(cls) and (packed := pack_foreign(self, value)) is not None:
            return packed
        raise NotPlain

    def pack_array(self, array: Array) -> Any:
        """Encode an array: by reference, or within the payload below the eager limit.

        Args:
            array: an array of any dtype of plain bytes, with any shape and strides; also of a subclass.

        Raises:
            ValueError: the array was moved, or takes the result of a group's operation that is not done.
            NotPlain: the elements are not plain bytes.
            OutOfMemory: the store has no room for a copy.
        """
        plain = plain_of(array)
        if not is_shareable(plain.dtype):
            if is_moved(array):
                raise ValueError(UNUSABLE)
            raise NotPlain
        if not plain.flags.writeable and hot.claimed(array):
            raise ValueError(CLAIMED)
        if self.moved:
            self._check_not_moved(array)
        if plain.nbytes < self.eager_limit:
            return self._inline(plain, writable=False)
        del plain  # a view, for which the memory would stay open
        holder: Any = share(self.store, array, self.closed)
        if holder is None:
            holder, array = self._into_store(array)
        return self.reference(array, holder)

    def reference(self, array: Array, holder: Any, kind: RegionKind = RegionKind.ARRAY) -> Any:
        """Encode an array whose memory `holder` holds, by reference."""
        array = plain_of(array)
        if array.flags.c_contiguous:
            low = array_address(array)
            layout: tuple[Any, ...] = (len(self.parts), dtype_code(array.dtype), array.shape)
            nbytes = array.nbytes
        else:
            low, high = byte_bounds(array)
            nbytes = high - low
            layout = (len(self.parts), dtype_code(array.dtype), array.shape, array.strides, array_address(array) - low)
        self.parts.append(Part(kind, holder, holder.offset + low - holder.address, nbytes, self.authenticate))
        return Ext(Code.ARRAY, encode(layout))

    def _inline(self, array: Array, *, writable: bool) -> Any:
        if array.flags.c_contiguous:
            layout: tuple[Any, ...] = (array.tobytes(), dtype_code(array.dtype), array.shape, writable)
        else:
            packed = array.copy(order="K")
            raw = packed.T.tobytes() if packed.flags.f_contiguous else _memory_order(packed).tobytes()
            layout = (raw, dtype_code(array.dtype), array.shape, writable, packed_strides(packed))
        return Ext(Code.INLINE_ARRAY, encode(layout))

    def _into_store(self, array: Array) -> tuple[Any, Array]:
        """Return the block and the array in the store that hold the elements of `array`: a remembered copy, or a new
        one. A piece of an open array stays as it is; others become read-only."""
        reason = reason_to_copy(self.store, array)
        entry = self._placed.get((id(array), False))
        if entry is None:
            entry = self._placed[id(array), False] = array, self._copied(array, reason)
        copied = entry[1]
        outside = reason == OUTSIDE and type(array) is not np.memmap
        if outside and (root_of(array) is not None or closable(array)):
            close_outside(array, self.closed)
        return root_of(copied), copied

    def _copied(self, array: Array, reason: str) -> Array:
        plain = plain_of(array)
        low, high = byte_bounds(plain)
        block, copied = self.copies.known(low, high - low), plain
        if block is not None and high - low == plain.nbytes == block.nbytes:
            copied = placed(plain, np.asarray(block))
        if copied is plain or not is_as_placed(plain, copied):
            if reason == OUTSIDE:
                self.copies.warn_of_large(plain.nbytes)
            block, copied = snapshot(self.store, self.copies, plain, reason)
            if high - low == plain.nbytes:
                self.copies.remember(low, plain.nbytes, block, innermost(array))
        return copied

    def allocate(self, count: int, dtype: Any) -> Array:
        """Allocate uninitialised memory for `count` elements that a reduction writes anew, in the store where they go
        by reference. The bytes are counted like a copy of the memory that they replace."""
        nbytes = count * np.dtype(dtype).itemsize
        if nbytes < self.eager_limit:
            return np.empty(count, dtype)
        self.copies.count(OUTSIDE, nbytes)
        made = self.store.empty(count, dtype)
        root_of(made).private = True
        return made

    def pack_groups(self, groups: Sequence[Sequence[Array]]) -> list[list[Any]]:
        """Encode arrays of bytes that have to be copied, in groups whose memory overlaps. Each group is copied once,
        also where the message refers to it again."""
        spans = [self._span(arrays) for arrays in groups]
        fresh = [span for span in spans if span.source is not None]
        for reason, inside in ((OUTSIDE, False), (PIECE, True)):
            pairs = [
                (span.copied, span.source)
                for span in fresh
                if span.source is not None and self.store.contains(span.low, span.high) == inside
            ]
            if not inside:
                self.copies.warn_of_large(sum(copied.nbytes for copied, _ in pairs))
            self.copies.copy_all(pairs, reason)
        for span in fresh:
            seal_copy(root_of(span.copied), span.copied)
            insort(self._spans, span._replace(source=None), key=_lowest)
        packed = []
        for arrays, span in zip(groups, spans, strict=True):
            holder = root_of(span.copied)
            starts = [array_address(array) - span.low for array in arrays]
            parts = [span.copied[start : start + array.nbytes] for start, array in zip(starts, arrays, strict=True)]
            packed.append([self.reference(part, holder) for part in parts])
        return packed

    def _span(self, arrays: Sequence[Array]) -> _Span:
        """Return the existing copy of the memory that `arrays` lie in, or room for a copy."""
        low = min(map(array_address, arrays))
        high = max(array_address(array) + array.nbytes for array in arrays)
        index = bisect_right(self._spans, low, key=_lowest) - 1
        if index >= 0 and self._spans[index].high >= high:
            return self._spans[index]
        return _Span(low, high, *room_for(self.store, arrays), arrays)

    def pack_moved(self, move: Move[Any]) -> Any:
        """Encode an array whose write access is handed over. It becomes unusable here when the whole message is packed.

        Raises:
            ValueError: the array was moved or shared before, is read-only, or has other views.
        """
        if not isinstance(move.array, np.ndarray):
            on_gpu = pack_moved_on_gpu(self, move.array)
            if on_gpu is None:
                raise TypeError("zc.move: this process has no GPU on which the array could lie")
            self.moved.append(move)
            return on_gpu
        elsewhere = is_held_elsewhere(move)  # asked before a local name adds a reference
        array = move.array
        if is_moved(array):
            raise ValueError("zc.move: this array was moved before; only its receiver may use it")
        holder = root_of(array)
        ours = not holder.sealed if type(holder) is Block else holder.writable if type(holder) is Lease else True
        if not (ours and array.flags.writeable):
            raise ValueError(NOT_OURS)
        if self.moved:
            self._check_not_moved(array)
        if isinstance(holder, Block | Lease) and has_other_views(array):
            raise ValueError(OTHER_VIEWS)
        if array.nbytes < self.eager_limit:
            packed = self._inline(array, writable=True)
        else:
            if not is_of(self.store, holder):
                # NumPy itself may have allocated the array in the store. Then its views cannot be counted by a root.
                found = self.store.block_at(*byte_bounds(array)) if array.flags.owndata else None
                holder = None if found is None or found.sealed else found
            if holder is None or elsewhere:
                entry = self._placed.get((id(array), True))
                if entry is None:
                    reason = PIECE if holder is not None else "moved array outside the store"
                    entry = array, place(self.store, self.copies, array, reason)
                    self._placed[id(array), True] = entry
                array = entry[1]
                holder = root_of(array)
                if holder.is_forked:
                    self.store.write_back(holder)
            packed = self.reference(array, holder, RegionKind.MOVED)
        self.moved.append(move)
        return packed

    def _check_not_moved(self, array: Array) -> None:
        """Refuse an array that the same message already hands over."""
        holder = root_of(array)
        for move in self.moved:
            if not isinstance(move.array, np.ndarray):
                continue
            if move.array is array or (holder is not None and root_of(move.array) is holder):
                raise ValueError("zc.move: one call passes this array twice; what is moved can be passed once only")


class CheckedPacking(Packing):
    """The packing of one value in check mode.

    Args:
        checker: has the digests of the bytes that were passed before.
        store, copies, eager_limit: as for `Packing`.
    """

    __slots__ = ("_checker",)

    def __init__(self, checker: Checker, store: Store, copies: CopyCounter, eager_limit: int) -> None:
        super().__init__(store, copies, eager_limit)
        self._checker = checker

    def reference(self, array: Array, holder: Any, kind: RegionKind = RegionKind.ARRAY) -> Any:
        """See `Packing.reference`.

        Raises:
            RuntimeError: the bytes have changed since they were passed before.
        """
        packed = super().reference(array, holder, kind)
        if any(holder is each for each, _, _ in self.closed) or kind == RegionKind.MOVED:
            self._checker.forget(holder)  # it was open until now
        if kind == RegionKind.ARRAY:
            self._checker.note(holder, self.parts[-1].offset, self.parts[-1].nbytes, array)
        return packed


def _memory_order(array: Array) -> Array:
    """A view of a gapless `array` whose axes have their order in memory."""
    return array.transpose(sorted(range(array.ndim), key=lambda i: (-abs(array.strides[i]), i)))
