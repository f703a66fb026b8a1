"""Making and ending actors in a worker."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import zcactor as zc
from zcactor.api.actor import ActorOptions
from zcactor.node.worker_main import flush_output

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


class Lifecycle:
    """An actor that notes the events of its life in a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.note("made")

    def note(self, word: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{word}\n")

    def who(self) -> Any:
        return zc.current_actor()


class Closing(Lifecycle):
    def close(self) -> None:
        self.note("closed")


class Context(Lifecycle):
    async def __aenter__(self) -> Any:
        self.note("entered")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.note("left")


class FailsToEnter(Lifecycle):
    async def __aenter__(self) -> None:
        raise LookupError("locked")


class FailsToClose(Lifecycle):
    def close(self) -> None:
        raise ValueError("jammed")


class Exits(Lifecycle):
    def __init__(self, path: str) -> None:
        raise SystemExit(4)


class Unreadable:
    """A value that can be pickled but not unpickled."""

    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise LookupError("cannot be read")


spawn: Any = zc.spawn
"""`zc.spawn` without static types, which know decorated methods only."""


@pytest.fixture
async def node() -> AsyncIterator[zc.Runtime]:
    async with asyncio.timeout(4 * PATIENCE), zc.init() as node:
        yield node


def words(path: Path) -> list[str]:
    """The noted words."""
    return path.read_text().split()


@pytest.mark.slow
async def test_hooks(node: zc.Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = {cls: tmp_path / cls.__name__ for cls in (Lifecycle, Closing, Context, FailsToClose)}
    actors = [await spawn(cls, str(path)) for cls, path in logs.items()]
    for actor in actors:
        actor.note("called")
        await zc.stop(actor)
    assert words(logs[Lifecycle]) == ["made", "called"]
    assert words(logs[Closing]) == ["made", "called", "closed"]
    assert words(logs[Context]) == ["made", "entered", "called", "left"]
    async with asyncio.timeout(PATIENCE):
        while "jammed" not in capsys.readouterr().err:
            await asyncio.sleep(0.001)
    with pytest.raises(zc.ActorDied, match=r"zc\.stop"):
        await actors[0].note("late")


@pytest.mark.slow
async def test_hooks_at_the_end_of_the_node(tmp_path: Path) -> None:
    logs = {cls: tmp_path / cls.__name__ for cls in (Closing, Context)}
    async with asyncio.timeout(PATIENCE), zc.init():
        actors = [await spawn(cls, str(path)) for cls, path in logs.items()]
        shared = [await ActorOptions(cls, {"process": "shared"}).spawn(str(path)) for cls, path in logs.items()]
        assert len(set(actors + shared)) == 4
    assert words(logs[Closing]) == ["made"] * 2 + ["closed"] * 2
    assert words(logs[Context]) == ["made", "entered"] * 2 + ["left"] * 2


@pytest.mark.slow
async def test_constructors_that_fail(node: zc.Runtime, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    with pytest.raises(LookupError, match="locked") as caught:
        await spawn(FailsToEnter, path)
    assert isinstance(caught.value, zc.RemoteError)
    assert caught.value.actor.startswith("FailsToEnter(")
    with pytest.raises(zc.RemoteError, match="SystemExit: 4"):
        await spawn(Exits, path)
    with pytest.raises(LookupError, match="cannot be read"):
        await spawn(Lifecycle, Unreadable())
    async with asyncio.timeout(PATIENCE):
        while (await zc.nodes())[0].workers:
            await asyncio.sleep(0.001)
    shared = ActorOptions(Lifecycle, {"process": "shared"})
    first = await shared.spawn(path)
    with pytest.raises(LookupError, match="locked"):
        await ActorOptions(FailsToEnter, {"process": "shared"}).spawn(path)
    assert (await first.who()).restarts == 0


@pytest.mark.slow
async def test_what_an_actor_knows_of_itself(node: zc.Runtime, tmp_path: Path) -> None:
    actor = await spawn(Lifecycle, str(tmp_path / "log"))
    who = await actor.who()
    assert who.handle == actor
    assert who.node == node.node_id
    assert who.restarts == 0
    (info,) = await zc.actors()
    assert who.id == info.actor_id
    assert info.pid != os.getpid()


@pytest.mark.slow
async def test_a_handle_to_oneself_does_not_keep_an_actor(node: zc.Runtime, tmp_path: Path) -> None:
    actor = await spawn(Lifecycle, str(tmp_path / "log"))
    await actor.who()
    del actor
    async with asyncio.timeout(PATIENCE):
        while (await zc.nodes())[0].workers:
            await asyncio.sleep(0.001)


def test_flushing_streams_that_user_code_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", None)
    flush_output()
