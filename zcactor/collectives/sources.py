"""The memory of inputs: its place, as it is told to the other members, and the way to it from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from zcactor.collectives.folding import Memory, Operand, operand_of
from zcactor.errors import ProtocolError
from zcactor.marshal.arrays import byte_bounds, root_of
from zcactor.marshal.sharing import is_of
from zcactor.objectstore.lease import Lease

if TYPE_CHECKING:
    from zcactor.collectives.kinds import Array
    from zcactor.objectstore.store import Block
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session

__all__ = ["OUTSIDE", "InputPlace", "Piece", "lendable", "operand_at", "source_of"]

OUTSIDE: Final = "group input outside the store"
"""The counted reason for copies of inputs."""
_FOR_OTHER_HOSTS: Final = "group input with gaps, or of another process, for other hosts"
"""The counted reason for copies of inputs that other hosts cannot take from where they lie."""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[tuple[int, ...], int]).decode


class InputPlace:
    """The place of an input.

    Attributes:
        array: the input, or its copy in the store, which is kept while it is read.
        owner: id of the process in whose arena the bytes lie; empty for the process of the rank itself.
        offset: offset of the lowest byte in that arena.
        nbytes: bytes from the lowest to the highest.
        layout: strides, and the offset of the first element from the lowest byte; empty for C order.
        operand: the input as it is read here.
    """

    __slots__ = ("array", "layout", "nbytes", "offset", "operand", "owner")

    def __init__(self, array: Array, owner: bytes, offset: int, low: int, high: int) -> None:
        self.array = array
        self.owner = owner
        self.offset = offset
        self.nbytes = high - low
        if array.flags.c_contiguous:
            self.layout = b""
            self.operand = Operand(low, None, array)
        else:
            self.operand = operand_of(array)
            self.layout = _encode((array.strides, self.operand.address - low))


def source_of(process: LocalProcess, array: Array) -> InputPlace:
    """Find the arena that `array` lies in. An array outside of all arenas is copied into this process's, which is
    counted.

    Raises:
        OutOfMemory: the copy does not fit the store.
    """
    store = process.store
    low, high = byte_bounds(array)
    if store.contains(low, high):
        return InputPlace(array, b"", low - store.arena.address, low, high)
    root = root_of(array)
    if type(root) is Lease and is_of(store, root) and root.adopted is None:
        return InputPlace(array, root.owner, root.offset + low - root.address, low, high)
    copied = store.empty(array.shape, array.dtype)
    process.copies.copy_into(copied, array, OUTSIDE)
    return source_of(process, copied)


class Piece(NamedTuple):
    """Bytes of this process's store that another rank reads: an input, a part of a sum, or a part of the result.

    They are lent, not shared: the owner may write to them again, so the reader keeps no copy under the object's id.
    """

    block: Block
    offset: int
    """Bytes from the start of the arena."""
    nbytes: int

    @property
    def id(self) -> int:
        """Id of the object that the bytes are part of."""
        return self.block.id

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return self.block.store.arena.address + self.offset

    def part(self, start: int, nbytes: int) -> Piece:
        """The `nbytes` from `start` on."""
        return Piece(self.block, self.offset + start, nbytes)

    def grant(self, session: Session) -> None:
        """Lease the object to the peer of `session`, which reads the bytes. NumPy's arrays stay as they are."""
        self.block.store.export(self.block)
        session.leases.grant(self.block.id, self.block)


def lendable(process: LocalProcess, array: Array) -> tuple[InputPlace, Piece]:
    """Find the place of an array, whose bytes other hosts can take as they lie: without gaps, in the store of this
    process. Otherwise they are copied there, which is counted.

    Raises:
        OutOfMemory: the copy does not fit the store.
    """
    place = source_of(process, array)
    if place.owner or place.layout:
        copied = process.store.empty(array.shape, array.dtype)
        process.copies.copy_into(copied, array, _FOR_OTHER_HOSTS)
        place = source_of(process, copied)
    low = process.store.arena.address + place.offset
    block = process.store.block_at(low, low + place.nbytes)
    if block is None:
        raise ProtocolError(f"{place.nbytes} bytes at {place.offset} are in the store, and not in one object")
    return place, Piece(block, place.offset, place.nbytes)


def operand_at(process: LocalProcess, owner: bytes, offset: int, layout: bytes, like: Array) -> Operand:
    """Return the operand for another rank's input, whose dtype and shape are those of `like`.

    Raises:
        ProtocolError: the bytes do not lie in the owner's arena.
        KeyError: there is no connection to the owner.
    """
    strides, first = _decode(layout) if layout else ((), 0)
    nbytes = like.nbytes
    if strides:
        if len(strides) != like.ndim:
            raise ProtocolError(f"an input of {like.ndim} axes came with {len(strides)} strides")
        reach = [(count - 1) * stride for count, stride in zip(like.shape, strides, strict=True)]
        lowest = first + sum(distance for distance in reach if distance < 0)
        nbytes = first + sum(distance for distance in reach if distance > 0) + like.itemsize
        if lowest < 0:
            raise ProtocolError("an input begins before the bytes that it was announced with")
    keep: Any
    if owner == process.process:
        store = process.store
        if offset < 0 or offset + nbytes > store.arena.nbytes:
            raise ProtocolError(f"{nbytes} bytes at {offset} do not lie in the arena of {store.arena.nbytes} bytes")
        address, keep = store.arena.address + offset, store.arena
    else:
        connection = process.sessions.used[owner].connection
        address, keep = connection.map(offset, nbytes), connection.mapping
    if not strides:
        return Operand(address, None, keep)
    view = np.ndarray(like.shape, like.dtype, np.asarray(Memory(address, nbytes, keep)), first, strides)
    return Operand(address + first, view, keep)
