"""`ObjectRef`: the result of a call or a put, as a reference."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future
from functools import cache, partial
from threading import TIMEOUT_MAX, Lock, get_ident
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from zcactor.api.operation import Operation, check_runs, refuse_to_block
from zcactor.errors import ActorDied, ProtocolError
from zcactor.exception_pickling import bare, hides, shown_class
from zcactor.lazy_numpy import np
from zcactor.marshal.packed import shared
from zcactor.native import hot
from zcactor.objectstore.ref import RegionKind
from zcactor.observe.html import line
from zcactor.options import checked_seconds
from zcactor.process.context import current, current_or_none
from zcactor.rpc.call import Call, CallState
from zcactor.rpc.messages import Status

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import FrameType

    from zcactor.rpc.parts import Part

__tracebackhide__ = hides
__all__ = ["ObjectRef", "cancel_call", "failure_of", "needed", "packed_result", "put", "result_of", "value_of"]

_DONE = CallState.DONE
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ObjectRef(Operation[T_co]):
    """A reference to a value that exists in some process, or will exist: the promise of a call's result, or a value
    that was put.

    ``await ref`` gives the value, any number of times and in any process that holds the reference. As a top-level
    argument of a call the reference is resolved for the callee, directly between owner and callee; nested in a
    container it stays a reference. A reference is also a coroutine, so ``asyncio.create_task(ref)`` and task groups
    accept it.

    The exceptions come from ``await``, and from functions that await references.

    Raises:
        RemoteError: the method raised; also an instance of the original exception's type when that can be pickled.
        ActorDied, ActorUnavailable: the actor's process ended before it answered.
        DeadlineExceeded: the call's timeout passed.
        ObjectLost: the process that owned the value ended, and the value was not handed over; see `put`.
        asyncio.CancelledError: the call was cancelled (`cancel`), or the awaiting task was.

    Cancelling an await cancels the call when nobody else holds the reference; otherwise the call goes on and can be
    awaited again. Neither a task made of the reference nor ``asyncio.wait_for`` is somebody else. Dropping a reference
    that is not awaited cancels nothing.

    A reference is not its value: operators, indexing, iteration, ``len()``, ``bool()`` and NumPy's functions raise
    TypeError for it, and the value's attributes AttributeError. It compares and hashes as itself.
    """

    __slots__ = ("__weakref__", "_call", "_drivers")

    def __init__(self, call: Call) -> None:
        call.refs += 1
        self._call = call
        self._drivers: dict[Any, Generator[Any, None, T_co]] | None = None

    def __await__(self) -> Generator[Any, None, T_co]:
        # The generator works on the call, not on this object: in `await actor.method()` nobody holds the reference
        # while the await is suspended, which is how a cancelled await knows that no other holder exists.
        call = self._call
        if call.state is _DONE:
            call.retrieved = True  # this reference may be gone before the generator takes its first step
            if call.again is not None:
                call = needed(self)
        return _outcome(call)

    def send(self, value: None) -> Any:
        """Coroutine protocol, for tasks that are made of the reference itself."""
        driver = self._driver()
        del self  # see `value_of`
        return driver.send(value)

    def throw(self, *args: Any) -> Any:
        """Coroutine protocol: raise an exception at the point of the await."""
        call, driver = self._call, self._driver()
        del self
        try:
            return driver.throw(*args)
        except asyncio.CancelledError:
            _throw_left(call)
            raise
        finally:
            del args, call, driver  # the error that comes back has this frame in its traceback: no cycle

    def close(self) -> None:
        """Coroutine protocol: stop awaiting. The call is not cancelled."""
        self._driver().close()

    def _driver(self) -> Generator[Any, None, T_co]:
        """The generator that drives the current task: several tasks may be made of one reference."""
        task = asyncio.current_task()
        if self._drivers is None:
            self._drivers = {}
        driver = self._drivers.get(task)
        if driver is None:
            driver = self._drivers[task] = _outcome(needed(self))
            if task is not None:
                task.add_done_callback(self._drivers.pop)
        return driver

    def cancel(self) -> bool:
        """Cancel the call. Awaiting it afterwards raises ``CancelledError``.

        A queued call never runs; a running ``async def`` method gets ``CancelledError``; a running sync method
        finishes, and its result is dropped.

        Returns:
            Whether the call was still open. For a call that has ended nothing happens, and the result is False.
        """
        call = self._call
        if call.known:
            return False
        cancel_call(call)
        return True

    def result(self, timeout: float | None = None) -> T_co:
        """See `Operation.result`."""
        call = needed(self)
        try:
            return result_of(call, timeout)  # type: ignore[no-any-return]
        finally:
            del self, call  # an error has this frame in its traceback: see `value_of`

    def done(self) -> bool:
        """Whether the outcome is known. An ``await`` then waits at most for bytes that come from another host."""
        return self._call.known

    def future(self) -> Future[T_co]:
        """See `Operation.future`. Cancelling the future does not cancel the call."""
        call = needed(self)
        future: Future[T_co] = Future()
        future.set_running_or_notify_cancel()
        if call.state is _DONE:
            _tell(future, call)
        else:
            (call.loop or current().loop).call_soon_threadsafe(call.add_callback, partial(_tell, future))
        return future

    @property
    def nbytes(self) -> int | None:
        """Bytes that the value occupies, payload and arrays; None for a value that is not known yet, or a failed
        call."""
        call = self._call
        if not call.known or call.error is not None:
            return None
        return len(_packed(call)[0]) + sum(part.nbytes for part in call.parts)

    @property
    def owner(self) -> str:
        """Id of the process that keeps the value, 32 hex digits."""
        taken: Call | None = getattr(self._call.holder, "taken", None)
        return (taken or self._call).owner.hex()

    def _advice(self) -> str:
        return (
            f"this is the promise of {self._call.label or 'a value'}, not its result: await it, or use .result() in a "
            "plain method or a thread"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an ObjectRef travels inside calls, puts and results only, where it is a lease on the value; pickling it "
            "elsewhere would lose track of who holds it: await it and pickle the value"
        )

    def __del__(self) -> None:
        try:
            call = self._call
        except AttributeError:  # a signal's handler has raised while it was made
            return
        call.refs -= 1
        if call.refs == 0 and call.state is _DONE and not call.retrieved:
            _note_unretrieved(call)

    def _repr_html_(self) -> str:
        return line(repr(self), "a promise: await it")

    def __repr__(self) -> str:
        call = self._call
        if not call.known:
            state = "pending"
        elif call.error is not None or call.status != Status.OK:
            state = "failed"
        else:
            state = f"{self.nbytes} bytes"
        return f"<ObjectRef {call.label or 'value'} {state}>"


def _tell(future: Future[Any], call: Call) -> None:
    """Give a future the outcome of a call that has ended."""
    try:
        future.set_result(value_of(call))
    except BaseException as error:
        future.set_exception(error)
    finally:
        del call, future  # see `value_of`


def needed(ref: ObjectRef[Any]) -> Call:
    """The promise of a reference whose value is needed. Where the bytes had no room before, this is another one, which
    reads them once more."""
    call = ref._call
    if call.again is not None and call.state is _DONE:
        call.refs -= 1
        ref._call = call = call.once_more()
        call.refs += 1
    return call


def cancel_call(call: Call) -> None:
    """Ask the actor to cancel the call, and end the call here with ``CancelledError``. Any thread may call this."""
    if call.loop is not None and get_ident() != call.thread:
        call.loop.call_soon_threadsafe(cancel_call, call)
        return
    session = call.session
    if session is not None and call.state is CallState.SENT:
        session.cancel(call)
    call.retrieved = True
    call.fail(asyncio.CancelledError(f"{call.label or 'the call'} was cancelled"))


def _outcome(call: Call) -> Generator[Any, None, Any]:
    """Wait for `call` and return its value."""
    while call.state is not _DONE:
        loop = call.loop
        foreign = loop is None or get_ident() != call.thread
        if foreign:
            loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()  # type: ignore[union-attr]
        if call.waiter is None and call.fetch is None:
            call.waiter = future
        else:
            call.add_waiter(future)
        if foreign and call.state is _DONE:  # it has ended meanwhile, perhaps before it knew the future
            call.remove_waiter(future)
            break
        try:
            yield from future
        except asyncio.CancelledError:
            call.remove_waiter(future)
            frame = sys._getframe(1)
            if frame.f_code is _WAIT_FOR:
                future.get_loop().call_soon(_wait_for_left, call, frame)
            else:
                _await_left(call, 0)
            del call, frame, future  # see `value_of`; the error lives as long as the cancelled task
            raise
    try:
        return value_of(call)
    except BaseException:
        __tracebackhide__ = True  # for IPython, which looks at variables
        raise
    finally:
        call = None  # type: ignore[assignment]  # see `value_of`; IPython shows arguments, and needs the name


_WAIT_FOR: Final = asyncio.wait_for.__code__


def _await_left(call: Call, of_await: int) -> None:
    """Cancel a call, an await of which was cancelled, unless somebody else awaits it, or holds a reference to it. Of
    the living references `of_await` are the await's own."""
    if call.refs <= of_await and not call.awaited and not call.known:
        cancel_call(call)


def _wait_for_left(call: Call, frame: FrameType) -> None:
    """Treat a cancelled await in ``asyncio.wait_for``, which keeps the reference in a variable of its frame. The frame
    has ended, but the traceback of the error keeps it: it gives up its variables."""
    frame.clear()
    _await_left(call, 0)


def _throw_left(call: Call) -> None:
    """Treat the cancelled await of the current task once the task has ended."""
    task = asyncio.current_task()
    if task is not None:
        task.get_loop().call_soon(_task_left, call, task)


def _task_left(call: Call, task: asyncio.Task[Any]) -> None:
    """Treat the cancelled await of a task that was made of a reference, and keeps that as long as the task lives."""
    if _is_made_of(task, call):
        _await_left(call, 1 if _coroutine_references(task) <= _own_references() else 0)


def _is_made_of(task: Any, call: Call) -> bool:
    coroutine = task.get_coro()
    return isinstance(coroutine, ObjectRef) and coroutine._call is call


def _coroutine_references(task: Any) -> int:
    return sys.getrefcount(task.get_coro())


@cache
def _own_references() -> int:
    """The references to the coroutine of a task that nobody else holds. No variable is among them, whose references
    some versions of the interpreter do not count."""
    return _coroutine_references(_Task())


class _Task:
    def __init__(self) -> None:
        self._coro = object()

    def get_coro(self) -> object:
        return self._coro


def value_of(call: Call) -> Any:
    """Return the value of a call that is done, or raise the error that the call failed with.

    The call keeps its error, and the error its traceback. If a frame of that traceback held the call, this would be a
    cycle, and the objects in the frames of the awaiting functions, arrays included, would live until the next garbage
    collection.
    """
    call.retrieved = True
    if not call.decoded and call.error is None:
        if call.status > Status.ERROR:
            raise _status_error(call)
        if _was_passed(call):
            call.parts = shared(call.parts)
        value, call.handed_over = current().marshaller.unpack_result(call.payload, call.parts, call.flags)
        if call.status == Status.ERROR:
            call.error = value
        else:
            call.value = value
            call.decoded = True
        del value
    if _was_passed(call):  # by now: this may be another thread than the loop's
        _close(call)
    error = call.error
    if error is not None:
        __tracebackhide__ = True
        error = bare(error, None)
        try:
            raise error
        finally:
            call = error = None  # type: ignore[assignment]
    return call.value


def result_of(call: Call, timeout: float | None) -> Any:
    """Block until `call` is done; see `ObjectRef.result`."""
    refuse_to_block(f"result() of {call.label or 'a value'}", "await the reference")
    timeout = checked_seconds(timeout, "result()")
    if call.state is not _DONE:
        loop = call.loop or current().loop
        check_runs(loop)
        done = Lock()
        done.acquire()
        loop.call_soon_threadsafe(call.add_callback, lambda _: done.release())
        wait = -1.0 if timeout is None else min(timeout, TIMEOUT_MAX)
        call.blocked += 1
        try:
            if not done.acquire(timeout=wait) and call.state is not _DONE:
                raise TimeoutError(f"{call.label or 'the value'} was not done after {timeout:.6g} s; it goes on")
        finally:
            call.blocked -= 1
    try:
        return value_of(call)
    finally:
        del call


def packed_result(call: Call) -> tuple[Any, Sequence[Part], int]:
    """The result as it travels on: payload, parts, flags. Arrays that were handed over to this process are shared from
    then on. A caller that has awaited such an array may have written to it: the array travels on as it is now, of any
    size, and from then on always so."""
    call.passed = True
    if call.again is not None:  # the receiver may have the room
        return call.payload, shared(call.again[0]), call.flags
    moved = any(part.kind == RegionKind.MOVED for part in call.parts)
    if call.decoded and (moved or call.handed_over):
        call.payload, call.parts, call.flags = current().marshaller.pack(call.value)
    _close(call)
    return _packed(call)


def _was_passed(call: Call) -> bool:
    """Whether the reference has travelled on, as a value or as a promise."""
    return call.passed or call.export_id != 0


def _close(call: Call) -> None:
    """Let nobody write to an array of a result that was handed over, as the reference is passed on."""
    call.parts = shared(call.parts)
    for array in call.handed_over:
        hot.keep(array)
    call.handed_over = ()
    is_result = call.session is not None or call.holder is not None  # of a call: one of a group may be the caller's own
    if is_result and call.payload is None and type(call.value) is np.ndarray:  # the native part has made it
        hot.keep(call.value)


def _packed(call: Call) -> tuple[Any, Sequence[Part], int]:
    if call.payload is None:
        return current().marshaller.pack(call.value)
    return call.payload, call.parts, call.flags


def _status_error(call: Call) -> BaseException:
    """The error that the status of a response without a payload stands for."""
    if call.status == Status.CANCELLED:
        return asyncio.CancelledError(f"{call.label} was cancelled by its actor's process")
    actor = call.actor_label or call.label
    if call.status == Status.STOPPED:
        return ActorDied(actor, "it was stopped before the call started", False)
    if call.status == Status.KILLED:
        return ActorDied(actor, "it was ended while the call ran", True)
    return ActorDied(actor, "its process does not know it any more", False)


def _note_unretrieved(call: Call) -> None:
    call.retrieved = True
    process = current_or_none()
    if process is not None:
        process.unretrieved_errors.note(call)


def failure_of(call: Call) -> BaseException | None:
    """The error of a finished call; None for a call that succeeded or was cancelled, or whose actor had ended."""
    error = call.error
    if error is None and call.status == Status.ERROR:
        try:
            error = current().marshaller.unpack(call.payload, call.parts, call.flags)
        except ProtocolError as broken:
            error = broken
    return None if issubclass(type(error), asyncio.CancelledError) else error


Call.unretrieved_errors = staticmethod(_note_unretrieved)


def put(value: T) -> ObjectRef[T]:
    """Keep `value` in this process and return a reference to it, which others can resolve without a copy.

    Arrays of at least the eager limit are shared like arguments: an array that is put whole is read-only from then on,
    and a piece of an array that is still open is copied, as is one outside the store. All who resolve the reference
    have the bytes of this moment. It lives as long as this process does and any holds a reference to it.

    Where this process is an actor's and ends in order (`zc.stop`, or the last handle was dropped), every process that
    holds a reference, or is being sent one, gets the value before, and is its owner from then on. A reference that was
    not unpacked yet counts, in a result, an item or another value. So does the result of a call of this actor: its
    outcome is waited for, up to half of `Config.shutdown_timeout`. Awaiting a reference raises `ObjectLost` where that
    outcome did not come in time, where the holder did not have the bytes after four fifths of that time (they are many,
    or it computed on its loop meanwhile) or had no room for them, where this process was killed, and where it was a
    program's, which hands over nothing at its end.

    Args:
        value: any value that can be passed to an actor.

    Raises:
        NotInitialized: no runtime is running.
        OutOfMemory: an array does not fit the store.
        Exception: the error of pickling `value`, for instance a TypeError.
    """
    process = current()
    payload, parts, flags = process.marshaller.pack(value)
    call = Call(process.process, process.loop, process.thread)
    call.label = f"put({shown_class(type(value))})"
    call.retrieved = True
    call.complete(Status.OK, payload, parts, flags)
    return ObjectRef(call)
