"""Processes whose arrays lie in the store: forked, ended with arrays alive, and killed while they allocate."""

from __future__ import annotations

import os
import random
import select
import signal
from pathlib import Path

import pytest

from tests.driver.programs import Program, until

pytestmark = pytest.mark.slow


def assert_ends_silently(program: Program, status: int = 0, *, said: str = "") -> None:
    """Check that the program ends with that status, leaves nothing behind and writes no complaint but a line."""
    assert program.status() == status
    program.assert_clean()
    assert program.stderr().startswith(said) and program.stderr().count("\n") == bool(said)


@pytest.mark.parametrize("way", ["os.fork", "multiprocessing"])
@pytest.mark.parametrize("where", ["driver", "actor"])
def test_a_forked_child_has_arrays_of_its_own(way: str, where: str) -> None:
    source = """
def child(array, view):
    assert (array == 3).all() and (view == 3).all(), "reads"
    array[:] = 4; view[0] = 5
    assert array[1] == 4 and array[5] == 5, "writes"
    for number in range(20):
        made = np.full(300_000, number) + array[0]
        zeros = np.zeros(2_000_000)
        assert not zeros.any() and made[-1] == number + 4, "allocates"
        zeros[:] = 1
    grown = np.arange(100_000); grown.resize(500_000, refcheck=False)
    assert grown[99_999] == 99_999 and not grown[100_000:].any()
    array.resize(10, refcheck=False)  # the child frees what the parent still uses
    assert array.tolist() == [4] * 5 + [5] + [4] * 4
    assert not zc.in_store(made)

def forked(way, *arrays):
    if way == "multiprocessing":
        import multiprocessing
        process = multiprocessing.get_context("fork").Process(target=child, args=arrays)
        process.start(); process.join()
        return process.exitcode
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child(*arrays)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def work(way):
    array = np.full(1_000_000, 3.0)
    view, kept = array[5:], np.arange(900_000)
    assert zc.in_store(array)
    used = zc.stats().store_used
    outcome = forked(way, array, view)
    assert (array == 3).all() and (view == 3).all() and (np.arange(900_000) == kept).all()
    assert zc.stats().store_used == used
    result = array + 1
    assert zc.in_store(result)
    return outcome, result

class Forks:
    def work(self, way): return work(way)

async def main():
    async with zc.init():
        actor = await zc.spawn(Forks)
        for _ in range(2):
            outcome, result = await actor.work(WAY) if WHERE == "actor" else work(WAY)
            tell(outcome=[outcome, bool((result == 4).all()), zc.stats().bytes_copied])
        tell(copied=(await zc.stats(actor)).bytes_copied)
WAY, WHERE = {way!r}, {where!r}
zc.run(main())
""".replace("{way!r}", repr(way)).replace("{where!r}", repr(where))
    with Program(source) as program:
        for _ in range(2):
            assert program.told("outcome") == [0, True, 0], (
                "the child's status; the parent's result, and bytes it copied"
            )
        assert program.told("copied") == 0
        assert_ends_silently(program)


def test_a_child_forked_after_the_end_finalizes_its_interpreter() -> None:
    source = """
async def main():
    global kept
    async with zc.init():
        kept = [np.full(1_000_000, number) for number in range(4)]
zc.run(main())
pid = os.fork()
if pid == 0:
    kept[0][:] = 7
    del kept[1]
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
tell(outcome=[status, [bool((array == number).all()) for number, array in enumerate(kept)]])
"""
    with Program(source) as program:
        assert program.told("outcome") == [0, [True] * 4], "the child's status; whether the parent's arrays are whole"
        assert_ends_silently(program)


LIVE = """
import contextvars, weakref
class Cycle:
    def __init__(self): self.me, self.array = self, np.ones(100_000)
class Late:
    def __init__(self): self.array = np.ones(200_000)
    def __del__(self): self.array = self.array + 1 if np is not None and self.array is not None else None
variable = contextvars.ContextVar("variable")
local = threading.local()
class Maker:
    def __init__(self): self.held = [np.ones(70_000) for _ in range(10)]; self.late = Late()
    def make(self): return np.ones(100_000) * 2
async def main():
    global kept, cycle, late
    {begin}
        actor = await zc.spawn(Maker)
        kept = [np.arange(100_000) * number for number in range(5)]
        kept.append(np.array([object()] * 100_000))
        cycle, late = Cycle(), Late()
        variable.set(np.ones(90_000)); local.array = np.ones(80_000)
        given = await actor.make()
        {keep}
        view = kept[0][3:].T; sys.modules["held"] = view
        assert zc.in_store(kept[1]) and zc.in_store(given)
    tell(ready=1)
"""


NO_SHUTDOWN = "await zc.init()\n    if 1:"


@pytest.mark.parametrize("begin", ["async with zc.init():", NO_SHUTDOWN], ids=["shutdown", "none"])
@pytest.mark.parametrize("run", ["zc.run(main())", "asyncio.run(main())"])
@pytest.mark.parametrize("after", ["", "late.array = late.array * 2; np.zeros(10**6)\n", "sys.exit(3)\n"])
def test_the_interpreter_ends_with_arrays_alive(begin: str, run: str, after: str) -> None:
    # A received array that is alive without a shutdown has a test of its own, below.
    keep = "kept.append(given)" if "async with" in begin else "pass"
    with Program(f"{LIVE.format(begin=begin, keep=keep)}\n{run}\n{after}") as program:
        program.told("ready")
        assert_ends_silently(program, 3 if "exit" in after else 0)


def test_the_interpreter_ends_with_a_received_array_and_no_shutdown() -> None:
    source = """
class Maker:
    def make(self): return np.ones(100_000) * 2
async def main():
    global kept, actor
    await zc.init()
    actor = await zc.spawn(Maker)  # it lives, so that its connection does
    kept = await actor.make()
asyncio.run(main())
kept = None
tell(ready=1)
"""
    with Program(source) as program:
        program.told("ready")
        assert_ends_silently(program, said="the program ended without zc.shutdown(): 1 actor ended at once")


ALLOCATING = """
class Allocator:
    def arena(self):
        from zcactor.process.context import current
        return os.fstat(current().store.arena.fd).st_ino
    def work(self, seed):
        tell(working=os.getpid())
        allocate(seed)
    def result(self, array): return array + 1
def allocate(seed):
    random = np.random.default_rng(seed)
    held = []
    while True:
        held.append(np.full(int(random.integers(10_000, 3_000_000)), 1.0) + np.zeros(1))
        if len(held) > 5: del held[int(random.integers(5))]
async def main():
    async with zc.init(store_capacity=1 << 28):
        actor, other = await zc.spawn(Allocator), await zc.spawn(Allocator)
        kept = await other.result(np.ones(1_000_000))
        from zcactor.process.context import current
        tell(arenas=[await actor.arena(), await other.arena(), os.fstat(current().store.arena.fd).st_ino])
        task = actor.work(SEED)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.to_thread(allocate, SEED + 1))
                await task
        except* zc.ActorDied:
            os._exit(0)
zc.run(main())
"""


def mapped(inodes: list[int]) -> list[str]:
    """The mappings of arenas with these inodes, in any process."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                lines = (directory / "maps").read_text().splitlines()
            except OSError:
                continue
            found += [line for line in lines if "memfd:zcactor-arena" in line and int(line.split()[4]) in inodes]
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("victim", ["driver", "actor", "group"])
def test_killed_while_it_allocates_it_leaves_nothing(seed: int, victim: str) -> None:
    with Program(ALLOCATING.replace("SEED", str(seed))) as program:
        inodes = program.told("arenas")
        assert len(set(inodes)) == 3 and mapped(inodes)
        worker = program.told("working")
        # The kill comes at a random moment, without a wait for an event.
        select.select([], [], [], random.Random(f"{seed} {victim}").uniform(0, 0.03))
        if victim == "group":
            os.killpg(program.pid, signal.SIGKILL)
        else:
            os.kill(program.pid if victim == "driver" else worker, signal.SIGKILL)
        assert program.status() == (0 if victim == "actor" else -signal.SIGKILL)
        program.assert_clean()
        until(lambda: not mapped(inodes), "the arenas are mapped nowhere, so their memory is back")
