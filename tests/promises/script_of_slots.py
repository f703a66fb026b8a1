"""A script whose classes have ``__slots__`` in each form, and an actor that makes and returns their objects."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import weakref
from collections.abc import Callable
from types import MemberDescriptorType
from typing import Any, Generic, NamedTuple, TypeVar

import zcactor as zc

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class Point:
    """A data class, with a default and a method that makes another."""

    x: int
    y: int = 2

    def moved(self) -> Point:
        return Point(self.x + 1, self.y)


@dataclasses.dataclass(slots=True, frozen=True)
class Fixed:
    """A data class with a reduction of its own."""

    x: int


class Base:
    """Slots in a tuple."""

    __slots__ = ("a",)


class Below(Base):
    """One more slot, as a text."""

    __slots__ = "b"


class Private(Base):
    """A private name, as a text."""

    __slots__ = "__x"

    def __init__(self) -> None:
        self.__x = 3

    def x(self) -> int:
        return self.__x


class Listed:
    """Slots in a list."""

    __slots__ = ["a", "__b"]  # noqa: RUF023


class Documented:
    """Slots with their documentation."""

    __slots__ = {"a": "the first"}


class Iterated:
    """Slots of a generator, which knows none afterwards."""

    __slots__ = (name for name in "ab")

    def __reduce__(self) -> Any:
        return iterated, (self.a,)  # type: ignore[attr-defined]


def iterated(a: int) -> Iterated:
    made: Any = Iterated()
    made.a = a
    return made  # type: ignore[no-any-return]


class Open(Base):
    """Slots, weak references and further attributes."""

    __slots__ = ("__dict__", "__weakref__", "b")


class Weak(Base):
    """Weak references alone."""

    __slots__ = ("__weakref__",)


class Free(Base):
    """No slots, below a class that has some."""


class Empty:
    """No attributes at all."""

    __slots__ = ()


class EmptyBelow(Empty):
    """Empty slots, which are the same object as those of its base."""

    __slots__ = ()


class Box(Generic[T]):
    """A generic class."""

    __slots__ = ("held",)

    def __init__(self, held: T) -> None:
        self.held = held


class Abstract(abc.ABC):
    """An abstract class."""

    __slots__ = ("a",)

    @abc.abstractmethod
    def get(self) -> int: ...


class Concrete(Abstract):
    """One that is not."""

    __slots__ = ()

    def get(self) -> int:
        return self.a  # type: ignore[attr-defined,no-any-return]


class Pair(NamedTuple):
    """A tuple with names."""

    first: int
    second: int


class Sub(Pair):
    """A tuple without further attributes."""

    __slots__ = ()


class Mixin:
    """A class that gives attributes to those below it."""


class Both(Pair, Mixin):
    """A tuple with attributes that it gets by its second base."""

    __slots__ = ()


class Failure(Exception):
    """An exception with a slot."""

    __slots__ = ("code",)


def made(cls: Any, **fields: Any) -> Any:
    """An object of a class, with its fields."""
    instance = cls.__new__(cls)
    for name, value in fields.items():
        setattr(instance, name, value)
    return instance


MAKE: dict[str, Callable[[], Any]] = {
    "Point": lambda: Point(1),
    "Fixed": lambda: Fixed(1),
    "Base": lambda: made(Base, a=1),
    "Below": lambda: made(Below, a=1, b=2),
    "Private": lambda: Private(),
    "Listed": lambda: made(Listed, a=1, _Listed__b=2),
    "Documented": lambda: made(Documented, a=1),
    "Iterated": lambda: iterated(1),
    "Open": lambda: made(Open, a=1, b=2, c=3),
    "Weak": lambda: made(Weak, a=1),
    "Free": lambda: made(Free, a=1, c=3),
    "Empty": lambda: Empty(),
    "EmptyBelow": lambda: EmptyBelow(),
    "Box": lambda: Box(1),
    "Concrete": lambda: made(Concrete, a=1),
    "Pair": lambda: Pair(1, 2),
    "Sub": lambda: Sub(1, 2),
    "Both": lambda: Both(1, 2),
}


def shape(value: Any) -> str:
    """The layout of an object and its values, as text."""
    cls: Any = type(value)
    layout = [
        f"{base.__name__}.{name}"
        for base in cls.__mro__
        for name, each in sorted(vars(base).items())
        if type(each) is MemberDescriptorType and base.__module__ == "__main__"
    ]
    found = [getattr(value, each.partition(".")[2], None) for each in layout]
    fields = vars(value) if cls.__dictoffset__ else None
    return f"{cls.__name__} {layout} {found} {fields} {bool(cls.__weakrefoffset__)} {cls.__basicsize__}"


@zc.actor
class Shaper:
    """An actor that makes, takes and returns objects."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def make(self, name: str) -> Any:
        return MAKE[name]()

    def shape(self, name: str, value: Any) -> str:
        """The layout of an object here. Its class is that of each object before."""
        assert type(value) is self.kept.setdefault(name, type(value))
        return shape(value)

    def echo(self, value: Any) -> Any:
        return value

    def doc(self, value: Any) -> Any:
        return value.__slots__

    def moved(self, point: Any) -> Any:
        return point.moved()

    def private(self, value: Any) -> int:
        return value.x()  # type: ignore[no-any-return]

    def weak(self, value: Any) -> bool:
        return weakref.ref(value)() is value

    def abstract(self, value: Any) -> int:
        try:
            Abstract()  # type: ignore[abstract]
        except TypeError:
            return value.get()  # type: ignore[no-any-return]
        raise AssertionError("it was made")

    def fail(self) -> None:
        failure = Failure("no")
        failure.code = 7  # type: ignore[attr-defined]
        raise failure


async def main() -> None:
    """Send each there and back, and print the names of those that arrived as they were."""
    async with zc.init():
        actor: Any = await Shaper.spawn()
        other: Any = await Shaper.spawn()
        for name, make in MAKE.items():
            value = make()
            before = shape(value)
            assert await actor.shape(name, value) == before, (name, before, await actor.shape(name, value))
            assert await actor.shape(name, make()) == before
            twice = await actor.echo([value, {1}, make()])
            assert [type(each) is type(value) for each in twice] == [True, False, True], name
            assert [shape(twice[0]), shape(twice[2])] == [before] * 2, name
            assert shape(await actor.make(name)) == before, name
            assert await other.shape(name, actor.make(name)) == before, name  # from a process that got the class
            print(name)
        point = await actor.moved(Point(3))
        assert type(point) is Point and point == Point(4)
        assert await actor.private(Private()) == 3
        assert await actor.weak(made(Weak, a=1)) and await actor.weak(made(Open, a=1))
        assert await actor.abstract(made(Concrete, a=5)) == 5
        for name in ("Below", "Base", "Listed", "Documented"):
            assert await actor.doc(MAKE[name]()) == globals()[name].__slots__
        assert await actor.doc(iterated(1)) == ("a", "b")
        failures: Any = await asyncio.gather(actor.fail(), return_exceptions=True)
        assert isinstance(failures[0], Failure), failures
        assert failures[0].code == 7  # type: ignore[attr-defined]
        print("all")


if __name__ == "__main__":
    zc.run(main())
