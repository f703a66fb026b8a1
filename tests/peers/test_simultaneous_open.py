"""Two processes connect to each other at the same moment: one connection stays, and no call is lost or reordered."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.assembly.test_process import PATIENCE, _call, _settled
from tests.simulation.clusters import bench
from zcactor.api.future import ObjectRef
from zcactor.api.remote_actor import RemoteActor
from zcactor.assembly.process import Process
from zcactor.buggify import decided_by
from zcactor.ids import new_actor
from zcactor.interface import Interface
from zcactor.objectstore.store import Store
from zcactor.observe.stats import stats_of
from zcactor.peers import simultaneous_open
from zcactor.process import context
from zcactor.rpc.services import Services
from zcactor.transport.loopback.connection import LoopbackFaults
from zcactor.transport.loopback.endpoint import LoopbackEndpoint, LoopbackNetwork

CALLS = 12


class Log:
    """An actor that notes its calls in order."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.kept: Any = None
        self.go: asyncio.Event = asyncio.Event()

    async def note(self, number: int) -> int:
        self.seen.append(number)
        return number

    async def wait(self) -> None:
        await self.go.wait()

    async def keep(self, array: np.ndarray[Any, Any] | None) -> float:
        self.kept = array
        return 0.0 if array is None else float(array.sum())

    async def give(self) -> np.ndarray[Any, Any]:
        return zc.full(5000, 3.0)


class Two:
    """Two listening processes, each with a handle to an actor in the other."""

    def __init__(self, seed: int, turns: int, *, maps: bool = True, held: bool = False) -> None:
        self.held = held
        """Whether processes learn of incoming connections only by `deliver`."""
        self._arrived: list[tuple[Process, Any]] = []
        network = LoopbackNetwork(seed=seed, faults=LoopbackFaults(delay_turns=turns), maps=maps)
        self.processes: list[Process] = []
        self.logs: list[Log] = []
        self.actors: list[RemoteActor] = []
        """For each process, its handle to the other's actor."""
        for _ in range(2):
            name = os.urandom(16)
            store = Store(4 << 20, name)
            endpoint: Any = LoopbackEndpoint(
                network, name, (store.arena.address, store.arena.nbytes, store.arena), 16, 1024
            )
            config = zc.Config(eager_limit=1024, recv_depth=16)
            self.processes.append(Process(name, "worker", config, asyncio.get_running_loop(), store, endpoint))
        for process, other in (self.processes, self.processes[::-1]):
            index = other.hosts.take_index()
            log = Log()
            other.hosts.add(index, Log, "Log").adopt(log)
            self.logs.append(log)
            self.actors.append(
                RemoteActor(process, new_actor(), Interface.of(Log), (other.process, index), None, "default", 100, 0)
            )

    async def __aenter__(self) -> Two:
        context.set_current(self.processes[0])
        for process in self.processes:
            await process.endpoint.start(functools.partial(self._accept, process))
        return self

    def _accept(self, process: Process, connection: Any) -> None:
        self._arrived.append((process, connection))
        if not self.held:
            self.deliver()

    def deliver(self) -> None:
        arrived, self._arrived = self._arrived, []
        for process, connection in arrived:
            process.connections.accepted(connection)

    async def opened(self, count: int) -> None:
        """Wait until that many connections have arrived, and each process has sent by its own connection."""
        while len(self._arrived) < count or not all(actor.session for actor in self.actors):
            await asyncio.sleep(0)

    async def __aexit__(self, *_: object) -> None:
        context.clear_current()
        for log in self.logs:
            log.kept = None
        for process in self.processes:
            await process.close()

    def connections(self) -> list[int]:
        return [stats_of(process).connections for process in self.processes]

    def leases(self) -> list[int]:
        return [sum(session.leases.total for session in process.sessions.all()) for process in self.processes]


async def calls_of(actor: RemoteActor, gap: int) -> None:
    """Make calls in a row, with a few turns of the loop between them; each is sent before the last one's answer."""
    waiting = []
    for number in range(CALLS):
        waiting.append(asyncio.ensure_future(_call(actor, "note", number)))
        for _ in range(gap):
            await asyncio.sleep(0)
    assert await asyncio.gather(*waiting) == list(range(CALLS))


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_thousand_times_with_drawn_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    # The next look is in the loop's next turn, as all steps are here.
    monkeypatch.setattr(simultaneous_open, "_FIRST_LOOK", 0)
    for seed in range(500):  # on each of the loops
        drawn = random.Random(seed)
        async with asyncio.timeout(PATIENCE), Two(seed, turns=seed % 23, held=True) as two:
            calling = [asyncio.ensure_future(calls_of(actor, gap=drawn.randrange(4))) for actor in two.actors]
            await two.opened(2)
            for _ in range(drawn.randrange(40)):
                await asyncio.sleep(0)
            two.deliver()
            assert two.connections() == [2, 2]
            await asyncio.gather(*calling)
            assert [log.seen for log in two.logs] == [list(range(CALLS))] * 2
            while two.connections() != [1, 1]:  # without `_settled`'s collections: there are a thousand rounds
                await asyncio.sleep(0)
            await asyncio.gather(*[_call(actor, "note", CALLS) for actor in two.actors])
            assert two.connections() == [1, 1]


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("opener", [0, 1])
async def test_a_connection_that_the_peer_has_lost_has_no_twin(opener: int, maps: bool) -> None:
    """The peer's next connection ends the lost one, with its leases."""
    async with asyncio.timeout(PATIENCE), Two(3, turns=2, maps=maps) as two:
        first, second = two.processes
        array = zc.full(5000, 2.0)
        assert await _call(two.actors[opener], "note", 0) == 0
        assert await _call(two.actors[0], "keep", array) == 10000.0
        (old,), (lost,) = first.sessions.all(), second.sessions.all()
        old.leases.grant(77, array)
        for process, session in ((first, old), (second, lost)):  # no head is here to tell what became of the actors
            for actor in process.sessions.unwatch(session):
                actor.leave(session)
        lost.connection_lost(zc.ConnectionLost("its host has not answered", maybe_executed=True))
        assert await _call(two.actors[1], "note", 1) == 1
        await _settled(two.connections, [1, 1])
        (new,) = first.sessions.all()
        assert new is not old and first.sessions.used == {second.process: new}
        assert (old.leases.total, new.leases.total, new.twin) == (0, 0, None)
        with pytest.raises(zc.ConnectionLost, match="has lost the connection"):
            first.requests.ask(old, Services.ping)
        assert await _call(two.actors[0], "note", 2) == 2
        two.logs[1].kept = None


async def test_a_twin_that_ends_before_it_is_used() -> None:
    async with asyncio.timeout(PATIENCE), Two(1, turns=0) as two:
        actor = two.actors[0]
        assert await _call(actor, "note", 1) == 1
        old = actor.session
        assert old is not None
        ended: Any = SimpleNamespace(closed=zc.ConnectionLost("it broke"), successor=None)
        ended.in_use = ended
        await actor.change(old, ended)
        assert actor.session is old, "the twin has told its end already, and would be used for ever"
        assert await _call(actor, "note", 2) == 2


async def test_the_smaller_ones_connection_stays_and_the_other_waits_for_open_calls() -> None:
    async with asyncio.timeout(PATIENCE), Two(1, turns=5, held=True) as two:
        waiting = [asyncio.ensure_future(_call(actor, "wait")) for actor in two.actors]
        await two.opened(2)
        two.deliver()
        assert two.connections() == [2, 2]
        smaller = min(process.process for process in two.processes)
        await _settled(lambda: [actor.session and actor.session.opener for actor in two.actors], [smaller] * 2)
        await asyncio.gather(*[_call(actor, "note", 1) for actor in two.actors])
        assert two.connections() == [2, 2], "a call is open on each"
        for log in two.logs:
            log.go.set()
        await asyncio.gather(*waiting)
        await _settled(two.connections, [1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("maps", [True, False])
async def test_leases_of_both_are_released_by_the_one_that_stays(maps: bool) -> None:
    async with asyncio.timeout(PATIENCE), Two(2, turns=5, maps=maps, held=True) as two:
        arrays = [process.store.empty(5000) for process in two.processes]
        for array in arrays:
            array[...] = 1.0
        kept = asyncio.gather(*[_call(actor, "keep", array) for actor, array in zip(two.actors, arrays, strict=True)])
        given = asyncio.gather(*[_call(actor, "give") for actor in two.actors])
        await two.opened(2)
        two.deliver()
        assert await kept == [5000.0] * 2
        results = await given
        await _settled(two.connections, [1, 1])
        if maps:
            assert two.leases() == [2, 2]
        assert [float(result.sum()) for result in results] == [15000.0] * 2
        assert [float(log.kept.sum()) for log in two.logs] == [5000.0] * 2
        del results, given, kept
        for log in two.logs:
            log.kept = None
        gc.collect()
        await _settled(two.leases, [0, 0])
        assert two.connections() == [1, 1]
        assert all(actor.session is not None and actor.session.closed is None for actor in two.actors)


@pytest.mark.slow
async def test_a_result_that_is_not_read_yet_is_brought_by_the_one_that_stays() -> None:
    async with asyncio.timeout(PATIENCE), Two(4, turns=5, maps=False, held=True) as two:
        results: list[ObjectRef[Any]] = [
            ObjectRef(actor.call(actor.interface.by_name["give"], (), {}, None, 0)) for actor in two.actors
        ]  # fmt: skip
        await two.opened(2)
        two.deliver()
        await _settled(two.connections, [1, 1])
        assert [float((await result).sum()) for result in results] == [15000.0] * 2
        del results
        gc.collect()
        await _settled(two.leases, [0, 0])


@pytest.mark.parametrize("lost", [0, 1])
async def test_one_of_them_is_lost_and_the_other_goes_on(lost: int) -> None:
    async with asyncio.timeout(PATIENCE), Two(3, turns=5, held=True) as two:
        caller = two.processes[0]
        array = caller.store.empty(5000)
        array[...] = 1.0
        holding = asyncio.ensure_future(_call(two.actors[0], "keep", array))
        waiting = [asyncio.ensure_future(_call(actor, "wait")) for actor in two.actors]
        await two.opened(2)
        two.deliver()
        assert two.connections() == [2, 2]
        assert await holding == 5000.0
        session = sorted(caller.sessions.all(), key=lambda session: session.is_replaced)[lost]
        session.connection.abort()
        for log in two.logs:
            log.go.set()
        await asyncio.wait(waiting)
        await _settled(two.connections, [1, 1])
        assert sum(each.leases.total for each in caller.sessions.all()) == 1
        session = await caller.connections.connect(two.processes[1].process)
        assert await caller.requests.ask(session, Services.ping) == os.getpid()


@pytest.mark.parametrize("agreed", [False, True])
async def test_one_that_is_about_to_be_closed_for_idleness_has_a_twin_too(agreed: bool) -> None:
    """The second connection arrives when the first one's end has proposed to close it, or has agreed to close it."""
    async with asyncio.timeout(PATIENCE), Two(5, turns=3, held=True) as two:
        first, second = two.processes
        calls = [asyncio.ensure_future(_call(actor, "note", 1)) for actor in two.actors]
        await two.opened(2)
        (late,) = [arrived for arrived in two._arrived if arrived[0] is first]
        two._arrived.remove(late)
        two.deliver()
        assert two.connections() == [1, 2]
        await calls[0]
        (idle,) = first.sessions.all()
        assert first.idle_reaper is not None
        if agreed:
            idle.parted = True
            first.idle_reaper._leave(idle)
        else:
            proposing = asyncio.ensure_future(first.idle_reaper._propose(idle))
            await asyncio.sleep(0)
        assert first.sessions.is_leaving(idle) and not first.sessions.used
        first.connections.accepted(late[1])
        (accepted,) = [session for session in first.sessions.all() if session is not idle]
        assert accepted.twin is idle and accepted.leases is idle.leases
        await _settled(lambda: first.sessions.is_leaving(idle), False)  # once the greeting shows that they are twins
        await calls[1]
        array = second.store.empty(5000)
        array[...] = 2.0
        assert await _call(two.actors[1], "keep", array) == 10000.0
        if agreed:
            assert first.sessions.used[second.process] is accepted, "the peer may close the other"
            assert not first.idle_reaper.close_if_idle(idle), "it asks again, and is refused"
        else:
            await proposing
        del array
        two.logs[0].kept = None
        two.logs[1].kept = None
        gc.collect()
        await _settled(two.leases, [0, 0])
        await _settled(two.connections, [1, 1])
        assert await asyncio.gather(*[_call(actor, "note", 2) for actor in two.actors]) == [2, 2]


@zc.actor
class Late:
    """An actor whose result is known after it was passed on."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    @zc.method
    async def let_go(self) -> None:
        """Have `array` return."""
        self.go.set()

    @zc.method
    async def array(self) -> np.ndarray[Any, Any]:
        """An array, once `let_go` was called."""
        await self.go.wait()
        return zc.ones(10_000)

    @zc.method
    def total(self, array: np.ndarray[Any, Any]) -> float:
        """The sum of an array."""
        return float(array.sum())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_bytes_that_are_read_by_the_one_that_goes(seed: int) -> None:
    """The maker of a result and its reader connect to each other at the same moment. The connection by which the result
    came is closed before its bytes are read, or while they are read."""
    rng = random.Random(seed)
    places = {"connect", "retire", "pull", "push refused"}

    async def program(process: Process) -> None:
        _, first, second = [node.node_id for node in await zc.nodes()]
        for _ in range(20):
            maker = await Late.options(node=first).spawn()
            reader = await Late.options(node=second).spawn()
            result = maker.array()
            early = reader.total(result)
            await asyncio.sleep(rng.choice([0, rng.random() / 10]))
            await maker.let_go()
            assert await early == 10_000
            assert await reader.total(result) == 10_000
            assert process.counters.bytes_received == 0, "they go from the maker to the reader"

    with bench(3) as made, decided_by(lambda place: place in places and rng.random() < 0.3):
        made.run(program)
