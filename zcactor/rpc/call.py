"""Promises: the result of a call, of a put, or of another process's call, with its waiters."""

from __future__ import annotations

import asyncio
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from zcactor.rpc.messages import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.rpc.parts import Part

__all__ = ["Call", "CallState"]


class CallState(IntEnum):
    """State of a call, as its caller sees it."""

    QUEUED = 0
    """The call waits for a credit; the peer does not know it."""
    SENT = 1
    CANCELLING = 2
    """CANCEL was sent; the response still comes and tells the outcome."""
    DONE = 3


class Call:
    """One promise. It is completed exactly once, on the loop's thread, and awaited any number of times, from any loop.

    The result is kept in the form in which it came (payload and parts), so that it can be passed on to another process
    without being decoded here; `zcactor.api.future.ObjectRef` decodes it when it is awaited.

    Attributes that rarely change are class-level defaults, because a call is made per message.
    """

    state: CallState = CallState.QUEUED
    status: int = Status.OK
    payload: Any = b""
    """Packed result; None when `value` is a plain value, which can be packed again when needed."""
    parts: Sequence[Part] = ()
    flags: int = 0
    error: BaseException | None = None
    """An error on the way (connection lost, deadline, cancelled); a method's own exception is a payload."""
    value: Any = None
    decoded = False
    handed_over: Sequence[Any] = ()
    """Arrays of the value that were handed over and lie in the payload, from which they may differ by now."""
    passed = False
    """Whether the result has travelled on: that is the value of the reference from then on."""
    retrieved = False
    """Whether the outcome was retrieved; a failure that nobody retrieved is logged once."""
    waiter: asyncio.Future[None] | None = None
    waiters: list[asyncio.Future[None]] | None = None
    blocked = 0
    """Number of threads that wait for it in `ObjectRef.result`."""
    callbacks: list[Callable[[Call], None]] | None = None
    refs = 0
    """Number of living `ObjectRef`s. An await does not count: it works on the call itself."""
    id = 0
    session: Any = None
    timer: asyncio.TimerHandle | None = None
    export_id = 0
    """Id under which other processes hold this promise; 0 while no process does."""
    label = ""
    holder: Any = None
    """This process's lease on another process's promise; None for an own promise."""
    resend: Callable[[Call, BaseException], bool] | None = None
    """Called when the connection is lost; the result is True when it takes the call over (a retry)."""
    sent_before = False
    """Whether the call may have run in an earlier attempt whose outcome is unknown."""
    fetch: Callable[[Call], None] | None = None
    """Starts to get the result when it is first needed: another process's promise, or bytes that have not been read."""
    arrived = False
    """Whether the response is here and only its bytes are missing: it can be passed on, and counts as known."""
    again: tuple[Sequence[Part], Callable[[Call], None]] | None = None
    """The parts as they arrived, and the function that reads their bytes, where this process had no room for these. The
    next await of a reference is one of `once_more`."""
    known_callbacks: list[Callable[[Call], None]] | None = None
    on_done: Callable[[Call], None] | None = None
    """Called once the outcome is known, for the caller's count of unfinished calls."""
    pushes: list[Any] | None = None
    """The outcomes that are owed to processes of other calls; see `zcactor.objects.pushes.Pushes`."""
    forwarded = 0
    """Number of FORWARD frames sent for this call since it was sent."""
    pushed = 0
    """Those of them that the maker has obeyed, as bits; known with the response."""
    undo: Callable[[], None] | None = None
    """The function that gives back the arrays which the call has moved; None once the call's frame is written."""

    actor_label = ""
    """Name of the actor in messages, once the call is done."""
    target: Any = None
    """The called `zcactor.api.remote_actor.RemoteActor`. It is kept so that dropping handles stops no actor with open
    calls."""
    stream: Any = None
    """The `zcactor.rpc.stream.Stream` that items go to, for a generator method."""
    unretrieved_errors: ClassVar[Any] = staticmethod(lambda _: None)
    """Called when the call has failed and nobody can await it any more."""

    def __init__(self, owner: bytes, loop: asyncio.AbstractEventLoop | None = None, thread: int = 0) -> None:
        self.owner = owner
        """Process id (16 bytes) of the process that keeps the result."""
        self.loop = loop
        """The loop on whose thread the call is completed."""
        self.thread = thread

    @property
    def done(self) -> bool:
        """Whether the outcome is here, bytes included."""
        return self.state is CallState.DONE

    @property
    def known(self) -> bool:
        """Whether the outcome is known: it is here, or only bytes are missing that still lie where they were made."""
        return self.arrived or self.state is CallState.DONE

    def arrive(
        self, status: int, payload: Any, parts: Sequence[Part], flags: int, read: Callable[[Call], None]
    ) -> None:
        """Take the response, some of whose bytes have to be read from their owner. They are read when the value is
        needed: a result that is only passed on is never read here.

        Args:
            status, payload, parts, flags: as in `complete`; parts hold leases.
            read: function that gets the bytes, then calls `complete`.
        """
        if self.state is CallState.DONE:
            return
        self.status, self.payload, self.parts, self.flags = status, payload, parts, flags
        self.arrived = True
        self.resend = None
        self._note_known()  # `target` stays: the actor must not end before its result is read or dropped
        self.fetch = read  # set before `waiter` is checked: a thread may begin to wait meanwhile
        if self.waiter is not None or self.callbacks is not None:
            self._fetch_now()

    def _fetch_now(self) -> None:
        if self.fetch is not None:
            fetch, self.fetch = self.fetch, None
            fetch(self)

    def once_more(self) -> Call:
        """A promise of the same result, whose bytes are read once more when its value is needed. For a call that is
        done and has `again`."""
        assert self.again is not None
        made = Call(self.owner, self.loop, self.thread)
        made.label, made.actor_label, made.passed = self.label, self.actor_label, self.passed
        made.session = self.session
        made.status, made.payload, made.flags = self.status, self.payload, self.flags
        made.parts, made.fetch = self.again
        made.arrived = made.retrieved = self.retrieved = True
        return made

    def _note_known(self) -> None:
        """Do the work that is due once the outcome is known, the first time."""
        if self.on_done is not None:
            self.on_done(self)
            self.on_done = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.known_callbacks is not None:
            callbacks, self.known_callbacks = self.known_callbacks, None
            self._run(callbacks)

    def complete(self, status: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """Take the response. Later completions are ignored: a call ends exactly once."""
        if self.state is CallState.DONE:
            return
        self.status = status
        self.payload = payload
        self.parts = parts
        self.flags = flags
        self._finish()

    def complete_plain(self, value: Any) -> None:
        """Take the response, which is a plain value. Called by the native part."""
        if self.state is _DONE:
            return
        self.value = value
        self.decoded = True
        self.payload = None
        waiter = self.waiter
        if (
            self.waiters is not None
            or self.callbacks is not None
            or self.timer is not None
            or (waiter is None and ((self.refs == 0 and not self.retrieved) or self.fetch is not None))
        ):
            self._finish()
            return
        # `_finish` for the usual cases of one waiting task, and of a result that is kept or was passed on
        self.state = _DONE
        self.target = None
        self.resend = None
        if self.on_done is not None:
            self.on_done(self)
            self.on_done = None
        if self.known_callbacks is not None:
            callbacks, self.known_callbacks = self.known_callbacks, None
            self._run(callbacks)
        waiter = self.waiter  # again: a thread may have begun to wait meanwhile
        if waiter is None:
            return
        self.waiter = None
        if waiter.get_loop() is not self.loop:
            _wake(waiter)
        elif not waiter.done():
            waiter.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the call with `error`, unless it has ended."""
        if self.state is CallState.DONE:
            return
        if self.undo is not None:
            self.take_back()
        self.error = error
        self._finish()

    def take_back(self) -> None:
        """Give back the arrays that packing moved, if the call certainly was not sent. It will not be sent later,
        either. Idempotent."""
        undo, self.undo = self.undo, None
        if undo is not None and self.state is CallState.QUEUED:
            undo()

    def _finish(self) -> None:
        self.state = _DONE
        if self.target is not None:
            if self.status != _OK or self.error is not None:  # the message will name the actor
                self.actor_label = self.target.label
            self.target = None
        self._note_known()
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if self.waiters is None and waiter.get_loop() is self.loop:
                if not waiter.done():
                    waiter.set_result(None)
            else:
                self._wake_all(waiter)
        elif self.refs == 0 and self.callbacks is None and not self.retrieved and self.stream is None:
            self.unretrieved_errors(self)
        if self.resend is not None or self.fetch is not None:
            self.resend = self.fetch = None
        if self.callbacks is not None:
            callbacks, self.callbacks = self.callbacks, None
            self._run(callbacks)

    def _run(self, callbacks: Sequence[Callable[[Call], None]]) -> None:
        """Run callbacks. The error of one goes to the loop, as that of any function that the loop calls."""
        for callback in callbacks:
            try:
                callback(self)
            except BaseException as error:  # of one: the others, and all waiters, have to learn of the outcome
                (self.loop or asyncio.get_running_loop()).call_soon(_raise, error)

    def _wake_all(self, waiter: asyncio.Future[None]) -> None:
        _wake(waiter)
        if self.waiters is not None:
            for other in self.waiters:
                _wake(other)
            self.waiters = None

    def add_waiter(self, future: asyncio.Future[None]) -> None:
        """Set `future`, on its own loop, when the call is done."""
        if self.state is _DONE:
            _wake(future)
            return
        if self.waiter is None:
            self.waiter = future
        elif self.waiters is None:
            self.waiters = [future]
        else:
            self.waiters.append(future)
        self._fetch_now()

    def remove_waiter(self, future: asyncio.Future[None]) -> None:
        """Forget `future`, which does not wait any more."""
        if self.waiter is future:
            self.waiter = self.waiters.pop() if self.waiters else None
        elif self.waiters is not None and future in self.waiters:
            self.waiters.remove(future)

    @property
    def awaited(self) -> bool:
        """Whether a future waits for the outcome."""
        return self.waiter is not None

    def when_known(self, callback: Callable[[Call], None]) -> None:
        """Run ``callback(call)`` on the loop's thread when the outcome is known, or at once when it is known already.
        Unlike a waiter and `add_callback`, it does not request missing bytes."""
        if self.known:
            callback(self)
        elif self.known_callbacks is None:
            self.known_callbacks = [callback]
        else:
            self.known_callbacks.append(callback)

    def add_callback(self, callback: Callable[[Call], None]) -> None:
        """Run ``callback(call)`` on the loop's thread when the call is done, or at once when it is done already."""
        if self.state is CallState.DONE:
            callback(self)
            return
        if self.callbacks is None:
            self.callbacks = [callback]
        else:
            self.callbacks.append(callback)
        self._fetch_now()


_DONE = CallState.DONE
_OK = int(Status.OK)


def _raise(error: BaseException) -> None:
    raise error


def _wake(future: asyncio.Future[None]) -> None:
    loop = future.get_loop()
    if loop is asyncio._get_running_loop():
        if not future.done():
            future.set_result(None)
    else:
        loop.call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
