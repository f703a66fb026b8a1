"""Handles as values, and the methods and attributes that they give."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

import zcactor as zc
from tests.actors import Caller, Plain

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=2, log_to_driver=False) as node:
        yield node


@zc.actor
class Signatures:
    attribute = 3

    def __init__(self) -> None:
        self.dynamic = 4

    def none(self) -> str:
        return "none"

    def two(self, a: int, b: int = 2) -> tuple[int, int]:
        return a, b

    def keywords(self, *, key: int, other: int = 5) -> tuple[int, int]:
        return key, other

    def positional(self, a: int, /, b: int) -> tuple[int, int]:
        return a, b

    def anything(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    async def coroutine(self, a: int) -> int:
        return a

    def generator(self, n: int) -> Any:
        yield from range(n)

    @staticmethod
    def static(a: int) -> int:
        return -a

    @classmethod
    def of_class(cls, a: int) -> str:
        return f"{cls.__name__} {a}"

    @property
    def prop(self) -> int:
        return 3

    def _private(self) -> None: ...

    def self_as_keyword(self, self_: int = 1, **kwargs: Any) -> Any:
        return kwargs


@pytest.mark.slow
async def test_what_cannot_be_reached() -> None:
    handle: Any = await Signatures.spawn()
    before = zc.stats().calls
    for name in ("_private", "__init__", "_remotely"):
        if name != "__init__":
            with pytest.raises(AttributeError, match="private"):
                getattr(handle, name)
    for name in ("attribute", "dynamic", "prop", "missing", "spawn", "options"):
        with pytest.raises(AttributeError, match="methods are: .*generator"):
            getattr(handle, name)
        assert not hasattr(handle, name)
    with pytest.raises(AttributeError, match="cannot be set"):
        handle.attribute = 5
    assert zc.stats().calls == before
    assert set(dir(handle)) == {
        "anything", "coroutine", "generator", "keywords", "none", "of_class", "positional", "self_as_keyword",
        "static", "two",
    }  # fmt: skip


@dataclass
class Box:
    handle: Any
    others: list[Any]


@pytest.mark.slow
async def test_handles_are_values() -> None:
    a: Any = await Plain.spawn()
    b: Any = await Plain.spawn()
    caller: Any = await Caller.spawn()
    (again,) = await caller.call(caller, "start", a, "echo", 1)
    assert await again == 1
    back = await a.echo(a)
    assert back == a
    assert back is not a
    assert hash(back) == hash(a)
    assert a != b
    assert a != "a"
    assert len({a, b, back}) == 2
    assert {a: 1}[back] == 1
    box = await b.echo(Box(a, [b, {"x": (a, b)}, {a, b}, frozenset([a])]))
    assert box == Box(a, [b, {"x": (a, b)}, {a, b}, frozenset([a])])
    assert await box.handle.echo(5) == 5
    assert "Plain(" in repr(a)
    assert "Plain.echo" in repr(a.echo)
    assert copy.copy(a) == a
    assert copy.deepcopy([a]) == [a]
    with pytest.raises(TypeError, match="inside calls"):
        pickle.dumps(a)
    assert await zc.put(a) == a


async def test_a_handle_passed_on_twice() -> None:
    class Passer:
        def __init__(self, following: Any = None) -> None:
            self.following = following

        async def forward(self, handle: Any, value: int) -> Any:
            if self.following is None:
                return await handle.echo(value), handle
            return await self.following.forward(handle, value)

    last: Any = await zc.spawn(Passer)
    middle: Any = await zc.spawn(Passer, last)
    first: Any = await zc.spawn(Passer, middle)
    plain: Any = await Plain.spawn()
    value, back = await first.forward(plain, 5)
    assert value == 5
    assert back == plain
    del plain
    gc.collect()
    assert await back.echo(6) == 6


async def test_an_actor_calls_itself() -> None:
    class Recursive:
        async def factorial(self, n: int) -> int:
            if n == 0:
                return 1
            me: Any = zc.current_actor().handle
            return n * int(await me.factorial(n - 1))

    handle: Any = await zc.spawn(Recursive)
    assert await handle.factorial(10) == 3628800
