"""The facts about a class that a handle has: kinds of methods, parameters, and their form on the wire."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zcactor as zc
from tests.actors import _logged as wrapped
from zcactor import interface as interfaces
from zcactor import native
from zcactor.errors import ProtocolError
from zcactor.interface import REMEMBERED, Interface, MethodKind, constructor_of


class CallableObject:
    def __call__(self, a: int) -> int:
        return a


class Everything:
    attribute = 3
    text = "x"

    class Nested: ...

    def __init__(self) -> None: ...

    def sync(self, a: int, b: int = 2) -> None: ...

    async def coroutine(self, *, key: int) -> None: ...

    def generator(self) -> Iterator[int]:
        yield 1

    async def agenerator(self) -> AsyncIterator[int]:
        yield 1

    @zc.method(inline=True)
    def inline(self) -> None: ...

    @staticmethod
    def static(a: int) -> None: ...

    @staticmethod
    async def astatic(a: int) -> None: ...

    @classmethod
    def of_class(cls, a: int) -> None: ...

    @property
    def prop(self) -> int:
        return 1

    @functools.cached_property
    def cached_prop(self) -> int:
        return 1

    @wrapped
    def wrapped_sync(self, a: int) -> None: ...

    @functools.lru_cache  # noqa: B019 - never instantiated
    def cached(self, a: int) -> None: ...

    @zc.method(timeout=3.5, retries=2, idempotent=True, concurrency_group="io")
    def with_options(self) -> None: ...

    def _add(self, a: int, b: int) -> None: ...

    async def _aadd(self, a: int, b: int) -> None: ...

    partial = functools.partialmethod(_add, 1)
    apartial = functools.partialmethod(_aadd, 1)

    @functools.singledispatchmethod
    def dispatched(self, a: Any) -> None: ...

    object_ = CallableObject()
    builtin = len

    def varargs(*args: Any) -> None: ...

    def _private(self) -> None: ...

    def __call__(self) -> None: ...


KINDS = {
    "sync": MethodKind.SYNC,
    "coroutine": MethodKind.ASYNC,
    "generator": MethodKind.GENERATOR,
    "agenerator": MethodKind.ASYNC_GENERATOR,
    "inline": MethodKind.INLINE,
    "static": MethodKind.SYNC,
    "astatic": MethodKind.ASYNC,
    "of_class": MethodKind.SYNC,
    "wrapped_sync": MethodKind.SYNC,
    "cached": MethodKind.SYNC,
    "with_options": MethodKind.SYNC,
    "partial": MethodKind.SYNC,
    "apartial": MethodKind.ASYNC,
    "dispatched": MethodKind.SYNC,
    "object_": MethodKind.SYNC,
    "builtin": MethodKind.SYNC,
    "varargs": MethodKind.SYNC,
}


def test_methods_and_their_kinds() -> None:
    interface = Interface.of(Everything)
    assert {spec.name: spec.kind for spec in interface.methods} == KINDS
    assert [spec.name for spec in interface.methods] == sorted(KINDS)
    assert [spec.code for spec in interface.methods] == list(range(len(KINDS)))
    assert interface.is_async
    assert interface.class_name == "Everything"


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "sync",
            [((1,), {}), ((1, 2), {}), ((), {"a": 1}), ((1,), {"b": 2})],
            [((), {}), ((1, 2, 3), {}), ((1,), {"c": 1})],
        ),
        ("coroutine", [((), {"key": 1})], [((), {}), ((1,), {}), ((), {"key": 1, "x": 2})]),
        ("static", [((1,), {})], [((), {}), ((1, 2), {})]),
        ("of_class", [((1,), {})], [((), {}), ((1, 2), {})]),
        ("wrapped_sync", [((1,), {}), ((), {"a": 1})], [((), {}), ((), {"x": 1})]),
        ("cached", [((1,), {})], [((), {}), ((1, 2), {})]),
        ("partial", [((2,), {})], [((), {}), ((1, 2), {})]),
        ("dispatched", [((2,), {})], [((), {})]),
        ("object_", [((2,), {})], [((), {}), ((1, 2), {})]),
        ("builtin", [(([],), {})], [((), {}), ((1, 2), {})]),
        ("varargs", [((), {}), ((1, 2, 3), {})], [((), {"a": 1})]),
        ("generator", [((), {})], [((1,), {})]),
    ],
)
def test_arguments_are_checked(name: str, good: list[Any], bad: list[Any]) -> None:
    for interface in (Interface.of(Everything), Interface.from_wire(Interface.of(Everything).wire())):
        spec = interface.find(name)
        for args, kwargs in good:
            spec.check(args, kwargs)
        for args, kwargs in bad:
            with pytest.raises(TypeError, match=rf"Everything\.{name}\(\): "):
                spec.check(args, kwargs)


def test_names_that_are_not_there() -> None:
    interface = Interface.of(Everything)
    for name in ("attribute", "prop", "cached_prop", "Nested", "nothing", "text"):
        with pytest.raises(AttributeError, match=f"no method '{name}'.*agenerator") as error:
            interface.find(name)
        assert error.value.name == name
    for name in ("_private", "__call__", "__init__", "_nothing"):
        with pytest.raises(AttributeError, match="private") as error:
            interface.find(name)
        assert error.value.name == name
    with pytest.raises(AttributeError, match="methods are: none"):
        Interface.of(type("Empty", (), {})).find("x")


def test_over_the_wire() -> None:
    interface = Interface.of(Everything)
    again = Interface.from_wire(interface.wire())
    assert again is not interface
    assert again is Interface.from_wire(bytes(bytearray(interface.wire())))
    assert again.wire() == interface.wire()
    assert again.by_name.keys() == interface.by_name.keys()
    spec = again.find("with_options")
    assert (spec.timeout, spec.retries, spec.idempotent, spec.group) == (3.5, 2, True, "io")
    assert spec.label == "Everything.with_options"
    assert again.find("sync").timeout is None
    assert (again.find("sync").low, again.find("sync").high) == (1, 2)


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        ["Name", False],
        ["Name", False, None],
        ["Name", False, [1]],
        ["Name", False, [["m"]]],
        ["Name", False, [["m", 99, [], None, None, False, ""]]],
        ["Name", False, [["m", 0, [["a"]], None, None, False, ""]]],
        ["Name", False, [["m", 0, [["a", 77, False]], None, None, False, ""]]],
        ["Name", False, [["m", 0, 5, None, None, False, ""]]],
        ["Name", False, [["m", "x", [], None, None, False, ""]]],
        {"a": 1},
    ],
)
def test_malformed_interfaces(plain: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        Interface.from_wire(msgspec.msgpack.encode(plain))


@pytest.mark.parametrize("data", [b"", b"\xc1", Interface.of(Everything).wire()[:-1], b"\x91" * 100_000])
def test_truncated_interfaces(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        Interface.from_wire(data)


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.binary(),
        lambda s: st.lists(s),
        max_leaves=20,
    )
)
def test_any_plain_value_is_read_or_refused(plain: Any) -> None:
    try:
        Interface.from_wire(msgspec.msgpack.encode(["Name", False, plain]))
    except ProtocolError:
        pass


def test_decorated_classes_gain_no_methods() -> None:
    @zc.actor
    class Decorated:
        def mine(self) -> None: ...

    class Based(zc.Actor):
        def mine(self) -> None: ...

    class Own:
        def options(self) -> None: ...

        def spawn(self) -> None: ...

    cls: Any = Decorated
    assert list(Interface.of(cls).by_name) == ["mine"]
    assert list(Interface.of(Based).by_name) == ["mine"]
    assert list(Interface.of(Own).by_name) == ["options", "spawn"]
    assert not Interface.of(Based).is_async


def test_inherited_from_a_builtin() -> None:
    class Table(dict[str, int]):
        def mine(self) -> None: ...

    interface = Interface.of(Table)
    interface.find("get").check(("key",), {})
    interface.find("get").check(("key", 3), {})
    with pytest.raises(TypeError):
        interface.find("get").check((), {})
    interface.find("update").check(({"a": 1},), {"b": 2})  # it has no signature: the actor checks the arguments


def test_defaults_do_not_travel() -> None:
    class Unpicklable:
        def method(self, a: Any = object(), *, b: Any = lambda: 0) -> None: ...  # noqa: B008

    spec = Interface.from_wire(Interface.of(Unpicklable).wire()).find("method")
    spec.check((), {})
    spec.check((1,), {"b": 2})


@pytest.mark.parametrize("hot", [native.hot, SimpleNamespace(type_version=lambda _: 0)], ids=["numbered", "without"])
def test_an_interface_follows_its_class(hot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an interpreter that numbers the states of types, and without."""
    monkeypatch.setattr("zcactor.interface.hot", hot)

    class Base:
        def first(self) -> None: ...

    class Changing(Base):
        def __init__(self, a: int = 0) -> None: ...

    assert list(Interface.of(Changing).by_name) == ["first"]
    constructor_of(Changing).check((1,), {})
    with pytest.raises(TypeError, match=r"^Changing\(\): too many positional"):
        constructor_of(Changing).check((1, 2), {})

    Base.second = lambda self, a: a  # type: ignore[attr-defined]
    Changing.__init__ = lambda self, a, b: None  # type: ignore[misc, assignment, method-assign]
    assert list(Interface.of(Changing).by_name) == ["first", "second"]
    constructor_of(Changing).check((1, 2), {})
    del Base.first
    assert list(Interface.of(Changing).by_name) == ["second"]


def test_an_interface_is_read_once() -> None:
    interface, constructor = Interface.of(Everything), constructor_of(Everything)
    assert Interface.of(Everything) is interface
    assert constructor_of(Everything) is constructor
    for number in range(2 * REMEMBERED):
        Interface.of(type(f"Other{number}", (), {}))
    assert len(interfaces._interfaces) <= REMEMBERED
    assert Interface.of(Everything).wire() == interface.wire()


class Answering:
    """A callable object that answers every question by a function."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.__dict__["answer"] = answer

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["answer"](name)

    def __call__(self) -> int:
        return 1


def _raise(name: str) -> Any:
    raise KeyError(name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Answering(_raise),
        lambda: Answering(dict[str, int]().__getitem__),
        lambda: Answering(lambda _: 5),
        lambda: mock.call,
        mock.MagicMock,
    ],
)
def test_a_callable_object_with_answers_of_its_own_is_a_method_of_any_arguments(make: Callable[[], Any]) -> None:
    made = type("Made", (), {"client": make(), "ping": lambda self: 1})
    interface = Interface.of(made)
    assert [spec.name for spec in interface.methods] == ["client", "ping"]
    assert interface.by_name["client"].kind == MethodKind.SYNC and not interface.is_async
    interface.by_name["client"].check((1, 2), {"a": 3})
