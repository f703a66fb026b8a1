"""`@zc.method`: arguments, keywords and results of remote calls are checked like those of local ones."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import zcactor as zc

Floats = npt.NDArray[np.float64]


async def work() -> bytes:
    return b"done"


class Shard(zc.Actor):
    def __init__(self, rows: int) -> None:
        self.weights = np.zeros(rows)

    @zc.method
    def push(self, grad: Floats) -> float:
        return float(grad.max())

    @zc.method
    async def weights_now(self) -> Floats:
        return self.weights.copy()

    @zc.method(timeout=3.0, retries=2, idempotent=True)
    def scale(self, factor: float, *, clip: bool = False) -> int:
        return int(factor)

    @zc.method(concurrency_group="io", inline=True)
    async def rename(self, name: str, suffix: str = "") -> str | None:
        return name + suffix

    @zc.method
    def later(self) -> Coroutine[Any, Any, bytes]:
        return work()

    @zc.method
    def nothing(self) -> None: ...

    @zc.method
    def many(self, *rows: int) -> list[int]:
        return list(rows)

    @zc.method
    def keywords(self, /, **rows: int) -> dict[str, int]:  # mypy wants the slash: a keyword might be called "self"
        return rows

    @zc.method
    def anything(self, value: Any) -> Any:
        return value

    def plain(self, value: int) -> int:
        return value


async def right(shard: Shard) -> None:
    assert_type(shard.push(np.zeros(3)), zc.ObjectRef[float])
    assert_type(await shard.push(grad=np.zeros(3)), float)
    assert_type(await shard.weights_now(), Floats)
    assert_type(await shard.scale(2.0, clip=True), int)
    assert_type(await shard.scale.options(timeout=1, retries=0)(2.0), int)
    assert_type(await shard.rename("a", suffix="b"), str | None)
    assert_type(await shard.later(), bytes)
    assert_type(await shard.nothing(), None)
    assert_type(await shard.many(1, 2, 3), list[int])
    assert_type(await shard.keywords(a=1), dict[str, int])
    await shard.anything(object())
    assert_type(await asyncio.gather(shard.push(np.zeros(3)), shard.scale(1.0)), tuple[float, int])
    assert_type(await asyncio.wait_for(shard.scale(1.0), timeout=1), int)
    assert_type(shard.plain(3), int)


async def wrong(shard: Shard) -> None:
    shard.push("grad")  # expect: mypy[call-overload] pyright[reportCallIssue,reportArgumentType]
    numbers = np.zeros(3, dtype=np.int32)
    shard.push(numbers)  # expect: mypy[arg-type] pyright[reportCallIssue,reportArgumentType]
    shard.push()  # expect: mypy[call-overload] pyright[reportCallIssue]
    shard.push(np.zeros(3), 1)  # expect: mypy[call-overload] pyright[reportCallIssue]
    shard.scale(factr=2.0)  # expect: mypy[call-overload] pyright[reportCallIssue]
    shard.scale(2.0, True)  # expect: mypy[call-overload] pyright[reportCallIssue]
    shard.scale(2.0, clip="yes")  # expect: mypy[call-overload] pyright[reportCallIssue,reportArgumentType]
    shard.nothing(1)  # expect: mypy[call-arg] pyright[reportCallIssue]
    shard.many("1")  # expect: mypy[call-overload] pyright[reportCallIssue,reportArgumentType]
    shard.keywords(a="1")  # expect: mypy[arg-type] pyright[reportArgumentType]
    shard.scale.options(timeot=1)  # expect: mypy[call-arg] pyright[reportCallIssue]
    shard.scale.options(timeout="1")  # expect: mypy[arg-type] pyright[reportArgumentType]
    shard.scale.options(timeout=1)("2")  # expect: mypy[call-overload] pyright[reportCallIssue,reportArgumentType]
    shard.missing()  # expect: mypy[attr-defined] pyright[reportAttributeAccessIssue]
    text: str = await shard.scale(2.0)  # expect: mypy[assignment] pyright[reportAssignmentType]
    number: int = shard.scale(2.0)  # expect: mypy[assignment] pyright[reportAssignmentType]
    print(text, number)


class Wrong(zc.Actor):
    @zc.method(timeot=1)  # expect: mypy[call-overload,untyped-decorator] pyright[reportCallIssue]
    def misspelt(self) -> None: ...

    @zc.method(timeout="1")  # expect: mypy[call-overload,untyped-decorator] pyright[reportArgumentType]
    def mistyped(self) -> None: ...
