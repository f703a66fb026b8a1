"""Values on their way in: the payload of a message and its parts become objects again."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import msgspec

from zcactor.errors import ProtocolError
from zcactor.lazy_numpy import np
from zcactor.marshal import pickling, spilling
from zcactor.marshal.arrays import (
    array_address,
    byte_bounds,
    dtype_from_code,
    innermost,
)
from zcactor.marshal.values import (
    Code,
    decode_small,
    unpack_scalar,
    unpackers,
)
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.store import Block, Store
from zcactor.rpc.messages import Flags
from zcactor.transport.mapping import PrivateMapping, Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from zcactor.native import hot
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.rpc.parts import Part

    Array = npt.NDArray[Any]

__all__ = ["Unpacking"]

_SPILLED: Final = int(Flags.SPILLED)
"""As a plain number: an operation of the enumeration's member takes 2 us."""


class Unpacking:
    """One payload on its way in. The object is reused, and holds the parts of the current payload."""

    __slots__ = ("_decode", "copies", "counters", "foreign", "handed_over", "mapped", "ours", "parts", "store")

    def __init__(self, store: Store, copies: CopyCounter, counters: hot.Counters) -> None:
        self.store = store
        self.copies = copies
        self.counters = counters
        self.parts: Sequence[Part] = ()
        self.mapped: set[tuple[bytes, int, int, int]] = set()
        """Bytes of the current message that were counted as mapped: a message that names them twice maps them once."""
        self.ours = False
        """Whether nobody else gets the value: arrays whose bytes lie in the payload can be written to."""
        self.handed_over: Sequence[Array] = ()
        """The arrays that were handed over, and whose bytes lie in the payload."""
        self.foreign: BaseException | None = None
        """The exception that the user's own unpickling has raised last."""
        self._decode = msgspec.msgpack.Decoder(ext_hook=self.unpack).decode

    def value(self, payload: Any, parts: Sequence[Part], flags: int) -> Any:
        """Decode `payload`. Decoding may call this again, for a value nested in the current one.

        Raises:
            ProtocolError: the payload is malformed.
            BaseException: the exception of the user's own unpickling, as it is.
        """
        if flags & _SPILLED:
            payload, parts = self._spilled(payload, parts), parts[1:]
        outer, self.parts = self.parts, parts
        try:
            return self._decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            if error is self.foreign:
                raise
            raise ProtocolError(f"a payload of {len(payload)} bytes is malformed: {error}") from error
        finally:
            self.parts = outer

    def _spilled(self, envelope: Any, parts: Sequence[Part]) -> Any:
        """Return the payload that lies in the store: decrypted into memory of its own, or as it is where it is not
        encrypted."""
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
        """Return the part that an extension names by `index`."""
        if type(index) is not int or not 0 <= index < len(self.parts):
            raise ProtocolError(f"a payload names part {index!r}, but its message has {len(self.parts)}")
        return self.parts[index]

    def unpack(self, code: int, data: memoryview) -> Any:
        """Decode the value of one extension."""
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
            return unpack_scalar(data, self._dtype)
        if code == Code.BIG_INT:
            return int.from_bytes(data, "little", signed=True)
        if code == Code.PICKLE:
            buffers, stream = _fields(data, 2, 2)
            if type(stream) is not bytes or type(buffers) is not list or not all(type(b) is bytes for b in buffers):
                raise ProtocolError("a pickled value is malformed")
            return pickling.loads(self, stream, buffers)
        unpack = unpackers.get(code)
        if unpack is None:
            raise ProtocolError(f"a payload has an extension of unknown code {code}")
        return unpack(self, data)

    def _dtype(self, code: Any) -> np.dtype[Any]:
        try:
            return dtype_from_code(code)
        except ProtocolError:
            raise
        except BaseException as error:  # of the user's own metadata
            self.foreign = error
            raise

    def _array(self, index: int, code: Any, shape: Any, strides: Any = None, inner: Any = 0) -> Array:
        part = self.part(index)
        dtype = self._dtype(code)
        holder = part.holder
        if type(holder) is Lease:
            root = np.asarray(holder)
            found = holder.owner, holder.id, part.offset, part.nbytes
            if found not in self.mapped:
                self.mapped.add(found)
                self.counters.bytes_mapped += part.nbytes
        else:
            if type(holder) is Block:
                if not holder.sealed and holder.is_forked:
                    self.store.read_back(holder)  # it was moved away, and comes home after a fork
                if part.kind == RegionKind.MOVED:
                    holder.sealed = False  # an object of this process, back with write access
                elif not holder.sealed:
                    self.store.seal(holder)  # it was moved away, and its receiver shares it with this process
            root = _bytes_of(part)
        array = _array_over(root, dtype, shape, strides, inner)
        if part.kind == RegionKind.MOVED and isinstance(holder, Block | Lease):
            holder.array = ref(array)
        return array

    def _inline(self, raw: Any, code: Any, shape: Any, writable: Any, strides: Any = None) -> Array:
        dtype = self._dtype(code)
        if type(raw) is not bytes:
            raise ProtocolError(f"the elements of an array are of type {type(raw).__name__} instead of bytes")
        root: Array = np.frombuffer(raw or b"\0", np.uint8).copy()  # NumPy wants a buffer even for no elements
        if not (writable is True or self.ours):
            root.setflags(write=False)
        array = _array_over(root, dtype, shape, strides if raw else None, 0)
        if writable is True:
            self.handed_over = (*self.handed_over, array)
        return array

    def writable_view(self, array: Array) -> Array:
        """Return `array` in a form for a library without read-only arrays. Nobody else sees writes to it.

        Bytes that are shared with others are mapped once more, privately: the system copies a page at the first write
        to it (mmap(2), MAP_PRIVATE), so reading is free. Where that is impossible the result is a counted copy.
        """
        if array.flags.writeable:
            return array
        root = innermost(array)
        if root.flags.owndata:  # it came within the payload: nobody else has these bytes
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
    """Map `nbytes` of the memory of `holder`, from address `low` on, for private writes; None where that is
    impossible."""
    offset = holder.offset + low - holder.address if isinstance(holder, Block | Lease) else 0
    if type(holder) is Block and holder.store.arena.fd >= 0:
        return PrivateMapping.of(holder.store.arena.fd, offset, nbytes, holder)
    if type(holder) is Lease and holder.pages is not None and holder.adopted is not None:
        fd, inside = holder.pages.store.arena.fd, low - holder.address
        return PrivateMapping.of(fd, holder.adopted[1] + inside, nbytes, holder) if fd >= 0 else None
    if type(holder) is Lease and type(holder.mapping) is Window:
        return holder.mapping.private(offset, nbytes, holder)
    return None


def _bytes_of(part: Part) -> npt.NDArray[np.uint8]:
    """Return the bytes of `part`.

    Raises:
        ProtocolError: `part` is not a part of an arena.
        ObjectLost: the owner of `part` has ended.
    """
    holder = part.holder
    if type(holder) is Lease:
        return np.asarray(holder)
    if type(holder) is Block:
        start = part.offset - holder.offset
        return np.asarray(holder)[start : start + part.nbytes]
    _ = getattr(holder, "__array_interface__", None)  # the holder of a lost object raises here
    raise ProtocolError(f"a payload refers to the bytes of a {type(holder).__name__}, which has none")


def _array_over(root: Array, dtype: np.dtype[Any], shape: Any, strides: Any, start: Any) -> Array:
    """An array inside `root`. The layout is checked here, because NumPy's own check of strides wraps around at 64
    bits."""
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
