"""The producer's end of a stream: steps of a generator, as many ahead as the consumer's credit allows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from typing import TYPE_CHECKING, Any

from zcactor.execution.failure import log_failure
from zcactor.rpc.messages import Status
from zcactor.rpc.stream import STREAM_WINDOW

if TYPE_CHECKING:
    from zcactor.rpc.incoming import Incoming

__all__ = ["AsyncProducer", "SyncProducer"]

_Pack = Callable[[Any, int], tuple[Any, Any, int]]


class AsyncProducer:
    """The producer that drives an async generator in its own task."""

    def __init__(self, incoming: Incoming, pack: _Pack) -> None:
        self._incoming = incoming
        self._pack = pack
        self._credit = STREAM_WINDOW
        self._waiter: asyncio.Future[None] | None = None

    def credit(self, count: int) -> None:
        """Add the consumer's credit for `count` further items."""
        self._credit += count
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Note that the consumer has left. The caller also cancels the task, which closes the generator."""

    async def run(self, generator: AsyncGenerator[Any, None]) -> None:
        """Send every item. Cancelling closes the generator."""
        index = 0
        try:
            async for item in generator:
                if self._incoming.cancelled:  # and the generator has swallowed it: no credit would ever come again
                    raise asyncio.CancelledError
                session = self._incoming.session
                session.send_item(self._incoming, index, *self._pack(item, session.connection.eager_limit))
                del item
                index += 1
                self._credit -= 1
                while self._credit <= 0:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            await generator.aclose()


class SyncProducer:
    """The producer that drives a plain generator step by step in the actor's thread; other calls run between two
    steps."""

    def __init__(
        self,
        incoming: Incoming,
        generator: Generator[Any, Any, Any],
        pack: _Pack,
        post: Callable[[Callable[[], None]], None],
        *,
        ended: Callable[[int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._incoming = incoming
        self._generator = generator
        self._pack = pack
        self._post = post
        self._ended = ended
        self._failed = failed
        self._index = 0
        self._credit = STREAM_WINDOW
        self._parked = False
        self._closed = False
        self._lock = threading.Lock()

    def credit(self, count: int) -> None:
        """Add the consumer's credit for `count` further items."""
        with self._lock:
            self._credit += count
            resume, self._parked = self._parked, False
        if resume:
            self._post(self.step)

    def close(self) -> None:
        """Close the generator in its thread: the consumer has left."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            resume, self._parked = self._parked, False
        if resume:
            self._post(self.step)

    def _leave(self) -> None:
        """Close the generator after a failure that may not have been its own, such as an item that cannot be packed."""
        try:
            self._generator.close()
        except BaseException as error:  # the caller has its answer, so this exception can only be logged
            log_failure("a generator raised while it was being closed after a failure", error)

    def _end(self, answer: Callable[[Any], None], outcome: Any) -> None:
        answer(outcome)
        self._incoming.stream = None  # each of the two holds the other, and the call its arguments

    def step(self) -> None:
        """Send one item, then queue the next step behind the waiting calls."""
        try:
            if self._closed:
                self._generator.close()
                self._end(self._ended, Status.CANCELLED)
                return
            try:
                item = next(self._generator)
            except StopIteration:
                self._end(self._ended, Status.STREAM_END)
                return
            session = self._incoming.session
            packed = self._pack(item, session.connection.eager_limit)
            del item
            session.send_item(self._incoming, self._index, *packed)
        except BaseException as error:
            self._leave()
            self._end(self._failed, error)
            return
        self._index += 1
        with self._lock:
            self._credit -= 1
            if self._credit <= 0 and not self._closed:
                self._parked = True
                return
        self._post(self.step)
