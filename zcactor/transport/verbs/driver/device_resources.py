"""The open objects of a device, which are closed once and in an order that the kernel accepts.

Verbs objects cannot be destroyed while others use them (EBUSY), and garbage collection takes any order. pyverbs closes
dependent objects silently along with the object that they depend on. So this record decides about the order.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from enum import IntEnum
from typing import Protocol

__all__ = ["DeviceResources", "ResourceKind"]


class ResourceKind(IntEnum):
    """Kinds of objects in the order of closing. Queue pairs are first, so that no request uses memory that is
    unpinned."""

    QUEUE_PAIR = 0
    SHARED_RECEIVE_QUEUE = 1
    MEMORY_REGION = 2
    COMPLETION_QUEUE = 3

    @property
    def words(self) -> str:
        """The name of the kind in messages."""
        return self.name.lower().replace("_", " ")


class _Closable(Protocol):
    def close(self) -> None: ...


class DeviceResources:
    """The open objects of one device. Any thread may call any method: memory is registered on a thread of its own while
    the loop closes connections. Only the time of `close` grows with the number of open objects."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._open: dict[ResourceKind, dict[int, _Closable]] = {kind: {} for kind in ResourceKind}
        self.uses: dict[int, tuple[object, ...]] = {}
        """Objects that each open object needs, by its id. Adapters check here before each request that an object is
        open."""
        self._users: Counter[int] = Counter()  # number of objects that need one, by its id

    def __len__(self) -> int:
        return len(self.uses)

    def __contains__(self, child: object) -> bool:
        return id(child) in self.uses

    def add(self, kind: ResourceKind, child: _Closable, *uses: object) -> None:
        """Add `child`, which is open. All objects in `uses` have to stay open as long."""
        with self._lock:
            self._open[kind][id(child)] = child
            self.uses[id(child)] = uses
            for used in uses:
                self._users[id(used)] += 1

    def remove(self, kind: ResourceKind, child: _Closable) -> bool:
        """Remove `child`, which is about to be closed. False when it was removed before.

        Raises:
            OSError: EBUSY: another open object needs it. It is not removed.
        """
        with self._lock:
            users = self._users[id(child)]  # 0 where no object needs it
            if users and id(child) in self._open[kind]:
                text = f"{self._device}: {users} open queue pairs use the {kind.words}: close them first"
                raise OSError(errno.EBUSY, text)
            return self._forget(kind, child)

    def _forget(self, kind: ResourceKind, child: _Closable) -> bool:
        """Remove `child`; False when it is not open. Called under the lock."""
        if self._open[kind].pop(id(child), None) is None:
            return False
        for used in self.uses.pop(id(child)):
            self._users[id(used)] -= 1
            if not self._users[id(used)]:
                del self._users[id(used)]
        return True

    def close(self) -> list[Exception]:
        """Close all open objects. Those that raise count as closed, and the errors are returned."""
        refused: list[Exception] = []
        for kind in ResourceKind:
            while (child := self._newest(kind)) is not None:
                try:
                    child.close()
                except Exception as error:  # all others are closed as well, and the device's `close` raises the error
                    refused.append(error)
                with self._lock:
                    self._forget(kind, child)
        return refused

    def _newest(self, kind: ResourceKind) -> _Closable | None:
        with self._lock:
            return next(reversed(self._open[kind].values()), None)
