"""Promises that processes pass to each other: promises of ours that peers hold, and stand-ins for promises of peers."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from zcactor import ids
from zcactor.api.future import packed_result
from zcactor.api.passing import OwnRef, RefHolder
from zcactor.errors import ConnectionLost, ObjectLost, RemoteError, ZcactorError, remote_of
from zcactor.exception_pickling import bare
from zcactor.marshal.packed import Packed
from zcactor.objects.locations import LostPart, as_arrived
from zcactor.rpc.call import Call
from zcactor.rpc.messages import Flags
from zcactor.rpc.services import remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zcactor.objects.locations import Locations
    from zcactor.peers.connections import Connections
    from zcactor.peers.requests import Requests
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.parts import Part
    from zcactor.rpc.session import Session

__all__ = ["Exports", "Promises"]


class Exports(MutableMapping[int, Any]):
    """The promises and actors that peers may hold, by object id. It keeps none of them alive: the leases do.

    An entry ends with its holder, by a function of C: a function of Python would be one more for each promise that is
    passed on, and `weakref.WeakValueDictionary` has two. Another holder of the same id ends the former entry, and with
    it what would happen at the former holder's end.
    """

    def __init__(self) -> None:
        self._exports: dict[int, ref[Any]] = {}

    def __setitem__(self, object_id: int, holder: Any) -> None:
        self._exports[object_id] = ref(holder, partial(self._exports.pop, object_id))

    def __getitem__(self, object_id: int) -> Any:
        holder = self._exports[object_id]()
        if holder is None:
            raise KeyError(object_id)
        return holder

    def __delitem__(self, object_id: int) -> None:
        del self._exports[object_id]

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._exports))

    def __len__(self) -> int:
        return len(self._exports)


_DRAWN: Final = 64
"""Random numbers that are drawn at a time: 256 bytes, the most that the kernel makes in one go."""


def _settle(done: asyncio.Future[None], _: Call) -> None:
    if not done.done():
        done.set_result(None)


def _stop(fetching: asyncio.Task[None], _: Call) -> None:
    fetching.cancel()


class Promises:
    """The results of calls that are passed on before they are known.

    Args:
        pid: of the process.
        tasks: run the fetching.
        connections: connect to the owners of promises.
        requests: ask the owners.
        locations: bring the bytes of results.
    """

    def __init__(
        self, pid: int, tasks: Tasks, connections: Connections, requests: Requests, locations: Locations
    ) -> None:
        self._pid = pid
        self._tasks = tasks
        self._connections = connections
        self._requests = requests
        self._locations = locations
        self._next_id = 1
        self._drawn: list[int] = []
        """Random halves of ids to come."""
        self.announce: Callable[[Call, Session], int] = lambda *_: 0
        """See `zcactor.objects.pushes.Pushes.announce`."""
        self.exports = Exports()
        """Promises (and, at the agent, actors) that peers may hold, by object id."""

    def export(self, call: Call) -> int:
        """Let peers hold the promise `call`. Returns its object id."""
        if not call.export_id:
            self._next_id += 1
            if not self._drawn:  # a system call for each would cost more than all else that is done here
                drawn = ids.bits(32 * _DRAWN)
                self._drawn = [drawn >> 32 * place & 0xFFFFFFFF for place in range(_DRAWN)]
            call.export_id = self._next_id << 32 | self._drawn.pop()
            self.exports[call.export_id] = call
        return call.export_id

    @remote(5)
    async def fetch(self, object_id: int) -> Packed:
        """The outcome of a promise of ours, still packed, once it is known.

        Raises:
            ObjectLost: no promise with that id is held here.
            Exception: the error of the call.
        """
        call = self.exports.get(object_id)
        if not isinstance(call, Call):
            raise ObjectLost(f"promise {object_id:x} is no longer held by its owner, pid {self._pid}")
        if not call.known:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            call.when_known(partial(_settle, done))
            await done
        call.retrieved = True
        if call.error is not None:
            raise bare(call.error, None)
        return Packed(*packed_result(call), call.status)

    def call_of(self, holder: Any, label: str) -> Call:
        """Return the promise that a reference names: one of ours, or a stand-in that gets the result when it is
        needed."""
        if isinstance(holder, OwnRef):
            return holder.call
        if isinstance(holder, RefHolder) and holder.taken is not None:
            return holder.taken
        owner = holder.owner if isinstance(holder, RefHolder) else b""
        call = Call(owner, self._tasks.loop, self._tasks.thread)
        call.label = label
        call.holder = holder
        call.retrieved = True
        if isinstance(holder, LostPart):
            call.fail(ObjectLost(holder.reason))
        elif holder.expected is not None and threading.get_ident() == self._tasks.thread:
            holder.expected.add(call, self.ask)
        else:
            call.fetch = self.ask
        return call

    def ask(self, call: Call) -> None:
        """Start to get the outcome of a stand-in from the promise's owner. Where it comes another way before, the
        owner is told that it need not answer."""
        if threading.get_ident() != self._tasks.thread:
            self._tasks.loop.call_soon_threadsafe(self.ask, call)
            return
        call.add_callback(partial(_stop, self._tasks.begin(self._fetch(call))))

    async def _fetch(self, call: Call) -> None:
        holder = call.holder
        try:
            sealed = await self._outcome(holder)
        except RemoteError as error:
            original: Any = remote_of(error).original
            call.fail(original if issubclass(type(original), ZcactorError) else error)
        except ConnectionLost as error:
            call.fail(ObjectLost(f"the process that owns {call.label or 'the value'} is gone: {error}"))
        except (Exception, asyncio.CancelledError) as error:  # any error: the value could not be had, or read
            call.fail(error)  # the error is raised where the promise is awaited; nobody retrieves this task's
        else:
            self.complete(call, sealed.status, sealed.payload, sealed.parts, sealed.flags)
        finally:
            del call, holder  # see `zcactor.api.future.value_of`: the error keeps this frame

    async def _outcome(self, holder: RefHolder) -> Packed:
        """The outcome of a promise of another process, from its owner, or from this process if that has taken it
        over."""
        try:
            try:
                if holder.taken is None:
                    owner = await self._connections.connect(holder.owner)
                    found = await self._requests.ask(owner, Promises.fetch, holder.id)
                    return found
            except ZcactorError:  # the owner has ended, perhaps in order
                if holder.taken is None:
                    raise
            taken = holder.taken
            if taken.error is not None:
                raise bare(taken.error, None)
            return Packed(*packed_result(taken), taken.status)
        finally:
            del holder  # see `zcactor.api.future.value_of`

    def read_result(self, call: Call) -> None:
        """Read the bytes of a result that has arrived without them; see `zcactor.rpc.hub.Hub`."""
        self._tasks.start(self._read_result(call))

    async def _read_result(self, call: Call) -> None:
        sealed = bool(call.flags & Flags.SPILLED) and len(call.payload) > 0
        found = [self._locations.bring(part, sealed=sealed and part is call.parts[0]) for part in call.parts]
        coming = [task for task in found if isinstance(task, asyncio.Task)]
        if coming:
            await asyncio.wait(coming)
        parts = [task.result() if isinstance(task, asyncio.Task) else task for task in found]
        self.complete(call, call.status, call.payload, parts, call.flags)

    def complete(self, call: Call, status: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """Complete a promise. Bytes that had no room here are read once more when the value is needed next."""
        arrived = [as_arrived(part) for part in parts]
        if not all(map(operator.is_, arrived, parts)):
            call.again = arrived, self.read_result
        call.complete(status, payload, parts, flags)
