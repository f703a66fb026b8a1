"""Arrays whose owner has ended: their holders pass them on, in every way in which arrays are passed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.driver.programs import alive
from zcactor.marshal.unpacking import Unpacking
from zcactor.objects import adoption
from zcactor.objects.adoption import Adoptions
from zcactor.objects.locations import LostPart
from zcactor.objectstore.ref import RegionKind
from zcactor.peers.connections import Connections
from zcactor.process import context
from zcactor.rpc.parts import Part
from zcactor.transport.mapping import ArenaFile, Window

pytestmark = pytest.mark.slow
PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
SMALL, LARGE = 5_000, 1 << 19
"""Elements of an array of less than 64 KiB, and of one of 4 MiB, which a thread copies."""

Array = np.ndarray[Any, Any]


class Holder:
    """An actor that makes arrays, keeps values, and passes them on."""

    def __init__(self) -> None:
        self.kept: Any = None

    def pid(self) -> int:
        return os.getpid()

    def made(self, count: int) -> Array:
        return np.arange(count) * 1.0

    def moved(self, count: int) -> Array:
        return zc.move(np.arange(count) * 1.0)

    def put(self, count: int) -> Any:
        return [zc.put(np.arange(count) * 1.0)]

    def keep(self, value: Any) -> None:
        self.kept = value

    def total(self, value: Any = None) -> float:
        value = self.kept if value is None else value
        while not isinstance(value, np.ndarray):
            value = value["a"] if isinstance(value, dict) else value[0]
        return float(value.sum())

    async def first(self, refs: list[Any]) -> float:
        return float((await refs[0]).sum())

    def give(self, how: str) -> Any:
        if how == "list":
            return [self.kept, 5]
        if how == "dict":
            return {"a": self.kept}
        if how == "view":
            return self.kept[1:]
        if how == "part":
            return self.kept[len(self.kept) // 2 :][::-1]
        if how == "moved":
            return zc.move(self.kept)
        return self.kept

    def stream(self) -> Iterator[Array]:
        yield self.kept
        yield self.kept[1:]

    def arena(self) -> int:
        return os.fstat(context.current().store.arena.fd).st_ino

    def places(self) -> list[int]:
        return [array.ctypes.data for array in self.kept]

    def sums(self) -> list[float]:
        return [float(array.sum()) for array in self.kept]

    def add(self, array: Array) -> None:
        self.kept = [*(self.kept or ()), array]

    def write(self, value: float) -> float:
        self.kept[:] = value
        return float(self.kept.sum())

    def memory_of(self, inode: int) -> int:
        """Bytes of memory of a file that this process has open; 0 for any other file."""
        return memory_of(inode)

    def read_on(self) -> None:
        """Read the kept arrays again and again, in a thread."""
        wanted, self.wrong, self.rounds = self.sums(), 0, 0

        def work() -> None:
            while self.kept is not None:
                self.wrong += self.sums() != wanted
                self.rounds += 1

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def readings(self) -> tuple[int, int]:
        return self.rounds, self.wrong

    def stop_reading(self) -> int:
        self.kept = None
        self.thread.join()
        return self.wrong

    def fill(self, nbytes: int) -> None:
        self.filling = zc.empty(nbytes, "u1")

    async def sent(self, other: Any, how: str) -> float:
        value = self.give(how)
        if how == "put":
            return float(await other.first([zc.put(self.kept)]))
        return float(await other.total(value))


class Shared(Holder):
    """A holder in a process with others."""


spawn: Any = zc.spawn
"""`zc.spawn` without static types, which know decorated methods only."""


@pytest.fixture
async def node() -> AsyncIterator[zc.Runtime]:
    async with asyncio.timeout(4 * PATIENCE), zc.init(num_cpus=4, store_capacity=128 << 20) as node:
        yield node


def memory_of(inode: int) -> int:
    found = [
        os.stat(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    return max((each.st_blocks * 512 for each in found if each.st_ino == inode), default=0)


def expected(count: int, how: str) -> float:
    array = np.arange(count) * 1.0
    return float(array[count // 2 :].sum() if how == "part" else array.sum())


async def orphan(holder: Any, count: int, *, moved: bool = False) -> None:
    """Let `holder` keep an array, and kill the array's maker."""
    maker = await spawn(Holder)
    await holder.keep(zc.move(await maker.moved(count)) if moved else maker.made(count))
    await zc.kill(maker)


async def adopted(actor: Any) -> tuple[int, int]:
    """The numbers of adopted objects and of copies in an actor's process."""
    stats = await zc.stats(actor)
    copies = stats.copies.get("owner ended")
    return stats.objects_adopted, 0 if copies is None else copies.count


@pytest.mark.parametrize("how", ["array", "list", "dict", "view", "part", "put"])
@pytest.mark.parametrize("count", [SMALL, LARGE])
async def test_an_argument_and_a_result(node: zc.Runtime, count: int, how: str) -> None:
    holder, other = await spawn(Holder), await spawn(Holder)
    await orphan(holder, count)
    for _ in range(2):
        assert await holder.sent(other, how) == expected(count, how)
        assert await other.total(await holder.give(how)) == expected(count, how), "through the driver"
        assert await other.total(holder.give(how)) == expected(count, how), "as a promise"
    assert await holder.total() == expected(count, "array"), "the holder reads on"
    assert await adopted(holder) == (1, 1), "whoever asks, and however often"
    assert await adopted(other) == (0, 0)
    await zc.kill(holder)
    assert zc.stats().objects_adopted == 0


async def test_it_goes_on_from_one_to_the_next(node: zc.Runtime) -> None:
    """Each owner ends after it has passed the array on."""
    first = await spawn(Holder)
    await orphan(first, LARGE)
    for _ in range(3):
        following = await spawn(Holder)
        await following.keep(first.give("array"))
        await zc.kill(first)
        first = following
    assert await first.total() == expected(LARGE, "array")


async def test_items(node: zc.Runtime) -> None:
    holder = await spawn(Holder)
    await orphan(holder, LARGE)
    sums = [float(item.sum()) async for item in holder.stream()]
    assert sums == [expected(LARGE, "array")] * 2
    assert await adopted(holder) == (1, 1)


async def test_what_was_moved_here_is_moved_on(node: zc.Runtime) -> None:
    holder = await spawn(Holder)
    await orphan(holder, LARGE, moved=True)
    array = await holder.give("moved")
    array[0] = 5.0
    assert array.sum() == expected(LARGE, "array") + 5


async def test_what_the_driver_holds(node: zc.Runtime) -> None:
    maker, other = await spawn(Holder), await spawn(Holder)
    array, promise, late = await maker.made(LARGE), maker.made(SMALL), await maker.put(SMALL + 1)
    await asyncio.wait([asyncio.ensure_future(zc.wait([promise]))])
    assert (await late[0]).sum() == expected(SMALL + 1, "array")
    await zc.kill(maker)
    assert await other.total(array) == expected(LARGE, "array")
    assert await other.total([array]) == expected(LARGE, "array")
    assert await other.total(promise) == expected(SMALL, "array"), "a call that has ended, and was not looked at"
    assert await other.first([promise]) == expected(SMALL, "array")
    assert await other.first(late) == expected(SMALL + 1, "array"), "a promise of the maker's own"
    assert (await promise).sum() == expected(SMALL, "array")
    stats = zc.stats()
    assert stats.objects_adopted == 3 and stats.copies["owner ended"].count <= 3


async def test_it_is_counted_before_it_is_passed_on(node: zc.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is right while the work goes on: the copy has yet to be mapped in the place of its original."""
    replace, passed_on = Adoptions._replace, threading.Event()

    def late(*args: Any) -> None:
        passed_on.wait(PATIENCE)
        replace(*args)

    monkeypatch.setattr(Adoptions, "_replace", late)
    maker, other = await spawn(Holder), await spawn(Holder)
    array = await maker.made(LARGE)
    await zc.kill(maker)
    try:
        assert await other.total(array) == expected(LARGE, "array")
        assert (zc.stats().objects_adopted, zc.stats().copies["owner ended"].count) == (1, 1)
    finally:
        passed_on.set()


async def test_between_actors_of_one_process(node: zc.Runtime) -> None:
    shared: Any = zc.actor(Shared)
    by_process: dict[int, list[Any]] = {}
    while not (pairs := [actors for actors in by_process.values() if len(actors) == 2]):
        actor = await shared.options(process="shared").spawn()
        by_process.setdefault(await actor.pid(), []).append(actor)
    one, other = pairs[0]
    await orphan(one, LARGE)
    assert await one.sent(other, "array") == expected(LARGE, "array")
    objects, copies = await adopted(one)
    assert objects <= copies <= 1, "in the background"


@pytest.mark.parametrize("how", ["array", "moved"])
async def test_the_owner_ends_while_the_reference_is_on_its_way(
    node: zc.Runtime, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The receiver finds no owner, and asks the process that passed the array on, whose pin holds it until then."""
    maker, holder = await spawn(Holder), await spawn(Holder)
    await holder.keep(zc.move(await maker.moved(LARGE)) if how == "moved" else maker.made(LARGE))
    connect = Connections.connect
    met: list[bytes] = []

    async def meet(connections: Connections, peer: bytes) -> Any:
        if connections is node.process.connections and not met and peer == maker._remote.location[0]:
            met.append(peer)
            await zc.kill(maker)
        return await connect(connections, peer)

    monkeypatch.setattr(Connections, "connect", meet)
    array = await holder.give(how)
    assert met
    assert array.sum() == expected(LARGE, "array")
    assert await adopted(holder) == (1, 1)


async def test_no_room(node: zc.Runtime) -> None:
    """The caller gets an error; the holder reads on, and finds room later."""
    holder, other = await spawn(Holder), await spawn(Holder)
    await holder.fill(126 << 20)
    await orphan(holder, LARGE)
    with pytest.raises(zc.OutOfMemory):
        await other.total(holder.give("array"))
    assert await holder.total() == expected(LARGE, "array")
    await holder.fill(1)
    assert await other.total(holder.give("array")) == expected(LARGE, "array")


async def test_what_nobody_holds_is_lost_to_whoever_awaits_it(node: zc.Runtime) -> None:
    """Making the call raises nothing: the error comes from awaiting it."""
    other, idle = await spawn(Holder), await spawn(Holder)
    lost = zc.put(1)
    lost._call.parts = [Part(RegionKind.ARRAY, LostPart("it is gone"), 0, 8)]
    assert await other.pid()
    for actor in (other, idle):  # one actor with a connection, and one without
        ref = actor.keep(lost)
        with pytest.raises(zc.ObjectLost, match="it is gone"):
            await ref
        assert not actor._remote.unfinished
        assert await actor.pid()


async def test_what_was_not_passed_on_is_not_given(node: zc.Runtime) -> None:
    """The pin decides whether a peer gets the array."""
    process, holder = node.process, await spawn(Holder)
    session = await process.connections.connect(holder._remote.location[0])
    for pin in (0, 5, 1 << 63, 1 << 63 | 2):
        with pytest.raises(zc.ObjectLost, match="no value under that name"):
            await process.requests.ask(session, Adoptions.lend, pin, int(RegionKind.ARRAY), 0, 8)


# ---------------------------------------------------------------- the memory of an owner that has ended


def mapped(pid: int, inode: int) -> bool:
    """Whether the process maps a page of the file."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return any(int(line.split()[4]) == inode for line in lines)


async def given_back(node: zc.Runtime, inode: int, *actors: Any) -> None:
    """Return when none of the processes maps the file: then the system has its memory back."""
    pids = [os.getpid(), (await zc.nodes())[0].pid, *[await actor.pid() for actor in actors]]
    async with asyncio.timeout(2 * PATIENCE):
        while any(mapped(pid, inode) for pid in pids):
            await asyncio.sleep(0)


@pytest.mark.parametrize("passed", [False, True])
async def test_what_is_held_stays_where_it_is_and_the_rest_goes(node: zc.Runtime, passed: bool) -> None:
    maker, holder, other = [await spawn(Holder) for _ in range(3)]
    inode = await maker.arena()
    await maker.fill(60 << 20)
    counts = [*range(SMALL, SMALL + 20), LARGE, LARGE + 1, 3 * SMALL]
    for count in counts:
        await holder.add(maker.made(count))
    mine = [await maker.made(SMALL), (await maker.made(LARGE))[5:]]
    places, sums = await holder.places(), await holder.sums()
    assert sums == [expected(count, "array") for count in counts]
    before = [array.copy() for array in mine]
    await zc.kill(maker)
    if passed:  # some of the arrays may be adopted before
        assert sum((await holder.give("list"))[0][-1]) == expected(counts[-1], "array")
    await given_back(node, inode, holder, other)
    assert (await holder.places(), await holder.sums()) == (places, sums)
    assert all(np.array_equal(array, copy) for array, copy in zip(mine, before, strict=True))
    async with asyncio.timeout(PATIENCE):
        while (found := await adopted(holder))[0] != len(counts):
            await asyncio.sleep(0)
    adoptions, copies = found
    assert copies <= len(counts)
    assert await other.total(holder.give("list")) == sums[0]
    assert await other.total(mine[1]) == before[1].sum()
    assert await adopted(holder) == (adoptions, copies), "nothing is copied once more"
    used = (await zc.stats(holder)).store_used
    assert used < 2 * 8 * sum(counts)
    await holder.keep(None)
    async with asyncio.timeout(PATIENCE):
        while (await zc.stats(holder)).store_used:
            await asyncio.sleep(0)


async def test_readers_notice_nothing(node: zc.Runtime) -> None:
    maker, holder = await spawn(Holder), await spawn(Holder)
    inode = await maker.arena()
    for _ in range(4):
        await holder.add(maker.made(LARGE))
    await holder.read_on()
    while (await holder.readings())[0] < 2:
        await asyncio.sleep(0)
    await zc.kill(maker)
    await given_back(node, inode, holder)
    rounds, wrong = await holder.readings()
    while (await holder.readings())[0] < rounds + 2:
        await asyncio.sleep(0)
    assert (wrong, await holder.stop_reading()) == (0, 0)


async def test_what_was_moved_here_stays_and_is_written_to(node: zc.Runtime) -> None:
    maker, holder = await spawn(Holder), await spawn(Holder)
    inode, pid = await maker.arena(), await maker.pid()
    await holder.keep(zc.move(await maker.moved(LARGE)))
    await zc.kill(maker)
    while alive(pid):
        await asyncio.sleep(0)
    for value in range(50):
        assert await holder.write(value) == value * LARGE
    await holder.keep(None)
    await given_back(node, inode, holder)


async def test_what_is_copied_is_passed_on_before_the_memory_goes_back(
    node: zc.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up, may_go = Window.give_up, threading.Event()

    def wait(window: Window, kept: Any) -> None:
        may_go.wait(PATIENCE)
        give_up(window, kept)

    monkeypatch.setattr(Window, "give_up", wait)
    maker, other = await spawn(Holder), await spawn(Holder)
    inode = await maker.arena()
    array = await maker.made(LARGE)
    await zc.kill(maker)
    try:
        assert await other.total(array) == expected(LARGE, "array")
        assert mapped(os.getpid(), inode)
    finally:
        may_go.set()
    await given_back(node, inode)
    assert array.sum() == expected(LARGE, "array")
    async with asyncio.timeout(PATIENCE):
        while zc.stats().objects_adopted != 1:  # the loop counts the adoption once the thread is done
            await asyncio.sleep(0)


@pytest.mark.parametrize("wanted_at", [0, 1, 2, 99])
async def test_it_rests_until_somebody_waits(monkeypatch: pytest.MonkeyPatch, wanted_at: int) -> None:
    monkeypatch.setattr(adoption, "_STEP_NBYTES", 1000)
    taking = adoption._Taking(asyncio.get_running_loop())
    rests = []

    class Wanted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            rests.append(timeout)
            if len(rests) == wanted_at:
                self.set()
            return self.is_set()

    taking.wanted = Wanted()
    if wanted_at == 0:
        taking.wanted.set()
    array, to = np.arange(4500, dtype="u1"), np.zeros(4500, "u1")
    taking.copy(to.ctypes.data, array.ctypes.data, array.nbytes)
    assert np.array_equal(array, to) and len(rests) == min(wanted_at, 5)


async def test_the_rest_of_what_was_moved_here_goes(node: zc.Runtime) -> None:
    maker, holder, other = [await spawn(Holder) for _ in range(3)]
    inode = await maker.arena()
    await maker.fill(60 << 20)
    await holder.keep(zc.move(await maker.moved(LARGE)))
    await other.keep(maker.made(LARGE))
    assert await holder.memory_of(inode) >= 60 << 20
    await zc.kill(maker)
    async with asyncio.timeout(PATIENCE):
        while await holder.memory_of(inode) > 8 * LARGE + 8192:
            await asyncio.sleep(0)
    assert await holder.total() == await other.total() == expected(LARGE, "array")
    assert await holder.write(3) == 3 * LARGE
    await holder.keep(None)
    await given_back(node, inode, holder, other)


async def test_it_stays_as_long_as_somebody_else_maps_it(node: zc.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder without room for a copy, for example, still maps it."""
    is_the_only_one, answers = ArenaFile.is_the_only_one, []

    def ask(file: ArenaFile) -> bool:
        answers.append(is_the_only_one(file))
        return answers[-1]

    monkeypatch.setattr(ArenaFile, "is_the_only_one", ask)
    monkeypatch.setattr(adoption, "_RETRY", 0.01)
    maker, other = await spawn(Holder), await spawn(Holder)
    inode = await maker.arena()
    moved, small = await maker.moved(LARGE), await maker.moved(SMALL)
    await other.fill(126 << 20)
    await other.keep(maker.made(LARGE))
    await zc.kill(maker)
    async with asyncio.timeout(PATIENCE):
        while len(answers) < 3:
            await asyncio.sleep(0)
    assert not any(answers)
    assert await other.total() == moved.sum() == expected(LARGE, "array")
    await other.keep(None)
    async with asyncio.timeout(PATIENCE):
        while memory_of(inode) > 8 * (LARGE + SMALL) + (4 << 12):
            await asyncio.sleep(0)
        assert moved.sum() == expected(LARGE, "array")
        del moved
        while memory_of(inode) > 8 * SMALL + (2 << 12):
            await asyncio.sleep(0)
        assert small.sum() == expected(SMALL, "array")
        del small
        while memory_of(inode):  # the descriptor goes with the last of the memory
            await asyncio.sleep(0)


async def test_no_room_for_what_is_held(node: zc.Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    """The memory stays where it is, and one line of log says so."""
    holder = await spawn(Holder)
    await holder.fill(126 << 20)
    for _ in range(2):
        maker = await spawn(Holder)
        await holder.add(maker.made(LARGE))
        await zc.kill(maker)
    said = ""
    async with asyncio.timeout(PATIENCE):
        while "which has ended, stays" not in said:
            said += "".join(capfd.readouterr())
            assert await holder.sums() == [expected(LARGE, "array")] * 2
    for _ in range(20):
        assert await holder.sums() == [expected(LARGE, "array")] * 2
    assert (said + "".join(capfd.readouterr())).count("which has ended, stays") == 1


async def test_a_writable_view_of_what_was_taken_over(node: zc.Runtime) -> None:
    """Libraries without read-only arrays write to pages of their own."""
    maker = await spawn(Holder)
    inode = await maker.arena()
    array = await maker.made(LARGE)
    await zc.kill(maker)
    await given_back(node, inode)
    process = node.process
    writable = Unpacking(process.store, process.copies, process.counters).writable_view(array)
    writable[:] = 7
    assert array.sum() == expected(LARGE, "array") and writable.sum() == 7 * LARGE
    assert set(zc.stats().copies) == {"owner ended"}
