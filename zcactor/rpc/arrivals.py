"""References that a peer sent, including those whose object is not available here yet.

An object of a third process must be leased from there first, and bytes that cannot be mapped have to be read. A message
waits for its own references; other messages do not wait for it.
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
    if not arrived.cancelled():  # else the process closes, and the part that holds the place says so to its users
        parts[index] = arrived.result()


class Arrivals:
    """The parts made of the regions in a session's frames. Used on the loop's thread.

    Args:
        bring: ``bring(region, unread, sealed)``, the session's `zcactor.rpc.hub.Hub.import_region`.
    """

    def __init__(self, bring: Callable[[Region, bool, bool], tuple[Part, asyncio.Future[Part] | None]]) -> None:
        self._bring = bring
        self.carried: dict[tuple[int, int], list[tuple[Part, asyncio.Future[Part] | None]]] = {}
        """Parts of REGIONS frames, by kind and id of the message that they belong to. Frames of other messages may come
        before that message."""

    def carry(self, regions: Sequence[Region], kind: int, message_id: int) -> None:
        """Import the regions of a REGIONS frame and keep their parts until `take` is called for that message.

        Raises:
            Exception: as `zcactor.rpc.hub.Hub.import_region`.
        """
        found = [self._bring(region, False, False) for region in regions]
        self.carried.setdefault((kind, message_id), []).extend(found)

    def take(
        self, regions: Sequence[Region], kind: int, message_id: int, unread: bool, sealed: bool = False
    ) -> tuple[Sequence[Part], Sequence[asyncio.Future[Part]]]:
        """Import the regions of a message's last frame, and join their parts to those of its REGIONS frames.

        Args:
            regions: regions of the last frame.
            kind, message_id: kind and id of the message.
            unread: see `zcactor.rpc.hub.Hub.import_region`; has no effect for a message with REGIONS frames, which is
                always read.
            sealed: see `zcactor.rpc.hub.Hub.import_region`; applies to the message's first part.

        Returns:
            The parts, and a future for each part that comes later. Such a part takes its place in the list before
            callbacks that are added to its future now are called.

        Raises:
            Exception: as `zcactor.rpc.hub.Hub.import_region`.
        """
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
    """Call `then` once the parts of all futures have come."""
    left = len(blocked)

    def arrived(_: asyncio.Future[Part]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            then()

    for future in blocked:
        future.add_done_callback(arrived)


def hold_back(incoming: Incoming, blocked: Sequence[asyncio.Future[Part]]) -> None:
    """Make a call wait, at its actor, for its arguments that come later."""
    incoming.blockers += len(blocked)

    def arrived(_: asyncio.Future[Part]) -> None:
        incoming.blockers -= 1
        if incoming.blockers == 0 and incoming.host is not None:
            incoming.host.unblocked(incoming)

    for future in blocked:
        future.add_done_callback(arrived)
