"""The search of a program for its cluster's head; `tests.node.test_head_state` has programs that go through it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from zcactor.api.handle import ActorHold
from zcactor.driver.head_search import HeadSearch
from zcactor.errors import ConnectionLost
from zcactor.process.cluster import MembershipService
from zcactor.process.epochs import KnownEpoch
from zcactor.process.head_outage import HeadOutage

PATIENCE = 20.0
HEAD = b"h" * 16


class Scene:
    """A program that has joined a cluster."""

    def __init__(self, patience: float) -> None:
        loop = asyncio.get_running_loop()
        self.answers: list[Any] = []
        self.asked: list[tuple[Any, ...]] = []
        self.released: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.hold = ActorHold(HEAD, 1, None)
        remotes = {b"a": SimpleNamespace(hold=self.hold), b"b": SimpleNamespace(hold=None)}
        self.sessions = SimpleNamespace(head=HEAD, used={}, remotes=remotes, living=lambda _: True)
        self.outage: Any = HeadOutage(loop, PATIENCE)
        self.outage.joined(patience, "log")
        head = SimpleNamespace(outage=self.outage, rejoin=self._rejoin)
        tasks = SimpleNamespace(closing=False, begin=self._begin)
        news = SimpleNamespace(known=KnownEpoch())
        news.known.check(3)
        process: Any = SimpleNamespace(sessions=self.sessions, tasks=tasks, head=head, address="here", news=news)
        self.search = HeadSearch(process, "machine")

    def _begin(self, work: Any) -> asyncio.Task[None]:
        self.tasks.append(asyncio.get_running_loop().create_task(work))
        return self.tasks[-1]

    async def _rejoin(self, *asked: Any) -> Any:
        self.asked.append(asked)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(release=self.released.append), answer

    def lose(self, peer: bytes = HEAD) -> None:
        session: Any = SimpleNamespace(peer_process=peer, closed=None)
        self.search.session_lost(session)


async def test_the_actors_are_leased_anew() -> None:
    scene = Scene(6.0)
    scene.answers += [ConnectionLost("not yet"), [1, 2]]
    scene.lose()
    scene.lose()
    assert scene.outage.going_on
    async with asyncio.timeout(PATIENCE):
        (searching,) = scene.tasks
        await searching
    assert scene.asked == [(3, MembershipService.return_driver, "here", "machine", [1])] * 2
    assert scene.released == [2], "the program has dropped that one meanwhile"
    assert not scene.outage.going_on
    scene.hold.release()
    assert scene.released == [2, 1]


async def test_a_head_that_does_not_come_back_is_not_looked_for() -> None:
    scene = Scene(0.0)
    scene.lose()
    other = Scene(6.0)
    other.lose(b"n" * 16)
    other.sessions.used[HEAD] = object()  # another connection to it
    other.lose()
    assert not scene.tasks and not other.tasks
    assert not other.outage.going_on
