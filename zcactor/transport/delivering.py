"""The receiver of a connection: given once, told of the end once, and then let go of.

Every connection keeps this order, whatever carries its frames. A receiver may hold a lock of its own while it sends, so
it is never told of the end inside a call that it made, but in a later turn of the loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zcactor.transport.base import Receiver
    from zcactor.transport.os_process import OsProcess

__all__ = ["Delivering"]


class Delivering(ABC):
    """The beginning and the end of delivery. Everything runs on the loop's thread.

    A subclass hands frames to `_receiver`, which is None before `start` and after the end. When the connection ends it
    sets `_lost` and then calls `_report_later` once. `aclose` sets `_closing` before that, so that the receiver hears
    no cause, and waits for `_gone`.

    Args:
        loop: the loop that it runs on.
    """

    reader: OsProcess | None = None
    """See `zcactor.transport.base.Connection`: nobody maps our arena through it, unless a subclass says so."""

    @property
    def heard(self) -> int | None:
        """See `zcactor.transport.base.Connection`: None, unless a subclass leads to other hosts."""
        return None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._started = False
        self._receiver: Receiver | None = None
        self._closing = False
        self._lost = False
        self._gone = asyncio.Event()

    def start(self, receiver: Receiver) -> None:
        """Begin to deliver to `receiver`; what arrived before waits until now. Called once, before anything is sent.

        Raises:
            RuntimeError: it was called before.
        """
        if self._started:
            raise RuntimeError("the connection has been started already")
        self._started = True
        self._receiver = receiver
        if self._lost:
            self._loop.call_soon(self._report, None)
        else:
            self._begin(receiver)

    @abstractmethod
    def _begin(self, receiver: Receiver) -> None:
        """Begin to deliver, or to watch for what can be delivered. `receiver` is called in a later turn only."""

    def _report_later(self, cause: Exception | None) -> None:
        """Tell the receiver of the end, in a later turn: the caller may hold the lock that the receiver takes."""
        if self._receiver is None:
            self._gone.set()
        else:
            self._loop.call_soon(self._report, None if self._closing else cause)

    def _report(self, cause: Exception | None) -> None:
        self._gone.set()
        # let go of it: a closed connection that waits for the garbage collector would keep what the receiver keeps
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.connection_lost(cause)
