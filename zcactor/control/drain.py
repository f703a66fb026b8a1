"""The end of workers, and of an actor among others in one: in order where they respond, at once where they do not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from zcactor.control.head_log import Deposed
from zcactor.errors import ConnectionLost, HeadUnavailable, ProtocolError, ZcactorError
from zcactor.logs import logger
from zcactor.process.cluster import WorkerService
from zcactor.rpc.services import Services

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from zcactor.control.actor_record import ActorRecord
    from zcactor.control.head_log import Change
    from zcactor.control.node_table import OwnWorkers
    from zcactor.control.recorder import HeadRecorder
    from zcactor.process.context import Asking, LocalProcess
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["decide_end", "discard", "discard_others", "end_workers"]

T = TypeVar("T")

RESPONSE = 1.0
"""Seconds in which a worker's loop must answer when the node ends; one that is blocked is killed without its close
hooks."""
_REAPING = 2.0
"""Seconds that killed workers get to end: the kernel may take its time over a process with much memory."""
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 5.0
"""Seconds between two attempts to reach a process, at first and at last."""


async def end_workers(sessions: Sessions, requests: Asking, pool: OwnWorkers, grace: float, cause: str) -> None:
    """End every worker of `pool`, and pass on their output.

    Args:
        sessions: of the agent's process.
        requests: of the agent's process.
        pool: the agent's workers.
        grace: seconds in which idle actors are closed and exit functions run; actors with running calls are killed.
            0 kills all at once.
        cause: the reason that callers of the actors get.
    """
    if grace > 0:
        deadline = asyncio.get_running_loop().time() + grace
        leaving, asked = [], []
        for worker in list(pool.by_process.values()):
            session = sessions.used.get(worker.process)
            worker.leaving = True
            if session is not None and session.closed is None:
                leaving.append(_leave(requests, session, grace))
                asked.append(worker.ended)
        left = await asyncio.gather(*leaving)
        ending = [ended for ended, leaves in zip(asked, left, strict=True) if leaves]
        if ending:
            await asyncio.wait(ending, timeout=max(deadline - asyncio.get_running_loop().time(), 0.0))
    pool.kill_all(cause)
    await pool.wait_all(_REAPING)
    pool.drain_output()


async def discard(process: LocalProcess, recorder: HeadRecorder, worker: WorkerRecord, index: int) -> None:
    """End one actor of a shared process at once. A process that cannot be reached is asked again until it ends: the
    actor would live on there.

    Args:
        process: the head's process.
        recorder: gives the order.
        worker: the shared process.
        index: index of the actor in that process.
    """
    await _order(process, recorder, worker, WorkerService.discard, index)


async def discard_others(
    process: LocalProcess, recorder: HeadRecorder, worker: WorkerRecord, indices: Sequence[int]
) -> None:  # fmt: skip
    """End the actors of a shared process at once that are not at these indices. Otherwise as `discard`."""
    await _order(process, recorder, worker, WorkerService.discard_others, list(indices))


async def _order(
    process: LocalProcess, recorder: HeadRecorder, worker: WorkerRecord,
    method: Callable[[Any, T, int], Coroutine[Any, Any, None]], which: T,
) -> None:  # fmt: skip
    pause = _FIRST_PAUSE
    while not worker.ended.done():
        try:
            session = await process.connections.connect(worker.process)
            await recorder.order(process.requests, session, method, which)
        except Deposed as error:
            logger.debug("a later head decides about an actor: %s", error)
            return
        except (ConnectionLost, ProtocolError) as error:
            logger.debug("actors of worker %d are not discarded yet: %s", worker.pid, error)
            await asyncio.wait([worker.ended], timeout=pause)
            pause = min(2 * pause, _LAST_PAUSE)
        else:
            return


async def decide_end(
    recorder: HeadRecorder, tasks: Tasks, actor: ActorRecord, changes: Sequence[Change], end: Callable[[], None],
    timeout: float,
) -> bool:  # fmt: skip
    """Record that an actor is to end, as somebody asks for it, and then call `end`: also where the asker has gone away.
    The actor is not restarted meanwhile.

    Returns whether that is done within `timeout` seconds. Otherwise the log may take it later, which calls `end`.

    Raises:
        HeadUnavailable: the log does not take it; `end` is not called.
        Deposed: another head decides.
    """

    async def decide() -> ZcactorError | None:
        actor.doomed += 1
        try:
            await recorder.record(*changes)
        except (HeadUnavailable, Deposed) as error:
            return error
        finally:
            actor.doomed -= 1
            actor.wake()
        end()
        return None

    deciding = tasks.begin(decide())
    decided, _ = await asyncio.wait([deciding], timeout=timeout)
    refusal = deciding.result() if decided else None
    if refusal is not None:
        raise refusal
    return bool(decided)


async def _leave(requests: Asking, session: Session, grace: float) -> bool:
    """Have a worker close its idle actors and end. Returns whether it ends by itself."""
    try:
        async with asyncio.timeout(RESPONSE):
            await requests.ask(session, Services.ping)
        async with asyncio.timeout(grace):
            await requests.ask(session, WorkerService.leave, grace)
    except (TimeoutError, ZcactorError) as error:
        logger.debug("a worker did not leave by itself: %s", error)
        return False
    return True
