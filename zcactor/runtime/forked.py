"""What a forked child does with its copy of the parent's runtime: nothing, and so that the parent does not notice.

Only the forking thread exists in the child. Locks may have been held by the others, so they are replaced; the event
loop's epoll instance is shared with the parent, so it is not touched: descriptors are closed and not unregistered,
waiters are not woken, and no task is started.
"""

from __future__ import annotations

import os
import threading
from queue import Empty
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from zcactor import context
from zcactor.errors import ForkedProcess
from zcactor.rpc.protocol import CallState

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from zcactor.runtime.process import Process

__all__ = ["abandon", "watch_forks"]

_watching = False


def watch_forks() -> None:
    """From now on a forked child of this process lets go of its runtime, if it has one then. Idempotent."""
    global _watching
    if not _watching:
        _watching = True
        os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    process: Any = context.current_or_none()
    if process is not None:
        abandon(process)
        context.mark_forked(os.getppid())


class _Refusal:
    """In the place of a session: calls are refused where they are made."""

    wire = None
    connection = SimpleNamespace(eager_limit=0)  # what arguments are packed for before they are refused

    def __init__(self, error: ForkedProcess) -> None:
        self._error = error

    def send_call(self, *_: object) -> NoReturn:
        raise self._error


def abandon(process: Process) -> None:
    """Make `process`, the parent's, unusable: every further use raises `ForkedProcess`. Called in the child."""
    error = ForkedProcess(
        f"this process was forked from process {os.getppid()}, which runs zcactor; its handles and references work "
        "there only: start actors instead of forking, or call zc.init() here"
    )

    def refuse(coroutine: Coroutine[Any, Any, Any]) -> NoReturn:
        coroutine.close()
        raise error

    process.tasks.start = refuse  # type: ignore[method-assign]
    process.endpoint.abandon()
    process.trimmer.abandon()
    if process.registrar is not None:
        process.registrar.abandon()
    refusal: Any = _Refusal(error)
    for actor in list(process.sessions.remotes.values()):
        actor._lock = threading.Lock()
        actor.session = refusal
    for session in list(process.sessions.all()):
        session.lock = threading.Lock()
        session.closed = error
        session.connection.abort()
        for call in session.pending.values():
            call.error = error
            call.state = CallState.DONE
            call.retrieved = True
    # A method may return in the child, to the loop that takes the actor's next call: those are the parent's to run.
    for host in process.hosts.values():
        for mailbox in host._mailboxes.values():
            queue = mailbox._queue
            try:
                while True:
                    queue.get_nowait()
            except Empty:
                queue.put(None)
