"""`zcactor.buggify`: its places do the unlikely in a simulation only, and they are few."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path

import pytest

import zcactor
from zcactor import buggify as places
from zcactor.buggify import DAWDLE, buggify, dawdle, decided_by

PLACE = re.compile(r'\b(?:buggify|dawdle)\("([^"]+)"\)')


def test_nothing_happens_outside_of_a_simulation() -> None:
    assert not buggify("anywhere")


async def test_only_what_is_decided_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    slept: list[float] = []

    def decide(place: str) -> bool:
        asked.append(place)
        return place == "here"

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    before = places.injects
    with decided_by(decide):
        within = places.injects
        assert buggify("here")
        assert not buggify("there")
        await dawdle("here")
        await dawdle("there")
    assert not buggify("here")
    assert [before, within, places.injects] == [False, True, False]
    assert asked == ["here", "there", "here", "there"]
    assert slept == [DAWDLE]


def test_places_are_few_and_each_has_a_name_of_its_own() -> None:
    package = Path(zcactor.__file__).parent
    places = Counter(place for path in package.rglob("*.py") for place in PLACE.findall(path.read_text("utf-8")))
    assert 8 <= len(places) <= 20
    assert set(places.values()) == {1}
