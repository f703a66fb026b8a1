"""The lease table: what one peer holds of ours.

A lease is the right to read one object. While a peer holds one, the table keeps the object alive, so its bytes are not
used again; they come back when the peer has released every lease, or can read no more. Never on a timer.
"""

from __future__ import annotations

from typing import Any

from zcactor.errors import ProtocolError

__all__ = ["LeaseTable"]


class _Entry:
    __slots__ = ("count", "keep")

    def __init__(self, keep: object) -> None:
        self.keep = keep
        self.count = 1


class LeaseTable:
    """The leases of one peer, by object id. Not thread-safe: its session serialises the calls."""

    __slots__ = ("_leases", "_next_pin", "_total")

    def __init__(self) -> None:
        self._leases: dict[int, _Entry] = {}
        self._next_pin = 1
        self._total = 0

    def __len__(self) -> int:
        """The number of objects on which the peer holds a lease."""
        return len(self._leases)

    @property
    def total(self) -> int:
        """The number of leases: an object that was sent twice counts twice."""
        return self._total

    def grant(self, object_id: int, keep: object) -> None:
        """The peer is being sent a reference: one more lease on `object_id`.

        Args:
            object_id: the object's id.
            keep: whatever keeps the object's bytes alive. Held from the first grant to the last release; later grants
                of the same id keep the first one.
        """
        entry = self._leases.get(object_id)
        if entry is None:
            self._leases[object_id] = _Entry(keep)
        else:
            entry.count += 1
        self._total += 1

    def pin(self, keep: object) -> int:
        """Keep what belongs to somebody else for the peer, until it releases the id that this returns."""
        self._next_pin += 1
        pin = self._next_pin | 1 << 63
        self.grant(pin, keep)
        return pin

    def release(self, object_id: int, count: int) -> None:
        """The peer gives back `count` leases on `object_id`. With the last one, what kept the object alive is let go.

        Raises:
            ProtocolError: the peer does not hold that many, or `count` is not positive. Nothing was released.
        """
        entry = self._leases.get(object_id)
        held = 0 if entry is None else entry.count
        if entry is None or not 0 < count <= held:
            raise ProtocolError(f"the peer released {count} leases on object {object_id:#018x} and holds {held}")
        self._total -= count
        if count == held:
            del self._leases[object_id]
        else:
            entry.count = held - count

    def get(self, object_id: int) -> Any:
        """What keeps `object_id` alive for the peer; None when it holds no lease on it."""
        entry = self._leases.get(object_id)
        return None if entry is None else entry.keep

    def end(self) -> dict[int, Any]:
        """The connection has ended. Idempotent.

        Returns:
            What kept each object alive, by its id. A peer that maps our arena goes on reading: the caller parks it.
        """
        kept = {object_id: entry.keep for object_id, entry in self._leases.items()}
        self._leases = {}
        self._total = 0
        return kept
