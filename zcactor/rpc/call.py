"""A promise: the result of a call, of a put, or of another process's call, and those who wait for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from zcactor.rpc.messages import Status
from zcactor.rpc.protocol import CallState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.rpc.parts import Part

__all__ = ["Call"]


class Call:
    """One promise. Completed exactly once, on the loop's thread; awaited any number of times, from any loop.

    The result is kept as it came (payload and parts), so that it can be passed on to another process without being
    decoded here; `zcactor.future.ObjectRef` decodes it when it is awaited.

    Attributes are class-level defaults where they rarely change: a call is made per message.
    """

    state: CallState = CallState.QUEUED
    status: int = Status.OK
    payload: Any = b""
    """Packed result; None when `value` is a plain one, which can be packed again when that is needed."""
    parts: Sequence[Part] = ()
    flags: int = 0
    error: BaseException | None = None
    """What went wrong on the way (connection lost, deadline, cancelled); a method's own exception is a payload."""
    value: Any = None
    decoded = False
    retrieved = False
    """Whether somebody saw the outcome; a failure that nobody saw is logged once."""
    waiter: asyncio.Future[None] | None = None
    waiters: list[asyncio.Future[None]] | None = None
    callbacks: list[Callable[[Call], None]] | None = None
    refs = 0
    """Living `ObjectRef`s. An await does not count: it works on the call itself."""
    id = 0
    session: Any = None
    timer: asyncio.TimerHandle | None = None
    export_id = 0
    """Id under which other processes hold this promise; 0 when none does."""
    label = ""
    holder: Any = None
    """Our lease on another process's promise; None for our own."""
    resend: Callable[[Call, BaseException], bool] | None = None
    """Asked when the connection is lost: True when it takes the call over (a retry)."""
    sent_before = False
    """Whether it may have run by what is not known to have failed: an attempt that was lost, and made again."""
    fetch: Callable[[Call], None] | None = None
    """Starts getting the result when it is first needed: another process's promise, or bytes that nobody has read."""
    arrived = False
    """Whether the response is here and only its bytes are not: it can be passed on, and counts as known."""
    known_callbacks: list[Callable[[Call], None]] | None = None
    on_done: Callable[[Call], None] | None = None
    """The caller's accounting of unfinished calls."""
    undo: Callable[[], None] | None = None
    """Gives back what packing the call has taken; None once its frame is written."""

    actor_label = ""
    """How messages name the actor, once the call is done."""
    target: Any = None
    """The `zcactor.handle.RemoteActor` called; kept, so that dropping handles stops no actor with open calls."""
    stream: Any = None
    """The `zcactor.rpc.stream.Stream` that items go to, for a generator method."""
    unseen: ClassVar[Any] = staticmethod(lambda _: None)
    """Called when the call failed and nobody can ever await it."""

    def __init__(self, owner: bytes, loop: asyncio.AbstractEventLoop | None = None, thread: int = 0) -> None:
        self.owner = owner
        """Process id (16 bytes) of the process that keeps the result."""
        self.loop = loop
        """The loop on whose thread it is completed."""
        self.thread = thread

    @property
    def done(self) -> bool:
        """Whether the outcome is here."""
        return self.state is CallState.DONE

    @property
    def known(self) -> bool:
        """Whether the outcome is known: here, or for the bytes that still lie where they were made."""
        return self.arrived or self.state is CallState.DONE

    def arrive(
        self, status: int, payload: Any, parts: Sequence[Part], flags: int, read: Callable[[Call], None]
    ) -> None:
        """The response is here, but some of its bytes have to be read from their owner. That is left to whoever wants
        the value: a result that is only passed on never comes here.

        Args:
            status, payload, parts, flags: as in `complete`; parts hold leases.
            read: gets the bytes, then calls `complete`.
        """
        if self.state is CallState.DONE:
            return
        self.status, self.payload, self.parts, self.flags = status, payload, parts, flags
        self.arrived = True
        self.resend = None
        self._note_known()  # `target` stays: the actor must not end before its result is read or let go of
        self.fetch = read  # before the look at who waits: a thread may begin to meanwhile
        if self.waiter is not None or self.callbacks is not None:
            self._fetch_now()

    def _fetch_now(self) -> None:
        if self.fetch is not None:
            fetch, self.fetch = self.fetch, None
            fetch(self)

    def _note_known(self) -> None:
        """What is due once the outcome is known, the first time."""
        if self.on_done is not None:
            self.on_done(self)
            self.on_done = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.known_callbacks is not None:
            callbacks, self.known_callbacks = self.known_callbacks, None
            for callback in callbacks:
                callback(self)

    def complete(self, status: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """The response is here. Later completions are ignored: a call ends exactly once."""
        if self.state is CallState.DONE:
            return
        self.status = status
        self.payload = payload
        self.parts = parts
        self.flags = flags
        self._finish()

    def complete_plain(self, value: Any) -> None:
        """The response is here and is a plain value; called by the native part."""
        if self.state is _DONE:
            return
        self.value = value
        self.decoded = True
        self.payload = None
        waiter = self.waiter
        if (
            waiter is None
            or self.waiters is not None
            or self.callbacks is not None
            or self.known_callbacks is not None
            or self.timer is not None
        ):
            self._finish()
            return
        # `_finish` for the usual case: one task waits
        self.state = _DONE
        self.target = None
        self.resend = None
        if self.on_done is not None:
            self.on_done(self)
            self.on_done = None
        self.waiter = None
        if waiter.get_loop() is not self.loop:
            _wake(waiter)
        elif not waiter.done():
            waiter.set_result(None)

    def fail(self, error: BaseException) -> None:
        """The call ends with `error`. Ignored when it has ended."""
        if self.state is CallState.DONE:
            return
        if self.undo is not None:
            self.take_back()
        self.error = error
        self._finish()

    def take_back(self) -> None:
        """Give back what packing took, if the call was certainly not sent: it will not be, either. Idempotent."""
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
            self.unseen(self)
        if self.resend is not None or self.fetch is not None:
            self.resend = self.fetch = None
        if self.callbacks is not None:
            callbacks, self.callbacks = self.callbacks, None
            for callback in callbacks:
                callback(self)

    def _wake_all(self, waiter: asyncio.Future[None]) -> None:
        _wake(waiter)
        if self.waiters is not None:
            for other in self.waiters:
                _wake(other)
            self.waiters = None

    def add_waiter(self, future: asyncio.Future[None]) -> None:
        """`future` is set, on its own loop, when the call is done."""
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
        """`future` gave up waiting."""
        if self.waiter is future:
            self.waiter = self.waiters.pop() if self.waiters else None
        elif self.waiters is not None and future in self.waiters:
            self.waiters.remove(future)

    @property
    def awaited(self) -> bool:
        """Whether anybody waits for the outcome."""
        return self.waiter is not None

    def when_known(self, callback: Callable[[Call], None]) -> None:
        """Run ``callback(call)`` when the outcome is known, on the loop's thread; at once when it is. Unlike a waiter
        and `add_callback`, it does not ask for the bytes."""
        if self.known:
            callback(self)
        elif self.known_callbacks is None:
            self.known_callbacks = [callback]
        else:
            self.known_callbacks.append(callback)

    def add_callback(self, callback: Callable[[Call], None]) -> None:
        """Run ``callback(call)`` when done, on the loop's thread; at once when it is done already."""
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
