"""Packing of values for a message, and unpacking: the seam between Python objects and frames."""

from __future__ import annotations

from collections.abc import Mapping as MappingABC
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zcactor.exception_pickling import hides, type_name
from zcactor.lazy_numpy import np
from zcactor.marshal import spilling
from zcactor.marshal.explaining import explain
from zcactor.marshal.move import (
    retire,
)
from zcactor.marshal.packing import CheckedPacking, Packing
from zcactor.marshal.sharing import reopen, share
from zcactor.marshal.unpacking import Unpacking
from zcactor.marshal.values import (
    SCALARS,
    encode,
)
from zcactor.native import hot
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.store import Block
from zcactor.rpc.messages import Flags
from zcactor.rpc.parts import Part

if TYPE_CHECKING:
    import numpy.typing as npt

    from zcactor.interface import MethodSpec
    from zcactor.objectstore.checking import Checker
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.store import Store

    Array = npt.NDArray[Any]

__tracebackhide__ = hides
__all__ = ["Marshaller"]

PackedMessage = tuple[bytes, Sequence[Part], int]
"""Payload bytes, the parts that they refer to, and `Flags`."""
_KWARGS: Final = int(Flags.KWARGS)
_SPILLED: Final = int(Flags.SPILLED)
"""As plain numbers: an operation of the enumeration's members takes 2 us."""


class Marshaller:
    """The packing and unpacking of one process.

    Args:
        store: the store whose arrays are shared.
        copies: counts every copy of a payload.
        counters: counts the bytes received by mapping.
        eager_limit: bytes; arrays of at least this size, and payloads above it, go by reference.
        seals: whether a connection of this process may be encrypted, so that payloads above the eager limit lie in the
            store as ciphertext.
        checker: compares what is passed in check mode; None without.
    """

    def __init__(
        self, store: Store, copies: CopyCounter, counters: hot.Counters, eager_limit: int, *, seals: bool = False,
        checker: Checker | None = None,
    ) -> None:  # fmt: skip
        self.store = store
        self.copies = copies
        self.counters = counters
        self.eager_limit = eager_limit
        self.seals = seals
        self._packing = Packing if checker is None else partial(CheckedPacking, checker)
        self._idle: list[Unpacking] = []

    def share(self, array: Array, address: int, nbytes: int) -> Block | None:
        """Close `array` and return its block in this process's store, which is exported from now on. None when `array`
        does not go by reference: see `zcactor.marshal.sharing`.

        Args:
            array: a C-contiguous array of plain bytes.
            address: address of its first byte.
            nbytes: its size in bytes.
        """
        block = self.store.block_at(address, address + nbytes)
        if block is None or (block.sealed and block.exported and not array.flags.writeable and not hot.lent(array)):
            return block
        holder = share(self.store, array)
        if type(holder) is not Block:
            return None
        self.store.export(holder)
        return holder

    def share_copied(self, array: Array, address: int, nbytes: int) -> Block | None:
        """`share` for a peer that keeps copies by id."""
        block = self.share(array, address, nbytes)
        if block is None:
            return None
        block = block.as_sent(block.offset + address - block.address, nbytes)
        self.store.export(block)
        return block

    def pack_call(
        self,
        args: tuple[Any, ...],
        kwargs: MappingABC[str, Any],
        eager_limit: int = 0,
        moved: list[Array] | None = None,
        *,
        closed: list[Any] | None = None,
        direct: bool = False,
        payload_limit: int = 0,
        spec: MethodSpec | None = None,
        first: int = 1,
    ) -> PackedMessage:
        """Pack the arguments of a call, in order. With keyword arguments the last element is their mapping.

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
            eager_limit: bytes, the eager limit of the connection that is to carry them; 0 takes that of the process.
            moved: a list that receives the arrays that are handed over. They are dead from then on; see `restore`.
            closed: a list that receives what was closed for the message; see `zcactor.marshal.sharing.reopen`. An error
                that this raises has undone it.
            direct: the message goes straight to the process that runs the method.
            payload_limit: bytes of a payload that goes into no object of its own, as it is to be a value in another
                message; 0 takes the eager limit.
            spec: the method, for messages; None where they need not name it.
            first: number of the first argument in messages; 0 for a class, which its arguments follow.

        Raises:
            OutOfMemory: an array does not fit the store.
            Exception: the error of pickling an argument, which names the part of it.
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
        packing = self._packing(self.store, self.copies, limit)
        packing.direct = direct
        try:
            encodable = [packing.pack_argument(value) for value in args]
            if kwargs:
                encodable.append({name: packing.pack_argument(value) for name, value in kwargs.items()})
            packed = self._finish(packing, encodable, _KWARGS if kwargs else 0, payload_limit)
        except BaseException as error:
            reopen(packing.closed)
            explain(error, _named(args, kwargs, spec, first))
            raise
        if packing.moved and moved is not None:
            moved.extend(move.array for move in packing.moved)
        if closed is not None:
            closed.extend(packing.closed)
        return packed

    def pack(self, value: Any, eager_limit: int = 0, *, payload_limit: int = 0) -> PackedMessage:
        """Pack one value: a result, an item, the argument of `put`. The limits are as in `pack_call`."""
        limit = eager_limit or self.eager_limit
        if type(value) in SCALARS:
            try:
                payload = encode(value)
            except (OverflowError, UnicodeEncodeError):
                pass
            else:
                if len(payload) <= limit:
                    return payload, (), 0
        packing = self._packing(self.store, self.copies, limit)
        try:
            return self._finish(packing, packing.pack(value), 0, payload_limit)
        except BaseException as error:
            reopen(packing.closed)
            explain(error, [("value", value)])
            raise

    def _finish(self, packing: Packing, encodable: Any, flags: int, payload_limit: int = 0) -> PackedMessage:
        payload = encode(encodable)
        packed: PackedMessage = payload, packing.parts, flags
        if len(payload) > (payload_limit or packing.eager_limit):
            packed = self._spilled(payload, packing.parts, flags)
        for move in packing.moved:
            retire(move.array)
        return packed

    def duplicate(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Return `parts` with copies of the moved parts, for one of several times that they are sent or unpacked.

        Raises:
            OutOfMemory: the store cannot hold the copies.
            ObjectLost: the owner of a part has ended.
        """
        return [self._copied(part) if part.kind == RegionKind.MOVED else part for part in parts]

    def _copied(self, part: Part) -> Part:
        root = np.asarray(part.holder)
        start = part.offset - part.holder.offset
        block = self.store.allocate(part.nbytes)
        source = root[start : start + part.nbytes]
        self.copies.copy_into(np.asarray(block), source, "moved argument of a retried call")
        return part._replace(holder=block, offset=block.offset)

    def fit(self, packed: PackedMessage, eager_limit: int) -> PackedMessage:
        """Make a connection able to carry `packed`, which was packed for another one, or before one was known. Each
        connection has the smaller eager limit of its two processes.

        Args:
            packed: the message.
            eager_limit: bytes, the eager limit of the connection.

        Raises:
            OutOfMemory: the store cannot hold the payload.
        """
        payload, parts, flags = packed
        return packed if len(payload) <= eager_limit else self._spilled(payload, list(parts), flags)

    def _spilled(self, payload: bytes, parts: list[Part], flags: int) -> PackedMessage:
        """Move the payload into an object of its own, which becomes the first part."""
        nbytes, envelope = len(payload), b""
        block = self.store.allocate(nbytes + spilling.SLACK_NBYTES if self.seals else nbytes)
        block.private = True
        root = np.asarray(block)
        if self.seals:
            envelope = spilling.seal(payload, root)
            self.copies.count("payload above the eager limit", nbytes)
        else:
            self.copies.copy_into(root[:nbytes], np.frombuffer(payload, np.uint8), "payload above the eager limit")
        self.store.seal(block, root)
        parts.insert(0, Part(RegionKind.ARRAY, block, block.offset, nbytes, 0 if envelope else 1))
        return envelope, parts, flags | _SPILLED

    def unpack(self, payload: Any, parts: Sequence[Part], flags: int, ours: bool = False) -> Any:
        """Unpack the result of `pack`. A call's arguments are a list, whose last element is the keyword arguments under
        `Flags.KWARGS`.

        Args:
            payload, parts, flags: the message.
            ours: whether nobody else gets the value, as a method's arguments: small arrays in it can be written to.

        Raises:
            ProtocolError: the payload is malformed or refers outside its parts.
            BaseException: an error of unpickling a value, as it is.
        """
        return self.unpack_result(payload, parts, flags, ours)[0]

    def unpack_result(
        self, payload: Any, parts: Sequence[Part], flags: int, ours: bool = False
    ) -> tuple[Any, Sequence[Any]]:
        """Unpack as `unpack`. With the value come the arrays in it that were handed over, and lie in the payload
        itself: writes to such an array change no part."""
        idle = self._idle
        unpacking = idle.pop() if idle else Unpacking(self.store, self.copies, self.counters)
        unpacking.ours = ours
        try:
            return unpacking.value(payload, parts, flags), unpacking.handed_over
        finally:
            unpacking.mapped.clear()
            unpacking.foreign = None
            unpacking.handed_over = ()
            idle.append(unpacking)


def _named(
    args: tuple[Any, ...], kwargs: MappingABC[str, Any], spec: MethodSpec | None, first: int
) -> list[tuple[str, Any]]:
    """The arguments of a call with their names in messages; see `Marshaller.pack_call`."""
    called = f"{spec.label}(): " if spec is not None else ""
    named = []
    for number, value in enumerate(args, first):
        name = spec.argument(number) if spec is not None else str(number)
        named.append((f"{called}argument {name}" if number else type_name(args[0]), value))
    return named + [(f"{called}argument {name}", value) for name, value in kwargs.items()]
