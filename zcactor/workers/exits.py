"""The last steps of a worker's process, as those of an interpreter: threads end, exit functions run, files are written.

The process never returns to the frames of the zygote, whose exit functions are not its own, so it takes these steps by
itself. A step that hangs (a full pipe, a thread that never ends) is left behind in a thread, and the next one begins.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import stat
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["begin_to_flush", "forget_exit_functions", "run_exit_functions"]

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
"""The types of the files that hold back what was written to them."""
_FOR_FILES: Final = 0.2
_FOR_THREADS: Final = 0.6
"""Parts of the time that is left: for files that are written, before the exit functions and behind them; and for
threads that end."""


def forget_exit_functions() -> None:
    """Forget the exit functions and finalizers of the process that this one was forked from: they would remove what is
    not this process's. Those that are registered from now on are run by `run_exit_functions`."""
    finalize: Any = weakref.finalize
    atexit._clear()
    finalize._registry.clear()
    finalize._registered_with_atexit = False  # the next finalizer registers their exit function again
    atexit.register(logging.shutdown)


def run_exit_functions(until: float) -> None:
    """Do what an interpreter does at its end: wait for threads that are no daemons and for executors, finalize what
    nobody refers to, call the exit functions, and write what files have buffered.

    The memory is left as it is: arrays of this process may be read by others, and by its own threads. Errors are
    printed.

    Args:
        until: the time (`time.monotonic`) at which the process is killed.
    """
    left = max(until - time.monotonic(), 0.0)
    # Before the collector, which may close the bytes of a text file before its text is written.
    _within(left * _FOR_FILES, _flush_files)
    _within(left * _FOR_THREADS, _end_threads)
    gc.collect()
    try:
        atexit._run_exitfuncs()
    finally:
        _within(left * _FOR_FILES, _flush_files)


def begin_to_flush() -> None:
    """Begin to write what the open files of this process have buffered, in a thread: a full pipe takes for ever."""
    _within(0.0, _flush_files)


def _within(seconds: float, step: Callable[[], None]) -> None:
    """Run a step in a thread, and wait for its end, but no longer than this."""
    thread = threading.Thread(target=step, name=f"zcactor {step.__name__}", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system has no more threads
        step()
        return
    thread.join(seconds)


def _end_threads() -> None:
    for function in reversed(threading._threading_atexits):  # type: ignore[attr-defined]  # those of executors
        try:
            function()
        except Exception:  # user code may have registered it: its error is printed, and the others are called
            sys.__excepthook__(*sys.exc_info())
    main = threading.main_thread()
    while threads := [
        each for each in threading.enumerate() if each.is_alive() and not each.daemon and each is not main
    ]:
        for thread in threads:  # which may begin others
            thread.join()


def _flush_files() -> None:
    """Write what the open files of this process have buffered. Errors are printed."""
    files = [each for each in gc.get_objects() if issubclass(type(each), _WRITERS)]
    for file in sorted(files, key=_turn):
        try:
            if not _is_detached(file) and not file.closed:
                file.flush()
        except Exception:  # a full disk, a pipe without a reader, or a class of the user's, which may raise anything
            sys.__excepthook__(*sys.exc_info())


def _turn(file: Any) -> tuple[bool, bool]:
    """Files that may block for ever come last, and each text before the bytes that it goes to."""
    try:
        may_block = not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except Exception:  # the file has no descriptor, or is of a class of the user's, which may raise anything
        may_block = True
    return may_block, not issubclass(type(file), io.TextIOBase)


def _is_detached(file: Any) -> bool:
    base = next(each for each in _WRITERS if issubclass(type(file), each))
    try:
        base.closed.__get__(file)
    except ValueError:
        return True
    return False
