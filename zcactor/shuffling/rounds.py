"""`shuffle`: each mapper divides its data into a part for each reducer, and each reducer merges its parts.

The parts stay in the stores of their mappers. The program that shuffles gets references to them and passes these to
the reducers, which map the parts, or read them from the other host. It never opens one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVarTuple

from zcactor.api.future import ObjectRef
from zcactor.api.handle import ActorHandle
from zcactor.errors import ActorDied, ActorUnavailable, ConnectionLost, ObjectLost, RemoteError, remote_of
from zcactor.exception_pickling import shown_class
from zcactor.interface import MethodKind
from zcactor.process.cluster import HeadService
from zcactor.process.context import current
from zcactor.shuffling.sides import ShuffleService

if TYPE_CHECKING:
    from zcactor.rpc.session import Session

__all__ = ["shuffle"]

Ts = TypeVarTuple("Ts")


async def shuffle(
    mappers: Sequence[Any],
    partition: str,
    merge: str,
    *,
    reducers: Sequence[Any] | None = None,
    items: Sequence[Any] | None = None,
    in_flight: int | None = None,
) -> list[ObjectRef[Any]]:
    """Shuffle: mappers divide, reducers merge, and each byte moves once, from mapper to reducer.

    ``partition(n)`` of each mapper returns n parts, one for each of the n reducers; with `items` it is
    ``partition(n, item)``, and item i goes to mapper ``i % len(mappers)``. ``merge(parts)`` of reducer j gets the j-th
    part of each, in the order of mappers or items. Parts are any values; arrays arrive read-only and without a copy, as
    arguments do.

    With `in_flight` the items go in rounds of so many, and `merge` is called once a round. The next round is divided
    while one is merged, so no more than two are in memory at a time, and a part is freed when its reducer lets go of
    it.

    Args:
        mappers: handles of different actors.
        partition: the name of their method that returns the parts, plain or ``async``.
        merge: the name of the reducers' method, plain or ``async``.
        reducers: handles of different actors; None for the mappers.
        items: the arguments of the calls of `partition`; None for one call of each mapper, without one.
        in_flight: items of a round; None for all of them.

    Returns:
        References to the results of the last `merge`, one a reducer, in their order. A result stays with its reducer
        until somebody awaits it.

    Raises:
        NotInitialized: no runtime is running.
        TypeError: an element is no handle, a name is no str, a method is a generator or does not take these arguments,
            or `partition` returned neither a list nor a tuple.
        AttributeError: the actors have no such method.
        ValueError: no mapper, reducer or item, an actor twice, an `in_flight` below 1 or without `items`, or
            `partition` returned another number of parts; the message names the actor and the number.
        ActorDied, ActorUnavailable: an actor was lost.
        NoSuchActor: an actor was dead before.
        RemoteError: a method raised.

    The first error ends the shuffle: calls that have not started are cancelled, and the parts are freed. Cancelling
    does the same.
    """
    mappers = _handles("mappers", mappers)
    reducers = mappers if reducers is None else _handles("reducers", reducers)
    rounds = _rounds(len(mappers), items, in_flight)
    for handles, method, args in ((mappers, partition, (0,) * (1 if items is None else 2)), (reducers, merge, (0,))):
        _check_method(handles, method, args)
    actors = list(dict.fromkeys([*mappers, *reducers]))
    places = dict(zip(actors, await asyncio.gather(*map(_session_to, actors)), strict=True))

    async def divide(part: Sequence[tuple[int, tuple[Any, ...]]]) -> list[list[ObjectRef[Any]]]:
        """The parts of a round, by reducer."""
        grid = await _all(
            [
                _ask(places, mappers[index], ShuffleService.partition, mappers[index], partition, len(reducers), item)
                for index, item in part
            ]
        )
        return [[row[column] for row in grid] for column in range(len(reducers))]

    async def join(columns: list[list[ObjectRef[Any]]]) -> list[ObjectRef[Any]]:
        """The results of a round. `columns` is emptied."""
        asked: list[_Asked] = []
        while columns:
            asked.append(_ask(places, to := reducers[len(asked)], ShuffleService.merge, to, merge, columns.pop(0)))
        return [merged for (merged,) in await _all(asked)]

    columns: list[list[ObjectRef[Any]]] = []
    merging: asyncio.Task[list[ObjectRef[Any]]] | None = None
    try:
        for part in rounds:
            columns = await divide(part)
            if merging is not None:
                await merging
            merging = asyncio.create_task(join(columns))
        assert merging is not None  # there is at least one round
        return await merging
    except ObjectLost as error:  # a reducer did not get a part: its mapper has ended, or a process that it refers to
        await _raise_if_dead(mappers, str(error))
        raise
    finally:
        if merging is not None:
            await _ended([merging])
        # An error's traceback leads to this frame, which must not keep parts alive.
        columns, merging = [], None


async def _all(asked: list[_Asked]) -> list[Any]:
    """The results of requests, in order. The first error is raised, and ends the others. `asked` is emptied."""
    tasks = [asyncio.ensure_future(each.result()) for each in asked]
    asked.clear()
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((task for task in tasks if task.done() and task.exception() is not None), None)
        if failed is not None:
            await failed
        return [task.result() for task in tasks]
    finally:
        await _ended(tasks)
        failed = None  # an error's traceback leads to this frame, which must not keep results alive
        tasks.clear()


async def _ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """End all of `tasks`; errors of theirs have been raised elsewhere, or come too late."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()


async def _raise_if_dead(handles: Sequence[Any], text: str) -> None:
    """Raise the death of an actor that has died; otherwise return.

    Raises:
        ActorDied: the first one that is dead, with the cause, or `text` where that is unknown.
    """
    process = current()
    found = await asyncio.gather(*(process.head.locate(each._remote.actor_id, calls_wait=True) for each in handles))
    for handle, (state, _, why) in zip(handles, found, strict=True):
        if state == "dead":
            raise ActorDied(handle._remote.label, why or text, True) from None


async def _raise_lost(handle: Any, error: ConnectionLost) -> NoReturn:
    """Raise what the end of the connection to an actor's process means for the actor.

    Raises:
        ActorDied: the actor is dead.
        ActorUnavailable: it is not.
    """
    text = str(error.args[0])
    await _raise_if_dead([handle], text)
    raise ActorUnavailable(handle._remote.label, text, True) from None


class _Asked:
    """A request to the process of an actor."""

    def __init__(self, handle: Any, ref: ObjectRef[Any] | ConnectionLost) -> None:
        self._handle = handle
        self._ref = ref
        if isinstance(ref, ObjectRef):
            ref._call.retrieved = True  # where it fails after another one, nobody awaits it

    async def result(self) -> Any:
        """The answer, once. Errors are those of a call of the actor itself."""
        failure: Any = None
        try:
            if isinstance(self._ref, ConnectionLost):
                raise self._ref
            return await self._ref
        except RemoteError as error:
            failure = remote_of(error).original
            if not issubclass(type(failure), RemoteError | ValueError | TypeError):  # these name the actor themselves
                raise
        except ConnectionLost as error:
            await _raise_lost(self._handle, error)
        finally:
            del self._ref  # the failure's traceback leads to this frame
        try:
            raise failure  # not in the handler: the two errors would hold each other, and the parts in these frames
        finally:
            del failure


def _ask(
    places: dict[Any, Session], handle: Any, side: Callable[[Any, *Ts], Coroutine[Any, Any, Any]], *args: *Ts
) -> _Asked:
    try:
        asked: Any = current().requests.ask(places[handle], side, *args)
    except ConnectionLost as error:
        asked = error  # it is raised where the others are awaited
    return _Asked(handle, asked)


async def _session_to(handle: Any) -> Session:
    process = current()
    host = await process.head.ask(HeadService.process_of, handle._remote.actor_id)
    try:
        return await process.connections.connect(host)
    except ConnectionLost as error:
        await _raise_lost(handle, error)


def _handles(name: str, handles: Any) -> list[Any]:
    if isinstance(handles, ActorHandle):
        raise TypeError(f"zc.shuffle: {name} must be a sequence of handles, not a single one")
    if not isinstance(handles, Sequence):
        raise TypeError(f"zc.shuffle: {name} must be a sequence of handles, not {shown_class(type(handles))}")
    listed: list[Any] = list(handles)
    for handle in listed:
        if not isinstance(handle, ActorHandle):
            raise TypeError(f"zc.shuffle: {name} must be handles of actors, not {shown_class(type(handle))}")
    if not listed:
        raise ValueError(f"zc.shuffle: {name} is empty: give at least one actor")
    if len(set(listed)) < len(listed):
        twice = next(handle for place, handle in enumerate(listed) if handle in listed[:place])
        raise ValueError(f"zc.shuffle: {twice!r} occurs twice in {name}")
    return listed


def _rounds(mappers: int, items: Any, in_flight: Any) -> list[list[tuple[int, tuple[Any, ...]]]]:
    """The calls of each round: a mapper's number, and its further arguments."""
    if in_flight is not None and (type(in_flight) is not int or in_flight < 1):
        raise ValueError(f"zc.shuffle: in_flight must be a whole number of items >= 1, or None, not {in_flight!r}")
    if items is None:
        if in_flight is not None:
            raise ValueError("zc.shuffle: in_flight is a number of items, and there are no items: give some")
        return [[(index, ()) for index in range(mappers)]]
    if not isinstance(items, Sequence):
        raise TypeError(f"zc.shuffle: items must be a sequence, not {shown_class(type(items))}")
    calls = [(index % mappers, (item,)) for index, item in enumerate(items)]
    if not calls:
        raise ValueError("zc.shuffle: items is empty: there is nothing to merge")
    size = in_flight or len(calls)
    return [calls[start : start + size] for start in range(0, len(calls), size)]


def _check_method(handles: Sequence[Any], method: Any, args: tuple[Any, ...]) -> None:
    if not isinstance(method, str):
        raise TypeError(f"zc.shuffle: a method is given by its name, not as {shown_class(type(method))}")
    for interface in dict.fromkeys(handle._remote.interface for handle in handles):
        spec = interface.find(method)
        if spec.kind in (MethodKind.GENERATOR, MethodKind.ASYNC_GENERATOR):
            raise TypeError(f"zc.shuffle: {spec.label} is a generator; it must return a value")
        spec.check(args, {})
