"""Calls that an actor sends back unrun, because it moves to another node: each with its arguments, as its caller may
not have them any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.api.future import ObjectRef
from zcactor.api.passing import FailedArgumentError, Unresolved
from zcactor.rpc.messages import Status
from zcactor.rpc.session import Session

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from zcactor.execution.answers import Answers
    from zcactor.marshal import Marshaller
    from zcactor.rpc.incoming import Incoming
    from zcactor.rpc.parts import Part

__all__ = ["send_back"]


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
