"""The base class `zc.Actor`: exact with or without the plugin, and its name works as an annotation everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_type

import zcactor as zc


class Shard(zc.Actor):
    def __init__(self, rows: int, scale: float = 1.0) -> None:
        self.rows = rows

    @zc.method
    def push(self, grad: float) -> float:
        return grad * self.rows

    @zc.method
    def describe(self) -> object:
        return self


class Mirror(Shard):
    """A class that inherits the constructor, and overrides one method by one with a narrower result."""

    @zc.method
    def describe(self) -> str:
        return "mirror"


class Named(Shard):
    def __init__(self, name: str) -> None:
        super().__init__(3)
        self.name = name


@zc.actor(max_restarts=3)
class Decorated(zc.Actor):
    def __init__(self, rows: int) -> None:
        self.rows = rows


@zc.actor
class Bare(zc.Actor): ...


@dataclass
class Settings(zc.Actor):
    rows: int
    name: str = ""


def pick(first: Shard, second: Decorated) -> Shard:
    return first


async def right() -> None:
    shard = await Shard.spawn(3, scale=2.0)
    assert_type(shard, Shard)
    assert_type(await shard.push(1.0), float)
    assert_type(await Mirror.spawn(3), Mirror)
    mirror = await Mirror.spawn(3)
    assert_type(await mirror.describe(), str)
    assert_type(await Named.spawn("n"), Named)
    assert_type(await Bare.spawn(), Bare)
    assert_type(await Settings.spawn(3, name="s"), Settings)
    again = await Shard.options(name="mirror", max_restarts=-1, lifetime="detached", node="spread").spawn(3)
    assert_type(again, Shard)
    assert_type(await Shard.options(name="a").options(num_cpus=2).spawn(3), Shard)
    pick(mirror, await Decorated.spawn(3))
    assert_type(await Decorated.options(env={"A": "1"}).spawn(rows=3), Decorated)


async def wrong() -> None:
    await Shard.spawn("3")  # expect: mypy[arg-type] pyright[reportArgumentType]
    await Shard.spawn()  # expect: mypy[call-arg] pyright[reportCallIssue]
    await Shard.spawn(3, sale=2.0)  # expect: mypy[call-arg] pyright[reportCallIssue]
    await Mirror.spawn("3")  # expect: mypy[arg-type] pyright[reportArgumentType]
    await Named.spawn(3)  # expect: mypy[arg-type] pyright[reportArgumentType]
    await Decorated.spawn("3")  # expect: mypy[arg-type] pyright[reportArgumentType]
    await Shard.options(nme="x").spawn(3)  # expect: mypy[call-arg] pyright[reportCallIssue]
    await Shard.options(name=3).spawn(3)  # expect: mypy[arg-type] pyright[reportArgumentType]
    await Shard.options(lifetime="for ever").spawn(3)  # expect: mypy[arg-type] pyright[reportArgumentType]
    await Shard.options(name="x").spawn("3")  # expect: mypy[arg-type] pyright[reportArgumentType]
    shard: Named = await Shard.spawn(3)  # expect: mypy[assignment] pyright[reportAssignmentType]
    pick(shard, await Shard.spawn(3))  # expect: mypy[arg-type] pyright[reportArgumentType]
