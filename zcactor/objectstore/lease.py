"""The right to read an object that another process owns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from zcactor.transport.mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


__all__ = ["Lease", "RemoteLease", "close_array"]


def close_array(made: ref[NDArray[Any]] | None) -> None:
    """Make an array that was made over a holder's root read-only for good, and the root, if it still lives."""
    array = None if made is None else made()
    while isinstance(array, np.ndarray):
        array.setflags(write=False)
        array = array.base


class _Granted:
    """A lease that this process holds on an object of another one's."""

    __slots__ = ("__weakref__", "_release", "id", "nbytes", "offset", "owner")

    def __init__(self, owner: bytes, object_id: int, offset: int, nbytes: int, release: Callable[[int], None]) -> None:
        self.owner = owner
        """Process id (16 bytes) of the owner."""
        self.id = object_id
        self.offset = offset
        """Bytes from the start of the owner's arena."""
        self.nbytes = nbytes
        self._release = release

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """See `zcactor.rpc.parts.Holder`. Sent back to the owner, nothing is leased; to a third process, it is pinned
        here until that one has a lease of its own."""
        if session.peer_process == self.owner:
            return self.owner, self.id, 0
        return self.owner, self.id, session.pin(self)

    def __del__(self) -> None:
        self._release(self.id)


class RemoteLease(_Granted):
    """A lease on bytes that cannot be mapped and have not been read: they can be, or be passed on.

    Args:
        session: the connection to the owner, through which they are read.
        seal, rkey: as in the reference that granted it.
    """

    __slots__ = ("rkey", "seal", "session")

    def __init__(
        self, owner: bytes, object_id: int, offset: int, nbytes: int, session: Any, seal: int, rkey: int
    ) -> None:
        super().__init__(owner, object_id, offset, nbytes, session.release_later)
        self.session = session
        self.seal = seal
        self.rkey = rkey


class Lease(_Granted):
    """The base object of a received array: the bytes stay valid until the last view of them, and so this, is gone.

    A lease was granted by the owner when it sent the reference. Losing the last Python reference returns it: the
    object's id goes to `release`, which only notes it (this may run on any thread, inside the garbage collector), and
    the note rides to the owner in the next frame. There is no timer: bytes under a lease are never reused.

    The array interface, and not the buffer protocol, is what NumPy is given: with a base that exports no buffer NumPy
    refuses to switch ``flags.writeable`` back on.
    """

    __slots__ = ("address", "adopted", "array", "mapping", "pages", "reader", "writable")

    def __init__(
        self,
        owner: bytes,
        object_id: int,
        offset: int,
        nbytes: int,
        address: int,
        mapping: Any,
        release: Callable[[int], None],
        writable: bool = False,
        reader: bytes = b"",
    ) -> None:
        super().__init__(owner, object_id, offset, nbytes, release)
        self.address = address
        """Where the bytes are mapped here."""
        self.mapping = mapping
        """Kept, so that the mapping outlives the connection it came with."""
        if type(mapping) is Mapping:
            mapping.leases[id(self)] = ref(self)
        self.writable = writable
        self.reader = reader
        """Process id (16 bytes) that it was granted to: a runtime started later can pass nothing on under it."""
        self.adopted: tuple[Any, int] | None = None
        """A `zcactor.objectstore.store.Block` of ours with the same bytes, once the owner has ended, and their offset
        in our arena: what is passed on in its place. See `zcactor.runtime.adoption`."""
        self.pages: Any = None
        """The block that the bytes are mapped from, where it is our own arena."""
        self.array: ref[NDArray[Any]] | None = None
        """The array made of what was moved to us: sharing a part of it makes it read-only as well."""

    def __del__(self) -> None:
        mapping = self.mapping
        if type(mapping) is Mapping:
            mapping.leases.pop(id(self), None)
        self._release(self.id)

    def place(self, address: int, mapping: Any) -> None:
        """The bytes are mapped now."""
        self.address = address
        self.mapping = mapping
        if type(mapping) is Mapping:
            mapping.leases[id(self)] = ref(self)

    def seal(self) -> None:
        """From now on nobody writes to the bytes. Idempotent."""
        self.writable = False
        close_array(self.array)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface, version 3: the bytes in place, read-only unless they were moved to us."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, not self.writable), "version": 3}
