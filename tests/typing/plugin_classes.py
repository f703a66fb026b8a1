"""Code that the plugin keeps valid in mypy beyond pyright: annotations, inheritance, dataclasses, own ``spawn``."""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportInvalidTypeForm=false
# pyright: reportUntypedBaseClass=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportAttributeAccessIssue=false
# pyright: reportAssertTypeFailure=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_type

import zcactor as zc


@zc.actor
class Shard:
    kind = "shard"

    def __init__(self, rows: int) -> None:
        self.rows = rows


@zc.actor
class Mirror(Shard): ...


class Undecorated(Shard):
    def __init__(self, name: str) -> None:
        super().__init__(3)


@zc.actor(num_cpus=1)
@dataclass
class Settings:
    rows: int
    name: str = ""


@zc.actor
class Own:
    @classmethod
    def spawn(cls, text: str) -> str:
        return text


def pick(first: Shard, second: Mirror | None = None) -> type[Shard]:
    return type(first)


async def right() -> None:
    pick(await Shard.spawn(3), await Mirror.spawn(3))
    assert_type(await Mirror.spawn(3), Mirror)
    assert_type(await Undecorated.spawn("name"), Undecorated)
    assert_type(await Settings.options(name="s").spawn(3, name="x"), Settings)
    assert_type(Own.spawn("text"), str)
    assert_type(Shard.kind, str)


async def wrong() -> None:
    pick(await Settings.spawn(3))  # expect: mypy[arg-type]
    await Mirror.spawn("3")  # expect: mypy[arg-type]
    await Undecorated.spawn(3)  # expect: mypy[arg-type]
    await Settings.spawn()  # expect: mypy[call-arg]
