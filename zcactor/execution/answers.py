"""The answers to an actor's calls: a result, a status or a failure, each of which reaches the caller in some form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ConnectionLost, DeviceError, RemoteError
from zcactor.exception_pickling import bare, cause_of, context_of, fields_of, text_of, type_name
from zcactor.execution.failure import Failure, log_failure, pack_as_text
from zcactor.marshal.explaining import name_result
from zcactor.rpc.incoming import NO_ANSWER
from zcactor.rpc.messages import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.marshal import Marshaller
    from zcactor.rpc.incoming import Incoming

__all__ = ["Answers"]

_FRAME_HEAD: Final = 4096
"""Bytes of a frame beside its payload, at most: 128 releases of 16 bytes, and some 80 bytes of fields."""
_OK = int(Status.OK)
_CAUSES: Final = 16
"""Causes of an exception that are looked at: the chain may be a ring."""


class Answers:
    """The sender of an actor's answers. Its methods may be called from any thread.

    Args:
        label: the actor's name in messages.
        marshaller: packs results and failures.
        push: pushes results to other processes; see `zcactor.objects.pushes.Pushes.value`.
        sent: called after each answer.
        broken: called after each failure by which a GPU's context turns out to be broken.
    """

    def __init__(
        self, label: str, marshaller: Marshaller, push: Callable[[Incoming, Any], Any], sent: Callable[[], None],
        broken: Callable[[DeviceError], None],
    ) -> None:  # fmt: skip
        self._label = label
        self._push = push
        self._pack = marshaller.pack
        self._sent = sent
        self._broken = broken

    def value(self, incoming: Incoming, value: Any, *, more: bool = False) -> None:
        """Answer with a result. An exception of packing it is raised, and then no answer was sent.

        Args:
            incoming: the call.
            value: the result of its method; `zcactor.rpc.incoming.NO_ANSWER` only closes the call.
            more: another answer follows at once.
        """
        session = incoming.session
        try:
            if value is NO_ANSWER:
                session.incoming.pop(incoming.id, None)
            elif incoming.forwards is not None and not incoming.cancelled and incoming.id in session.incoming:
                pushed, payload, parts, flags = self._push(incoming, value)
                if parts is None and not session.wire.respond(incoming.id, value, more, pushed):
                    payload, parts, flags = self._pack(value, session.connection.eager_limit)
                if parts is not None:
                    session.respond(incoming, _OK, payload, parts, flags, more=more, pushed=pushed)
            elif not session.wire.respond(incoming.id, value, more):
                payload, parts, flags = self._pack(value, incoming.session.connection.eager_limit)
                del value
                session.respond(incoming, _OK, payload, parts, flags, more=more)
        except Exception as error:
            if incoming.host is not None:
                name_result(error, f"the result of {incoming.host.interface.methods[incoming.code].label}()")
            raise
        self._sent()

    def status(self, incoming: Incoming, status: int) -> None:
        """Answer with a status alone."""
        try:
            incoming.session.respond(incoming, status, b"", (), 0)
        except BaseException as error:  # memory is short, for example
            self.failure(incoming, error)
            return
        self._sent()

    def failure(self, incoming: Incoming, error: BaseException, *, more: bool = False) -> None:
        """Answer with an exception. Its traceback is dropped, or the frames would keep arguments alive. Exits keep it:
        uvloop raises one of a task later, and by its traceback the worker knows that it may go on."""
        session = incoming.session
        failure = Failure(error, incoming.blamed or self._label)
        try:
            payload, parts, flags = self._pack(failure, session.connection.eager_limit)
            session.respond(incoming, Status.ERROR, payload, parts, flags, more=more)
        except BaseException as unsendable:  # the store is full, or an object in the exception is lost
            self._as_text(incoming, failure, unsendable)
        if not issubclass(type(error), SystemExit | KeyboardInterrupt):
            bare(error, None)
        self._sent()
        broken = _broken_context(error)
        if broken is not None:
            self._broken(broken)

    def _as_text(self, incoming: Incoming, failure: Failure, unsendable: BaseException) -> None:
        session = incoming.session
        try:
            payload = pack_as_text(failure, unsendable, session.connection.max_frame - _FRAME_HEAD)
            session.respond(incoming, Status.ERROR, payload, (), 0)
        except BaseException as error:  # even the text failed: the end of the connection tells the caller
            log_failure(f"{self._label}: a call could not be answered", error)
            why = f"{type_name(type(error))}: {text_of(error)}"
            session.fail(ConnectionLost(f"a call of {self._label} could not be answered: {why}", True))


def _broken_context(error: BaseException) -> DeviceError | None:
    """The error, among an exception and its causes, after which this process can use a GPU no more. Errors of other
    processes say nothing about this one."""
    found: BaseException | None = error
    for _ in range(_CAUSES):
        if found is None or issubclass(type(found), RemoteError):
            return None
        if issubclass(type(found), DeviceError) and fields_of(found).get("fatal") is True:
            return found  # type: ignore[return-value]
        cause = cause_of(found)
        found = context_of(found) if cause is None else cause
    return None
