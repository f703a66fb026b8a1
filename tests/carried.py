"""Objects that raise when they come out of a message, and an actor that takes and gives any object."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec

import zcactor as zc


class Recursive:
    """An object that asks itself for attributes before it has any."""

    def __init__(self) -> None:
        self.inner = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Latin:
    """An object whose state is no UTF-8."""

    def __getstate__(self) -> bytes:
        return b"\xff"

    def __setstate__(self, raw: bytes) -> None:
        raw.decode()


class Document:
    """A JSON document that is cut."""

    def __reduce__(self) -> Any:
        return msgspec.json.decode, (b"{",)


class Holder:
    """An object with another one."""

    def __init__(self, held: Any) -> None:
        self.held = held


class Unasked:
    """An object that is not to be asked for its class."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise ZeroDivisionError

    def __reduce__(self) -> Any:
        return Unasked, ()


class Dividing:
    """An object that raises an error of its own where it is pickled."""

    def __reduce__(self) -> Any:
        return 1 / 0


class Number:
    """A number whose text has no digits."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Exiting:
    """An object that ends its reader."""

    def __reduce__(self) -> Any:
        return exit_now, ()


class Cancelling:
    """An object that cancels its reader."""

    def __reduce__(self) -> Any:
        return cancel_now, ()


def exit_now() -> None:
    """End the reader."""
    raise SystemExit(3)


def cancel_now() -> None:
    """Cancel the reader."""
    raise asyncio.CancelledError


def nothing() -> Iterator[int]:
    """A generator."""
    yield from ()


RAISING: dict[str, tuple[Callable[[], Any], type[BaseException]]] = {
    "Recursive": (Recursive, RecursionError),
    "Latin": (Latin, UnicodeDecodeError),
    "Document": (Document, msgspec.DecodeError),
    "Number": (Number, ValueError),
    "Exiting": (Exiting, SystemExit),
    "Cancelling": (Cancelling, asyncio.CancelledError),
}


@zc.actor
class Carrier:
    """An actor that takes and gives any object."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def take(self, *values: Any, **named: Any) -> int:
        return len(values) + len(named)

    @zc.method(inline=True)
    def take_inline(self, value: Any) -> int:
        return 1

    async def take_async(self, value: Any) -> int:
        return 1

    def give(self, name: str) -> Any:
        return [RAISING[name][0]()]

    def generator(self) -> Any:
        return {"model": [nothing()]}

    async def items(self) -> AsyncIterator[Any]:
        yield {"model": [nothing()]}

    def metadata(self, array: Any) -> Any:
        return array.dtype.metadata

    def echo(self, value: Any) -> Any:
        return value

    def note(self, number: int) -> int:
        self.seen.append(number)
        return len(self.seen)

    async def numbers(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    async def call(self, function: Any, *args: Any) -> Any:
        return await function(*args)

    async def drain(self, stream: Any, *args: Any) -> list[Any]:
        return [each async for each in stream(*args)]


@zc.actor
class Holding:
    """An actor with an argument."""

    def __init__(self, value: Any) -> None:
        self.value = value
