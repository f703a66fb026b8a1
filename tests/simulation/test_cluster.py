"""Hosts, agents, workers and drivers of a simulated cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import zcactor as zc
from tests.simulation.clusters import Keeper, bench
from zcactor.runtime.process import Process


def test_actors_on_all_nodes_are_called_with_arrays() -> None:
    async def program(process: Process) -> list[float]:
        array = zc.ones(10_000, np.float64)
        keepers: list[Any] = [await Keeper.options(node="spread").spawn() for _ in range(3)]
        assert await asyncio.gather(*(keeper.keep(array) for keeper in keepers)) == [10_000] * 3
        assert len(await zc.nodes()) == 3
        assert process.store.stats().used >= array.nbytes
        return [await keeper.total() for keeper in keepers]

    with bench(3) as made:
        assert made.run(program) == [10_000.0] * 3
        assert not made.world.problems


def test_a_killed_agent_takes_its_workers_along_and_the_head_notices() -> None:
    handles: list[Any] = []

    async def spawn(_: Process) -> None:
        nodes = [node.node_id for node in await zc.nodes()]
        handles.append(await Keeper.options(node=nodes[1]).spawn())
        assert await handles[0].keep("abc") == 3

    with bench(2) as made:
        made.run(spawn)
        host = made.cluster.hosts["h1"]
        assert host.agent is not None
        assert [loop.host for loop in made.world.loops.values() if loop.name[0] == "w"] == ["h1"]
        made.cluster.kill(host.agent, "killed")
        assert not [loop for loop in made.world.loops.values() if loop.name[0] == "w"]
        made.wait(12)
        head = made.cluster.hosts["h0"].node
        assert len(head._nodes.by_id) == 1  # type: ignore[union-attr]
        made.cluster.start_agent("h1")
        made.wait(1)
        assert len(head._nodes.by_id) == 2  # type: ignore[union-attr]
        handles.clear()


def test_a_host_that_was_off_comes_back_with_another_boot() -> None:
    with bench(2) as made:
        host = made.cluster.hosts["h1"]
        before = host.machine
        made.cluster.switch_off("h1")
        assert host.agent is None
        made.wait(15)
        head = made.cluster.hosts["h0"].node
        assert len(head._nodes.by_id) == 1  # type: ignore[union-attr]
        made.cluster.switch_on("h1")
        made.wait(1)
        assert host.machine != before
        assert made.cluster.joined == 3
        assert len(head._nodes.by_id) == 2  # type: ignore[union-attr]
