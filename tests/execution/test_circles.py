"""Actors that wait for each other are named as a circle, once, and others are not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.driver.programs import Program, until
from zcactor.execution.activity import Activity, ActorActivity, Awaited, Running
from zcactor.execution.circles import Circles

SOURCE = """
class Mutual:
    def meet(self, other, barrier):
        open(barrier + " is here", "w").close()
        open(barrier).close()           # until all have begun
        return other.answer().result()
    def answer(self): return 1

async def main():
    async with zc.init(warn_after=0.2):
        actors = [await zc.spawn(Mutual) for _ in range({count})]
        tell(labels=[repr(each)[len("<handle of "):-1] for each in actors])
        refs = [each.meet(other, "{directory}/%d" % number)
                for number, (each, other) in enumerate(zip(actors, actors[1:] + actors[:1]))]
        paths = ["{directory}/%d" % number for number in range(len(refs))]
        while not all(os.path.exists(path + " is here") for path in paths): await asyncio.sleep(0.01)
        for path in paths: os.open(path, os.O_RDWR)     # they may all go on now
        tell(met=True)
        await zc.get(refs)
zc.run(main())
"""
ASYNC = """
@zc.actor(max_concurrency=1)
class Async:
    async def know(self, me): self.me = me
    async def ask(self, other, more): return await other.ask(self.me, more - 1) if more else 1

async def main():
    async with zc.init(warn_after=0.2):
        actors = [await Async.spawn() for _ in range(2)]
        tell(labels=[repr(each)[len("<handle of "):-1] for each in actors])
        for each in actors: await each.know(each)
        await actors[0].ask(actors[1], 2)
zc.run(main())
"""


def circles(program: Program) -> list[str]:
    """The lines that name a circle."""
    return [
        line for line in program.stderr().splitlines() if "wait for each other" in line or "when that method" in line
    ]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_plain_methods_in_a_circle_are_named_once(tmp_path: Path, count: int) -> None:
    for number in range(count):
        os.mkfifo(tmp_path / str(number))
    with Program(SOURCE.format(directory=tmp_path, count=count)) as program:
        labels = program.told("labels")
        program.told("met")
        (line,) = until(lambda: circles(program), "a line that names the circle")
        assert f"WARNING zcactor: {count} actors wait for each other, and none goes on as long as they do: " in line
        for one, other in zip(labels, labels[1:] + labels[:1], strict=True):
            assert f"{one}.meet waits for {other}.answer" in line
        held = f"Mutual.answer has waited 0.2 s for Mutual.meet, which waits for {labels[0]}.answer"
        until(lambda: held in program.stderr(), "the warning of another process of the circle")
        assert len(circles(program)) == 1


@pytest.mark.slow
def test_a_method_that_waits_for_its_own_actor(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0")
    with Program(SOURCE.format(directory=tmp_path, count=1)) as program:
        (label,) = program.told("labels")
        program.told("met")
        (line,) = until(lambda: circles(program), "a line that names the circle")
        assert f"{label}.meet waits for {label}.answer, which starts when that method has ended" in line


@pytest.mark.slow
def test_async_methods_that_may_not_run_beside_each_other() -> None:
    with Program(ASYNC) as program:
        one, other = program.told("labels")
        (line,) = until(lambda: circles(program), "a line that names the circle")
        assert f"{one}.ask waits for {other}.ask; {other}.ask waits for {one}.ask" in line


# ---------------------------------------------------------------- what is no circle


def activity(
    running: int, awaited: list[bytes], waited: float | None = None, *, plain: bool = False, blocks: bool = False,
    actor: str = "cd",
) -> Activity:  # fmt: skip
    """A process with one actor, which runs so many calls and awaits calls to other processes."""
    calls = [Running("f", 9.0, plain) for _ in range(running)]
    waits = [Awaited(actor, f"B{to.decode()}.g", to, blocks) for to in awaited]
    return Activity([ActorActivity("ab", "A", calls, 1, waited)], waits, 0)


def searched(own: Activity, others: dict[bytes, Activity], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of a search in process ``b"m"``, with other processes by id."""
    asked: list[bytes] = []

    async def ask(session: bytes, _: object) -> Any:
        asked.append(session)
        assert len(asked) < 50
        return others[session]

    async def connect(process: bytes) -> bytes:
        return process

    process: Any = SimpleNamespace(
        process=b"m", connections=SimpleNamespace(connect=connect), requests=SimpleNamespace(ask=ask)
    )
    service: Any = SimpleNamespace(now=lambda: own)
    circles = Circles(process, service)
    for _ in range(2):
        asyncio.run(circles.search())
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (activity(1, []), {}),
        (activity(2, [b"x"]), {b"x": activity(1, [b"m"])}),
        (activity(1, [b"x"]), {b"x": activity(2, [b"m"])}),
        (activity(1, [b"x"]), {b"x": activity(1, [])}),
        (activity(1, [b"x"]), {b"x": activity(1, [b"y"]), b"y": activity(1, [b"x"])}),
        (activity(1, [b"a"]), {b"a": activity(1, [b"m"], waited=1.0)}),
        (activity(1, [b"x"], plain=True), {b"x": activity(1, [b"m"])}),
        (activity(1, [b"x"]), {b"x": activity(1, [b"m"], blocks=True)}),
        (activity(1, [b"m"], plain=True, actor="ab"), {}),
        (activity(1, [b"m"]), {}),
    ],
    ids=[
        "nothing awaited",
        "several run here",
        "several run there",
        "one goes on",
        "a circle of others",
        "others tell",
        "a task beside a plain method awaits",
        "a thread beside an async method waits",
        "a task awaits its own actor beside a plain method",
        "another actor of the process is awaited",
    ],
)
def test_no_circle(own: Activity, others: dict[bytes, Activity], caplog: pytest.LogCaptureFixture) -> None:
    assert searched(own, others, caplog) == []


def test_a_circle_is_named_once_and_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = searched(activity(1, [b"x"]), {b"x": activity(1, [b"m"], waited=1.0)}, caplog)
    assert line.startswith(
        "2 actors wait for each other, and none goes on as long as they do: A.f waits for Bx.g; A.f waits for Bm.g."
    )
    caplog.clear()
    chain = {bytes([number]): activity(1, [bytes([number + 1])]) for number in range(60, 100)}
    assert searched(activity(1, [bytes([60])]), chain, caplog) == []
