"""The indexes of the actors that the head knows, checked against a list of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.control import actor_table
from zcactor.control.actor_record import ActorRecord
from zcactor.control.actor_table import ActorTable
from zcactor.errors import NoSuchActor
from zcactor.ids import ActorId, ProcessId
from zcactor.interface import Interface
from zcactor.options import ActorSpec


class Shop:
    """The class of the actors."""


WIRE = Interface.of(Shop).wire()
X, Y = ProcessId(b"x" * 16), ProcessId(b"y" * 16)
UNKNOWN = ActorId(b"a" * 16)


def record(number: int, name: str | None = None, owner: ProcessId = X) -> ActorRecord:
    """A record of an actor."""
    return ActorRecord(ActorSpec("default", name), "Shop", WIRE, owner, number)


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([None, "a", "b", "c"]), st.sampled_from([X, Y]))))
def test_every_index_says_the_same(steps: list[tuple[bool, str | None, ProcessId]]) -> None:
    table = ActorTable[ActorRecord]()
    living: list[ActorRecord] = []
    for number, (ends, name, owner) in enumerate(steps):
        if ends and living:
            actor = living.pop(number % len(living))
            actor.set_state("dead", "the test says so")
            table.bury(actor)
            assert table.of_object(actor.object_id) is None and table.known(actor.actor_id) is actor
        elif table.holder_of("default", name) is None:
            living.append(record(number, name, owner))
            table.add(living[-1])
        for maker in (X, Y):
            assert table.made_by(maker) == sorted(
                (actor for actor in living if actor.owner == maker), key=lambda actor: actor.object_id
            )
        assert all(table.of_object(actor.object_id) is actor for actor in living)
        named = {actor.name: actor for actor in living if actor.name is not None}
        assert {each: table.holder_of("default", each) for each in "abc"} == {each: named.get(each) for each in "abc"}
    assert len(table.told()) == len(list(table.all()))


def test_names_that_are_not_there() -> None:
    table = ActorTable[ActorRecord]()
    table.add(record(1, "till"))
    with pytest.raises(NoSuchActor, match=r"no actor named 'shop' .* \(named actors there: till\)"):
        table.named("default", "shop")
    with pytest.raises(NoSuchActor, match=r"\(named actors there: none\)"):
        table.named("other", "till")
    with pytest.raises(NoSuchActor, match="is unknown to this node"):
        table.known(UNKNOWN)
    assert table.get(UNKNOWN) is None


def test_the_dead_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_table, "_REMEMBERED", 2)
    table = ActorTable[ActorRecord]()
    actors = [record(number) for number in range(3)]
    for actor in actors:
        table.add(actor)
        actor.set_state("dead", "the test says so")
        table.bury(actor)
    assert [table.get(actor.actor_id) for actor in actors] == [None, *actors[1:]]
    assert [each["cause"] for each in table.told()] == ["the test says so"] * 2


def test_actors_of_several_makers_are_told_oldest_first() -> None:
    table = ActorTable[ActorRecord]()
    made = [record(9 - number, owner=(X, Y)[number % 2]) for number in range(6)]
    for actor in made:
        table.add(actor)
    assert table.made_by(X, Y) == table.made_by(Y, X) == made
    assert table.made_by(Y) == made[1::2]


def test_who_asks_again_for_a_place() -> None:
    table = ActorTable[ActorRecord]()
    actor = record(7)
    assert table.answered(actor.actor_id, 7, X) is None
    table.add(actor)
    assert table.answered(actor.actor_id, 7, X) is actor
    other = ActorId(b"o" * 16)
    for asked in ((actor.actor_id, 7, Y), (actor.actor_id, 8, X), (other, 7, X)):
        with pytest.raises(ValueError, match="another one has them"):
            table.answered(*asked)
    for ids in ((ActorId(b"short"), 8), (other, 0), (other, (1 << 62) + 1)):
        with pytest.raises(ValueError, match="are no ids of an actor"):
            table.answered(*ids, X)
    actor.set_state("dead", "the test says so")
    table.bury(actor)
    assert table.answered(actor.actor_id, 7, X) is actor, "an actor that has lived is not made again"


def test_a_spawn_that_was_given_up_may_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_table, "_REMEMBERED", 1)
    table = ActorTable[ActorRecord]()
    given_up = record(7)
    table.add(given_up)
    given_up.withdrawn = True
    given_up.set_state("dead", "its spawn was cancelled")
    table.bury(given_up)
    assert table.answered(given_up.actor_id, 7, X) is None
    again = ActorRecord(ActorSpec("default"), "Shop", WIRE, X, 7, given_up.actor_id)
    table.add(again)
    for number in (8, 9):  # so many deaths that the first one would be forgotten
        table.add(dead := record(number))
        dead.set_state("dead", "the test says so")
        table.bury(dead)
    assert table.get(given_up.actor_id) is again
