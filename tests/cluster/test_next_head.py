"""Heads that end, or decide no more, before a node or a program has joined them: the next one is looked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.hosts import Hosts, beside, stop
from zcactor.cluster import daemon
from zcactor.cluster.daemon import StartedNode, TermOver
from zcactor.driver.finding import find_head
from zcactor.errors import ConnectionLost


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as found:
        yield found


DECIDES_NO_MORE = """
from zcactor.process.cluster import HeadService
from zcactor.driver import joining
async def main():
    if what == "depose":
        async with zc.init(ADDRESS) as runtime:
            tell(said=await runtime.process.head.ask(HeadService.stay, 1 << 40))
    elif what == "give up":
        try:
            async with zc.init(ADDRESS, config=zc.Config(head_timeout=0.3)):
                tell(said="joined")
        except zc.ConnectionLost as error:
            tell(said=str(error))
    else:
        find, looked = joining.find_head, []
        async def find_another(address, *args):
            looked.append(address)
            return await find(what if len(looked) > 1 else address, *args)
        joining.find_head = find_another
        async with zc.init(ADDRESS):
            tell(said=(len(looked), [node.address.partition("@")[2] for node in await zc.nodes()]))
zc.run(main())
"""


@pytest.mark.slow
def test_the_next_head_is_looked_for_where_the_first_decides_no_more(hosts: Hosts) -> None:
    first, second = hosts.start(), hosts.start("b")

    def told(what: str) -> Any:
        with hosts.program(f"what = {what!r}\n" + DECIDES_NO_MORE, first.record.address) as program:
            answer = program.told("said")
            assert program.status() == 0
        return answer

    assert told("depose")[1] is None, "it says that programs may not stay"
    assert "decides no more: the term with epoch" in told("give up")
    assert told(second.record.address) == [2, [beside(second).record.address]]
    stop(hosts)


KILLED_BEFORE = """
import select, signal
from zcactor.driver import joining
async def main():
    find, looked = joining.find_head, []
    async def find_and_kill(address, *args):
        looked.append(address)
        if len(looked) > 1:
            return await find(other, *args)
        identity, head = await find(address, *args), os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([head], [], [])
        return identity
    joining.find_head = find_and_kill
    try:
        async with zc.init(ADDRESS, config=zc.Config(head_timeout=timeout)):
            tell(said=(len(looked), [node.address.partition("@")[2] for node in await zc.nodes()]))
    except zc.ConnectionLost as error:
        tell(said=str(error))
zc.run(main())
"""


@pytest.mark.slow
def test_a_program_looks_for_the_next_head_where_the_first_is_killed_before_it_joins(hosts: Hosts) -> None:
    first, second = hosts.start(), hosts.start("b")

    def told(head: StartedNode, timeout: float) -> Any:
        given = f"pid, other, timeout = {head.process.pid}, {second.record.address!r}, {timeout}\n"
        with hosts.program(given + KILLED_BEFORE, head.record.address) as program:
            answer = program.told("said")
            assert program.status() == 0
        return answer

    assert told(first, 60.0) == [2, [beside(second).record.address]]
    assert "zc.init: the head at" in told(second, 0.05), "nobody leads in time"
    stop(hosts)
    stop(hosts, "b")


@pytest.mark.slow
def test_a_node_looks_for_the_next_head_where_the_first_decides_no_more(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hosts.start(), hosts.start("b")
    with hosts.program("what = 'depose'\n" + DECIDES_NO_MORE, first.record.address) as program:
        program.told("said")
        assert program.status() == 0
    with pytest.raises(ConnectionLost, match="cannot join: the term with epoch"):
        hosts.start("b", first, head_timeout=0.05)
    looked: list[str] = []

    async def find_another(address: str, *args: Any) -> Any:
        looked.append(address)
        return await find_head(address if len(looked) < 3 else second.record.address, *args)

    monkeypatch.setattr(daemon, "find_head", find_another)
    member = hosts.start("a", f"{first.record.address},127.0.0.1:1")
    assert len(looked) == 3
    assert member.record.head == second.record.address
    monkeypatch.undo()
    stop(hosts)
    stop(hosts, "b")


@pytest.mark.slow
def test_a_node_looks_for_the_next_head_where_the_first_is_killed_before_it_joins(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hosts.start(), hosts.start("b")
    found = first

    async def find_and_kill(address: str, *args: Any) -> Any:
        identity = await find_head(address, *args)
        found.process.kill()
        found.process.wait()
        return identity

    monkeypatch.setattr(daemon, "find_head", find_and_kill)
    member = hosts.start("a", f"{first.record.address},{second.record.address}")
    assert member.record.head == second.record.address
    found = second
    with pytest.raises(TermOver, match="refused"):
        hosts.start("b", second, head_timeout=0.3)
    monkeypatch.undo()
    stop(hosts)
    stop(hosts, "b")
