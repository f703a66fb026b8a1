"""Handlers of signals that are of one process alone: its forks have the signals' usual effect.

A handler in Python runs between two steps of the interpreter. So a fork that inherits one is not ended while it waits
in a library, and forgets a signal that comes before it runs: ``Pool.terminate`` of multiprocessing sends SIGTERM to
children that may be in either state, and then waits for their end.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["handle", "restore"]

_handlers: Final[dict[int, Callable[[int, FrameType | None], Any]]] = {}
_held = threading.local()
"""The mask of signals that a thread had before its fork."""


def handle(number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
    """Let `handler` handle a signal in this process, as ``signal.signal``, and not in its forks."""
    signal.signal(number, handler)
    _handlers[number] = handler


def restore(number: int) -> None:
    """Give a signal its usual effect again, unless the program has set another handler since."""
    if signal.getsignal(number) == _handlers.pop(number, None):
        signal.signal(number, signal.SIG_DFL)


def _before_fork() -> None:
    if _handlers:  # a signal for the child waits until the child has no handler
        _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handlers)


def _after_fork() -> None:
    mask = vars(_held).pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    for number in list(_handlers):
        restore(number)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
