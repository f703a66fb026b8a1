"""Forks of drivers and actors: the child can use nothing of the runtime, and the parent and its peers see no change."""

from __future__ import annotations

import pytest

import zcactor as zc
from tests.driver.programs import Program
from zcactor.errors import ForkedProcess

FORK = """
class Forks:
    def __init__(self, other): self.other = other; self.seen = 0
    def count(self): self.seen += 1; return self.seen
    def fork(self, how):
        return in_child(how, self.other)
    async def fork_on_the_loop(self, how):
        return in_child(how, self.other)
    def leave_one_behind(self):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid

def in_child(how, handle):
    # What each attempt in a forked child comes to.
    read, write = os.pipe()
    def child():
        outcomes = []
        for attempt in (lambda: handle.pid(), lambda: zc.put(1), lambda: zc.ones(1 << 20), lambda: zc.stats(),
                        lambda: asyncio.run(zc.spawn(Busy)), lambda: handle.wait(),
                        lambda: zc.current_actor().handle.count()):
            try: attempt(); outcomes.append("nothing")
            except Exception as error: outcomes.append(type(error).__name__)
        os.write(write, json.dumps(outcomes).encode())
    if how == "fork":
        pid = os.fork()
        if pid == 0:
            try: child()
            finally: os._exit(0)
        os.waitpid(pid, 0)
    else:
        import multiprocessing
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
    os.close(write)
    with open(read) as file: return json.loads(file.read())

async def main():
    async with zc.init():
        other = await zc.spawn(Busy)
        actor = await zc.spawn(Forks, other)
        fresh = await zc.spawn(Busy)  # no connection to it yet
        for how in ("fork", "multiprocessing"):
            tell(driver=in_child(how, other))
            tell(driver=in_child(how, fresh))
            tell(actor=await actor.fork(how))
            tell(actor=await actor.fork_on_the_loop(how))
        array = zc.ones(1 << 20)
        assert await actor.count() == 1 and await fresh.pid() and await other.pid()
        refs = [actor.count() for _ in range(1000)]
        tell(driver=in_child("fork", other))
        assert await zc.get(refs) == list(range(2, 1002))
        left = await actor.leave_one_behind()
        mine = os.fork()
        if mine == 0:
            signal.pause()
        pid = (await zc.actors())[1].pid
        tell(left=left, mine=mine, pid=pid)
        try:
            os.kill(pid, signal.SIGKILL)
            await actor.count()
            await actor.count()
        except zc.ActorDied as error: tell(died=str(error))
        os.kill(mine, signal.SIGKILL)
        os.waitpid(mine, 0)
    tell(end=1)
zc.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_forked_children_can_use_nothing_and_harm_nothing(loop: str) -> None:
    with Program(FORK, env={"ZCACTOR_LOOP": loop}) as program:
        for _ in range(2):
            for _ in range(2):
                assert program.told("driver") == ["ForkedProcess"] * 6 + ["NotInitialized"]
            for _ in range(2):
                assert program.told("actor") == ["ForkedProcess"] * 7
        assert program.told("driver")[:6] == ["ForkedProcess"] * 6
        program.told("left")
        assert "SIGKILL" in program.told("died")
        program.told("end")
        assert program.status() == 0
        program.assert_clean()
        assert program.stderr() == ""


@pytest.mark.slow
def test_a_method_that_returns_in_a_forked_child_runs_nothing_twice() -> None:
    source = """
class Returns:
    def fork(self, path): return os.fork()
    def note(self, path, number):
        with open(path, "a") as file: file.write(f"{number}\\n")
async def main():
    path = os.environ["TMPDIR"] + "/../log"
    async with zc.init():
        actor = await zc.spawn(Returns)
        refs = [actor.fork(path)] + [actor.note(path, number) for number in range(100)]
        child = (await zc.get(refs))[0]
        assert child > 0
        with open(path) as file: tell(noted=file.read().split())
    tell(end=1)
zc.run(main())
"""
    with Program(source) as program:
        assert program.told("noted") == [str(number) for number in range(100)]
        program.told("end")
        assert program.status() == 0
        program.assert_clean()
        assert (program.directory / "log").read_text().split() == [str(number) for number in range(100)]


@pytest.mark.slow
def test_a_forked_child_may_start_a_node_of_its_own() -> None:
    source = """
async def main(depth):
    async with zc.init():
        actor = await zc.spawn(Busy)
        assert await actor.pid() != os.getpid()
        if depth:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    asyncio.events._set_running_loop(None)
                    zc.run(main(0))
                    status = 0
                finally: os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
        assert await actor.pid() != os.getpid()
    tell(end=depth)
zc.run(main(1))
"""
    with Program(source) as program:
        assert program.told("end") == 0
        assert program.told("end") == 1
        assert program.status() == 0
        program.assert_clean()
        assert program.stderr() == ""


@pytest.mark.slow
def test_a_forked_child_that_exits_in_order_does_not_end_the_parents_node() -> None:
    source = """
async def main():
    async with zc.init():
        actor = await zc.spawn(Busy)
        await actor.pid()
        pid = os.fork()
        if pid == 0:
            sys.exit(7)
        tell(status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        for _ in range(100):
            await actor.pid()
        other = await zc.spawn(Busy)
        tell(other=await other.pid())
try: zc.run(main())
except SystemExit as error: os._exit(error.code)
"""
    with Program(source) as program:
        assert program.told("status") == 7
        program.told("other")
        assert program.status() == 0
        program.assert_clean()


def test_forked_is_told_apart_from_not_initialized() -> None:
    with pytest.raises(zc.NotInitialized):
        zc.current_actor()
    assert issubclass(ForkedProcess, zc.NotInitialized)


HOLDING = """
class Makes:
    def made(self): return np.full(1 << 17, 5.0)
    def others(self): self.others_made = [np.full(1 << 17, 99.0) for _ in range(4)]

async def main():
    async with zc.init():
        actor = await zc.spawn(Makes)
        received, own = await actor.made(), np.full(1 << 17, 5.0)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(read, 1)
            tell(seen=[float(received.sum()), float(own.sum())])
            os._exit(0)
        others = [np.full(1 << 17, 99.0) for _ in range(4)]
        await actor.others()
        os.write(write, b"x")
        os.waitpid(child, 0)
        assert received.sum() == own.sum()
zc.run(main())
"""


@pytest.mark.slow
def test_a_child_reads_its_arrays_as_long_as_the_parent_holds_them() -> None:
    with Program(HOLDING) as program:
        assert program.told("seen") == [5.0 * (1 << 17)] * 2
        assert program.status() == 0
