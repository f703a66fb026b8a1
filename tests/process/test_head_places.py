"""The places at which a head is looked for."""

from __future__ import annotations

from zcactor.process.head_places import HeadPlaces


def test_a_head_without_others() -> None:
    places = HeadPlaces("a:1")
    assert places.current == "a:1"
    places.turn()
    assert places.current == "a:1"
    assert not places.told
    assert places.others == []
    assert "a:1" in places
    assert "b:1" not in places


def test_places_are_looked_at_in_turn() -> None:
    places = HeadPlaces("a:1")
    places.learn(["a:1", "b:1", "c:1", "b:1"])
    assert places.told
    assert places.others == ["b:1", "c:1"]
    seen = []
    for _ in range(4):
        seen.append(places.current)
        places.turn()
    assert seen == ["a:1", "b:1", "c:1", "a:1"]


def test_what_is_learned_replaces_what_was() -> None:
    places = HeadPlaces("a:1")
    places.learn(["b:1", "c:1"])
    assert places.current == "b:1", "the head is there by its own word"
    places.turn()
    places.learn(["d:1"])
    assert places.current == "d:1"
    assert places.others == ["a:1"]


def test_a_head_that_tells_where_it_is() -> None:
    places = HeadPlaces("a:1")
    places.learn(["a:1", "b:1"])
    places.at("c:1")
    assert places.current == "c:1"
    places.turn()
    assert places.current == "a:1"


def test_a_head_that_has_no_place() -> None:
    places = HeadPlaces()
    assert places.current == ""
    places.learn(["b:1"])
    places.turn()
    assert places.current == "b:1"
    assert places.others == []


def test_a_head_that_calls() -> None:
    places = HeadPlaces("a:1")
    places.called("b:1")
    assert (places.current, places.others) == ("b:1", ["a:1"])
    assert places.told, "another one may lead one day"
