"""The node of a Ray actor, without Ray: its start in both parts, its end, and that of its process."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import zcactor as zc
from tests.driver.programs import Program, alive, until
from zcactor.cluster import ray
from zcactor.cluster.ray import HostAnswer, NodeHost
from zcactor.config import Config

PATIENCE = 120.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
SETTINGS = asdict(Config(store_capacity=1 << 26))
TOKEN = secrets.token_bytes(32)


class Hosts:
    """The hosts that a test has started."""

    def __init__(self) -> None:
        self._made: list[NodeHost] = []

    def __call__(
        self, bundle: Mapping[str, float], token: bytes = TOKEN, head: tuple[str, str] | None = None, **settings: Any
    ) -> NodeHost:
        self._made.append(NodeHost(bundle, {**SETTINGS, **settings}, token, head, "127.0.0.1"))
        return self._made[-1]

    def end(self) -> None:
        for host in self._made:
            host.leave()
        for host in self._made:
            host.end(0.0)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = Hosts()
    yield made
    made.end()
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.slow
async def test_a_head_and_a_member(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    head = hosts({"CPU": 2})
    monkeypatch.setattr(ray, "_address_of", lambda name, namespace: head.answer().checked(0))
    # In a thread, as `start_node` runs a loop of its own.
    member = await asyncio.to_thread(hosts, {"CPU": 1, "fast": 0.5}, head=("x", "zcactor"))
    async with zc.init(head.answer().checked(0), token=TOKEN.hex()):
        assert sorted((node.resources for node in await zc.nodes()), key=len) == [{"CPU": 2}, {"CPU": 1, "fast": 0.5}]
    head.leave()
    member.leave()
    await asyncio.to_thread(head.end, 1.0)
    await asyncio.to_thread(member.end, 1.0)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (HostAnswer(kind="VersionMismatch", text="why"), zc.VersionMismatch),
        (HostAnswer(kind="OSError", text="why"), zc.ConnectionLost),
    ],
)
def test_an_answer_without_a_node(answer: HostAnswer, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="bundle 2: why"):
        answer.checked(2)


def test_a_node_that_cannot_start(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(name: str, namespace: str) -> str:
        raise zc.ConnectionLost("the head is lost")

    monkeypatch.setattr(ray, "_address_of", lost)
    with pytest.raises(zc.ConnectionLost, match="bundle 1: the head is lost"):
        hosts({"CPU": 1}, head=("x", "zcactor")).answer().checked(1)


PROGRAM = """
from dataclasses import asdict
from zcactor.cluster.ray import NodeHost
from zcactor.config import Config
host = NodeHost({"CPU": 1}, asdict(Config(store_capacity=1 << 26)), bytes(32), None, "127.0.0.1")
agent = host._node.process.pid
if "fork" in sys.argv and os.fork() == 0:  # it holds the agent's socket open
    signal.pause()
tell(agent=agent, answer=host.answer().address)
hang()
"""


@pytest.mark.slow
def test_a_process_that_is_killed_takes_its_agent_along() -> None:
    with Program(PROGRAM, argv=(sys.executable, "{file}", "fork"), runtime_dir=True) as program:
        agent = program.told("agent", PATIENCE)
        os.kill(program.pid, signal.SIGKILL)
        until(lambda: not alive(agent), "the agent to end", PATIENCE)


@pytest.mark.slow
def test_an_agent_that_ends_takes_its_process_along() -> None:
    with Program(PROGRAM, runtime_dir=True) as program:
        os.kill(program.told("agent", PATIENCE), signal.SIGKILL)
        assert program.status(PATIENCE) == 1


ORPHAN = """
from zcactor.node import agent_main
agent_main.main(int(sys.argv[1]), int(sys.argv[1]), 1 << 30)  # of no process is this the pid
tell(returned=True)
"""


def test_an_agent_whose_parent_has_ended_before() -> None:
    read, write = os.pipe()
    try:
        with Program(ORPHAN, argv=(sys.executable, "{file}", str(read))) as program:
            assert program.told("returned", PATIENCE)
    finally:
        os.close(read)
        os.close(write)
