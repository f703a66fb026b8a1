"""Two marshallers with a store each, and the work of a connection between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zcactor.marshal import Marshaller
from zcactor.native import hot
from zcactor.objectstore.copies import CopyCounter
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.store import Block, Store
from zcactor.rpc.parts import Part

LIMIT = 512
"""Bytes; a small eager limit, so that small arrays go by reference."""


class Side:
    """One process's store and marshaller."""

    def __init__(self, process: bytes, capacity: int = 64 << 20, *, seals: bool = False) -> None:
        self.store = Store(capacity, process, extent_nbytes=1 << 20)
        self.copies = CopyCounter()
        self.counters = hot.Counters()
        self.marshaller = Marshaller(self.store, self.copies, self.counters, LIMIT, seals=seals)

    @property
    def bytes_copied(self) -> int:
        """Bytes that were copied here up to now."""
        return sum(count.nbytes for count in self.copies.snapshot().values())


class Wire:
    """A wire for values from `left` to `right` and back, in one process: leases point at the very bytes of the other
    store.

    Args:
        seals: whether payloads above the eager limit are sealed.
    """

    def __init__(self, *, seals: bool = False) -> None:
        self.left = Side(b"l" * 16, seals=seals)
        self.right = Side(b"r" * 16, seals=seals)
        self.released: list[int] = []
        self.parts: Sequence[Part] = ()
        """The parts of the last message."""
        self.payload: Any = b""

    def close(self) -> None:
        """Close both stores."""
        self.left.store.close()
        self.right.store.close()

    def send(self, value: Any, *, back: bool = False) -> Any:
        """Send `value` from left to right, or `back`; return it as it arrives."""
        sender, receiver = (self.right, self.left) if back else (self.left, self.right)
        self.payload, self.parts, flags = sender.marshaller.pack(value)
        imported = [self.imported(part, receiver) for part in self.parts]
        return receiver.marshaller.unpack(bytes(self.payload), imported, flags)

    def imported(self, part: Part, receiver: Side) -> Part:
        """The part as `receiver` gets it."""
        holder = part.holder
        if isinstance(holder, Lease) and holder.owner == receiver.store.process:
            return part._replace(holder=receiver.store.lookup(holder.id))
        if not isinstance(holder, Block | Lease):
            return part
        if isinstance(holder, Block):
            holder.store.export(holder)
        lease = Lease(
            holder.store.process if isinstance(holder, Block) else holder.owner,
            holder.id,
            part.offset,
            part.nbytes,
            holder.address + part.offset - holder.offset,
            mapping=holder,
            release=self.released.append,
            writable=part.kind == RegionKind.MOVED,
            reader=receiver.store.process,
        )
        return part._replace(holder=lease)


def address(array: np.ndarray[Any, Any]) -> int:
    """The address of the first element."""
    return int(array.ctypes.data)


def assert_same(got: Any, sent: Any) -> None:
    """Check that two values are equal and of exactly the same types, all the way down."""
    assert type(got) is type(sent)
    if isinstance(sent, np.ndarray):
        assert got.shape == sent.shape
        assert_same_dtype(got.dtype, sent.dtype)
        assert_same_elements(got, sent)
    elif isinstance(sent, np.generic):
        assert_same_dtype(got.dtype, sent.dtype)
        assert_same_elements(np.asarray(got), np.asarray(sent))
    elif isinstance(sent, float | complex):
        assert np.complex128(got).tobytes() == np.complex128(sent).tobytes()
    elif isinstance(sent, list | tuple):
        assert len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)
    elif isinstance(sent, dict):
        assert list(map(type, got)) == list(map(type, sent))
        assert list(got) == list(sent)
        for one, other in zip(got.values(), sent.values(), strict=True):
            assert_same(one, other)
    else:
        assert got == sent


def assert_same_elements(got: np.ndarray[Any, Any], sent: np.ndarray[Any, Any]) -> None:
    """Check that elements are equal bit by bit, also NaN; padding of a structure or a long double does not count."""
    if sent.dtype.names:
        for name in sent.dtype.names:
            assert_same_elements(np.asarray(got[name]), np.asarray(sent[name]))
    elif sent.dtype.hasobject:
        assert got.tolist() == sent.tolist()
    elif sent.dtype.char in "gG":
        np.testing.assert_array_equal(got, sent, strict=True)
    else:
        assert got.copy(order="C").tobytes() == sent.copy(order="C").tobytes()


def strides(array: np.ndarray[Any, Any]) -> list[int]:
    """Bytes from one element to the next, along the axes with more than one element."""
    return [stride for stride, length in zip(array.strides, array.shape, strict=True) if length > 1]


def assert_same_dtype(got: np.dtype[Any], sent: np.dtype[Any]) -> None:
    """Check that dtypes are equal, also in facts that NumPy's comparison leaves out."""
    assert got == sent
    assert got.str == sent.str
    assert (got.type, got.isalignedstruct, got.itemsize, got.fields) == (
        sent.type,
        sent.isalignedstruct,
        sent.itemsize,
        sent.fields,
    )
