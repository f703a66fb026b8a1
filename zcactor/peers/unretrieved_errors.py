"""Failures that nobody retrieved: one line in the log for each actor and second, for any number of failures."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from zcactor.errors import ActorDied, ActorUnavailable, ConnectionLost, RemoteError, remote_of
from zcactor.exception_pickling import shown, text_of, type_name
from zcactor.logs import logger

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zcactor.rpc.call import Call

__all__ = ["ENDS", "UnretrievedErrors"]

QUIET: Final = 1.0
"""Seconds between two lines about one actor."""
_CAUSE_LENGTH = 400
"""Characters of a cause in a line, at most."""

ENDS = (ActorDied, ActorUnavailable, ConnectionLost)
"""The errors of calls whose actor has ended."""


class _Told:
    """The failures of one actor since the last line: their number, and the text of the first."""

    __slots__ = ("cause", "count", "label")

    def __init__(self) -> None:
        self.count = 0
        self.label = ""
        self.cause = ""


class UnretrievedErrors:
    """The log of failures of calls whose results nobody can await any more.

    Args:
        loop: the loop on whose thread the lines are written.
        failure: function that returns the error of a call; None for an error that is not worth a line.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, failure: Callable[[Call], BaseException | None]) -> None:
        self._loop = loop
        self._failure = failure
        self._noted: deque[Call] = deque()
        self._scheduled = False
        self._actors: dict[str, _Told] = {}
        """Actors about which a line was written within the last `QUIET` seconds."""
        self._closed = False
        self.ending = False
        """Whether this process ends its actors, so that their ends are no failures."""

    def note(self, call: Call) -> None:
        """Note a failure that nobody can retrieve any more. Any thread may call this, also during garbage collection:
        it takes no lock."""
        if self._closed or self._loop.is_closed():
            return
        self._noted.append(call)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._sort)

    def begin_end(self) -> None:
        """Take no ends of actors for failures from now on: this process ends them. Those of before are told."""
        self._sort()
        self.ending = True

    def close(self) -> None:
        """Write the lines that are due, and no more: a call that ends with the process is not a failure."""
        self._sort()
        for actor in list(self._actors):
            self._tell(actor)
        self._closed = True

    def _sort(self) -> None:
        self._scheduled = False
        new = []
        while self._noted:
            call = self._noted.popleft()
            told = self._actors.get(call.actor_label)
            if told is None or not told.count:
                error = self._failure(call)
                if error is None or (self.ending and issubclass(type(error), ENDS)):
                    continue
                if told is None:
                    told = self._actors[call.actor_label] = _Told()
                    new.append(call.actor_label)
                told.label, told.cause = call.label or "a call", _cause(error)
            told.count += 1
        if not self._closed:
            for actor in new:
                self._tell(actor)

    def _tell(self, actor: str) -> None:
        told = self._actors.pop(actor)
        if not told.count:  # no failure for `QUIET` seconds
            return
        if told.count == 1:
            logger.error("%s failed and its result was never awaited: %s", told.label, told.cause)
        else:
            logger.error(
                "%s calls of %s failed and their results were never awaited; the first, %s: %s",
                f"{told.count:,}", actor or "this process", told.label, told.cause,
            )  # fmt: skip
        if not self._closed:
            self._actors[actor] = _Told()
            self._loop.call_later(QUIET, self._tell_again, actor)

    def _tell_again(self, actor: str) -> None:
        if not self._closed and actor in self._actors:
            self._tell(actor)


def _cause(error: BaseException) -> str:
    """The text of an error in a line. The text of a remote error is that of its original, which lacks the type."""
    text = text_of(error)
    if issubclass(type(error), RemoteError):
        remote = remote_of(error)
        text = f"{remote.type_name}: {remote.message}" if remote.message else text
    return shown(text or type_name(type(error)), _CAUSE_LENGTH)
