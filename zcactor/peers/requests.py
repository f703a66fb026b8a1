"""Calls of the services of peers: requests that processes make of each other beside the calls of programs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple, overload

from zcactor.api.future import ObjectRef
from zcactor.errors import ConnectionLost, RemoteError, ZcactorError, remote_of
from zcactor.process.tasks import all_of
from zcactor.rpc.call import Call
from zcactor.rpc.services import SYSTEM_INDEX, Services, method_number

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from zcactor.marshal import Marshaller
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session

__all__ = ["Requests"]

_AROUND: Final = 512
"""Bytes that the arguments of a request need beside a packed value among them: one that a frame may carry goes in the
frame. Frames have room for more (`zcactor.transport.frames.max_frame_for`)."""

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Requests:
    """The requests of this process to the services of its peers; see `zcactor.rpc.services`.

    Args:
        process: id of this process, 16 bytes.
        marshaller: packs their arguments.
        tasks: the tasks of the process, on whose loop requests complete.
    """

    def __init__(self, process: bytes, marshaller: Marshaller, tasks: Tasks) -> None:
        self._process = process
        self._marshaller = marshaller
        self._tasks = tasks

    @overload
    def ask(
        self, session: Session, method: Callable[[Any, *Ts], Coroutine[Any, Any, R]], *args: *Ts
    ) -> ObjectRef[R]: ...  # fmt: skip
    @overload
    def ask(self, session: Session, method: Callable[[Any, *Ts], R], *args: *Ts) -> ObjectRef[R]: ...
    def ask(self, session: Session, method: Callable[[Any, *Ts], Any], *args: *Ts) -> ObjectRef[Any]:
        """Call a remote method of the peer.

        Args:
            session: with the peer.
            method: the function that the method's class declares.
            args: its arguments.

        Raises:
            ConnectionLost: the connection to the peer has ended.
        """
        payload, parts, flags = self._marshaller.pack_call(args, {}, session.connection.eager_limit)
        call = self._call(method)
        session.send_call(call, SYSTEM_INDEX, method_number(method), flags, 0, payload, parts)
        return ObjectRef(call)

    def _call(self, method: Callable[..., Any]) -> Call:
        call = Call(self._process, self._tasks.loop, self._tasks.thread)
        call.label = method.__qualname__
        return call

    def tell(self, session: Session, method: Callable[[Any, *Ts], object], args: tuple[*Ts]) -> Call | None:
        """Call a remote method of the peer without awaiting the answer. On the loop's thread.

        Returns:
            The call; None where the connection has ended.
        """
        call, number = self._call(method), method_number(method)
        call.retrieved = True
        try:
            if session.wire.call(call, SYSTEM_INDEX, number, args):
                return call
            payload, parts, flags = self._marshaller.pack_call(args, {}, session.connection.eager_limit + _AROUND)
            session.send_call(call, SYSTEM_INDEX, number, flags, 0, payload, parts)
        except ConnectionLost:
            return None
        return call

    def send(
        self, session: Session, method: Callable[[Any, *Ts], None], args: tuple[*Ts], *, more: bool = False
    ) -> None:
        """Call a remote method of the peer that gives no answer. On the loop's thread. Nothing is sent where the
        connection has ended.

        Args:
            session: with the peer.
            method: the function that the method's class declares.
            args: plain values, or others that the marshaller packs.
            more: another call follows in this turn, so that both may share a system call.
        """
        if session.wire.tell(SYSTEM_INDEX, method_number(method), args, more):
            return
        call = self.tell(session, method, args)
        if call is not None:
            session.pending.pop(call.id, None)

    async def ask_of(
        self, session: Session, method: Callable[[Any, *Ts], Coroutine[Any, Any, R]], *args: *Ts
    ) -> R:  # fmt: skip
        """Call a remote method of the peer. Errors of zcactor's own are raised unchanged, not as remote errors.

        Raises:
            ConnectionLost: the connection to the peer has ended.
        """
        try:
            return await self.ask(session, method, *args)
        except RemoteError as error:
            original = remote_of(error).original
            if not issubclass(type(original), ZcactorError | ValueError | TypeError):
                raise
        try:
            raise original  # type: ignore[misc]  # not in the handler: the two errors would hold each other, and what is in these frames
        finally:
            del original

    async def delivered(self, sessions: Sessions) -> None:
        """Return once every peer has received all that was sent to it: answers may still wait for credit or for the
        socket. A peer that has reported all as received is not asked."""

        async def taken(session: Session) -> None:
            with contextlib.suppress(ConnectionLost):
                await self.ask(session, Services.ping)  # answered after all earlier frames

        await all_of(taken(session) for session in sessions.all() if session.closed is None and not session.is_read)
