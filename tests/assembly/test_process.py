"""A process among others: strangers that connect to it, and its descriptors, threads and tasks after many calls."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import socket
import threading
import warnings
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.driver.programs import PRELUDE, Program, processes, until
from zcactor.api import remote_actor
from zcactor.api.future import ObjectRef
from zcactor.api.remote_actor import RemoteActor
from zcactor.assembly.process import Process
from zcactor.errors import ConnectionLost
from zcactor.ids import ActorId
from zcactor.interface import Interface
from zcactor.marshal.arrays import root_of
from zcactor.marshal.sharing import PIECE
from zcactor.objectstore.store import Block, Store
from zcactor.process import context
from zcactor.transport.loopback.connection import NO_FAULTS, LoopbackFaults
from zcactor.transport.loopback.endpoint import LoopbackEndpoint, LoopbackNetwork

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


class Echo:
    def same(self, value: Any) -> Any:
        return value

    def pid(self) -> int:
        return os.getpid()


class Raises:
    def __init__(self) -> None:
        raise ValueError("not today")


spawn: Any = zc.spawn
"""`zc.spawn` without static types, which know decorated methods only."""


@pytest.fixture
async def node() -> AsyncIterator[zc.Runtime]:
    async with asyncio.timeout(4 * PATIENCE), zc.init(num_cpus=4) as node:
        yield node


# ---------------------------------------------------------------- strangers


@pytest.mark.slow
async def test_strangers_are_refused_and_disturb_nothing(
    node: zc.Runtime, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    actor = await spawn(Echo)
    directory = node._directory.path
    assert directory.stat().st_mode & 0o777 == 0o700
    paths = sorted(directory.glob("*.sock"))
    assert len(paths) == 3  # driver, agent, worker
    for path in paths:
        for message in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, b"\xff" * 65536, os.urandom(300)):
            await asyncio.get_running_loop().run_in_executor(None, _knock, path, message)
            assert await actor.same(message) == message
    assert await zc.nodes()
    assert await (await spawn(Echo)).pid()


def _knock(path: Path, message: bytes) -> None:
    """Send a message and read until the peer closes; without a message close at once."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(str(path))
        if not message:
            return
        try:
            sock.sendall(message)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass


@pytest.mark.slow
async def test_secrets_are_neither_on_command_lines_nor_in_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZCACTOR_TOKEN", "x" * 40)
    async with asyncio.timeout(PATIENCE), zc.init() as node:
        actor = await spawn(Echo)
        pids = [(await zc.nodes())[0].pid, await actor.pid()]
        pids.append(int(Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[1]))  # the zygote
        secret = node.process.endpoint._token  # type: ignore[attr-defined]
        for pid in pids:
            told = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            assert secret not in told
            assert secret.hex().encode() not in told
            assert b"ZCACTOR_TOKEN" not in told
            assert os.fsencode(node._directory.path) not in told


# ---------------------------------------------------------------- baselines


def _descriptors() -> dict[str, int]:
    """Open descriptors of this process, counted by kind."""
    counts: dict[str, int] = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        kind = target.partition(":")[0] if target.startswith(("socket:", "pipe:", "anon_inode:")) else target
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _held() -> Counter[str]:
    """Descriptors of each kind, threads and tasks of this process."""
    gc.collect()
    return Counter({**_descriptors(), "threads": threading.active_count(), "tasks": len(asyncio.all_tasks())})


async def _no_more(before: Counter[str], connections: int) -> None:
    """Wait until this process has no more of any kind than before, and as many connections.

    It may have less: garbage of other tests has descriptors and threads, which may go at any time.
    """
    await _settled(lambda: (_held() - before, zc.stats().connections), (Counter(), connections))


async def _settled(measure: Any, expected: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while (found := measure()) != expected:
            gc.collect()
            await asyncio.sleep(0.005)
            if asyncio.get_running_loop().time() < 0:
                raise AssertionError(found)


@pytest.mark.slow
async def test_three_rounds_leave_no_descriptor_and_no_thread() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counts = []
        for _ in range(4):
            async with asyncio.timeout(PATIENCE), zc.init():
                actor = await spawn(Echo)
                array = zc.ones(1 << 16)
                back = await actor.same(array)
                assert back.sum() == 1 << 16
                ref = actor.same(back)
                await ref
                await zc.stop(actor)
            del actor, array, back, ref
            gc.collect()
            counts.append(Counter(_descriptors()) + Counter(thread.name for thread in threading.enumerate()))
    assert counts[1] >= counts[2] >= counts[3]  # fewer when leftovers of earlier tests end meanwhile


@pytest.mark.slow
async def test_references_and_shared_actors_leave_nothing(node: zc.Runtime) -> None:
    actor = await spawn(Echo)
    await actor.pid()
    rounds: list[tuple[Counter[str], int, int]] = []
    for _ in range(3):
        refs = [actor.same(number) for number in range(2500)]
        refs += [zc.put(number) for number in range(2500)]
        assert sum(await zc.get(refs)) == 2 * sum(range(2500))
        arrays = [zc.put(zc.ones(1 << 14)) for _ in range(20)]
        for ref in arrays:
            await actor.same(ref)
        del refs, arrays, ref
        gc.collect()
        async with asyncio.timeout(PATIENCE):
            while zc.stats().leases or zc.stats().store_used or (await zc.stats(actor)).leases:
                await asyncio.sleep(0.005)
        rounds.append((_held(), zc.stats().connections, (await zc.stats(actor)).connections))
        await _no_more(*rounds[0][:2])
        assert rounds[-1][2] == rounds[0][2]
    shared: Any = zc.actor(type("SharedEcho", (Echo,), {}))
    held: list[Counter[str]] = []
    for _ in range(3):
        actors = [await shared.options(process="shared").spawn() for _ in range(67)]
        assert len({await each.pid() for each in actors}) <= 16
        del actors
        async with asyncio.timeout(PATIENCE):
            while (await zc.nodes())[0].workers != 1:
                gc.collect()
                await asyncio.sleep(0.005)
        await _settled(lambda: zc.stats().connections, 2)
        held.append(_held())
        await _no_more(held[0], 2)


@pytest.mark.slow
async def test_processes_of_actors_leave_nothing(node: zc.Runtime) -> None:
    agent = (await zc.nodes())[0].pid
    await zc.kill(await spawn(Echo))

    def open_at_agent() -> int:
        return len(os.listdir(f"/proc/{agent}/fd"))

    await _settled(lambda: zc.stats().connections, 1)
    gc.collect()  # the connection to the actor, and with it the file of the actor's arena
    base = (open_at_agent(), _descriptors(), len(list(node._directory.path.iterdir())))
    for _ in range(2):
        actors = await asyncio.gather(*[spawn(Echo) for _ in range(10)])
        for each in actors:
            await each.pid()
        await asyncio.gather(*[zc.kill(each) for each in actors])
        del actors, each
        for _ in range(3):
            with pytest.raises(ValueError, match="not today"):
                await spawn(Raises)
        spawning = [asyncio.ensure_future(spawn(Echo)) for _ in range(4)]
        await zc.nodes()
        for task in spawning:
            task.cancel()
        await asyncio.gather(*spawning, return_exceptions=True)
        del spawning, task

    await _settled(lambda: (open_at_agent(), _descriptors(), len(list(node._directory.path.iterdir()))), base)


@pytest.mark.slow
def test_programs_with_all_warnings_tell_of_the_call_under_way_alone() -> None:
    source = """
async def main():
    for _ in range(2):
        async with zc.init(shutdown_timeout=0.25):
            actor = await zc.spawn(Busy)
            await actor.pid()
            waiting = actor.wait()
            await asyncio.sleep(0)
            await zc.kill(await zc.spawn(Busy))
            array = zc.ones(1 << 16)
        try: await waiting
        except zc.ZcactorError: pass
    tell(end=1)
"""
    for run in ("zc.run(main())", "asyncio.run(main())"):
        with Program(
            source + run, prelude="import warnings\nwarnings.simplefilter('error')\n" + PRELUDE,
            env={"PYTHONASYNCIODEBUG": "1", "PYTHONDEVMODE": "1"},
        ) as program:  # fmt: skip
            program.told("end")
            assert program.status() == 0
            # A loop in debug mode also reports callbacks of more than 0.1 s, and on a busy machine any callback may
            # take that.
            said = re.sub(r"(?m)^.*Executing <.*> took [\d.]+ seconds\n", "", program.stderr())
            assert said == 2 * "ended with 1 call that had not ended: Busy.wait (await it)\n"
            until(lambda p=program: not processes(p.mark), "all processes end")  # type: ignore[misc]


# ---------------------------------------------------------------- peers that map our arena


class Keeper(Echo):
    """An actor that keeps the array that it got, in place."""

    def __init__(self) -> None:
        self.kept: Any = None

    def keep(self, array: np.ndarray[Any, Any]) -> float:
        self.kept = array
        return float(array.sum())

    def total(self) -> float:
        return float(self.kept.sum())

    def handed_on(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return zc.move(array)

    def drop(self) -> None:
        self.kept = None


def _sessions_to(pid: int) -> list[Any]:
    return [s for s in context.current().sessions.all() if s.peer_hello is not None and s.peer_hello.pid == pid]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1 << 17, 1 << 20])
@pytest.mark.parametrize("make", [np.full, zc.full])
async def test_what_a_peer_maps_is_not_used_again_when_the_connection_ends(
    node: zc.Runtime, make: Any, count: int
) -> None:
    actor = await spawn(Keeper)
    assert await actor.keep(make(count, 5.0)) == 5.0 * count
    pid = await actor.pid()
    for session in _sessions_to(pid):
        session.connection.abort()
    await _settled(lambda: _sessions_to(pid), [])
    junk = [make(count, 99.0) for _ in range(8)]
    assert zc.stats().leases == 1
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(zc.ActorUnavailable):  # the actor's connection is being made anew
                assert await actor.total() == 5.0 * count
                break
    used = zc.stats().store_used
    await zc.kill(actor)
    await _settled(lambda: (zc.stats().leases, zc.stats().store_used < used), (0, True))
    del junk


@pytest.mark.slow
async def test_a_peer_that_connects_anew_says_what_it_still_holds(node: zc.Runtime) -> None:
    actor, other = await spawn(Keeper), await spawn(Keeper)
    used = zc.stats().store_used
    for each in (actor, other):
        await each.keep(np.full(1 << 17, 5.0))
    await actor.keep(np.full(1 << 17, 6.0))  # this lets go of the first array
    await _settled(lambda: zc.stats().leases, 2)
    pid = await actor.pid()
    for _ in range(2):
        for session in _sessions_to(pid):
            session.connection.abort()
        await _settled(lambda: _sessions_to(pid), [])
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(zc.ActorUnavailable):  # the actor's connection is being made anew
                    assert await actor.total() == 6.0 * (1 << 17)
                    break
        assert zc.stats().leases == 2, "what it holds stays, by whichever connection it came"
    assert await actor.same(5) == 5
    await actor.drop()
    await _settled(lambda: zc.stats().leases, 1)
    assert await other.total() == 5.0 * (1 << 17)
    await other.drop()
    await _settled(lambda: (zc.stats().leases, zc.stats().store_used), (0, used))


# ---------------------------------------------------------------- peers whose arena is not mapped


class Sums:
    """An actor that keeps its arguments, in a process that maps no arena of its peers."""

    def __init__(self) -> None:
        self.kept: Any = None

    async def total(self, array: Any) -> tuple[float, bool, bool]:
        self.kept = array
        in_store = isinstance(array, np.ndarray) and type(root_of(array)) is Block
        return float(array.sum()), array.flags.writeable, in_store

    async def same(self, value: Any) -> Any:
        return value

    async def doubled(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        array *= 2
        return array


class Pair:
    """Two processes in this one, joined by a network that maps nothing."""

    def __init__(self, faults: LoopbackFaults = NO_FAULTS) -> None:
        self.network = LoopbackNetwork(seed=3, maps=False, faults=faults)
        self.stores: list[Store] = []

    async def __aenter__(self) -> tuple[Process, Process, RemoteActor]:
        made = []
        for _ in range(2):
            name = os.urandom(16)
            store = Store(32 << 20, name)
            self.stores.append(store)
            endpoint: Any = LoopbackEndpoint(
                self.network,
                name,
                (store.arena.address, store.arena.nbytes, store.arena),
                recv_depth=64,
                eager_limit=1024,
            )
            config = zc.Config(eager_limit=1024, recv_depth=64)
            process = Process(name, "worker", config, asyncio.get_running_loop(), store, endpoint)
            await endpoint.start(process.connections.accepted)
            made.append(process)
        self.made = caller, owner = made
        context.set_current(caller)  # for both processes: unpacking does not ask to which of them a value belongs
        index = owner.hosts.take_index()
        host = owner.hosts.add(index, Sums, "Sums")
        host.adopt(Sums())
        interface = Interface.of(Sums)
        return caller, owner, RemoteActor(
            caller, ActorId(b"a" * 16), interface, (owner.process, index), None, "default", 100, 0
        )  # fmt: skip

    async def __aexit__(self, *_: object) -> None:
        context.clear_current()
        for process in self.made:
            await process.close()


async def _call(actor: RemoteActor, method: str, *args: Any) -> Any:
    spec = actor.interface.by_name[method]
    return await ObjectRef(actor.call(spec, args, {}, None, 0))


@pytest.mark.parametrize("turns", [0, 7])
async def test_arrays_are_pulled_where_nothing_is_mapped(turns: int) -> None:
    async with asyncio.timeout(PATIENCE), Pair(LoopbackFaults(delay_turns=turns)) as (caller, owner, actor):
        array = caller.store.empty((300, 400))
        array[...] = 1
        view = array[::2, 5:]
        assert await _call(actor, "total", view) == (float(view.sum()), False, True)
        assert owner.counters.bytes_received >= view.nbytes and owner.counters.bytes_mapped == 0
        kept = owner.hosts.by_index[max(owner.hosts.by_index)].instance.kept
        assert owner.store.block_of(kept) is not None, "a copy of its own, in its own arena"
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])
        assert not owner.copies.snapshot()
        assert {reason: each.nbytes for reason, each in caller.copies.snapshot().items()} == {PIECE: view.nbytes}


@pytest.mark.slow
async def test_a_moved_array_is_pulled_and_comes_back_writable() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        array = caller.store.empty(50_000)
        array[...] = 3
        result = await _call(actor, "doubled", zc.move(array))
        assert float(result.sum()) == 300_000 and not result.flags.writeable
        with pytest.raises(ValueError, match=r"zc\.move"):
            array[0] += 1
        del array, result
        gc.collect()
        await _settled(lambda: (caller.store.stats().used, owner.store.stats().used), (0, 0))


async def test_a_pull_that_finds_no_room_is_out_of_memory_and_leaks_nothing() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        filling = owner.store.empty(30 << 20, "u1")
        array = caller.store.empty(1 << 20)
        with pytest.raises(zc.OutOfMemory, match="bytes"):
            await _call(actor, "total", array)
        del filling
        assert (await _call(actor, "total", array[:1000]))[1:] == (False, True)
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])


@pytest.mark.slow
async def test_a_pull_from_a_peer_that_is_gone_is_lost() -> None:
    async with asyncio.timeout(PATIENCE), Pair(LoopbackFaults(delay_turns=500)) as (caller, owner, actor):
        array = caller.store.empty(100_000)
        waiting = asyncio.ensure_future(_call(actor, "total", array))
        while not owner.store.stats().blocks:
            await asyncio.sleep(0)
        for session in list(caller.sessions.all()):
            session.connection.abort()
        with pytest.raises(zc.ZcactorError):
            await waiting
        await _settled(lambda: owner.store.stats().used, 0)


# ---- an actor that is out of reach


@pytest.mark.parametrize(
    ("silence", "says"),
    [
        (0.5, "the cluster's head reaches its node, heard from 0.5 s ago, and this process at 10.0.0.1:1 does not"),
        (-1.0, "the wire is cut; tried"),
        (None, "the wire is cut; the cluster's head is not reached either; tried"),
    ],
)
async def test_all_attempts_together_are_bounded_and_the_error_says_who_reaches_whom(
    monkeypatch: pytest.MonkeyPatch, silence: float | None, says: str
) -> None:
    monkeypatch.setattr(remote_actor, "REACH", 1000.0)
    attempts: list[bytes] = []

    async def connect(process: bytes) -> Any:
        attempts.append(process)
        if len(attempts) > 1:
            await asyncio.get_running_loop().create_future()
        # The second attempt begins, even if late, and has little time.
        asyncio.get_running_loop().call_soon(monkeypatch.setattr, remote_actor, "REACH", 0.2)
        raise ConnectionLost("the wire is cut")

    async def locate(actor: bytes) -> tuple[str, tuple[bytes, int], str]:
        return "alive", actors.location, ""

    async def silence_of(process: bytes) -> tuple[float, str]:
        if silence is None:
            raise ConnectionLost("the head is gone")
        return silence, "you@10.0.0.2:2"

    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actors):
        monkeypatch.setattr(caller.connections, "connect", connect)
        monkeypatch.setattr(caller.head, "locate", locate)
        monkeypatch.setattr(caller.head, "silence_of", silence_of)
        monkeypatch.setattr(Process, "address", "me@10.0.0.1:1")
        with pytest.raises(zc.ActorUnavailable) as caught:
            await _call(actors, "total", np.zeros(1))
        assert says in str(caught.value)
        assert not caught.value.maybe_executed
        assert attempts == [owner.process] * 2
        if silence == 0.5:
            assert "does not reach it at 10.0.0.2:2" in str(caught.value)


async def test_a_place_that_an_actor_has_left_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        place, actor.location = actor.location, (b"?" * 16, 2)

        async def locate(_: bytes) -> tuple[str, tuple[bytes, int], str]:
            return "alive", place, ""

        monkeypatch.setattr(caller.head, "locate", locate)
        assert (await _call(actor, "total", np.ones(3)))[0] == 3.0
        assert actor.location == place == (owner.process, place[1])
