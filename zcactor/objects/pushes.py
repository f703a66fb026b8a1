"""Pushes: results that go straight to the processes of calls that have them as arguments.

The caller of a method owns its promise. When it passes the unfinished promise to an actor of another process, it tells
the process that makes the result to push it there (FORWARD). That process may have answered already, may have no
connection to the other one, or the call may fail: then the owner itself pushes the outcome once it has it. The answer
says which of the FORWARD frames were obeyed.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zcactor import buggify as faults
from zcactor.api.future import ObjectRef, packed_result
from zcactor.api.passing import has_scalar
from zcactor.buggify import buggify
from zcactor.errors import ConnectionLost, ProtocolError, ZcactorError
from zcactor.objects.expectations import Expectations
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.store import Block
from zcactor.rpc.call import CallState
from zcactor.rpc.messages import MAX_FORWARDS, Status, owner_word
from zcactor.rpc.parts import Announced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.marshal import Marshaller
    from zcactor.objects.promises import Promises
    from zcactor.peers.connections import Connections
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.call import Call
    from zcactor.rpc.incoming import Incoming
    from zcactor.rpc.parts import Part
    from zcactor.rpc.session import Session

__all__ = ["Pushes"]

_OK: Final = int(Status.OK)
_SENT: Final = CallState.SENT
_DONE: Final = CallState.DONE
_PATIENCE: Final = 8
"""Calls to a process that are sent at the end of the loop's turn, and not at once, after a result of it was passed on:
so the FORWARD frame for a call goes with it. That costs a call some 2 us."""


class Push:
    """One outcome that is owed to the process of a call."""

    __slots__ = ("key", "number", "session")

    def __init__(self, session: Session, key: int) -> None:
        self.session = session
        """The session by which the reference went."""
        self.key = key
        self.number = -1
        """Its number among the FORWARD frames of the promise's call; -1: the owner pushes it."""


_new_push: Final = Push.__new__
_new_announced: Final = Announced.__new__


class Pushes:
    """Pushes the outcomes of one process's calls, and the results of its actors.

    Args:
        tasks: of the process.
        sessions: of the process.
        connections: open connections to processes that results are to be pushed to.
        marshaller: packs results.
        promises: of the process; an announced outcome that does not come is asked for through them.
    """

    def __init__(
        self, tasks: Tasks, sessions: Sessions, connections: Connections, marshaller: Marshaller, promises: Promises
    ) -> None:
        self._tasks = tasks
        self._loop = tasks.loop
        self._sessions = sessions
        self._connections = connections
        self._marshaller = marshaller
        self._promises = promises
        self.expectations = Expectations(tasks, promises)
        """The outcomes that are to come to this process."""
        self.reached = sessions.used
        """The processes to which results can be pushed at once, as keys."""
        promises.announce = self.announce
        connections.on_left.append(self._left)
        self._process = sessions.process
        self._word = owner_word(sessions.process)
        self._keys = 0
        self._unsent: list[tuple[Call, Push]] = []
        self._scheduled = False
        self.noted: Callable[[str], None] = lambda _: None
        """Called with the name of a rare state, for simulations."""

    def _left(self, session: Session, another: Session | None) -> None:
        # One of two connections is closed by agreement, when all that it carried has come. A push that is lost all the
        # same, as it broke before, is asked for after a while.
        if not self._tasks.closing and not session.is_replaced:
            self.expectations.session_lost(session.peer_process, last=another is None)

    # ---------------------------------------------------------------- the owner

    def announce(self, call: Call, session: Session) -> int:
        """Owe the outcome of `call` to the peer of `session`, which gets a reference to it as an argument.

        Returns:
            The key under which the outcome will be pushed; 0 where the peer has to ask for it, as for an outcome that
            is known, and for references that are passed on from other threads than the loop's.
        """
        if call.known or session.peer_process == self._process or threading.get_ident() != self._tasks.thread:
            return 0
        push = self._owe(call, session)
        self._later(call, push)
        return push.key

    def _owe(self, call: Call, session: Session) -> Push:
        self._keys += 1
        push = Push(session, self._keys << 32 | call.export_id & 0xFFFFFFFF)  # the random half of the id
        if call.pushes is None:
            call.pushes = [push]
            call.when_known(self._settle)
        else:
            call.pushes.append(push)
        maker = call.session
        if maker is not None and maker.closed is None:
            maker.wire.patience = _PATIENCE
        return push

    def sent_again(self, call: Call) -> None:
        """Take note that `call`, whose outcome is owed, is sent only now, or for another time."""
        for push in call.pushes or ():
            push.number = -1
            self._later(call, push)

    def _later(self, call: Call, push: Push) -> None:
        """Send a FORWARD frame outside of the lock of the session that the reference goes by."""
        self._unsent.append((call, push))
        if not self._scheduled:
            self._loop.call_soon(self._flush)
            self._scheduled = True

    def _flush(self) -> None:
        """Send the FORWARD frames that are due."""
        self._scheduled = False
        unsent, self._unsent = self._unsent, []
        for call, push in unsent:
            session = call.session
            if session is None or session.closed is not None or call.state is not _SENT or push.number >= 0:
                continue  # it ends, or is sent later
            target = push.session.peer_process
            if session.peer_process != self._process and call.forwarded < MAX_FORWARDS:
                session.forward(call, push.key, target)
                push.number = call.forwarded
                call.forwarded += 1

    def _settle(self, call: Call) -> None:
        """Push the outcome wherever its maker has not."""
        pushes, call.pushes = call.pushes or (), None
        for push in pushes:
            if push.number >= 0 and call.pushed >> push.number & 1:
                continue
            session = push.session.in_use
            if session.closed is None:
                self.noted("owner pushes" if push.number < 0 else "owner pushes in place of the maker")
                self._push(session, push.key, call)

    def _push(self, session: Session, key: int, call: Call) -> None:
        try:
            if call.error is None and call.status == _OK:
                packed = self._marshaller.fit(packed_result(call), session.connection.eager_limit)
                session.push(key, self._word, _OK, *packed)
                return
        except (ZcactorError, OSError):  # the store is full, or an object is lost: the peer learns it when it asks
            self.noted("owner could not push")
        try:
            session.push(key, self._word, Status.ERROR, b"", (), 0)
        except ConnectionLost:  # the peer asks when it notices
            return

    def call(self, dependent: Call, session: Session, actor: int, code: int, args: tuple[Any, ...]) -> bool:
        """Send a call with references among its arguments by the native part, and announce the unfinished promises
        among them. A promise that has ended with a number, a text or the like goes into the frame as that value.

        Returns:
            Whether that was done. Otherwise the call has to go another way, and nothing was sent or announced.

        Raises:
            Exception: the error of writing the frame; nothing was sent or announced then, either.
        """
        values: list[Any] = list(args)
        owed: list[tuple[Call, Push]] = []
        sent: bool = False
        try:
            for index, arg in enumerate(args):
                if type(arg) is not ObjectRef:
                    continue
                call = arg._call
                if call.state is _DONE and has_scalar(call):
                    values[index] = call.value
                    continue
                if (
                    call.state is _DONE
                    or call.arrived
                    or call.holder is not None
                    or session.peer_process == self._process
                    or threading.get_ident() != self._tasks.thread
                ):
                    return False
                call.retrieved = True
                object_id = call.export_id or self._promises.export(call)
                with session.lock:
                    session.leases.grant(object_id, call)
                # As in `_owe`. No constructors: each is a function more, with cold caches.
                self._keys += 1
                push = _new_push(Push)
                push.session, push.key, push.number = session, self._keys << 32 | object_id & 0xFFFFFFFF, -1
                if call.pushes is not None:
                    call.pushes.append(push)
                else:
                    call.pushes = [push]
                    if call.known_callbacks is None:
                        call.known_callbacks = [self._settle]
                    else:
                        call.known_callbacks.append(self._settle)
                maker = call.session
                if maker is not None and maker.closed is None:
                    maker.wire.patience = _PATIENCE
                owed.append((call, push))
                values[index] = announced = _new_announced(Announced)
                announced.id, announced.key, announced.label = object_id, push.key, call.label
            sent = session.wire.call(dependent, actor, code, tuple(values)) is True
        finally:
            if not sent and session.pending.get(dependent.id) is dependent:  # a signal's handler has raised then
                for call, push in owed:
                    self._later(call, push)
            elif not sent:
                self._take_back(owed, session)
        if not sent:
            return False
        for call, push in owed:  # as in `_flush`, for the usual case
            maker, number = call.session, call.forwarded
            push.number, call.forwarded = number, number + 1  # before a signal's handler can raise after the frame
            if (
                maker is None
                or maker.closed is not None
                or call.state is not _SENT
                or number >= MAX_FORWARDS
                or maker.peer_process == self._process
                or not maker.wire.forward(call.id, number, push.key, session.peer_process)
            ):
                push.number, call.forwarded = -1, number
                self._later(call, push)
        return True

    def _take_back(self, owed: Sequence[tuple[Call, Push]], session: Session) -> None:
        """Undo the announcements of a call that was not sent."""
        for call, push in owed:
            if call.pushes is not None:
                call.pushes.remove(push)
            with session.lock:
                if session.leases.get(call.export_id) is not None:
                    session.leases.release(call.export_id, 1)

    # ---------------------------------------------------------------- the maker

    def forward(self, incoming: Incoming, number: int, key: int, target: bytes) -> None:
        """Take a FORWARD frame for a call that is open.

        Raises:
            ProtocolError: the number is not the next one.
        """
        forwards = incoming.forwards
        if number != (0 if forwards is None else len(forwards)):
            raise ProtocolError(
                f"FORWARD {number} of call {incoming.id} came after {0 if forwards is None else len(forwards)} others"
            )
        if forwards is None:
            forwards = incoming.forwards = []
        forwards.append((number, key, target))
        if target != self._process and target not in self.reached:
            self._tasks.start(self._meet(target))

    async def _meet(self, target: bytes) -> None:
        """Connect to a process that results are to be pushed to: now, or for the next time."""
        try:
            await self._connections.connect(target)
        except (ConnectionLost, ProtocolError):
            self.noted("no way to push")

    def plain(self, incoming: Incoming, value: Any, more: bool) -> bool:
        """Push the plain result of a call to the process that its only FORWARD frame names, then answer the call. This
        is the usual case of `value` and `zcactor.execution.answers.Answers.value`, with half of the functions.

        Args:
            incoming: the call.
            value: the result of its method.
            more: another answer follows at once.

        Returns:
            Whether that was done; otherwise nothing was sent.

        Raises:
            Exception: the error of writing the answer.
        """
        session = incoming.session
        forwards = incoming.forwards
        if len(forwards) != 1 or incoming.cancelled or incoming.id not in session.incoming:
            return False
        number, key, target = forwards[0]
        to = self._sessions.used.get(target)
        if to is None or target == self._process or faults.injects:
            return False
        if to.closed is not None or to.peer_hello is None:
            return False
        word = int.from_bytes(session.peer_process[:8], "little")  # as `owner_word`
        pushed = 1 << number
        done = session.wire.pass_on(incoming.id, value, more, pushed, to.wire, key, word)
        if done is None:  # pushed, and not answered
            payload, parts, flags = self._marshaller.pack(value, session.connection.eager_limit)
            session.respond(incoming, _OK, payload, parts, flags, more=more, pushed=pushed)
        return done is not False

    def value(self, incoming: Incoming, value: Any) -> tuple[int, Any, Sequence[Part] | None, int]:
        """Push the result of a call to all that its FORWARD frames name, as far as possible.

        Returns:
            The numbers of those pushed, as bits; and the packed result: payload, parts (None where the value was not
            packed) and flags.

        Raises:
            Exception: the error of packing the value.
        """
        pushed = 0
        packed: tuple[Any, Sequence[Part], int] | None = None
        word = owner_word(incoming.session.peer_process)
        limit = incoming.session.connection.eager_limit
        for number, key, target in incoming.forwards or ():
            session = None
            if target != self._process:
                session = self._sessions.used.get(target)
                if session is None or session.closed is not None or session.peer_hello is None:
                    self.noted("maker has no connection to push by")
                    continue
                if buggify("push refused"):
                    continue
                if buggify("push lost"):  # as by a connection that breaks at this moment
                    pushed |= 1 << number
                    continue
                if packed is None and session.wire.push(key, word, value):
                    pushed |= 1 << number
                    continue
            if packed is None:
                packed = self._marshaller.pack(value, limit)
            if self._push_packed(session, key, word, *packed):
                pushed |= 1 << number
        if packed is None:
            return pushed, None, None, 0
        return pushed, *packed

    def _push_packed(
        self, session: Session | None, key: int, word: int, payload: Any, parts: Sequence[Part], flags: int
    ) -> bool:
        """Push a packed result, to this process itself without a session. Returns whether that was done."""
        if any(part.kind == RegionKind.MOVED for part in parts):  # write access has one receiver, the owner
            return False
        if session is None:
            if not all(type(part.holder) in (Block, Lease) for part in parts):
                return False
            self._loop.call_soon_threadsafe(partial(self.expectations.pushed, word, key, _OK, payload, parts, flags))
            return True
        if len(payload) > session.connection.eager_limit:
            return False
        try:
            session.push(key, word, _OK, payload, parts, flags)
        except (ZcactorError, OSError):  # its connection has ended, or an object is lost
            self.noted("maker could not push")
            return False
        return True
