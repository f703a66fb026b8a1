"""`zc.spawn` is as exact as the constructor, for any class, with or without the plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar, assert_type

import zcactor as zc

T = TypeVar("T")


class Plain:
    def __init__(self, rows: int, scale: float = 1.0, *, name: str = "") -> None:
        self.rows = rows

    @zc.method
    def push(self, grad: float) -> float:
        return grad * self.rows


@dataclass
class Point:
    x: int
    y: int = 0


class Box(Generic[T]):
    def __init__(self, item: T) -> None:
        self.item = item

    @zc.method
    def get(self) -> T:
        return self.item


@zc.actor
class Decorated:
    def __init__(self, rows: int) -> None:
        self.rows = rows

    @zc.method
    def push(self, grad: float) -> float:
        return grad * self.rows


@zc.actor(max_restarts=3, num_cpus=0.5, concurrency_groups={"io": 4})
class Configured:
    def __init__(self, rows: int) -> None:
        self.rows = rows


async def right() -> None:
    plain = await zc.spawn(Plain, 3, 2.0, name="a")
    assert_type(plain, Plain)
    assert_type(await plain.push(1.0), float)
    assert_type(await zc.spawn(Point, 1, y=2), Point)
    box = await zc.spawn(Box[str], "text")
    assert_type(box, Box[str])
    assert_type(await box.get(), str)
    decorated = await zc.spawn(Decorated, 3)
    assert_type(await decorated.push(1.0), float)
    local = Decorated(3)
    assert_type(local.rows, int)
    configured = await zc.spawn(Configured, rows=3)
    assert_type(configured.rows, int)


async def wrong() -> None:
    await zc.spawn(Plain, "3")  # expect: mypy[arg-type] pyright[reportArgumentType]
    await zc.spawn(Plain)  # expect: mypy[call-arg] pyright[reportCallIssue]
    await zc.spawn(Plain, 3, nme="a")  # expect: mypy[call-arg] pyright[reportCallIssue]
    await zc.spawn(Point, 1, 2, 3)  # expect: mypy[call-arg] pyright[reportCallIssue]
    await zc.spawn(Box[str], 3)  # expect: mypy[arg-type] pyright[reportArgumentType]
    await zc.spawn(Decorated, "3")  # expect: mypy[arg-type] pyright[reportArgumentType]
    other: Point = await zc.spawn(Plain, 3)  # expect: mypy[arg-type] pyright[reportAssignmentType]
    assert other
    Decorated("3")  # expect: mypy[arg-type] pyright[reportArgumentType]


@zc.actor(max_restarts="3")  # expect: mypy[call-overload] pyright[reportArgumentType]
class WrongType: ...


@zc.actor(max_restart=3)  # expect: mypy[call-overload] pyright[reportCallIssue]
class WrongName: ...
