"""The talk between an agent and the command that started it."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any

from tests.control.agents import FakePool, FakeProcess
from zcactor.control.head import Head
from zcactor.control.node_agent import NodeAgent
from zcactor.control.ranks import Ranks
from zcactor.node.launcher import LauncherLine

PATIENCE = 60.0


class Talk:
    """The launcher's side of the talk with an agent."""

    def __init__(self, agent: Any) -> None:
        self.ended: asyncio.Queue[float] = asyncio.Queue()
        self._sock, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._serving = asyncio.create_task(LauncherLine(agent, self.ended.put_nowait).serve(theirs))

    async def start(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._sock)

    def say(self, **what: Any) -> None:
        self._writer.write(json.dumps(what).encode() + b"\n")

    async def told(self) -> Any:
        async with asyncio.timeout(PATIENCE):
            return json.loads(await self._reader.readline())

    async def close(self) -> None:
        self._writer.close()
        await self._serving
        await self._writer.wait_closed()


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


async def test_a_member_tells_the_end() -> None:
    member = NodeAgent(FakeProcess(), FakePool())  # type: ignore[arg-type]
    await member.run_over(1, "nobody listens yet")
    talk = Talk(member)
    await talk.start()
    talk.say(watch=False)  # answered by nothing; it shows that the agent listens
    talk.say(end=[3, "", 5.0])
    while member.over.__qualname__ == "NodeAgent.__init__.<locals>.<lambda>":
        await asyncio.sleep(0)
    await member.run_over(143, "it was told to end")
    assert await talk.told() == {"over": [143, "it was told to end"]}
    await talk.close()
    assert talk.ended.get_nowait() == 0.0
    assert talk.ended.empty()
