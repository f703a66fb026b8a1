"""The choice of the event loop: uvloop, or plain asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from zcactor import signals
from zcactor.exception_pickling import hides, shown, shown_class
from zcactor.logs import logger
from zcactor.machine import CallMissing, check_calls
from zcactor.process import context
from zcactor.process.uncaught import present
from zcactor.standard import open_standard

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import FrameType

__tracebackhide__ = hides
__all__ = ["LoopThread", "chosen_loop", "fine_time", "loop_name", "new_event_loop", "run"]

T = TypeVar("T")
_NAMES = ("auto", "uvloop", "asyncio")
_TERMINATED = 128 + signal.SIGTERM
"""The exit status of a program that SIGTERM has ended, as shells have it."""


def loop_name() -> str:
    """Return the setting in ``ZCACTOR_LOOP``, by default and where that is empty ``"auto"``.

    Raises:
        ValueError: ``ZCACTOR_LOOP`` has another value than ``auto``, ``uvloop`` or ``asyncio``.
    """
    name = os.environ.get("ZCACTOR_LOOP") or "auto"
    if name not in _NAMES:
        raise ValueError(f"ZCACTOR_LOOP is {name!r}; valid values: {', '.join(_NAMES)}")
    return name


@functools.cache
def chosen_loop(name: str) -> str:
    """Return the event loop for a setting: for ``"auto"`` uvloop where it can be imported, and asyncio otherwise, which
    is logged once in a process.

    Args:
        name: ``"auto"``, ``"uvloop"`` or ``"asyncio"``.

    Returns:
        ``"uvloop"`` or ``"asyncio"``.

    Raises:
        ValueError: uvloop is asked for by name and cannot be imported.
    """
    if name == "asyncio":
        return name
    try:
        import uvloop  # noqa: F401
    except ImportError as error:
        if name == "uvloop":
            raise ValueError(
                f"the setting loop is 'uvloop', which cannot be imported ({error}): pip install uvloop, or set loop to "
                "'auto' or 'asyncio'"
            ) from error
        logger.warning("asyncio's event loop is used, as uvloop cannot be imported (%s): pip install uvloop", error)
        return "asyncio"
    return "uvloop"


def new_event_loop(name: str) -> asyncio.AbstractEventLoop:
    """Make a new event loop.

    Args:
        name: ``"auto"``, ``"uvloop"`` or ``"asyncio"``, see `chosen_loop`.

    Raises:
        ValueError: uvloop is asked for by name and cannot be imported.
    """
    if chosen_loop(name) == "asyncio":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


class LoopThread:
    """An event loop in a daemon thread of its own, named ``zcactor-loop``, for programs that have none.

    Args:
        name: the setting of the loop; see `chosen_loop`.

    Raises:
        ValueError: as for `new_event_loop`.
    """

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop(name)
        self._thread = threading.Thread(target=self._run, name="zcactor-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop, and block until it has ended.

        Args:
            coroutine: the coroutine, which goes on where this function raises another error than its own.
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            TimeoutError: the coroutine has not ended in time.
            Exception: the error of the coroutine.
        """
        running = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            error = running.exception(timeout)
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError from None
        if error is None:
            return running.result()
        try:
            raise error
        finally:
            del running, error  # the error has this frame in its traceback: no cycle

    def end(self) -> None:
        """Cancel all that runs on the loop, and end the loop after that. Any thread may call this. Idempotent."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.loop.stop)

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended, at most `seconds`."""
        self._thread.join(seconds)


def fine_time(loop: asyncio.AbstractEventLoop) -> float:
    """Return seconds of the clock of `loop`, or of a finer one where that is uvloop's, which counts milliseconds."""
    return time.perf_counter() if type(loop).__module__.startswith("uvloop") else loop.time()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program: run `main` to its end on a new event loop, which is uvloop unless ``ZCACTOR_LOOP=asyncio``, or
    where uvloop cannot be imported.

    Ctrl-C cancels `main`, so that ``async with zc.init()`` shuts everything down, and then raises
    ``KeyboardInterrupt``. SIGTERM, as launchers send it, cancels `main` likewise and then raises ``SystemExit`` with
    status 143, unless the program has a handler of its own for it.

    Args:
        main: the coroutine to run; not to be used afterwards.

    Returns:
        The result of `main`.

    The traceback of an error has the program's own frames, without those of zcactor that lead to an error which zcactor
    raises itself; ``python -X dev`` keeps them all. Usual mistakes get a note.

    Raises:
        TypeError: `main` is no coroutine, but the function that makes it, say.
        RuntimeError: an event loop is running in this thread already (in a notebook, await `main` directly), or the
            program's file is imported in an actor's process, or by a child of multiprocessing. `main` is closed.
        ValueError: ``ZCACTOR_LOOP`` has another value than ``auto``, ``uvloop`` or ``asyncio``, or it is ``uvloop``,
            which cannot be imported. `main` is closed.
        OSError: the machine lacks a call of the system. `main` is closed.
        Exception: the error of `main`.
        SystemExit: SIGTERM has cancelled `main`.
    """
    _check_main(main)
    open_standard()  # before the loop opens descriptors
    try:
        _refuse_imports(sys._getframe(1))
        if asyncio._get_running_loop() is not None:  # this accessor does not raise
            raise RuntimeError(
                "zc.run starts an event loop of its own, and one is running here already; await main() instead"
            )
        name = chosen_loop(loop_name())
        check_calls()  # uvloop ends the process without a reason where it lacks one
    except (RuntimeError, ValueError, CallMissing):
        main.close()
        raise
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        return _run(main, name, ours=ours)
    except BaseException as error:
        present(error)
        raise


def _run(main: Coroutine[Any, Any, T], name: str, *, ours: bool) -> T:
    if not ours:
        with asyncio.Runner(loop_factory=lambda: new_event_loop(name)) as runner:
            return runner.run(main)
    termination = _Termination()
    signals.handle(signal.SIGTERM, termination.came)
    try:
        with asyncio.Runner(loop_factory=lambda: new_event_loop(name)) as runner:
            return runner.run(termination.cancels(main))
    except asyncio.CancelledError:
        if termination.told:
            raise SystemExit(_TERMINATED) from None
        raise
    finally:
        signals.restore(signal.SIGTERM)


def _check_main(main: Any) -> None:
    """Refuse a program that is no coroutine.

    Raises:
        TypeError: `main` cannot be awaited. The message says what to write.
    """
    if issubclass(type(main), Awaitable):
        return
    if main is None:
        advice = "got None, what a plain function has returned: define it by 'async def main():'"
    elif issubclass(type(main), AsyncIterator):
        advice = f"got an {shown_class(type(main))}, because there is a yield in its function: return instead"
    elif callable(main):
        name = shown(getattr(main, "__name__", "main"))
        advice = f"got the function itself: call it, zc.run({name}())"
    else:
        advice = f"got an object of type {shown_class(type(main))}"
    raise TypeError(f"zc.run takes the coroutine that an async function makes, zc.run(main()), and {advice}")


def _refuse_imports(caller: FrameType) -> None:
    """Refuse a program that is run because another process imports its file, for a class or a function in it.

    Raises:
        RuntimeError: the file is being imported in an actor's process, or by a child of multiprocessing.
    """
    name = caller.f_globals.get("__name__")
    if caller.f_code.co_name != "<module>" or name == "__main__":
        return
    process = context.current_or_none()
    if name == "__mp_main__" or (process is not None and process.role == "worker"):
        who = "a child of multiprocessing" if name == "__mp_main__" else "an actor's process"
        raise RuntimeError(
            f"zc.run was called while {caller.f_code.co_filename} was imported in {who}, where the program must not "
            'run again: call it below  if __name__ == "__main__":'
        )


class _Termination:
    """SIGTERM for a program: it cancels the main task, once.

    A launcher may send it together with Ctrl-C's SIGINT. A second cancelling would cut the orderly end short.
    """

    def __init__(self) -> None:
        self.told = False
        """Whether the signal has cancelled the task."""
        self._task: asyncio.Task[Any] | None = None

    async def cancels(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` in the present task, which the signal cancels from here on."""
        self._task = asyncio.current_task()
        return await main

    def came(self, _number: int, _frame: FrameType | None) -> None:
        """Note the signal, in the main thread."""
        if self._task is None or self._task.done():
            raise SystemExit(_TERMINATED)
        elif not self.told and not self._task.cancelling():
            self.told = True
            self._task.cancel()
            self._task.get_loop().call_soon_threadsafe(lambda: None)  # wakes a loop that waits for events
