"""The end of the parent's runtime in a forked child, which the parent does not notice.

Only the forking thread exists in the child. Other threads may have held locks, so locks are replaced. The event loop's
epoll instance is shared with the parent, so the child leaves it alone: descriptors are closed and not unregistered,
waiters are not woken, and no task is started.
"""

from __future__ import annotations

import contextlib
import os
import threading
from queue import Empty
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from zcactor.errors import ForkedProcess
from zcactor.objectstore.forks import living_leases
from zcactor.objectstore.heap import child, reap
from zcactor.process import context
from zcactor.rpc.call import CallState

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine

    from zcactor.assembly.process import Process

__all__ = ["abandon", "watch_forks"]

_watching = False
_kept: dict[int, list[Any]] = {}
"""Leases on bytes that a child may read, by the descriptor that ends with the child."""
_inherited: list[Any] = []
"""Leases that this process's parent kept for its children: giving them back is the parent's business."""


def watch_forks() -> None:
    """Have each child that this process forks from now on let go of the runtime. Idempotent."""
    global _watching
    if not _watching:
        _watching = True
        os.register_at_fork(after_in_parent=_keep_leases, after_in_child=_let_go)


def _keep_leases() -> None:
    """Keep all leases until the child has ended, so that no owner uses memory again that the child reads."""
    process: Any = context.current_or_none()
    fd = child() if process is not None else None
    if fd is None:
        return
    _kept[fd] = living_leases()
    with contextlib.suppress(RuntimeError):  # the loop is closed, and with it every connection to give a lease back by
        process.loop.call_soon_threadsafe(_watch, process.loop, fd)


def _watch(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    loop.add_reader(fd, _ended, loop, fd)


def _ended(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    loop.remove_reader(fd)
    leases = _kept.pop(fd)  # forgotten before the number is free for the descriptor of the next child
    os.close(fd)
    del leases
    reap()


def _let_go() -> None:
    for fd, leases in _kept.items():
        os.close(fd)
        _inherited.append(leases)
    _kept.clear()
    process: Any = context.current_or_none()
    if process is not None:
        abandon(process)
        context.mark_forked(os.getppid())


class _Refusal:
    """The stand-in for a session, which refuses calls where they are made."""

    wire = SimpleNamespace(call=lambda *_: False)
    connection = SimpleNamespace(eager_limit=0)  # arguments are packed for this before they are refused

    def __init__(self, error: ForkedProcess) -> None:
        self._error = error

    def is_behind(self) -> bool:
        """See `zcactor.rpc.session.Session`: calls are refused at once."""
        return False

    def send_call(self, *_: object) -> NoReturn:
        raise self._error


def abandon(process: Process) -> None:
    """Make the parent's `process` unusable in the child: every further use raises `ForkedProcess`."""
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
        actor._lock = threading.RLock()
        actor.route = (refusal, 0)
    for session in list(process.sessions.all()):
        session.lock = threading.RLock()
        session.closed = error
        session.connection.abort()
        for call in session.pending.values():
            call.error = error
            call.state = CallState.DONE
            call.retrieved = True
    # A method may return in the child, to the loop that takes the actor's next call: the next calls are the parent's to
    # run.
    for host in process.hosts.by_index.values():
        for mailbox in host._mailboxes.values():
            queue = mailbox._queue
            try:
                while True:
                    queue.get_nowait()
            except Empty:
                queue.put(None)
