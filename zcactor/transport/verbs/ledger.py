"""What is open on a device, so that everything is closed once and in an order that the kernel accepts.

Verbs objects refuse to go while others use them (EBUSY), garbage collection picks any order, and pyverbs closes
dependents silently along with what they depend on. So neither is left to chance.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from enum import IntEnum
from typing import Protocol

__all__ = ["Kind", "Ledger"]


class Kind(IntEnum):
    """In the order of closing. Queue pairs go first, so that nothing is under way in the memory that is unpinned."""

    QUEUE_PAIR = 0
    SHARED_RECEIVE_QUEUE = 1
    MEMORY_REGION = 2
    COMPLETION_QUEUE = 3

    @property
    def words(self) -> str:
        """As messages name it."""
        return self.name.lower().replace("_", " ")


class _Closable(Protocol):
    def close(self) -> None: ...


class Ledger:
    """The open children of one device. Any thread may call any method: memory is registered on a thread of its own
    while the loop closes connections. Nothing takes longer the more is open, but `close`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._open: dict[Kind, dict[int, _Closable]] = {kind: {} for kind in Kind}
        self.uses: dict[int, tuple[object, ...]] = {}
        """By the id of each open child: what it needs. For others to look whether it is open, before each request."""
        self._users: Counter[int] = Counter()  # by child: how many others need it

    def __len__(self) -> int:
        return len(self.uses)

    def __contains__(self, child: object) -> bool:
        return id(child) in self.uses

    def add(self, kind: Kind, child: _Closable, *uses: object) -> None:
        """`child` is open, and needs everything in `uses` to stay so."""
        with self._lock:
            self._open[kind][id(child)] = child
            self.uses[id(child)] = uses
            for used in uses:
                self._users[id(used)] += 1

    def remove(self, kind: Kind, child: _Closable) -> bool:
        """`child` is about to be closed. False when that happened before.

        Raises:
            OSError: EBUSY, another open child needs it; it stays in.
        """
        with self._lock:
            users = self._users[id(child)]  # 0 for one that nothing needs
            if users and id(child) in self._open[kind]:
                text = f"{self._device}: {users} open queue pairs use the {kind.words}: close them first"
                raise OSError(errno.EBUSY, text)
            return self._forget(kind, child)

    def _forget(self, kind: Kind, child: _Closable) -> bool:
        """Take `child` out; False when it is not in. Called under the lock."""
        if self._open[kind].pop(id(child), None) is None:
            return False
        for used in self.uses.pop(id(child)):
            self._users[id(used)] -= 1
            if not self._users[id(used)]:
                del self._users[id(used)]
        return True

    def close(self) -> list[Exception]:
        """Close everything that is open. Whatever refuses, or fails by a defect, is given up and reported."""
        refused: list[Exception] = []
        for kind in Kind:
            while (child := self._newest(kind)) is not None:
                try:
                    child.close()
                except Exception as error:  # the rest is closed all the same: who closes the device raises it
                    refused.append(error)
                with self._lock:
                    self._forget(kind, child)
        return refused

    def _newest(self, kind: Kind) -> _Closable | None:
        with self._lock:
            return next(reversed(self._open[kind].values()), None)
