"""Calls to system actors: what processes ask of each other beside the calls of programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import RemoteError, ZcactorError
from zcactor.future import ObjectRef
from zcactor.rpc.call import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.interface import Interface
    from zcactor.marshal import Marshaller
    from zcactor.rpc.session import Session
    from zcactor.runtime.tasks import Tasks

__all__ = ["SYSTEM_INDEX", "Requests"]

SYSTEM_INDEX: Final = 0
"""Index of the `zcactor.runtime.system.SystemActor` in every process."""


class Requests:
    """Sends them.

    Args:
        process: 16 bytes that name ours.
        marshaller: packs their arguments.
        tasks: whose loop they complete on.
        system: the interface of the system actor.
    """

    def __init__(self, process: bytes, marshaller: Marshaller, tasks: Tasks, system: Interface) -> None:
        self._process = process
        self._marshaller = marshaller
        self._tasks = tasks
        self._system = system

    def ask(self, session: Session, method: str, *args: Any) -> ObjectRef[Any]:
        """Call the system actor of the peer."""
        return self._ask(session, SYSTEM_INDEX, self._system, method, args)

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
        """Call a system actor of the peer. Errors of zcactor's own come out as they are, not as remote errors.

        Raises:
            ConnectionLost: the peer is gone.
        """
        try:
            return await self._ask(session, index, interface, method, args)
        except RemoteError as error:
            if isinstance(error.original, ZcactorError | ValueError | TypeError):
                raise error.original from None
            raise
