"""The recipes that one agent holds."""

from __future__ import annotations

from typing import Any

from zcactor.api.handle import ActorHold
from zcactor.control.recipe_shelf import RecipeShelf, nbytes_of_recipe
from zcactor.marshal.packed import Packed
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.parts import Part


def of(nbytes: int, *parts: Part) -> Packed:
    return Packed(bytes(nbytes), list(parts), 0)


def array(nbytes: int) -> Part:
    holder: Any = object()
    return Part(RegionKind.ARRAY, holder, 0, nbytes)


def test_it_holds_as_much_as_it_may() -> None:
    shelf = RecipeShelf(limit=100)
    first, second = of(10, array(50)), of(40)
    assert nbytes_of_recipe(first) == 60
    assert shelf.put(1, first)
    assert shelf.put(2, second)
    assert shelf.nbytes == 100
    assert not shelf.put(3, of(1))
    assert (shelf.get(1), shelf.get(2), shelf.get(3)) == (first, second, None)
    for _ in range(2):
        shelf.drop(1)
    assert (shelf.get(1), shelf.nbytes) == (None, 40)
    assert shelf.put(2, of(90)), "it takes the place of the one before"
    assert shelf.nbytes == 90


def test_it_keeps_what_a_new_head_knows() -> None:
    shelf = RecipeShelf()
    for key in range(4):
        shelf.put(key, of(10))
    shelf.keep([1, 3, 7])
    assert [key for key in range(8) if shelf.get(key) is not None] == [1, 3]
    assert shelf.nbytes == 20


def test_the_leases_on_actors_among_the_arguments() -> None:
    released: list[int] = []
    hold = ActorHold(b"h" * 16, 7, released.append)
    shelf = RecipeShelf()
    shelf.put(1, of(10, array(5), Part(RegionKind.ACTOR, hold, 0, 0)))
    assert shelf.holds() == [hold]
    del hold
    assert not released
    shelf.drop(1)
    assert released == [7]
