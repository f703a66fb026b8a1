"""`Operation`: work that has begun, to await, or to wait for in a thread without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
from abc import abstractmethod
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, ParamSpec, Self, TypeVar

from zcactor.api.unawaited import Unawaited
from zcactor.errors import NotInitialized
from zcactor.exception_pickling import class_name, hides, text_of
from zcactor.logs import logger
from zcactor.options import checked_seconds
from zcactor.process.context import current, current_or_none

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__tracebackhide__ = hides
__all__ = ["Background", "Operation", "check_runs", "operation", "refuse_to_block"]

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_running: Final[set[asyncio.Task[Any]]] = set()
"""Loops keep no tasks. These have not ended, though their operations may be gone."""


class Operation(Unawaited, Coroutine[Any, Any, T_co], Generic[T_co]):
    """Work that began when it was called: ``await`` gives its value, and in a thread that runs no event loop `result`
    does. Any thread may use it, also one with an event loop of its own.

    An operation is also a coroutine, so ``asyncio.create_task(operation)`` and task groups accept it.

    Cancelling an await cancels the operation, unless its class says otherwise. Dropping an operation cancels nothing,
    and a failure that nobody has seen then is logged.
    """

    __slots__ = ()

    @abstractmethod
    def result(self, timeout: float | None = None) -> T_co:
        """Block the calling thread until the value is there, and return it. This is for threads that run no event loop;
        everywhere else await the operation.

        Args:
            timeout: seconds to wait at most; None waits for ever, 0 polls.

        Raises:
            RuntimeError: the calling thread runs an event loop, which the wait would block.
            NotInitialized: the event loop of the runtime does not run.
            TimeoutError: the value was not there in time; the operation goes on, and can be waited for again.
            TypeError: `timeout` is no number.
            ValueError: `timeout` is negative, or not a number (NaN).
            Exception: the errors of ``await``.
        """

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block like `result`, and return the error with which the operation has failed; None where it has not.

        Raises:
            RuntimeError, NotInitialized, TypeError, ValueError: as for `result`.
            TimeoutError: the outcome was not known in time.
            asyncio.CancelledError: the operation was cancelled.
        """
        refuse_to_block("exception()", "await the operation")
        seconds = checked_seconds(timeout, "exception()")
        try:
            self.result(seconds)
        except Exception as error:
            if not self.done():
                raise
            return error
        return None

    @abstractmethod
    def done(self) -> bool:
        """Whether the outcome is known."""

    @abstractmethod
    def cancel(self) -> bool:
        """Cancel the operation. Awaiting it afterwards raises ``CancelledError``.

        Returns:
            Whether the operation was still open. Where it has ended nothing happens, and the result is False.
        """

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call ``fn(operation)`` once the outcome is known, on the runtime's thread, or at once in this thread where it
        is known already. An error of `fn` is logged."""
        self.future().add_done_callback(lambda _: fn(self))

    @abstractmethod
    def future(self) -> concurrent.futures.Future[T_co]:
        """Return a future with the outcome, for libraries that take one, such as ``concurrent.futures.wait``."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(self._advice())


def refuse_to_block(what: str, instead: str) -> None:
    """Refuse a call that blocks where it would block an event loop.

    Args:
        what: the call, for people.
        instead: the words to write.

    Raises:
        RuntimeError: this thread runs an event loop.
    """
    if asyncio._get_running_loop() is not None:  # this accessor does not raise
        raise RuntimeError(f"{what} would block the event loop that runs in this thread: {instead} instead")


def check_runs(loop: asyncio.AbstractEventLoop) -> None:
    """Refuse a wait for what only a loop that runs can bring.

    Raises:
        NotInitialized: the loop does not run.
    """
    if not loop.is_running():
        raise NotInitialized(
            "the event loop in which zc.init() was awaited does not run, so nothing can come: await there, or write "
            "'with zc.init():' in a plain script"
        )


class _Outcome(Generic[T]):
    """The outcome of a coroutine. A task would keep it until the awaiting task waits again."""

    __slots__ = ("error", "value")

    def __init__(self) -> None:
        self.value: T | None = None
        self.error: BaseException | None = None

    async def of(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """Run a coroutine to its outcome."""
        try:
            self.value = await coroutine
        except Exception as error:
            self.error = error
        finally:
            del self, coroutine  # see `get`

    def get(self) -> T:
        """Return the value, or raise the error."""
        error = self.error
        if error is None:
            return self.value  # type: ignore[return-value]
        try:
            raise error
        finally:
            del self, error  # the error has this frame in its traceback: no cycle

    def settled(self, task: asyncio.Task[None]) -> concurrent.futures.Future[T]:
        """A future with the outcome of a task that has ended."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        error = asyncio.CancelledError() if task.cancelled() else task.exception() or self.error
        if error is None:
            future.set_result(self.value)  # type: ignore[arg-type]
        else:
            future.set_exception(error)
        return future


class Background(Operation[T_co]):
    """A coroutine that runs on the runtime's loop from now on.

    Args:
        coroutine: the work. It is closed where it cannot start.
        name: the operation, for people.
        loop: the loop; by default that of this process's runtime.

    Raises:
        NotInitialized: no runtime is running.
    """

    __slots__ = ("__weakref__", "_drivers", "_loop", "_name", "_outcome", "_seen", "_task", "_told")

    def __init__(
        self, coroutine: Coroutine[Any, Any, T_co], name: str, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._name = name
        self._seen = False
        self._drivers: dict[Any, Generator[Any, None, T_co]] = {}
        self._outcome: _Outcome[T_co] = _Outcome()
        self._task: asyncio.Task[None] | None = None
        self._told: concurrent.futures.Future[T_co] | None = None
        try:
            self._loop = current().loop if loop is None else loop
            if asyncio._get_running_loop() is self._loop:
                self._task = self._loop.create_task(self._outcome.of(coroutine))
                _running.add(self._task)
                self._task.add_done_callback(functools.partial(_ended, coroutine))
            else:
                self._told = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except BaseException:
            coroutine.close()
            raise

    def __await__(self) -> Generator[Any, None, T_co]:
        self._seen = True
        if self._task is not None and asyncio.get_running_loop() is self._loop:
            return _taken(self._task, self._outcome)
        return asyncio.wrap_future(self.future()).__await__()

    def send(self, value: None) -> Any:
        """Coroutine protocol, for tasks that are made of the operation itself."""
        return self._driver().send(value)

    def throw(self, *args: Any) -> Any:
        """Coroutine protocol: raise an exception at the point of the await."""
        try:
            return self._driver().throw(*args)
        except asyncio.CancelledError:
            self.cancel()  # also for a task that is cancelled before its first step
            raise
        finally:
            del self, args  # an error that comes back has this frame in its traceback: no cycle

    def close(self) -> None:
        """Coroutine protocol: stop awaiting. The operation goes on."""
        self._driver().close()

    def _driver(self) -> Generator[Any, None, T_co]:
        """The generator that drives the current task: several tasks may be made of one operation."""
        task = asyncio.current_task()
        driver = self._drivers.get(task)
        if driver is None:
            driver = self._drivers[task] = _awaiting(self.__await__())
            if task is not None:
                task.add_done_callback(self._drivers.pop)
        return driver

    def result(self, timeout: float | None = None) -> T_co:
        """See `Operation.result`."""
        refuse_to_block(f"result() of {self._name}", "await the operation")
        seconds = checked_seconds(timeout, "result()")
        self._seen = True
        if not self.done():
            check_runs(self._loop)
        future = self.future()
        try:
            error = future.exception(seconds)
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError(f"{self._name} was cancelled") from None
        except TimeoutError:
            raise TimeoutError(f"{self._name} was not done after {seconds:.6g} s; it goes on") from None
        if error is None:
            return future.result()
        try:
            raise error
        finally:
            del self, future, error  # the error has this frame in its traceback: no cycle

    def done(self) -> bool:
        """See `Operation.done`."""
        work = self._told if self._task is None else self._task
        return work is not None and work.done()

    def cancel(self) -> bool:
        """See `Operation.cancel`."""
        self._seen = True
        if self._task is None:
            return self._told is not None and self._told.cancel()
        if self._task.done():
            return False
        if asyncio._get_running_loop() is self._loop:
            return self._task.cancel()
        self._loop.call_soon_threadsafe(self._task.cancel)
        return True

    def future(self) -> concurrent.futures.Future[T_co]:
        """See `Operation.future`. Cancelling the future cancels the operation."""
        self._seen = True
        if self._told is None:
            assert self._task is not None
            if self._task.done():
                self._told = self._outcome.settled(self._task)
            else:
                self._told = asyncio.run_coroutine_threadsafe(_of(self._task, self._outcome), self._loop)
        return self._told

    def _advice(self) -> str:
        return (
            f"this is the promise of {self._name}, not its result: await it, or use .result() in a thread that runs no "
            "event loop"
        )

    def __repr__(self) -> str:
        return f"<{self._name} {'done' if self.done() else 'pending'}>"

    def __del__(self) -> None:
        work = getattr(self, "_task", None) or getattr(self, "_told", None)  # a signal's handler may have raised before
        if work is None or self._seen:
            return
        note = functools.partial(_note_unseen, self._name, self._outcome)
        if work.done():
            note(work)
        elif work is self._told or asyncio._get_running_loop() is self._loop:
            work.add_done_callback(note)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it does not end
                self._loop.call_soon_threadsafe(work.add_done_callback, note)


def _ended(coroutine: Coroutine[Any, Any, Any], task: asyncio.Task[None]) -> None:
    _running.discard(task)
    coroutine.close()  # a task that was cancelled before its first step has not begun it


def _awaiting(awaited: Generator[Any, None, T]) -> Generator[Any, None, T]:
    return (yield from awaited)


def _taken(task: asyncio.Task[None], outcome: _Outcome[T]) -> Generator[Any, None, T]:
    yield from task
    try:
        return outcome.get()
    finally:
        del task, outcome  # see `_Outcome.get`


async def _of(task: asyncio.Task[None], outcome: _Outcome[T]) -> T:
    await task
    return outcome.get()


def _note_unseen(
    name: str, outcome: _Outcome[Any], work: asyncio.Task[None] | concurrent.futures.Future[Any]
) -> None:  # fmt: skip
    """Log the failure of an operation that nobody holds, unless the runtime ends, which fails those under way."""
    process = current_or_none()
    if process is None or process.tasks.closing or work.cancelled():
        return
    error = work.exception() or outcome.error
    if error is not None:
        kind = class_name(type(error))
        logger.error("%s failed and its result was never awaited: %s: %s", name, kind, text_of(error))


def operation(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Operation[T]]:
    """Let a coroutine function of the public API return an operation, which begins at the call."""

    name = function.__qualname__
    if "." not in name:
        name = f"zc.{name}"

    @functools.wraps(function)
    def begin(*args: P.args, **kwargs: P.kwargs) -> Operation[T]:
        return Background(function(*args, **kwargs), name)

    return begin
