"""Promises that processes pass to each other: those of ours that peers hold, and stand-ins for those of others."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any

from zcactor import ids
from zcactor.errors import ConnectionLost, ObjectLost, RemoteError, ZcactorError
from zcactor.future import OwnRef, RefHolder
from zcactor.rpc.call import Call
from zcactor.rpc.messages import Flags
from zcactor.runtime.locations import LostPart

if TYPE_CHECKING:
    from zcactor.runtime.connections import Connections
    from zcactor.runtime.locations import Locations
    from zcactor.runtime.requests import Requests
    from zcactor.runtime.tasks import Tasks

__all__ = ["Promises"]


class Promises:
    """The results of calls that are passed on before they are known.

    Args:
        tasks: gets them.
        connections: to their owners.
        requests: asks these.
        locations: brings the bytes of results.
    """

    def __init__(self, tasks: Tasks, connections: Connections, requests: Requests, locations: Locations) -> None:
        self._tasks = tasks
        self._connections = connections
        self._requests = requests
        self._locations = locations
        self._next_id = 1
        self.exports: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Promises (and, at the agent, actors) that peers may hold, by object id."""

    def export(self, call: Call) -> int:
        """Let peers hold the promise `call`; returns its object id."""
        if not call.export_id:
            self._next_id += 1
            call.export_id = self._next_id << 32 | ids.bits(32)
            self.exports[call.export_id] = call
        return call.export_id

    def call_of(self, holder: Any, label: str) -> Call:
        """The promise that a reference names: one of ours, or a stand-in that gets the result when it is needed."""
        if isinstance(holder, OwnRef):
            return holder.call
        owner = holder.owner if isinstance(holder, RefHolder) else b""
        call = Call(owner, self._tasks.loop, self._tasks.thread)
        call.label = label
        call.holder = holder
        call.retrieved = True
        if isinstance(holder, LostPart):
            call.fail(ObjectLost(holder.reason))
        else:
            call.fetch = lambda c: self._tasks.start(self._fetch(c))
        return call

    async def _fetch(self, call: Call) -> None:
        holder = call.holder
        try:
            owner = await self._connections.connect(holder.owner)
            sealed = await self._requests.ask(owner, "fetch", holder.id)
        except RemoteError as error:
            call.fail(error.original if isinstance(error.original, ZcactorError) else error)
        except ConnectionLost as error:
            call.fail(ObjectLost(f"the process that owns {call.label or 'the value'} is gone: {error}"))
        except (Exception, asyncio.CancelledError) as error:  # of any kind: its value could not be had, or read
            call.fail(error)  # who awaits the promise looks at it; nobody looks at this task
        else:
            call.complete(sealed.status, sealed.payload, sealed.parts, sealed.flags)

    def read_result(self, call: Call) -> None:
        """See `zcactor.rpc.hub.Hub`."""
        self._tasks.start(self._read_result(call))

    async def _read_result(self, call: Call) -> None:
        sealed = bool(call.flags & Flags.SPILLED) and len(call.payload) > 0
        found = [self._locations.bring(part, sealed=sealed and part is call.parts[0]) for part in call.parts]
        coming = [task for task in found if isinstance(task, asyncio.Task)]
        if coming:
            await asyncio.wait(coming)
        parts = [task.result() if isinstance(task, asyncio.Task) else task for task in found]
        call.complete(call.status, call.payload, parts, call.flags)
