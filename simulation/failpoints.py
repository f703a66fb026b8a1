"""The points at which a head can be killed: before or after its log takes a decision, and when it has read the log."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from simulation.shared_log import SharedLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulation.shared_log import SharedBook
    from zcactor.control.head_log import Change, HeadState, Term

__all__ = ["LOADED", "POINTS", "FailingLog"]

LOADED: Final = "loaded"
"""The point at which a head has read its log, and has not taken the cluster over yet."""
_DECISIONS: Final = ("pending", "alive", "restarting", "stopping", "gone", "member", "driver", "cluster")
"""States of actors in the log, and kinds of other entries."""
POINTS: Final = (LOADED, *(f"{when} {what}" for what in _DECISIONS for when in ("before", "after")))
"""The names of all points."""


def _decided(changes: Sequence[Change]) -> dict[str, None]:
    """The decisions in a batch, by their names in `POINTS`."""
    found: dict[str, None] = {}
    for kind, _, value in changes:
        if kind != "actor":
            found[kind] = None
        else:
            found["gone" if value is None else msgspec.msgpack.decode(value)["state"]] = None
    return found


class FailingLog(SharedLog):
    """The log of a head that may be killed at a point.

    Args:
        book: see `SharedLog`.
        reached: called with each point that the head reaches; whether the head was killed there.
        armed: whether a point is armed at all, so that the others cost nothing.
    """

    def __init__(self, book: SharedBook, reached: Callable[[str], bool], armed: Callable[[], bool]) -> None:
        super().__init__(book)
        self._reached = reached
        self._armed = armed

    async def load(self, term: Term) -> HeadState:
        state = await super().load(term)
        await self._pass(LOADED)
        return state

    async def record(self, term: Term, changes: Sequence[Change]) -> None:
        decided = _decided(changes) if self._armed() else ()
        for what in decided:
            await self._pass(f"before {what}")
        await super().record(term, changes)
        for what in decided:
            await self._pass(f"after {what}")

    async def _pass(self, point: str) -> None:
        if self._reached(point):
            await asyncio.get_running_loop().create_future()  # a process that has ended takes no further step
