"""The caller's half of an actor: its location, the connection to it, and the calls that wait for a connection."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from zcactor.api.future import cancel_call
from zcactor.api.passing import FailedArgumentError
from zcactor.buggify import buggify
from zcactor.errors import (
    ActorDied,
    ActorUnavailable,
    ConnectionLost,
    DeadlineExceeded,
    HeadUnavailable,
    MailboxFull,
    ObjectLost,
    ProtocolError,
    ZcactorError,
)
from zcactor.exception_pickling import bare, hides, shown
from zcactor.interface import Interface, MethodKind, MethodSpec
from zcactor.marshal.move import restore
from zcactor.marshal.sharing import reopen
from zcactor.process.cluster import WorkerService
from zcactor.process.context import call_deadline
from zcactor.rpc.call import Call, CallState
from zcactor.rpc.parts import Part
from zcactor.rpc.services import Services
from zcactor.rpc.stream import Stream

if TYPE_CHECKING:
    from zcactor.ids import ActorId
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session

__tracebackhide__ = hides
__all__ = ["RemoteActor"]

_Unsent = tuple[Call, int, int, int, bytes, Sequence[Part]]
_Returned = tuple[int, int, _Unsent]
"""A call that was sent and not run, with the numbers of its session and of the call there, in whose order it is sent
again."""
_STREAMS = (MethodKind.GENERATOR, MethodKind.ASYNC_GENERATOR)
_CONNECT_ATTEMPTS = 5
REACH = 6.0
"""Seconds for all attempts at one place: as long as an attempt that nobody answers takes, and a little more. An attempt
that makes progress may take longer."""
_LAST_TRY = 1.0
"""Seconds for the last attempt at the place of before, where no head has said in time whether the actor is there."""
_FIRST_PAUSE = 0.1
"""Seconds between the first two attempts, doubled for each further one."""
_SIGN_OF_LIFE = 4.5
"""Seconds within which a living node reports to the head several times."""
_LONGEST = 2.0**63
"""Nanoseconds of the longest time that a frame tells: 292 years, which its field of 64 bits holds, and a float exactly.
A deadline that is later is the caller's alone."""


def _nanoseconds(left: float) -> int:
    """The time of a frame for a call that has `left` seconds: at least 1, as 0 means no deadline."""
    return int(min(max(left * 1e9, 1.0), _LONGEST))


class RemoteActor:
    """The state that one process keeps for one actor: its location, the connection to it, and calls that wait for one.

    All handles of the actor in this process share this object. When the last handle is gone and no call is open, the
    lease on the actor goes back to the node agent, which stops an owned, unnamed actor that nobody holds.
    """

    def __init__(
        self, process: LocalProcess, actor_id: ActorId, interface: Interface, location: tuple[bytes, int],
        name: str | None, namespace: str, max_pending: int, max_retries: int,
    ) -> None:  # fmt: skip
        self.process = process
        self.actor_id = actor_id
        self.interface = interface
        self.location = location
        """Id of the actor's process, and the actor's index in it."""
        self.name = name
        self.namespace = namespace
        self.max_pending = max_pending
        self.max_retries = max_retries
        self.label = f"{interface.class_name}({shown(name) if name else actor_id.hex()[:8]})"
        self.route: tuple[Session, int] | None = None
        """The session by which calls are sent, and the actor's index at its other end: read together, as other threads
        send calls while the actor moves, and the index may be that of another actor elsewhere."""
        self.death: str | None = None
        """The cause of the actor's death; None while the actor is not known to be dead."""
        self.hold: Any = None
        """This process's lease on the actor at the node agent."""
        self.unfinished: set[Call] = set()
        """Calls sent or queued, and not finished."""
        self.closed = self.unfinished.discard
        self._lock = threading.RLock()  # a finalizer that calls the actor may run inside it
        self._unsent: deque[_Unsent] = deque()
        self._returned: list[_Returned] = []
        self._following: dict[Call, None] = {}
        """While the actor moves: the calls at its former place that are neither answered nor returned."""
        self._followed: asyncio.Event | None = None
        """Set when the last one of them is."""
        self._opening = False
        self._left = False
        """Whether the actor is known to have left `location`."""
        self._unlocated = False
        """Whether a head was waited for in vain since the connection was lost: the calls have little time left."""
        self.connected = asyncio.Event()
        """Cleared while calls wait for a connection."""
        self.connected.set()

    @property
    def session(self) -> Session | None:
        """The session with the actor's process; None while there is none."""
        return None if self.route is None else self.route[0]

    # ---------------------------------------------------------------- calling

    def call(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout: float | None, retries: int
    ) -> Call:
        """Send a call, or queue it until a connection is open.

        Raises:
            MailboxFull: this process has `max_pending_calls` unfinished calls to the actor.
            Exception: an argument cannot be packed (OutOfMemory, TypeError and others); nothing was sent.
        """
        process = self.process
        if len(self.unfinished) >= self.max_pending:
            raise MailboxFull(
                f"{self.label} has {self.max_pending} unfinished calls from this process, its max_pending_calls; "
                "await some of them before sending more, or raise the option"
            )
        call = Call(process.process, process.loop, process.thread)
        call.label = spec.label
        call.retrieved = True  # until its reference exists: the call may fail before that, here or on the loop's thread
        if spec.kind in _STREAMS:  # an item may come before this returns, where this is not the loop's thread
            call.stream = Stream(call, process.marshaller.unpack, cancel_call)
        if self.death is not None:  # before its arguments are packed, which closes arrays
            call.target = self
            call.fail(ActorDied(self.label, self.death, False))
            return call
        route = self.route
        if route is not None and route[0].is_behind():
            self._catch_up(*route)
        route = self.route
        eager_limit = 0 if route is None else route[0].connection.eager_limit
        moved: list[Any] = []
        closed: list[Any] = []
        marshaller = process.marshaller
        try:
            payload, parts, flags = marshaller.pack_call(
                args, kwargs, eager_limit, moved, closed=closed, direct=True, spec=spec
            )
        except FailedArgumentError as error:
            call.fail(bare(error.failure, None))
            return call
        if moved or closed:
            call.undo = partial(_give_back, moved, closed)
        call.target = self
        call.on_done = self.closed
        self.unfinished.add(call)
        deadline = call_deadline.get()
        timeout_ns = 0
        if timeout is not None or deadline is not None:
            timeout_ns = self._set_timer(call, timeout, deadline)
        if retries:
            left = retries

            def resend(_: Call, error: BaseException) -> bool:
                nonlocal left
                left -= 1
                call.sent_before = call.sent_before or getattr(error, "maybe_executed", False)
                if left < 0 or issubclass(type(error), ActorDied):
                    return False
                call.state, call.session = CallState.QUEUED, None
                try:
                    again = marshaller.duplicate(parts) if moved and left else parts
                    self._queue((call, spec.code, flags, timeout_ns, payload, again))
                except Exception as lost:  # an object that an argument refers to is lost, for instance
                    call.fail(bare(lost, None))
                self._settled(call)  # it is not open any more where the actor has left
                return True

            call.resend = resend
        first = parts
        try:
            if retries and moved:
                first = marshaller.duplicate(parts)
            if route is not None:
                try:
                    route[0].send_call(call, route[1], spec.code, flags, timeout_ns, payload, first)
                except ConnectionLost:
                    pass
                else:
                    return call
            self._queue((call, spec.code, flags, timeout_ns, payload, first))
        except BaseException as error:  # nothing was sent: the call does not count, and its deadline ends with it
            call.take_back()
            self.unfinished.discard(call)
            call.resend = None
            if not issubclass(type(error), ObjectLost):
                # A new error: the traceback of the one at hand leads to the arguments.
                process.loop.call_soon_threadsafe(call.fail, ConnectionLost(f"{call.label} could not be sent"))
                raise
            # The error is raised where the call is awaited, like the failure of any argument.
            process.loop.call_soon_threadsafe(call.fail, bare(error, None))
        return call

    def _set_timer(self, call: Call, timeout: float | None, deadline: float | None) -> int:
        """Arm the call's deadline: its own, or that of the call being executed if nearer. Returns the nanoseconds
        left."""
        loop = self.process.loop
        left = float("inf") if timeout is None else timeout
        if deadline is not None:
            left = min(left, max(deadline - loop.time(), 0.0))

        def expire() -> None:
            if not call.known:
                session = call.session
                if session is not None:
                    session.cancel(call)
                call.fail(DeadlineExceeded(f"{call.label} on {self.label} did not finish within its {left:.6g} s"))

        def arm() -> None:
            if not call.known:
                call.timer = loop.call_later(left, expire)

        if threading.get_ident() == self.process.thread:
            arm()
        else:
            loop.call_soon_threadsafe(arm)
        return _nanoseconds(left)

    # ---------------------------------------------------------------- connecting

    def _queue(self, unsent: _Unsent) -> None:
        with self._lock:
            route = self.route
            if route is None:
                self._unsent.append(unsent)
                if not self._opening:
                    self._opening = True
                    try:
                        self.connected.clear()
                        self.process.tasks.start(self._open())
                    except BaseException:  # of a signal's handler
                        self._opening = False
                        self.connected.set()
                        raise
                return
        try:
            self._send(*route, unsent)
        except ConnectionLost as error:
            call = unsent[0]
            call.fail(ActorUnavailable(self.label, str(error), call.sent_before))

    def _send(self, session: Session, index: int, unsent: _Unsent) -> None:
        """Send a call whose arguments were packed before its connection was known."""
        call, code, flags, timeout_ns, payload, parts = unsent
        packed = payload, parts, flags
        payload, parts, flags = self.process.marshaller.fit(packed, session.connection.eager_limit)
        session.send_call(call, index, code, flags, timeout_ns, payload, parts)

    async def _open(self) -> None:
        """Connect to the actor's current process, then send the calls that waited."""
        try:
            await self._reach()
        except (ZcactorError, OSError) as error:
            self._nowhere(error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # of a signal's handler, which has run in this task
            self._nowhere(error)
            raise

    def _nowhere(self, error: BaseException) -> None:
        """Fail the calls that wait: where the actor is now, only the head knows."""
        text = str(error)
        self._give_up(lambda maybe: ActorUnavailable(self.label, text, maybe))

    async def _reach(self) -> None:
        """Connect to the actor, and send the calls that waited or fail them.

        Raises:
            HeadUnavailable: the head is away.
            ConnectionLost: the head is lost, or decides no more, and this process ends with it.
        """
        loop = self.process.loop
        cause, begun, pause, attempt = "it could not be reached", loop.time(), _FIRST_PAUSE, 0
        while True:
            if self._left or buggify("locate"):
                state, self.location, why = await self.process.head.locate(self.actor_id)
                if state == "dead":
                    self.die(why)
                    return
                self._left = False
            attempt += 1
            place = self.location  # news may change it while this waits
            try:
                first = loop.time() + _LAST_TRY if self._unlocated else None
                async with asyncio.timeout_at(first if attempt == 1 else begun + REACH):
                    session = await self.process.connections.connect(place[0])
            except TimeoutError:
                break
            except (ConnectionLost, ProtocolError) as error:
                cause = str(error.args[0])
            else:
                if self._drain(session, place[1]):
                    return
            state, location, why = await self.process.head.locate(self.actor_id)
            if state == "dead":
                self.die(why)
                return
            if location != place:
                self.location = location
                begun, pause, attempt = loop.time(), _FIRST_PAUSE, 0
                continue
            if attempt >= _CONNECT_ATTEMPTS or loop.time() + pause >= begun + REACH:
                break
            await asyncio.sleep(pause)
            pause *= 2
        cause = await self._where_it_fails(cause)
        text = f"{cause}; tried {attempt} times"
        self._give_up(lambda maybe: ActorUnavailable(self.label, text, maybe))

    async def _where_it_fails(self, cause: str) -> str:
        """Complete `cause` by whether the head reaches the process that this one does not reach."""
        process = self.process
        ours = process.address
        if not ours:  # no other host is reached from here
            return cause
        try:
            silence, theirs = await process.head.silence_of(self.location[0])
        except ConnectionLost:
            return f"{cause}; the cluster's head is not reached either"
        if not 0 <= silence < _SIGN_OF_LIFE:
            return cause
        here, there = ours.rpartition("@")[2], theirs.rpartition("@")[2]  # as ``zcactor status`` shows them
        return (
            f"{cause}; the cluster's head reaches its node, heard from {silence:.1f} s ago, and this process at {here} "
            f"does not reach it at {there}: look at the network between the two"
        )

    def _drain(self, session: Session, index: int) -> bool:
        session = session.in_use
        if session.closed is not None:  # its end is reported to the stand-ins of before
            return False
        with self._lock:
            if self._returned:  # they were sent before those that wait
                self._unsent.extendleft(unsent for *_, unsent in sorted(self._returned, key=_place, reverse=True))
                self._returned = []
            while True:
                while self._unsent:
                    call = self._unsent[0][0]
                    if not call.done:
                        try:
                            self._send(session, index, self._unsent[0])
                        except ConnectionLost:
                            return False
                        except Exception as error:  # an argument refers to a lost object, say: later calls go on
                            call.fail(bare(error, None))
                    self._unsent.popleft()
                self.route = (session, index)
                if not self._unsent:
                    break
                self.route = None  # a finalizer has made a call between the two steps
            self._opening = self._unlocated = False
            self.connected.set()
            self.process.sessions.watch(session, self)
            return True

    def _catch_up(self, session: Session, index: int) -> None:
        """Hold calls back until the loop has read what has come by `session`."""
        with self._lock:
            if self.route is None or self.route[0] is not session:
                return
            self.route = None
            self._opening = True
            self.connected.clear()
        self.process.tasks.start(self._read_first(session, index))

    async def _read_first(self, session: Session, index: int) -> None:
        for _ in range(session.connection.turns_behind()):
            await asyncio.sleep(0)
        session.caught_up()
        if self.death is not None:
            return
        peer = session.peer_process
        new = None if session.closed is not None else self.process.sessions.used.get(peer)
        if new is None:
            await self._open()
        elif self._returned or self.location[0] != peer:
            self._left = True
            await self._leave_for_next(session)
        elif new is not session:
            await self._go_over(session, new, index)
        elif not self._drain(session, index):
            await self._open()

    async def change(self, old: Session, new: Session) -> None:
        """Use `new` instead of its twin `old`, once the peer has received everything that was sent by `old`."""
        with self._lock:
            if self.route is None or self.route[0] is not old:
                return
            index, self.route = self.route[1], None
            self._opening = True
            self.connected.clear()
        await self._go_over(old, new, index)

    async def _go_over(self, old: Session, new: Session, index: int) -> None:
        try:
            # Another thread may be about to send by `old`; it has sent by the time of the second answer.
            await self.process.requests.ask(old, Services.ping)
            await self.process.requests.ask(old, Services.ping)
        except ZcactorError:  # `old` is lost, and the calls that were open on it have failed
            await self._open()
            return
        if not self._drain(new, index):
            await self._open()

    async def received(self) -> None:
        """Return when the actor's process has received the calls that were made before, or is lost. A request for its
        end goes through the agent, and would overtake them."""
        await self.connected.wait()
        session = self.session
        if session is not None:  # the answer to a ping comes after them
            with contextlib.suppress(ZcactorError):
                await self.process.requests.ask(session, Services.ping)

    def leave(self, session: Session) -> None:
        """Stop using `session`, on which no call is open: the next call opens a connection."""
        with self._lock:
            if self.session is session:
                self.route = None

    def _give_up(self, error: Callable[[bool], ActorUnavailable | ActorDied]) -> None:
        """Fail the waiting calls with ``error(maybe_executed)``: an earlier attempt of a call may have run."""
        with self._lock:
            unsent, self._unsent = [*(unsent for *_, unsent in self._returned), *self._unsent], deque()
            self._returned = []
            self._opening = self._unlocated = False
            self.connected.set()
        for call, *_ in unsent:
            call.fail(error(call.sent_before))

    def die(self, cause: str) -> None:
        """Record that the actor is dead for good, and fail every call that waits for it."""
        self.death = cause
        self.route = None
        self._give_up(lambda maybe: ActorDied(self.label, cause, maybe))

    def given_up(self, calls: Sequence[Call], cause: str) -> None:
        """End `calls`, which are open at the silent process at `location`: their outcome stays unknown."""
        for call in calls:
            maybe = call.sent_before or call.state is not CallState.QUEUED
            error = (
                ActorUnavailable(self.label, cause, maybe)
                if self.death is None
                else ActorDied(self.label, self.death, maybe)
            )
            if call.resend is None or not call.resend(call, error):
                call.fail(error)

    def changed(self, state: str, location: tuple[bytes, int], cause: str) -> None:
        """Take the head's news: the actor's node was lost (``"dead"``, ``"restarting"``), or the actor has a new
        location."""
        old, self.location = self.location, location
        if state == "alive":
            self._left = False
            session = self.session
            if session is not None and old[0] == session.peer_process != location[0]:
                self._follow(session)
        else:
            self._left = True
            if state == "dead":
                self.die(cause)
            session = self.process.sessions.used.get(old[0])
            if session is not None:
                session.give_up(cause)

    # ---------------------------------------------------------------- following an actor that moves

    def moved(self, call: Call, code: int, flags: int, payload: bytes, parts: Sequence[Part]) -> None:
        """Take a call back that the actor's process has not run, as the actor moves: it is sent again where the actor
        lives then, in the order in which the calls were made.

        Args:
            call: the call.
            code: index of its method.
            flags, payload, parts: its arguments.
        """
        session, call.session = call.session, None
        if not call.done:
            call.state = CallState.QUEUED
            timeout_ns = 0 if call.timer is None else _nanoseconds(call.timer.when() - self.process.loop.time())
            with self._lock:
                unsent = (call, code, flags, timeout_ns, payload, parts)
                self._returned.append((session.number, call.id, unsent))
        self._follow(session)
        self._settled(call)

    def _follow(self, session: Session) -> None:
        """Hold calls back, and send them to the actor's next place once nothing is open at the present one, which
        `session` leads to."""
        with self._lock:
            if self._opening:  # then it is followed from the place that is being opened
                return
            self.route = None
            self._opening = True
            self.connected.clear()
            self._left = True
        self.process.tasks.start(self._leave_for_next(session))

    async def _leave_for_next(self, session: Session) -> None:
        ask = self.process.requests.ask
        # Another thread may be about to send by `session`; it has sent by the time of the second answer.
        with contextlib.suppress(ZcactorError):  # the session is lost, and the calls that were open on it have failed
            await ask(session, Services.ping)
            await ask(session, Services.ping)
        try:
            state, location, why = await self.process.head.locate(self.actor_id)
        except ZcactorError as error:
            self._nowhere(error)
            return
        if state == "dead":
            self.die(why)
            return
        if location[0] == session.peer_process:  # it takes calls again where it is
            with contextlib.suppress(ZcactorError):
                await ask(session, WorkerService.readmit, location[1])
        else:
            open_there = [call for call in list(self.unfinished) if call.session is session]
            self._following = dict.fromkeys(sorted(open_there, key=lambda call: call.id))
            if self._following:
                followed = self._followed = asyncio.Event()
                for call in list(self._following):
                    call.when_known(self._settled)
                await followed.wait()
        if self.death is None:
            self.location = location
            self._left = False
            await self._open()

    def _settled(self, call: Call) -> None:
        """Note that a call at the former place is answered or returned, or is made again."""
        self._following.pop(call, None)
        if not self._following and self._followed is not None:
            self._followed.set()

    async def lost(self, calls: Sequence[Call], cause: str) -> None:
        """Find out the actor's state after the connection to its process ended with `calls` open."""
        self.route = None
        location: tuple[bytes, int] | None
        try:
            state, location, why = await self.process.head.locate(self.actor_id, calls_wait=True)
        except HeadUnavailable as away:
            state, location, why = "restarting", None, f"{cause}; {away}"
            self._unlocated = True
        if state == "dead":
            self.die(why or cause)
            for call in calls:
                maybe = call.sent_before or call.state is not CallState.QUEUED
                call.fail(ActorDied(self.label, why or cause, maybe))
            return
        if location is not None:
            self.location = location
        for call in calls:
            maybe = call.sent_before or call.state is not CallState.QUEUED
            reason = why if state == "restarting" and why else cause
            error = ActorUnavailable(self.label, reason, maybe)
            if call.resend is None or not call.resend(call, error):
                call.fail(error)
        if not self._opening:  # nobody makes that attempt
            self._unlocated = False


def _give_back(moved: list[Any], closed: list[Any]) -> None:
    """Undo what packing did to the arguments of a call that was not sent."""
    restore(moved)
    reopen(closed)


def _place(returned: _Returned) -> tuple[int, int]:
    return returned[:2]
