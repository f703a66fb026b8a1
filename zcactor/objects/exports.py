"""Exports: the promises and actors of a process that peers may hold, by object id, as long as something keeps them."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Exports"]


class _Export(ref[Any]):
    """A weak reference that knows its id. It has no constructor of its own: that would be a function for each promise
    that is passed on, as `weakref.WeakValueDictionary` has two."""

    __slots__ = ("id",)

    id: int


class Exports(MutableMapping[int, Any]):
    """The promises and actors that peers may hold, by object id. It keeps none of them alive: the leases do."""

    def __init__(self) -> None:
        self._exports: dict[int, _Export] = {}
        self._ended = self._forget

    def __setitem__(self, object_id: int, holder: Any) -> None:
        export = _Export(holder, self._ended)
        export.id = object_id
        self._exports[object_id] = export

    def _forget(self, ended: Any) -> None:
        object_id: int = ended.id
        if self._exports.get(object_id) is ended:  # else another holder has the id by then
            self._exports.pop(object_id, None)

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
