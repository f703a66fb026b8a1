"""Leases: the right to read an object that another process owns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from zcactor.lazy_numpy import np
from zcactor.transport.mapping import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from zcactor.objectstore.ref import Region

__all__ = ["Lease", "RemoteLease", "close_array"]


def close_array(made: ref[NDArray[Any]] | None) -> None:
    """Make an array, if it still lives, read-only for good, and with it its bases down to the holder's root."""
    array = None if made is None else made()
    while isinstance(array, np.ndarray):
        array.setflags(write=False)
        array = array.base


class _Granted:
    """A lease of this process on an object of another process."""

    __slots__ = ("__weakref__", "_release", "id", "nbytes", "offset", "owner")

    def __init__(self, owner: bytes, object_id: int, offset: int, nbytes: int, release: Callable[..., None]) -> None:
        self.owner = owner
        """Process id (16 bytes) of the owner."""
        self.id = object_id
        self.offset = offset
        """Offset in bytes from the start of the owner's arena."""
        self.nbytes = nbytes
        self._release = release

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """Grant the lease on to the peer of `session`; see `zcactor.rpc.parts.Holder`. The owner needs no lease. For a
        third process the object is pinned here until that process has a lease of its own."""
        if session.peer_process == self.owner:
            return self.owner, self.id, 0
        return self.owner, self.id, session.pin(self)

    def __del__(self) -> None:
        self._release(self.id)


class RemoteLease(_Granted):
    """A lease on bytes that cannot be mapped and have not been read yet. The bytes can be read, or the lease passed on.

    Args:
        session: the session with the owner, through which the bytes are read.
        region: the reference that granted the lease.
        soon: whether the owner waits for the end of the lease.
    """

    __slots__ = ("authenticate", "kind", "rkey", "seal", "session", "taken")

    unread: Final = True
    """See `zcactor.rpc.parts.is_unread`."""

    def __init__(self, session: Any, region: Region, soon: bool = False) -> None:
        kind, owner, object_id, offset, nbytes, _, seal, rkey, authenticate = region
        super().__init__(owner, object_id, offset, nbytes, session.release if soon else session.release_later)
        self.session = session
        self.seal = seal
        self.rkey = rkey
        self.kind = kind
        self.authenticate = authenticate
        self.taken: Any = None
        """Once the owner has ended in order: the `zcactor.rpc.parts.Part` with the bytes, which came here before, or
        with the reason of their loss. See `zcactor.objects.succession`."""

    def __del__(self) -> None:
        self._release(self.id, self.nbytes)


class Lease(_Granted):
    """The base object of a received array. The bytes stay valid until their last view, and with it this object, is
    gone.

    The owner granted the lease when it sent the reference. Losing the last Python reference returns the lease: the
    object's id goes to `release`, which only notes it (this may run on any thread, inside the garbage collector), and
    the next frame takes the note to the owner. There is no timer: bytes under a lease are never reused.

    NumPy gets the bytes by the array interface, and not by the buffer protocol: with a base that exports no buffer,
    NumPy refuses to switch ``flags.writeable`` back on.
    """

    __slots__ = ("address", "adopted", "array", "closer", "forked", "mapping", "pages", "reader", "writable")

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
        # `_Granted.__init__` does the same. One is made for each array that arrives, so there is no second function.
        self.owner, self.id, self.offset, self.nbytes, self._release = owner, object_id, offset, nbytes, release
        self.address = address
        """Address at which the bytes are mapped in this process."""
        self.mapping = mapping
        """The owner of the mapped bytes, a `Window` or an arena of this process, which so outlives the connection."""
        if type(mapping) is Window:
            mapping.leases[id(self)] = ref(self)
        self.writable = writable
        self.closer: object = None
        """As `zcactor.objectstore.store.Block.closer`."""
        self.reader = reader
        """Process id (16 bytes) to which the lease was granted: a runtime that starts later can pass nothing on under
        that id."""
        self.adopted: tuple[Any, int] | None = None
        """Once the owner has ended: a `zcactor.objectstore.store.Block` of this process with the same bytes, which is
        passed on instead, and the offset of the bytes in this process's arena. See `zcactor.objects.adoption`."""
        self.forked = False
        """Whether a fork has made the bytes, which were moved here, private to this process."""
        self.pages: Any = None
        """The block under the bytes, where they lie in this process's own arena."""
        self.array: ref[NDArray[Any]] | None = None
        """The array made of bytes that were moved to this process: sharing a part of it makes it read-only as well."""

    def __del__(self) -> None:
        mapping = self.mapping
        if type(mapping) is Window:
            mapping.leases.pop(id(self), None)
        self._release(self.id)

    def place(self, address: int, mapping: Any) -> None:
        """Set the address at which the bytes are mapped from now on."""
        self.address = address
        self.mapping = mapping
        if type(mapping) is Window:
            mapping.leases[id(self)] = ref(self)

    def seal(self) -> None:
        """Let nobody write to the bytes from now on. Idempotent."""
        self.writable = False
        close_array(self.array)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface, version 3: the bytes in place, read-only unless they were moved to this process."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, not self.writable), "version": 3}
