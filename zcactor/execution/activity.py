"""The activity of a process: the methods that its actors run and for how long, the calls that wait, the calls to others
that are awaited, and the bytes in its store."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from zcactor.errors import ConnectionLost, ProtocolError, RemoteError
from zcactor.execution.watchdog import THREADED, open_calls
from zcactor.rpc.services import remote

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.execution.runners import Hosts
    from zcactor.observe.stats import Stats
    from zcactor.process.context import LocalProcess
    from zcactor.process.sessions import Sessions
    from zcactor.rpc.incoming import Incoming

__all__ = ["Activity", "ActivityService", "ActorActivity", "Awaited", "Running", "ask_activities"]

_NAMED: Final = 10
"""Methods of an actor that are told."""
_AWAITED: Final = 100
"""Awaited calls of a process that are told."""


class Running(msgspec.Struct, frozen=True):
    """A call that an actor runs."""

    method: str
    seconds: float | None
    """Seconds since it was first seen running, which is up to a quarter of ``warn_after`` late; None where the setting
    switches that off."""
    blocks: bool = False
    """Whether it runs in a thread, which it blocks where it waits."""


class ActorActivity(msgspec.Struct, frozen=True):
    """The calls of one actor."""

    actor_id: str
    """32 hexadecimal digits."""
    label: str
    running: list[Running]
    """The calls that it runs, those that have run longest first."""
    waiting: int
    """The number of calls that have come and wait until they may start."""
    waited: float | None
    """Seconds that the first of them has waited whose arguments are here; None as for `Running.seconds`."""


class Awaited(msgspec.Struct, frozen=True):
    """A call to an actor elsewhere, whose result somebody in the process awaits."""

    actor_id: str
    label: str
    """The actor's and the method's, as in ``"Scaler(7a3f0c11).scale"``."""
    process: bytes
    """The actor's process."""
    blocks: bool = False
    """Whether a thread is blocked until it ends, as by ``result()``; else a task awaits it."""


class Activity(msgspec.Struct, frozen=True):
    """The activity of one process."""

    actors: list[ActorActivity]
    awaited: list[Awaited]
    store_used: int
    """Bytes of living objects in its store."""


class Active(Protocol):
    """The parts of a process that its activity is taken from."""

    hosts: Hosts
    sessions: Sessions
    loop: asyncio.AbstractEventLoop

    def stats(self) -> Stats:
        """The figures of the process."""


class ActivityService:
    """The activity of a process, for its peers."""

    def __init__(self, process: Active) -> None:
        self._process = process

    @remote(32)
    async def activity(self) -> Any:
        """The activity, as an `Activity` in the types of JSON, and bytes."""
        return msgspec.to_builtins(self.now(), builtin_types=(bytes,))

    def now(self) -> Activity:
        """The activity at this moment. On the loop's thread."""
        process = self._process
        watchdog, now = process.hosts.watchdog, time.monotonic()
        seen = {} if watchdog is None else watchdog.seen
        calls: dict[int, list[Incoming]] = {}
        for call in open_calls(process.sessions):
            if not call.cancelled:
                calls.setdefault(id(call.host), []).append(call)
        actors = []
        for host in process.hosts.actors():
            running: list[Running] = []
            waiting, waited = 0, None
            for call in calls.get(id(host), ()):
                since = now if watchdog is None else seen.get((id(call.session), call.id, call.started), now)
                seconds = None if watchdog is None else now - since
                if call.started:
                    method = host.interface.methods[call.code]
                    running.append(Running(method.name, seconds, method.kind in THREADED))
                    continue
                waiting += 1
                if seconds is not None and not call.blockers:
                    waited = max(waited or 0.0, seconds)
            running.sort(key=lambda each: -(each.seconds or 0.0))
            actor_id = "" if host.info is None else host.info.actor_id.hex()
            actors.append(ActorActivity(actor_id, host.label, running[:_NAMED], waiting, waited))
        awaited = [
            Awaited(
                actor.actor_id.hex(), f"{actor.label}.{call.label.rpartition('.')[2]}", actor.location[0],
                bool(call.blocked) or (waiter is not None and waiter.get_loop() is not process.loop),
            )
            for actor in list(process.sessions.remotes.values())
            for call in list(actor.unfinished)
            if (waiter := call.waiter) is not None or call.blocked
        ]  # fmt: skip
        return Activity(actors, awaited[:_AWAITED], process.stats().store_used)


async def ask_activities(local: LocalProcess, processes: Iterable[bytes], timeout: float) -> dict[bytes, Activity]:
    """The activities of other processes, which `local` asks, by process. Those that do not answer within `timeout`
    seconds are left out: their loops are blocked, they have ended, or they are older than the question.

    Cancelling ends the questions.
    """
    found: dict[bytes, Activity] = {}

    async def ask(process: bytes) -> None:
        try:
            async with asyncio.timeout(timeout):
                told = await local.requests.ask(await local.connections.connect(process), ActivityService.activity)
            found[process] = msgspec.convert(told, Activity)
        except (TimeoutError, ConnectionLost, RemoteError, ProtocolError, msgspec.ValidationError):
            return

    await asyncio.gather(*(ask(process) for process in set(processes)))
    return found
