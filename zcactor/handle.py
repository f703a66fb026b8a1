"""Handles: values that stand for an actor, wherever it runs."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from zcactor.buggify import buggify
from zcactor.context import call_deadline, current
from zcactor.errors import (
    ActorDied,
    ActorUnavailable,
    ConnectionLost,
    DeadlineExceeded,
    MailboxFull,
    ObjectLost,
    ProtocolError,
    ZcactorError,
)
from zcactor.future import FailedArgumentError, ObjectRef, ObjectStream, cancel_call
from zcactor.interface import Interface, MethodKind, MethodSpec, shown
from zcactor.marshal.move import restore
from zcactor.marshal.values import Code, decode_small, register
from zcactor.objectstore.ref import RegionKind
from zcactor.options import check_options
from zcactor.rpc.call import Call
from zcactor.rpc.parts import Part
from zcactor.rpc.protocol import CallState
from zcactor.rpc.stream import Stream

if TYPE_CHECKING:
    from zcactor.context import Runtime
    from zcactor.rpc.parts import Granting
    from zcactor.rpc.session import Session

__all__ = ["ActorHandle", "RemoteActor", "RemoteMethod", "RemoteStream"]

_encode = msgspec.msgpack.Encoder().encode
_Unsent = tuple[Call, int, int, int, bytes, Sequence[Part]]
_GENERATORS = (MethodKind.GENERATOR, MethodKind.ASYNC_GENERATOR)
_CONNECT_ATTEMPTS = 5
REACH = 6.0
"""Seconds for all attempts at one place: what one takes that nobody answers, and a little more. One that makes progress
may take longer."""
_FIRST_PAUSE = 0.1
"""Seconds between the first two attempts, doubled for each further one."""
_SIGN_OF_LIFE = 4.5
"""Seconds in which a node that lives has told the head so, several times."""
_new_ref, _new_call = ObjectRef.__new__, Call.__new__


class RemoteActor:
    """What one process knows of one actor: where it is, the connection to it, and calls that wait for one.

    All handles of the actor in this process share it; when the last is gone and no call is open, the lease on the actor
    goes back to the node agent, which stops an owned, unnamed actor that nobody holds.
    """

    def __init__(
        self, process: Runtime, actor_id: bytes, interface: Interface, location: tuple[bytes, int], name: str | None,
        namespace: str, max_pending: int, max_retries: int,
    ) -> None:  # fmt: skip
        self.process = process
        self.actor_id = actor_id
        self.interface = interface
        self.location = location
        """Process id and index of the actor in it."""
        self.name = name
        self.namespace = namespace
        self.max_pending = max_pending
        self.max_retries = max_retries
        self.label = f"{interface.class_name}({shown(name) if name else actor_id.hex()[:8]})"
        self.session: Session | None = None
        self.death: str | None = None
        """Why the actor is dead; None while it is not known to be."""
        self.hold: Any = None
        """Our lease on the actor at the node agent."""
        self.unfinished: set[Call] = set()
        """Calls sent or queued, and not finished."""
        self.closed = self.unfinished.discard
        self._lock = threading.Lock()
        self._unsent: deque[_Unsent] = deque()
        self._opening = False
        self._left = False
        """Whether it is known not to be at `location` any more."""
        self.connected = asyncio.Event()
        """Cleared while calls wait for a connection."""
        self.connected.set()

    # ---------------------------------------------------------------- calling

    def call(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout: float | None, retries: int
    ) -> Call:
        """Send a call, or queue it until there is a connection.

        Raises:
            MailboxFull: this process has `max_pending_calls` unfinished calls to the actor.
            OutOfMemory, TypeError, ...: an argument cannot be packed; nothing was sent.
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
        # What another connection may carry than the one that there is now must fit all of them.
        session = None if retries else self.session
        eager_limit = 0 if session is None else session.connection.eager_limit
        moved: list[Any] = []
        marshaller = process.marshaller
        try:
            payload, parts, flags = marshaller.pack_call(args, kwargs, eager_limit, moved)
        except FailedArgumentError as error:
            call.fail(error.failure)
            return call
        if moved:
            call.undo = partial(restore, moved)
        call.target = self
        if self.death is not None:
            call.fail(ActorDied(self.label, self.death, False))
            return call
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
                if left < 0 or isinstance(error, ActorDied):
                    return False
                call.state = CallState.QUEUED
                try:
                    again = marshaller.duplicate(parts) if moved and left else parts
                    self._queue((call, spec.code, flags, timeout_ns, payload, again))
                except Exception as lost:  # what an argument refers to is gone, say
                    call.fail(lost.with_traceback(None))
                return True

            call.resend = resend
        if session is None:
            session = self.session
        first = parts
        try:
            if retries and moved:
                first = marshaller.duplicate(parts)
            if session is not None:
                try:
                    session.send_call(call, self.location[1], spec.code, flags, timeout_ns, payload, first)
                except ConnectionLost:
                    pass
                else:
                    return call
            if eager_limit:
                payload, first, flags = marshaller.fit((payload, first, flags))
            self._queue((call, spec.code, flags, timeout_ns, payload, first))
        except BaseException as error:  # nothing was sent: it does not count, and its deadline ends with it
            call.take_back()
            self.unfinished.discard(call)
            call.resend = None
            if not isinstance(error, ObjectLost):
                # An error of its own: the one at hand leads, by its traceback, to the arguments.
                process.loop.call_soon_threadsafe(call.fail, ConnectionLost(f"{call.label} could not be sent"))
                raise
            # Whoever awaits the call is told, as of any argument's failure.
            process.loop.call_soon_threadsafe(call.fail, error.with_traceback(None))
        return call

    def _set_timer(self, call: Call, timeout: float | None, deadline: float | None) -> int:
        """Arm the call's deadline: its own, or that of the call we are in if nearer. Returns nanoseconds left."""
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
        return max(int(left * 1e9), 1)

    # ---------------------------------------------------------------- connecting

    def _queue(self, unsent: _Unsent) -> None:
        with self._lock:
            if self.session is None:
                self._unsent.append(unsent)
                if not self._opening:
                    self._opening = True
                    self.connected.clear()
                    self.process.tasks.start(self._open())
                return
            session = self.session
        call, code, flags, timeout_ns, payload, parts = unsent
        try:
            session.send_call(call, self.location[1], code, flags, timeout_ns, payload, parts)
        except ConnectionLost as error:
            call.fail(ActorUnavailable(self.label, str(error), call.sent_before))

    async def _open(self) -> None:
        """Connect to wherever the actor is now, then send what waited."""
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
            try:
                async with asyncio.timeout_at(None if attempt == 1 else begun + REACH):
                    session = await self.process.connections.connect(self.location[0])
            except TimeoutError:
                break
            except ConnectionLost as error:
                cause = str(error.args[0])
            else:
                if self._drain(session):
                    return
            state, location, why = await self.process.head.locate(self.actor_id)
            if state == "dead":
                self.die(why)
                return
            if location != self.location:
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
        """`cause`, and whether the head reaches what this process does not."""
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

    def _drain(self, session: Session) -> bool:
        if session.successor is not None and session.is_replaced:
            session = session.successor
        with self._lock:
            while self._unsent:
                call, code, flags, timeout_ns, payload, parts = self._unsent[0]
                if not call.done:
                    try:
                        session.send_call(call, self.location[1], code, flags, timeout_ns, payload, parts)
                    except ConnectionLost:
                        return False
                    except Exception as error:  # what an argument refers to is gone, say: those behind it go on
                        call.fail(error.with_traceback(None))
                self._unsent.popleft()
            self.session = session
            self._opening = False
            self.connected.set()
            self.process.sessions.watch(session, self)
            return True

    async def change(self, old: Session, new: Session) -> None:
        """Use `new` instead of its twin `old`, once the peer has taken in what was sent by that."""
        with self._lock:
            if self.session is not old:
                return
            self.session = None
            self._opening = True
            self.connected.clear()
        try:
            # Another thread may have been about to send by `old`, and has by the time of the second answer.
            await self.process.requests.ask(old, "ping")
            await self.process.requests.ask(old, "ping")
        except ZcactorError:  # `old` is lost, and what was open on it has failed
            await self._open()
            return
        if not self._drain(new):
            await self._open()

    def _give_up(self, error: Callable[[bool], ActorUnavailable | ActorDied]) -> None:
        """What waits fails with ``error(maybe_executed)``: an earlier attempt of it may have run."""
        with self._lock:
            unsent, self._unsent = self._unsent, deque()
            self._opening = False
            self.connected.set()
        for call, *_ in unsent:
            call.fail(error(call.sent_before))

    def die(self, cause: str) -> None:
        """The actor is dead for good: everything that waits for it fails."""
        self.death = cause
        self.session = None
        self._give_up(lambda maybe: ActorDied(self.label, cause, maybe))

    def given_up(self, calls: Sequence[Call], cause: str) -> None:
        """The process at `location` is silent, and `calls` are open there: they end, whatever became of them."""
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
        """The head tells that the actor's node was lost (``"dead"``, ``"restarting"``), or where it lives since."""
        old, self.location = self.location, location
        if state == "alive":
            self._left = False
        else:
            self._left = True
            if state == "dead":
                self.die(cause)
            session = self.process.sessions.used.get(old[0])
            if session is not None:
                session.give_up(cause)

    async def lost(self, calls: Sequence[Call], cause: str) -> None:
        """The connection to the actor's process ended with `calls` open: find out what became of the actor."""
        self.session = None
        state, location, why = await self.process.head.locate(self.actor_id, calls_wait=True)
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


class RemoteMethod:
    """A method of a handle. Calling it sends at once and gives an `ObjectRef`."""

    __slots__ = ("_actor", "_options", "_plain", "_retries", "_spec", "_timeout")

    def __init__(self, actor: RemoteActor, spec: MethodSpec, options: Mapping[str, Any] | None = None) -> None:
        self._actor = actor
        self._spec = spec
        options = self._options = dict(options or {})
        self._timeout: float | None = options.get("timeout", spec.timeout)
        retries = options.get("retries", spec.retries)
        idempotent = options.get("idempotent", spec.idempotent)
        if options.get("retries") and not idempotent:
            raise ValueError(
                f"{spec.label}.options: retries needs idempotent=True, because a retried call may run twice"
            )
        self._retries = (actor.max_retries if retries is None else retries) if idempotent else 0
        self._plain = self._timeout is None and not self._retries

    def __call__(self, *args: Any, **kwargs: Any) -> ObjectRef[Any]:
        spec = self._spec
        if kwargs or not spec.low <= len(args) <= spec.high:
            spec.check(args, kwargs)
        elif self._plain:
            # The short way, for plain arguments. `RemoteActor.call` does the same for all; nothing is called here that
            # can be written out, because after a context switch each Python function costs a multiple of its warm time.
            actor = self._actor
            session = actor.session
            if session is not None and session.wire is not None and call_deadline.get() is None:
                process = actor.process
                call = _new_call(Call)
                call.owner = process.process
                call.loop = process.loop
                call.thread = process.thread
                call.label = spec.label
                call.target = actor
                call.on_done = actor.closed
                call.refs = 1
                unfinished = actor.unfinished
                unfinished.add(call)
                try:
                    sent = len(unfinished) <= actor.max_pending and session.wire.call(
                        call, actor.location[1], spec.code, args
                    )
                except BaseException:  # it cannot be sent, and does not count
                    unfinished.discard(call)
                    raise
                if sent:
                    ref: ObjectRef[Any] = _new_ref(ObjectRef)
                    ref._call = call
                    ref._drivers = None
                    return ref
                unfinished.discard(call)
        call = self._actor.call(spec, args, kwargs, self._timeout, self._retries)
        ref = ObjectRef(call)
        call.retrieved = False
        return ref

    def options(self, **options: Any) -> RemoteMethod:
        """The same method with other `CallOptions`."""
        check_options("call", f"{self._spec.label}.options", options)
        return type(self)(self._actor, self._spec, {**self._options, **options})

    def __repr__(self) -> str:
        return f"<remote method {self._spec.label} of {self._actor.label}>"


class RemoteStream(RemoteMethod):
    """A generator method of a handle. Calling it starts the generator and gives an `ObjectStream`."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> ObjectStream[Any]:  # type: ignore[override]
        spec = self._spec
        spec.check(args, kwargs)
        call = self._actor.call(spec, args, kwargs, self._timeout, 0)
        call.stream = Stream(call, self._actor.process.marshaller.unpack, cancel_call)
        call.retrieved = False
        return ObjectStream(call.stream)


class ActorHandle:
    """Stands for one actor. A value: it compares, hashes, and stays valid when it is passed to other actors.

    Its attributes are the actor's public methods. Anything else is an ``AttributeError``, raised here at once.
    """

    _remote: RemoteActor

    def __init__(self, remote: RemoteActor) -> None:
        self.__dict__["_remote"] = remote

    def __getattr__(self, name: str) -> RemoteMethod:
        remote = self._remote
        spec = remote.interface.find(name)
        method = (RemoteStream if spec.kind in _GENERATORS else RemoteMethod)(remote, spec)
        self.__dict__[name] = method  # found without this function from now on
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{self._remote.label} is a handle: attributes of the actor cannot be set from outside, call a method"
        )

    def __dir__(self) -> list[str]:
        return sorted(self._remote.interface.by_name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ActorHandle):
            return self._remote.actor_id == other._remote.actor_id
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._remote.actor_id)

    def __repr__(self) -> str:
        return f"<handle of {self._remote.label}>"

    def __copy__(self) -> ActorHandle:
        return self

    def __deepcopy__(self, _: Any) -> ActorHandle:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "handles travel inside calls, puts and results; pickling one elsewhere would lose track of who holds it"
        )


class ActorHold:
    """This process's lease on an actor at its node agent; see `zcactor.rpc.parts.Holder`."""

    __slots__ = ("_release", "id", "owner")

    def __init__(self, owner: bytes, object_id: int, release: Any) -> None:
        self.owner = owner
        self.id = object_id
        self._release = release

    def grant(self, session: Granting) -> tuple[bytes, int, int]:
        """A lease for the session's peer."""
        if session.peer_process == self.owner:
            return self.owner, self.id, 0
        return self.owner, self.id, session.pin(self)

    def release(self) -> None:
        """Give the lease back."""
        if self._release is not None:
            release, self._release = self._release, None
            release(self.id)

    def __del__(self) -> None:
        self.release()


def lower_handle(packing: Any, handle: ActorHandle) -> bytes:
    """A handle as plain values, and a part for the lease."""
    remote = handle._remote
    index = packing.add(Part(RegionKind.ACTOR, remote.hold, 0, 0)) if remote.hold is not None else -1
    return describe(remote, index)


def describe(remote: RemoteActor, index: int) -> bytes:
    """The extension's bytes; `index` is the part with the lease, -1 for none."""
    return _encode(
        (
            index, remote.actor_id, remote.location[0], remote.location[1], remote.name, remote.namespace,
            remote.max_pending, remote.max_retries, remote.interface.wire(),
        )
    )  # fmt: skip


def lift_handle(unpacking: Any, data: memoryview) -> ActorHandle:
    """The handle that `lower_handle` wrote."""
    fields = decode_small(data)
    if type(fields) is not list or len(fields) != 9:
        raise ProtocolError("a handle is malformed")
    index, actor_id, process_id, actor_index, name, namespace, max_pending, max_retries, interface = fields
    process = current()
    hold = None
    if index >= 0:
        part = unpacking.part(index)
        if part.kind != RegionKind.ACTOR:
            raise ProtocolError(f"part {index} of a message is not a handle's lease")
        hold = part.holder
    remote = process.sessions.remotes.get(actor_id)
    if remote is None:
        remote = RemoteActor(
            process, actor_id, Interface.from_wire(interface), (process_id, actor_index), name, namespace, max_pending,
            max_retries,
        )  # fmt: skip
        remote.hold = hold
        process.sessions.remotes[actor_id] = remote
    elif remote.hold is None:
        remote.hold = hold
    return ActorHandle(remote)


register(ActorHandle, Code.ACTOR, lower_handle, lift_handle)
