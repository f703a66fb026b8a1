"""The end of a connection's queue pairs: they are fenced at once, and destroyed when all their requests have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.logs import logger
from zcactor.transport.verbs.driver.base import Send
from zcactor.transport.verbs.peer.sending import SEND_ID

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zcactor.transport.verbs.device.engine import Engine
    from zcactor.transport.verbs.peer.bulk import BulkPair
    from zcactor.transport.verbs.peer.queue_pairs import QueuePairs

__all__ = ["MARK", "Takedown"]

MARK: Final = SEND_ID | 1 << 61
"""``wr_id`` of a request that is posted to be flushed: when it has ended, so have all requests before it."""


class Takedown:
    """The destruction of both queue pairs. Runs on the loop's thread.

    Args:
        pairs: the queue pairs.
        engine: the engine of their device.
        loop: the loop of the connection.
        report: called with errors that are defects.

    Attributes:
        bulk: the user of the bulk pair; set before any method is called.
    """

    bulk: BulkPair

    def __init__(
        self, pairs: QueuePairs, engine: Engine, loop: asyncio.AbstractEventLoop, report: Callable[[Exception], None]
    ) -> None:
        self._pairs = pairs
        self._engine = engine
        self._loop = loop
        self._report = report
        self._marked = False
        self._control_drained = False

    def drained(self) -> None:
        """Note that no request of the control pair is under way any more, or that none will ever end."""
        self._control_drained = True

    def fence_control(self) -> None:
        """End all requests in the control queue pair: put it into ERR, and post one request to wait for."""
        if self._marked:
            return
        self._marked = True
        try:
            control = self._pairs.control
            control.to_error()
            area = self._pairs.send_area
            control.post_sends([Send(MARK, area.address(0), 0, area.lkey)])
        except Exception as error:  # requests on a failed device never end
            self._report(error)
            self._control_drained = True
        self._loop.call_soon(self.look)

    def fence_bulk(self) -> None:
        """Fence the bulk pair, so that the peer reads nothing any more."""
        try:
            self.bulk.end()
        except Exception as error:
            self._report(error)
            # A failed device serves no READs, and memory that it may write to is kept for ever. On another device the
            # requests end when the queue pair is destroyed.
            self.bulk.puller.stuck = True

    def look(self) -> None:
        """Destroy both if no request is under way in them."""
        puller = self.bulk.puller
        if not self._control_drained or not (puller.drained or (puller.stuck and self._engine.usable)):
            return
        try:
            self._pairs.close()
        except OSError as error:  # all other objects are closed, and the device's other connections continue
            logger.warning("a queue pair or its memory stays with %s: %s", self._engine.device.name, error)
        else:
            puller.destroyed()
