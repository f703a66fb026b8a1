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
from zcactor.peers.leases import Leases
from zcactor.process.cluster import HeadService, MembershipService
from zcactor.process.epochs import Deposed
from zcactor.process.head_places import HeadPlaces
from zcactor.process.sessions import Sessions
from zcactor.transport.stream.probe import Identity, Standby

HEAD = b"h" * 16


@pytest.fixture
async def node() -> AsyncIterator[zc.Runtime]:
    async with asyncio.timeout(PATIENCE), zc.init() as made:
        yield made


async def test_the_head_knows_who_lives(node: zc.Runtime) -> None:
    process = node.process
    assert process.head.process == process.sessions.head != process.process
    state, _, cause = await process.head.locate(ActorId(b"nobody is called"))
    assert state == "dead" and cause


ask: Any = HeadLink.ask


def rejoin(link: HeadLink) -> Any:
    """`HeadLink.rejoin`, whose answers are those of a fake."""
    return link.rejoin


class Link(HeadLink):
    """A link to a head that answers with `answer`."""

    def __init__(self, answer: Any) -> None:
        tasks: Any = SimpleNamespace(loop=asyncio.get_running_loop())
        super().__init__(Sessions(b"u" * 16), None, None, tasks, 20.0)  # type: ignore[arg-type]
        self._answer = answer

    async def ask(self, *_: Any) -> Any:  # type: ignore[override]
        return await self._answer()


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
            link.outage.begin()
            asyncio.get_running_loop().call_soon(link.outage._over.set)
        raise answer

    async def on_loop(make: Any) -> None:
        await make()

    link._connections, link._requests = SimpleNamespace(connect=connect), SimpleNamespace(ask_of=ask_of)  # type: ignore[assignment]
    link._tasks.on_loop = on_loop  # type: ignore[method-assign, assignment]
    assert await ask(link, HeadService.kill, ActorId(b"a" * 16)) is None
    answers += [zc.ObjectLost("a long answer"), zc.NoSuchActor("it is unknown")]
    assert await ask(link, HeadService.kill, ActorId(b"a" * 16)) is None
    answers += [zc.ConnectionLost("gone"), zc.NoSuchActor("it is unknown")]
    with pytest.raises(zc.NoSuchActor):
        await HeadLink.ask(link, HeadService.get_actor, "name", "default")
    answers += [zc.NoSuchActor("it is unknown")]
    with pytest.raises(zc.NoSuchActor):
        await HeadLink.ask(link, HeadService.stop, ActorId(b"a" * 16))
    link.outage.joined(6.0, "log")
    answers += [zc.NoSuchActor("it is unknown")]
    assert await ask(link, HeadService.stop, ActorId(b"a" * 16)) is None, "an earlier head may have ended it"


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_long_answer_that_is_lost_with_the_connection(is_closed: bool) -> None:
    """The head lives, and does not come back by itself: it was never away."""
    link = Link(None)

    async def connect(_: bytes) -> Any:
        return SimpleNamespace(closed=zc.ConnectionLost("cut") if is_closed else None)

    async def ask_of(*_: object) -> None:
        raise zc.ObjectLost("it could not be brought here")

    link._connections, link._requests = SimpleNamespace(connect=connect), SimpleNamespace(ask_of=ask_of)  # type: ignore[assignment]
    lost, text = (zc.ConnectionLost, "an answer of the head is lost: it") if is_closed else (zc.ObjectLost, "it could")
    with pytest.raises(lost, match=text):
        await HeadLink.ask(link, HeadService.locate, ActorId(b"a" * 16), False)


async def test_a_lease_is_asked_for_again_at_the_next_head() -> None:
    """Otherwise a process would hold an actor of which no head knows."""
    link = Link(None)
    released: list[int] = []
    session = SimpleNamespace(release=released.append)
    answers: list[Any] = [zc.ConnectionLost("gone"), True]

    async def connect(_: bytes) -> Any:
        return session

    async def ask(_: Any, method: Any, object_id: int) -> Any:
        assert (method, object_id) == (Leases.lease, 51)
        answer = answers.pop(0)
        if isinstance(answer, zc.ConnectionLost):
            link.outage.begin()
            asyncio.get_running_loop().call_soon(link.outage._over.set)
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
    link.outage._since = None

    async def gone(*_: Any) -> Any:
        raise zc.ConnectionLost("gone for good")

    link._requests.ask = gone  # type: ignore[method-assign, assignment]
    with pytest.raises(zc.ConnectionLost, match="gone for good"):
        await link.hold_actor(51)


async def test_who_cannot_be_reached_is_asked_to_call_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_link, "_CALLED_BACK", 0.01)
    answers: list[Any] = [True, False, zc.ConnectionLost("it is gone"), zc.HeadUnavailable("log", 1.0), None]

    async def answer() -> Any:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return await asyncio.Event().wait() if found is None else found

    link = Link(answer)
    link._sessions.head, link._sessions.node = HEAD, b"n" * 16
    assert not await link.call_back(HEAD) and not await link.call_back(b"n" * 16), "the way to the head is not there"
    assert [await link.call_back(b"p" * 16) for _ in range(5)] == [True, False, False, False, False]
    assert answers == []


# ---- a head that may be elsewhere


class Places:
    """The processes at the places where a head may be; see `zcactor.transport.stream.probe.identify`."""

    def __init__(self, link: HeadLink, *places: str) -> None:
        link._sessions.head = HEAD
        link.places = HeadPlaces(places[0])
        link.places.learn(places)
        link.identify = self._identify
        self.there: dict[str, Any] = {}
        self.looked: list[str] = []

    def heads(self, **epochs: int) -> None:
        """Say which heads answer, each by the first letter of its place and the epoch of its term."""
        self.there = {f"{name}:1": Identity(HEAD, name, 1, "us", epoch) for name, epoch in epochs.items()}

    async def _identify(self, place: str) -> Any:
        self.looked.append(place)
        found = self.there.get(place, zc.ConnectionLost("nobody is there"))
        if isinstance(found, Exception):
            raise found
        return await asyncio.get_running_loop().create_future() if found is None else found


async def test_where_another_head_leads() -> None:
    link = Link(None)
    assert await link.whereabouts(0) == "", "nobody can be asked"
    places = Places(link, "a:1", "b:1", "c:1")
    link.epoch = 1
    places.heads(a=1)
    assert await link.whereabouts(1) == "", "the present one is no other"
    places.there["b:1"] = Standby("b:1", "a:1", 1)
    places.there["c:1"] = Identity(b"another cluster.", "c", 1, "us", 2)
    assert await link.whereabouts(1) == ""
    places.heads(a=1, c=2)
    assert await link.whereabouts(1) == "c:1"
    places.heads(a=1, d=2)
    places.there["b:1"] = Standby("b:1", "d:1", 2)
    assert await link.whereabouts(1) == "d:1", "a standby knows"
    places.there["b:1"] = Standby("b:1", "", 0)
    assert await link.whereabouts(1) == "", "it knows of none"


@pytest.mark.parametrize(("known", "ours"), [(3, 3), (3, 2), (2, 3)])
async def test_a_head_of_an_earlier_term_does_not_lead(known: int, ours: int) -> None:
    """One that was stopped and goes on answers as a head until it looks at its log."""
    link = Link(None)
    places = Places(link, "a:1", "b:1", "c:1")
    link.epoch = ours
    places.heads(a=ours, b=2)
    places.there["c:1"] = Standby("c:1", "b:1", 2)
    assert await link.whereabouts(known) == ""
    places.heads(a=ours, b=4)
    assert await link.whereabouts(known) == "b:1"


@pytest.mark.parametrize(("ours", "is_other"), [(3, False), (2, True), (0, True)])
async def test_the_present_head_at_another_of_its_addresses(ours: int, is_other: bool) -> None:
    link = Link(None)
    places = Places(link, "a:1", "b:1")
    link.epoch = ours
    places.heads(a=ours, b=3)
    assert await link.whereabouts(3) == ("b:1" if is_other else "")


async def test_a_standby_that_names_a_head_that_is_gone() -> None:
    link = Link(None)
    places = Places(link, "a:1", "b:1", "c:1")
    places.there["b:1"], places.there["c:1"] = Standby("b:1", "d:1", 3), Standby("c:1", "b:1", 3)
    assert await link.whereabouts(2) == ""
    assert places.looked == ["b:1", "d:1", "c:1"], "each place is looked at once"


async def test_a_head_whose_term_is_over_is_left_for_the_next_place() -> None:
    link = Link(None)
    places = Places(link, "a:1", "b:1")
    places.heads(a=1, b=2)

    async def connect(_: bytes) -> Any: ...

    async def ask_of(*_: object) -> str:
        return link.places.current

    link._connections, link._requests = SimpleNamespace(connect=connect), SimpleNamespace(ask_of=ask_of)  # type: ignore[assignment]
    with pytest.raises(zc.ConnectionLost, match="the term of the head at a:1 is over"):
        await link.rejoin(2, HeadService.nodes)
    assert (await rejoin(link)(2, HeadService.nodes))[1] == "b:1"
    assert link.epoch == 2


@pytest.mark.parametrize(
    "error",
    [zc.ConnectionLost("nobody is there"), zc.AuthenticationError("a standby is there"), Deposed(1, 2)],
)
async def test_the_next_place_is_looked_at_where_no_head_is(error: Exception) -> None:
    link = Link(None)
    link.places.learn(["a:1", "b:1"])

    async def connect(process: bytes) -> Any:
        raise error

    link._connections = SimpleNamespace(connect=connect)  # type: ignore[assignment]
    with pytest.raises(zc.ConnectionLost):
        await link.rejoin(0, HeadService.nodes)
    assert link.places.current == "b:1"


async def test_a_stopped_head_is_left_for_the_next_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its system accepts connections, and its process never answers."""
    link = Link(None)
    link.places.learn(["a:1", "b:1"])
    looked, connected = list[str](), list[str]()

    async def identify(place: str) -> Identity:
        looked.append(place)
        if place == "a:1":
            await asyncio.get_running_loop().create_future()
        return Identity(HEAD, "b", 1, "us", 1)

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
            await link.rejoin(0, HeadService.nodes)
    assert not connected
    assert (await rejoin(link)(0, HeadService.nodes))[1] == "answer"
    assert looked == ["a:1", "b:1"] and connected == ["b:1"]
    link.places.learn(["c:1"])  # the only one: whether it answers is seen then
    assert (await rejoin(link)(0, HeadService.nodes))[1] == "answer"
    assert looked == ["a:1", "b:1"] and connected == ["b:1", "c:1"]


@pytest.mark.parametrize("leaves", [True, False])
async def test_what_a_deposed_head_refuses_is_asked_of_the_next(monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    monkeypatch.setattr(head_link, "_LOOK", 0.0)
    link = Link(None)
    sessions: list[Any] = [SimpleNamespace(closed=None), SimpleNamespace(closed=None)]
    asked: list[Any] = []

    async def connect(_: bytes) -> Any:
        return sessions[0]

    async def ask_of(session: Any, *_: object) -> str:
        asked.append(session)
        if len(asked) > 1:
            return "made"
        if leaves:  # the connection ends, and the next one is to another head
            asyncio.get_running_loop().call_soon(link._sessions.used.pop, link.process)
        raise Deposed(1, 2)

    link._connections, link._requests = SimpleNamespace(connect=connect), SimpleNamespace(ask_of=ask_of)  # type: ignore[assignment]
    link._sessions.used[link.process] = sessions[0]
    with pytest.raises(zc.ConnectionLost, match="decides no more"):  # nobody leads after a head without a log
        link._timeout, asked[:] = 0.0, []
        await HeadLink.ask(link, HeadService.nodes)
    link.outage.joined(6.0, "log")
    link._sessions.used[link.process] = sessions[0]
    asked.clear()
    if leaves:
        link._timeout = PATIENCE
        assert await ask(link, HeadService.nodes) == "made"
        assert len(asked) == 2
    else:
        with pytest.raises(zc.HeadUnavailable, match="log"):
            await HeadLink.ask(link, HeadService.nodes)


async def test_all_waits_of_a_request_in_a_row_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that does not stay, again and again, does not make a request wait again."""
    link = Link(None)
    link._timeout = PATIENCE
    link.outage._timeout = PATIENCE
    link.outage.joined(6.0, "log")
    ends: list[float] = []

    async def end(until: float) -> None:
        ends.append(until)
        if len(ends) == 3:
            raise zc.HeadUnavailable("log", PATIENCE, "head")

    async def connect(_: bytes) -> Any:
        raise zc.ConnectionLost("it is gone again")

    async def on_loop(make: Any) -> None:
        await make()

    monkeypatch.setattr(link.outage, "end", end)
    link._connections = SimpleNamespace(connect=connect)  # type: ignore[assignment]
    link._tasks.on_loop = on_loop  # type: ignore[method-assign, assignment]
    link.outage.begin()
    for ask in (lambda: HeadLink.ask(link, HeadService.nodes), lambda: link.hold_actor(51)):
        ends.clear()
        with pytest.raises(zc.HeadUnavailable):
            await ask()
        assert len(ends) == 3 and len(set(ends)) == 1


async def test_a_report_of_an_earlier_term_is_not_asked_again() -> None:
    """The head that refuses it leads: its node reports anew, by the present term."""
    link = Link(None)
    session: Any = SimpleNamespace(closed=None)

    async def connect(_: bytes) -> Any:
        return session

    async def ask_of(*_: object) -> str:
        raise Deposed(1, 2)

    link._connections, link._requests = SimpleNamespace(connect=connect), SimpleNamespace(ask_of=ask_of)  # type: ignore[assignment]
    link._sessions.used[link.process] = session
    link.outage.joined(6.0, "log")
    link._timeout = PATIENCE
    with pytest.raises(Deposed):
        await HeadLink.ask(link, MembershipService.leave_node, 1)
