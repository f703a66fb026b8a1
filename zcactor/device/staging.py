"""Host memory that arrays on GPUs pass through in pieces, where a reader cannot map the GPU memory of the owner.

Each process has two such memories, one for each direction: with a common one, two processes that read from each other
could each hold the piece that the other waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from zcactor.errors import DeviceError, OutOfMemory, ZcactorError
from zcactor.logs import logger

if TYPE_CHECKING:
    from zcactor.device.driver import GpuDriver
    from zcactor.objectstore.heap import Hold
    from zcactor.objectstore.store import Block, Store

__all__ = ["PIECES", "PIECE_NBYTES", "Staging"]

PIECE_NBYTES: Final = 4 << 20
"""Bytes of a piece: a copy of it takes longer than the messages about it."""
PIECES: Final = 2
"""Pieces that are under way at once: one is copied by the owner, and one by the reader. With both directions that is
16 MiB of a process."""


class Staging:
    """The pieces of one direction, made when they are first needed and kept for later ones. The GPU's driver locks them
    in place. Used on the loop's thread; pieces come back on any.

    Args:
        store: the store in which they lie.
        driver: the driver of the GPUs.
        loop: the loop.
    """

    def __init__(self, store: Store, driver: GpuDriver, loop: asyncio.AbstractEventLoop) -> None:
        self._store: Final = store
        self._driver: Final = driver
        self._loop: Final = loop
        self._idle: deque[Hold] = deque()
        self._made: dict[int, bool] = {}
        """Whether the driver has locked it, by the place of each piece in the arena."""
        self._lent: dict[int, ref[Any]] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._refused = False
        """Whether the driver has refused to lock a piece, which is told once."""
        self._closed = False
        store.when_full(self.give_up)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return len(self._made) * PIECE_NBYTES

    @property
    def idle_nbytes(self) -> int:
        """Bytes of the pieces that nobody uses."""
        return len(self._idle) * PIECE_NBYTES

    async def take(self, nbytes: int) -> Block:
        """A piece, which comes back when the block is dropped. It waits while all are in use.

        Args:
            nbytes: bytes of the block, at most `PIECE_NBYTES`.

        Raises:
            OutOfMemory: the store has no room for a single piece.
            NotInitialized: the store is closed.
        """
        while (hold := self._found()) is None:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._wake()
                raise
        block = self._store.block_over(hold, nbytes)
        self._lent[hold.offset] = ref(block, partial(self._take_back, hold))
        return block

    def _found(self) -> Hold | None:
        with contextlib.suppress(IndexError):  # another thread may give up the last one
            return self._idle.popleft()
        if len(self._made) >= PIECES:
            return None
        try:
            block = self._store.allocate(PIECE_NBYTES)
        except OutOfMemory:
            if self._made:
                return None
            raise
        locked = True
        try:
            self._driver.pin(block.address, PIECE_NBYTES)
        except DeviceError as error:  # copies of other memory take longer, and that is all
            locked = False
            if not self._refused:
                self._refused = True
                reason = str(error)  # a record of the log that kept the error would keep the piece
                logger.warning("pieces of arrays on GPUs are not pinned, so their copies take longer: %s", reason)
        self._made[block.offset] = locked
        return block.hold

    def _take_back(self, hold: Hold, _: object) -> None:
        """Take a piece back. It runs in finalizers, on any thread, so it takes no lock."""
        self._lent.pop(hold.offset, None)
        if self._closed:
            self._end(hold)
            return
        self._idle.append(hold)
        with contextlib.suppress(RuntimeError):  # the loop has been closed, and nobody waits
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        """Let one of those that wait look again."""
        while self._waiting and (self._idle or len(self._made) < PIECES):
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _end(self, hold: Hold) -> None:
        if self._made.pop(hold.offset, False):
            with contextlib.suppress(ZcactorError):  # there is no caller to tell
                self._driver.unpin(self._store.arena.address + hold.offset, PIECE_NBYTES)

    def give_up(self) -> bool:
        """Give up the pieces that nobody uses, because the store is full. Any thread may call this. Returns whether
        there was one."""
        found = False
        while True:
            try:
                hold = self._idle.popleft()
            except IndexError:
                return found
            self._end(hold)
            found = True

    def close(self) -> None:
        """Give up all pieces, those in use when they come back. Idempotent."""
        self._closed = True
        self.give_up()
