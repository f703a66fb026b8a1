"""The memory of inputs: its place, as it is told to the other members, and the way to it from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from zcactor.collectives.folding import Memory, Operand, operand_of
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.marshal.arrays import byte_bounds, root_of
from zcactor.marshal.sharing import is_of
from zcactor.objectstore.lease import Lease
from zcactor.process.tasks import all_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.collectives.kinds import Array
    from zcactor.objectstore.store import Block
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session

__all__ = [
    "OUTSIDE", "InputPlace", "Piece", "is_reached", "lendable", "operand_at", "own_source", "reach_inputs", "source_of",
]  # fmt: skip

OUTSIDE: Final = "group input outside the store"
"""The counted reason for copies of inputs."""
_NOT_REACHED: Final = "group input whose owner is not reached"
"""The counted reason for copies of inputs that lie in the arena of a process which other ranks cannot reach."""
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
    if type(root) is Lease and is_of(store, root):
        if root.adopted is not None:  # its owner has ended, and this process has the bytes
            return InputPlace(array, b"", root.adopted[1] + low - root.address, low, high)
        session = process.sessions.used.get(root.owner)
        if session is not None and session.closed is None:
            return InputPlace(array, root.owner, root.offset + low - root.address, low, high)
    copied = store.empty(array.shape, array.dtype)
    process.copies.copy_into(copied, array, OUTSIDE)
    return source_of(process, copied)


def own_source(process: LocalProcess, source: InputPlace) -> InputPlace:
    """Return the place of an input in the arena of this process, to which it is copied from other arenas.

    Raises:
        OutOfMemory: the copy does not fit the store.
    """
    if source.owner:
        source = source_of(process, source.array)  # the owner may have ended meanwhile
    if not source.owner:
        return source
    copied = process.store.empty(source.array.shape, source.array.dtype)
    process.copies.copy_into(copied, source.array, _NOT_REACHED)
    return source_of(process, copied)


async def reach_inputs(operation: Any, ranks: Iterable[int]) -> None:
    """Connect to the processes whose arenas have the inputs of other ranks: further ones too, from which the ranks have
    received arrays as arguments. Where such a process has ended, its rank is asked for a copy of the input.

    Args:
        operation: the `Collective`, whose publications name the copies from then on.
        ranks: the ranks.

    Raises:
        ConnectionLost: the process of a rank has ended.
    """
    process, published = operation.process, operation.published

    async def reach(rank: int) -> None:
        theirs = published[rank]
        try:
            await process.connections.connect(theirs.owner)
        except ConnectionLost:
            home = operation.member.seats[rank].process
            if theirs.owner == home:
                raise
            offset, layout = await operation.member.input_of(rank, operation.seq)
            published[rank] = theirs._replace(owner=home, offset=offset, layout=layout)

    await all_of([reach(rank) for rank in ranks if not is_reached(process, published[rank].owner)])


def is_reached(process: LocalProcess, owner: bytes) -> bool:
    """Whether the arena of `owner` is this process's, or that of a process with which it is connected."""
    if owner == process.process:
        return True
    session = process.sessions.used.get(owner)
    return session is not None and session.closed is None


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
        ConnectionLost: the connection to the owner has ended.
        ProtocolError: the bytes do not lie in the owner's arena, or it is not mapped here.
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
        session = process.sessions.used.get(owner)
        if session is None:
            raise ConnectionLost(f"the connection to process {owner.hex()}, which has a rank's input, has ended")
        keep = session.connection.map(offset, nbytes)
        address = keep.address
        if not address and nbytes:
            raise ProtocolError(f"an input lies in the arena of process {owner.hex()}, which is not mapped here")
    if not strides:
        return Operand(address, None, keep)
    view = np.ndarray(like.shape, like.dtype, np.asarray(Memory(address, nbytes, keep)), first, strides)
    return Operand(address + first, view, keep)
