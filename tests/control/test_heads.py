"""The places of heads that nodes and programs are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from zcactor.control.heads import Heads
from zcactor.errors import ConnectionLost
from zcactor.process.cluster import HeadNews


class Session:
    """A session, which may have ended."""

    def __init__(self, name: bytes) -> None:
        self.peer_process = name


class World:
    """A head's process with nodes and programs."""

    def __init__(self) -> None:
        self.told: list[tuple[bytes, list[str]]] = []
        self.lost: set[bytes] = set()
        self.used: dict[bytes, Any] = {name: Session(name) for name in (b"node", b"program", b"worker")}
        nodes: Any = SimpleNamespace(
            drivers={b"program": None, b"gone": None}, by_id={"node": SimpleNamespace(process=b"node")}
        )
        process: Any = SimpleNamespace(sessions=SimpleNamespace(used=self.used), requests=self)
        self.heads = Heads(process, nodes)

    async def ask(self, session: Session, method: Any, places: list[str]) -> None:
        """Take a request."""
        assert method is HeadNews.heads_are
        if session.peer_process in self.lost:
            raise ConnectionLost("it has ended", False)
        self.told.append((session.peer_process, places))


async def test_nodes_and_programs_are_told_each_change_once() -> None:
    world = World()
    heads = world.heads
    await heads.tell()
    assert world.told == [], "no others can lead"
    heads.own, heads.all = "a:1", ["0:1", "a:1", "b:1"]
    assert heads.standbys == ["0:1", "b:1"]
    await heads.tell()
    await heads.tell()
    assert sorted(world.told) == [(b"node", ["a:1", "0:1", "b:1"]), (b"program", ["a:1", "0:1", "b:1"])]
    world.told.clear()
    heads.all = ["a:1"]
    world.lost.add(b"node")
    await heads.tell()
    assert world.told == [(b"program", ["a:1"])]
    world.lost.clear()
    await heads.tell()
    assert world.told[1:] == [(b"node", ["a:1"])], "it is told the next time"


async def test_a_connection_is_told_anew() -> None:
    world = World()
    world.heads.all = ["a:1"]
    await world.heads.tell()
    world.used[b"node"] = Session(b"node")
    await world.heads.tell()
    assert [name for name, _ in world.told].count(b"node") == 2
