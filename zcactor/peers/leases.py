"""Leases on objects of this process for peers that know them by a third process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.objectstore.store import Block
from zcactor.rpc.services import caller, remote

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zcactor.objectstore.store import Store

__all__ = ["Leases"]


class Leases:
    """The service by which a process leases its objects.

    Args:
        store: its arrays.
        exports: the promises and actors that peers may hold, by object id.
    """

    def __init__(self, store: Store, exports: Mapping[int, Any]) -> None:
        self._store = store
        self._exports = exports
        self.revive: Callable[[int], Any] | None = None
        """The head's function that finds an actor which no process holds at the moment."""
        self.over = False
        """Whether the process ends, and leases nothing more."""

    @remote(1)
    async def lease(self, object_id: int) -> bool:
        """Lease an object to the caller; False when the object is gone."""
        holder: Any = self._store.lookup(object_id)
        if holder is None:
            holder = self._exports.get(object_id)
        if holder is None and self.revive is not None:
            holder = self.revive(object_id)
        if holder is None or self.over:
            return False
        session = caller()
        with session.lock:
            if isinstance(holder, Block):
                holder.grant(session)
            else:
                session.leases.grant(object_id, holder)
        return True
