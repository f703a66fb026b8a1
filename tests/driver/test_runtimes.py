"""The end of a program's runtime, also where its agent is late or gone."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path
from typing import TextIO

import pytest

import zcactor as zc
from tests import hostile
from tests.driver.programs import Program, alive, until
from tests.driver.test_driver import PATIENCE, Talker, spawn
from zcactor.config import Config
from zcactor.driver import runtimes
from zcactor.driver.runtimes import EmbeddedRuntime
from zcactor.rpc.call import Call


class Writer:
    """An actor whose file has its line once the actor ends in order."""

    def write(self, path: Path) -> None:
        self.file: TextIO = path.open("w")
        self.file.write("line\n")


class Blocked:
    """An actor whose loop is blocked until a file has a line."""

    async def until_written(self, path: Path) -> None:
        while not path.stat().st_size:
            select.select([], [], [], 0.005)


@pytest.mark.slow
async def test_an_idle_actor_ends_in_order_beside_one_whose_loop_is_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "_SENDING", PATIENCE)  # above the time of the end, as in an end of a second
    async with zc.init(config=Config(shutdown_timeout=PATIENCE / 2)):
        path = tmp_path / "file"
        writer = await spawn(Writer)
        await writer.write(path)
        blocked = await spawn(Blocked)
        blocked.until_written(path)
    assert path.read_text() == "line\n"


ENDING = """
class Writer:
    def write(self):
        self.file = open("file", "w")
        self.file.write("line")

def until(passed):
    while not passed():
        pass

{begin}
    async with zc.init():
        writer = await zc.spawn(Writer)
        await writer.write()
        {last}

try:
    zc.run(main())
except BaseException as error:
    tell(left=[type(error).__name__, open("file").read()])
"""
"""A program that is cancelled while the last statement of its block computes. Its actor's file has the line once the
actor has ended in order."""
PLAIN = """
async def main():
"""
TIMED = """
async def main():
  async with asyncio.timeout(None) as limit:
"""
WITHIN = """
async def main():
  async with asyncio.timeout(None) as limit:
    await within(8, limit)

async def within(tasks, limit):
  if tasks:
    async with asyncio.TaskGroup() as group:
      group.create_task(within(tasks - 1, limit))
  else:
"""
GROUPED = """
async def fail(when):
    await when.wait()
    raise ValueError("mine")

async def main():
  when = asyncio.Event()
  async with asyncio.TaskGroup() as group:
    group.create_task(fail(when))
"""
HANDLED = """
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, asyncio.current_task().cancel)
"""
SIGNALLED = "os.kill(os.getpid(), signal.{})"
EXPIRED = "limit.reschedule(0); until(lambda past=time.monotonic() + 0.01: time.monotonic() > past)"
"""Timers of uvloop have its milliseconds."""


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize(
    ("begin", "last", "left"),
    [
        pytest.param(PLAIN, "asyncio.current_task().cancel()", "CancelledError", id="cancelled"),
        pytest.param(PLAIN, SIGNALLED.format("SIGINT"), "KeyboardInterrupt", id="Ctrl-C"),
        pytest.param(PLAIN, SIGNALLED.format("SIGTERM"), "SystemExit", id="SIGTERM"),
        pytest.param(HANDLED, SIGNALLED.format("SIGUSR1"), "CancelledError", id="handler of the loop"),
        pytest.param(TIMED, EXPIRED, "TimeoutError", id="timeout"),
        pytest.param(WITHIN, EXPIRED, "TimeoutError", id="timeout behind tasks"),
        pytest.param(GROUPED, "when.set()", "ExceptionGroup", id="task group"),
    ],
)
def test_actors_end_in_order_where_a_cancellation_comes_while_the_block_computes(
    begin: str, last: str, left: str, loop: str
) -> None:
    with Program(ENDING.format(begin=begin, last=last), env={"ZCACTOR_LOOP": loop}) as program:
        assert program.told("left") == [left, "line"]
        assert program.status() == 0
        program.assert_clean()


AGAIN = """
async def main():
    async with zc.init(shutdown_timeout=1000):
        actor = await zc.spawn(Busy)
        ref = actor.block()
        {last}

zc.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_again_ends_at_once_where_the_first_came_while_the_block_computed(times: int) -> None:
    source = AGAIN.format(last="; ".join([SIGNALLED.format("SIGINT")] * times))
    with Program(source) as program:
        if times == 1:
            until(lambda: "Ctrl-C again ends it at once" in program.stderr(), "the end says for what it waits")
            os.kill(program.pid, signal.SIGINT)
        assert program.status() in (-signal.SIGINT, 130)
        program.assert_clean()


@pytest.mark.slow
async def test_a_cancellation_right_after_the_one_that_ended_the_block_ends_at_once(tmp_path: Path) -> None:
    entered = asyncio.Event()
    path = tmp_path / "file"
    path.touch()

    async def main() -> None:
        async with zc.init(config=Config(shutdown_timeout=1000)):
            blocked = await spawn(Blocked)
            blocked.until_written(path)
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(main())
    await entered.wait()
    task.cancel()
    await asyncio.sleep(0)  # the end of the block begins
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE)
    assert task.cancelled()


@pytest.mark.slow
async def test_an_end_that_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for turns in (1, 3, 6):
        node = await zc.init()
        await spawn(Talker)
        ending = asyncio.ensure_future(zc.shutdown())
        for _ in range(turns):
            await asyncio.sleep(0.001)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        assert isinstance(node, EmbeddedRuntime)
        assert node._agent.returncode is not None
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("shutdown_timeout", [0.0, 1.0])
async def test_an_agent_that_is_stopped_is_killed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shutdown_timeout: float
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    node = await zc.init(config=Config(shutdown_timeout=shutdown_timeout))
    assert isinstance(node, EmbeddedRuntime)
    worker = await (await spawn(Talker)).say()
    os.kill(node._agent.pid, signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE):
        await zc.shutdown()
    assert node._agent.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    async with asyncio.timeout(PATIENCE):
        while alive(worker):
            await asyncio.sleep(0)


@pytest.mark.slow
async def test_an_agent_that_responds_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing takes all the time that actors have; the agent is asked, and not killed."""
    node = await zc.init(config=Config(shutdown_timeout=0.0))
    assert isinstance(node, EmbeddedRuntime)
    killed: list[None] = []
    monkeypatch.setattr(node, "_give_up", lambda: killed.append(None))
    await spawn(Talker)
    async with asyncio.timeout(PATIENCE):
        await zc.shutdown()
    assert killed == []
    assert node._agent.returncode == 0


@pytest.mark.parametrize("kind", [hostile.Guarded, hostile.Masked, hostile.Proxy])
async def test_actors_end_in_order_whatever_the_class_of_the_error_that_leaves_the_block(
    kind: type[Exception], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    left: list[type] = []
    try:
        async with zc.init():
            writer = await spawn(Writer)
            await writer.write(path)
            raise kind
    except Exception as error:
        left.append(type(error))
    assert left == [kind]
    assert path.read_text() == "line\n"
    with pytest.raises(zc.NotInitialized):
        await zc.shutdown()


async def test_the_end_counts_calls_whatever_the_classes_of_their_errors(caplog: pytest.LogCaptureFixture) -> None:
    async with zc.init() as runtime:
        call = Call(runtime.process.process, runtime.process.loop, runtime.process.thread)
        call.retrieved = True
        call.fail(hostile.Proxy())
        runtime.tell_unfinished([call])
    assert not caplog.records


SHARING = """
from multiprocessing import shared_memory
class Sharing:
    def share(self):
        self.memory = shared_memory.SharedMemory(create=True, size=4096)
        return self.memory.name
    def crash(self): os._exit(1)
async def main():
    async with zc.init():
        for end in ("kill", "crash"):
            actor = await zc.spawn(Sharing)
            path = "/dev/shm/" + await actor.share()
            assert os.path.exists(path)
            if end == "kill":
                await zc.kill(actor)
            else:
                await asyncio.gather(actor.crash(), return_exceptions=True)
            while os.path.exists(path):
                await asyncio.sleep(0)
            tell(gone=end)
        actor = await zc.spawn(Sharing)
        path = "/dev/shm/" + await actor.share()
        tell(path=path)
        os._exit(0)
asyncio.run(main())
"""


@pytest.mark.slow
def test_shared_memory_of_actors_is_removed_when_they_are_killed_or_crash_or_their_program_does() -> None:
    with Program(SHARING) as program:
        assert [program.told("gone") for _ in range(2)] == ["kill", "crash"]
        program.told("path")
        program.assert_clean()
