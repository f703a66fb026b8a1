"""A cluster of two hosts, one of which accepts no connections, or only those at some ports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.driver.programs import until
from tests.hosts.netns import PATIENCE, Host, Network, has_rules, missing

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.skipif(not has_rules(), reason="a host that accepts no connections needs nftables that work"),
]

PORTS = range(7434, 7464)

PROGRAM = """
import asyncio, sys
import numpy as np
import zcactor as zc

@zc.actor
class Sum:
    def total(self, x): return float(x.sum())
    def ones(self, count): return np.ones(count)

async def main():
    async with zc.init(sys.argv[1]):
        try:
            (node,) = [node.node_id for node in await zc.nodes() if sys.argv[2] in node.address]
            actor = await Sum.options(node=node).spawn()
            for count in (1, 200_000):
                assert await actor.total(np.ones(count)) == count
                assert (await actor.ones(count)).sum() == count
            print("right", (await zc.explain(actor)).reason)
        except zc.ZcactorError as error:
            print(type(error).__name__, error)

zc.run(main())
"""

THIRD = """
import sys
import numpy as np
import zcactor as zc

@zc.actor
class Reader:
    async def total(self, refs): return float((await refs[0]).sum())
    async def pass_on(self, refs):
        reader = await Reader.options(num_cpus=0).spawn()  # the program has no connection to this one
        return await reader.total(refs)

async def main():
    async with zc.init(sys.argv[1]):
        (node,) = [node.node_id for node in await zc.nodes() if sys.argv[2] in node.address]
        actor = await Reader.options(node=node).spawn()
        for count in (1, 200_000):
            ref = zc.put(np.ones(count))
            assert await actor.pass_on([ref]) == count
        print("right")

zc.run(main())
"""


class Cluster:
    """A head on the first host, and a program or a node on the second one."""

    def __init__(self, a: Host, b: Host) -> None:
        self.a, self.b = a, b
        self.address = f"{a.address}:7433"
        self._run(a, "start", "--head", "--host", a.address, "--num-cpus", "2")

    def _run(self, host: Host, *arguments: str, **more: str) -> str:
        env = {
            "ZCACTOR_TOKEN": "41" * 32, "ZCACTOR_STORE_CAPACITY": str(1 << 26), "ZCACTOR_NUM_GPUS": "0",
            "XDG_STATE_HOME": str(host.directory / "state"), **more,
        }  # fmt: skip
        process = host.start(
            sys.executable, *(arguments if arguments[0].startswith("/") else ("-m", "zcactor", *arguments)), env=env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        output, errors = process.communicate(timeout=3 * PATIENCE)
        assert process.returncode == 0, errors
        return str(output)

    def join(self, **more: str) -> str:
        """Start a node on the second host. Returns its id."""
        return self._run(self.b, "start", "--address", self.address, "--num-cpus", "2", **more)

    def program(self, host: Host, other: Host, source: str = PROGRAM) -> str:
        """Run a program on a host, with its actor on the other one. Returns what it prints."""
        path = host.directory / "program.py"
        path.write_text(source)
        return self._run(host, str(path), self.address, other.address)

    def log(self) -> str:
        """All that the head has logged."""
        logs = (self.a.directory / "state" / "zcactor" / "logs").glob("*.log")
        return "".join(log.read_text(errors="replace") for log in logs)


@contextmanager
def cluster(*open_ports: range) -> Iterator[Cluster]:
    with Network(2) as (a, b), b.guarded(*open_ports):
        yield Cluster(a, b)


def test_a_program_that_accepts_no_connections() -> None:
    with cluster() as made:
        said = made.program(made.b, made.a)
        assert said.startswith("right")


def test_a_value_of_such_a_program_that_a_third_process_reads() -> None:
    with cluster() as made:
        assert made.program(made.b, made.a, THIRD) == "right\n"


def test_a_node_whose_ports_the_firewall_does_not_pass() -> None:
    with cluster() as made:
        made.join()
        until(lambda: "cannot be reached from the head's host" in made.log(), "the head's warning", PATIENCE)
        assert f"{made.b.address}:" in made.log() and "ZCACTOR_PORTS" in made.log()
        said = made.program(made.a, made.b)
        assert said.startswith("ActorDied") and f"{made.b.address}:" in said
        assert "did not answer" in said and "the setting ports bounds them" in said, said


def test_a_node_that_listens_at_ports_that_the_firewall_passes() -> None:
    with cluster(PORTS) as made:
        made.join(ZCACTOR_PORTS=f"{PORTS.start}-{PORTS.stop - 1}")
        said = made.program(made.a, made.b)
        assert said.startswith("right")
        assert "cannot be reached" not in made.log()
