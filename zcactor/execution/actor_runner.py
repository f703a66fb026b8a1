"""The runner of one actor in this process, from the call that arrives to the answer that leaves."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from contextlib import suppress
from types import CoroutineType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from zcactor.api.future import ObjectRef
from zcactor.api.operation import Background
from zcactor.api.passing import Awaited, FailedArgumentError, Unresolved
from zcactor.errors import ProtocolError
from zcactor.exception_pickling import text_of, type_name
from zcactor.execution.answers import Answers
from zcactor.execution.arguments import Arguments
from zcactor.execution.closing import TAKEN_IN, close_instance
from zcactor.execution.eager_task import start_eagerly
from zcactor.execution.failure import log_failure, passable
from zcactor.execution.generators import AsyncProducer, SyncProducer
from zcactor.execution.mailbox import Mailbox
from zcactor.execution.open_tasks import OpenTasks
from zcactor.interface import Interface, MethodKind, MethodSpec
from zcactor.process.context import call_deadline, current_host
from zcactor.rpc.incoming import NO_ANSWER, Incoming
from zcactor.rpc.leasing import collecting
from zcactor.rpc.messages import Status
from zcactor.rpc.services import FIRST_SILENT, SYSTEM_INDEX, current_call
from zcactor.rpc.session import Session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

    from zcactor.execution.home import Home
    from zcactor.marshal import Marshaller
    from zcactor.native import hot
    from zcactor.options import ActorSpec
    from zcactor.rpc.parts import Part

__all__ = ["ActorRunner", "send_back"]

_GLANCE = 0.01
"""Seconds between two looks whether calls that go back have gone."""


def send_back(incoming: Incoming, marshaller: Marshaller, answers: Answers) -> bool:
    """Send a call back to its caller, at once or when the references among its arguments have come.

    Args:
        incoming: the call, which has not started.
        marshaller: packs arguments that have been unpacked already.
        answers: of the actor; they answer where an argument cannot be sent back.

    Returns:
        False for a call of a graph, whose caller is no process.
    """
    session = incoming.session
    if not isinstance(session, Session):
        return False
    if incoming.cancelled:
        answers.status(incoming, Status.CANCELLED)
    elif incoming.blockers:
        incoming.returning = True
    else:
        try:
            payload, parts, flags = _packed(incoming, marshaller)
            session.respond(incoming, Status.MOVED, payload, parts, flags, pushed=incoming.code)
        except FailedArgumentError as error:
            answers.failure(incoming, error.failure)
        except BaseException as error:  # the store is full, or an object among the arguments is lost
            answers.failure(incoming, error)
    return True


def _packed(incoming: Incoming, marshaller: Marshaller) -> tuple[Any, Sequence[Part], int]:
    """The arguments of a call as they came, or packed again where they came as plain values."""
    if type(incoming.payload) is not list:
        return incoming.payload, incoming.parts, incoming.flags
    arguments = [ObjectRef(value.call) if type(value) is Unresolved else value for value in incoming.payload]
    return marshaller.pack_call(tuple(arguments), {}, incoming.session.connection.eager_limit)


_NOWHERE: Any = SimpleNamespace(lanes={})
"""The mailbox of such methods: without lanes, so that each call of one comes to `ActorRunner.receive`."""
_DROPPED: Final = 1.0
"""Seconds, at most, that the end of an actor waits for its instance, which is dropped."""
_ASYNC = int(MethodKind.ASYNC)
_INLINE = int(MethodKind.INLINE)
_GENERATOR = int(MethodKind.GENERATOR)


async def _within(seconds: float, step: Coroutine[Any, Any, None]) -> None:
    """Wait for a step of an end, which goes on without it after that time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await step


class ActorRunner:
    """One actor: its instance, its mailboxes, and how each kind of method runs.

    Args:
        process: this process.
        index: the actor's number in this process, which CALL frames carry.
        actor_class: its class.
        label: the actor's name in messages.
        spec: its options.
        info: the result of `zc.current_actor` in its methods.
        interface: the interface by which callers know the actor, see `Interface.seen_as`; that of `actor_class` where
            it is None.
    """

    moving = False
    """Whether further calls go back to their callers, who send them again to the actor's next place."""

    def __init__(
        self, process: Home, index: int, actor_class: type, label: str, spec: ActorSpec, info: Any = None,
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
        """Whether the actor refuses further calls."""
        self._away: dict[Any, None] = {}
        self._closed = False
        self._names: list[str] = []
        """The names of the methods, by their numbers; empty for one that is refused. Each call takes the method that
        the instance has under the name now: it may have been replaced since the instance was made."""
        self._plain: Sequence[tuple[str, int, Mailbox]] = ()
        """For `receive_plain`: names of the methods, with their kinds and mailboxes; empty when no call may start."""
        self._when_open: Sequence[tuple[str, int, Mailbox]] = ()
        self._pack = process.marshaller.pack
        self._push_plain = process.pushes.plain
        note = process.broken.note
        self._answers = Answers(label, process.marshaller, process.pushes.value, self._answered, note)
        self._arguments = Arguments(process.marshaller, self.unblocked)
        self._drained: asyncio.Future[None] | None = None
        self._loop = process.loop
        self._is_system = index == SYSTEM_INDEX
        shared = spec.process == "shared"
        self.open_tasks = None if self._is_system else OpenTasks(self._loop, label, shared=shared)
        self._context = contextvars.copy_context()
        self._context.run(current_host.set, self)
        if not self._is_system:
            self._context.run(process.use_numpy)
        self._run_in_context = self._context.run
        limit, groups = spec.max_concurrency, spec.concurrency_groups
        self._threads = process.crew or (process.threads if shared else None)
        self._mailboxes = {"": self._mailbox("", limit or 1, limit or process.config.max_concurrency_async)}
        for name, size in groups.items():
            self._mailboxes[name] = self._mailbox(name, size, size)
        self._specs = self.interface.methods
        for method in self._specs:
            if method.group not in self._mailboxes:
                raise ValueError(
                    f"{method.label} is in concurrency group {method.group!r}, which its actor does not declare "
                    f"(declared: {', '.join(groups) or 'none'}); "
                    f"use @zc.actor(concurrency_groups={{{method.group!r}: n}})"
                )
        self._by_code = [self._mailboxes[method.group] for method in self._specs]

    def _mailbox(self, name: str, sync_limit: int, async_limit: int) -> Mailbox:
        return Mailbox(
            f"{self.label}{'.' if name else ''}{name}", self.process.loop, sync_limit, async_limit,
            steps_out=self.interface.is_async, run_sync=self._run_sync, start_async=self._start_async,
            run_inline=self._run_inline, enter_thread=self._enter_thread, lost=self._thread_lost,
            threads=self._threads,
        )  # fmt: skip

    def mailbox_of(self, code: int) -> Mailbox:
        """The mailbox in which calls of method number `code` queue."""
        return self._by_code[code]

    # ---------------------------------------------------------------- life

    def adopt(self, instance: Any) -> None:
        """Use `instance`, which was made elsewhere. The services of a process are adopted again with each method that
        `zcactor.rpc.services.Services` adds to their interface."""
        self.instance = instance
        self._by_code = [self._mailboxes[spec.group] for spec in self._specs]
        refusals = self.interface.refusals
        self._names = ["" if spec.code in refusals else spec.name for spec in self._specs]
        self._plain = self._when_open = [
            (name, spec.kind, mailbox if name else _NOWHERE)
            for name, spec, mailbox in zip(self._names, self._specs, self._by_code, strict=True)
        ]

    async def construct(self, make: Callable[[], Any]) -> None:
        """Run ``make()`` in the actor's thread, where its sync methods run too, then ``__aenter__`` if the actor has
        one. Raises the exceptions of the constructor."""
        instance = await self._mailboxes[""].run(make)
        self.adopt(instance)
        if hasattr(type(instance), "__aenter__"):  # as ``async with`` asks: not an instance that answers for any name
            await self._outcome(instance.__aenter__())

    async def _outcome(self, awaitable: Awaitable[Any]) -> Any:
        """Await what a method of the instance has returned, in a task. Returns its result, or raises its exception:
        also one that would end the loop, out of a task."""

        async def settled() -> tuple[Any, BaseException | None]:
            try:
                return await awaitable, None
            except BaseException as error:
                return None, error

        value, error = await self._begin(settled())
        if error is not None:
            raise passable(error, self.label)
        return value

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.process.loop.create_task(coroutine, context=self._context.copy())

    async def stop(self, seconds: float) -> None:
        """Run the queued calls, refuse later ones, run ``__aexit__`` or ``close()``, and end the threads.

        Args:
            seconds: time of each step behind ``close()``: peers receive the last answers, tasks of the actor are
                cancelled, and the instance is dropped.
        """
        await self._refrain(None)
        await self._end(seconds)

    async def _refrain(self, patience: float | None) -> bool:
        """Run the queued calls and refuse later ones. Returns whether they have ended within `patience` seconds."""
        await asyncio.sleep(0)  # take in the calls sent before the request to stop, which are in the sockets
        await asyncio.sleep(0)
        self.stopping = True
        self._plain = ()
        if not self.busy:
            return True
        self._drained = self.process.loop.create_future()
        if patience is None:
            await self._drained
        else:
            await asyncio.wait([self._drained], timeout=patience)
        return self._drained.done()

    async def _end(self, seconds: float = TAKEN_IN) -> None:
        await close_instance(self.instance, self.label, self._mailboxes[""].run, self._outcome)
        await self._step(seconds, self.process.requests.delivered(self.process.sessions))
        if self.open_tasks is not None:  # behind the answers, whose promises a task may have to keep
            await self.open_tasks.end(seconds, self._begin)
        if kept := self._let_go():
            await self._step(min(seconds, _DROPPED), self._mailboxes[""].run(kept.clear))
        self.close()

    async def _step(self, seconds: float, step: Coroutine[Any, Any, None]) -> None:
        """Take a step of an end, which goes on after that time, and after any exception of the step."""
        await asyncio.wait([self._loop.create_task(_within(seconds, step))])

    def _let_go(self) -> list[Any]:
        """Refer to the instance no more. Returns what has, for the actor's thread to clear: a ``__del__``, or a file
        that is closed, may take for ever. It is empty where the instance may have connections and other objects of the
        loop, which no other thread may drop: a handle of libuv that is closed beside its loop corrupts the memory of
        all actors in the process. A slow ``__del__`` that blocks the loop is the lesser evil. Nothing bounds that."""
        kept = [self.instance]
        if self.instance is None or self.interface.is_async or hasattr(type(self.instance), "__aenter__"):
            kept.clear()
        self.instance, self._names, self._plain, self._when_open = None, [], (), ()
        return kept

    def close(self) -> None:
        """End at once: cancel tasks, refuse queued calls, and leave a running sync method to finish."""
        self.stopping = self._closed = True
        self._plain = ()
        for session in list(self.process.sessions.all()):
            for incoming in list(session.incoming.values()):
                if incoming.host is self and not incoming.returning:
                    incoming.cancelled = True
                    if incoming.started:
                        self._answers.status(incoming, Status.KILLED)
                    else:
                        self._refuse(incoming)
                    if incoming.task is not None:
                        incoming.task.cancel()
        if self.open_tasks is not None:
            self.open_tasks.cancel()
        if kept := self._let_go():
            self._mailboxes[""].post(kept.clear)
        for mailbox in self._mailboxes.values():
            mailbox.close()

    def _enter_thread(self) -> None:
        current_host.set(self)
        if not self._is_system:
            self.process.use_numpy()

    def _thread_lost(self, error: BaseException) -> None:
        """End the actor, one of whose threads has ended by an exception: its call would never be answered."""
        try:
            self._loop.call_soon_threadsafe(self._give_up, f"a thread of {self.label} ended", error)
        except RuntimeError:  # the loop is closed, and the process ends
            return

    def _give_up(self, what: str, error: BaseException) -> None:
        if self._closed or self.process.leaving:
            return
        log_failure(what, error)
        give_up = self.process.broken.give_up
        if give_up is None:
            self.close()
        else:
            give_up(f"{what} by {type_name(type(error))}: {text_of(error)}")

    # ---------------------------------------------------------------- taking calls

    def receive(self, incoming: Incoming) -> None:
        """Take a call that has arrived. On the loop's thread."""
        incoming.host = self
        if self.stopping or incoming.session in self._away:
            self._refuse(incoming)
            if not incoming.returning:
                incoming.host = None  # arguments that come later start nothing
            return
        code = incoming.code
        if code >= len(self._names) or not self._names[code]:
            if self._is_system and code >= FIRST_SILENT:  # of a newer version: its sender expects no answer
                incoming.session.incoming.pop(incoming.id, None)
                return
            unknown: Exception = AttributeError(f"{self.label} has no method number {code}")
            if self._is_system:
                unknown = ProtocolError(
                    f"pid {self.process.place.pid} answers no service method {code}: it has another role than its peer "
                    "takes it for, or another version of zcactor"
                )
            self._answers.failure(incoming, self.interface.refusals.get(code, unknown))
            incoming.host = None
            return
        if incoming.timeout_ns:
            incoming.deadline = self.process.loop.time() + incoming.timeout_ns * 1e-9
        if incoming.parts and not incoming.blockers:
            self._arguments.prepare(incoming)
        self._by_code[code].submit(incoming, self._specs[code])

    def receive_plain(self, session: Session, call_id: int, code: int, timeout_ns: int, args: list[Any]) -> None:
        """Take a call with plain arguments that has arrived, as `receive` does. The native part calls this.

        A call that may start at once starts right here, and an inline one without an `Incoming`: after a context switch
        each Python function on the way costs a multiple of its warm time.
        """
        plain = self._plain
        if code < len(plain) and not timeout_ns:
            name, kind, mailbox = plain[code]
            lane = mailbox.lanes.get(session)
            if lane is not None and lane.admit(kind):
                if kind == _INLINE:
                    try:
                        result = self._run_in_context(getattr(self.instance, name), *args)
                        args.clear()  # leases that the method did not keep go back with the answer
                        answered = result is NO_ANSWER or session.wire.answer(call_id, result)
                    except BaseException as error:
                        incoming = session.incoming[call_id] = Incoming(session, call_id, self.index, code, b"")
                        self._inline_failed(incoming, error)
                        return
                    if not answered:
                        incoming = session.incoming[call_id] = Incoming(session, call_id, self.index, code, b"")
                        self._answer_inline(incoming, result)
                    return
                incoming = session.incoming[call_id] = Incoming(session, call_id, self.index, code, args)
                incoming.host = self
                mailbox.start(incoming, self._specs[code], lane)
                return
        incoming = session.incoming[call_id] = Incoming(session, call_id, self.index, code, args)
        incoming.timeout_ns = timeout_ns
        self.receive(incoming)

    # ---------------------------------------------------------------- running

    def _run_sync(self, incoming: Incoming, spec: MethodSpec, more: bool) -> None:
        """Run a sync method; in the actor's thread."""
        incoming.started = True
        if incoming.cancelled:
            self._answers.status(incoming, Status.CANCELLED)
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
                args, kwargs = incoming.payload, None
                if type(args) is list:  # as in `Arguments.take`, with one function call less
                    incoming.payload = b""
                    result = getattr(self.instance, self._names[incoming.code])(*args)
                else:
                    args, kwargs = self._arguments.take(incoming)
                    result = getattr(self.instance, self._names[incoming.code])(*args, **kwargs)
                    incoming.payload = b""
                # Leases that the method did not keep go back with the answer; those of other sessions ahead of it, as
                # the caller may get the processor before this process's loop does.
                due: list[Any] = []
                collecting[thread := threading.get_ident()] = due
                args = kwargs = None
                del collecting[thread]
                for other in due:
                    other.send_releases()
            finally:
                if incoming.deadline:
                    call_deadline.set(None)
            if type(result) is CoroutineType:  # a plain function that returns a coroutine, as some decorators make
                self.process.loop.call_soon_threadsafe(self._adopt_coroutine, incoming, result)
                return
            if not (
                session.wire.respond(incoming.id, result, more)
                if incoming.forwards is None
                else self._push_plain(incoming, result, more)
            ):
                if issubclass(type(result), Background):  # as above; no look at results of the native part
                    self.process.loop.call_soon_threadsafe(self._adopt_coroutine, incoming, result)
                    return
                self._answers.value(incoming, result, more=more)
            elif self.stopping:  # after the answer, because the loop may have set it meanwhile
                self._answered()
            del result
        except BaseException as error:
            self._answers.failure(incoming, error, more=more)
        finally:
            if held:
                session.unhold_releases()

    def _run_inline(self, incoming: Incoming, spec: MethodSpec) -> None:
        incoming.started = True
        try:
            args, kwargs = self._arguments.take(incoming)
            result = self._run_in_context(getattr(self.instance, self._names[incoming.code]), *args, **kwargs)
            incoming.payload = b""
            del args, kwargs
        except BaseException as error:
            self._inline_failed(incoming, error)
        else:
            self._answer_inline(incoming, result)

    def _inline_failed(self, incoming: Incoming, error: BaseException) -> None:
        """Answer with an exception; where the caller expects no answer, log it."""
        if self._is_system and incoming.code >= FIRST_SILENT:
            incoming.session.incoming.pop(incoming.id, None)
            log_failure(f"a message of a peer was refused: {self.interface.methods[incoming.code].name}", error)
        else:
            self._answers.failure(incoming, error)

    def _answer_inline(self, incoming: Incoming, result: Any) -> None:
        try:
            self._answers.value(incoming, result)
        except BaseException as error:
            self._answers.failure(incoming, error)

    def _start_async(self, incoming: Incoming, spec: MethodSpec, lane: hot.Lane) -> None:
        run = self._run_async if spec.kind == _ASYNC else self._run_stream
        mailbox = self._by_code[spec.code]
        task = start_eagerly(run(incoming, lane, mailbox), self._loop, self._context.copy())
        if task is not None:
            incoming.task = task

    def _enter(self, incoming: Incoming) -> None:
        """Prepare a call inside its task, before it runs: its cancellation, its deadline, the current call."""
        if incoming.cancelled:
            raise asyncio.CancelledError
        if incoming.deadline:
            call_deadline.set(incoming.deadline)
        if self._is_system:
            current_call.set(incoming)

    async def _run_async(self, incoming: Incoming, lane: hot.Lane, mailbox: Mailbox) -> None:
        mailbox.task_began(lane)
        try:
            if self._is_system or incoming.deadline or incoming.cancelled:
                self._enter(incoming)
            incoming.started = True
            payload = incoming.payload
            if type(payload) is list:
                incoming.payload = b""
                result = await getattr(self.instance, self._names[incoming.code])(*payload)
                payload = None
            else:
                payload = None
                args, kwargs = self._arguments.take(incoming)
                result = await getattr(self.instance, self._names[incoming.code])(*args, **kwargs)
                del args, kwargs
            plain = not self.stopping and incoming.forwards is None
            if not plain or not incoming.session.wire.respond(incoming.id, result, False):
                self._answers.value(incoming, result)
            del result
        except asyncio.CancelledError as error:
            if incoming.cancelled:
                self._answers.status(incoming, Status.CANCELLED)
            else:
                self._answers.failure(incoming, error)
        except BaseException as error:
            self._answers.failure(incoming, error)
        finally:
            mailbox.task_ended()

    def _adopt_coroutine(self, incoming: Incoming, coroutine: Any) -> None:
        async def finish() -> None:
            try:
                self._answers.value(incoming, await coroutine)
            except BaseException as error:
                self._answers.failure(incoming, error)

        incoming.task = self._begin(finish())

    # ---------------------------------------------------------------- streams

    async def _run_stream(self, incoming: Incoming, lane: hot.Lane, mailbox: Mailbox) -> None:
        mailbox.task_began(lane)
        try:
            incoming.started = True
            if incoming.cancelled:
                raise asyncio.CancelledError
            if incoming.deadline:
                call_deadline.set(incoming.deadline)
            args, kwargs = self._arguments.take(incoming)
            generator = getattr(self.instance, self._names[incoming.code])(*args, **kwargs)
            del args, kwargs
            producer = AsyncProducer(incoming, self._pack)
            incoming.stream = producer
            await producer.run(generator)
        except asyncio.CancelledError as error:
            if incoming.cancelled:
                self._answers.status(incoming, Status.CANCELLED)
            else:
                self._answers.failure(incoming, error)
        except BaseException as error:
            self._answers.failure(incoming, error)
        else:
            self._answers.status(incoming, Status.STREAM_END)
        finally:
            incoming.stream = None  # each of the two holds the other, and the call its arguments
            mailbox.task_ended()

    def _start_generator(self, incoming: Incoming, spec: MethodSpec) -> None:
        try:
            args, kwargs = self._arguments.take(incoming)
            generator = getattr(self.instance, self._names[incoming.code])(*args, **kwargs)
        except BaseException as error:
            self._answers.failure(incoming, error)
            return
        incoming.stream = SyncProducer(
            incoming, generator, self._pack, self._by_code[incoming.code].post,
            ended=lambda status: self._answers.status(incoming, status),
            failed=lambda error: self._answers.failure(incoming, error),
        )  # fmt: skip
        incoming.stream.step()

    # ---------------------------------------------------------------- the ends of calls

    def _refuse(self, incoming: Incoming) -> None:
        """Refuse a call that will not start. Where the whole process ends, the end of the connection answers: the
        caller then asks the node agent, which knows whether the actor starts again elsewhere."""
        back = self.moving or incoming.returning or incoming.session in self._away
        if back and send_back(incoming, self.process.marshaller, self._answers):
            self._away[incoming.session] = None
            self._answered()
            return
        if self.process.leaving:
            incoming.host = None  # no end of a process waits for this call
        else:
            self._answers.status(incoming, Status.STOPPED)

    def _answered(self) -> None:
        """Note the end of a call. From any thread."""
        if not self.stopping:
            return
        if threading.get_ident() != self.process.thread:
            self.process.loop.call_soon_threadsafe(self._answered)
        elif self._drained is not None and not self._drained.done() and not self.busy:
            self._drained.set_result(None)

    @property
    def busy(self) -> bool:
        """Whether a call to this actor is open."""
        return next(self._open_calls(), None) is not None

    def _open_calls(self) -> Iterator[Incoming]:
        for session in self.process.sessions.all():
            yield from (each for each in list(session.incoming.values()) if each.host is self)

    def cancel(self, incoming: Incoming) -> None:
        """Cancel a call whose caller has cancelled it, or is gone. On the loop's thread."""
        stream = incoming.stream  # the actor's thread may end it meanwhile
        if stream is not None:
            stream.close()
        if incoming.task is not None:
            incoming.task.cancel()
        elif not incoming.started and (self._by_code[incoming.code].drop_held(incoming) or incoming.blockers):
            self._answers.status(incoming, Status.CANCELLED)

    def session_closed(self, session: Any) -> None:
        """Forget a caller whose connection is gone."""
        self._admit(session)
        for mailbox in self._mailboxes.values():
            mailbox.forget(session)

    # ---------------------------------------------------------------- calls linked by promises or FORWARD

    def receive_linked(
        self, session: Session, call_id: int, code: int, timeout_ns: int, args: list[Any],
        forwards: Sequence[tuple[int, int, bytes]] | None,
    ) -> None:  # fmt: skip
        """Take a call as `receive_plain` does, with promises among its arguments or FORWARD frames."""
        incoming = session.incoming[call_id] = Incoming(session, call_id, self.index, code, args)
        if forwards is not None:
            pushes = self.process.pushes
            if len(forwards) == 1 and forwards[0][0] == 0 and forwards[0][2] in pushes.reached:
                incoming.forwards = forwards  # as `Pushes.forward` does it
            else:
                for forward in forwards:
                    pushes.forward(incoming, *forward)
        unresolved = False
        refused = self.stopping or session in self._away
        for place, value in enumerate(args):
            if type(value) is Awaited and refused:
                value.incoming = None  # nothing here waits for its outcome, which may come yet
                args[place] = value.unresolved()
            elif type(value) is Awaited:
                value.incoming, value.values, value.place = incoming, args, place
                incoming.blockers += 1
            elif type(value) is Unresolved:
                unresolved = True
        incoming.timeout_ns = timeout_ns
        if unresolved:
            self.receive_values(incoming, args)
        else:
            self.receive(incoming)

    def receive_values(self, incoming: Incoming, args: list[Any]) -> None:
        """Take a call whose arguments have come one by one: plain values, and promises that are done."""
        if not (self.stopping or incoming.session in self._away):
            self._arguments.wait(incoming, args)
        self.receive(incoming)

    def unblocked(self, incoming: Incoming) -> None:
        """Go on with a call whose last lease or promise among the arguments has arrived."""
        if incoming.returning:
            self._refuse(incoming)
            return
        if incoming.host is not self or self._closed:
            return
        if type(incoming.payload) is not list:
            self._arguments.prepare(incoming)
        if not incoming.blockers:
            self._by_code[incoming.code].unblocked(incoming, self._specs[incoming.code])

    def keep_unresolved(self, incoming: Incoming, args: list[Any]) -> None:
        """Note that a plain call has an `Unresolved` among its arguments `args`."""
        if type(incoming.payload) is list:
            self._arguments.hold(incoming, args)

    # ---------------------------------------------------------------- moves to another node

    async def vacate(self, patience: float) -> bool:
        """Run the queued calls and close the actor, which goes on elsewhere: later calls go back to their callers.
        Returns False, and takes calls again, where a queued call runs after `patience` seconds: it may wait for a later
        one."""
        self.moving = True
        if not await self._refrain(patience):
            while any(each.returning for each in self._open_calls()):  # noqa: ASYNC110  # before later ones are taken
                await asyncio.sleep(_GLANCE)
            self.moving = self.stopping = False
            self._admit(None)
            return False
        await self._end()
        return True

    async def readmit(self, session: Session) -> None:
        """Take calls of a caller again, to which calls went back. It asks for that before it sends those again."""
        while any(each.returning and each.session is session for each in self._open_calls()):  # noqa: ASYNC110
            await asyncio.sleep(_GLANCE)
        self._admit(session)

    def _admit(self, session: Any) -> None:
        self._away.pop(session, None)
        if not (self._away or self.stopping):
            self._plain = self._when_open
