"""The watch over a head, in place of which others can lead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.control import head_watch
from zcactor.control.head_watch import HeadWatch
from zcactor.errors import ConnectionLost
from zcactor.process.cluster import HeadService
from zcactor.process.epochs import KnownEpoch
from zcactor.process.head_places import HeadPlaces
from zcactor.process.tasks import Tasks

PATIENCE = 60.0


class HeadOutage:
    """The absence of a head, and the looks at it."""

    def __init__(self) -> None:
        self.is_away = False
        self.looked = asyncio.Event()

    @property
    def going_on(self) -> bool:
        """Whether the head is away."""
        self.looked.set()
        return self.is_away


class World:
    """A process, and its head."""

    def __init__(self) -> None:
        self.tasks = Tasks(asyncio.get_running_loop())
        self.places = HeadPlaces("a:1")
        self.outage = HeadOutage()
        self.epoch = 1
        self.moving = False
        self.process = b"head"
        self.head = self
        self.sessions = SimpleNamespace(used={b"head": self})
        self.asked = asyncio.Event()
        self.closed = asyncio.Event()
        self.answers: list[Any] = []
        """The answers to come; the last one is given again and again."""
        self.leader = ""
        self.looking: Callable[[], None] = lambda: None
        """Called while the place of a head is looked for."""
        self.heard: list[tuple[int, float | None]] = []
        self.known = KnownEpoch()
        self.known.check(2)
        watched: Any = self
        self.watch = HeadWatch(watched, self.known, lambda epoch, _, age: self.heard.append((epoch, age)))

    async def ask(self, method: Any, epoch: int) -> Any:
        """Ask the head."""
        assert (method, epoch) == (HeadService.stay, 2)
        self.asked.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        return answer

    async def whereabouts(self, known: int) -> str:
        """The place of another head."""
        assert known == self.known.epoch
        place = self.leader
        if place:
            self.looking()
        return place

    async def aclose(self) -> None:
        """Close the session."""
        self.closed.set()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_watch, "_EACH", 0.01)
    monkeypatch.setattr(head_watch, "_ANSWER", 0.05)


async def until_closed(world: World) -> None:
    """Wait until the process has left its head."""
    async with asyncio.timeout(PATIENCE):
        await world.closed.wait()


async def until_asked(world: World, times: int) -> None:
    async with asyncio.timeout(PATIENCE):
        for _ in range(times):
            world.asked.clear()
            await world.asked.wait()


async def test_a_head_that_leads_is_stayed_with() -> None:
    world = World()
    world.answers = [(2, 0.0)]
    world.leader = "b:1"
    world.watch.told(["a:1", "b:1"])
    world.watch.told(["a:1"])
    await until_asked(world, 3)
    assert world.heard[:2] == [(2, 0.0)] * 2
    assert not world.closed.is_set()
    assert world.places.current == "a:1"
    world.tasks.cancel()


@pytest.mark.parametrize("answer", [None, (2, None), (2, 0.5)])
async def test_another_head_is_gone_to_where_this_one_is_silent_says_so_or_has_no_term(answer: Any) -> None:
    world = World()
    world.answers = [answer]
    world.watch.told(["a:1", "b:1"])
    await until_asked(world, 2)
    assert not world.closed.is_set(), "no other head is there yet"
    world.leader = "b:1"
    await until_closed(world)
    assert world.places.current == "b:1"
    assert world.moving
    world.tasks.cancel()


async def test_a_head_that_is_lost_is_not_asked_while_it_is_sought() -> None:
    world = World()
    world.answers = [ConnectionLost("it has ended", False)]
    world.leader = "b:1"
    world.watch.told(["a:1"])
    await until_asked(world, 1)
    world.outage.is_away = True
    world.asked.clear()
    for _ in range(3):
        world.outage.looked.clear()
        await world.outage.looked.wait()
    assert not world.asked.is_set()
    assert not world.closed.is_set()
    world.tasks.cancel()


async def test_another_head_is_gone_to_while_this_one_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node lives for some seconds after the last answer, and spends none of them on an answer that does not come."""
    world = World()
    world.answers = [None]
    world.watch.told(["a:1", "b:1"])
    await until_asked(world, 1)
    monkeypatch.setattr(head_watch, "_ANSWER", 10 * PATIENCE)
    await until_asked(world, 1)
    world.leader = "b:1"
    await until_closed(world)
    assert world.places.current == "b:1"
    world.tasks.cancel()


async def test_a_head_that_answers_again_is_stayed_with() -> None:
    world = World()
    world.answers = [None, None, (2, 0.0)]
    world.watch.told(["a:1", "b:1"])
    await until_asked(world, 5)
    assert world.heard[0] == (2, 0.0)
    assert not world.closed.is_set()
    world.tasks.cancel()


async def test_a_head_that_is_back_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.answers = [ConnectionLost("it has ended", False)]
    world.watch.told(["a:1"])
    await until_asked(world, 1)
    world.outage.is_away = True
    for _ in range(3):
        world.outage.looked.clear()
        await world.outage.looked.wait()
    monkeypatch.setattr(head_watch, "_EACH", 10 * PATIENCE)
    for _ in range(3):
        world.outage.looked.clear()
        await asyncio.wait_for(world.outage.looked.wait(), PATIENCE)
    world.answers = [(2, 0.0)]
    world.outage.is_away = False
    await until_asked(world, 1)
    world.tasks.cancel()


@pytest.mark.parametrize(
    ("place", "epoch", "away", "ours", "goes"),
    [
        ("b:1", 3, False, 1, True),
        ("b:1", 2, False, 1, True),
        ("b:1", 1, False, 1, False),  # its term is over
        ("a:1", 3, False, 1, False),  # it is there already
        ("b:1", 3, True, 1, False),  # and looked for
        ("b:1", 2, False, 2, False),  # it is the present one, at another of its addresses
    ],
)
async def test_a_head_that_says_that_it_leads(place: str, epoch: int, away: bool, ours: int, goes: bool) -> None:
    world = World()
    world.epoch = ours
    world.outage.is_away = away
    world.watch.summoned(place, epoch)
    assert world.places.current == (place if epoch > ours else "a:1")
    await world.tasks.settled(PATIENCE)
    assert world.moving is goes
    assert world.closed.is_set() is goes


async def test_a_head_that_says_so_where_none_is_connected() -> None:
    world = World()
    world.sessions.used.clear()
    world.watch.summoned("b:1", 3)
    assert world.places.current == "b:1"
    assert not world.moving


async def test_a_head_that_was_just_found_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first answer has to come before the life is over that the last answer of the other one has given."""
    world = World()
    world.answers = [None]
    world.watch.told(["a:1", "b:1"])
    await until_asked(world, 2)
    monkeypatch.setattr(head_watch, "_EACH", 10 * PATIENCE)
    world.leader = "b:1"
    await until_closed(world)
    world.answers = [(3, 0.0)]
    await until_asked(world, 1)
    async with asyncio.timeout(PATIENCE):
        while not world.heard:
            await asyncio.sleep(0)
    assert world.heard == [(3, 0.0)]
    assert world.known.epoch == 3
    world.tasks.cancel()


async def test_a_process_that_has_gone_to_another_head_while_it_looked_stays_there() -> None:
    """The head that it finds may be that one, and the connection the one to it."""
    world = World()
    world.answers = [(2, 0.5)]
    moved = asyncio.Event()

    def move() -> None:
        world.sessions.used[b"head"] = SimpleNamespace(aclose=world.aclose)
        world.leader = ""
        moved.set()

    world.leader, world.looking = "b:1", move
    world.watch.told(["a:1", "b:1"])
    async with asyncio.timeout(PATIENCE):
        await moved.wait()
    await until_asked(world, 2)
    assert not world.closed.is_set() and not world.moving
    assert world.places.current == "a:1"
    assert world.epoch == 2, "the head has said so"
    world.tasks.cancel()
