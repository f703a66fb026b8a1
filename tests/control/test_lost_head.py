"""Calls to actors that are lost with the head's host, in a simulated cluster whose head may come back elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

import zcactor as zc
from tests.control.movers import Tally
from tests.simulation.test_leader import leased
from zcactor.assembly.process import Process

PROMISED = 8.0
"""Virtual seconds; see ``docs/explanation/guarantees.md``."""


async def seconds_until_unavailable(call: Awaitable[Any]) -> float:
    """The seconds until a call fails."""
    begun = asyncio.get_running_loop().time()
    with pytest.raises(zc.ActorUnavailable, match="head has not answered"):
        await call
    return asyncio.get_running_loop().time() - begun


@pytest.mark.parametrize("when", ["open", "made then"])
@pytest.mark.parametrize("how", ["switched off", "killed"])
def test_calls_to_an_actor_that_is_lost_with_the_heads_host_end_in_the_promised_time(how: str, when: str) -> None:
    async def program(_: Process) -> list[float]:
        (node,) = [node.node_id for node in await zc.nodes() if node.host == "h0"]
        actors: list[Any] = [await Tally.options(node=node).spawn() for _ in range(2)]
        await asyncio.gather(*(actor.all() for actor in actors))
        calls = [actors[0].hold, actors[1].hold.options(idempotent=True, retries=3)]
        if when == "made then":
            lose()
        ends = [asyncio.create_task(seconds_until_unavailable(call(1))) for call in calls]
        if when == "open":
            await asyncio.sleep(0.1)
            lose()
        return await asyncio.gather(*ends)

    def lose() -> None:
        agent = made.cluster.hosts["h0"].agent
        if how == "switched off":
            made.cluster.switch_off("h0")
        elif agent is not None:
            made.cluster.kill(agent, "it was killed")

    with leased(3) as made:
        made.until_led(1)
        assert max(made.run(program, "h2")) <= PROMISED
