"""Making groups: where their actors are, one epoch after another, and the promise that all their values hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zcactor import ids
from zcactor.api.future import ObjectRef
from zcactor.api.handle import ActorHandle
from zcactor.collectives.cost import Line
from zcactor.collectives.hierarchy import Hierarchy
from zcactor.collectives.service import GroupService
from zcactor.errors import ActorDied, ConnectionLost, RemoteError, ZcactorError, original_of
from zcactor.exception_pickling import text_of
from zcactor.peers.seating import seat_of
from zcactor.rpc.call import Call
from zcactor.rpc.messages import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.collectives.group_options import GroupOptions
    from zcactor.process.context import LocalProcess

__all__ = ["KEY_NBYTES", "NAME_NBYTES", "Founded", "checked", "found", "measured"]

NAME_NBYTES: Final = 16
"""Random bytes that name a group through all its epochs, the first of its key."""
KEY_NBYTES: Final = NAME_NBYTES + 8
"""Bytes that name one epoch: those of the name, the epoch's number, and a random number, because two parties may
propose one number at the same time."""
_ATTEMPTS: Final = 20
"""Number of times that a new epoch is proposed; each time another party has made one meanwhile."""
_NONE: Final = b"\xc0"
"""None, in MessagePack."""


class Founded(NamedTuple):
    """A new epoch of a group."""

    key: bytes
    epoch: int
    actors: tuple[ActorHandle, ...]
    token: ObjectRef[None]
    options: GroupOptions


class _Token:
    """The founder's end of a group, dropped with the last value of the group anywhere."""

    __slots__ = ("_key", "_process")

    def __init__(self, process: LocalProcess, key: bytes) -> None:
        self._process = process
        self._key = key

    def __del__(self) -> None:
        self._process.groups().drop(self._key)


def checked(what: str, actors: Sequence[Any]) -> tuple[ActorHandle, ...]:
    """The actors of a group as a tuple.

    Raises:
        ValueError: there are none, or one is there twice.
        TypeError: an element is no handle.
    """
    handles = tuple(actors)
    if not handles:
        raise ValueError(f"{what}: there are no actors; a group has at least one member")
    for index, handle in enumerate(handles):
        if not isinstance(handle, ActorHandle):
            raise TypeError(f"{what}: actors[{index}] is of type {type(handle).__name__}, and must be a handle")
        if handle in handles[:index]:
            raise ValueError(f"{what}: {handle._remote.label} is there twice; an actor has one rank")
    return handles


async def found(
    process: LocalProcess, name: bytes, epoch: int, handles: tuple[ActorHandle, ...],
    former: Sequence[ActorHandle] = (), *, options: GroupOptions,
) -> Founded:  # fmt: skip
    """Make a new epoch of a group.

    Args:
        process: this process, on whose loop this runs.
        name: the name of the group.
        epoch: the least number of the epoch.
        handles: its actors.
        former: members of the epoch before, who are told that it is over.
        options: of the group.

    Raises:
        ActorDied: an actor is dead.
        ConnectionLost: a member is not reached.
    """
    seats = [await seat_of(process, handle) for handle in handles]
    for attempt in range(_ATTEMPTS):
        key = name + epoch.to_bytes(4, "big") + ids.token(4)
        try:
            latest = await process.groups().found(key, epoch, seats, options)
        except (RemoteError, ConnectionLost) as error:
            original = original_of(error)
            if not issubclass(type(original), ZcactorError):
                raise
            former_seats, seats = seats, [await seat_of(process, handle, lost=True) for handle in handles]
            if seats == former_seats:
                raise ConnectionLost(f"a member of the group could not be made: {text_of(original)}") from error
            continue  # an actor has left its process since it was located
        if latest is None:
            break
        epoch = latest + 1 + ids.bits(8) % (attempt + 1)  # two parties that met propose different ones next
    else:
        raise ConnectionLost(f"other parties have made {_ATTEMPTS} epochs of the group meanwhile; use theirs")
    for handle in former:
        if handle not in handles:
            await _tell_former(process, handle, key, epoch)
    token = Call(process.process, process.loop, process.thread)
    token.label = "group"
    token.retrieved = True
    token.stream = _Token(process, key)  # kept as long as anybody holds the promise
    token.complete(Status.OK, _NONE, (), 0)
    return Founded(key, epoch, handles, ObjectRef(token), options)


async def _tell_former(process: LocalProcess, handle: ActorHandle, key: bytes, epoch: int) -> None:
    try:
        seat = await seat_of(process, handle)
        session = await process.connections.connect(seat.process)
    except (ActorDied, ConnectionLost):  # it calls nothing any more
        return
    process.requests.send(session, GroupService.superseded, (key[:NAME_NBYTES], epoch))


async def measured(process: LocalProcess, key: bytes, first: ActorHandle) -> tuple[Hierarchy, Line, int, str]:
    """The facts of a group, from the process of its first member: the ranks by host, the cost of bytes from one to
    another, the bytes that travel in frames, and the way of arrays on GPUs.

    Raises:
        ActorDied: the first member is dead.
        ConnectionLost: it is not reached.
        RuntimeError: its process does not know the group any more.
    """
    seat = await seat_of(process, first)
    session = await process.connections.connect(seat.process)
    facts = await process.requests.ask(session, GroupService.facts, key)
    if facts is None:
        raise RuntimeError(f"{seat.label} does not know this group any more: it was started anew; reform the group")
    eager_nbytes, hosts, everywhere, frame_s, nbytes_per_s, _, gpus = facts
    hierarchy = Hierarchy(hosts, everywhere=everywhere)
    if hierarchy.one_host:  # nothing depends on it, so it was not measured yet
        frame_s = await process.groups().frame_s(session)
    return hierarchy, Line(frame_s, nbytes_per_s), eager_nbytes, gpus
