"""A host: one actor in this process, from the call that arrives to the answer that leaves."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Protocol

from zcactor.context import Runtime, call_deadline, current_host
from zcactor.errors import ConnectionLost
from zcactor.future import Unresolved
from zcactor.interface import Interface, MethodKind, MethodSpec, method_options
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import Flags, Status
from zcactor.runtime.eager import start_eagerly
from zcactor.runtime.failure import Failure, pack_as_text
from zcactor.runtime.mailbox import Lane, Mailbox
from zcactor.runtime.producer import AsyncProducer, SyncProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zcactor.rpc.session import Session
    from zcactor.runtime.threads import Runner, Threads

__all__ = ["ActorHost", "current_call"]

logger = logging.getLogger("zcactor")
current_call: contextvars.ContextVar[Any] = contextvars.ContextVar("zcactor_current_call", default=None)
"""The `Incoming` that a task of a system actor serves."""

_FRAME_HEAD = 4096
"""Bytes of a frame beside its payload, at most: 128 releases of 16, and some 80 of fields."""
_NO_KWARGS: dict[str, Any] = {}
_KWARGS = int(Flags.KWARGS)
_OK = int(Status.OK)
_ASYNC = int(MethodKind.ASYNC)
_INLINE = int(MethodKind.INLINE)
_SYNC = int(MethodKind.SYNC)
_GENERATOR = int(MethodKind.GENERATOR)


class Home(Runtime, Protocol):
    """What a host needs of its process beside that."""

    crew: Runner | None
    threads: Threads
    last_system_index: int
    leaving: bool

    async def delivered(self) -> None:
        """Return once every peer has taken in what was sent to it."""


class ActorHost:
    """One actor: its instance, its mailboxes, and how each kind of method runs.

    Args:
        process: this process.
        index: the actor's number here, which CALL frames name.
        actor_class: its class.
        label: how messages name it.
        options: its options; see `zcactor.options.ActorDeclaration`.
        info: what `zc.current_actor` tells.
        interface: of `actor_class`, where it has been read off already.
    """

    def __init__(
        self, process: Home, index: int, actor_class: type, label: str, options: Mapping[str, Any], info: Any = None,
        interface: Interface | None = None,
    ) -> None:  # fmt: skip
        self.process = process
        self.index = index
        self.actor_class = actor_class
        self.label = label
        self.info = info
        self.interface = Interface.of(actor_class) if interface is None else interface
        self.instance: Any = None
        self.stopping = False
        """It takes no more calls."""
        self._closed = False
        self._methods: list[Callable[..., Any]] = []
        self._plain: Sequence[tuple[Callable[..., Any], int, Mailbox]] = ()
        """For `receive_plain`: the methods with their kinds and mailboxes; none when no call may start."""
        self._pack = process.marshaller.pack
        self._unpack = process.marshaller.unpack
        self._drained: asyncio.Future[None] | None = None
        self._loop = process.loop
        self._is_system = index <= process.last_system_index
        self._context = contextvars.copy_context()
        self._context.run(current_host.set, self)
        if not self._is_system:
            self._context.run(process.use_numpy)
        self._run_in_context = self._context.run
        limit: int | None = options.get("max_concurrency")
        groups: Mapping[str, int] = options.get("concurrency_groups") or {}
        self._threads = process.crew or (process.threads if options.get("process") == "shared" else None)
        self._mailboxes = {"": self._mailbox("", limit or 1, limit or process.config.max_concurrency_async)}
        for name, size in groups.items():
            self._mailboxes[name] = self._mailbox(name, size, size)
        self._by_code: list[Mailbox] = []
        self._specs = self.interface.methods
        for spec in self._specs:
            mailbox = self._mailboxes.get(spec.group)
            if mailbox is None:
                raise ValueError(
                    f"{spec.label} is in concurrency group {spec.group!r}, which its actor does not declare "
                    f"(declared: {', '.join(groups) or 'none'}); "
                    f"use @zc.actor(concurrency_groups={{{spec.group!r}: n}})"
                )
            self._by_code.append(mailbox)

    def _mailbox(self, name: str, sync_limit: int, async_limit: int) -> Mailbox:
        return Mailbox(
            f"{self.label}{'.' if name else ''}{name}",
            self.process.loop,
            sync_limit,
            async_limit,
            steps_out=self.interface.is_async,
            run_sync=self._run_sync,
            start_async=self._start_async,
            run_inline=self._run_inline,
            enter_thread=self._enter_thread,
            threads=self._threads,
        )

    def mailbox_of(self, code: int) -> Mailbox:
        """Where calls of the method with that number queue."""
        return self._by_code[code]

    # ---------------------------------------------------------------- life

    def adopt(self, instance: Any) -> None:
        """Use `instance`, made elsewhere."""
        self.instance = instance
        self._methods = [getattr(instance, spec.name) for spec in self._specs]
        self._plain = [
            (method, spec.kind, mailbox)
            for method, spec, mailbox in zip(self._methods, self._specs, self._by_code, strict=True)
        ]

    async def construct(self, make: Callable[[], Any]) -> None:
        """Run ``make()`` in the actor's thread, where its sync methods run too, then ``__aenter__`` if it has one.

        Raises whatever the constructor raises.
        """
        loop = self.process.loop
        made: asyncio.Future[Any] = loop.create_future()

        def work() -> None:
            try:
                instance = make()
            except BaseException as error:
                loop.call_soon_threadsafe(_settle, made, None, error)
            else:
                loop.call_soon_threadsafe(_settle, made, instance, None)

        self._mailboxes[""].post(work)
        outcome, error = await made
        if error is not None:
            raise error
        self.adopt(outcome)
        enter = getattr(outcome, "__aenter__", None)
        if enter is not None:
            await loop.create_task(enter(), context=self._context.copy())

    async def stop(self) -> None:
        """Run what is queued, refuse what comes later, then ``__aexit__`` or ``close()``, then end the threads."""
        await asyncio.sleep(0)  # calls that were sent before the request to stop are in the sockets: take them in
        await asyncio.sleep(0)
        self.stopping = True
        self._plain = ()
        if self.busy:
            self._drained = self.process.loop.create_future()
            await self._drained
        await self._leave()
        await self.process.delivered()
        self.close()

    async def _leave(self) -> None:
        leave = getattr(self.instance, "__aexit__", None)
        arguments: tuple[Any, ...] = (None, None, None)
        if leave is None:
            leave, arguments = getattr(self.instance, "close", None), ()
        if leave is None or not callable(leave):
            return
        try:
            if inspect.iscoroutinefunction(leave):
                await self.process.loop.create_task(leave(*arguments), context=self._context.copy())
            else:
                await self._in_thread(lambda: leave(*arguments))
        except Exception:  # a user's close() may raise anything; the actor ends all the same, and the log says why
            logger.exception("%s raised while it was being closed", self.label)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        loop = self.process.loop
        done: asyncio.Future[Any] = loop.create_future()

        def work() -> None:
            try:
                value = function()
            except BaseException as error:
                loop.call_soon_threadsafe(_settle, done, None, error)
            else:
                loop.call_soon_threadsafe(_settle, done, value, None)

        self._mailboxes[""].post(work)
        value, error = await done
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End at once: tasks are cancelled, queued calls are refused, a running sync method is left to finish."""
        self.stopping = self._closed = True
        self._plain = ()
        for session in list(self.process.sessions.all()):
            for incoming in list(session.incoming.values()):
                if incoming.host is self:
                    incoming.cancelled = True
                    if incoming.started:
                        self._answer_status(incoming, Status.KILLED)
                    else:
                        self._refuse(incoming)
                    if incoming.task is not None:
                        incoming.task.cancel()
        for mailbox in self._mailboxes.values():
            mailbox.close()
        self._methods = []
        self.instance = None

    def _enter_thread(self) -> None:
        current_host.set(self)
        if not self._is_system:
            self.process.use_numpy()

    # ---------------------------------------------------------------- taking calls

    def receive(self, incoming: Incoming) -> None:
        """A call has arrived. On the loop's thread."""
        incoming.host = self
        if self.stopping:
            self._refuse(incoming)
            return
        if incoming.code >= len(self._methods):
            self._fail(incoming, AttributeError(f"{self.label} has no method number {incoming.code}"))
            return
        if incoming.timeout_ns:
            incoming.deadline = self.process.loop.time() + incoming.timeout_ns * 1e-9
        if incoming.parts and not incoming.blockers:
            self._prepare(incoming)
        self._by_code[incoming.code].submit(incoming, self._specs[incoming.code])

    def receive_plain(self, session: Session, call_id: int, code: int, timeout_ns: int, args: list[Any]) -> None:
        """A call with plain arguments has arrived; called by the native part. The same as `receive`.

        A call that nothing holds up starts right here: this repeats `Mailbox.submit` and what it calls, because after a
        context switch each Python function on the way costs a multiple of its warm time.
        """
        plain, lane = self._plain, None
        if code < len(plain) and not timeout_ns:
            method, kind, mailbox = plain[code]
            lane = mailbox.lanes.get(session)
            if lane is not None and (
                lane.held
                or (kind != _SYNC and (lane.put != lane.started or mailbox.async_running >= mailbox.async_limit))
            ):
                lane = None
        if lane is not None and kind == _INLINE and not lane.async_unstarted:
            try:
                result = self._run_in_context(method, *args)
                args.clear()  # leases that the method did not keep go back with the answer
                answered = session.wire.answer(call_id, result)
            except BaseException as error:
                incoming = session.incoming[call_id] = Incoming(session, call_id, self.index, code, b"")
                self._fail(incoming, error)
                return
            if not answered:
                incoming = session.incoming[call_id] = Incoming(session, call_id, self.index, code, b"")
                self._answer_inline(incoming, result)
            return
        incoming = session.incoming[call_id] = Incoming(session, call_id, self.index, code, args)
        if lane is not None and kind == _SYNC and not lane.async_unstarted:
            incoming.host = self
            mailbox.hand_over(incoming, self._specs[code], lane)
            return
        if lane is not None and kind == _ASYNC:
            incoming.host = self
            mailbox.async_running += 1
            lane.async_unstarted += 1
            task = start_eagerly(self._run_async(incoming, lane, mailbox), self._loop, self._context.copy())
            if task is not None:
                incoming.task = task
            return
        incoming.timeout_ns = timeout_ns
        self.receive(incoming)

    def unblocked(self, incoming: Incoming) -> None:
        """The last lease or promise among the arguments is here."""
        if incoming.host is not self or self._closed:
            return
        if not isinstance(incoming.payload, _Prepared):
            self._prepare(incoming)
            if incoming.blockers:
                return
        self._by_code[incoming.code].unblocked(incoming, self._specs[incoming.code])

    def _prepare(self, incoming: Incoming) -> None:
        """Start getting promises among the top-level arguments; the call starts when they are here."""
        if not any(part.kind == RegionKind.REF for part in incoming.parts):
            return
        try:
            arguments = self._unpack(incoming.payload, incoming.parts, incoming.flags)
        except Exception as error:
            incoming.payload = _Prepared(error)
            return
        incoming.payload = _Prepared(arguments)
        values = arguments[:-1] + list(arguments[-1].values()) if incoming.flags & _KWARGS else arguments

        def arrived(_: Any) -> None:
            incoming.blockers -= 1
            if incoming.blockers == 0:
                self.process.loop.call_soon(self.unblocked, incoming)

        waiting = [value.call for value in values if isinstance(value, Unresolved)]
        incoming.blockers += len(waiting)
        for call in waiting:
            call.add_callback(arrived)

    def _arguments(self, incoming: Incoming) -> tuple[list[Any], dict[str, Any]]:
        payload = incoming.payload
        if type(payload) is list:
            return payload, _NO_KWARGS
        prepared = type(payload) is _Prepared
        values = payload.take() if prepared else self._unpack(payload, incoming.parts, incoming.flags)
        incoming.payload = b""
        incoming.parts = ()
        if incoming.flags & _KWARGS:
            return values[:-1], values[-1]
        return values, _NO_KWARGS

    # ---------------------------------------------------------------- running

    def _run_sync(self, incoming: Incoming, spec: MethodSpec, more: bool) -> None:
        """Run a sync method; in the actor's thread."""
        incoming.started = True
        if incoming.cancelled:
            self._answer_status(incoming, Status.CANCELLED)
            return
        if spec.kind == _GENERATOR:
            self._start_generator(incoming, spec)
            return
        session = incoming.session
        held = session.hold_releases()
        try:
            if incoming.deadline:
                call_deadline.set(incoming.deadline)
            try:
                payload = incoming.payload
                if type(payload) is list:  # as `_arguments` has it, one call less
                    incoming.payload = b""
                    result = self._methods[incoming.code](*payload)
                    payload = None  # leases that the method did not keep go back with the answer
                else:
                    payload = None
                    args, kwargs = self._arguments(incoming)
                    result = self._methods[incoming.code](*args, **kwargs)
                    incoming.payload = b""
                    del args, kwargs
            finally:
                if incoming.deadline:
                    call_deadline.set(None)
            if type(result) is CoroutineType:  # a plain function that returns a coroutine, a decorated async one
                self.process.loop.call_soon_threadsafe(self._adopt_coroutine, incoming, result)
                return
            wire = session.wire
            if wire is None or not wire.respond(incoming.id, result, more):
                self._answer_value(incoming, result, more=more)
            elif self.stopping:  # after the answer: the loop may have set it meanwhile
                self._one_closed()
            del result
        except BaseException as error:
            self._fail(incoming, error, more=more)
        finally:
            if held:
                session.unhold_releases()

    def _run_inline(self, incoming: Incoming, spec: MethodSpec) -> None:
        incoming.started = True
        try:
            args, kwargs = self._arguments(incoming)
            result = self._run_in_context(self._methods[incoming.code], *args, **kwargs)
            incoming.payload = b""
            del args, kwargs
        except BaseException as error:
            self._fail(incoming, error)
        else:
            self._answer_inline(incoming, result)

    def _answer_inline(self, incoming: Incoming, result: Any) -> None:
        try:
            self._answer_value(incoming, result)
        except BaseException as error:
            self._fail(incoming, error)

    def _start_async(self, incoming: Incoming, spec: MethodSpec, lane: Lane) -> None:
        run = self._run_async if spec.kind == _ASYNC else self._run_stream
        mailbox = self._by_code[spec.code]
        task = start_eagerly(run(incoming, lane, mailbox), self._loop, self._context.copy())
        if task is not None:
            incoming.task = task

    def _enter(self, incoming: Incoming) -> None:
        """What some calls need before they run, inside their task."""
        if incoming.cancelled:
            raise asyncio.CancelledError
        if incoming.deadline:
            call_deadline.set(incoming.deadline)
        if self._is_system:
            current_call.set(incoming)

    async def _run_async(self, incoming: Incoming, lane: Lane, mailbox: Mailbox) -> None:
        lane.async_unstarted -= 1
        if lane.held:
            mailbox.pump(lane)
        try:
            if self._is_system or incoming.deadline or incoming.cancelled:
                self._enter(incoming)
            incoming.started = True
            payload = incoming.payload
            if type(payload) is list:
                incoming.payload = b""
                result = await self._methods[incoming.code](*payload)
                payload = None
            else:
                payload = None
                args, kwargs = self._arguments(incoming)
                result = await self._methods[incoming.code](*args, **kwargs)
                del args, kwargs
            wire = incoming.session.wire
            if wire is None or self.stopping or not wire.respond(incoming.id, result, False):
                self._answer_value(incoming, result)
            del result
        except asyncio.CancelledError as error:
            if incoming.cancelled:
                self._answer_status(incoming, Status.CANCELLED)
            else:
                self._fail(incoming, error)
        except BaseException as error:
            self._fail(incoming, error)
        mailbox.async_running -= 1
        if mailbox.async_running + 1 == mailbox.async_limit:
            mailbox.pump_all()

    def _adopt_coroutine(self, incoming: Incoming, coroutine: Any) -> None:
        async def finish() -> None:
            try:
                self._answer_value(incoming, await coroutine)
            except BaseException as error:
                self._fail(incoming, error)

        incoming.task = self.process.loop.create_task(finish(), context=self._context.copy())

    # ---------------------------------------------------------------- streams

    async def _run_stream(self, incoming: Incoming, lane: Lane, mailbox: Mailbox) -> None:
        mailbox.task_began(lane)
        try:
            incoming.started = True
            if incoming.cancelled:
                raise asyncio.CancelledError
            if incoming.deadline:
                call_deadline.set(incoming.deadline)
            args, kwargs = self._arguments(incoming)
            generator = self._methods[incoming.code](*args, **kwargs)
            del args, kwargs
            producer = AsyncProducer(incoming, self._pack)
            incoming.stream = producer
            await producer.run(generator)
        except asyncio.CancelledError as error:
            if incoming.cancelled:
                self._answer_status(incoming, Status.CANCELLED)
            else:
                self._fail(incoming, error)
        except BaseException as error:
            self._fail(incoming, error)
        else:
            self._answer_status(incoming, Status.STREAM_END)
        finally:
            mailbox.task_ended()

    def _start_generator(self, incoming: Incoming, spec: MethodSpec) -> None:
        try:
            args, kwargs = self._arguments(incoming)
            generator = self._methods[incoming.code](*args, **kwargs)
        except BaseException as error:
            self._fail(incoming, error)
            return
        incoming.stream = SyncProducer(
            incoming,
            generator,
            self._pack,
            self._by_code[incoming.code].post,
            ended=lambda status: self._answer_status(incoming, status),
            failed=lambda error: self._fail(incoming, error),
        )
        incoming.stream.step()

    # ---------------------------------------------------------------- answering

    def _answer_value(self, incoming: Incoming, value: Any, *, more: bool = False) -> None:
        """Answer with a result. Raises what packing it raises, and then nothing was sent."""
        session = incoming.session
        if session.wire is None or not session.wire.respond(incoming.id, value, more):
            payload, parts, flags = self._pack(value, incoming.session.connection.eager_limit)
            del value
            session.respond(incoming, _OK, payload, parts, flags, more=more)
        if self.stopping:
            self._one_closed()

    def _refuse(self, incoming: Incoming) -> None:
        """A call that will not start. Where the whole process ends, the end of the connection answers it: the caller
        then asks the node agent, which knows whether the actor starts again elsewhere."""
        if self.process.leaving:
            incoming.host = None  # nothing waits for it to end
        else:
            self._answer_status(incoming, Status.STOPPED)

    def _answer_status(self, incoming: Incoming, status: int) -> None:
        try:
            incoming.session.respond(incoming, status, b"", (), 0)
        except BaseException as error:  # memory is short, say
            self._fail(incoming, error)
            return
        if self.stopping:
            self._one_closed()

    def _fail(self, incoming: Incoming, error: BaseException, *, more: bool = False) -> None:
        """Answer with an exception, whatever stands in the way. The traceback's frames are cleared, or they would keep
        arguments alive."""
        session = incoming.session
        failure = Failure(error, getattr(error, "__zcactor_label__", self.label))
        try:
            payload, parts, flags = self._pack(failure)
            session.respond(incoming, Status.ERROR, payload, parts, flags, more=more)
        except BaseException as unsendable:  # the store is full, or what the exception refers to is lost
            self._fail_as_text(incoming, failure, unsendable)
        error.__traceback__ = None
        if self.stopping:
            self._one_closed()

    def _fail_as_text(self, incoming: Incoming, failure: Failure, unsendable: BaseException) -> None:
        session = incoming.session
        try:
            payload = pack_as_text(failure, unsendable, session.connection.max_frame - _FRAME_HEAD)
            session.respond(incoming, Status.ERROR, payload, (), 0)
        except BaseException as error:  # not even that: the end of the connection tells the caller
            logger.exception("%s: a call could not be answered", self.label)
            session.fail(ConnectionLost(f"a call of {self.label} could not be answered: {error!r}", True))

    def _one_closed(self) -> None:
        """A call has ended while the actor stops. From any thread."""
        if threading.get_ident() != self.process.thread:
            self.process.loop.call_soon_threadsafe(self._one_closed)
        elif self._drained is not None and not self._drained.done() and not self.busy:
            self._drained.set_result(None)

    @property
    def busy(self) -> bool:
        """Whether a call is open here."""
        return any(
            incoming.host is self
            for session in self.process.sessions.all()
            for incoming in list(session.incoming.values())
        )

    def cancel(self, incoming: Incoming) -> None:
        """The caller cancelled, or is gone. On the loop's thread."""
        if incoming.stream is not None:
            incoming.stream.close()
        if incoming.task is not None:
            incoming.task.cancel()
        elif not incoming.started and (self._by_code[incoming.code].drop_held(incoming) or incoming.blockers):
            self._answer_status(incoming, Status.CANCELLED)

    def session_closed(self, session: Any) -> None:
        """A caller's connection is gone."""
        for mailbox in self._mailboxes.values():
            mailbox.forget(session)

    @property
    def options(self) -> Mapping[str, Any]:
        """For introspection: the method options of the class."""
        return {
            spec.name: method_options(getattr(self.actor_class, spec.name, None)) for spec in self.interface.methods
        }


class _Prepared:
    """Arguments unpacked ahead of the call, with promises among them; or why they could not be."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def take(self) -> list[Any]:
        if isinstance(self._value, BaseException):
            raise self._value
        values = self._value
        if values and type(values[-1]) is dict:
            values[-1] = {key: _resolved(value) for key, value in values[-1].items()}
        return [_resolved(value) for value in values]


def _resolved(value: Any) -> Any:
    return value.value() if type(value) is Unresolved else value


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if not future.done():
        future.set_result((value, error))
