"""What is open on a device, so that everything is closed once and in an order that the kernel accepts.

Verbs objects refuse to go while others use them (EBUSY), garbage collection picks any order, and pyverbs closes
dependents silently along with what they depend on. So neither is left to chance.
"""

from __future__ import annotations

import errno
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
    """The open children of one device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._open: dict[Kind, dict[int, tuple[_Closable, tuple[object, ...]]]] = {kind: {} for kind in Kind}

        self._ids: set[int] = set()  # of all: what is asked before each request

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, child: object) -> bool:
        return id(child) in self._ids

    def add(self, kind: Kind, child: _Closable, *uses: object) -> None:
        """`child` is open, and needs everything in `uses` to stay so."""
        self._open[kind][id(child)] = (child, uses)
        self._ids.add(id(child))

    def remove(self, kind: Kind, child: _Closable) -> bool:
        """`child` is about to be closed. False when that happened before.

        Raises:
            OSError: EBUSY, another open child needs it; it stays in.
        """
        if id(child) not in self._open[kind]:
            return False
        users = sum(any(used is child for used in uses) for by in self._open.values() for _, uses in by.values())
        if users:
            text = f"{self._device}: {users} open queue pairs use the {kind.words}: close them first"
            raise OSError(errno.EBUSY, text)
        del self._open[kind][id(child)]
        self._ids.discard(id(child))
        return True

    def close(self) -> list[OSError]:
        """Close everything that is open. Whatever refuses is given up and reported."""
        refused = []
        for kind in Kind:
            while self._open[kind]:
                _, (child, _) = next(reversed(self._open[kind].items()))
                try:
                    child.close()
                except OSError as error:
                    refused.append(error)
                self._open[kind].pop(id(child), None)
                self._ids.discard(id(child))
        return refused
