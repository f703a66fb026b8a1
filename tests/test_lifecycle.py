"""Whole programs, ended in every possible way: they leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.driver.programs import Program, alive, processes, until

pytestmark = pytest.mark.slow

IDLE = """
async def main():
    async with zc.init():
        actor = await zc.spawn(Busy)
        child = await actor.child(False)
        daemon = await actor.child(True)
        (node,) = await zc.nodes()
        tell(agent=node.pid, actor=await actor.pid(), child=child, daemon=daemon)
        await asyncio.Event().wait()
zc.run(main())
"""
"""A program that waits for ever, with an actor that has started two processes, one of them in a session of its own."""


def endings() -> list[object]:
    """Programs that end by themselves: source, expected status."""
    body = "        actor = await zc.spawn(Busy)\n        await actor.child(False)\n        tell(ready=1)\n"
    inside = f"async def main():\n    async with zc.init():\n{body}"
    bare = f"async def main():\n    if await zc.init():\n{body}"
    return [
        pytest.param(f"{inside}\nzc.run(main())\n", 0, id="normal end"),
        pytest.param(f"{inside}        raise ValueError('mine')\nzc.run(main())\n", 1, id="exception"),
        pytest.param(f"{bare}\nzc.run(main())\n", 0, id="no shutdown"),
        pytest.param(f"{bare}\nasyncio.run(main())\n", 0, id="no shutdown, asyncio"),
        pytest.param(f"{inside}        sys.exit(5)\nzc.run(main())\n", 5, id="sys.exit"),
        pytest.param(f"{bare}        sys.exit(5)\nzc.run(main())\n", 5, id="sys.exit, no shutdown"),
        pytest.param(f"{inside}        os._exit(6)\nzc.run(main())\n", 6, id="os._exit"),
        pytest.param(f"{inside}        os.abort()\nzc.run(main())\n", -signal.SIGABRT, id="abort"),
        pytest.param(f"{inside}        await zc.shutdown()\nzc.run(main())\n", 0, id="shutdown inside the block"),
        pytest.param(
            f"{bare}        global keep\n        keep = zc.ones(1 << 16)\nzc.run(main())\n",
            0,
            id="array alive at the end",
        ),
        pytest.param(
            "async def main():\n    asyncio.get_running_loop().call_later(0.02, task.cancel)\n    await zc.init()\n"
            "loop = asyncio.new_event_loop()\ntask = loop.create_task(main())\n"
            "try: loop.run_until_complete(task)\nexcept asyncio.CancelledError: tell(ready=1)\nloop.close()\n",
            0,
            id="init cancelled",
        ),
    ]


@pytest.mark.parametrize(("source", "status"), endings())
def test_a_program_that_ends_leaves_nothing(source: str, status: int) -> None:
    with Program(source) as program:
        program.told("ready")
        assert program.status() == status
        program.assert_clean()
        if status == 0:
            assert program.stderr() == ""


def test_the_run_directory_lies_where_the_system_says() -> None:
    with Program(IDLE, runtime_dir=True) as program:
        program.told("agent")
        (directory,) = program.runtime.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        assert not list(program.temporary.iterdir())
        os.kill(program.pid, signal.SIGTERM)
        assert program.status() == 128 + signal.SIGTERM, "zc.run has ended in order"
        program.assert_clean()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_driver_that_is_killed_leaves_nothing(number: int) -> None:
    with Program(IDLE) as program:
        program.told("agent")
        # Driver, agent, zygote, actor, and the actor's two children, whose environment shows a moment later.
        until(lambda: len(processes(program.mark)) == 6, "all processes show")
        os.kill(program.pid, number)
        program.status()
        program.assert_clean()


def test_the_drivers_process_group_is_killed() -> None:
    with Program(IDLE) as program:
        agent = program.told("agent")
        assert os.getpgid(agent) != os.getpgid(program.pid)
        os.killpg(program.pid, signal.SIGKILL)
        program.status()
        program.assert_clean()


WORKING = """
async def main():
    async with zc.init():
        actor = await zc.spawn(Busy)
        {work}
    tell(left=1)
zc.run(main())
"""


@pytest.mark.parametrize("work", ["await actor.block()", "await actor.wait()"])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(work: str, times: int) -> None:
    with Program(WORKING.format(work=work)) as program:
        program.told("blocked" if "block" in work else "waiting")
        for _ in range(times):
            os.kill(program.pid, signal.SIGINT)
        assert program.status() in (-signal.SIGINT, 130)
        program.assert_clean()
        assert "KeyboardInterrupt" in program.stderr()
        assert "Task was destroyed" not in program.stderr()


@pytest.mark.parametrize("work", ["await actor.block()", "await actor.wait()"])
def test_ctrl_c_at_a_terminal(work: str) -> None:
    with Program(WORKING.format(work=work), terminal=True) as program:
        program.told("blocked" if "block" in work else "waiting")
        assert program.terminal is not None
        os.write(program.terminal, b"\x03")  # the terminal sends SIGINT to its whole foreground process group
        assert program.status() in (-signal.SIGINT, 130)
        program.assert_clean()


def test_ctrl_c_while_it_starts() -> None:
    with Program("tell(ready=1)\nasync def main():\n    async with zc.init(): tell(up=1)\nzc.run(main())") as program:
        program.told("ready")
        os.kill(program.pid, signal.SIGINT)
        program.status()
        program.assert_clean()


def test_leaving_waits_no_longer_than_it_may_for_a_method_that_runs() -> None:
    source = """
async def main():
    async with zc.init(shutdown_timeout=0.5):
        actor, other = await zc.spawn(Busy), await zc.spawn(Busy)
        ref = actor.block()
        wait = other.wait()
        await asyncio.sleep(0)
        await zc.spawn(Busy)
        begin = time.monotonic()
    tell(seconds=time.monotonic() - begin)
    for each in (ref, wait):
        try: await each
        except zc.ZcactorError as error: tell(error=type(error).__name__)
zc.run(main())
"""
    with Program(source) as program:
        assert program.told("seconds") < 5  # far below the 1000 s of the method
        program.told("error")
        program.told("error")
        assert program.status() == 0
        program.assert_clean()


def test_a_blocked_loop_does_not_hold_up_the_end() -> None:
    source = """
class Gate:
    def __init__(self): self.opened = asyncio.Event()
    async def open(self): self.opened.set()
    async def passed(self): await self.opened.wait()
class Stuck:
    async def block(self, gate):
        await gate.open()
        hang()
async def main():
    async with zc.init():
        gate, actor = await zc.spawn(Gate), await zc.spawn(Stuck)
        ref = actor.block(gate)
        await gate.passed()
    tell(left=1)
    ref.cancel()
zc.run(main())
"""
    with Program(source) as program:
        program.told("left")
        assert program.status() == 0
        program.assert_clean()


def test_what_is_printed_just_before_the_end_is_shown() -> None:
    source = """
class Closing:
    def __init__(self): self.count = 0
    def say(self, text): print(text)
    def partly(self, text): print(text, end="")
    def close(self): print("closed")
async def main():
    async with zc.init():
        actors = [await zc.spawn(Closing) for _ in range(3)]
        for actor in actors:
            actor.say("last words")
        await asyncio.gather(*[actor.partly("no end of line") for actor in actors])
zc.run(main())
"""
    with Program(source) as program:
        assert program.status() == 0
        assert program.text().count("last words\n") == 3
        assert program.text().count("no end of lineclosed\n") == 3
        program.assert_clean()


def test_the_agent_is_killed() -> None:
    source = """
async def main():
    async with zc.init():
        actor = await zc.spawn(Busy)
        child = await actor.child(True)
        (node,) = await zc.nodes()
        waiting = actor.wait()
        pid = await actor.pid()  # which runs after the other has begun, and told that; nobody could be told later
        tell(agent=node.pid, actor=pid, child=child)
        try: await waiting
        except zc.ActorDied as error: tell(error=str(error))
        for attempt in (lambda: actor.pid(), lambda: zc.spawn(Busy), lambda: zc.nodes()):
            try: await attempt()
            except (zc.ActorDied, zc.ConnectionLost) as error: tell(error=str(error))
    tell(left=1)
zc.run(main())
"""
    with Program(source) as program:
        agent = program.told("agent")
        others = processes(program.mark)
        os.kill(agent, signal.SIGKILL)
        assert "agent" in program.told("error")
        for _ in range(3):
            program.told("error")
        program.told("left")
        assert program.status() == 0
        program.assert_clean()
        assert len(others) >= 4


def test_the_zygote_is_killed() -> None:
    source = IDLE.replace(
        "await asyncio.Event().wait()",
        """
        try: await actor.wait()
        except zc.ActorDied as error: tell(error=str(error))
    tell(left=1)
""".strip(),
    )
    with Program(source) as program:
        program.told("agent")
        program.told("waiting")
        zygote = next(pid for pid, text in processes(program.mark).items() if text.startswith("zc zygote"))
        os.kill(zygote, signal.SIGKILL)
        program.told("error")
        program.told("left")
        assert program.status() == 0
        program.assert_clean()


def test_everything_is_killed_at_once_and_the_next_start_cleans_up() -> None:
    with Program(IDLE) as program:
        program.told("agent")
        until(lambda: _kill_all(program.mark), "all processes are dead")
        assert program.status() == -signal.SIGKILL
        # The kernel closes descriptors on their way between two dead processes a moment after the last of them is gone.
        until(lambda: set(program.left_behind()) == {"files"}, "sockets' files and the lock are all that stays")
        clean = subprocess.run(
            [
                sys.executable,
                "-c",
                "import asyncio, zcactor as zc\nasync def f():\n  async with zc.init(): pass\nzc.run(f())",
            ],
            env={**os.environ, "TMPDIR": str(program.temporary), "PYTHONPATH": str(Path(__file__).parents[1])},
            check=True,
        )
        assert clean.returncode == 0
        program.assert_clean()


def _kill_all(mark: str) -> bool:
    """Stop all of them, then kill them, so that none sees another's end before its own.

    Returns whether they were gone already.
    """
    found = processes(mark)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    return not found


def test_the_driver_is_killed_while_it_waits_for_the_end() -> None:
    source = """
class Slow:
    def close(self):
        tell(closing=1)
        hang()
async def main():
    async with zc.init():
        actor = await zc.spawn(Slow)
zc.run(main())
"""
    with Program(source, env={"ZCACTOR_SHUTDOWN_TIMEOUT": "1000"}) as program:
        program.told("closing")
        begin = time.monotonic()
        os.kill(program.pid, signal.SIGKILL)
        program.status()
        program.assert_clean()
        assert time.monotonic() - begin < 100, "the grace of 1000 s was waited for"


def test_a_close_hook_gets_its_grace_and_no_more() -> None:
    source = """
class Slow:
    def close(self): hang()
async def main():
    async with zc.init():
        actor = await zc.spawn(Slow)
    tell(left=1)
zc.run(main())
"""
    with Program(source, env={"ZCACTOR_SHUTDOWN_TIMEOUT": "0.2"}) as program:
        program.told("left")
        assert program.status() == 0
        program.assert_clean()


def test_a_child_that_was_forked_does_not_keep_a_dead_drivers_node() -> None:
    source = IDLE.replace(
        "tell(agent", "forked = os.fork() or (hang(), os._exit(0))\n        tell(forked=forked, agent"
    )
    with Program(source) as program:
        forked = program.told("forked")
        os.kill(program.pid, signal.SIGKILL)
        until(lambda: set(processes(program.mark)) == {forked}, "only the forked child is left")
        os.kill(forked, signal.SIGKILL)
        program.status()
        program.assert_clean()


@pytest.mark.parametrize("first", ["agent", "zygote"])
def test_the_agent_and_the_zygote_are_killed(first: str) -> None:
    source = """
shell = ["/bin/sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 & echo $!"]
async def main():
    async with zc.init():
        actor = await zc.spawn(Starter)
        own = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
        pids = [await actor.child(False), await actor.child(True), await actor.bare(), await actor.grandchild()]
        (node,) = await zc.nodes()
        tell(all=dict(agent=node.pid, own=int(own), pids=pids))
        await asyncio.Event().wait()
class Starter(Busy):
    def bare(self):
        "One that has no environment."
        return subprocess.Popen(["sleep", "1000"], env={}).pid
    def grandchild(self):
        "One that nobody waits for, in a session of its own."
        return int(subprocess.run(shell, capture_output=True, text=True, check=True).stdout)
zc.run(main())
"""
    with Program(source) as program:
        told = program.told("all")
        zygote = next(pid for pid, text in processes(program.mark).items() if text.startswith("zc zygote"))
        order = [told["agent"], zygote]
        for pid in order if first == "agent" else reversed(order):
            with contextlib.suppress(ProcessLookupError):  # it may have ended with the other process
                os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(alive, told["pids"])), "what the actor has started ends")
        assert alive(told["own"])  # the program itself has left this process behind, and zcactor leaves it alone
        os.kill(told["own"], signal.SIGKILL)
        os.kill(program.pid, signal.SIGINT)
        program.status()
        program.assert_clean()
