"""Calls in a thread whose results are not lost by cancelling, and the user's token."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import zcactor as zc
from zcactor.cluster.drain import Drained
from zcactor.cluster.placed import EngineCluster, aside, given, token_of_user
from zcactor.token import default_file, make_token_file, read_token_file


@pytest.mark.parametrize("join", [False, True])
async def test_a_program_joins_where_it_wants_to(monkeypatch: pytest.MonkeyPatch, join: bool) -> None:
    log: list[str] = []

    @contextlib.asynccontextmanager
    async def init(address: str, token: str) -> AsyncIterator[None]:
        log.append(f"joins {address} by {token}")
        yield
        log.append("leaves")

    monkeypatch.setattr("zcactor.cluster.placed.init", init)
    cluster = EngineCluster("10.0.0.1:7433", 2)
    async with given(cluster, b"\x0f", join=join) as found:
        assert found is cluster
        log.append("works")
    assert log == (["joins 10.0.0.1:7433 by 0f", "works", "leaves"] if join else ["works"])


async def test_a_drain_is_that_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = EngineCluster("10.0.0.1:7433", 2)
    with pytest.raises(zc.NotInitialized):
        await cluster.drain("1234")
    asked = []

    async def drain(*args: object) -> Drained:
        asked.append(args)
        return Drained("1234abcd", 3, [], "")

    monkeypatch.setattr("zcactor.cluster.drain.drain", drain)
    assert (await cluster.drain("1234", 5.0)).moved == 3
    assert asked == [("1234", 5.0)]


async def test_a_result_and_an_exception() -> None:
    assert await aside(lambda: threading.current_thread()) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await aside(divmod, 1, 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_cancelling_waits_for_the_end_of_the_call(fails: bool) -> None:
    loop = asyncio.get_running_loop()
    begun, gate = asyncio.Event(), threading.Event()
    made: list[str] = []

    def make() -> None:
        loop.call_soon_threadsafe(begun.set)
        gate.wait()
        made.append("thing")
        if fails:
            raise ValueError("nobody asks any more")

    task = asyncio.create_task(aside(make))
    await begun.wait()
    task.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made == ["thing"]


def test_a_token_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZCACTOR_TOKEN", "ZCACTOR_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    made = token_of_user()
    assert read_token_file(tmp_path / "zcactor" / "token") == made
    assert token_of_user() == made


def test_a_token_that_another_program_makes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("zcactor.cluster.placed.find_token", lambda argument, environ: None)
    made = make_token_file(default_file({"XDG_CONFIG_HOME": str(tmp_path)}))
    assert token_of_user() == made
