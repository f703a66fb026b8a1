"""Bounce buffers: registered memory for bytes whose destination cannot be registered.

It is registered with the device from the start, so it can be used when no more memory can be registered: RLIMIT_MEMLOCK
was lowered or is used up, or the system has no memory for the rest of an extent. Such a pull takes a copy, and several
pulls take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final
from weakref import ref

from zcactor.transport.verbs.device.slots import SlotArea

if TYPE_CHECKING:
    from zcactor.transport.verbs.driver.base import Device

__all__ = ["BOUNCE_NBYTES", "Bounce", "Loan"]

_COUNT: Final = 2
_PIECE: Final = 1 << 19
BOUNCE_NBYTES: Final = _COUNT * _PIECE
"""Bytes of all buffers together."""


class Loan:
    """A borrowed buffer, for the lifetime of this object: a pull keeps it until its last READ has ended."""

    __slots__ = ("__weakref__", "address", "lkey", "nbytes")

    def __init__(self, address: int, nbytes: int, lkey: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.lkey = lkey


class Bounce:
    """The bounce buffers of one process. Used on the loop's thread.

    Args:
        device: the device that registers them.
        loop: the loop.

    Raises:
        OSError: the memory cannot be registered.
    """

    def __init__(self, device: Device, loop: asyncio.AbstractEventLoop) -> None:
        self._area = SlotArea(device, _COUNT, _PIECE)
        self._loop = loop
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._lent: dict[int, ref[Loan]] = {}
        for index in range(_COUNT):
            self._free.put_nowait(index)

    async def borrow(self) -> Loan:
        """Borrow a buffer, once one is free. Cancelling takes no buffer."""
        index = await self._free.get()
        loan = Loan(self._area.address(index), self._area.nbytes, self._area.lkey)
        self._lent[index] = ref(loan, lambda _: self._give_back(index))
        return loan

    def _give_back(self, index: int) -> None:
        """Return a buffer. Any thread may call it, as a traceback may have kept the loan."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, as the process is ending
            self._loop.call_soon_threadsafe(self._free.put_nowait, index)
