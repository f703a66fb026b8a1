"""References that a peer sent, and those among them that are not here yet.

An object of a third process must be leased from there first, and bytes that cannot be mapped have to be read. A message
waits for them, other messages do not wait for it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from zcactor.objectstore.ref import Region
    from zcactor.rpc.incoming import Incoming
    from zcactor.rpc.parts import Part

__all__ = ["Arrivals", "hold_back", "when"]


def _place(parts: list[Part], index: int, arrived: asyncio.Future[Part]) -> None:
    parts[index] = arrived.result()


class Arrivals:
    """Makes parts of the regions in a session's frames. On the loop's thread.

    Args:
        bring: ``bring(region, unread, sealed)`` is the session's `zcactor.rpc.hub.Hub.import_region`.
    """

    def __init__(self, bring: Callable[[Region, bool, bool], tuple[Part, asyncio.Future[Part] | None]]) -> None:
        self._bring = bring
        self.carried: dict[tuple[int, int], list[tuple[Part, asyncio.Future[Part] | None]]] = {}
        """Those of REGIONS frames, by kind and id of the message that they belong to. Frames of other messages may come
        before it."""

    def carry(self, regions: Sequence[Region], kind: int, message_id: int) -> None:
        """Keep what the regions of a REGIONS frame stand for, until `take` is asked for that message. Raises what
        `zcactor.rpc.hub.Hub.import_region` does."""
        found = [self._bring(region, False, False) for region in regions]
        self.carried.setdefault((kind, message_id), []).extend(found)

    def take(
        self, regions: Sequence[Region], kind: int, message_id: int, unread: bool, sealed: bool = False
    ) -> tuple[Sequence[Part], Sequence[asyncio.Future[Part]]]:
        """The parts that the regions of a message's last frame stand for, with those that went ahead of it, and the
        futures of those that come later: each takes its place in the parts before callbacks added here are called.
        `unread`: see `zcactor.rpc.hub.Hub.import_region`, whose exceptions this raises; what has parts that went ahead
        is always read. `sealed`: the same for the message's first part."""
        ahead = self.carried.pop((kind, message_id), None) if self.carried else None
        bring = self._bring
        if ahead is not None:
            found = ahead + [bring(region, False, False) for region in regions]
        else:
            found = [bring(region, unread, sealed and region is regions[0]) for region in regions]
        blocked = []
        parts = []
        for part, future in found:
            if future is not None:
                blocked.append(future)
            parts.append(part)
        if blocked:
            for index, (_, future) in enumerate(found):
                if future is not None:
                    future.add_done_callback(partial(_place, parts, index))
        return parts, blocked


def when(blocked: Sequence[asyncio.Future[Part]], then: Callable[[], None]) -> None:
    """Call `then` once all that came later is here."""
    left = len(blocked)

    def arrived(_: asyncio.Future[Part]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            then()

    for future in blocked:
        future.add_done_callback(arrived)


def hold_back(incoming: Incoming, blocked: Sequence[asyncio.Future[Part]]) -> None:
    """Let a call wait, at its actor, for all of its arguments that come later."""
    incoming.blockers += len(blocked)

    def arrived(_: asyncio.Future[Part]) -> None:
        incoming.blockers -= 1
        if incoming.blockers == 0 and incoming.host is not None:
            incoming.host.unblocked(incoming)

    for future in blocked:
        future.add_done_callback(arrived)
