"""``zcactor drain`` as users run it, and the mistakes that it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from tests.cluster.hosts import Hosts
from zcactor.cli.main import app


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as found:
        yield found


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        ((), 2, "give the node to drain: see zcactor status"),
        (("--each",), 2, "--each drains all nodes, which have to start again: zcactor drain --each --restart"),
        (("--each", "--restart", "abcd"), 2, "--each drains all nodes"),
        (("abcd", "--timeout", "-1"), 2, "Invalid value for '--timeout'"),
        (("abcd", "--timeout", "inf"), 2, "Invalid value for '--timeout'"),
        (("abcd", "--timeout", "nan"), 2, "Invalid value for '--timeout'"),
        (("abcd",), 1, "no node of yours runs on this host; give --address HOST:PORT"),
        (("abcd", "--address", "nowhere"), 1, "nowhere"),
    ],
)
def test_wrong_options(hosts: Hosts, arguments: tuple[str, ...], status: int, told: str) -> None:
    with hosts.on("a"):
        done = CliRunner().invoke(app, ["drain", *arguments])
    assert (done.exit_code, done.stdout) == (status, "")
    assert told in done.stderr


@pytest.mark.slow
def test_a_node_that_is_left_one_that_leaves_and_each_one_again(hosts: Hosts) -> None:
    head = hosts.start("a")
    member = hosts.start("b", head)
    source = """
from tests.control.movers import Tally

async def main():
    async with zc.init(ADDRESS):
        await Tally.options(node=NODE, name="fixed", lifetime="detached").spawn("fixed")
        tell(spawned=True)

zc.run(main())
"""
    with hosts.program(f"NODE = {member.record.node!r}\n{source}", head.record.address) as program:
        assert program.told("spawned")
        assert program.status() == 0
    done = hosts.zcactor("drain", "unknown")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("zcactor: there is no node 'unknown'; nodes: ")
    place = member.record.node[:8]
    done = hosts.zcactor("drain", place, "--timeout", "0.5")
    assert done.returncode == 3
    assert done.stdout.startswith(f"draining node {place} ")
    assert done.stderr.splitlines() == [
        "zcactor: left: Tally(fixed): it was spawned for this node",
        f"zcactor: node {place} is open again: 1 actors are left",
    ]
    source = """
async def main():
    async with zc.init(ADDRESS):
        await zc.stop(await zc.get_actor("fixed"))

zc.run(main())
"""
    with hosts.program(source, head.record.address) as program:
        assert program.status() == 0
    done = hosts.zcactor("drain", "--each", "--restart")
    assert (done.returncode, done.stderr) == (0, "")
    assert head.member is not None
    for left in (head.member.record.node[:8], place):
        assert f"zcactor: node {left} has left, 0 actors have moved, and has started again as node " in done.stdout
    assert member.process.wait(20) == head.member.process.wait(20) == 0
    beside, again = re.findall(r"^zcactor: .* has started again as node (\w+)$", done.stdout, re.MULTILINE)
    done = hosts.zcactor("drain", again)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"zcactor: node {again} has left, 0 actors have moved"
    done = hosts.zcactor("drain", beside)
    assert done.returncode == 1
    assert "is the last node: its actors have nowhere to go; zcactor stop ends it" in done.stderr
    assert hosts.zcactor("stop").returncode == 0
    head.process.wait()
    hosts.assert_clean("a", "b")
