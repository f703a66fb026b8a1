"""Exports: the promises and actors of a process that peers may hold, by object id, as long as something keeps them."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Exports"]


class Exports(MutableMapping[int, Any]):
    """The promises and actors that peers may hold, by object id. It keeps none of them alive: the leases do.

    An entry ends with its holder, by a function of C: a function of Python would be one more for each promise that is
    passed on, and `weakref.WeakValueDictionary` has two. Another holder of the same id ends the former entry, and with
    it what would happen at the former holder's end.
    """

    def __init__(self) -> None:
        self._exports: dict[int, ref[Any]] = {}

    def __setitem__(self, object_id: int, holder: Any) -> None:
        self._exports[object_id] = ref(holder, partial(self._exports.pop, object_id))

    def __getitem__(self, object_id: int) -> Any:
        holder = self._exports[object_id]()
        if holder is None:
            raise KeyError(object_id)
        return holder

    def __delitem__(self, object_id: int) -> None:
        del self._exports[object_id]

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._exports))

    def __len__(self) -> int:
        return len(self._exports)
