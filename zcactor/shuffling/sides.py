"""The sides of a shuffle in the processes of its actors: the parts stay there, and only references travel.

The methods call the actor as any caller in its process would, so that its methods
run in its thread, in the order of calls, beside those of others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.api.future import ObjectRef, put
from zcactor.api.waiting import get, wait
from zcactor.rpc.messages import Status
from zcactor.rpc.services import remote

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ShuffleService"]


class ShuffleService:
    """The sides of shuffles in one process."""

    @remote(18)
    async def partition(self, mapper: Any, method: str, count: int, item: Sequence[Any]) -> list[ObjectRef[Any]]:
        """Have a mapper of this process make its parts, and keep them here.

        Args:
            mapper: handle of the actor.
            method: the name of its method.
            count: the number of parts that it is to return.
            item: its further arguments.

        Returns:
            References to the parts.

        Raises:
            TypeError: the method returned neither a list nor a tuple.
            ValueError: the method returned another number of parts.
            Exception: the error of the method.
        """
        parts = await getattr(mapper, method)(count, *item)
        name = f"{method}() of {mapper._remote.label}"
        if not isinstance(parts, list | tuple):
            raise TypeError(f"{name} returned a {type(parts).__name__}, but a shuffle needs a list of {count} parts")
        if len(parts) != count:
            raise ValueError(f"{name} returned {len(parts)} parts for {count} reducers: return exactly one for each")
        return [part if isinstance(part, ObjectRef) else put(part) for part in parts]

    @remote(19)
    async def merge(self, reducer: Any, method: str, refs: list[ObjectRef[Any]]) -> list[ObjectRef[Any]]:
        """Fetch the parts of a reducer of this process, and have it merge them. `refs` is emptied.

        Args:
            reducer: handle of the actor.
            method: the name of its method.
            refs: references to the parts, in order.

        Returns:
            The reference to the result of the method, which stays here, in a list: a bare one would be replaced by its
            value.

        Raises:
            Exception: the error of the method, or that of fetching a part.
        """
        parts = await get(refs)
        refs.clear()
        merged = getattr(reducer, method)(parts)
        del parts  # leases go back as the method lets go of its parts
        await wait([merged])
        call = merged._call
        if call.error is not None or call.status != Status.OK:
            await merged
        return [merged]
