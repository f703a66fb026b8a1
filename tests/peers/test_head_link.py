"""Requests to the head: its answers, and the answers without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

import zcactor as zc
from tests.assembly.test_process import PATIENCE
from zcactor.ids import ActorId
from zcactor.peers import head_link
from zcactor.peers.head_link import HeadLink
from zcactor.process.head_places import HeadPlaces
from zcactor.process.sessions import Sessions
from zcactor.transport.stream.probe import Standby


@pytest.fixture
async def node() -> AsyncIterator[zc.Runtime]:
    async with asyncio.timeout(PATIENCE), zc.init() as made:
        yield made


async def test_the_head_knows_who_lives(node: zc.Runtime) -> None:
    process = node.process
    assert process.head.process == process.sessions.head != process.process
    state, _, cause = await process.head.locate(ActorId(b"nobody is called"))
    assert state == "dead" and cause


class Link(HeadLink):
    """A link to a head that answers with `answer`."""

    def __init__(self, answer: Any) -> None:
        tasks: Any = SimpleNamespace(loop=asyncio.get_running_loop())
        super().__init__(Sessions(b"u" * 16), None, None, tasks, 20.0, *[lambda: None] * 3)  # type: ignore[arg-type]
        self._answer = answer

    async def ask_agent(self, method: str, *args: Any) -> Any:
        return await self._answer()

    ask_members = ask_agent


async def test_a_head_that_is_gone_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone() -> Any:
        raise zc.ConnectionLost("it is gone")

    assert await Link(gone).locate(ActorId(b"a" * 16)) == ("dead", (b"", 0), "its node agent is gone")
    with pytest.raises(zc.ConnectionLost, match="it is gone"):
        await Link(gone).silence_of(b"p" * 16)

    async def silent() -> Any:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(head_link, "_ANSWER", 0.01)
    with pytest.raises(zc.ConnectionLost, match="the cluster's head does not answer"):
        await Link(silent).silence_of(b"p" * 16)

    async def heard() -> Any:
        return 0.5, "there"

    assert await Link(heard).silence_of(b"p" * 16) == (0.5, "there")


async def test_an_end_that_an_earlier_head_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of that head was lost, and the next one never knew the actor."""
    link = Link(None)
    answers: list[Exception] = [zc.ConnectionLost("gone"), zc.NoSuchActor("it is unknown")]

    async def connect(_: bytes) -> None: ...

    async def ask_of(*_: object) -> None:
        answer = answers.pop(0)
        if isinstance(answer, zc.ConnectionLost | zc.ObjectLost):
            link.absence.begin()
            asyncio.get_running_loop().call_soon(link.absence._over.set)
        raise answer

    async def on_loop(make: Any) -> None:
        await make()

    link._connections, link._requests = SimpleNamespace(connect=connect), SimpleNamespace(ask_of=ask_of)  # type: ignore[assignment]
    link._tasks.on_loop = on_loop  # type: ignore[method-assign, assignment]
    assert await HeadLink.ask_agent(link, "kill", ActorId(b"a" * 16)) is None
    answers += [zc.ObjectLost("a long answer"), zc.NoSuchActor("it is unknown")]
    assert await HeadLink.ask_agent(link, "kill", ActorId(b"a" * 16)) is None
    answers += [zc.ConnectionLost("gone"), zc.NoSuchActor("it is unknown")]
    with pytest.raises(zc.NoSuchActor):
        await HeadLink.ask_agent(link, "get_actor", "name", "default")
    answers += [zc.NoSuchActor("it is unknown")]
    with pytest.raises(zc.NoSuchActor):
        await HeadLink.ask_agent(link, "stop", ActorId(b"a" * 16))
    link.absence.joined(6.0, "log")
    answers += [zc.NoSuchActor("it is unknown")]
    assert await HeadLink.ask_agent(link, "stop", ActorId(b"a" * 16)) is None, "an earlier head may have ended it"


async def test_a_lease_is_asked_for_again_at_the_next_head() -> None:
    """Otherwise a process would hold an actor of which no head knows."""
    link = Link(None)
    released: list[int] = []
    session = SimpleNamespace(release=released.append)
    answers: list[Any] = [zc.ConnectionLost("gone"), True]

    async def connect(_: bytes) -> Any:
        return session

    async def ask(_: Any, method: str, object_id: int) -> Any:
        assert (method, object_id) == ("lease", 51)
        answer = answers.pop(0)
        if isinstance(answer, zc.ConnectionLost):
            link.absence.begin()
            asyncio.get_running_loop().call_soon(link.absence._over.set)
            raise answer
        return answer

    async def on_loop(make: Any) -> None:
        await make()

    link._connections, link._requests = SimpleNamespace(connect=connect), SimpleNamespace(ask=ask)  # type: ignore[assignment]
    link._tasks.on_loop = on_loop  # type: ignore[method-assign, assignment]
    release = await link.hold_actor(51)
    assert release is not None and not answers
    release()
    assert released == [51]
    link.absence._since = None

    async def gone(*_: Any) -> Any:
        raise zc.ConnectionLost("gone for good")

    link._requests.ask = gone  # type: ignore[method-assign, assignment]
    with pytest.raises(zc.ConnectionLost, match="gone for good"):
        await link.hold_actor(51)


# ---- a head that may be elsewhere


async def test_where_another_head_leads() -> None:
    link = Link(None)
    assert await link.whereabouts() == "", "nobody can be asked"
    link._sessions.head = b"h" * 16
    there: dict[str, Any] = {}

    async def identify(place: str) -> Any:
        found = there.get(place, zc.ConnectionLost("nobody is there"))
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(process=found)

    link.identify = identify
    link.places = HeadPlaces("a:1")
    link.places.learn(["a:1", "b:1", "c:1"])
    there["a:1"] = b"h" * 16
    assert await link.whereabouts() == "", "the present one is no other"
    there["b:1"] = Standby("b:1", "a:1")
    there["c:1"] = b"another cluster."
    assert await link.whereabouts() == ""
    there["c:1"] = b"h" * 16
    assert await link.whereabouts() == "c:1"
    there["b:1"] = Standby("b:1", "d:1")
    assert await link.whereabouts() == "d:1", "a standby knows"


@pytest.mark.parametrize("error", [zc.ConnectionLost("nobody is there"), zc.AuthenticationError("a standby is there")])
async def test_the_next_place_is_looked_at_where_no_head_is(error: Exception) -> None:
    link = Link(None)
    link.places.learn(["a:1", "b:1"])

    async def connect(process: bytes) -> Any:
        raise error

    link._connections = SimpleNamespace(connect=connect)  # type: ignore[assignment]
    with pytest.raises(zc.ConnectionLost):
        await link.rejoin("return_node")
    assert link.places.current == "b:1"


async def test_a_stopped_head_is_left_for_the_next_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its system accepts connections, and its process never answers."""
    link = Link(None)
    link.places.learn(["a:1", "b:1"])
    looked, connected = list[str](), list[str]()

    async def identify(place: str) -> Any:
        looked.append(place)
        if place == "a:1":
            await asyncio.get_running_loop().create_future()

    async def connect(_: bytes) -> Any:
        connected.append(link.places.current)

    async def ask_of(*_: object) -> str:
        return "answer"

    link.identify = identify
    link._connections = SimpleNamespace(connect=connect)  # type: ignore[assignment]
    link._requests = SimpleNamespace(ask_of=ask_of)  # type: ignore[assignment]
    with monkeypatch.context() as patch:
        patch.setattr(head_link, "_ANSWER", 0.01)
        with pytest.raises(zc.ConnectionLost, match="the head at a:1 does not answer"):
            await link.rejoin("return_node")
    assert not connected
    assert (await link.rejoin("return_node"))[1] == "answer"
    assert looked == ["a:1", "b:1"] and connected == ["b:1"]
    link.places.learn(["c:1"])  # the only one: whether it answers is seen then
    assert (await link.rejoin("return_node"))[1] == "answer"
    assert looked == ["a:1", "b:1"] and connected == ["b:1", "c:1"]
