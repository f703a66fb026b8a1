"""The first answers to requests that may be repeated: a second request of the same id does nothing again."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from zcactor.errors import ActorError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["FirstAnswers"]

T = TypeVar("T")
_LASTING: Final = (ActorError, ValueError)
"""Errors that are answers. After any other, nothing was done, and a repeated request tries again."""


class FirstAnswers(Generic[T]):
    """The answers of one kind of request. Used on the loop's thread.

    Args:
        loop: on which the requests run.
        remembered: answers that are remembered; the oldest one is forgotten first.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, remembered: int = 2_000) -> None:
        self._loop = loop
        self._remembered = remembered
        self._asked: dict[bytes, asyncio.Future[T]] = {}
        self._settled: deque[bytes] = deque()

    async def once(self, request: bytes, work: Callable[[], Awaitable[T]]) -> T:
        """The answer to a request: that of ``work()``, or the answer that the request had when it came first.

        Args:
            request: its id.
            work: called where the request is new, or its first attempt came to no answer.

        Raises:
            Exception: as `work` does. An error that is an answer is given again.

        Cancelling ends the attempt, or the wait for another one's. A cancelled attempt is no answer.
        """
        while (first := self._asked.get(request)) is not None:
            await asyncio.wait([first])
            if not first.cancelled():
                error = first.exception()
                if error is not None:
                    raise copy.copy(error)
                return first.result()
        answer = self._asked[request] = self._loop.create_future()
        try:
            outcome = await work()
        except _LASTING as error:
            # A copy, without a traceback: its frames would keep the request's arguments.
            answer.set_exception(copy.copy(error))
            answer.exception()  # retrieved: nobody may ask again
            self._remember(request)
            raise
        except BaseException:
            del self._asked[request]
            answer.cancel()
            raise
        answer.set_result(outcome)
        self._remember(request)
        return outcome

    def _remember(self, request: bytes) -> None:
        self._settled.append(request)
        if len(self._settled) > self._remembered:
            del self._asked[self._settled.popleft()]
