"""Actors at a real node: placing, deaths and restarts, names, owners and resources."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from zcactor.api.actor import ActorOptions
from zcactor.control.node_table import SHARED_WORKERS
from zcactor.driver import driver
from zcactor.ids import for_spawn
from zcactor.interface import Interface
from zcactor.process.cluster import HeadService
from zcactor.process.context import current

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


class Log:
    """An actor that notes its calls in a file, which shows the calls that had effects."""

    def __init__(self, path: str, data: Any = None) -> None:
        self.path = path
        self.data = data

    def note(self, number: int) -> int:
        with open(self.path, "a") as file:
            file.write(f"{number}\n")
        return number

    async def later(self, number: int) -> int:
        await asyncio.sleep(0)
        return self.note(number)

    @zc.method(retries=3, idempotent=True)
    def surely(self, number: int, die_once: str) -> int:
        if not os.path.exists(die_once):
            Path(die_once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    def pid(self) -> int:
        return os.getpid()

    def total(self) -> float:
        return float(self.data.sum())

    def restarts(self) -> int:
        return zc.current_actor().restarts

    def leave(self, status: int) -> None:
        os._exit(status)

    async def wait(self) -> None:
        await asyncio.Event().wait()

    def block(self) -> None:
        signal.pause()


class Fatal:
    """A class whose constructor ends the process while a file exists."""

    def __init__(self, path: str, status: int = 3) -> None:
        if os.path.exists(path):
            os._exit(status)

    def pid(self) -> int:
        return os.getpid()


class Raises:
    def __init__(self) -> None:
        raise ValueError("not today")


class Spawner:
    """An actor that spawns actors."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    async def spawn_log(self, path: str, lifetime: str) -> Any:
        actor = await logs.options(lifetime=lifetime).spawn(path)
        self.kept.append(actor)
        return actor

    def pid(self) -> int:
        return os.getpid()


@zc.actor
class LogActor(Log):
    """`Log` as a class with options."""


logs: Any = LogActor
spawn: Any = zc.spawn
"""`zc.spawn` without static types, which know decorated methods only."""


def options(cls: type, **options: Any) -> ActorOptions[..., Any]:
    """Options for a class that is not decorated."""
    return ActorOptions(cls, options)


@pytest.fixture
async def node() -> AsyncIterator[zc.Runtime]:
    async with asyncio.timeout(4 * PATIENCE), zc.init(num_cpus=4, resources={"slot": 2}) as node:
        yield node


async def state_of(handle: Any) -> zc.ActorInfo:
    """The node's record of an actor."""
    return next(info for info in await zc.actors() if info.actor_id == handle._remote.actor_id.hex())


async def until_dead(handle: Any) -> zc.ActorInfo:
    """Wait until the node records the actor's end."""
    async with asyncio.timeout(PATIENCE):
        while (info := await state_of(handle)).state != "dead":
            await asyncio.sleep(0.005)
    return info


async def free() -> dict[str, float]:
    return await zc.available_resources()


# ---------------------------------------------------------------- death


@pytest.mark.slow
async def test_an_idle_actor_is_killed(node: zc.Runtime, tmp_path: Path) -> None:
    actor = await spawn(Log, str(tmp_path / "log"))
    os.kill(await actor.pid(), signal.SIGKILL)
    with pytest.raises(zc.ActorDied, match=r"signal 9 \(SIGKILL\)") as caught:
        await actor.wait()
    assert caught.value.cause
    with pytest.raises(zc.ActorDied, match="SIGKILL") as again:
        await actor.pid()
    assert not again.value.maybe_executed
    assert "SIGKILL" in (await state_of(actor)).cause


@pytest.mark.slow
async def test_an_actor_exits_in_a_method(node: zc.Runtime, tmp_path: Path) -> None:
    actor = await spawn(Log, str(tmp_path / "log"))
    with pytest.raises(zc.ActorDied, match="exited with status 3") as caught:
        await actor.leave(3)
    assert caught.value.maybe_executed
    other = await spawn(Log, str(tmp_path / "log"))
    with pytest.raises(zc.ActorDied, match="SIGTERM"):
        await asyncio.gather(other.wait(), _send(await other.pid(), signal.SIGTERM))


async def _send(pid: int, number: int) -> None:
    os.kill(pid, number)


@pytest.mark.slow
async def test_each_call_in_flight_ends_once_and_has_effects_at_most_once(node: zc.Runtime, tmp_path: Path) -> None:
    kind = type(asyncio.get_running_loop()).__module__
    for seed in range(10):
        chance = random.Random(f"{kind} {seed}")
        path = tmp_path / f"log{seed}"
        actor = await spawn(Log, str(path))
        pid = await actor.pid()
        refs = [(actor.note if chance.random() < 0.5 else actor.later)(number) for number in range(100)]
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        if chance.random() < 0.7:
            await refs[chance.randrange(100)]
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            outcomes = await asyncio.gather(*refs, return_exceptions=True)
        noted = [int(line) for line in path.read_text().split()] if path.exists() else []
        assert len(noted) == len(set(noted))
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, int):
                assert outcome == number
                assert number in noted
            else:
                assert isinstance(outcome, zc.ActorDied), outcome
                assert "SIGKILL" in str(outcome)
                assert outcome.maybe_executed or number not in noted


@pytest.mark.slow
async def test_a_constructor_fails(node: zc.Runtime, tmp_path: Path) -> None:
    (before,) = await zc.nodes()
    with pytest.raises(ValueError, match="not today"):
        await spawn(Raises)
    path = tmp_path / "fatal"
    path.touch()
    with pytest.raises(zc.ActorDied, match="exited with status 3"):
        await spawn(Fatal, str(path))
    with pytest.raises(zc.ActorDied, match="SIGKILL"):
        await asyncio.gather(spawn(Blocks, str(tmp_path / "pid")), _kill_when_there(tmp_path / "pid"))
    causes = {info.class_name: info.cause for info in await zc.actors()}
    assert causes["Raises"] == "its constructor raised ValueError"
    assert causes["Fatal"] == "its process exited with status 3"
    assert before.workers == 0
    async with asyncio.timeout(PATIENCE):
        while (await zc.nodes())[0].workers:  # a process ends after its caller has the constructor's error
            await asyncio.sleep(0.005)


class Blocks:
    def __init__(self, path: str) -> None:
        Path(path + ".new").write_text(str(os.getpid()))
        os.rename(path + ".new", path)
        signal.pause()


async def _there(path: Path) -> None:
    async with asyncio.timeout(PATIENCE):
        while not path.exists():
            await asyncio.sleep(0.005)


async def _kill_when_there(path: Path) -> None:
    await _there(path)
    os.kill(int(path.read_text()), signal.SIGKILL)


# ---------------------------------------------------------------- restarts


@pytest.mark.slow
async def test_an_actor_is_restarted_up_to_its_limit(node: zc.Runtime, tmp_path: Path) -> None:
    data = zc.ones(1 << 16)
    actor = await logs.options(max_restarts=2, name="phoenix").spawn(str(tmp_path / "log"), data=data)
    pids = set()
    for turn in range(3):
        assert await actor.restarts() == turn
        assert await actor.total() == 1 << 16, "the array of the first start is still there, by reference"
        pid = await actor.pid()
        pids.add(pid)
        waiting = actor.wait()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(zc.ActorUnavailable if turn < 2 else zc.ActorDied, match="SIGKILL") as caught:
            await waiting
        assert caught.value.maybe_executed
        if turn < 2:
            assert f"it is being restarted, after a pause of {0.1 * 2**turn:g} s" in str(caught.value)
    assert len(pids) == 3
    with pytest.raises(zc.ActorDied, match="SIGKILL"):
        await actor.pid()
    info = await state_of(actor)
    assert (info.state, info.restarts) == ("dead", 2)
    with pytest.raises(zc.NoSuchActor):
        await zc.get_actor("phoenix")


@pytest.mark.slow
async def test_idempotent_calls_are_retried_after_a_restart(node: zc.Runtime, tmp_path: Path) -> None:
    actor = await logs.options(max_restarts=-1).spawn(str(tmp_path / "log"))
    refs = [actor.surely(number, str(tmp_path / "once")) for number in range(10)]
    assert await zc.get(refs, timeout=PATIENCE) == list(range(10))
    assert await actor.restarts() == 1
    dies = [await logs.options(max_restarts=0).spawn(str(tmp_path / "log")) for _ in range(1)]
    with pytest.raises(zc.ActorDied):
        await dies[0].surely(1, str(tmp_path / "twice"))


@pytest.mark.slow
async def test_a_large_recipe_survives_restarts(node: zc.Runtime, tmp_path: Path) -> None:
    text = "x" * (5 << 20)
    actor = await logs.options(max_restarts=1).spawn(str(tmp_path / "log"), data=Summed(text))
    os.kill(await actor.pid(), signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                assert await actor.total() == len(text)
            except zc.ActorUnavailable:
                continue
            break


class Summed:
    """A value that is pickled in-band."""

    def __init__(self, text: str) -> None:
        self.text = text

    def sum(self) -> int:
        return len(self.text)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [-1, 100])
async def test_a_constructor_that_kills_is_given_up(node: zc.Runtime, tmp_path: Path, limit: int) -> None:
    path = tmp_path / "fatal"
    actor = await options(Fatal, max_restarts=limit).spawn(str(path), 7)
    pid = await actor.pid()
    path.touch()
    os.kill(pid, signal.SIGKILL)
    info = await until_dead(actor)
    assert info.restarts == 3
    assert "status 7" in info.cause
    assert "not restarted" in info.cause
    with pytest.raises(zc.ActorDied, match="not restarted"):
        await actor.pid()


@pytest.mark.slow
async def test_a_constructor_that_raises_at_a_restart_ends_the_actor(node: zc.Runtime, tmp_path: Path) -> None:
    actor = await options(Fickle, max_restarts=5).spawn(str(tmp_path / "once"))
    os.kill(await actor.pid(), signal.SIGKILL)
    info = await until_dead(actor)
    assert info.restarts == 1
    assert "constructor raised RuntimeError when it was restarted: once is enough" in info.cause


class Fickle:
    def __init__(self, path: str) -> None:
        if os.path.exists(path):
            raise RuntimeError("once is enough")
        Path(path).touch()

    def pid(self) -> int:
        return os.getpid()


@pytest.mark.slow
async def test_an_actor_that_hangs_is_killed_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "HEARTBEAT", 0.01)
    monkeypatch.setattr(driver, "HANG_AFTER", 0.3)
    async with asyncio.timeout(PATIENCE), zc.init():
        watched = await logs.options(on_hang="kill").spawn(str(tmp_path / "log"))
        patient = await logs.options(on_hang="none").spawn(str(tmp_path / "log"))
        stopped = [await actor.pid() for actor in (watched, patient)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        left = patient.note(7)
        with pytest.raises(zc.ActorDied, match=r"did not respond for 0\.3 s"):
            await watched.note(1)
        assert not left.done()
        os.kill(stopped[1], signal.SIGCONT)
        assert await left == 7


# ---------------------------------------------------------------- owners, names, handles


@pytest.mark.slow
async def test_an_owned_actor_ends_with_its_owners_process(node: zc.Runtime, tmp_path: Path) -> None:
    spawner = await spawn(Spawner)
    owned = await spawner.spawn_log(str(tmp_path / "log"), "owned")
    detached = await spawner.spawn_log(str(tmp_path / "log"), "detached")
    assert await owned.pid() != await detached.pid()
    os.kill(await spawner.pid(), signal.SIGKILL)
    assert "owner" in (await until_dead(owned)).cause
    assert await detached.pid()
    with pytest.raises(zc.ActorDied, match="owner"):
        await owned.pid()


@pytest.mark.slow
async def test_a_handle_held_only_by_another_actor_keeps_it(node: zc.Runtime, tmp_path: Path) -> None:
    actor = await logs.spawn(str(tmp_path / "log"))
    keeper = await spawn(Keeper)
    await keeper.keep(actor)
    del actor
    assert await keeper.use() == 5
    await keeper.drop()
    async with asyncio.timeout(PATIENCE):
        while [info.state for info in await zc.actors() if info.class_name == "LogActor"] != ["dead"]:
            await asyncio.sleep(0.005)


class Keeper:
    def keep(self, actor: Any) -> None:
        self.actor = actor

    async def use(self) -> int:
        return int(await self.actor.note(5))

    def drop(self) -> None:
        del self.actor


@pytest.mark.slow
async def test_names(node: zc.Runtime, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    first = await logs.options(name="one").spawn(path)
    with pytest.raises(zc.NameTaken, match="'one'"):
        await logs.options(name="one").spawn(path)
    other = await logs.options(name="one", namespace="elsewhere").spawn(path)
    assert await zc.get_actor("one") == first
    assert await zc.get_actor("one", namespace="elsewhere") == other
    with pytest.raises(zc.NoSuchActor, match="named actors there: one"):
        await zc.get_actor("two")
    assert await logs.options(name="one", get_if_exists=True).spawn(path) == first
    await zc.kill(first)
    with pytest.raises(zc.NoSuchActor, match="none"):
        await zc.get_actor("one")
    assert await logs.options(name="one", get_if_exists=True).spawn(path) != first


@pytest.mark.slow
async def test_twenty_spawns_of_one_name_give_one_actor(node: zc.Runtime, tmp_path: Path) -> None:
    chosen = logs.options(name="only", get_if_exists=True)
    actors = await asyncio.gather(*[chosen.spawn(str(tmp_path / "log")) for _ in range(20)])
    assert len(set(actors)) == 1
    assert len({await actor.pid() for actor in actors}) == 1
    assert len(await zc.actors()) == 1


@pytest.mark.slow
async def test_the_second_takes_over_a_name_whose_first_constructor_fails(node: zc.Runtime, tmp_path: Path) -> None:
    path = tmp_path / "once"
    chosen = options(FailsFirst, name="only", get_if_exists=True)
    outcomes = await asyncio.gather(*[chosen.spawn(str(path)) for _ in range(3)], return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, ValueError)]
    assert len(failed) == 1
    assert len({outcome for outcome in outcomes if not isinstance(outcome, BaseException)}) == 1


class FailsFirst:
    def __init__(self, path: str) -> None:
        if not os.path.exists(path):
            Path(path).touch()
            raise ValueError("first")


# ---------------------------------------------------------------- resources


@pytest.mark.slow
async def test_resources_are_held_until_the_end(node: zc.Runtime, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    total = await zc.cluster_resources()
    assert total["CPU"] == 4
    assert total["slot"] == 2
    ends = [zc.stop, zc.kill, _die]
    for end in ends:
        actor = await logs.options(num_cpus=1.5, resources={"slot": 2}).spawn(path)
        assert await free() == {**total, "CPU": 2.5, "slot": 0}
        await end(actor)
        await until_dead(actor)
        assert await free() == total
    with pytest.raises(ValueError, match="not today"):
        await options(Raises, num_cpus=1).spawn()
    async with asyncio.timeout(PATIENCE):
        while await free() != total:
            await asyncio.sleep(0.005)
    restarted = await logs.options(num_cpus=1, max_restarts=1).spawn(path)
    os.kill(await restarted.pid(), signal.SIGKILL)
    assert (await free())["CPU"] == 3, "kept through a restart"


async def _die(actor: Any) -> None:
    with pytest.raises(zc.ActorDied):
        await actor.leave(1)


async def test_what_never_fits_is_refused(node: zc.Runtime, tmp_path: Path) -> None:
    with pytest.raises(zc.InsufficientResources, match="5 CPU"):
        await logs.options(num_cpus=5).spawn(str(tmp_path / "log"))
    with pytest.raises(zc.InsufficientResources, match="1 tape"):
        await logs.options(resources={"tape": 1}).spawn(str(tmp_path / "log"))
    assert await free() == await zc.cluster_resources()


@pytest.mark.slow
async def test_spawns_wait_for_resources_in_order(node: zc.Runtime, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    first = await logs.options(resources={"slot": 2}).spawn(path)
    order: list[int] = []

    async def spawn(number: int, slots: float) -> Any:
        actor = await logs.options(resources={"slot": slots}).spawn(path)
        order.append(number)
        return actor

    waiting = []
    for number, slots in enumerate([2, 1, 1, 2]):
        waiting.append(asyncio.ensure_future(spawn(number, slots)))
        await free()  # the agent has the request once it has answered this
    elsewhere = await logs.options(num_cpus=1).spawn(path)  # needs none of the resources that the others wait for
    assert order == []
    await zc.kill(first)
    second = await waiting[0]
    assert order == [0]
    await zc.stop(second)
    third, fourth = await waiting[1], await waiting[2]
    assert sorted(order[1:]) == [1, 2]
    await asyncio.gather(zc.kill(third), zc.kill(fourth))
    await waiting[3]
    assert await elsewhere.pid()


@pytest.mark.slow
async def test_a_cancelled_spawn_withdraws(node: zc.Runtime, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    total = await zc.cluster_resources()
    first = await logs.options(resources={"slot": 2}, num_cpus=1).spawn(path)
    waiting = asyncio.ensure_future(logs.options(resources={"slot": 1}, name="late").spawn(path))
    await free()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await zc.kill(first)
    assert await free() == total
    with pytest.raises(zc.NoSuchActor):
        await zc.get_actor("late")
    # A spawn may be cancelled in every later phase too: while the process starts, and while the constructor runs.
    for turns in range(0, 40, 4):
        spawning = asyncio.ensure_future(logs.options(num_cpus=4, name=f"turn{turns}").spawn(path))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        spawning.cancel()
        outcome = (await asyncio.gather(spawning, return_exceptions=True))[0]
        del spawning
        if not isinstance(outcome, BaseException):
            await zc.kill(outcome)
    blocked = asyncio.ensure_future(spawn(Blocks, str(tmp_path / "pid")))
    await _there(tmp_path / "pid")
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked
    async with asyncio.timeout(PATIENCE):
        while await free() != total or (await zc.nodes())[0].workers:
            await asyncio.sleep(0.005)


async def test_a_named_actor_whose_handle_nobody_got_is_no_more(node: zc.Runtime) -> None:
    """This is the case of a spawn that is cancelled while the answer that reserves its place is on the way."""
    total = await free()
    process = current()
    options: dict[str, Any] = {"namespace": process.namespace, "name": "lost", "num_cpus": 1}
    wire: Any = Interface.of(Raises).wire()
    call = process.head.ask(HeadService.reserve, options, "Raises", wire, None, *for_spawn(), b"")
    handle, existed = await call
    assert not existed and await free() != total
    del handle, call
    async with asyncio.timeout(PATIENCE):
        while await free() != total or (await zc.nodes())[0].workers:
            await asyncio.sleep(0.005)
    with pytest.raises(zc.NoSuchActor):
        await zc.get_actor("lost")


# ---------------------------------------------------------------- many


@pytest.mark.slow
async def test_more_spawns_at_once_than_sockets_hold(node: zc.Runtime) -> None:
    """400 requests to the zygote and as many answers would fill both directions of a socket pair."""
    spawns = [asyncio.ensure_future(options(Keeper, env={"X": "y" * 4000}).spawn()) for _ in range(120)]
    await free()
    for spawn in spawns[20:]:
        spawn.cancel()
    outcomes = await asyncio.gather(*spawns, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[20:])
    assert not any(isinstance(outcome, BaseException) for outcome in outcomes[:20])


@pytest.mark.slow
async def test_shared_actors(node: zc.Runtime, tmp_path: Path) -> None:
    chosen = logs.options(process="shared")
    actors = [await chosen.spawn(str(tmp_path / "log")) for _ in range(20)]
    pids = [await actor.pid() for actor in actors]
    assert len(set(pids)) == SHARED_WORKERS
    same = [actor for actor, pid in zip(actors, pids, strict=True) if pid == pids[0]]
    waiting = same[0].wait()
    await zc.kill(same[0])
    with pytest.raises(zc.ActorDied):
        await waiting
    with pytest.raises(zc.ActorDied):
        await same[0].pid()
    assert await same[1].pid() == pids[0], "its neighbours live"
    with pytest.raises(zc.ActorDied, match="status 4"):
        await same[1].leave(4)
    with pytest.raises(zc.ActorDied, match="status 4"):
        await same[2].pid()
    fresh = await chosen.spawn(str(tmp_path / "log"))
    assert await fresh.pid() not in pids[:1]


@pytest.mark.slow
async def test_values_reach_a_restarted_actor_after_its_spawners_reference_is_gone(
    node: zc.Runtime, tmp_path: Path
) -> None:
    actor = await logs.options(max_restarts=1).spawn(str(tmp_path / "log"), data=np.full(1 << 16, 2.0))
    assert zc.stats().leases >= 1, "the recipe at the agent holds the array"
    os.kill(await actor.pid(), signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                assert await actor.total() == 2 << 16
            except zc.ActorUnavailable:
                continue
            break
    await zc.kill(actor)
    async with asyncio.timeout(PATIENCE):
        while zc.stats().leases:
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("node")
async def test_a_head_gives_way_in_its_own_term_and_to_another_one() -> None:
    head = current().head
    epoch = (await head.ask(HeadService.leader))["epoch"]
    assert not await head.ask(HeadService.give_way, epoch), "nobody stands by"
    assert not await head.ask(HeadService.give_way, epoch + 1)
    with pytest.raises(ValueError, match="acts already"):
        await head.ask(HeadService.force)
