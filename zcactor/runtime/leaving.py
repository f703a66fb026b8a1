"""The end of a node's workers: in order where they respond, at once where they do not."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    from zcactor.context import Asking
    from zcactor.rpc.session import Session
    from zcactor.runtime.nodes import OwnWorkers
    from zcactor.runtime.sessions import Sessions

__all__ = ["end_workers"]

logger = logging.getLogger("zcactor")
RESPONSE = 1.0
"""Seconds in which a worker's loop must answer when the node ends; one that is blocked is killed without its close
hooks."""
_REAPING = 2.0
"""Seconds that killed workers get to be gone: the kernel may take its time over a process with much memory."""


async def end_workers(sessions: Sessions, requests: Asking, pool: OwnWorkers, grace: float, cause: str) -> None:
    """End every worker of `pool`, and pass on what they have printed.

    Args:
        sessions: of the agent's process.
        requests: its own.
        pool: its workers.
        grace: seconds in which idle actors are closed; those with calls running are killed. 0 kills all at once.
        cause: why, for those who ask.
    """
    if grace > 0:
        leaving = []
        for worker in list(pool.by_process.values()):
            session = sessions.used.get(worker.process)
            worker.leaving = True
            if session is not None and session.closed is None:
                leaving.append(_leave(requests, session, grace))
        await asyncio.gather(*leaving)
    pool.kill_all(cause)
    await pool.wait_all(_REAPING)
    pool.drain_output()


async def _leave(requests: Asking, session: Session, grace: float) -> None:
    try:
        async with asyncio.timeout(RESPONSE):
            await requests.ask(session, "ping")
        async with asyncio.timeout(grace):
            await requests.ask(session, "leave", grace)
    except (TimeoutError, ZcactorError) as error:
        logger.debug("a worker did not leave by itself: %s", error)
