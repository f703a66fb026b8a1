"""The talk between an agent and the command that started it."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from tests.control.agents import FakePool, FakeProcess
from zcactor.control.head import Head
from zcactor.control.membership import Ranks
from zcactor.control.node_agent import NodeAgent
from zcactor.node.launcher import LauncherLine
from zcactor.process.epochs import KnownEpoch

PATIENCE = 60.0


class Talk:
    """The launcher's side of the talk with an agent."""

    def __init__(self, agent: Any) -> None:
        self.ended: asyncio.Queue[float] = asyncio.Queue()
        self._sock, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self.line = LauncherLine(agent, self.ended.put_nowait)

    async def start(self) -> None:
        self.line.ready(self._theirs, "n@host:1")
        self._serving = asyncio.create_task(self.line.serve(self._theirs))
        self._reader, self._writer = await asyncio.open_connection(sock=self._sock)
        assert await self._reader.readline() == b"rn@host:1\n"

    def say(self, **what: Any) -> None:
        self._writer.write(json.dumps(what).encode() + b"\n")

    async def told(self) -> Any:
        async with asyncio.timeout(PATIENCE):
            return json.loads(await self._reader.readline())

    @staticmethod
    def gone() -> socket.socket:
        """The agent's end of a socket whose other end is closed."""
        ours, theirs = socket.socketpair()
        theirs.close()
        ours.setblocking(False)
        return ours

    async def close(self) -> None:
        self._writer.close()
        await self._serving
        await self._writer.wait_closed()
        self._theirs.close()


def a_head() -> Head:
    """A head of which only the members are there."""
    head = Head.__new__(Head)
    told: list[tuple[Any, ...]] = []

    def tell_over(*args: Any) -> None:
        told.append(args)

    head.members = SimpleNamespace(  # type: ignore[assignment]
        ranks=Ranks({"host": "n0", "pid": 1, "rank": 0}), tell_over=tell_over, told=told
    )
    return head


async def test_the_head_tells_ranks_and_is_told_the_end() -> None:
    head = a_head()
    talk = Talk(head)
    await talk.start()
    talk.say(watch=True)
    assert await talk.told() == {"ranks": [[0, "n0", 1]]}
    head.members.ranks.join("b", {"host": "n1", "pid": 2, "rank": 1})
    assert await talk.told() == {"ranks": [[0, "n0", 1], [1, "n1", 2]]}
    talk.say(end=[3, "because", 5.0])
    async with asyncio.timeout(PATIENCE):
        assert await talk.ended.get() == 5.0
    assert head.members.told == [(3, "because")]  # type: ignore[attr-defined]
    await talk.close()
    assert talk.ended.get_nowait() == 0.0


@pytest.mark.parametrize("early", [True, False])
async def test_a_member_tells_the_end(early: bool) -> None:
    """A run may be over before the node knows that it has joined."""
    member = NodeAgent(FakeProcess(), FakePool(), KnownEpoch())  # type: ignore[arg-type]
    talk = Talk(member)
    if early:
        await member.run_over(1, 143, "it was told to end")
    await talk.start()
    if not early:
        talk.say(end=[3, "", 5.0])  # which is for heads only
        await member.run_over(1, 143, "it was told to end")
    assert await talk.told() == {"over": [143, "it was told to end"]}
    await talk.close()
    assert talk.ended.get_nowait() == 0.0
    assert talk.ended.empty()


async def test_a_launcher_that_is_gone() -> None:
    member = NodeAgent(FakeProcess(), FakePool(), KnownEpoch())  # type: ignore[arg-type]
    talk = Talk(member)
    await talk.start()
    await talk.close()
    with talk.gone() as control:
        talk.line.ready(control, "n@host:1")
        await member.run_over(1, 1, "nobody listens")


class Telling(Ranks):
    """Ranks that change at the moment when somebody follows them."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "changed":
            value()


async def test_a_rank_that_leaves_when_the_launcher_is_gone() -> None:
    head = a_head()
    head.members.ranks = Telling({"host": "n0", "pid": 1, "rank": 0})
    ended: list[float] = []
    with Talk.gone() as control:
        async with asyncio.timeout(PATIENCE):
            await LauncherLine(head, ended.append).serve(control)
    assert ended == [0.0]
