"""Packing values for a message, and unpacking them: the seam between Python objects and frames."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping as MappingABC
from collections.abc import Sequence
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import msgspec
import numpy as np
import numpy.typing as npt

from zcactor.errors import ProtocolError
from zcactor.marshal import pickling, spilling
from zcactor.marshal.arrays import (
    array_address,
    byte_bounds,
    dtype_code,
    dtype_from_code,
    innermost,
    is_shareable,
    packed_strides,
    root_of,
)
from zcactor.marshal.move import (
    NOT_OURS,
    OTHER_VIEWS,
    UNUSABLE,
    Move,
    has_other_views,
    is_held_elsewhere,
    is_moved,
    retire,
)
from zcactor.marshal.placing import is_as_placed, place, placed, room_for
from zcactor.marshal.sharing import is_of, protect, share
from zcactor.marshal.values import (
    SCALARS,
    Code,
    NotPlain,
    arguments,
    decode_small,
    encode,
    lift_scalar,
    lifts,
    lower_scalar,
    registered,
)
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.store import Block, Store
from zcactor.rpc.messages import Flags
from zcactor.rpc.parts import Part
from zcactor.transport.mapping import Mapping, PrivateMapping

if TYPE_CHECKING:
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.rpc.counters import Counters

__all__ = ["Marshaller", "Packing", "Unpacking"]

Ext = msgspec.msgpack.Ext
Array = npt.NDArray[Any]
Packed = tuple[bytes, Sequence[Part], int]
"""Payload bytes, the parts they refer to, and `Flags`."""

_MAX_DEPTH = 64
"""Nesting of plain containers; deeper ones (and cyclic ones) are pickled, which handles them."""
_INT64 = (-(1 << 63), (1 << 64) - 1)
"""What MessagePack's integers hold."""


_OUTSIDE = "argument outside the store"
"""The reason of copies of what is passed."""


class _Span(NamedTuple):
    """Memory outside the store that a message refers to, and its copy in the store."""

    low: int
    high: int
    copied: npt.NDArray[np.uint8]
    source: npt.NDArray[np.uint8] | None
    """What is still to be copied."""
    arrays: Sequence[Array]
    """Kept, so that no other memory can be at the address while the message is packed."""


_lowest = attrgetter("low")


class Packing:
    """One value on its way out: collects the parts. Short-lived, used by one thread."""

    __slots__ = ("_placed", "_spans", "authenticate", "copies", "eager_limit", "moved", "parts", "store")

    def __init__(self, store: Store, copies: CopyCounter, eager_limit: int) -> None:
        self.store = store
        self.copies = copies
        self.eager_limit = eager_limit
        self.parts: list[Part] = []
        self.authenticate = 0
        """1 while a pickle is made: what it refers to must be authenticated, as the pickle itself is."""
        self.moved: list[Move[Array]] = []
        """Arrays to be handed over when all of the message is packed."""
        self._placed: dict[tuple[int, bool], tuple[Array, Array]] = {}
        """By id, and whether it is moved: arrays copied for this message, each with its copy. They may be met again,
        when they are in it twice or when all of it has to be pickled."""
        self._spans: list[_Span] = []
        """By address: memory that buffers were copied from for this message."""

    def add(self, part: Part) -> int:
        """Refer to `part`; returns its index."""
        self.parts.append(part)
        return len(self.parts) - 1

    def lower_argument(self, value: Any) -> Any:
        """`lower`, for an argument: what is to be resolved for the callee is."""
        lower = arguments.get(type(value))
        return self.lower(value) if lower is None else lower(self, value)

    def lower(self, value: Any) -> Any:
        """The encodable form of one top-level value: plain where it can be, pickled as a whole otherwise."""
        parts, moved = len(self.parts), len(self.moved)
        try:
            return self._plain(value, 0)
        except NotPlain:
            del self.parts[parts:]
            del self.moved[moved:]
            stream, buffers = pickling.dumps(self, value)
            return Ext(Code.PICKLE, encode((buffers, stream)))

    def _plain(self, value: Any, depth: int) -> Any:
        cls = type(value)
        if cls in SCALARS:
            if cls is int and not _INT64[0] <= value <= _INT64[1]:
                return Ext(Code.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
            if cls is str and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
                raise NotPlain  # UTF-8 has no lone surrogates
            return value
        if cls is np.ndarray:
            return self.lower_array(value)
        if cls is Move:
            return self.lower_moved(value)
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
        if isinstance(value, np.generic):
            return lower_scalar(value)
        raise NotPlain

    def lower_array(self, array: Array, *, seal: bool = True) -> Any:
        """An array by reference, or within the payload below the eager limit.

        Args:
            array: any dtype of plain bytes, shape and strides.
            seal: make `array` itself read-only; False for a temporary view made by us.
        """
        if not is_shareable(array.dtype):
            if is_moved(array):
                raise ValueError(UNUSABLE)
            raise NotPlain
        if self.moved:
            self._check_not_moved(array)
        if array.nbytes < self.eager_limit:
            return self._inline(array, writable=False)
        holder = root_of(array)
        if type(holder) is Lease and is_of(self.store, holder):
            if holder.writable:  # was moved to us and is passed on by sharing
                holder.seal()
                innermost(array).setflags(write=False)
            if seal:
                protect(array)
        else:
            holder = share(self.store, array, seal=seal)
            if holder is None:
                holder, array = self._into_store(array, seal)
        return self._reference(array, holder, RegionKind.ARRAY)

    def _reference(self, array: Array, holder: Any, kind: RegionKind) -> Any:
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

    def _into_store(self, array: Array, seal: bool) -> tuple[Any, Array]:
        """The block and the array in the store that hold the same elements: remembered, or copied."""
        entry = self._placed.get((id(array), False))
        if entry is not None:
            return root_of(entry[1]), entry[1]
        block = self.copies.known(array)
        if block is not None:
            copied = placed(array, np.asarray(block))
            if is_as_placed(array, copied):
                return block, copied
        copied = place(self.store, self.copies, array, _OUTSIDE)
        block = root_of(copied)
        self.store.seal(block, innermost(copied))
        copied.setflags(write=False)
        self._placed[id(array), False] = (array, copied)
        if seal:
            array.setflags(write=False)
            self.copies.remember(array, block)
        return block, copied

    def allocate(self, count: int, dtype: Any) -> Array:
        """Uninitialised memory for `count` elements that a reduction writes anew, counted as what it replaces would be:
        in the store where they go by reference."""
        nbytes = count * np.dtype(dtype).itemsize
        if nbytes < self.eager_limit:
            return np.empty(count, dtype)
        self.copies.count(_OUTSIDE, nbytes)
        return self.store.empty(count, dtype)

    def lower_groups(self, groups: Sequence[Sequence[Array]]) -> list[list[Any]]:
        """Arrays of bytes from outside the store, by groups whose memory overlaps: one copy for each group,
        also where the message refers to it again."""
        spans = [self._span(arrays) for arrays in groups]
        fresh = [span for span in spans if span.source is not None]
        self.copies.copy_all([(span.copied, span.source) for span in fresh if span.source is not None], _OUTSIDE)
        for span in fresh:
            self.store.seal(root_of(span.copied), innermost(span.copied))
            span.copied.setflags(write=False)
            insort(self._spans, span._replace(source=None), key=_lowest)
        lowered = []
        for arrays, span in zip(groups, spans, strict=True):
            holder = root_of(span.copied)
            starts = [array_address(array) - span.low for array in arrays]
            parts = [span.copied[start : start + array.nbytes] for start, array in zip(starts, arrays, strict=True)]
            lowered.append([self._reference(part, holder, RegionKind.ARRAY) for part in parts])
        return lowered

    def _span(self, arrays: Sequence[Array]) -> _Span:
        """The copy that there is of what `arrays` lie in, or room for one."""
        low = min(map(array_address, arrays))
        high = max(array_address(array) + array.nbytes for array in arrays)
        index = bisect_right(self._spans, low, key=_lowest) - 1
        if index >= 0 and self._spans[index].high >= high:
            return self._spans[index]
        return _Span(low, high, *room_for(self.store, arrays), arrays)

    def lower_moved(self, move: Move[Array]) -> Any:
        """An array whose write access is handed over; it becomes unusable here when the whole message is packed.

        Raises:
            ValueError: it was moved or shared before, it is read-only, or other views of it exist.
        """
        elsewhere = is_held_elsewhere(move)  # before there is a name for it here
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
            lowered = self._inline(array, writable=True)
        else:
            if not is_of(self.store, holder):
                # NumPy itself may have allocated it in the store. Its views are not counted as they are by a root.
                found = self.store.block_at(*byte_bounds(array)) if array.flags.owndata else None
                if found is None or found.sealed or elsewhere:
                    entry = self._placed.get((id(array), True))
                    if entry is None:
                        entry = array, place(self.store, self.copies, array, "moved array outside the store")
                        self._placed[id(array), True] = entry
                    array = entry[1]
                    holder = root_of(array)
                else:
                    holder = found
            lowered = self._reference(array, holder, RegionKind.MOVED)
        self.moved.append(move)
        return lowered

    def _check_not_moved(self, array: Array) -> None:
        """Refuse an array that the same message hands over already."""
        holder = root_of(array)
        for move in self.moved:
            if move.array is array or (holder is not None and root_of(move.array) is holder):
                raise ValueError("zc.move: one call passes this array twice; what is moved can be passed once only")


def _memory_order(array: Array) -> Array:
    """A view of a gapless `array` with its axes in the order they lie in memory."""
    return array.transpose(sorted(range(array.ndim), key=lambda i: (-abs(array.strides[i]), i)))


class Unpacking:
    """One payload on its way in. Reused; holds the parts of the payload at hand."""

    __slots__ = ("_decode", "copies", "counters", "mapped", "parts", "store")

    def __init__(self, store: Store, copies: CopyCounter, counters: Counters) -> None:
        self.store = store
        self.copies = copies
        self.counters = counters
        self.parts: Sequence[Part] = ()
        self.mapped: set[tuple[bytes, int, int, int]] = set()
        """What was counted as mapped of the message at hand: bytes that it names twice are mapped once."""
        self._decode = msgspec.msgpack.Decoder(ext_hook=self.lift).decode

    def value(self, payload: Any, parts: Sequence[Part], flags: int) -> Any:
        """Decode `payload`; may be called again for a value nested in the one at hand.

        Raises:
            ProtocolError: the payload is malformed.
        """
        if flags & Flags.SPILLED:
            payload, parts = self._spilled(payload, parts), parts[1:]
        outer, self.parts = self.parts, parts
        try:
            return self._decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a payload of {len(payload)} bytes is malformed: {error}") from error
        finally:
            self.parts = outer

    def _spilled(self, envelope: Any, parts: Sequence[Part]) -> Any:
        """The payload that lies in the store: opened into memory of its own, or as it is where it was not sealed."""
        if not parts:
            raise ProtocolError("a spilled payload has no part that holds it")
        part = parts[0]
        found = _bytes_of(part)
        if not len(envelope) and not part.authenticate:
            raise ProtocolError("a spilled payload has no key, and its bytes were not authenticated on their way")
        if type(part.holder) is Lease:
            self.counters.bytes_mapped += part.nbytes
        if len(envelope):
            payload = spilling.unseal(envelope, found.data)
            self.copies.count("payload opened", part.nbytes)
            return payload
        self.copies.count("values above the eager limit", part.nbytes)
        return found.data

    def part(self, index: int) -> Part:
        """The part that an extension names by `index`."""
        if type(index) is not int or not 0 <= index < len(self.parts):
            raise ProtocolError(f"a payload names part {index!r}, but its message has {len(self.parts)}")
        return self.parts[index]

    def lift(self, code: int, data: memoryview) -> Any:
        """The value of one extension."""
        if code == Code.ARRAY:
            return self._array(*_fields(data, 3, 5))
        if code == Code.INLINE_ARRAY:
            return self._inline(*_fields(data, 4, 5))
        if code == Code.TUPLE:
            items = self._decode(data)
            if type(items) is not list:
                raise ProtocolError(f"a tuple's items are of type {type(items).__name__} instead of a list")
            return tuple(items)
        if code == Code.SCALAR:
            return lift_scalar(data)
        if code == Code.BIG_INT:
            return int.from_bytes(data, "little", signed=True)
        if code == Code.PICKLE:
            buffers, stream = _fields(data, 2, 2)
            if type(stream) is not bytes or type(buffers) is not list or not all(type(b) is bytes for b in buffers):
                raise ProtocolError("a pickled value is malformed")
            return pickling.loads(self, stream, buffers)
        lift = lifts.get(code)
        if lift is None:
            raise ProtocolError(f"a payload has an extension of unknown code {code}")
        return lift(self, data)

    def _array(self, index: int, code: Any, shape: Any, strides: Any = None, inner: Any = 0) -> Array:
        part = self.part(index)
        dtype = dtype_from_code(code)
        holder = part.holder
        if type(holder) is Lease:
            root = np.asarray(holder)
            found = holder.owner, holder.id, part.offset, part.nbytes
            if found not in self.mapped:
                self.mapped.add(found)
                self.counters.bytes_mapped += part.nbytes
        else:
            if type(holder) is Block:
                if part.kind == RegionKind.MOVED:
                    holder.sealed = False  # ours, and back with write access
                elif not holder.sealed:
                    self.store.seal(holder)  # was moved away, and its receiver shares it with us
            root = _bytes_of(part)
        array = _array_over(root, dtype, shape, strides, inner)
        if part.kind == RegionKind.MOVED and isinstance(holder, Block | Lease):
            holder.array = ref(array)
        return array

    def _inline(self, raw: Any, code: Any, shape: Any, writable: Any, strides: Any = None) -> Array:
        dtype = dtype_from_code(code)
        if type(raw) is not bytes:
            raise ProtocolError(f"the elements of an array are of type {type(raw).__name__} instead of bytes")
        root: Array = np.frombuffer(raw or b"\0", np.uint8).copy()  # NumPy wants a buffer even for no elements
        if writable is not True:
            root.setflags(write=False)
        return _array_over(root, dtype, shape, strides if raw else None, 0)

    def writable_view(self, array: Array) -> Array:
        """`array` for a library that knows no read-only arrays: writes to it are seen by nobody else.

        Bytes that are shared with others are mapped once more, privately: the system copies a page when it is first
        written to (mmap(2), MAP_PRIVATE), so that reading is free. Where that is impossible it is a counted copy.
        """
        if array.flags.writeable:
            return array
        root = innermost(array)
        if root.flags.owndata:  # came within the payload: nobody else has these bytes
            root.setflags(write=True)
            array.setflags(write=True)
            return array
        low, high = byte_bounds(array)
        private = _private_of(root.base, low, high - low)
        if private is None:
            copied: Array = np.empty_like(array)
            self.copies.copy_into(copied, array, "library without read-only arrays")
            return copied
        return np.ndarray(array.shape, array.dtype, np.asarray(private), array_address(array) - low, array.strides)


def _private_of(holder: Any, low: int, nbytes: int) -> PrivateMapping | None:
    """`nbytes` at address `low` of what `holder` holds, to be written to privately; None where that is impossible."""
    offset = holder.offset + low - holder.address if isinstance(holder, Block | Lease) else 0
    if type(holder) is Block and holder.store.arena.fd >= 0:
        return PrivateMapping.of(holder.store.arena.fd, offset, nbytes, holder)
    if type(holder) is Lease and holder.pages is not None and holder.adopted is not None:
        fd, inside = holder.pages.store.arena.fd, low - holder.address
        return PrivateMapping.of(fd, holder.adopted[1] + inside, nbytes, holder) if fd >= 0 else None
    if type(holder) is Lease and isinstance(holder.mapping, Mapping):
        return holder.mapping.private(offset, nbytes, holder)
    return None


def _bytes_of(part: Part) -> npt.NDArray[np.uint8]:
    """The bytes of `part`.

    Raises:
        ProtocolError: it is no part of an arena.
        ObjectLost: its owner is gone.
    """
    holder = part.holder
    if type(holder) is Lease:
        return np.asarray(holder)
    if type(holder) is Block:
        start = part.offset - holder.offset
        return np.asarray(holder)[start : start + part.nbytes]
    _ = getattr(holder, "__array_interface__", None)  # what stands for a lost object raises here
    raise ProtocolError(f"a payload refers to the bytes of a {type(holder).__name__}, which has none")


def _array_over(root: Array, dtype: np.dtype[Any], shape: Any, strides: Any, start: Any) -> Array:
    """An array inside `root`. All is checked here, because NumPy's own check of strides wraps around at 64 bits."""
    try:
        low = high = start
        if strides is None:
            high += prod(shape) * dtype.itemsize
        elif 0 not in shape:
            for length, stride in zip(shape, strides, strict=True):
                if stride < 0:
                    low += (length - 1) * stride
                else:
                    high += (length - 1) * stride
            high += dtype.itemsize
        if not 0 <= low <= high <= root.nbytes or min(shape, default=0) < 0:
            raise ValueError(f"it would take up bytes {low} to {high}")
        return np.ndarray(shape, dtype, root, start, strides)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise ProtocolError(
            f"an array of shape {shape}, dtype {dtype} and strides {strides} does not fit its {root.nbytes} bytes: "
            f"{error}"
        ) from error


def _fields(data: memoryview, least: int, most: int) -> list[Any]:
    fields = decode_small(data)
    if type(fields) is not list or not least <= len(fields) <= most:
        raise ProtocolError(f"an extension holds {type(fields).__name__} instead of a list of {least} to {most} fields")
    return fields


class Marshaller:
    """Packs and unpacks for one process.

    Args:
        store: where arrays are shared from.
        copies: counts every copy of a payload.
        counters: where bytes received by mapping are counted.
        eager_limit: bytes; arrays of at least this size, and payloads above it, go by reference.
        seals: whether a connection of this process may be sealed, so that payloads above the eager limit lie in the
            store as ciphertext.
    """

    def __init__(
        self, store: Store, copies: CopyCounter, counters: Counters, eager_limit: int, *, seals: bool = False
    ) -> None:
        self.store = store
        self.copies = copies
        self.counters = counters
        self.eager_limit = eager_limit
        self.seals = seals
        self._idle: list[Unpacking] = []

    def share(self, array: Array, address: int, nbytes: int) -> Block | None:
        """The block of our store that `array` lies in, read-only and exported from now on; None when it lies in none.

        Args:
            array: C-contiguous, of plain bytes.
            address: of its first byte.
            nbytes: its bytes.
        """
        block = self.store.block_at(address, address + nbytes)
        if block is None or (block.sealed and block.exported and not array.flags.writeable):
            return block
        share(self.store, array)
        self.store.export(block)
        return block

    def pack_call(
        self,
        args: tuple[Any, ...],
        kwargs: MappingABC[str, Any],
        eager_limit: int = 0,
        moved: list[Array] | None = None,
    ) -> Packed:
        """Pack the arguments of a call, in order; with keywords the last element is their mapping.

        Args:
            args: by position.
            kwargs: by name.
            eager_limit: bytes, of the connection that is to carry them; 0: as for all.
            moved: is given the arrays that are handed over, which are dead then; see `restore`.

        Raises whatever pickling an argument raises, and `OutOfMemory` when an array does not fit the store.
        """
        limit = eager_limit or self.eager_limit
        if not kwargs and SCALARS.issuperset(map(type, args)):
            try:
                payload = encode(args)
            except (OverflowError, UnicodeEncodeError):  # an integer or a string that needs an extension
                pass
            else:
                if len(payload) <= limit:
                    return payload, (), 0
        packing = Packing(self.store, self.copies, limit)
        lowered = [packing.lower_argument(value) for value in args]
        if kwargs:
            lowered.append({name: packing.lower_argument(value) for name, value in kwargs.items()})
        packed = self._finish(packing, lowered, Flags.KWARGS if kwargs else 0)
        if packing.moved and moved is not None:
            moved.extend(move.array for move in packing.moved)
        return packed

    def pack(self, value: Any, eager_limit: int = 0) -> Packed:
        """Pack one value (a result, an item, what is put). `eager_limit` as in `pack_call`."""
        limit = eager_limit or self.eager_limit
        if type(value) in SCALARS:
            try:
                payload = encode(value)
            except (OverflowError, UnicodeEncodeError):
                pass
            else:
                if len(payload) <= limit:
                    return payload, (), 0
        packing = Packing(self.store, self.copies, limit)
        return self._finish(packing, packing.lower(value), 0)

    def _finish(self, packing: Packing, lowered: Any, flags: int) -> Packed:
        payload = encode(lowered)
        packed: Packed = payload, packing.parts, flags
        if len(payload) > packing.eager_limit:
            packed = self._spilled(payload, packing.parts, flags)
        for move in packing.moved:
            retire(move.array)
        return packed

    def duplicate(self, parts: Sequence[Part]) -> Sequence[Part]:
        """`parts` with copies of those that are handed over, for one of several times that they are sent or unpacked.

        Raises:
            OutOfMemory: the store cannot hold them.
            ObjectLost: the owner of one is gone.
        """
        return [self._copied(part) if part.kind == RegionKind.MOVED else part for part in parts]

    def _copied(self, part: Part) -> Part:
        root = np.asarray(part.holder)
        start = part.offset - part.holder.offset
        block = self.store.allocate(part.nbytes)
        source = root[start : start + part.nbytes]
        self.copies.copy_into(np.asarray(block), source, "moved argument of a retried call")
        return part._replace(holder=block, offset=block.offset)

    def fit(self, packed: Packed) -> Packed:
        """What was packed for a connection with an eager limit of its own, so that any connection can carry it."""
        payload, parts, flags = packed
        return packed if len(payload) <= self.eager_limit else self._spilled(payload, list(parts), flags)

    def _spilled(self, payload: bytes, parts: list[Part], flags: int) -> Packed:
        """With the payload in an object of its own, which comes first."""
        nbytes, envelope = len(payload), b""
        block = self.store.allocate(nbytes + spilling.SLACK_NBYTES if self.seals else nbytes)
        root = np.asarray(block)
        if self.seals:
            envelope = spilling.seal(payload, root)
            self.copies.count("payload above the eager limit", nbytes)
        else:
            self.copies.copy_into(root[:nbytes], np.frombuffer(payload, np.uint8), "payload above the eager limit")
        self.store.seal(block, root)
        parts.insert(0, Part(RegionKind.ARRAY, block, block.offset, nbytes, 0 if envelope else 1))
        return envelope, parts, flags | Flags.SPILLED

    def unpack(self, payload: Any, parts: Sequence[Part], flags: int) -> Any:
        """The inverse of `pack`; for a call's arguments a list, its last element the keywords under `Flags.KWARGS`.

        Raises:
            ProtocolError: the payload is malformed or refers outside its parts.
            Exception: whatever unpickling a value raises.
        """
        idle = self._idle
        unpacking = idle.pop() if idle else Unpacking(self.store, self.copies, self.counters)
        try:
            return unpacking.value(payload, parts, flags)
        finally:
            unpacking.mapped.clear()
            idle.append(unpacking)
