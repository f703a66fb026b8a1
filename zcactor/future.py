"""`ObjectRef`: what a call or a put returns; `ObjectStream`: what a generator method returns; and waiting for many."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Generator, Iterable, Sequence
from threading import get_ident
from typing import Any, Generic, NoReturn, TypeVar

from msgspec.msgpack import Ext

from zcactor.context import current, current_or_none
from zcactor.errors import ActorDied, ProtocolError
from zcactor.marshal.sealed import Sealed, lower_resolved, shared
from zcactor.marshal.values import Code, arguments, decode_small, encode, lifts, register
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.call import Call
from zcactor.rpc.messages import Status
from zcactor.rpc.parts import Part
from zcactor.rpc.protocol import CallState

__all__ = ["ObjectRef", "ObjectStream", "cancel_call", "failure_of", "get", "packed_result", "put", "wait"]

_DONE = CallState.DONE
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ObjectRef(Coroutine[Any, Any, T_co], Generic[T_co]):
    """A value that exists somewhere, or will: the promise of a call's result, or of what was put.

    ``await ref`` gives the value, any number of times and from any process that holds the reference. As a top-level
    argument of a call it is resolved for the callee, directly between the two processes; nested in a container it stays
    a reference. It also works as a coroutine, so ``asyncio.create_task(ref)`` and task groups take it.

    Raises, from ``await``:
        RemoteError: the method raised; also an instance of the original exception's type when that can be pickled.
        ActorDied, ActorUnavailable: the actor's process ended before it answered.
        DeadlineExceeded: the call's timeout passed.
        ObjectLost: the process that owned the value ended.
        asyncio.CancelledError: the call was cancelled (`cancel`), or the awaiting task was.

    Cancelling an await: when nobody else holds the reference, the call is cancelled; while it is held, the call goes on
    and can be awaited again. Dropping a reference that is not awaited cancels nothing.
    """

    __slots__ = ("__weakref__", "_call", "_drivers")

    def __init__(self, call: Call) -> None:
        call.refs += 1
        self._call = call
        self._drivers: dict[Any, Generator[Any, None, T_co]] | None = None

    def __await__(self) -> Generator[Any, None, T_co]:
        # The generator works on the call, not on this object: in `await actor.method()` nobody holds the reference
        # while the await is suspended, which is how a cancelled await knows that it was the only one.
        call = self._call
        if call.state is _DONE:
            call.retrieved = True  # this reference may be gone before the generator takes its first step
        return _outcome(call, 0)

    def send(self, value: None) -> Any:
        """Coroutine protocol, for tasks made of the reference itself."""
        driver = self._driver()
        del self  # see `_value`
        return driver.send(value)

    def throw(self, *args: Any) -> Any:
        """Coroutine protocol."""
        driver = self._driver()
        del self
        return driver.throw(*args)

    def close(self) -> None:
        """Coroutine protocol: stop awaiting. Cancels nothing."""
        self._driver().close()

    def _driver(self) -> Generator[Any, None, T_co]:
        """What drives the task at hand: several tasks may be made of one reference."""
        task = asyncio.current_task()
        if self._drivers is None:
            self._drivers = {}
        driver = self._drivers.get(task)
        if driver is None:
            driver = self._drivers[task] = _outcome(self._call, 1)
            if task is not None:
                task.add_done_callback(self._drivers.pop)
        return driver

    def cancel(self) -> bool:
        """Cancel the call. Awaiting it afterwards raises ``CancelledError``.

        Queued, it never runs; a running ``async def`` gets ``CancelledError``; a running sync method finishes and its
        result is dropped.

        Returns:
            False when the call had ended before; then nothing happens.
        """
        call = self._call
        if call.known:
            return False
        cancel_call(call)
        return True

    def done(self) -> bool:
        """Whether the outcome is known; ``await`` then waits at most for bytes to come from another host."""
        return self._call.known

    @property
    def nbytes(self) -> int | None:
        """Bytes that the value occupies, payload and arrays; None while it is not known."""
        call = self._call
        if not call.known or call.error is not None:
            return None
        return len(_packed(call)[0]) + sum(part.nbytes for part in call.parts)

    @property
    def owner(self) -> str:
        """Id of the process that keeps the result, 32 hex digits."""
        return self._call.owner.hex()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an ObjectRef travels inside calls, puts and results only, where it is a lease on the value; pickling it "
            "elsewhere would lose track of who holds it: await it and pickle the value"
        )

    def __del__(self) -> None:
        call = self._call
        call.refs -= 1
        if call.refs == 0 and call.done and not call.retrieved:
            _note_unseen(call)

    def __repr__(self) -> str:
        call = self._call
        if not call.known:
            state = "pending"
        elif call.error is not None or call.status != Status.OK:
            state = "failed"
        else:
            state = f"{self.nbytes} bytes"
        return f"<ObjectRef {call.label or 'value'} {state}>"


def cancel_call(call: Call) -> None:
    """Tell the actor, and end the call here with ``CancelledError``. From any thread."""
    if call.loop is not None and get_ident() != call.thread:
        call.loop.call_soon_threadsafe(cancel_call, call)
        return
    session = call.session
    if session is not None and call.state is CallState.SENT:
        session.cancel(call)
    call.retrieved = True
    call.fail(asyncio.CancelledError(f"{call.label or 'the call'} was cancelled"))


def _outcome(call: Call, held_by_task: int) -> Generator[Any, None, Any]:
    """Wait for `call` and give its value. `held_by_task`: references that the awaiting task itself keeps."""
    while call.state is not _DONE:
        loop = call.loop
        if loop is None or get_ident() != call.thread:
            loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if call.waiter is None and call.fetch is None:
            call.waiter = future
        else:
            call.add_waiter(future)
        try:
            yield from future
        except asyncio.CancelledError:
            call.remove_waiter(future)
            if call.refs <= _own_refs(call, held_by_task) and not call.awaited and not call.known:
                cancel_call(call)
            raise
    if call.decoded and call.error is None:
        call.retrieved = True
        return call.value
    try:
        return _value(call)
    finally:
        del call  # see `_value`


def _own_refs(call: Call, held_by_task: int) -> int:
    """How many living references belong to the await itself.

    A task made of the reference holds it once. ``asyncio.wait_for`` awaits a local variable from 3.12 on; that frame is
    the caller of the await, and holds it once too.
    """
    if held_by_task:
        task = asyncio.current_task()
        ref = task.get_coro() if task is not None else None
        # The task's own reference, this variable, the frames of `throw` on the way here, and getrefcount's argument.
        return 1 if isinstance(ref, ObjectRef) and sys.getrefcount(ref) <= _TASK_HELD else 0
    return 0


_TASK_HELD = 5


def _value(call: Call) -> Any:
    """The value of a call that is done. Raises what it failed with.

    The call keeps its error, and the error its traceback. A frame of that traceback that held the call would close the
    cycle, and what the frames of those who await hold, arrays among it, would wait for the collector of cycles.
    """
    call.retrieved = True
    if not call.decoded and call.error is None:
        if call.status > Status.ERROR:
            raise _status_error(call)
        value = current().marshaller.unpack(call.payload, call.parts, call.flags)
        if call.status == Status.ERROR:
            call.error = value
        else:
            call.value = value
            call.decoded = True
        del value
    error = call.error
    if error is not None:
        error = error.with_traceback(None)
        try:
            raise error
        finally:
            del call, error
    return call.value


def packed_result(call: Call) -> tuple[Any, Sequence[Part], int]:
    """The result as it travels on: payload, parts, flags. What was handed over to us is shared from then on."""
    if any(part.kind == RegionKind.MOVED for part in call.parts):
        if call.decoded:  # whoever awaited it has the array, and may have written to it
            call.payload, call.parts, call.flags = current().marshaller.pack(call.value)
        else:
            call.parts = shared(call.parts)
    return _packed(call)


def _packed(call: Call) -> tuple[Any, Sequence[Part], int]:
    if call.payload is None:
        return current().marshaller.pack(call.value)
    return call.payload, call.parts, call.flags


def _status_error(call: Call) -> BaseException:
    """The error that a response without a payload means."""
    if call.status == Status.CANCELLED:
        return asyncio.CancelledError(f"{call.label} was cancelled by its actor's process")
    actor = call.actor_label or call.label
    if call.status == Status.STOPPED:
        return ActorDied(actor, "it was stopped before the call started", False)
    if call.status == Status.KILLED:
        return ActorDied(actor, "it was ended while the call ran", True)
    return ActorDied(actor, "its process does not know it any more", False)


def _note_unseen(call: Call) -> None:
    call.retrieved = True
    process = current_or_none()
    if process is not None:
        process.unseen.note(call)


def failure_of(call: Call) -> BaseException | None:
    """What a finished call failed with; None for one that succeeded or was cancelled, or whose actor was gone."""
    error = call.error
    if error is None and call.status == Status.ERROR:
        try:
            error = current().marshaller.unpack(call.payload, call.parts, call.flags)
        except ProtocolError as broken:
            error = broken
    return None if isinstance(error, asyncio.CancelledError) else error


Call.unseen = staticmethod(_note_unseen)


class ObjectStream(AsyncIterator[T_co], Generic[T_co]):
    """The items of a generator method: ``async for item in actor.method()``.

    The producer runs at most a bounded number of items ahead (16). An exception in the generator is
    raised at its own item, then the stream ends. Leaving the loop, dropping the stream or `aclose` closes
    the generator.
    """

    __slots__ = ("__weakref__", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __aiter__(self) -> ObjectStream[T_co]:
        return self

    async def __anext__(self) -> T_co:
        """The next item.

        Raises:
            StopAsyncIteration: the generator is exhausted, or the stream was closed.
            RemoteError, ActorDied: as for a call.

        Cancelling is safe: no item is lost.
        """
        return await self._stream.next()  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        """Close the generator. Idempotent; items not yet taken are dropped."""
        self._stream.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an ObjectStream belongs to the process that called the generator method, and travels nowhere: iterate it "
            "here and pass its items, or pass the actor's handle and call the method there"
        )

    def __del__(self) -> None:
        self._stream.abandon()


class RefHolder:
    """Another process's promise, held here under a lease; see `zcactor.rpc.parts.Holder`."""

    __slots__ = ("_release", "id", "owner")

    def __init__(self, owner: bytes, object_id: int, release: Any) -> None:
        self.owner = owner
        self.id = object_id
        self._release = release

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """A lease for the session's peer; pinned here when a third process owns it."""
        if session.peer_process == self.owner:
            return self.owner, self.id, 0
        return self.owner, self.id, session.pin(self)

    def __del__(self) -> None:
        self._release(self.id)


class BorrowedRef:
    """Another process's promise on its way to a third one: pinned here with what has become of it, if that is known."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call = call

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """See `RefHolder.grant`."""
        holder: RefHolder = self.call.holder
        if session.peer_process == holder.owner:
            return holder.owner, holder.id, 0
        return holder.owner, holder.id, session.pin(self)


class OwnRef:
    """A promise of this process that a peer is given; granting it keeps the call alive."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call = call

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """A lease for the session's peer."""
        call = self.call
        process = current()
        object_id = process.promises.export(call)
        session.leases.grant(object_id, call)
        return process.process, object_id, 0


def lower_ref(packing: Any, ref: ObjectRef[Any]) -> bytes:
    """A reference stays a reference, wherever it is nested; see `lower_argument` for the top level."""
    call = ref._call
    call.retrieved = True
    holder = call.holder or OwnRef(call)
    if type(holder) is RefHolder:
        holder = BorrowedRef(call)
    return encode((packing.add(Part(RegionKind.REF, holder, 0, 0)), call.label, False))


def lift_ref(unpacking: Any, data: memoryview) -> Any:
    """The reference that `lower_ref` wrote: our own promise again, or a borrowed one."""
    fields = decode_small(data)
    if type(fields) is not list or len(fields) != 3:
        raise ProtocolError("a reference is malformed")
    part = unpacking.part(fields[0])
    if part.kind != RegionKind.REF:
        raise ProtocolError(f"part {fields[0]} of a message is not a reference")
    return ObjectRef(current().promises.call_of(part.holder, str(fields[1])))


register(ObjectRef, Code.REF, lower_ref, lift_ref)


class FailedArgumentError(Exception):
    """An argument is a reference whose call has failed; `failure` is why. Never leaves the package."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__(failure)
        self.failure = failure


class Unresolved:
    """A top-level argument that the callee still has to get."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call = call

    def value(self) -> Any:
        """What the promise became. Raises what it failed with."""
        return _value(self.call)


def lower_argument(packing: Any, ref: ObjectRef[Any]) -> Any:
    """A reference as a top-level argument: its value, passed on unopened, where that is known; else the promise."""
    call = ref._call
    call.retrieved = True
    if call.known:
        if call.error is not None or call.status != Status.OK:
            try:
                _value(call)
            except Exception as error:
                raise FailedArgumentError(error) from error
            except asyncio.CancelledError as error:
                raise FailedArgumentError(error) from error
        return lower_resolved(packing, Sealed(*packed_result(call)))
    return Ext(Code.ARGUMENT, lower_ref(packing, ref))


def lift_argument(unpacking: Any, data: memoryview) -> Unresolved:
    """The inverse of `lower_argument` for a promise."""
    return Unresolved(lift_ref(unpacking, data)._call)


arguments[ObjectRef] = lower_argument
lifts[Code.ARGUMENT] = lift_argument


def put(value: T) -> ObjectRef[T]:
    """Keep `value` in this process and return a reference to it, which others can resolve without a copy.

    Arrays of at least the eager limit are shared as when they are passed: read-only from then on, copied only when they
    do not lie in the store. The value lives as long as a reference to it does, anywhere.

    Raises:
        NotInitialized: no runtime is running.
        OutOfMemory: an array does not fit the store.
    """
    process = current()
    payload, parts, flags = process.marshaller.pack(value)
    call = Call(process.process, process.loop, process.thread)
    call.label = f"put({type(value).__name__})"
    call.retrieved = True
    call.complete(Status.OK, payload, parts, flags)
    return ObjectRef(call)


async def get(refs: Sequence[ObjectRef[T]], timeout: float | None = None) -> list[T]:
    """Wait for all of `refs` and return their values in order.

    Args:
        refs: references; the same one may occur several times.
        timeout: seconds; None waits for ever.

    Raises:
        TimeoutError: not all were done in time; the calls go on.
        Exception: the first failure in the order of `refs`, as ``await`` raises it.

    Cancelling abandons the wait only: the calls go on, because `refs` holds them.
    """
    if isinstance(refs, ObjectRef):
        raise TypeError("zc.get takes a sequence of references; await a single one")
    refs = list(refs)
    await _wait_count(_checked(refs), len(refs), timeout, all_or_error=True)
    for ref in refs:
        call = ref._call
        if call.done and (call.error is not None or call.status != Status.OK):
            _value(call)  # raises; others may not be done yet
    return [_value(ref._call) for ref in refs]


async def wait(
    refs: Sequence[ObjectRef[T]],
    num_returns: int = 1,
    timeout: float | None = None,
) -> tuple[list[ObjectRef[T]], list[ObjectRef[T]]]:
    """Wait until `num_returns` of `refs` are done.

    Args:
        refs: distinct references.
        num_returns: how many, 1 to ``len(refs)``.
        timeout: seconds; None waits for ever, 0 polls.

    Returns:
        ``(done, pending)``, both in the order of `refs`; at most `num_returns` in `done`. Failed calls count as done.

    Raises:
        ValueError: a duplicate in `refs`, or `num_returns` out of range.

    Cancelling abandons the wait only.
    """
    refs = list(refs)
    calls = _checked(refs)
    if len({id(call) for call in calls}) != len(calls):
        raise ValueError("zc.wait: the same reference occurs more than once")
    if not 1 <= num_returns <= len(refs):
        raise ValueError(
            f"zc.wait: num_returns is {num_returns}, but must be between 1 and the {len(refs)} references given"
        )
    try:
        await _wait_count(calls, num_returns, timeout, all_or_error=False)
    except TimeoutError:  # what is done by now is the answer
        pass
    done = [ref for ref in refs if ref._call.known][:num_returns]
    taken = {id(ref) for ref in done}
    return done, [ref for ref in refs if id(ref) not in taken]


def _checked(refs: Iterable[Any]) -> list[Call]:
    calls = []
    for ref in refs:
        if not isinstance(ref, ObjectRef):
            raise TypeError(f"expected ObjectRef, got {type(ref).__name__}: {ref!r}")
        calls.append(ref._call)
    return calls


async def _wait_count(calls: list[Call], count: int, timeout: float | None, *, all_or_error: bool) -> None:
    """Return when `count` of `calls` are done; with `all_or_error` a failure is enough."""
    loop = asyncio.get_running_loop()
    process = current()
    if loop is not process.loop:
        await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(
                _wait_count(calls, count, timeout, all_or_error=all_or_error), process.loop
            )
        )
        return
    enough: asyncio.Future[None] = loop.create_future()
    left = count

    def finished(call: Call) -> None:
        nonlocal left
        left -= 1
        failed = all_or_error and (call.error is not None or call.status != Status.OK)
        if (left <= 0 or failed) and not enough.done():
            enough.set_result(None)

    try:
        for call in calls:
            call.add_callback(finished)
        if count == 0 or enough.done():
            return
        if timeout is not None and timeout <= 0:
            raise TimeoutError
        if timeout is None:
            await enough
        else:
            async with asyncio.timeout(timeout):
                await enough
    except TimeoutError:
        raise TimeoutError(f"{left} of {count} references were not done after {timeout} s") from None
    finally:
        for call in calls:
            if call.callbacks is not None and finished in call.callbacks:
                call.callbacks.remove(finished)
