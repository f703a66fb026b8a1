"""The runtime of this process, for the few places that cannot be handed it: a decorated class, an unpickled handle.

There is at most one. `zc.init` and a worker's start set it, `zc.shutdown` clears it, a fork marks it unusable in the
child.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from zcactor.errors import ForkedProcess, NotInitialized

if TYPE_CHECKING:
    from zcactor.runtime.process import Process

__all__ = ["call_deadline", "clear_current", "current", "current_host", "current_or_none", "mark_forked", "set_current"]

call_deadline: ContextVar[float | None] = ContextVar("zcactor_call_deadline", default=None)
"""Inside a method: the loop time by which its caller wants the answer. Calls made there inherit it."""
current_host: ContextVar[Any] = ContextVar("zcactor_current_host", default=None)
"""Inside a method: the host of the actor that runs."""

_process: Any = None
_forked_from: int | None = None


def current() -> Process:
    """The running process object.

    Raises:
        NotInitialized: no `zc.init` is in effect.
        ForkedProcess: this is a child made by ``os.fork``; the parent's connections are not ours to use.
    """
    if _process is not None:
        return _process  # type: ignore[no-any-return]
    if _forked_from is not None:
        raise ForkedProcess(
            f"this process was forked from process {_forked_from}, which runs zcactor; handles, references and the "
            "store's connections work there only: start actors instead of forking, or call zc.init() here"
        )
    raise NotInitialized("zcactor is not running in this process: wrap the program in 'async with zc.init():'")


def current_or_none() -> Process | None:
    """The running process object, or None."""
    return _process  # type: ignore[no-any-return]


def set_current(process: Process) -> None:
    """Make `process` the one that `current` returns."""
    global _process, _forked_from
    _process = process
    _forked_from = None


def clear_current() -> None:
    """`current` raises from now on."""
    global _process
    _process = None


def mark_forked(parent_pid: int) -> None:
    """Called in the child of a fork: nothing of the parent's runtime may be used."""
    global _process, _forked_from
    _process = None
    _forked_from = parent_pid
