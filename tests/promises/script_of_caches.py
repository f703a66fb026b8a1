"""A script whose actor classes have caches of functools, or what belongs to one process."""

from __future__ import annotations

import contextvars
import functools
import threading
from typing import Any

import zcactor as zc

LOCK = threading.Lock()
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE")


@functools.cache
def fibonacci(n: int) -> int:
    """A number of Fibonacci's."""
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.singledispatch
def kind(x: Any) -> str:
    """The kind of a value."""
    return "other"


@kind.register
def _(x: int) -> str:
    return "int"


@kind.register
def _(x: list) -> str:  # type: ignore[type-arg]
    return f"list of {kind(x[0])}"


@zc.actor
class Cached:
    """An actor with a cache."""

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def table(self, n: int) -> list[int]:
        return list(range(n))

    def hits(self) -> bool:
        return self.table(3) is self.table(3) and type(self).table.cache_parameters()["maxsize"] == 8


@zc.actor
class Property:
    """An actor with a cached property."""

    @functools.cached_property
    def table(self) -> list[int]:
        return [1]

    def get(self) -> list[int]:
        assert self.table is self.table
        return self.table


@zc.actor
class Recursive:
    """An actor that uses a cached function of the script."""

    def get(self) -> int:
        return fibonacci(10)


@zc.actor
class Dispatch:
    """An actor that uses a function with several implementations."""

    def get(self) -> str:
        return f"{kind(3)} {kind([3])}"


@zc.actor
class Method:
    """An actor whose method has several implementations."""

    @functools.singledispatchmethod
    def kind(self, x: Any) -> str:
        return "other"

    @kind.register
    def _(self, x: int) -> str:
        return "int"

    def get(self) -> str:
        return self.kind(3)


@zc.actor
class Locked:
    """An actor that uses a lock of the script."""

    def get(self) -> int:
        with LOCK:
            return 1


@zc.actor
class ClassLock:
    """An actor with a lock of its class."""

    lock = threading.Lock()


@zc.actor
class Variable:
    """An actor that uses a context variable of the script."""

    def get(self) -> int:
        return VARIABLE.get()


async def main() -> None:
    """Spawn all, and print what they give."""
    async with zc.init():
        cached: Any = await Cached.spawn()
        print("Cached", await cached.table(3), await cached.hits())
        for cls in (Property, Recursive, Dispatch, Method):
            actor: Any = await cls.spawn()
            print(cls.__name__, await actor.get())
        for refused in (Locked, ClassLock, Variable):
            try:
                await refused.spawn()
            except TypeError as error:
                print(error)


if __name__ == "__main__":
    zc.run(main())
