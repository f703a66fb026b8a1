"""The lease table: the leases of one peer on objects of this process.

A lease is the right to read one object. While a peer holds a lease, the table keeps the object alive, so its bytes are
not reused. The object is dropped when the peer has released every lease, or can read no more. Never on a timer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LeaseTable"]


class LeaseTable:
    """The leases of one peer, by object id. Not thread-safe: its session serialises the calls."""

    __slots__ = ("_counts", "_keeps", "_next_pin", "_released", "_total")

    def __init__(self) -> None:
        # Two tables and no object with both: one would be made for each array that is passed.
        self._counts: dict[int, int] = {}
        self._keeps: dict[int, Any] = {}
        self._next_pin = 1
        self._total = self._released = 0

    def __len__(self) -> int:
        """The number of objects on which the peer holds a lease."""
        return len(self._counts)

    @property
    def total(self) -> int:
        """The number of leases: an object that was sent twice counts twice."""
        return self._total

    @property
    def granted(self) -> int:
        """The number of leases so far, with those that were released."""
        return self._total + self._released

    def count(self, is_wanted: Callable[[Any], bool]) -> int:
        """The number of leases on objects whose holder is wanted."""
        return sum(self._counts.get(object_id, 0) for object_id, keep in self._keeps.copy().items() if is_wanted(keep))

    def kept(self) -> dict[int, Any]:
        """The holders of the objects on which the peer holds leases, by id."""
        return self._keeps.copy()

    def grant(self, object_id: int, keep: object) -> None:
        """Note one more lease on `object_id`, because the peer is being sent a reference.

        Args:
            object_id: the object's id.
            keep: the object that keeps the bytes alive. The table holds it from the first grant to the last release;
                later grants of the same id keep the first holder.
        """
        counts = self._counts
        if object_id in counts:
            counts[object_id] += 1
        else:
            counts[object_id] = 1
            self._keeps[object_id] = keep
        self._total += 1

    def pin(self, keep: object) -> int:
        """Keep a third process's object for the peer, until the peer releases the id that this returns."""
        self._next_pin += 1
        pin = self._next_pin | 1 << 63
        self.grant(pin, keep)
        return pin

    def release(self, object_id: int, count: int) -> Any:
        """Take back `count` leases on `object_id` from the peer. Returns the object's holder with the last lease, else
        None: the caller drops it outside of its locks, as a finalizer may call actors.

        Raises:
            ProtocolError: the peer does not hold that many leases, or `count` is not positive. Nothing was released.
        """
        held = self._counts.get(object_id, 0)
        if not 0 < count <= held:
            raise ProtocolError(f"the peer released {count} leases on object {object_id:#018x} and holds {held}")
        self._total -= count
        self._released += count
        if count == held:
            del self._counts[object_id]
            return self._keeps.pop(object_id)
        self._counts[object_id] = held - count
        return None

    def get(self, object_id: int) -> Any:
        """The holder that keeps `object_id` alive for the peer; None without a lease."""
        return self._keeps.get(object_id)

    def end(self) -> dict[int, Any]:
        """End all leases, because the connection has ended. Idempotent.

        Returns:
            The holder that kept each object alive, by object id. A peer that maps our arena goes on reading: the caller
            parks the holders.
        """
        kept, self._keeps = self._keeps, {}
        self._counts = {}
        self._total = 0
        return kept
