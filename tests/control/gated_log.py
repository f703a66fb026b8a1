"""A log that refuses, or takes its time, where a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from zcactor.control.entries import Entries, read
from zcactor.control.head_log import Change, LogUnavailable, Term
from zcactor.control.memory_log import MemoryLog

NAME = "etcd://10.0.0.1:2379"


class GatedLog(MemoryLog):
    """A log in memory.

    Attributes:
        refuses: whether a batch is refused.
        holds: whether a batch waits until `gate` is set.
        begun: the batches that were given to it.
        taken: those that it has taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refuses: Callable[[Sequence[Change]], bool] = lambda _: False
        self.holds: Callable[[Sequence[Change]], bool] = lambda _: False
        self.gate = asyncio.Event()
        self.begun: list[list[Change]] = []
        self.taken: list[list[Change]] = []

    async def record(self, term: Term, changes: Sequence[Change]) -> None:
        self.begun.append(list(changes))
        if self.holds(changes):
            await self.gate.wait()
        if self.refuses(changes):
            raise LogUnavailable(NAME, "no answer")
        await super().record(term, changes)
        self.taken.append(list(changes))

    @property
    def entries(self) -> Entries:
        """All entries."""
        return read(self._book.state)

    def held(self) -> bool:
        """Whether a batch waits."""
        return len(self.begun) > len(self.taken) and not self.gate.is_set()


def has(kind: str, needle: bytes | None = None, *, removed: bool = False) -> Callable[[Sequence[Change]], bool]:
    """Whether a batch puts an entry of `kind` with `needle` in its value, or removes one."""

    def found(changes: Sequence[Change]) -> bool:
        return any(
            change.kind == kind
            and (change.value is None if removed else change.value is not None and (needle or b"") in change.value)
            for change in changes
        )

    return found
