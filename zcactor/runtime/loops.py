"""Which event loop: uvloop, or plain asyncio when told or where there is no uvloop."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["loop_name", "new_event_loop", "run"]

T = TypeVar("T")
_NAMES = ("uvloop", "asyncio")


def loop_name() -> str:
    """The loop chosen by ``ZCACTOR_LOOP``, default ``"uvloop"``.

    Raises:
        ValueError: it names neither ``uvloop`` nor ``asyncio``.
    """
    name = os.environ.get("ZCACTOR_LOOP", "uvloop")
    if name not in _NAMES:
        raise ValueError(f"ZCACTOR_LOOP is {name!r}; valid values: {', '.join(_NAMES)}")
    return name


def new_event_loop(name: str) -> asyncio.AbstractEventLoop:
    """A fresh loop of that kind."""
    if name == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program: `main` to its end on a fresh event loop, uvloop unless ``ZCACTOR_LOOP=asyncio``.

    Ctrl-C cancels `main`, so that ``async with zc.init()`` shuts everything down, then raises ``KeyboardInterrupt``.

    Raises:
        RuntimeError: an event loop is running in this thread already (in a notebook, await directly).
        ValueError: ``ZCACTOR_LOOP`` names no event loop.
    """
    try:
        if asyncio._get_running_loop() is not None:  # the accessor that does not raise
            raise RuntimeError(
                "zc.run starts an event loop of its own, and one is running here already; await main() instead"
            )
        name = loop_name()
    except (RuntimeError, ValueError):
        main.close()
        raise
    with asyncio.Runner(loop_factory=lambda: new_event_loop(name)) as runner:
        return runner.run(main)
