"""The closing of an actor that moves to another node. Calls that come meanwhile go back unrun to their callers: each
with its arguments, as its caller may not have them any more."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from zcactor.api.future import ObjectRef
from zcactor.api.passing import FailedArgumentError, Unresolved
from zcactor.rpc.messages import Status
from zcactor.rpc.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from zcactor.execution.answers import Answers
    from zcactor.marshal import Marshaller
    from zcactor.rpc.incoming import Incoming
    from zcactor.rpc.parts import Part

__all__ = ["Movable", "send_back"]

_GLANCE = 0.01
"""Seconds between two looks whether calls that go back have gone."""


class Movable(ABC):
    """The part of an actor's runner that closes the actor for a move, or has it take calls again."""

    moving = False
    """Whether further calls go back to their callers, who send them again to the actor's next place."""
    stopping: bool
    _away: dict[Any, None]
    """The callers to which calls went back: later ones do, too, until they ask to be readmitted."""
    _plain: Sequence[Any]
    _when_open: Sequence[Any]

    @abstractmethod
    async def _refrain(self, patience: float | None) -> bool:
        """Run the queued calls and refuse later ones. Returns whether they have ended within `patience` seconds."""

    @abstractmethod
    async def _end(self) -> None:
        """Close the actor."""

    @abstractmethod
    def _open_calls(self) -> Iterator[Incoming]:
        """The calls that have come and are not answered."""

    async def vacate(self, patience: float) -> bool:
        """Run the queued calls and close the actor, which goes on elsewhere: later calls go back to their callers.
        Returns False, and takes calls again, where a queued call runs after `patience` seconds: it may wait for a later
        one."""
        self.moving = True
        if not await self._refrain(patience):
            while any(each.returning for each in self._open_calls()):  # noqa: ASYNC110  # before later ones are taken
                await asyncio.sleep(_GLANCE)
            self.moving = self.stopping = False
            self._admit(None)
            return False
        await self._end()
        return True

    async def readmit(self, session: Session) -> None:
        """Take calls of a caller again, to which calls went back. It asks for that before it sends those again."""
        while any(each.returning and each.session is session for each in self._open_calls()):  # noqa: ASYNC110
            await asyncio.sleep(_GLANCE)
        self._admit(session)

    def _admit(self, session: Any) -> None:
        self._away.pop(session, None)
        if not (self._away or self.stopping):
            self._plain = self._when_open


def send_back(incoming: Incoming, marshaller: Marshaller, answers: Answers) -> bool:
    """Send a call back to its caller, at once or when the references among its arguments have come.

    Args:
        incoming: the call, which has not started.
        marshaller: packs arguments that have been unpacked already.
        answers: of the actor; they answer where an argument cannot be sent back.

    Returns:
        False for a call of a graph, whose caller is no process.
    """
    session = incoming.session
    if not isinstance(session, Session):
        return False
    if incoming.cancelled:
        answers.status(incoming, Status.CANCELLED)
    elif incoming.blockers:
        incoming.returning = True
    else:
        try:
            payload, parts, flags = _packed(incoming, marshaller)
            session.respond(incoming, Status.MOVED, payload, parts, flags, pushed=incoming.code)
        except FailedArgumentError as error:
            answers.failure(incoming, error.failure)
        except BaseException as error:  # the store is full, or an object among the arguments is lost
            answers.failure(incoming, error)
    return True


def _packed(incoming: Incoming, marshaller: Marshaller) -> tuple[Any, Sequence[Part], int]:
    """The arguments of a call as they came, or packed again where they came as plain values."""
    if type(incoming.payload) is not list:
        return incoming.payload, incoming.parts, incoming.flags
    arguments = [ObjectRef(value.call) if type(value) is Unresolved else value for value in incoming.payload]
    return marshaller.pack_call(tuple(arguments), {}, incoming.session.connection.eager_limit)
