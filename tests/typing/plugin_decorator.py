"""``Shard.spawn`` of a decorated class: exact in pyright by the decorator's type, and in mypy by the plugin.

The plugin also keeps the class a class: annotations, subclasses and dataclasses work in mypy. pyright takes the
decorator at its word, so there a program that needs those derives from `zc.Actor` (`program_base`).
"""

from __future__ import annotations

from typing import assert_type

import zcactor as zc
from zcactor import actor


@zc.actor
class Shard:
    def __init__(self, rows: int, scale: float = 1.0) -> None:
        self.rows = rows

    @zc.method
    def push(self, grad: float) -> float:
        return grad * self.rows


@actor(max_restarts=3)
class Configured:
    def __init__(self, *, name: str) -> None:
        self.name = name


@actor
class Empty: ...


async def right() -> None:
    shard = await Shard.spawn(3, scale=2.0)
    assert_type(await shard.push(1.0), float)
    again = await Shard.options(name="mirror", max_restarts=3).spawn(3)
    assert_type(again.rows, int)
    assert_type(await again.push(1.0), float)
    configured = await Configured.spawn(name="x")
    assert_type(configured.name, str)
    await Empty.spawn()
    local = Shard(3)
    assert_type(local.rows, int)


async def wrong() -> None:
    await Shard.spawn("3")  # expect: mypy[arg-type] pyright[reportArgumentType]
    await Shard.spawn()  # expect: mypy[call-arg] pyright[reportCallIssue]
    await Shard.spawn(3, sale=2.0)  # expect: mypy[call-arg] pyright[reportCallIssue]
    await Shard.options(nme="x").spawn(3)  # expect: mypy[call-arg] pyright[reportCallIssue]
    await Shard.options(max_restarts="3").spawn(3)  # expect: mypy[arg-type] pyright[reportArgumentType]
    await Shard.options(name="x").spawn("3")  # expect: mypy[arg-type] pyright[reportArgumentType]
    await Configured.spawn("x")  # expect: mypy[call-arg] pyright[reportCallIssue]
    await Empty.spawn(3)  # expect: mypy[call-arg] pyright[reportCallIssue]
    shard = await Shard.spawn(3)
    shard.missing()  # expect: mypy[attr-defined] pyright[reportAttributeAccessIssue]
