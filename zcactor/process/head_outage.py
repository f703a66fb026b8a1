"""The outage of a cluster's head, as a process sees it that goes on without one, and its search for the head."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from zcactor.errors import ConnectionLost, HeadUnavailable, ObjectLost, ZcactorError
from zcactor.logs import logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["HeadGone", "HeadOutage"]

_FOR_CALLS: Final = 6.0
"""Seconds from a head's last sign of life for which calls wait for it, which have to find their actor. The rest of the
eight seconds in which calls to a lost host end is for noticing the loss, and for a last look at the actor's host."""
_FIRST_PAUSE: Final = 0.1
_LAST_PAUSE: Final = 1.0
"""Seconds between two attempts to reach the head, at first and after a long time."""


class HeadGone(ConnectionLost):
    """The head was gone before it had taken a process in."""


class HeadOutage:
    """The state of a process without its head. Used on the loop's thread.

    Args:
        loop: the loop of the process.
        timeout: seconds that a request waits for the head.

    Attributes:
        patience: seconds that nodes of the cluster go on without a head, as the head has said when this process joined;
            0 where a head that is lost does not come back.
        log: name of the head's log, likewise.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self._loop = loop
        self._timeout = timeout
        self.patience = 0.0
        self.log = ""
        self._since: float | None = None
        """The time of the last sign of life of a head that is away."""
        self._over = asyncio.Event()

    @property
    def going_on(self) -> bool:
        """Whether the head is away, and may come back."""
        return self._since is not None

    def joined(self, patience: float, log: str) -> None:
        """Note the head's answer to a process that has joined."""
        self.patience, self.log = patience, log

    def give_up(self) -> None:
        """Note that the head ends in order: it does not come back once it is gone."""
        self.patience = 0.0

    def begin(self, silence: float = 0.0) -> None:
        """Note that the head is lost, from which nothing had come for `silence` seconds: requests wait from now on.
        Idempotent."""
        if self._since is None:
            self._since = self._loop.time() - silence
            self._over.clear()

    def deadline(self, *, for_call: bool = False) -> float:
        """The time of the loop until which a request that begins to wait for the head goes on with that. A request
        without which a call does not find its actor (`for_call`) waits no longer than the call may."""
        until = self._loop.time() + self._timeout
        return min(until, self._since + _FOR_CALLS) if for_call and self._since is not None else until

    async def end(self, until: float | None = None) -> None:
        """Wait until the head is there, or the loop's time is `until`, by default that of `deadline`.

        Raises:
            HeadUnavailable: it did not come back in time.
        """
        if self._since is None:
            return
        try:
            async with asyncio.timeout_at(self.deadline() if until is None else until):
                await self._over.wait()
        except TimeoutError:
            since = self._since
            if since is not None:
                raise HeadUnavailable(self.log, self._loop.time() - since, "head") from None

    async def seek(self, rejoin: Callable[[], Awaitable[bool]], patience: float | None = None) -> bool:
        """Look for the head, which is lost.

        Args:
            rejoin: asks the head to take this process in again; False where the head refuses. It raises ConnectionLost
                where the head does not answer, ObjectLost where it ends while it does, and HeadUnavailable where its
                log does not answer: all three are tried again.
            patience: seconds after which the search ends; None for a search without end.

        Returns:
            Whether the head has taken this process in again. Otherwise the outage goes on.

        Cancelling ends the search only.
        """
        self.begin()
        begun = self._loop.time()
        until = None if patience is None else begun + patience
        pause = _FIRST_PAUSE
        try:
            async with asyncio.timeout_at(until):
                while True:
                    try:
                        taken = await rejoin()
                        break
                    except (ConnectionLost, HeadUnavailable, ObjectLost) as error:
                        logger.debug("the head is not back yet: %s", error)
                    await asyncio.sleep(pause)
                    if self._loop.time() - begun > self.patience:
                        pause = min(2 * pause, _LAST_PAUSE)
        except TimeoutError:
            return False
        except ZcactorError as error:
            logger.warning("the cluster's head does not take this process in again: %s", error)
            return False
        if taken:
            self._since = None
            self._over.set()
        return taken
