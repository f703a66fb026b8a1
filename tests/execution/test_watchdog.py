"""The watchdog's warnings about calls and loops that wait too long, in a program's standard error, and how often."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.driver.programs import Program, until
from zcactor.execution.watchdog import AGAIN, Watchdog
from zcactor.interface import Interface
from zcactor.native import hot

BLOCKS = """
class Blocks:
    async def pid(self): return os.getpid()
    async def hold(self, path):
        open(path).close()
    @zc.method(inline=True)
    def inline(self, path):
        open(path).close()
    async def wait(self, path):
        await asyncio.sleep(0)
        self.deeper(path)
    def deeper(self, path):
        open(path).close()

async def main():
    async with zc.init():
        for name in ("hold", "inline", "wait"):
            actors = [await zc.actor(process="{process}")(Blocks).spawn() for _ in range({count})]
            label = repr(actors[-1])[len("<handle of "):-1]
            tell(actor=[label, await actors[-1].pid()])
            await getattr(actors[-1], name)("{directory}/" + name)
zc.run(main())
"""


def fifos(directory: Path, *names: str) -> None:
    """Make FIFOs: opening one to read blocks until another process opens it to write."""
    for name in names:
        os.mkfifo(directory / name)


def line_of(program: Program, text: str, after: str) -> int:
    """The number of the first line with `text` after a line with `after`."""
    lines = program.file.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if after in line)
    return next(number for number, line in enumerate(lines, 1) if number > start and text in line)


def said(program: Program, text: str) -> str:
    """Wait for the line of standard error that ends with `text`."""
    found: list[str] = until(
        lambda: [line for line in program.stderr().splitlines() if line.endswith(text)], f"a line with {text!r}"
    )
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(("process", "count"), [("own", 1), ("shared", 3)])
def test_a_loop_that_is_blocked(tmp_path: Path, process: str, count: int) -> None:
    fifos(tmp_path, "hold", "inline", "wait")
    source = BLOCKS.format(directory=tmp_path, process=process, count=count)
    with Program(source, env={"ZCACTOR_WARN_AFTER": "0.2", "ZCACTOR_NUM_CPUS": "1"}) as program:
        lines = []
        for name in ("hold", "inline", "wait"):
            label, pid = program.told("actor")
            number = line_of(program, "self.deeper" if name == "wait" else "open", f"def {name}")
            text = f"has not come back to its event loop for 0.2 s: in {name}, program.py:{number}"
            line = said(program, text)
            lines.append(line)
            if process == "own" or name != "inline":  # an inline call leaves no trace of its actor
                prefix = "Blocks" if process == "own" else "shared"
                assert line == f"({prefix} pid={pid}) WARNING zcactor: {label} {text}"
            (tmp_path / name).open("w").close()
        assert program.status() == 0
        every = program.stderr().splitlines()
        assert [every.count(line) for line in lines] == [1, 1, 1]


MUTUAL = """
class Mutual:
    async def pid(self): return os.getpid()
    def f(self, other, mine, others):
        async def wait(): return await other.g()
        with open(mine, "r+b", buffering=0) as here:
            here.write(b"x")
            with open(others, "rb", buffering=0) as there: there.read(1)
            return asyncio.run(wait())
    def g(self): return "g"
    def slow(self, path):
        open(path).close()

async def main():
    async with zc.init():
        one, other = await zc.spawn(Mutual), await zc.spawn(Mutual)
        pids = [await each.pid() for each in (one, other)]
        tell(labels=[repr(each)[len("<handle of "):-1] for each in (one, other)])
        slow, behind = one.slow("{directory}/go"), one.g()
        tell(slow=1)
        await behind
        runs = ["{directory}/one", "{directory}/other"]
        refs = [one.f(other, *runs), other.f(one, *runs[::-1])]
        tell(pids=pids)
        await zc.get(refs)
zc.run(main())
"""


@pytest.mark.slow
def test_plain_methods_that_wait_for_each_other(tmp_path: Path) -> None:
    fifos(tmp_path, "go", "one", "other")
    with Program(MUTUAL.format(directory=tmp_path), env={"ZCACTOR_WARN_AFTER": "0.2"}) as program:
        one, other = program.told("labels")
        program.told("slow")
        number = line_of(program, "open", "def slow")
        said(program, f"WARNING zcactor: Mutual.g has waited 0.2 s for Mutual.slow, which is at program.py:{number}")
        (tmp_path / "go").open("w").close()
        _, there = program.told("pids")
        # One of them was reported, so it has to wait a minute for the next warning; the other was not.
        line = said(program, "which waits for " + one + ".g")
        assert line == (
            f"(Mutual pid={there}) WARNING zcactor: Mutual.g has waited 0.2 s for Mutual.f, which waits for {one}.g"
        )
        assert f"which waits for {other}.g" not in program.stderr()


# ---------------------------------------------------------------- how often, and when not at all


class Fakes:
    """A process of one actor, with calls that wait or run, and a loop that is alive or not."""

    def __init__(self) -> None:
        class Slow:
            def run(self) -> None: ...

        self.alive = True
        self.asked = 0
        self.waiter = SimpleNamespace(get_loop=lambda: "a loop of its own")
        mailbox = SimpleNamespace(tasks=hot.Admission(10))
        self.host = SimpleNamespace(
            index=2, label="Slow(a)", interface=Interface.of(Slow), mailbox_of=lambda _: mailbox, stopping=False
        )
        self.session = SimpleNamespace(incoming={})
        self.loop = SimpleNamespace(call_soon_threadsafe=self.call_soon, is_closed=lambda: False)
        self.sessions: Any = SimpleNamespace(all=lambda: [self.session], remotes={})
        self.counters: Any = SimpleNamespace(frames_received=0)

    def watchdog(self, after: float = 5.0) -> Watchdog:
        tasks: Any = SimpleNamespace(loop=self.loop, thread=0)
        hosts: Any = {2: self.host}
        return Watchdog(hosts, self.sessions, self.counters, tasks, after)

    def call_soon(self, callback: Any) -> None:
        self.asked += 1
        if self.alive:
            callback()

    def call(self, number: int, *, started: bool) -> None:
        self.session.incoming[number] = SimpleNamespace(
            session=self.session, id=number, host=self.host, actor=2, code=0, started=started, cancelled=False,
            blockers=0, stream=None, task=None,
        )  # fmt: skip


def test_nothing_wakes_an_idle_loop() -> None:
    fakes = Fakes()
    watchdog = fakes.watchdog()
    for second in range(1000):
        watchdog.look(float(second))
    assert fakes.asked == 0
    fakes.counters.frames_received = 1
    watchdog.look(1000.0)
    watchdog.look(1001.0)
    assert fakes.asked == 1


def test_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    fakes = Fakes()
    watchdog = fakes.watchdog()
    fakes.alive = False
    fakes.call(1, started=True)
    for number in range(2, 50):
        fakes.call(number, started=False)
    for second in range(4 + 5):
        watchdog.look(float(second))
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "Slow(a) has not come back to its event loop for 5 s: in ?, ?:0",
        "Slow.run has waited 5 s for Slow.run, which runs",
    ]
    for second in range(9, int(AGAIN) + 5):
        watchdog.look(float(second))
    assert len(caplog.records) == 2
    watchdog.look(AGAIN + 5)
    assert len(caplog.records) == 4


def test_what_a_method_waits_for_is_named(caplog: pytest.LogCaptureFixture) -> None:
    fakes = Fakes()
    fakes.call(1, started=True)
    fakes.call(2, started=False)
    calls = [
        SimpleNamespace(label=f"Other.m{number}", waiter=waiter, blocked=0)
        for number, waiter in enumerate([None, *[fakes.waiter] * 4, SimpleNamespace(get_loop=lambda: fakes.loop)])
    ]
    fakes.sessions.remotes = {b"": SimpleNamespace(label="Other(b)", unfinished=calls)}
    watchdog = fakes.watchdog()
    for second in range(6):
        watchdog.look(float(second))
    (record,) = caplog.records
    assert record.getMessage() == (
        "Slow.run has waited 5 s for Slow.run, which waits for Other(b).m1, Other(b).m2, Other(b).m3, and others"
    )


def test_time_in_which_the_process_was_stopped_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    fakes = Fakes()
    watchdog = fakes.watchdog()
    fakes.alive = False
    fakes.call(1, started=True)
    fakes.call(2, started=False)
    for second in (0, 1, 2, 1000, 1001, 1002, 1003, 1004):
        watchdog.look(float(second))
    assert not caplog.records
    watchdog.look(1005.0)
    assert len(caplog.records) == 2


def test_the_thread_ends() -> None:
    watchdog = Fakes().watchdog(0.01)
    watchdog.start()
    watchdog.start()
    watchdog.close()
    thread = watchdog._thread
    assert thread is not None
    thread.join(20)
    assert not thread.is_alive()


WAITS = """
@zc.actor(num_cpus=1)
class Greedy:
    def pid(self): return os.getpid()

async def main():
    async with zc.init(num_cpus=1):
        first = await Greedy.spawn()
        tell(label=repr(first)[len("<handle of "):-1])
        await asyncio.gather(*[Greedy.spawn() for _ in range({count})])
zc.run(main())
"""


@pytest.mark.slow
def test_a_spawn_that_waits_says_for_what() -> None:
    with Program(WAITS.format(count=1)) as program:
        label = program.told("label")
        assert said(program, label) == f"Greedy waits for 1 CPU: 1 of 1 held by {label}"


@pytest.mark.slow
def test_many_spawns_that_wait_say_so_in_one_line() -> None:
    with Program(WAITS.format(count=300)) as program:
        label = program.told("label")
        line = f"300 spawns of Greedy wait, each for 1 CPU: 1 of 1 held by {label}"
        assert said(program, label) == line


OFF = """
class Told:
    def threads(self): return [thread.name for thread in threading.enumerate()]

async def main():
    async with zc.init():
        tell(threads=await (await zc.spawn(Told)).threads())
zc.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", ["0", "3"])
def test_it_can_be_switched_off(after: str) -> None:
    with Program(OFF, env={"ZCACTOR_WARN_AFTER": after}) as program:
        assert ("watchdog" in program.told("threads")) == (after != "0")
        assert program.status() == 0
