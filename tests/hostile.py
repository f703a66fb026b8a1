"""Exceptions whose classes are hostile to all that touch them, and actors that raise them in each way there is."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NoReturn

import numpy as np

import zcactor as zc

PLACES = 2
"""Calls of one kind that run at once in `Raiser`."""


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception that refuses attributes."""

    key: str = "key"


class ByKey(Exception):
    """An exception that looks unknown attributes up in a mapping, and raises what that raises."""

    def __init__(self) -> None:
        super().__init__("by key")
        self.__dict__["found"] = {}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["found"][name]


class Answering(Exception):
    """An exception that has each attribute that it is asked for: a function."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: name


class Closed(Exception):
    """An exception that is neither true nor false."""

    def __len__(self) -> int:
        raise ValueError("closed")

    def __bool__(self) -> bool:
        raise ValueError("closed")


class Unequal(Exception):
    """An exception that can neither be compared nor be a key."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("no comparison")

    def __hash__(self) -> int:
        raise TypeError("no key")


class Silent(Exception):
    """An exception without text, which has Ctrl+C in its place."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    def __repr__(self) -> str:
        raise SystemExit(3)


class Guarded(Exception):
    """An exception that has no attribute at all, and refuses each."""

    def __getattribute__(self, name: str) -> Any:
        raise PermissionError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise PermissionError(name)


def _hidden(error: Any) -> Any:
    raise LookupError("hidden")


class Masked(Exception):
    """An exception whose own fields hide those of Python's exceptions, and that passes for another class."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        super().__init__("masked", 2)
        self.kept = 7

    args: Any = property(_hidden)

    __traceback__: Any = property(_hidden)

    __cause__: Any = property(_hidden)

    __dict__: Any = property(_hidden)

    __class__: Any = property(_hidden)


def iter_nothing() -> Iterator[int]:
    """A generator."""
    yield from ()


class Keeping(Exception):
    """An exception with an argument and a field that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("keeping", iter_nothing())
        self.lock = threading.Lock()
        self.code = 7


class Staying(Exception):
    """An exception that cannot be pickled by its own words."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError("it stays here")


class Order(type):
    """The class of a class that has no other below it."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if len(bases) > 1:
            raise RuntimeError("no class of two kinds")
        return super().__new__(cls, name, bases, namespace)

    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("no question")


class Ordered(Exception, metaclass=Order):
    """An exception whose class refuses to be derived from, and to be asked about."""

    def __init_subclass__(cls) -> None:
        raise RuntimeError("no class below")


class Refusing(type):
    """The class of classes that refuse to be compared."""

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("no comparison of classes")

    __hash__ = type.__hash__


class Sole(Refusing, metaclass=Refusing):
    """A class of classes, which refuses to be compared as well."""


class Token(metaclass=Refusing):
    """An object whose class refuses to be compared."""

    def __reduce__(self) -> Any:
        raise Incomparable("token")


class Incomparable(Exception, metaclass=Sole):
    """An exception whose class refuses to be compared, as does the class of that, and the class of an attribute."""

    token = Token()


class Ring(Exception):
    """An exception that is the cause of its own cause, and has itself for a field."""

    def __init__(self) -> None:
        super().__init__("ring")
        self.itself = self
        self.__cause__ = ValueError("back")
        self.__cause__.__context__ = self


class Leaving(BaseException):
    """An exception that no handler of errors catches."""


KINDS: dict[str, Callable[[], BaseException]] = {
    cls.__name__: cls
    for cls in (
        Frozen, ByKey, Answering, Closed, Unequal, Silent, Guarded, Masked, Keeping, Staying, Ordered, Ring,
        Incomparable, Leaving,
    )
}  # fmt: skip
FORMS = ("alone", "in a group", "as a cause", "in a list")


def outcome(kind: str, form: str) -> Any:
    """Raise an exception of a kind, or one that has it within; return it in a list."""
    error = KINDS[kind]()
    if form == "alone":
        raise error
    if form == "in a group":
        raise BaseExceptionGroup("several", [error, ValueError("other")])
    if form == "as a cause":
        raise ValueError("outer") from error
    return [0, error, 2] if form == "in a list" else form


@zc.actor(max_concurrency=PLACES)
class Raiser:
    """An actor that raises in each way there is but by its constructor."""

    def __init__(self) -> None:
        self.threads = threading.Barrier(PLACES, timeout=60)
        self.tasks = asyncio.Barrier(PLACES)

    def plain(self, kind: str, form: str) -> Any:
        return outcome(kind, form)

    async def early(self, kind: str, form: str) -> Any:
        return outcome(kind, form)

    async def late(self, kind: str, form: str) -> Any:
        await asyncio.sleep(0)
        return outcome(kind, form)

    @zc.method(inline=True)
    def inline(self, kind: str, form: str) -> Any:
        return outcome(kind, form)

    def generator(self, kind: str, form: str) -> Iterator[Any]:
        yield "first"
        yield outcome(kind, form)

    async def async_generator(self, kind: str, form: str) -> AsyncIterator[Any]:
        yield "first"
        yield outcome(kind, form)

    def step(self, form: str, kind: str) -> Any:
        return outcome(kind, form)

    def meet(self) -> bool:
        """Wait for a call in each other thread."""
        self.threads.wait()
        return True

    async def gather(self) -> bool:
        """Wait for a call in each other place of async methods."""
        await self.tasks.wait()
        return True

    def close(self) -> None:
        outcome("Guarded", "alone")


@zc.actor
class Made:
    """An actor whose constructor raises."""

    def __init__(self, kind: str, form: str) -> None:
        found = outcome(kind, form)
        if form in FORMS:
            raise ValueError(found)

    def ping(self) -> str:
        return "pong"


@zc.actor
class Exhausted:
    """An actor that is made of an iterator without items."""

    def __init__(self) -> None:
        next(iter(()))


@zc.actor
class Struck:
    """An actor into whose idle thread an exception is set."""

    def ping(self) -> str:
        return "pong"

    async def strike(self) -> None:
        (thread,) = (each for each in threading.enumerate() if each.name.startswith("Struck("))
        found = ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyError)
        )
        assert found == 1

    def spoil_logging(self) -> None:
        """Add a filter that raises to the package's log."""
        logging.getLogger("zcactor").addFilter(_refused)


def _refused(record: logging.LogRecord) -> bool:
    raise KeyError(record)


class Proxy(Exception):
    """Stands for an object that is not there yet."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("Proxy is unbound")


class Stays(Exception):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise SystemExit("Stays is not to be pickled")


class _Meta(type):
    def __hash__(cls) -> int:
        raise TypeError("Odd is an unhashable class")


class Odd(Exception, metaclass=_Meta):
    """Has a class that refuses to be hashed."""


class HalfMade(zc.DeviceError):
    """Lacks the fields of its base."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


class _Yields:
    """An awaitable that yields itself to the loop."""

    def __await__(self) -> Any:
        yield self


class _Unbound(_Yields):
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("Proxy is unbound")


class _Blocking(_Yields):
    @property
    def _asyncio_future_blocking(self) -> bool:
        return True


class _Raising(_Yields):
    @property
    def _asyncio_future_blocking(self) -> bool:
        raise RuntimeError("Proxy is unbound")


async def _fail() -> None:
    raise Proxy("unbound")


def _fails() -> None:
    raise Proxy("unbound")


AWAITED: dict[str, Any] = {
    "gather": lambda: asyncio.gather(_fail()),
    "shield": lambda: asyncio.shield(_fail()),
    "to_thread": lambda: asyncio.to_thread(_fails),
    "unbound": _Unbound,
    "blocking": _Blocking,
    "raising": _Raising,
}
"""Awaitables for an async method, by their kind."""


@zc.actor
class Awaiting:
    """Awaits what is hostile."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def hold(self) -> str:
        """Wait for `let_go`."""
        await self.go.wait()
        return "held"

    @zc.method(inline=True)
    def let_go(self) -> None:
        """Let `hold` return."""
        self.go.set()

    async def wait_for(self, way: str) -> None:
        """Await one of `AWAITED`."""
        await AWAITED[way]()

    def fail(self) -> None:
        """Raise an error of a class that lacks the fields of its base."""
        raise HalfMade("x")

    async def leave_block(self, group: Any, kind: str) -> None:
        """Leave the block of a reducer by an exception of a kind, if one is given."""
        async with group.reducer(op="sum") as reducer:
            reducer.add("x", np.ones(10))
            if kind:
                raise globals()[kind](kind)

    async def total(self, group: Any) -> float:
        """Sum over a group."""
        return float((await group.allreduce(np.ones(3)))[0])
