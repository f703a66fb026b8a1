"""The leases of one session that the peer is granted: the table as the native part uses it, with the session's lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading

    from zcactor.objectstore.table import LeaseTable

__all__ = ["LockedLeases", "LockedLeasesOfCopies", "collecting"]

collecting: dict[int, list[Any]] = {}
"""The sessions whose first release was noted, for each thread that is about to send them itself, by its identifier (see
`zcactor.rpc.session.Session.send_releases`). It is awake, and the loop's thread may get the processor much later."""


class LockedLeases:
    """The lease table for the native part, which writes frames without the session's lock."""

    __slots__ = ("_leases", "_lock")

    def __init__(self, leases: LeaseTable, lock: threading.RLock) -> None:
        self._leases = leases
        self._lock = lock

    def grant(self, object_id: int, keep: object) -> None:
        """See `LeaseTable.grant`."""
        with self._lock:
            self._leases.grant(object_id, keep)

    def withdraw(self, object_id: int) -> None:
        """Take back a lease that was granted for a frame that is not sent, unless the end of the connection has ended
        it."""
        holder = None
        with self._lock:
            if self._leases.get(object_id) is not None:
                holder = self._leases.release(object_id, 1)
        del holder

    def release(self, object_id: int, count: int) -> None:
        """See `LeaseTable.release`."""
        with self._lock:
            holder = self._leases.release(object_id, count)
        del holder  # a finalizer may call actors, by this session, too


class LockedLeasesOfCopies(LockedLeases):
    """`LockedLeases` for a peer that does not map our arena, and keeps copies of the objects that it has leased."""

    __slots__ = ()

    def grant(self, object_id: int, keep: Any) -> None:
        """See `LockedLeases`."""
        if keep.of_numpy:
            keep.store.take_over(keep.offset)
        super().grant(object_id, keep)
