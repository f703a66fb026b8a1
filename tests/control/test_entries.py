"""The entries of the head's log."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.control.actor_record import ActorRecord
from zcactor.control.entries import (
    RecipeAt,
    actor_change,
    closed_change,
    driver_change,
    gone_changes,
    member_change,
    name_key,
    read,
    reserved_changes,
    stopping_changes,
)
from zcactor.control.head_log import MAX_NBYTES, applied, check_batch, nbytes_of
from zcactor.control.node_table import facts_of
from zcactor.ids import ProcessId
from zcactor.interface import Interface
from zcactor.marshal.packed import Packed
from zcactor.options import ActorSpec

HEAD, OWNER = ProcessId(b"h" * 16), ProcessId(b"o" * 16)
PART: Any = object()


class Shop:
    """The class of the actors."""


def record(recipe: Packed | None = None, **options: Any) -> ActorRecord:
    made = ActorRecord(ActorSpec.of({"namespace": "n", **options}), "Shop", Interface.of(Shop).wire(), OWNER, 7)
    made.recipe, made.asked, made.number, made.node_id = recipe, b"r" * 16, 3, "ab"
    return made


@given(*[st.text(max_size=4)] * 4)
def test_no_two_names_have_one_key(one: str, two: str, three: str, four: str) -> None:
    assert (name_key(one, two) == name_key(three, four)) == ((one, two) == (three, four))


def test_an_actor_is_read_as_it_was() -> None:
    actor = record(Packed(b"payload", (), 4), name="till", resources=MappingProxyType({"GPU": np.float64(0.5)}))
    actor.gpus, actor.restarts = (1,), 2
    state = applied({}, reserved_changes(actor, MAX_NBYTES, HEAD))
    entries = read(state)
    key = actor.actor_id.hex()
    (entry,) = entries.actors.values()
    assert (entry.state, entry.request, entry.object_id) == ("pending", b"r" * 16, 7)
    assert (entry.owner, entry.number) == (OWNER, 3)
    assert entry.options == ActorSpec("n", "till", resources={"GPU": 0.5})
    assert Interface.from_wire(entry.interface) is actor.interface
    assert (entry.node, entry.gpus, entry.restarts, entry.worker) == ("ab", (1,), 2, b"")
    assert entry.recipe == RecipeAt(4, [])
    assert entries.recipes == {key: b"payload"}
    assert entries.names == {name_key("n", "till"): actor.actor_id}
    for change, told in ((actor_change(actor, "alive"), "alive"), (stopping_changes(actor)[0], "stopping")):
        state = applied(state, [change])
        assert read(state).actors[key].state == told
    assert applied(state, gone_changes(actor)) == {}


@pytest.mark.parametrize(("nbytes", "logged"), [(MAX_NBYTES - 2000, True), (MAX_NBYTES, False)])
def test_a_large_recipe_is_held_elsewhere(nbytes: int, logged: bool) -> None:
    actor = record(Packed(bytes(nbytes), (), 0), name="till")
    changes = reserved_changes(actor, MAX_NBYTES, HEAD)
    check_batch(changes)
    entries = read(applied({}, changes))
    assert (len(entries.recipes) == 1) is logged
    assert entries.actors[actor.actor_id.hex()].recipe == RecipeAt(0, [] if logged else [HEAD])
    assert applied(applied({}, changes), gone_changes(actor)) == {}


def test_the_largest_recipe_fills_its_batch() -> None:
    spare = MAX_NBYTES - sum(map(nbytes_of, reserved_changes(record(Packed(b"", (), 0)), MAX_NBYTES, HEAD)))
    for nbytes, logged in ((spare - 40, True), (spare + 1, False)):
        actor = record(Packed(bytes(nbytes), (), 0))
        changes = reserved_changes(actor, MAX_NBYTES, HEAD)
        check_batch(changes)
        assert (not actor.recipe_holders) is logged


def test_a_recipe_with_arrays_and_one_beyond_the_logs_limit_are_held_elsewhere() -> None:
    for recipe, most in ((Packed(b"x", [PART], 0), MAX_NBYTES), (Packed(bytes(17), (), 0), 16)):
        actor = record(recipe)
        reserved_changes(actor, most, HEAD)
        assert actor.recipe_holders == [HEAD]
    actor = record()
    entry = read(applied({}, reserved_changes(actor, MAX_NBYTES, HEAD))).actors[actor.actor_id.hex()]
    assert entry.recipe is None


def test_members_programs_and_the_end_of_the_cluster() -> None:
    facts = facts_of("n@host:1", ("tcp",), "machine")
    state = applied({}, [member_change(HEAD, facts, {"CPU": 2.0}), driver_change(OWNER, "d@host:1", "there")])
    entries = read(state)
    assert (entries.members[HEAD.hex()].facts, entries.members[HEAD.hex()].resources) == (facts, {"CPU": 2.0})
    assert (entries.drivers[OWNER.hex()].address, entries.drivers[OWNER.hex()].machine) == ("d@host:1", "there")
    assert not entries.closed
    assert read(applied(state, [closed_change()])).closed


def test_entries_that_cannot_be_written_or_read() -> None:
    with pytest.raises(ValueError, match="the environment of an actor has 1048577 bytes; all of its options"):
        reserved_changes(record(env={"X": "y" * MAX_NBYTES}), MAX_NBYTES, HEAD)
    with pytest.raises(TypeError, match="an option has a value of type object, which cannot be recorded"):
        actor_change(record(env={"x": object()}), "alive")
    with pytest.raises(msgspec.DecodeError):
        read({"actor": {"ab": b"\xc1"}})


@pytest.mark.parametrize("kind", ["member", "driver", "actor"])
@pytest.mark.parametrize("key", ["zz", "", "0" * 31, "0" * 33, "A" * 32])
def test_a_key_that_is_no_id(kind: str, key: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=f"{kind} is called .*, which is no id"):
        read({kind: {key: b""}})
