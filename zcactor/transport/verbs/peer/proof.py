"""The proof that a path by RDMA works: a message and a READ, each way."""

from __future__ import annotations

import ctypes
import zlib
from typing import TYPE_CHECKING, Final

from zcactor.transport.verbs.device.sizing import PROOF_NBYTES
from zcactor.transport.verbs.driver.base import Read
from zcactor.transport.verbs.peer.pulling import LAST

if TYPE_CHECKING:
    import asyncio

    from zcactor.transport.verbs.peer.queue_pairs import QueuePairs
    from zcactor.transport.verbs.peer.sending import SlotSender

__all__ = ["PathProof"]

_PROOF: Final = LAST | 1 << 60
"""``wr_id`` of the READ."""


class PathProof:
    """The proof of one path. Runs on the loop's thread.

    Args:
        pairs: the queue pairs, connected at both ends.
        loop: the loop of the connection.
    """

    def __init__(self, pairs: QueuePairs, loop: asyncio.AbstractEventLoop) -> None:
        self.read: asyncio.Future[str] = loop.create_future()
        """The failure of the READ; an empty string where it worked."""
        self._probed: asyncio.Future[str] = loop.create_future()
        self._pairs = pairs

    async def run(self, sender: SlotSender) -> str:
        """Send a message and READ memory of the peer, which does the same.

        Returns:
            An empty string where both worked, otherwise the failure.

        Raises:
            OSError: the device takes no requests.
        """
        address, rkey, nbytes, checksum = self._pairs.theirs.proof
        area = self._pairs.seal_area  # not in use yet
        target = area.address(0)
        if not 0 < nbytes <= PROOF_NBYTES:
            return f"the peer offers {nbytes} bytes to prove the path with, and at most {PROOF_NBYTES} are usable"
        ctypes.memset(target, 0, nbytes)
        sender.probe()
        self._pairs.bulk.post_reads([Read(_PROOF, target, nbytes, area.lkey, address, rkey)])
        wrong = await self.read
        if not wrong and zlib.crc32(ctypes.string_at(target, nbytes)) != checksum:
            wrong = f"a READ of {nbytes} bytes succeeded and delivered other bytes"
        return wrong or await self._probed

    def probed(self) -> None:
        """Note that the peer's message has arrived."""
        if not self._probed.done():
            self._probed.set_result("")

    def fail(self, text: str) -> None:
        """End the proof with a failure. Nothing happens once the path is proved."""
        for future in (self._probed, self.read):
            if not future.done():
                future.set_result(text)
