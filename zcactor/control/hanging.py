"""Actors that do not respond: with ``on_hang="kill"`` an actor's process is pinged, and killed when it does not
answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from zcactor.errors import ZcactorError
from zcactor.logs import logger

if TYPE_CHECKING:
    from zcactor.control.actor_record import ActorRecord
    from zcactor.process.context import LocalProcess

__all__ = ["watch"]


async def watch(actor: ActorRecord, process: LocalProcess, heartbeat: float, limit: float) -> None:
    """Ping the process of an actor through its present life.

    Args:
        actor: the actor, which is alive.
        process: the head's process.
        heartbeat: seconds between an answer and the next ping.
        limit: seconds without an answer until the process is killed.
    """
    life, worker = actor.restarts, actor.worker
    while (
        worker is not None
        and actor.worker is worker
        and actor.restarts == life
        and (actor.state == "alive" or actor.moving is not None)
    ):
        try:
            async with asyncio.timeout(limit):
                await process.requests.ask(await process.connections.connect(worker.process), "ping")
        except TimeoutError:
            logger.warning("%s has not responded for %g s and is killed (on_hang='kill')", actor.label, limit)
            worker.kill(f"its process did not respond for {limit:g} s and was killed (on_hang='kill')")
            return
        except ZcactorError:  # the process has ended, and the zygote reports it
            return
        await asyncio.sleep(heartbeat)
