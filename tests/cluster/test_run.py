"""Whole runs: ranks as processes of two made-up hosts, with programs that join by a plain ``zc.init()``."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.cluster.hosts import CLOSING_ACTOR, Hosts
from tests.driver.programs import Program, alive, until
from zcactor.cluster.records import list_nodes
from zcactor.cluster.rendezvous import PORTS, first_port
from zcactor.token import make_token_file

PATIENCE = 120.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
PATIENT = ("--timeout", "120", "--grace", "60")
"""Options for runs that are to come about on a slow machine as well."""


class Ranks:
    """Ranks of one run, each a program on one of the hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._ending = ExitStack()

    def start(
        self, source: str, *arguments: str, host: str = "a", environ: Mapping[str, str] | None = None,
        options: tuple[str, ...] = PATIENT, argv: tuple[str, ...] = (sys.executable, "{file}"),
    ) -> Program:  # fmt: skip
        """Start a rank, whose program is `source`."""
        with self.hosts.on(host):
            env = {
                **self.hosts.variables(host), "ZCACTOR_NUM_GPUS": "0", "ZCACTOR_STORE_CAPACITY": str(1 << 26),
                "ZCACTOR_SHUTDOWN_TIMEOUT": "60",
            }  # fmt: skip
            command = [sys.executable, "-m", "zcactor", "run", *options, "--", *argv, *arguments]
            program = Program(source, argv=command, env={**env, **(environ or {})})
        return self._ending.enter_context(program)

    def both(self, source: str, **environ: str) -> tuple[Program, Program]:
        """Start two ranks, on a host each."""
        place = {"ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "127.0.0.1", "ZCACTOR_RUN": self.hosts.mark, **environ}
        return (
            self.start(source, environ={**place, "ZCACTOR_RANK": "0"}),
            self.start(source, environ={**place, "ZCACTOR_RANK": "1"}, host="b"),
        )


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Hosts() as hosts:
        made = Ranks(hosts)
        with made._ending:
            yield made


WAITING = (
    CLOSING_ACTOR
    + """
async def main():
    async with zc.init():
        there = (await zc.nodes())[1].node_id
        idle = await Closing.options(node=there).spawn(CLOSED)
        other = await Closing.options(lifetime="detached", name="d", node=there).spawn(CLOSED + ".detached")
        tell(pids=[os.getpid(), await idle.pid(), await other.pid()])
        await asyncio.Event().wait()
zc.run(main())
"""
)


@pytest.mark.slow
def test_one_rank_without_a_launcher(ranks: Ranks) -> None:
    program = ranks.start(
        """
@zc.actor
class Sum:
    def of(self, x): return float(x.sum())
    def names(self): return sorted(name for name in os.environ if name.startswith("ZCACTOR_R"))
async def main():
    async with zc.init():
        actor = await Sum.spawn()
        tell(facts=[await actor.of(np.ones(100_000)), await actor.names(), len(await zc.nodes()), sys.stdin.read()])
    sys.stdout.close()
    os._exit(7)
zc.run(main())
""",
        environ={"ZCACTOR_RENDEZVOUS": "/nowhere"},
    )
    assert program.told("facts", PATIENCE) == [100_000.0, [], 1, ""]
    assert program.status(PATIENCE) == 7
    assert "zcactor:" not in program.stderr()
    ranks.hosts.assert_clean("a")


@pytest.mark.slow
def test_what_a_program_is_given(ranks: Ranks) -> None:
    program = ranks.start(
        """
tell(facts=[sys.argv[1:], sorted(name for name in os.environ if name.startswith("ZCACTOR_R")),
            os.environ["ZCACTOR_ADDRESS"].partition(":")[0]])
""",
        "two words", "*", "$HOME", "--nodes",
        environ={"ZCACTOR_RANK": "0", "ZCACTOR_SIZE": "1", "ZCACTOR_RUN": "r"},
    )  # fmt: skip
    assert program.told("facts", PATIENCE) == [["two words", "*", "$HOME", "--nodes"], [], "127.0.0.1"]
    assert program.status(PATIENCE) == 0
    ranks.hosts.assert_clean("a")


@pytest.mark.slow
def test_two_ranks_and_a_shared_folder(ranks: Ranks) -> None:
    make_token_file(ranks.hosts.token_file)
    source = """
async def main():
    async with zc.init():
        tell(nodes=len(await zc.nodes()), pid=os.getpid())
    sys.exit(3)
zc.run(main())
"""
    first, second = ranks.both(source, ZCACTOR_HEAD="")
    assert first.told("nodes", PATIENCE) == 2
    assert (first.status(PATIENCE), second.status(PATIENCE)) == (3, 3)
    assert second.printed == []  # the program ran once
    assert list((ranks.hosts.directory / "state" / "zcactor" / "runs").iterdir()) == []
    ranks.hosts.assert_clean("a", "b")


@pytest.mark.slow
@pytest.mark.parametrize("taken_by", ["a stranger", "another cluster"])
def test_the_port_is_taken(ranks: Ranks, taken_by: str) -> None:
    port = first_port(ranks.hosts.mark)
    with ExitStack() as undo:
        if taken_by == "a stranger":
            undo.enter_context(socket.create_server(("127.0.0.1", port)))
        else:
            ranks.hosts.start(port=port)
        first, second = ranks.both("tell(address=os.environ['ZCACTOR_ADDRESS'])")
        host, _, taken = first.told("address", PATIENCE).rpartition(":")
        assert host == "127.0.0.1" and port < int(taken) < port + PORTS
        assert (first.status(PATIENCE), second.status(PATIENCE)) == (0, 0)


@pytest.mark.slow
def test_a_program_that_is_not_there(ranks: Ranks) -> None:
    place = {"ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "localhost", "ZCACTOR_RUN": ranks.hosts.mark}
    first, second = (
        ranks.start(
            "", argv=("/no/such program",), host=host,
            environ={**place, "ZCACTOR_RANK": rank},
        )
        for rank, host in ("0a", "1b")
    )  # fmt: skip
    assert (first.status(PATIENCE), second.status(PATIENCE)) == (127, 127)
    assert first.stderr().endswith("zcactor: '/no/such program' is not there, or its interpreter is not\n")
    assert second.stderr() == "zcactor: rank 0 says: '/no/such program' is not there, or its interpreter is not\n"
    ranks.hosts.assert_clean("a", "b")


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["rank 0", "all processes", "zcactor stop"])
def test_a_run_that_is_told_to_end(ranks: Ranks, whom: str) -> None:
    closed = ranks.hosts.directory / "closed"
    source = WAITING.replace("CLOSED", repr(str(closed)))
    first, second = ranks.both(source)
    pids = first.told("pids", PATIENCE)
    if whom == "all processes":  # as scancel does
        for pid in {*ranks.hosts.processes(), first.pid, second.pid}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    elif whom == "rank 0":
        first.process.send_signal(signal.SIGTERM)
    else:
        stopped = ranks.hosts.zcactor("stop", environ={"ZCACTOR_SHUTDOWN_TIMEOUT": "30"})
        assert "the head at 127.0.0.1" in stopped.stdout
    assert (first.status(PATIENCE), second.status(PATIENCE)) == (143, 143)
    assert not any(alive(pid) for pid in pids)
    assert closed.exists()
    ranks.hosts.assert_clean("a", "b")


@pytest.mark.slow
def test_a_lost_node_is_a_lost_node(ranks: Ranks) -> None:
    source = """
async def main():
    async with zc.init():
        tell(nodes=len(await zc.nodes()))
        while len(await zc.nodes()) == 2:
            await asyncio.sleep(0.01)
zc.run(main())
"""
    first, second = ranks.both(source)
    assert first.told("nodes", PATIENCE) == 2
    (member,) = list_nodes(ranks.hosts.run_directories("b"))
    os.kill(member.pid, signal.SIGKILL)
    assert second.status(PATIENCE) == 1
    assert "this rank's node ended with status -9" in second.stderr()
    assert first.status(PATIENCE) == 0
    ranks.hosts.assert_clean("a", "b")


@pytest.mark.slow
def test_a_lost_head_ends_the_run(ranks: Ranks) -> None:
    source = """
async def main():
    async with zc.init():
        tell(pid=os.getpid())
        await asyncio.Event().wait()
zc.run(main())
"""
    first, second = ranks.both(source)
    pid = first.told("pid", PATIENCE)
    first.process.kill()
    assert second.status(PATIENCE) == 1
    assert "rank 0 is lost, and the run with it" in second.stderr()
    until(lambda: not alive(pid), "the program to end")
    until(lambda: not ranks.hosts.processes(), "everything to end")


@pytest.mark.slow
def test_ranks_that_are_started_twice(ranks: Ranks) -> None:
    source = "tell(up=1); sys.stdin.read(); hang()"
    first, second = ranks.both(source)
    assert first.told("up", PATIENCE)
    place = {"ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "127.0.0.1", "ZCACTOR_RUN": ranks.hosts.mark}
    again = ranks.start(source, environ={**place, "ZCACTOR_RANK": "0"})
    assert again.status(PATIENCE) == 1
    assert "rank 0 of this run was started already: its head is at 127.0.0.1:" in again.stderr()
    again = ranks.start(source, environ={**place, "ZCACTOR_RANK": "1"})
    assert again.status(PATIENCE) == 1
    assert f"rank 1 has joined already, from {socket.gethostname()} with pid " in again.stderr()
    first.process.send_signal(signal.SIGINT)
    assert (first.status(PATIENCE), second.status(PATIENCE)) == (130, 130)


@pytest.mark.slow
def test_a_rank_that_is_missing(ranks: Ranks) -> None:
    place = {"ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "127.0.0.1", "ZCACTOR_RUN": ranks.hosts.mark, "ZCACTOR_RANK": "0"}
    first = ranks.start("tell(ran=True)", environ=place, options=("--timeout", "1"))
    assert first.status(PATIENCE) == 1
    assert first.stderr().endswith("zcactor: rank 1 did not join in 1 s; joined: 1 of 2\n")
    assert first.printed == []
    ranks.hosts.assert_clean("a")


@pytest.mark.slow
def test_fewer_nodes_than_ranks(ranks: Ranks) -> None:
    place = {"ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "127.0.0.1", "ZCACTOR_RUN": ranks.hosts.mark, "ZCACTOR_RANK": "0"}
    first = ranks.start("tell(ran=True)", environ=place, options=("--nodes", "1"))
    assert first.told("ran", PATIENCE)
    assert first.status(PATIENCE) == 0


@pytest.mark.slow
def test_without_a_head_or_a_token(ranks: Ranks, tmp_path: Path) -> None:
    place = {"ZCACTOR_SIZE": "2", "ZCACTOR_RUN": ranks.hosts.mark, "ZCACTOR_RENDEZVOUS": str(tmp_path)}
    soon = ("--timeout", "0.01")
    lone = ranks.start("", environ={**place, "ZCACTOR_RANK": "1"}, options=soon)
    assert lone.status(PATIENCE) == 1
    assert "the cluster's token is needed: make one with 'zcactor token'" in lone.stderr()
    make_token_file(ranks.hosts.token_file)
    lone = ranks.start("", environ={**place, "ZCACTOR_RANK": "1"}, options=soon)
    assert lone.status(PATIENCE) == 1
    assert f"did not answer in 0.01 s: {tmp_path}/" in lone.stderr()
    assert "ZCACTOR_RENDEZVOUS=DIR has to name one that all hosts share" in lone.stderr()
    lone = ranks.start("", environ={**place, "ZCACTOR_RANK": "1", "ZCACTOR_HEAD": "no host"}, options=soon)
    assert lone.status(PATIENCE) == 1
    assert "rank 0 (at no host) did not answer" in lone.stderr() and "no host is called" in lone.stderr()


@pytest.mark.slow
def test_another_token(ranks: Ranks) -> None:
    head = ranks.hosts.start().record.address
    place = {"ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": head, "ZCACTOR_RANK": "1", "ZCACTOR_TOKEN": "5c" * 32}
    lone = ranks.start("", environ=place)
    assert lone.status(PATIENCE) == 1
    assert f"zcactor: {head}: " in lone.stderr() and "token" in lone.stderr()
    assert place["ZCACTOR_TOKEN"] not in lone.stderr()
