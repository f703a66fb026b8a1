"""Streams: generator methods of a handle, and the iterators that calling them returns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Generic, NoReturn, TypeVar

from zcactor.api.remote_method import RemoteMethod, document
from zcactor.api.unawaited import Unawaited, refuse
from zcactor.exception_pickling import hides

__tracebackhide__ = hides
__all__ = ["ObjectStream", "RemoteStream"]

T_co = TypeVar("T_co", covariant=True)


class ObjectStream(Unawaited, AsyncIterator[T_co], Generic[T_co]):
    """The items of a generator method: ``async for item in actor.method()``.

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

    def _advice(self) -> str:
        return (
            f"this is the stream of {self._stream.call.label}: iterate it by 'async for item in ...', or take the next "
            "item by 'await anext(...)'"
        )

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


for _name in ("__await__", "__next__"):  # not in the class, as type checkers refuse these uses themselves
    setattr(ObjectStream, _name, refuse)


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
