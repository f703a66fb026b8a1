"""Calls to system actors: requests that processes make of each other beside the calls of programs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from zcactor.api.future import ObjectRef
from zcactor.errors import ConnectionLost, RemoteError, ZcactorError, remote_of
from zcactor.process.tasks import all_of
from zcactor.rpc.call import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.interface import Interface
    from zcactor.marshal import Marshaller
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session

__all__ = ["SYSTEM_INDEX", "Requests"]

SYSTEM_INDEX: Final = 0
"""Index of the `zcactor.assembly.system.SystemActor` in every process."""


class Requests:
    """The requests of this process to system actors of peers.

    Args:
        process: id of this process, 16 bytes.
        marshaller: packs their arguments.
        tasks: the tasks of the process, on whose loop requests complete.
        system: the interface of the system actor that every process has.
    """

    def __init__(self, process: bytes, marshaller: Marshaller, tasks: Tasks, system: Interface) -> None:
        self._process = process
        self._marshaller = marshaller
        self._tasks = tasks
        self._system = system

    def ask(self, session: Session, method: str, *args: Any) -> ObjectRef[Any]:
        """Call the system actor that the peer, like every process, has."""
        return self._ask(session, SYSTEM_INDEX, self._system, method, args)

    def tell(self, session: Session, method: str, args: tuple[Any, ...]) -> Call | None:
        """Call the system actor of the peer without awaiting the answer. On the loop's thread.

        Returns:
            The call; None where the connection has ended.
        """
        spec = self._system.by_name[method]
        call = Call(self._process, self._tasks.loop, self._tasks.thread)
        call.label = spec.label
        call.retrieved = True
        try:
            if session.wire.call(call, SYSTEM_INDEX, spec.code, args):
                return call
            payload, parts, flags = self._marshaller.pack_call(args, {}, session.connection.eager_limit)
            session.send_call(call, SYSTEM_INDEX, spec.code, flags, 0, payload, parts)
        except ConnectionLost:
            return None
        return call

    def send(self, session: Session, method: str, args: tuple[Any, ...], *, more: bool = False) -> None:
        """Call a method of the peer's system actor that gives no answer (`zcactor.rpc.incoming.NO_ANSWER`). On the
        loop's thread. Nothing is sent where the connection has ended.

        Args:
            session: with the peer.
            method: of the system actor.
            args: plain values, or others that the marshaller packs.
            more: another call follows in this turn, so that both may share a system call.
        """
        if session.wire.tell(SYSTEM_INDEX, self._system.by_name[method].code, args, more):
            return
        call = self.tell(session, method, args)
        if call is not None:
            session.pending.pop(call.id, None)

    def _ask(
        self, session: Session, index: int, interface: Interface, method: str, args: Sequence[Any]
    ) -> ObjectRef[Any]:
        spec = interface.by_name[method]
        payload, parts, flags = self._marshaller.pack_call(tuple(args), {})
        call = Call(self._process, self._tasks.loop, self._tasks.thread)
        call.label = spec.label
        session.send_call(call, index, spec.code, flags, 0, payload, parts)
        return ObjectRef(call)

    async def ask_of(self, session: Session, index: int, interface: Interface, method: str, args: Sequence[Any]) -> Any:
        """Call a system actor of the peer. Errors of zcactor's own are raised unchanged, not as remote errors.

        Raises:
            ConnectionLost: the connection to the peer has ended.
        """
        try:
            return await self._ask(session, index, interface, method, args)
        except RemoteError as error:
            original = remote_of(error).original
            if issubclass(type(original), ZcactorError | ValueError | TypeError):
                raise original from None  # type: ignore[misc]
            raise

    async def delivered(self, sessions: Sessions) -> None:
        """Return once every peer has received all that was sent to it: answers may still wait for credit or for the
        socket. A peer that has reported all as received is not asked."""

        async def taken(session: Session) -> None:
            with contextlib.suppress(ConnectionLost):
                await self.ask(session, "ping")  # answered after all earlier frames

        await all_of(taken(session) for session in sessions.all() if session.closed is None and not session.is_read)
