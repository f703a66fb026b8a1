"""Draining real nodes: two of one host, whose actors are called without pause, and every command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.cluster.hosts import Hosts
from tests.driver.programs import until
from zcactor.cluster import drain as module
from zcactor.cluster.daemon import KeptState
from zcactor.cluster.drain import Drained, drain
from zcactor.process.cluster import HeadService, MembershipService

PROGRAM = """
from tests.control.movers import Tally
from zcactor.cluster.drain import drain

async def main():
    async with zc.init(ADDRESS):
        actors = [
            await Tally.options(node="spread", max_restarts=-1, name=f"t{n}").spawn(f"t{n}", f"{FOLDER}/t{n}")
            for n in range(4)
        ]
        before = await asyncio.gather(*(actor.node() for actor in actors))
        over = asyncio.Event()

        async def call(caller, n):
            number, refs = 0, []
            while not over.is_set():
                number += 1
                refs.append(actors[n].add(f"{caller} {number}"))
                if len(refs) == 16:
                    await asyncio.gather(*refs)
                    refs.clear()
            await asyncio.gather(*refs)
            return number

        async def pass_on(n):
            number = 0
            while not over.is_set():
                number += 1
                assert await actors[n].total(actors[(n + 1) % 4].make(50_000)) == 50_000
                assert await actors[n].total(np.ones(50_000)) == 50_000
                assert [item async for item in actors[n].items(20)] == list(range(20))
            return number

        calls = [asyncio.create_task(call(caller, n)) for n in range(4) for caller in "ab"]
        others = [asyncio.create_task(pass_on(n)) for n in range(4)]
        while not all([await actor.all() for actor in actors]):
            pass
        done = await drain(NODE, restart=RESTART)
        tell(moved=done.moved, left=done.left, joined=done.joined)
        over.set()
        tell(counts=await asyncio.gather(*calls), others=await asyncio.gather(*others))
        after = await asyncio.gather(*(actor.node() for actor in actors))
        nodes, actors = await zc.nodes(), await zc.actors()
        tell(end=dict(was=before.count(NODE), now=after.count(NODE), nodes=[node.node_id for node in nodes],
                      restarts=[actor.restarts for actor in actors]))

zc.run(main())
"""


CALLS = 3
BUSY = f"""
import subprocess
import sys

from tests.control.movers import Tally

async def main():
    async with zc.init(ADDRESS):
        actors = [await Tally.options(node="spread", max_restarts=-1).spawn() for _ in range(4)]
        places = await asyncio.gather(*(actor.node() for actor in actors))
        actor, other = [actor for actor, place in zip(actors, places) if place == NODE]
        flying = [actor.add(number) for number in range({CALLS})]
        done = subprocess.run([sys.executable, "-m", "zcactor", "drain", NODE, "--restart"])
        calls = [actor.add("first"), other.add("second")]
        tell(status=done.returncode)
        tell(answers=await asyncio.gather(*flying, *calls))
        tell(moved=NODE not in await asyncio.gather(actor.node(), other.node()))

zc.run(main())
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as found:
        yield found


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_call_fails_while_a_node_is_drained_and_starts_again(hosts: Hosts) -> None:
    head = hosts.start("a", state=KeptState(hosts.directory / "log"))
    member = hosts.start("b", head, resources={"tape": 2.0})
    settings = f"NODE, RESTART, FOLDER = {member.record.node!r}, True, {str(hosts.directory)!r}\n"
    with hosts.program(settings + PROGRAM, head.record.address) as program:
        assert program.told("moved", patience=120.0) == 2
        counts = program.told("counts", patience=60.0)
        told = program.told("end")
        assert program.status() == 0
        progress = [line for line in program.printed if line.startswith(("draining", "Tally", "node"))]
    assert (told["was"], told["now"], told["restarts"]) == (2, 0, [0] * 4)
    assert member.record.node not in told["nodes"] and len(told["nodes"]) == 2
    assert any(line.endswith("2 actors move, 0 are waited for") for line in progress)
    assert sum(" has moved to node " in line for line in progress) == 2
    for n in range(4):  # each call of each caller ran once, in order, also over the two lives of an actor
        lines = lines_of(hosts.directory / f"t{n}")
        for at, caller in enumerate("ab"):
            assert [line for line in lines if line[0] == caller] == [
                f"{caller} {number}" for number in range(1, counts[2 * n + at] + 1)
            ]
    ended = [lines_of(hosts.directory / f"t{n}").count("closed") for n in range(4)]
    assert sorted(ended) == [1, 1, 2, 2]
    assert member.process.wait(20) in (0, 75)
    done = hosts.zcactor("status", "--json")
    assert '"tape"' in done.stdout, "the node has come back with its own options"
    done = hosts.zcactor("stop")
    assert done.returncode == 0
    assert hosts.zcactor("stop", host="b").returncode == 0
    until(lambda: not hosts.processes(), "all processes to end")
    head.process.wait()
    hosts.assert_clean("a", "b")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_call_fails_of_a_program_that_computes_on_its_loop_while_a_node_is_drained(hosts: Hosts) -> None:
    head = hosts.start("a", state=KeptState(hosts.directory / "log"))
    member = hosts.start("b", head)
    settings = f"NODE = {member.record.node!r}\n"
    with hosts.program(settings + BUSY, head.record.address) as program:
        assert program.told("status", patience=120.0) == 0
        assert program.told("answers", patience=60.0) == [*range(CALLS), "first", "second"]
        assert program.told("moved")
        assert program.status() == 0


def test_the_end_of_a_drain() -> None:
    told = {"node": "n", "moved": 1, "left": ["Tally(a): it stays"], "joined": ""}
    assert msgspec.convert(told, Drained) == Drained("n", 1, ["Tally(a): it stays"], "")


class FakeLink:
    """The way to a head beside the node that is drained, where perhaps another one stands by."""

    def __init__(self, standbys: list[str], resigns: bool) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.epoch, self._standbys, self._resigns = 3, standbys, resigns
        self._given = False
        self.beside_head, self.left = True, list[str]()

    async def ask(self, method: Any, *args: Any) -> Any:
        """Drain, say who leads, or have the next one lead."""
        self.asked.append((method.__name__, *args))
        if method is MembershipService.drain:
            return {"node": "n", "moved": 1, "left": self.left, "joined": "", "beside_head": self.beside_head}
        if method is HeadService.leader:
            told = {"epoch": self.epoch, "address": f"head:{self.epoch}", "standbys": self._standbys}
            self.epoch += self._given and self._resigns
            return told
        self._given = True
        return self._resigns


@pytest.mark.parametrize(
    ("standbys", "resigns", "head"), [(["b:1"], True, "head:4"), (["b:1"], False, ""), ([], True, "")]
)
async def test_the_head_on_the_nodes_host_resigns(
    monkeypatch: pytest.MonkeyPatch, standbys: list[str], resigns: bool, head: str
) -> None:
    link = FakeLink(standbys, resigns)
    monkeypatch.setattr(module, "current", lambda: SimpleNamespace(head=link))
    assert await drain("n", 5.0) == Drained("n", 1, [], "", True, head)
    assert link.asked[:2] == [("drain", "n", 5.0, False), ("leader",)]
    again = [("leader",)] * resigns  # it answered once before it ended
    assert link.asked[2:] == ([("give_way", 3), ("leader",), *again] if standbys else [])


async def test_the_head_is_asked_with_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    class Text(str):
        """A text of the program's, which the head must not unpickle."""

    link = FakeLink([], True)
    monkeypatch.setattr(module, "current", lambda: SimpleNamespace(head=link))
    await drain(Text("n"), np.float32(2))  # type: ignore[arg-type]
    assert [type(value) for value in link.asked[0][1:]] == [str, float, bool]
    for name, message in (
        ("node", "must be a str of 1 to 1,000 characters, got <object"),
        ("timeout", "is <object .*it takes seconds as a number, or None"),
        ("restart", "must be a bool, got <object"),
    ):
        mistaken: dict[str, Any] = {"node": "n", name: object()}
        with pytest.raises(TypeError, match=f"drain: {name} {message}"):
            await drain(**mistaken)


@pytest.mark.parametrize("why", ["restart", "elsewhere", "left"])
async def test_a_head_that_stays(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    link = FakeLink(["b:1"], True)
    link.beside_head = why != "elsewhere"
    link.left = ["Tally(a): it stays"] if why == "left" else []
    monkeypatch.setattr(module, "current", lambda: SimpleNamespace(head=link))
    assert (await drain("n", restart=why == "restart")).head == ""
    assert link.asked == [("drain", "n", None, why == "restart")]
