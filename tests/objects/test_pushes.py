"""Results that go straight to the calls that have them as arguments: the way, and every race on it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from simulation.loop import SimLoop
from tests.simulation.clusters import Bench, bench
from zcactor.assembly.process import Process
from zcactor.buggify import decided_by
from zcactor.errors import ActorDied, ActorUnavailable, ConnectionLost, ProtocolError, ZcactorError
from zcactor.objects.pushes import Pushes
from zcactor.process.context import current
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import MAX_FORWARDS
from zcactor.testing.runtime import LoopbackRuntime

NODES = 3
LONGER = 0.002
"""Virtual seconds of a method that ends long after its call and the FORWARD frame have come."""


@zc.actor
class Link:
    """A part of a chain."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.seen: list[Any] = []

    @zc.method
    async def slowly(self, value: Any, seconds: float = LONGER) -> Any:
        """Add one on the loop, after a while."""
        await asyncio.sleep(seconds)
        return value + 1

    @zc.method
    def add(self, value: Any) -> Any:
        """Add one in a thread."""
        return value + 1

    @zc.method
    async def two(self, first: Any, second: Any = 0) -> list[Any]:
        """The arguments."""
        self.seen.append(first)
        return [first, second]

    @zc.method
    async def text(self, length: int) -> str:
        """A text, after a while."""
        await asyncio.sleep(LONGER)
        return "x" * length

    @zc.method
    async def keep(self, value: Any) -> None:
        """Keep a value."""
        self.kept = value

    @zc.method
    async def fails(self) -> int:
        """Raise an error, after a while."""
        await asyncio.sleep(LONGER)
        raise ValueError("not today")

    @zc.method
    async def moved(self, count: int) -> Any:
        """Hand an array over, after a while."""
        await asyncio.sleep(LONGER)
        return zc.move(zc.ones(count, np.float32))

    @zc.method
    async def array(self, count: int) -> Any:
        """An array of the store, after a while."""
        await asyncio.sleep(LONGER)
        return zc.ones(count, np.float32)

    @zc.method
    def total(self, array: Any) -> float:
        """The sum of an array."""
        return float(array.sum())

    @zc.method
    async def through(self, other: Any) -> int:
        """Pass the result of a method of this process on."""
        return int(await other.add(zc.current_actor().handle.slowly(1)))


class Scene:
    """Actors on hosts of their own, and a driver; the rare states of all processes are noted."""

    def __init__(self, made: Bench) -> None:
        self.bench = made
        self.processes: dict[bytes, tuple[Process, SimLoop]] = {}
        made.cluster.on_process = self._born

    def _born(self, process: Process, loop: SimLoop) -> None:
        self.processes[process.process] = process, loop
        process.pushes.noted = process.pushes.expectations.noted = self.bench.record.saw

    @property
    def saw(self) -> dict[str, int]:
        return self.bench.record.sometimes

    def loop_of(self, handle: Any) -> SimLoop:
        return self.processes[handle._remote.location[0]][1]

    def pushes(self) -> int:
        """Results pushed, by all living processes."""
        return sum(process.counters.pushes for process, loop in self.processes.values() if not loop.dead)

    async def links(self, count: int) -> list[Any]:
        """Actors on different hosts, connected to this process and to each other."""
        nodes = [node.node_id for node in await zc.nodes()]
        made: list[Any] = [await Link.options(node=nodes[number % NODES]).spawn() for number in range(1, count + 1)]
        for each in made:
            for other in made:
                await other.two(each.slowly(0))
        await asyncio.sleep(0.1)
        return made

    def check(self) -> None:
        """Nothing is left of the calls that have ended."""
        self.bench.wait(8.0)
        gc.collect()
        self.bench.wait(1.0)
        for process, loop in self.processes.values():
            if loop.dead or process.role == "agent":
                continue
            assert not process.pushes.expectations._waiting
            assert not process.pushes.expectations._early
            assert not process.pushes._unsent
            for session in process.sessions.all():
                peer = self.processes.get(session.peer_process)  # None: an agent, at which handles are leases
                assert not session.pending and not session.incoming
                assert peer is None or session.leases.total == 0, (process.role, session.leases._counts)
        assert not self.bench.world.problems


@pytest.fixture(params=["python", "native"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with bench(NODES) as made:
        made.cluster.native = request.param == "native"  # of drivers and workers
        yield Scene(made)


def test_a_result_goes_from_its_maker_to_the_call_that_needs_it(scene: Scene) -> None:
    async def program(process: Process) -> Any:
        a, b, c = await scene.links(3)
        before = scene.pushes(), process.counters.pushes
        value = await c.add(b.slowly(a.slowly(1)))
        return value, scene.pushes() - before[0], process.counters.pushes - before[1]

    assert scene.bench.run(program) == (4, 2, 0)
    scene.check()


def test_a_result_beside_an_argument_that_python_packs_goes_once(scene: Scene) -> None:
    async def program(process: Process) -> Any:
        a, b, _ = await scene.links(3)
        before = scene.pushes()
        value = await b.two(a.slowly(1), {"a": 1})
        return value, scene.pushes() - before

    assert scene.bench.run(program) == ([2, {"a": 1}], 1)
    scene.check()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_the_end_of_an_actor_answers_a_call_that_waits_for_a_promise(scene: Scene, end: str) -> None:
    async def program(process: Process) -> Any:
        a, _, _ = await scene.links(3)
        actors: list[Any] = [await Link.options(process="shared").spawn() for _ in range(2)]
        b = actors[0]
        for _ in range(2):
            await b.two(a.slowly(0))
        call = b.two(a.slowly(1, 0.6))
        await asyncio.sleep(0.03)
        ending = asyncio.ensure_future(zc.kill(b) if end == "kill" else zc.stop(b))
        began = process.loop.time()
        try:
            return await call
        except zc.ActorDied as error:
            return error.maybe_executed, process.loop.time() - began < 0.5
        finally:
            await ending

    assert scene.bench.run(program) == ((True, True) if end == "kill" else [2, 0])


def test_arrays_go_the_same_way(scene: Scene) -> None:
    async def program(process: Process) -> Any:
        a, b, _ = await scene.links(3)
        before = process.counters.bytes_received
        value = await b.total(a.array(50_000))
        return value, process.counters.bytes_received - before

    assert scene.bench.run(program) == (50_000.0, 0), "and not through the driver"
    scene.check()


def test_one_result_for_many_calls(scene: Scene) -> None:
    async def program(process: Process) -> Any:
        a, b, c = await scene.links(3)
        before = scene.pushes(), process.counters.pushes
        result = a.slowly(1)
        values = await zc.get([each.two(result, result) for each in (b, c, b)])
        several = [a.two(result), await result]
        return values, await several[0], scene.pushes() - before[0], process.counters.pushes - before[1]

    assert scene.bench.run(program) == ([[2, 2]] * 3, [2, 0], 6, 0)
    scene.check()


def test_the_owner_pushes_to_more_calls_than_an_answer_has_bits_for(scene: Scene) -> None:
    async def program(process: Process) -> Any:
        a, b, _ = await scene.links(3)
        before = process.counters.pushes
        result = a.slowly(1)
        values = await zc.get([b.two(result) for _ in range(MAX_FORWARDS + 5)])
        return values, process.counters.pushes - before

    assert scene.bench.run(program) == ([[2, 0]] * (MAX_FORWARDS + 5), 5)
    scene.check()


def test_maker_and_callee_in_one_process(scene: Scene) -> None:
    async def program(process: Process) -> Any:
        a, _, _ = await scene.links(3)
        before = process.counters.pushes
        values = [await a.two(a.slowly(1)), (await a.two(a.array(9_000)))[0].sum()]
        return values, process.counters.pushes - before

    assert scene.bench.run(program) == ([[2, 0], 9_000.0], 0)
    scene.check()


def test_the_owner_is_the_maker(scene: Scene) -> None:
    async def program(_: Process) -> Any:
        a, b, _ = await scene.links(3)
        return await a.through(b)

    assert scene.bench.run(program) == 3
    scene.check()


def test_the_owner_is_the_callee(scene: Scene) -> None:
    async def program(process: Process) -> Any:
        a, _, _ = await scene.links(3)
        before = process.counters.pushes
        return await a.through(a), process.counters.pushes - before

    assert scene.bench.run(program) == (3, 0)
    scene.check()


def test_an_answer_that_has_left_before_is_pushed_by_the_owner(scene: Scene) -> None:
    async def program(process: Process) -> Any:
        a, b, _ = await scene.links(3)
        values = []
        for step in range(30):
            result = a.add(step)
            await asyncio.sleep(step * 20e-6)
            values.append((await b.two(result))[0])
        return values, process.counters.pushes > 0

    assert scene.bench.run(program) == (list(range(1, 31)), True)
    assert scene.saw["owner pushes in place of the maker"]
    scene.check()


def test_without_a_connection_the_owner_pushes_and_the_maker_connects(scene: Scene) -> None:
    async def program(process: Process) -> Any:
        nodes = [node.node_id for node in await zc.nodes()]
        a, b = [await Link.options(node=node).spawn() for node in nodes[1:]]
        await a.two(0)
        await b.two(0)
        refusing = scene.bench.cluster.network.refusing
        hosts = {scene.loop_of(each).host for each in (a, b)}
        refusing.update(dict.fromkeys(hosts))
        values, pushes = [], []
        for _ in range(3):
            before = process.counters.pushes
            values.append(await b.two(a.slowly(1)))
            pushes.append(process.counters.pushes - before)
            await asyncio.sleep(0.1)
            refusing.clear()
        return values, pushes

    values, pushes = scene.bench.run(program)
    assert values == [[2, 0]] * 3
    assert (pushes[0], pushes[-1]) == (1, 0)
    assert scene.saw["maker has no connection to push by"] and scene.saw["no way to push"] == 1
    scene.check()


def test_a_call_that_waits_for_a_connection_gets_its_forward_later(scene: Scene) -> None:
    async def program(process: Process) -> Any:
        nodes = [node.node_id for node in await zc.nodes()]
        a, b = [await Link.options(node=node).spawn() for node in nodes[1:]]
        return await b.two(a.slowly(1)), await b.total(a.array(9_000))

    assert scene.bench.run(program) == ([2, 0], 9_000.0)
    scene.check()


def test_a_call_that_the_native_part_cannot_send_announces_its_promises_anew(scene: Scene) -> None:
    async def program(process: Process) -> Any:
        a, b, _ = await scene.links(3)
        session = b._remote.session
        results = [a.slowly(number) for number in range(3)]
        while session.credits.take():  # none is left: calls wait
            pass
        calls = [b.two(result) for result in results]
        assert len(session._backlog) == 3
        assert sum(len(result._call.pushes) for result in results) == 3
        session._credits_returned(session.credits.window - session.credits.available)
        return await zc.get(calls)

    assert scene.bench.run(program) == [[1, 0], [2, 0], [3, 0]]
    scene.check()


def test_a_failure_is_asked_for_and_fails_the_call(scene: Scene) -> None:
    async def program(_: Process) -> Any:
        a, b, _ = await scene.links(3)
        with pytest.raises(ValueError, match="not today"):
            await b.two(a.fails())
        return await b.two(1)

    assert scene.bench.run(program) == [1, 0]
    assert scene.saw["owner asked for a failure"] == 1
    scene.check()


def test_a_moved_array_is_shared_by_the_owner(scene: Scene) -> None:
    async def program(_: Process) -> Any:
        a, b, _ = await scene.links(3)
        return await b.total(a.moved(9_000))

    assert scene.bench.run(program) == 9_000.0
    scene.check()


@pytest.mark.parametrize("place", ["push refused", "push lost", "early push dropped"])
def test_what_is_not_pushed_comes_all_the_same(scene: Scene, place: str) -> None:
    async def program(_: Process) -> Any:
        a, b, _ = await scene.links(3)
        return await zc.get([b.two(a.slowly(number)) for number in range(5)])

    with decided_by(lambda each: each == place):
        assert scene.bench.run(program) == [[number + 1, 0] for number in range(5)]
    if place == "push lost":
        assert scene.saw["owner asked after a while"] >= 5
    scene.check()


def test_a_full_store_in_the_middle_fails_the_call_and_nothing_else() -> None:
    with bench(NODES, store_capacity=4 << 20) as made:
        scene = Scene(made)

        async def program(_: Process) -> Any:
            a, b, c = await scene.links(3)
            with pytest.raises(zc.OutOfMemory):  # at the maker, where the result is packed
                await b.two(a.text(5_000_000))
            await b.keep(a.array(400_000))
            await asyncio.sleep(2)  # virtual seconds: the callee has a copy, and the maker gets its memory back
            with pytest.raises(zc.OutOfMemory):  # at the callee, where the pushed array has no room
                await b.total(a.array(800_000))
            await asyncio.sleep(2)
            values = [await c.total(a.array(800_000))]
            await b.keep(None)
            await asyncio.sleep(2)
            return [*values, await b.total(a.array(800_000))]

        assert made.run(program) == [800_000.0] * 2
        scene.check()


# ---------------------------------------------------------------- kills and cancels at every step


class Race:
    """A chain of three calls, and something that happens in the middle of it."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.first_frame: int | None = None
        self.links: list[Any] = []
        self.promises: list[Any] = []
        self.outcome: Any = None

    async def _chain(self, _: Process) -> None:
        a, b, c = self.links = await self.scene.links(3)
        await asyncio.sleep(0.1)
        self.first_frame = self.scene.bench.cluster.network.frames
        self.promises = [a.slowly(1)]
        self.promises.append(b.slowly(self.promises[0]))
        self.promises.append(c.two(self.promises[1], self.promises[0]))
        try:
            self.outcome = await self.promises[2]
        except (ZcactorError, asyncio.CancelledError) as error:
            self.outcome = error.with_traceback(None)

    def play(self, after: int, act: Callable[[Race], None]) -> bool:
        """Run the chain, and `act` once `after` frames of it were sent. False when it has ended before that."""
        made = self.scene.bench
        driver = made.cluster.start_driver(f"driver{made.world.number('race')}", "h0", self._chain)

        def over() -> bool:
            return driver.main is not None and driver.main.done()

        def there() -> bool:
            return self.first_frame is not None and made.cluster.network.frames >= self.first_frame + after

        assert made.world.run(lambda: over() or there(), limit=made.world.now + 60)
        acted = not over()
        if acted:
            act(self)
            assert made.world.run(over, limit=made.world.now + 60), f"no end, {after} frames after the beginning"
        assert driver.main is not None
        driver.main.result()
        self.promises.clear()
        self.links.clear()
        return acted


def kill(number: int) -> Callable[[Race], None]:
    def act(race: Race) -> None:
        race.scene.bench.cluster.kill(race.scene.loop_of(race.links[number]), "killed by the test")

    return act


def cancel(number: int) -> Callable[[Race], None]:
    def act(race: Race) -> None:
        driver = race.scene.processes[race.promises[0]._call.owner][1]
        driver.at(race.scene.bench.world.now, race.promises[number].cancel)

    return act


def part(first: int, second: int) -> Callable[[Race], None]:
    """Break the connections between two actors."""

    def act(race: Race) -> None:
        one, other = (race.scene.processes[race.links[each]._remote.location[0]] for each in (first, second))
        for session in list(one[0].sessions.all()):
            if session.peer_process == other[0].process:
                one[1].at(race.scene.bench.world.now, session.connection.abort)

    return act


CANCELLED = (asyncio.CancelledError, zc.RemoteError)
"""The error of a call with a cancelled argument."""
DIED = (ActorDied, ActorUnavailable)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "errors"),
    [
        pytest.param(kill(0), DIED, id="the maker dies"),
        pytest.param(kill(1), DIED, id="the callee dies, which makes the next result"),
        pytest.param(kill(2), DIED, id="the last callee dies"),
        pytest.param(cancel(0), CANCELLED, id="the first call is cancelled"),
        pytest.param(cancel(1), CANCELLED, id="the second call is cancelled"),
        pytest.param(cancel(2), asyncio.CancelledError, id="the last call is cancelled"),
        pytest.param(part(0, 1), (), id="the connection of maker and callee breaks"),
        pytest.param(part(1, 2), (), id="the connection of the other two breaks"),
    ],
)
def test_at_every_step(scene: Scene, act: Callable[[Race], None], errors: Any) -> None:
    outcomes = []
    for after in range(1, 60):
        race = Race(scene)
        acted = race.play(after, act)
        outcome = race.outcome
        if isinstance(outcome, zc.RemoteError) and "was cancelled" not in str(outcome):
            outcome = outcome.original or outcome
        outcomes.append(outcome)
        assert outcome == [3, 2] or isinstance(outcome, errors), (after, outcome)
        if not acted:
            break
    else:
        raise AssertionError("the chain has no end")
    assert len(outcomes) > 8
    scene.check()


# ---------------------------------------------------------------- forged frames


def test_a_forward_frame_that_is_not_the_next_one_is_refused(scene: Scene) -> None:
    async def program(process: Process) -> None:
        session: Any = SimpleNamespace()
        incoming = Incoming(session, 5, 2, 0, b"")
        pushes: Pushes = process.pushes
        with pytest.raises(ProtocolError, match="FORWARD 1 of call 5 came after 0 others"):
            pushes.forward(incoming, 1, 77, process.process)
        pushes.forward(incoming, 0, 77, process.process)
        with pytest.raises(ProtocolError, match="FORWARD 0 of call 5 came after 1 others"):
            pushes.forward(incoming, 0, 77, process.process)
        assert [tuple(each) for each in incoming.forwards] == [(0, 77, process.process)]
        pushes.forward(incoming, 1, 78, b"x" * 16)  # nobody answers there
        await asyncio.sleep(30)

    scene.bench.run(program)
    assert scene.saw["no way to push"] == 1
    assert not scene.bench.world.problems


async def test_the_end_of_a_replaced_connection_has_nothing_asked_for(zc_runtime: LoopbackRuntime) -> None:
    pushes: Any = current().pushes
    peer = b"p" * 16
    expected = pushes.expectations.expect(peer, 1 << 32 | 1)
    assert expected is not None
    pushes._left(SimpleNamespace(peer_process=peer, is_replaced=True), object())
    assert not expected.asked, "all that it carried has come"
    pushes._left(SimpleNamespace(peer_process=peer, is_replaced=False), object())
    assert expected.asked, "the lost connection may have carried it"


# ---------------------------------------------------------------- the usual case, by the native part


TARGET = b"t" * 16


class Native:
    """The native part of a session, which writes as far as the test says."""

    def __init__(self, *, writes: bool = True) -> None:
        self.writes = writes
        self.pushed: list[Any] = []
        self.responses: list[Any] = []

    def push(self, *push: Any) -> bool:
        if self.writes:
            self.pushed.append(push)
        return self.writes

    def respond(self, *response: Any) -> bool:
        if self.writes:
            self.responses.append(response)
        return self.writes

    def pass_on(self, call_id: int, value: Any, more: bool, pushed: int, to: Native, key: int, word: int) -> Any:
        if not to.push(key, word, value):
            return False
        return True if self.respond(call_id, value, more, pushed) else None


class Caller:
    """The caller's session."""

    def __init__(self, wire: Native) -> None:
        self.wire = wire
        self.peer_process = b"\x05" + bytes(15)
        self.connection = SimpleNamespace(eager_limit=1000)
        self.incoming: dict[int, Incoming] = {}
        self.responses: list[Any] = []

    def respond(self, *response: Any, **more: Any) -> None:
        self.responses.append((response, more))


def a_call(caller: Caller, forwards: Any = ((0, 77, TARGET),)) -> Incoming:
    session: Any = caller
    incoming = caller.incoming[5] = Incoming(session, 5, 2, 0, b"")
    incoming.forwards = list(forwards)
    return incoming


def connected(wire: Native, **other: Any) -> Any:
    session = SimpleNamespace(wire=wire, closed=None, peer_hello=object())
    session.__dict__.update(other)
    pushes: Any = current().pushes
    pushes._sessions.used[TARGET] = session
    return session


async def test_a_plain_result_is_pushed_and_answered(zc_runtime: LoopbackRuntime) -> None:
    pushes: Any = current().pushes
    there, caller = Native(), Caller(Native())
    connected(there)
    try:
        assert pushes.plain(a_call(caller), 7, True)
    finally:
        del pushes._sessions.used[TARGET]
    assert there.pushed == [(77, 5, 7)]
    assert caller.wire.responses == [(5, 7, True, 1)] and not caller.responses


async def test_an_answer_that_python_has_to_write_tells_of_the_push(zc_runtime: LoopbackRuntime) -> None:
    pushes: Any = current().pushes
    caller = Caller(Native(writes=False))
    connected(Native())
    incoming = a_call(caller, [(0, 76, TARGET)])
    try:
        assert pushes.plain(incoming, 7, False)
    finally:
        del pushes._sessions.used[TARGET]
    (((answered, status, payload, _, _), more),) = caller.responses
    assert (answered, status, bytes(payload)) == (incoming, 0, b"\x07") and more == {"more": False, "pushed": 1}


@pytest.mark.parametrize(
    "why", ["two", "cancelled", "answered", "nobody", "theirs", "ended", "greeting", "value", "faults"]
)
async def test_another_result_goes_the_usual_way(zc_runtime: LoopbackRuntime, why: str) -> None:
    pushes: Any = current().pushes
    there, caller = Native(writes=why not in ("value", "theirs")), Caller(Native())
    forwards = [(0, 77, TARGET), (1, 78, TARGET)] if why == "two" else [(0, 77, TARGET)]
    incoming = a_call(caller, forwards)
    other: dict[str, Any] = {"closed": ConnectionLost("gone")} if why == "ended" else {}
    if why == "greeting":
        other = {"peer_hello": None}
    if why != "nobody":
        connected(there, **other)
    if why == "cancelled":
        incoming.cancelled = True
    if why == "answered":
        caller.incoming.clear()
    try:
        with decided_by(lambda _: False) if why == "faults" else contextlib.nullcontext():
            assert not pushes.plain(incoming, 7, False)
    finally:
        pushes._sessions.used.pop(TARGET, None)
    assert not there.pushed and not caller.responses
    assert not caller.wire.responses
