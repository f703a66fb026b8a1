"""Streams: generator methods of a handle, and the iterators that calling them returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Generic, NoReturn, TypeVar

from zcactor.api.operation import refuse_to_block
from zcactor.api.remote_method import RemoteMethod, document
from zcactor.api.unawaited import Unawaited, refuse
from zcactor.exception_pickling import hides
from zcactor.options import checked_seconds
from zcactor.process.context import current

__tracebackhide__ = hides
__all__ = ["ObjectStream", "RemoteStream"]

T_co = TypeVar("T_co", covariant=True)
_OVER, _LATE = object(), object()


class ObjectStream(Unawaited, AsyncIterator[T_co], Generic[T_co]):
    """The items of a generator method: ``async for item in actor.method()``, and ``for item in actor.method()`` in a
    thread that runs no event loop.

    The generator runs at most 16 items ahead of the consumer. An exception in the generator is raised at its own item,
    then the stream ends. Leaving the loop closes the generator where nothing else refers to the stream. So do dropping
    the stream and `aclose`.
    """

    __slots__ = ("__weakref__", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __aiter__(self) -> ObjectStream[T_co]:
        return self

    async def __anext__(self) -> T_co:
        """Return the next item.

        Raises:
            StopAsyncIteration: the generator is exhausted, or the stream was closed.
            RemoteError, ActorDied: as for a call.

        Cancelling is safe: no item is lost.
        """
        return await self._stream.next()  # type: ignore[no-any-return]

    def __iter__(self) -> ObjectStream[T_co]:
        self._refuse_to_block()
        return self

    def __next__(self) -> T_co:
        return self.next()

    def next(self, timeout: float | None = None) -> T_co:
        """Block the calling thread until the next item is there, and return it.

        Args:
            timeout: seconds to wait at most; None waits for ever, 0 polls.

        Raises:
            StopIteration: the generator is exhausted, or the stream was closed.
            RuntimeError: the calling thread runs an event loop, or somebody else waits for an item.
            TimeoutError: the item was not there in time; no item is lost.
            TypeError: `timeout` is no number.
            ValueError: `timeout` is negative, or not a number (NaN).
            RemoteError, ActorDied: as for a call.
        """
        self._refuse_to_block()
        seconds, stream = checked_seconds(timeout, "next()"), self._stream
        if stream.has_news():
            try:
                stream.next().send(None)  # waits for nothing
            except StopIteration as found:
                return found.value  # type: ignore[no-any-return]
            except StopAsyncIteration:
                raise StopIteration from None
        waiting = asyncio.run_coroutine_threadsafe(_awaited(stream, seconds), stream.call.loop or current().loop)
        try:
            item = waiting.result()
        except BaseException:  # Ctrl-C, or an error of the stream
            waiting.cancel()
            raise
        if item is _LATE:
            text = f"the next item of {stream.call.label} was not there after {seconds:.6g} s; no item is lost"
            raise TimeoutError(text)
        if item is _OVER:
            raise StopIteration
        return item  # type: ignore[no-any-return]

    def _refuse_to_block(self) -> None:
        label = self._stream.call.label
        refuse_to_block(f"'for item in' the stream of {label}", "write 'async for item in ...'")

    def _advice(self) -> str:
        return (
            f"this is the stream of {self._stream.call.label}: iterate it by 'async for item in ...', or take the next "
            "item by 'await anext(...)'; in a thread that runs no event loop by 'for item in ...' or .next()"
        )

    def close(self) -> None:
        """See `aclose`. Any thread may call this."""
        self._stream.close()

    async def aclose(self) -> None:
        """Close the generator. Items that were not taken are dropped. Closing a closed stream does nothing."""
        self._stream.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an ObjectStream belongs to the process that called the generator method, and travels nowhere: iterate it "
            "here and pass its items, or pass the actor's handle and call the method there"
        )

    def __del__(self) -> None:
        self._stream.abandon()


ObjectStream.__await__ = refuse  # type: ignore[attr-defined]  # not in the class: type checkers refuse this themselves


async def _awaited(stream: Any, seconds: float | None) -> Any:
    """The next item; `_OVER` where there are no more, and `_LATE` where it does not come in time."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await stream.next()
    except StopAsyncIteration:
        return _OVER
    except TimeoutError:
        if not limit.expired():  # the generator's own
            raise
        return _LATE


class RemoteStream(RemoteMethod):
    """A generator method of a handle. Calling it starts the generator and returns an `ObjectStream`."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> ObjectStream[Any]:  # type: ignore[override]
        spec = self._spec
        spec.check(args, kwargs)
        call = self._actor.call(spec, args, kwargs, self._timeout, 0)
        call.retrieved = False
        return ObjectStream(call.stream)

    def bind(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a graph has no streams.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self._spec.label}.bind(): a generator method has many results, and a node of a graph has one"
        )


document(RemoteStream)
