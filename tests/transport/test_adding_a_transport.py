"""The transport of the page "Adding a transport", as it is printed there."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conformance.connection import ARENA_NBYTES, ConnectedPair, PullingSuite, Side, region
from tests.transport.local_arena import TOKEN, memfd, run_directory
from tools.blocks import blocks
from zcactor.assembly.endpoints import make_endpoint, preload
from zcactor.assembly.process import Process
from zcactor.config import TRANSPORTS, Config
from zcactor.objectstore.store import Store
from zcactor.rpc.services import Services

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-transport.md"
MODULE = "transport_of_the_page"


@pytest.fixture(scope="module")
def pipes() -> Iterator[Any]:
    """The module that the page prints, importable by its name."""
    block = next(block for block in blocks(PAGE) if block.reason is None)
    module = ModuleType(MODULE)
    exec(compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec"), module.__dict__)
    sys.modules[MODULE] = module
    yield module
    del sys.modules[MODULE]


@contextlib.contextmanager
def pipe_side(pipes: Any, directory: Path) -> Iterator[Side]:
    with memfd() as fd, mmap.mmap(fd, ARENA_NBYTES) as arena, memoryview(arena) as view:
        process = secrets.token_bytes(16)
        yield Side(pipes.PipeEndpoint(directory, process, TOKEN, fd, ARENA_NBYTES, 1024, 16384), process, view)


class TestPipes(PullingSuite):
    @pytest.fixture
    def sides(self, pipes: Any, tmp_path: Path) -> Iterator[tuple[Side, Side]]:
        directory = run_directory(tmp_path)
        with pipe_side(pipes, directory) as left, pipe_side(pipes, directory) as right:
            yield left, right

    async def test_nothing_is_left_behind(self, pair: ConnectedPair, tmp_path: Path) -> None:
        for side in pair.sides:
            await side.endpoint.aclose()
        assert list((tmp_path / "run").iterdir()) == []

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    async def test_a_forked_child_lets_go_of_its_copies(self, pair: ConnectedPair) -> None:
        child = os.fork()
        if child == 0:
            pair.left.abort()
            pair.left.abort()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        side = pair.sides[0]
        pair.sides[1].arena[:5] = b"lives"
        await pair.left.pull(region(0, 5), side.address, side)
        assert bytes(side.arena[:5]) == b"lives"


@pytest.fixture
def registered(pipes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that the page asks for."""
    monkeypatch.setitem(TRANSPORTS, "pipes", MODULE)


@pytest.fixture
async def processes(registered: None, tmp_path: Path) -> AsyncIterator[tuple[Process, Process]]:
    """Two processes whose settings allow pipes."""
    directory, made = run_directory(tmp_path), []
    for _ in range(2):
        name, config = os.urandom(16), Config(transports="pipes,tcp", idle_timeout=7.0)
        store = Store(1 << 24, name)
        endpoint = make_endpoint(config, directory, name, TOKEN, store)
        process = Process(name, "worker", config, asyncio.get_running_loop(), store, endpoint)
        await endpoint.start(process.connections.accepted)
        made.append(process)
    yield made[0], made[1]
    for process in made:
        await process.close()


async def test_processes_call_each_other_by_it(processes: tuple[Process, Process], pipes: Any) -> None:
    one, other = processes
    assert type(one.endpoint) is pipes.PipeEndpoint, "on one host nothing else is needed"
    session = await one.connections.connect(other.process)
    connection = session.connection
    assert connection.kind == "pipes" and "pipes" in connection.describe()
    assert connection.idle_timeout(one.config) == 7.0
    assert await one.requests.ask(session, Services.ping) == os.getpid()


def test_other_processes_load_none_of_it(registered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE)
    preload("local")
    assert MODULE not in sys.modules
