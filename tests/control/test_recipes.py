"""Recipes that agents hold: their places, and actors that a later head starts again from them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.cluster.hosts import KEEPER, Hosts
from tests.cluster.test_daemon import HELPERS
from tests.driver.programs import Program, until
from tests.node.test_head_state import PATIENCE, begin, end, kill
from tests.simulation.clusters import Bench, Keeper, bench
from zcactor.assembly.process import Process
from zcactor.control import recipes
from zcactor.control.actor_record import ActorRecord
from zcactor.control.entries import read
from zcactor.control.file_log import look_into
from zcactor.control.head import Head
from zcactor.control.node_agent import NodeAgent
from zcactor.control.recipe_shelf import RecipeShelf
from zcactor.process.cluster import MembershipService
from zcactor.token import read_token_file


@zc.actor
class Holding:
    """An actor with an array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @zc.method
    def size(self) -> int:
        """The number of elements."""
        return len(self.array)


def head_of(made: Bench) -> Head:
    head = made.cluster.hosts["h0"].node
    assert isinstance(head, Head)
    return head


def shelves(made: Bench) -> dict[str, int]:
    """The bytes of recipes that the agents hold, by the ids of the nodes."""
    agents = [host.node for host in made.cluster.hosts.values() if isinstance(host.node, NodeAgent)]
    return {agent._process.process.hex(): agent._recipes.nbytes for agent in agents}


def placed(made: Bench, handle: Any) -> ActorRecord:
    """The record of an actor. Its recipe is held by the agents that the record names, and by no others."""
    record = head_of(made)._actors.known(handle._remote.actor_id)
    named = {holder.hex() for holder in record.recipe_holders} - {head_of(made).process.process.hex()}
    assert {node for node, nbytes in shelves(made).items() if nbytes} == named
    assert (record.recipe is None) == (len(named) == 2), "with one other holder the head is the second one"
    return record


async def spawn(size: int = 20_000, **options: Any) -> Any:
    return await Holding.options(**{"max_restarts": 1, **options}).spawn(np.ones(size))


async def until_held(made: Bench, handle: Any, *nodes: str) -> None:
    """Wait until these nodes hold an actor's recipe, by its record."""
    record = head_of(made)._actors.known(handle._remote.actor_id)
    while {holder.hex() for holder in record.recipe_holders} != set(nodes):
        await asyncio.sleep(0.1)
    placed(made, handle)


def test_two_agents_hold_a_recipe_with_arrays_as_long_as_the_actor_lives() -> None:
    async def program(_: Process) -> None:
        here, one, two, three = [node.node_id for node in await zc.nodes()]
        assert not any(shelves(made).values())
        for node in (one, two, three):
            handle = await spawn(node=node)
            holders = [holder.hex() for holder in placed(made, handle).recipe_holders]
            assert holders[0] == node, "the agent of its node is one of them"
            assert len(holders) == 2
            await zc.kill(handle)
            await asyncio.sleep(1)
            assert not any(shelves(made).values())
        held: Any = [await spawn(max_restarts=0), await Keeper.options(max_restarts=1).spawn()]
        assert not any(shelves(made).values()), "one is never started again, and the other one is in the log"
        again = await spawn(node=here)
        assert len(placed(made, again).recipe_holders) == 2
        record = placed(made, again)
        assert record.worker is not None
        record.worker.kill("the test ends it")
        while record.restarts == 0 or record.state != "alive":
            await asyncio.sleep(0.1)
        assert await again.size() == 20_000
        del held

    with bench(4) as made:
        made.run(program)
        assert not made.world.problems


def test_the_head_holds_a_recipe_where_there_are_not_two_agents() -> None:
    async def program(_: Process) -> None:
        handle = await spawn()
        record = placed(made, handle)
        assert record.recipe is not None
        assert record.recipe_holders == [head_of(made).process.process]
        made.cluster.start_agent("h1")
        while len(nodes := await zc.nodes()) < 2:
            await asyncio.sleep(0.1)
        await until_held(made, handle, nodes[1].node_id)
        made.cluster.start_agent("h2")
        while len(nodes := await zc.nodes()) < 3:
            await asyncio.sleep(0.1)
        await until_held(made, handle, nodes[1].node_id, nodes[2].node_id)
        made.cluster.switch_off("h1")
        await until_held(made, handle, nodes[2].node_id)
        made.cluster.switch_off("h2")
        while len(await zc.nodes()) > 1:
            await asyncio.sleep(0.1)
        assert await handle.size() == 20_000

    with bench(1) as made:
        made.run(program, patience=200.0)


def test_an_agent_without_room_holds_nothing_more() -> None:
    async def program(_: Process) -> None:
        one, two, three = [node.node_id for node in await zc.nodes()][1:]
        agent = made.cluster.hosts["h1"].node
        assert isinstance(agent, NodeAgent)
        agent._recipes = RecipeShelf(limit=1000)
        handle = await spawn(node=one)
        assert {holder.hex() for holder in placed(made, handle).recipe_holders} == {two, three}

    with bench(4) as made:
        made.run(program)


def test_no_agent_is_asked_to_hold_more_than_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "HELD_NBYTES", 200_000)

    async def program(_: Process) -> None:
        first, second = await spawn(node="pack"), await spawn()
        head = head_of(made)
        records = [head._actors.known(handle._remote.actor_id) for handle in (first, second)]
        assert [len(record.recipe_holders) for record in records] == [2, 1]
        assert records[1].recipe_holders == [head.process.process]
        await zc.kill(first)
        await asyncio.sleep(1)
        assert len(placed(made, await spawn()).recipe_holders) == 2

    with bench(3) as made:
        made.run(program)


def test_a_node_that_is_drained_gives_its_recipes_away_before_it_leaves() -> None:
    async def program(process: Process) -> None:
        _, one, two, three = [node.node_id for node in await zc.nodes()]
        handle = await spawn(node=one)
        (other,) = [each for each in (two, three) if placed(made, handle).recipe_holders[1].hex() == each]
        await process.head.ask(MembershipService.drain, other, 10.0, False)
        (left,) = {two, three} - {other}
        assert {holder.hex() for holder in placed(made, handle).recipe_holders} == {one, left}

    with bench(4) as made:
        made.run(program)


def test_a_recipe_gets_further_holders_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node is drained, and another node joins or leaves meanwhile."""
    hold = NodeAgent.hold_recipe
    asked: list[int] = []

    async def slowly(self: NodeAgent, epoch: int, key: int, recipe: Any) -> bool:
        asked.append(key)
        await asyncio.sleep(0.5)
        return await hold(self, epoch, key, recipe)

    monkeypatch.setattr(NodeAgent, "hold_recipe", slowly)

    async def program(process: Process) -> None:
        one = (await zc.nodes())[1].node_id
        handle = await spawn(node=one)
        record = placed(made, handle)
        other = record.recipe_holders[1].hex()
        draining = asyncio.ensure_future(process.head.ask(MembershipService.drain, other, 10.0, False))
        while len(asked) == 2:
            await asyncio.sleep(0.01)
        head_of(made).recipes.look()
        await draining
        await asyncio.sleep(2)
        assert len(asked) == 3
        assert len(placed(made, handle).recipe_holders) == 2

    with bench(4) as made:
        made.run(program)
        assert not made.world.problems


def test_a_spawn_that_is_cancelled_while_its_recipe_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    hold, opened = NodeAgent.hold_recipe, [False]
    asked: list[int] = []
    held: list[bool] = []

    async def slowly(self: NodeAgent, epoch: int, key: int, recipe: Any) -> bool:
        asked.append(key)
        while not opened[0]:
            await asyncio.sleep(0.1)
        held.append(await hold(self, epoch, key, recipe))
        return held[-1]

    monkeypatch.setattr(NodeAgent, "hold_recipe", slowly)

    async def program(_: Process) -> None:
        spawning = asyncio.ensure_future(spawn())
        while len(asked) < 2:
            await asyncio.sleep(0.1)
        spawning.cancel()
        await asyncio.wait([spawning])
        await asyncio.sleep(1)
        opened[0] = True
        while len(held) < 2:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        assert held == [True, True]
        assert not any(shelves(made).values())
        assert (await zc.available_resources())["CPU"] == 24.0

    with bench(3) as made:
        made.run(program)


FOUND = [1 << 20, 2 << 20]
USING = (
    KEEPER
    + HELPERS
    + """
@zc.actor
class Big:
    def __init__(self, array, text, keeper): self.array, self.text, self.keeper = array, text, keeper
    def found(self): return [float(self.array.sum()), len(self.text)]
    async def add(self): return await self.keeper.add()
    def pid(self): return os.getpid()

async def main():
    async with zc.init(config=zc.Config(address=ADDRESS, head_timeout=40.0)):
        far = next(each.node_id for each in await zc.nodes() if each.pid == FAR)
        keeper = await Keeper.options(node=far).spawn()
        big = await Big.options(name="big", node=PLACED and far, max_restarts=-1).spawn(
            np.ones(1 << 20), bytes(2 << 20), keeper
        )
        tell(found=await big.found(), added=await big.add())
        del keeper  # the actor and its recipe hold it
        for step in range(STEPS):
            while not os.path.exists(f"{GATE}{step}"):  # until the head was killed, and another one leads
                await asyncio.sleep(0.01)
            restarts = {each.name: each.restarts for each in await zc.actors()}["big"]
            node = {each.name: each.node_id for each in await zc.actors()}["big"]
            tell(lives=[await again(big.pid), restarts, node])
            try:
                while {each.name: each.restarts for each in await zc.actors()}["big"] == restarts:
                    await asyncio.sleep(0.01)
                tell(again=await again(big.found))
                if PLACED:
                    tell(added=await again(big.add))
            except KeyError:
                tell(again=None)
        try:
            while True:
                await again(big.pid)
                if os.path.exists(f"{GATE}end"):
                    break
                await asyncio.sleep(0.01)
            tell(died="")
        except zc.ActorDied as error:
            tell(died=error.cause)
    tell(left=True)
zc.run(main())
"""
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as found:
        yield found


class Played:
    """A program with an actor whose recipe is large, and has an array and a handle in it, beside a head and the nodes
    of two hosts.

    Args:
        hosts: the hosts.
        steps: how often the actor's process ends and starts again.
        placed: whether the actor has to be on the node of host ``"b"``, as the actor is whose handle it has.
    """

    def __init__(self, hosts: Hosts, steps: int, *, placed: bool = True) -> None:
        self.hosts = hosts
        self.head = begin(hosts)
        self.member = hosts.start("b", self.head)
        self.gate = f"{hosts.directory}/gate-"
        facts = (self.gate, steps, placed or None, self.member.record.pid)
        self.source = f"GATE, STEPS, PLACED, FAR = {facts!r}\n"

    def program(self) -> Program:
        return self.hosts.program(self.source + USING, self.head.record.address)

    def holders(self) -> list[str]:
        """The nodes that hold the actor's recipe, by the log."""
        state = {"actor": look_into(self.hosts.directory / "log", "actor", read_token_file(self.hosts.token_file))}
        (recipe,) = [each.recipe for each in read(state).actors.values() if each.recipe is not None]
        return [holder.hex() for holder in recipe.holders]

    def open(self, step: object) -> None:
        with open(f"{self.gate}{step}", "w"):
            pass


@pytest.mark.slow
def test_a_later_head_starts_an_actor_with_arrays_again(hosts: Hosts) -> None:
    played = Played(hosts, 2)
    head = played.head
    with played.program() as program:
        assert program.told("found") == FOUND
        for step in range(2):
            kill(head)
            head = begin(hosts)
            played.open(step)
            pid, restarts, _ = program.told("lives")
            assert restarts == step, "the same process goes on"
            os.kill(pid, signal.SIGKILL)
            assert program.told("again") == FOUND
            assert program.told("added") == step + 2, "the handle in the recipe has kept that actor alive"
        played.open("end")
        assert program.told("died") == ""
        assert program.status() == 0
    end(hosts, head, played.member)


@pytest.mark.slow
def test_another_agent_holds_it_where_one_has_gone(hosts: Hosts) -> None:
    played = Played(hosts, 2, placed=False)
    first = played.head
    assert first.member is not None
    nodes = {node.record.node: (where, node) for where, node in (("a", first.member), ("b", played.member))}
    with played.program() as program:
        assert program.told("found") == FOUND
        assert sorted(played.holders()) == sorted(nodes)
        played.open(0)
        _, _, lost = program.told("lives")
        where, node = nodes.pop(lost)
        kill(node)
        assert program.told("again") == FOUND
        until(lambda: played.holders() == list(nodes), "the log to have the loss", PATIENCE)
        joined = hosts.start(where, first)
        until(lambda: played.holders() == [*nodes, joined.record.node], "the new node to hold it", PATIENCE)
        played.open(1)
        _, _, lost = program.told("lives")
        assert [lost] == list(nodes)
        kill(first)
        kill(nodes[lost][1])
        begin(hosts)
        assert program.told("again", PATIENCE) == FOUND
        played.open("end")
        assert program.told("died") == ""
        assert program.status() == 0


@pytest.mark.slow
def test_an_actor_is_dead_where_both_holders_are_gone(hosts: Hosts) -> None:
    played = Played(hosts, 0)
    assert played.head.member is not None
    with played.program() as program:
        assert program.told("found") == FOUND
        for node in (played.head, played.head.member, played.member):
            kill(node)
        begin(hosts)
        assert "the nodes that held its class and arguments are gone, so it is not started again" in program.told(
            "died"
        )
        assert program.status() == 0
