"""The recipes that an agent holds for heads to come: classes and arguments that are too large for the head's log, or
have arrays among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.api.handle import ActorHold

if TYPE_CHECKING:
    from collections.abc import Collection

    from zcactor.marshal.packed import Packed

__all__ = ["HELD_NBYTES", "RecipeShelf", "nbytes_of_recipe"]

HELD_NBYTES: Final = 512 << 20
"""Bytes of recipes that one agent holds, at most: half of its arena, where they lie if they came from another host. The
rest is for messages on their way."""


def nbytes_of_recipe(recipe: Packed) -> int:
    """The bytes of a recipe, its arrays included."""
    return len(recipe.payload) + sum(part.nbytes for part in recipe.parts)


class RecipeShelf:
    """The recipes that one agent holds, by their keys; see `zcactor.control.entries.RecipeAt`. Used on the loop's
    thread.

    Args:
        limit: bytes that it holds, at most.

    Attributes:
        nbytes: bytes that it holds.
    """

    def __init__(self, limit: int = HELD_NBYTES) -> None:
        self._limit = limit
        self._recipes: dict[int, Packed] = {}
        self.nbytes = 0

    def put(self, key: int, recipe: Packed) -> bool:
        """Hold a recipe, until `drop` or `keep`. Returns whether there is room for it."""
        self.drop(key)
        nbytes = nbytes_of_recipe(recipe)
        if self.nbytes + nbytes > self._limit:
            return False
        self._recipes[key] = recipe
        self.nbytes += nbytes
        return True

    def get(self, key: int) -> Packed | None:
        """The recipe with that key; None where it is not held."""
        return self._recipes.get(key)

    def drop(self, key: int) -> None:
        """Hold a recipe no longer. Idempotent."""
        recipe = self._recipes.pop(key, None)
        if recipe is not None:
            self.nbytes -= nbytes_of_recipe(recipe)

    def keep(self, keys: Collection[int]) -> None:
        """Drop all recipes but those with these keys."""
        for key in self._recipes.keys() - set(keys):
            self.drop(key)

    def holds(self) -> list[ActorHold]:
        """The leases on actors at the head that the recipes have: handles are among the arguments."""
        parts = [part for recipe in self._recipes.values() for part in recipe.parts]
        return [part.holder for part in parts if isinstance(part.holder, ActorHold)]
