"""The places of actors: the process of each, and its number there."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from zcactor.errors import ActorDied, ConnectionLost, ZcactorError
from zcactor.exception_pickling import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zcactor.api.handle import ActorHandle
    from zcactor.process.context import LocalProcess

__all__ = ["Misplaced", "Seat", "reaching", "seat_of"]


class Misplaced(ZcactorError):
    """An actor or a process is not where the founder of a group or graph took it to be, and may be elsewhere.

    Processes tell it to the founder, which looks again: no error of a user's object is of this class. It never leaves
    the package.
    """


@contextmanager
def reaching() -> Iterator[None]:
    """Raise `Misplaced` where another process is not reached."""
    try:
        yield
    except ZcactorError as error:
        raise Misplaced(text_of(error)) from error


class Seat(NamedTuple):
    """The place of one actor."""

    actor_id: bytes
    process: bytes
    """Id of its process."""
    place: int
    """Number of the actor in its process."""
    label: str


async def seat_of(process: LocalProcess, handle: ActorHandle, *, lost: bool = False) -> Seat:
    """The place of an actor, as the head knows it.

    Args:
        process: this process, on whose loop this runs.
        handle: of the actor.
        lost: the actor's process may just have ended, and the head may not know yet.

    Raises:
        ActorDied: the actor is dead.
        ConnectionLost: the head is not reached.
        HeadUnavailable: the head is away.
    """
    remote = handle._remote
    state, (host, index), cause = await process.head.locate(remote.actor_id)
    if lost and state != "dead":
        try:
            await process.connections.connect(host)
        except ConnectionLost:
            await process.head.locate(remote.actor_id, calls_wait=True)  # until its end is reported
            state, (host, index), cause = await process.head.locate(remote.actor_id)
    if state == "dead":
        raise ActorDied(remote.label, cause, False)
    return Seat(remote.actor_id, host, index, remote.label)
