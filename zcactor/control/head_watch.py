"""The watch of a process over its cluster's head, where other heads can lead in its place.

A head that is stopped, or cut off from the others, keeps its connections. So each process asks it every second whether
it may stay. Where the head does not answer, or says no, the process looks whether another one leads, and goes there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zcactor.process.context import LocalProcess
    from zcactor.process.epochs import KnownEpoch

__all__ = ["HeadWatch", "boot_clock"]

logger = logging.getLogger("zcactor")
_EACH: Final = 1.0
"""Seconds between two questions."""
_ANSWER: Final = 2.0
"""Seconds without an answer after which another head is looked for."""


def boot_clock() -> float:
    """Seconds since this host was started, those in which it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HeadWatch:
    """The watch of one process. Used on the loop's thread.

    Args:
        process: the process.
        known: the greatest epoch that it knows.
        heard: called with each answer: the epoch of the head, the time of the question by `boot_clock`, and the age of
            the head's knowledge, see `zcactor.control.reign.Allegiance.heard`.
    """

    def __init__(
        self, process: LocalProcess, known: KnownEpoch,
        heard: Callable[[int, float, float | None], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        self._process = process
        self._head = process.head
        self._known = known
        self._heard = heard
        self._begun = False

    def told(self, places: Iterable[str]) -> None:
        """Note where the head is, and then where others would lead, ``host:port``, and begin to watch."""
        self._head.places.learn(places)
        if not self._begun:
            self._begun = True
            self._process.tasks.start(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_EACH)
            if not self._head.absence.going_on and not await self._may_stay():
                await self._move()

    async def _may_stay(self) -> bool:
        asked = boot_clock()
        try:
            async with asyncio.timeout(_ANSWER):
                epoch, age = await self._head.ask_agent("stay", self._known.epoch)
        except TimeoutError:
            return False
        except ZcactorError as error:  # it is lost, which the connection's end says
            logger.debug("the head was not asked: %s", error)
            return True
        self._heard(epoch, asked, age)
        return age is not None

    async def _move(self) -> None:
        """Go to another head, if one leads."""
        place = await self._head.whereabouts()
        session = self._process.sessions.used.get(self._head.process)
        if not place or session is None:
            return
        logger.warning("another head leads, at %s", place)
        self._head.places.at(place)
        self._head.moving = True
        await session.aclose()
