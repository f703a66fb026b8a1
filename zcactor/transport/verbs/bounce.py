"""A little registered memory through which bytes come whose destination cannot be registered.

It is registered with the device from the start, so it is there when nothing else can be any more: RLIMIT_MEMLOCK was
lowered, others use it up, or the system has no memory for the rest of an extent. Such a pull takes a copy, and several
take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final
from weakref import ref

from zcactor.transport.verbs.slots import SlotArea

if TYPE_CHECKING:
    from zcactor.transport.verbs.base import Device

__all__ = ["BOUNCE_NBYTES", "Bounce", "Loan"]

_COUNT: Final = 2
_PIECE: Final = 1 << 19
BOUNCE_NBYTES: Final = _COUNT * _PIECE
"""Bytes of all of it."""


class Loan:
    """A piece of it, for as long as this lives: a pull keeps it until its last READ has come back."""

    __slots__ = ("__weakref__", "address", "lkey", "nbytes")

    def __init__(self, address: int, nbytes: int, lkey: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.lkey = lkey


class Bounce:
    """All of one process. On the loop's thread.

    Args:
        device: registers it.
        loop: the loop.

    Raises:
        OSError: it cannot be registered.
    """

    def __init__(self, device: Device, loop: asyncio.AbstractEventLoop) -> None:
        self._area = SlotArea(device, _COUNT, _PIECE)
        self._loop = loop
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._lent: dict[int, ref[Loan]] = {}
        for index in range(_COUNT):
            self._free.put_nowait(index)

    async def borrow(self) -> Loan:
        """A piece, once one is free. Cancelling takes none."""
        index = await self._free.get()
        loan = Loan(self._area.address(index), self._area.nbytes, self._area.lkey)
        self._lent[index] = ref(loan, lambda _: self._give_back(index))
        return loan

    def _give_back(self, index: int) -> None:
        """From any thread: a traceback may be what kept it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is on its way out
            self._loop.call_soon_threadsafe(self._free.put_nowait, index)
