"""The choice of the event loop: uvloop, or plain asyncio."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["fine_time", "loop_name", "new_event_loop", "run"]

T = TypeVar("T")
_NAMES = ("uvloop", "asyncio")


def loop_name() -> str:
    """Return the name of the event loop in ``ZCACTOR_LOOP``, by default ``"uvloop"``.

    Raises:
        ValueError: ``ZCACTOR_LOOP`` is neither ``uvloop`` nor ``asyncio``.
    """
    name = os.environ.get("ZCACTOR_LOOP", "uvloop")
    if name not in _NAMES:
        raise ValueError(f"ZCACTOR_LOOP is {name!r}; valid values: {', '.join(_NAMES)}")
    return name


def new_event_loop(name: str) -> asyncio.AbstractEventLoop:
    """Make a new event loop: uvloop for ``"uvloop"``, otherwise asyncio."""
    if name == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def fine_time(loop: asyncio.AbstractEventLoop) -> float:
    """Return seconds of the clock of `loop`, or of a finer one where that is uvloop's, which counts milliseconds."""
    return time.perf_counter() if type(loop).__module__.startswith("uvloop") else loop.time()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program: run `main` to its end on a new event loop, which is uvloop unless ``ZCACTOR_LOOP=asyncio``.

    Ctrl-C cancels `main`, so that ``async with zc.init()`` shuts everything down, and then raises
    ``KeyboardInterrupt``.

    Args:
        main: the coroutine to run; not to be used afterwards.

    Returns:
        The result of `main`.

    Raises:
        RuntimeError: an event loop is running in this thread already (in a notebook, await `main` directly). `main` is
            closed.
        ValueError: ``ZCACTOR_LOOP`` is neither ``uvloop`` nor ``asyncio``. `main` is closed.
        Exception: the error of `main`.
    """
    try:
        if asyncio._get_running_loop() is not None:  # this accessor does not raise
            raise RuntimeError(
                "zc.run starts an event loop of its own, and one is running here already; await main() instead"
            )
        name = loop_name()
    except (RuntimeError, ValueError):
        main.close()
        raise
    with asyncio.Runner(loop_factory=lambda: new_event_loop(name)) as runner:
        return runner.run(main)
