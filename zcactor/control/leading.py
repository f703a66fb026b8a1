"""The leader of a cluster as one process knows it, and a way to follow it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from zcactor.control.head_log import LeaderAt

__all__ = ["Leading"]


class Leading:
    """The present leader; None while there is no leader."""

    def __init__(self) -> None:
        self.leader: LeaderAt | None = None
        self._changed = asyncio.Event()

    def lead(self, leader: LeaderAt | None) -> None:
        """Note a change."""
        self.leader = leader
        self._changed.set()
        self._changed = asyncio.Event()

    async def changes(self) -> AsyncIterator[LeaderAt | None]:
        """The leader, at once and at each change. A slow reader misses intermediate ones."""
        while True:
            leader = self.leader
            yield leader
            while self.leader == leader:
                await self._changed.wait()
