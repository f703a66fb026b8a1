"""The receiver of a connection: it is set once, learns of the end once, and is dropped then.

All connections keep this order. A receiver may hold a lock of its own while it sends. So the connection never reports
its end from within a call of the receiver's, but in a later turn of the loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.native import hot
    from zcactor.transport.base import Flow, Receiver, RemoteRegion
    from zcactor.transport.os_process import OsProcess

__all__ = ["BaseConnection"]


class BaseConnection(ABC):
    """The beginning and the end of delivery. All methods run on the loop's thread.

    A subclass hands frames to `_receiver`, which is None before `start` and after the end. When the connection ends,
    the subclass sets `_lost` and then calls `_report_later` once. `aclose` sets `_closing` before that, so that the
    receiver is called without a cause, and waits for `_gone`.

    Args:
        loop: the loop that the connection runs on.
    """

    reader: OsProcess | None = None
    """See `zcactor.transport.base.Connection`. None unless a subclass sets it: the peer does not map our arena."""
    native_out: hot.SendBuffer
    """See `zcactor.transport.base.Connection`."""
    fetch_extents: Any = None
    """See `zcactor.transport.base.Connection`. None unless a subclass leads to a process of this host."""

    one_sided = False
    """See `zcactor.transport.base.Connection`. False unless a subclass reads by RDMA."""
    unsent: bytes | None = None
    """See `zcactor.transport.base.Connection`. None unless a subclass sees it before it has read all."""
    lies_unread = False
    """See `zcactor.transport.base.Connection`. False unless a subclass reads what a system or a card has received."""

    ask_to_dial: Callable[[], None] | None = None
    """See `zcactor.transport.base.Connection`."""
    gpu_reading: Any = None
    """See `zcactor.transport.base.Connection`. None unless a subclass has a network card at both ends."""

    @property
    def heard(self) -> int | None:
        """See `zcactor.transport.base.Connection`. None unless a subclass leads to other hosts."""
        return None

    def turns_behind(self) -> int:
        """See `zcactor.transport.base.Connection`. Two: the loop looks at its descriptors in the next turn, and calls
        readers after what was due before."""
        return 2

    def hung_up(self) -> bool:
        """See `zcactor.transport.base.Connection`. False unless a subclass sees it before it has read all."""
        return False

    async def flow(self, region: RemoteRegion) -> Flow | None:
        """See `zcactor.transport.base.Connection`. None unless a subclass has data sockets."""
        del region
        return None

    def dial(self) -> None:  # noqa: B027
        """See `zcactor.transport.base.Connection`. Nothing, unless a subclass has data sockets."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._started = False
        self._receiver: Receiver | None = None
        self._closing = False
        self._lost = False
        self._gone = asyncio.Event()

    def start(self, receiver: Receiver) -> None:
        """Begin to deliver to `receiver`, also frames that have arrived before. Called once, before anything is sent.

        Raises:
            RuntimeError: a second call.
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
        """Begin to deliver, or to watch the socket. `receiver` is called in a later turn only."""

    def _report_later(self, cause: Exception | None) -> None:
        """Report the end to the receiver in a later turn: the caller may hold the lock that the receiver takes."""
        if self._receiver is None:
            self._gone.set()
        else:
            self._loop.call_soon(self._report, None if self._closing else cause)

    def _report(self, cause: Exception | None) -> None:
        self._gone.set()
        # Drop the receiver: a closed connection may wait long for the garbage collector, and would keep it until then.
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.connection_lost(cause)
