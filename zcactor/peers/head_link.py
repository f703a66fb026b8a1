"""Requests of a process to the head, whose node agent knows every node and every actor.

A worker of another node asks through its own node's agent: the head has a connection to each node, and not to each
worker.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple

from zcactor import ids
from zcactor.buggify import buggify
from zcactor.errors import (
    AuthenticationError,
    ConnectionLost,
    HeadUnavailable,
    NoSuchActor,
    ObjectLost,
    ProtocolError,
    ZcactorError,
)
from zcactor.peers.leases import Leases
from zcactor.process.cluster import HeadService, MembershipService, NodeService
from zcactor.process.epochs import Deposed
from zcactor.process.head_outage import HeadOutage
from zcactor.process.head_places import HeadPlaces
from zcactor.rpc.services import Services, method_number, remote, remote_methods
from zcactor.transport.stream.probe import Standby

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from zcactor.ids import ActorId
    from zcactor.peers.connections import Connections
    from zcactor.peers.requests import Requests
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session
    from zcactor.transport.stream.probe import Identity

__all__ = ["RELAYED", "HeadLink"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

RELAYED: Final = frozenset({
    HeadService.actors, HeadService.constructed, HeadService.get_actor, HeadService.kill, HeadService.locate,
    HeadService.nodes, HeadService.process_of, HeadService.reserve, HeadService.resources, HeadService.stop,
    HeadService.waits, MembershipService.call_back, MembershipService.find, MembershipService.silence,
})  # fmt: skip
"""The requests that a worker may make through its node's agent."""
_REPEATABLE: Final = (HeadService.constructed, HeadService.kill, HeadService.reserve, HeadService.stop)
"""The requests that change something, and that may be repeated: the head gives the first answer again."""
_FOR_CALLS: Final = (MembershipService.find, HeadService.locate, MembershipService.silence)
"""The requests by which calls find their actor, or the reason why they do not."""
_ENDING: Final = (HeadService.kill, HeadService.stop)
"""The requests that are done where there is no such actor."""
_OF_MEMBERS: Final = {function for _, function in remote_methods(MembershipService)}
_ANSWER: Final = 1.0
"""Seconds that the head has for an answer; calls that are not answered wait for it."""
_CALLED_BACK: Final = 2.0
"""Seconds that a program has to connect to a process that cannot connect to it."""
_LOOK: Final = 0.05
"""Seconds between two looks at whether this process has left a head."""


class HeadLink:
    """The requests of this process to the head. Any thread's loop may await them.

    Args:
        sessions: the table of sessions, which has the id of the head's process.
        connections: opens the connection to the head.
        requests: the requests of the process.
        tasks: the tasks of the process.
        timeout: seconds that a request waits for a head that is away.
    """

    def __init__(
        self, sessions: Sessions, connections: Connections, requests: Requests, tasks: Tasks, timeout: float
    ) -> None:
        self._sessions = sessions
        self._connections = connections
        self._requests = requests
        self._tasks = tasks
        self._timeout = timeout
        self.outage = HeadOutage(tasks.loop, timeout)
        self.places = HeadPlaces()
        """The places at which this process looks for the head, if that may be on another host."""
        self.identify: Callable[[str], Awaitable[Identity]] | None = None
        """The function that finds out which process is at a place; see `zcactor.transport.stream.probe.identify`."""
        self.epoch = 0
        """The epoch of the head with which this process is, by the head's own word; 0 where it has not said it yet."""
        self.moving = False
        """Whether the connection to the head ends because this process has found another head that leads."""

    def look_at(self, place: str) -> None:
        """Look for the head at a place, as the cluster has other hosts, and ask it for processes that cannot be
        reached."""
        self.places = HeadPlaces(place)
        self._connections.called_back = self.call_back

    @property
    def process(self) -> bytes:
        """Id of the head's process."""
        return self._sessions.head

    @property
    def is_relayed(self) -> bool:
        """Whether requests go through the agent of this process's node."""
        return self._sessions.node not in (b"", self._sessions.head)

    async def ask(self, method: Callable[[Any, *Ts], Coroutine[Any, Any, R]], *args: *Ts) -> R:
        """Call a remote method of the head. Errors of zcactor's own are raised unchanged, not as remote errors.

        Raises:
            ConnectionLost: the head has ended.
            HeadUnavailable: the head is away, and was not back in time.
        """
        asked_again: Any = method
        if asked_again in _REPEATABLE and buggify("ask again"):
            # As if an answer had been lost. It is kept until the second one is there: without its lease the head would
            # end an actor of which nobody has a handle.
            asked = [self._ask(method, args) for _ in range(2)]
            lost = await asyncio.gather(*asked, return_exceptions=True)
            answer = await self._ask(method, args)
            del lost
            return answer  # type: ignore[no-any-return]
        return await self._ask(method, args)  # type: ignore[no-any-return]

    async def _ask(self, method: Any, args: tuple[Any, ...]) -> Any:
        if self.is_relayed:
            session = await self._connections.connect(self._sessions.node)
            return await self._requests.ask_of(session, NodeService.relay, method_number(method), list(args))
        repeated, for_call = False, method in _FOR_CALLS
        until: float | None = None  # for all waits in a row; the next one is new where a head has had the request long
        clock = self._tasks.loop.time
        while True:
            if until is None and self.outage.going_on:
                until = self.outage.deadline(for_call=for_call)
            asked = math.inf
            try:
                session = await self._session(until)
                asked = clock()
                return await self._requests.ask_of(session, method, *args)
            except ConnectionLost:  # an answer of the head's own, where it is there
                if not self.outage.going_on:
                    raise
            except ObjectLost as error:  # the bytes of a long answer are lost with a head, or with the connection to it
                if not self.outage.going_on:
                    if session.closed is None:
                        raise
                    raise ConnectionLost(f"an answer of the head is lost: {error}", True) from error
            except Deposed as error:
                # The head decides no more, and has done nothing; or it takes no report of an earlier term.
                if method in _OF_MEMBERS:
                    raise
                if not self.outage.patience:
                    raise ConnectionLost(f"the head of this process decides no more: {error}", False) from error
                until = self.outage.deadline(for_call=for_call) if until is None else until
                await self._leave(session, until)
            except NoSuchActor:
                if method in _ENDING and (repeated or self.outage.patience):
                    return None  # it is dead: the head of before has ended it, and the one of now never knew it
                raise
            repeated = True
            if clock() - asked > self._timeout:
                until = None

    async def _leave(self, session: Session, until: float) -> None:
        """Wait until this process has left a head that decides no more: it looks for the next one, or that head ends.

        Raises:
            HeadUnavailable: it has not until that time of the process's loop.
        """
        clock = self._tasks.loop.time
        begun = clock()
        while self._sessions.used.get(self._sessions.head) is session and not self.outage.going_on:
            if clock() > until:
                raise HeadUnavailable(self.outage.log, clock() - begun, "head")
            await asyncio.sleep(_LOOK)

    async def _session(self, until: float | None = None) -> Session:
        """The connection to the head, once the head is there.

        Args:
            until: see `zcactor.process.head_outage.HeadOutage.end`.

        Raises:
            ConnectionLost: the head has ended, and does not come back.
            HeadUnavailable: it was not back in time.
        """
        if self.outage.going_on:
            await self._tasks.on_loop(partial(self.outage.end, until))
        return await self._connections.connect(self._sessions.head)

    async def rejoin(
        self, known: int, method: Callable[[Any, *Ts], Coroutine[Any, Any, R]], *args: *Ts
    ) -> tuple[Session, R]:
        """Call the `Membership` of a head that is away, by which this process joins again. The session may be another
        one by the time of the answer.

        Args:
            known: the greatest epoch that this process knows. A head of an earlier one is not joined.
            method, args: the call.

        Raises:
            ConnectionLost: no head of such an epoch answers at the place where it is looked for. The next attempt looks
                at the next place.
            HeadUnavailable: it decides nothing at present; likewise.
        """
        self.moving = False
        try:
            await self._look_there(known)
            session = await self._connections.connect(self._sessions.head)
            return session, await self._requests.ask_of(session, method, *args)
        except AuthenticationError as error:  # a standby answers in the place of a head
            self.places.turn()
            raise ConnectionLost(str(error.args[0]), False) from error
        except Deposed as error:  # it has just heard of the one that leads
            self.places.turn()
            raise ConnectionLost(f"the head there decides no more: {error}", False) from error
        except (ConnectionLost, HeadUnavailable):
            self.places.turn()
            raise

    async def _look_there(self, known: int) -> None:
        """Check that a head answers at the present place, where it may be at another one: the system of a stopped head
        accepts connections all the same, and the handshake waits for longer than a node lives without a head. One that
        goes on after such a stop answers, and does not know yet that another one leads.

        Raises:
            ConnectionLost, ProtocolError: it does not, or another program does.
        """
        if self.identify is None or not self.places.others:
            return
        try:
            async with asyncio.timeout(_ANSWER):
                found = await self.identify(self.places.current)
        except TimeoutError:
            raise ConnectionLost(f"the head at {self.places.current} does not answer", False) from None
        if found.epoch < known:
            raise ConnectionLost(f"the term of the head at {self.places.current} is over", False)
        self.epoch = found.epoch

    async def whereabouts(self, known: int) -> str:
        """The place of a head that leads elsewhere; empty where none is found.

        That head's term has begun after the one of the present head, and is not older than `known`, the greatest epoch
        that this process knows. A head that was stopped and goes on answers as if it led, and so may a present head at
        another of its addresses.
        """
        if self.identify is None:
            return ""
        least = max(known, self.epoch + 1)
        others = self.places.others[::-1]
        looked = {self.places.current}
        while others:
            place = others.pop()
            if place in looked:
                continue
            looked.add(place)
            try:
                async with asyncio.timeout(_ANSWER):
                    found = await self.identify(place)
            except Standby as standby:
                if standby.epoch >= least:
                    others.append(standby.leader)
            except (TimeoutError, ConnectionLost, ProtocolError):
                continue
            else:
                if found.process == self.process and found.epoch >= least:
                    return place
        return ""

    async def hold_actor(self, object_id: int) -> Callable[[], None] | None:
        """Lease the actor that the head knows by `object_id`, so that it is not stopped when its last handle is
        dropped. Returns a function that gives the lease back; None where the actor has ended.

        Raises:
            ConnectionLost: the agent has ended.
        """
        if self.is_relayed:
            session = await self._connections.connect(self._sessions.node)
            leased = await self._requests.ask_of(session, NodeService.hold_actor, object_id)
        else:
            session, is_leased = await self._lease(object_id)
            leased = object_id if is_leased else 0
        return partial(session.release, leased) if leased else None

    async def _lease(self, object_id: int) -> tuple[Session, Any]:
        until: float | None = None
        while True:
            if until is None and self.outage.going_on:
                until = self.outage.deadline()
            try:
                session = await self._session(until)
                return session, await self._requests.ask(session, Leases.lease, object_id)
            except ConnectionLost:
                if not self.outage.going_on:
                    raise

    async def locate(self, actor_id: ActorId, *, calls_wait: bool = False) -> tuple[str, tuple[bytes, int], str]:
        """Return the location of an actor: ``("alive", (process, index), "")`` or ``("dead", ..., cause)``.

        While the actor is being restarted this waits. With `calls_wait` it may return ``("restarting", ..., cause)``
        instead.

        Raises:
            HeadUnavailable: the head is away, and was not back in time.
        """
        try:
            state, process, index, cause = await self.ask(HeadService.locate, actor_id, calls_wait)
        except ConnectionLost:
            return "dead", (b"", 0), "its node agent is gone"
        return state, (process, index), cause

    async def call_back(self, process: bytes) -> bool:
        """Have the head ask `process`, to which this process cannot connect, to connect to this one. Returns whether it
        has done so: a program behind a firewall or an address translation can."""
        if self.outage.going_on or process in (self._sessions.head, self._sessions.node):
            return False
        try:
            async with asyncio.timeout(_CALLED_BACK):
                own = ids.ProcessId(self._sessions.process)
                done = await self.ask(MembershipService.call_back, ids.ProcessId(process), own)
        except (TimeoutError, ZcactorError):
            return False
        return done

    @remote(8)
    async def connect_to(self, process: bytes) -> bool:
        """Connect to a process that cannot connect to this one. Returns whether it has answered."""
        try:
            session = await self._connections.connect(process)
            await self._requests.ask(session, Services.ping)
        except (ZcactorError, OSError):  # OSError: no descriptor is left
            return False
        return True

    async def silence_of(self, process: bytes) -> tuple[float, str]:
        """Return for how many seconds the node of `process` has been silent towards the head, and the address of
        `process`; see `zcactor.control.membership.Membership.silence`.

        Raises:
            ConnectionLost: the head has ended, or does not answer within a second.
        """
        try:
            async with asyncio.timeout(_ANSWER):
                silence, address = await self.ask(MembershipService.silence, ids.ProcessId(process))
        except (TimeoutError, HeadUnavailable):
            raise ConnectionLost("the cluster's head does not answer") from None
        return silence, address
