"""The watch of a process over its cluster's head, where other heads can lead in its place.

A head that is stopped, or cut off from the others, keeps its connections. So each process asks it every second whether
it may stay. Where the head does not answer, says no or has no term, the process looks whether another one leads, and
goes there.

A node lives for `head_patience` after the last answer, and a term in etcd lasts for much of that. So from the first
question without an answer on, the process looks for another head without a pause, also while it asks again; and it asks
a head that it has found at once.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from zcactor.errors import ZcactorError
from zcactor.logs import logger
from zcactor.process.cluster import HeadService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zcactor.process.context import LocalProcess
    from zcactor.process.epochs import KnownEpoch
    from zcactor.rpc.session import Session

__all__ = ["HeadWatch", "boot_clock", "clocked_by"]

_EACH: Final = 1.0
"""Seconds between two questions."""
_ANSWER: Final = 2.0
"""Seconds without an answer after which another head is looked for."""
_LOOK: Final = 0.2
"""Seconds between two looks for another head, and for whether a lost one is back."""

_clock: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


def boot_clock() -> float:
    """Seconds since this host was started, those in which it slept included."""
    return _clock()


@contextmanager
def clocked_by(clock: Callable[[], float]) -> Iterator[None]:
    """Have `boot_clock` ask another clock in the context, as simulations do. Of the whole process."""
    global _clock
    real, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = real


class HeadWatch:
    """The watch of one process. Used on the loop's thread.

    Args:
        process: the process.
        known: the greatest epoch that it knows.
        heard: called with each answer: the epoch of the head, the time of the question by `boot_clock`, and the age of
            the head's knowledge, see `zcactor.control.quorum.Allegiance.heard`.
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

    def summoned(self, place: str, epoch: int) -> None:
        """Go to a head that says that it leads, at `place`, ``host:port``. Its word is as good as an order: that of a
        head whose term is over is not taken."""
        head = self._head
        session = self._process.sessions.used.get(head.process)
        stays = session is not None and not head.outage.going_on
        if epoch < self._known.epoch or (stays and (place == head.places.current or epoch <= head.epoch)):
            return
        head.places.called(place)
        if session is not None and stays:
            self._process.tasks.start(self._leave(session, place))

    async def _run(self) -> None:
        pause, silent = _EACH, False
        while True:
            await asyncio.sleep(pause)
            if self._head.outage.going_on:
                pause, silent = _LOOK, False
                continue
            if silent:
                age, moved = await self._ask_and_look()
            else:
                age = await self._ask()
                moved = age != 0 and await self._move()  # also from one without a term: another head may have it
            silent = age is None and not moved
            pause = _LOOK if silent or moved else _EACH

    async def _ask_and_look(self) -> tuple[float | None, bool]:
        """Ask a head that was silent, and look for another one meanwhile. Returns the answer, see `_ask`, and whether
        another one leads."""
        asking, looking = asyncio.ensure_future(self._ask()), asyncio.ensure_future(self._look())
        both = asking, looking
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            return (None, True) if looking.done() else (asking.result(), False)
        finally:
            for each in both:
                each.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _look(self) -> None:
        """Look for another head until one leads, and go there."""
        while not await self._move():  # noqa: ASYNC110  # another host decides
            await asyncio.sleep(_LOOK)

    async def _ask(self) -> float | None:
        """Ask the head whether this process may stay. Returns the age of its knowledge, which is 0 as long as it has
        its term; None where it says no, or nothing."""
        asked = boot_clock()
        age: float | None
        try:
            async with asyncio.timeout(_ANSWER):
                epoch, age = await self._head.ask(HeadService.stay, self._known.epoch)
        except TimeoutError:
            return None
        except ZcactorError as error:  # it is lost, which the connection's end says
            logger.debug("the head was not asked: %s", error)
            return 0.0
        self._head.epoch = epoch
        if epoch > self._known.epoch:  # that of a head which this process has just found
            self._known.check(epoch)
        self._heard(epoch, asked, age)
        return age

    async def _move(self) -> bool:
        """Go to another head, if one leads. Returns whether that is so."""
        session = self._process.sessions.used.get(self._head.process)
        place = await self._head.whereabouts(self._known.epoch)
        if not place or session is None or session is not self._process.sessions.used.get(self._head.process):
            return False
        self._head.places.at(place)
        await asyncio.shield(self._process.tasks.begin(self._leave(session, place)))
        return True

    async def _leave(self, session: Session, place: str) -> None:
        logger.warning("another head leads, at %s", place)
        self._head.moving = True
        await session.aclose()
