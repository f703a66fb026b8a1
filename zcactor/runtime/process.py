"""One process of a program: its store, its connections, the actors it hosts and those it knows of.

Driver, node agent and workers are all made of this; they differ in which system actors they host. A system actor is an
ordinary one with a reserved index: every control operation (lease an object, get a promise, make an actor) is a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
import threading
import weakref
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, cast

from zcactor import ids
from zcactor.buggify import dawdle
from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError, RemoteError, ZcactorError
from zcactor.future import ObjectRef, OwnRef, RefHolder, failure_of
from zcactor.marshal import Marshaller, arrays
from zcactor.objectstore.copies import CopyCounter
from zcactor.objectstore.placement import Placements
from zcactor.rpc.call import Call
from zcactor.rpc.counters import new_counters
from zcactor.rpc.messages import PROTOCOL_VERSION, Flags, Hello, Status
from zcactor.rpc.session import Session
from zcactor.runtime.adoption import Adoptions
from zcactor.runtime.endpoints import address_of
from zcactor.runtime.host import ActorHost
from zcactor.runtime.locations import Locations, LostPart
from zcactor.runtime.origins import Origins
from zcactor.runtime.parting import Parting
from zcactor.runtime.place import Place
from zcactor.runtime.registering import Registrar
from zcactor.runtime.resolver import Resolver
from zcactor.runtime.system import SystemActor, system_interface
from zcactor.runtime.threads import Threads
from zcactor.runtime.trimming import Trimmer
from zcactor.runtime.twins import Twins
from zcactor.runtime.unseen import Unseen
from zcactor.runtime.vigil import Vigil
from zcactor.runtime.watchdog import Watchdog
from zcactor.transport.loopback import loopback_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from zcactor.config import Config
    from zcactor.handle import RemoteActor
    from zcactor.interface import Interface
    from zcactor.objectstore.store import Block, Store
    from zcactor.rpc.incoming import Incoming
    from zcactor.runtime.threads import Runner
    from zcactor.transport.base import Connection, Endpoint
    from zcactor.transport.os_process import OsProcess
    from zcactor.transport.verbs.connection import VerbsConnection

__all__ = ["Process"]

T = TypeVar("T")

logger = logging.getLogger("zcactor")
SYSTEM_INDEX = 0
"""Index of the `SystemActor` in every process."""
AGENT_INDEX = 1
"""Index of the node agent's actor in its process."""
MEMBERSHIP_INDEX = 2
"""Index of the `zcactor.runtime.membership.Membership` in the head's process."""
FIRST_ACTOR_INDEX = 2
_DELIVERY_TIMEOUT = 5.0
"""Seconds that a peer has to take in the last answers of an actor that stops."""
_HEADS_ANSWER = 1.0
"""Seconds in which the head is to say what it knows; calls that nobody answers wait for it."""
_ID = re.compile(r"(?:process )?(?<![/\w])([0-9a-f]{32})(?![.\w])(?:@([^\s,;]*[^\s,;:.]))?")
"""How transports name a process in their messages."""
_NAMED = 3
"""Actors by which a message names a process."""
_REMEMBERED = 1_000
"""Processes of which is remembered what they said of themselves."""


class Process:
    """The runtime of one process. Everything runs on `loop` unless it says otherwise.

    Args:
        process: 16 random bytes that name it.
        role: ``"driver"``, ``"agent"`` or ``"worker"``.
        config: the settings.
        loop: its event loop.
        store: its arena and the objects in it.
        endpoint: how peers reach it.
        place: where it runs; None asks the system.
        crew: runs the plain methods of all actors; None gives each actor threads of its own, and shared actors those
            of `Threads`.
    """

    def __init__(
        self,
        process: bytes,
        role: str,
        config: Config,
        loop: asyncio.AbstractEventLoop,
        store: Store,
        endpoint: Endpoint,
        place: Place | None = None,
        crew: Runner | None = None,
    ) -> None:
        self.process = process
        self.role = role
        self.config = config
        self.loop = loop
        self.thread = threading.get_ident()
        self.store = store
        self.endpoint = endpoint
        self.place = place or Place.here()
        self.crew = crew
        self.copies = CopyCounter()
        self.counters = new_counters()
        self.marshaller = Marshaller(
            store, self.copies, self.counters, config.eager_limit, seals=endpoint.seals_payloads
        )
        self.trimmer = Trimmer(store.heap, loop, config.store_keep_nbytes)
        self.placements = Placements(store, max(config.store_keep_nbytes, store.capacity // 8))
        self.locations = Locations(self)
        self.resolver = Resolver(self)
        self.import_region = self.resolver.import_region
        self.adoptions = Adoptions(self)
        self.origins = Origins()
        self.machine = ""
        """What names this host for those who may map our arena, see `zcactor.runtime.nodes.own_machine`; empty
        where nobody is to."""
        self.registrar: Registrar | None = None
        """Registers memory with the network card ahead of need, once a peer is reached by RDMA."""
        self.last_system_index = MEMBERSHIP_INDEX if role == "agent" else SYSTEM_INDEX
        self.agent: bytes = process if role == "agent" else b""
        """Process id of the head's node agent, which knows every actor; of the only one, where there is one node."""
        self.namespace = config.namespace
        self.share = self.marshaller.share
        self.dtype_codes, self.dtypes = arrays.known_codes, arrays.known_dtypes
        self.hosts: dict[int, ActorHost] = {}
        self.remotes: weakref.WeakValueDictionary[bytes, RemoteActor] = weakref.WeakValueDictionary()
        """Actors that handles in this process stand for, by actor id."""
        self.exports: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Promises (and, at the agent, actors) that peers may hold, by object id."""
        self.sessions: dict[bytes, Session] = {}
        """The connection used to reach each peer."""
        self.revive: Callable[[int], Any] = lambda _: None
        """The agent's way to find an actor that nobody holds at the moment."""
        self.on_session_lost: Callable[[Session], None] | None = None
        self.closing = False
        self.leaving = False
        """Whether it ends soon, actors and all. They may live on elsewhere: the node agent knows."""
        self._gone: dict[bytes, Hello] = {}
        """What processes said of themselves whose connections have ended."""
        self._all: dict[Session, None] = {}
        self._connecting: dict[bytes, asyncio.Task[Session]] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._watchers: dict[Session, weakref.WeakKeyDictionary[RemoteActor, None]] = {}
        self._session_numbers = count(1)
        self._next_index = FIRST_ACTOR_INDEX
        self._next_export = 1
        self._hello = Hello(PROTOCOL_VERSION, process, self.place.pid, self.place.host, sys.version.split()[0], role)
        self.twins = Twins(self)
        self.threads = Threads("shared actors")
        self.vigil = None if role == "agent" else Vigil(self)
        """Notices peers on other hosts that are silent."""
        self.watchdog = Watchdog(self, config.warn_after) if config.warn_after else None
        self.unseen = Unseen(loop, failure_of)
        self.parting: Parting | None = None
        """Closes idle connections, once there are any by RDMA."""
        self._system = system_interface()
        self.system = SystemActor(self)
        self.add_host(SYSTEM_INDEX, SystemActor, "system", interface=self._system).adopt(self.system)

    def use_numpy(self) -> Any:
        """NumPy allocates in the store from now on, in this context and those made from it. Returns the handler that
        was set, for `zcactor.objectstore.heap.use_handler`."""
        return self.store.heap.use(self.config.store_min_nbytes)

    # ---------------------------------------------------------------- tasks

    def start_task(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run `coroutine` in a task that this object keeps; from any thread. A failure is logged."""
        if threading.get_ident() != self.thread:
            self.loop.call_soon_threadsafe(self.start_task, coroutine)
            return
        self.begin(coroutine)

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """The same on the loop's thread, for somebody who wants the result."""
        task = self.loop.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self.closing:
            logger.error("a background task failed", exc_info=error)

    # ---------------------------------------------------------------- hosts

    def add_host(
        self, index: int, actor_class: type, label: str, options: Mapping[str, Any] | None = None, info: Any = None,
        interface: Interface | None = None,
    ) -> ActorHost:  # fmt: skip
        """Make room for an actor; `ActorHost.construct` or `adopt` gives it its instance."""
        host = self.hosts[index] = ActorHost(self, index, actor_class, label, options or {}, info, interface)
        if index > self.last_system_index and self.watchdog is not None:
            self.watchdog.start()
        return host

    def take_index(self) -> int:
        """A fresh actor index."""
        self._next_index += 1
        return self._next_index - 1

    # ---------------------------------------------------------------- sessions

    def all_sessions(self) -> Iterable[Session]:
        """Every open connection."""
        return self._all

    def accepted(self, connection: Connection) -> None:
        """A peer has connected."""
        session = self._start_session(connection, connection.peer.process)
        self.sessions.setdefault(session.peer_process, session)
        self.twins.settle(session)

    def _start_session(self, connection: Connection, opener: bytes) -> Session:
        if connection.kind == "verbs" and self.registrar is None:
            extents = cast("VerbsConnection", connection).extents
            extents.copied = partial(self.copies.count, "destination cannot be registered")
            extents.brought = partial(self.copies.count, "owner cannot register its memory")
            self.registrar = Registrar(self.store.heap, self.loop, extents)
            if self.config.verbs_idle_timeout:
                self.parting = Parting(self, self.config.verbs_idle_timeout)
        twin = self.twins.other(connection.peer.process, opener)
        number = next(self._session_numbers)
        session = Session(self, connection, self.loop, opener=opener, twin=twin, number=number)
        self._all[session] = None
        session.start()
        self.adoptions.met(session)
        if self.vigil is not None:
            self.vigil.begun(session)
        return session

    async def connect(self, process: bytes) -> Session:
        """The connection to `process`, opened on first use and shared by all callers.

        Raises:
            ConnectionLost: it does not answer.
        """
        if threading.get_ident() != self.thread:
            return await self._elsewhere(self.connect(process))
        session = self.sessions.get(process)
        if session is not None and session.closed is None:
            return session
        task = self._connecting.get(process)
        if task is None:
            task = self._connecting[process] = self.loop.create_task(self._open(process))
            task.add_done_callback(partial(self._connected, process))
        return await asyncio.shield(task)

    def _connected(self, process: bytes, task: asyncio.Task[Session]) -> None:
        self._connecting.pop(process, None)
        if not task.cancelled():
            task.exception()  # seen: those who have waited for it may all have been cancelled

    async def _elsewhere(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await on our own loop what was asked for on another thread's."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    async def _open(self, process: bytes) -> Session:
        if process == self.process:
            arena = (self.store.arena.address, self.store.arena.nbytes)
            ours, others = loopback_pair(
                self.loop, processes=(process, process), arenas=(arena, arena), recv_depth=self.config.recv_depth,
                eager_limit=self.config.eager_limit, pid=self.place.pid,
            )  # fmt: skip
            self._start_session(others, process)
            session = self._start_session(ours, process)
        else:
            try:
                await dawdle("connect")
                connection = await self.endpoint.connect(process.hex())
            except (ConnectionLost, ProtocolError) as error:
                theirs = self.sessions.get(process)  # the peer may have connected meanwhile
                if isinstance(error, ProtocolError) or theirs is None or theirs.closed is not None:
                    error.args = (self._named(str(error.args[0])), *error.args[1:])
                    raise
                return theirs
            session = self._start_session(connection, self.process)
        if session.twin is None:
            self.sessions[process] = session
        self.twins.settle(session)
        return self.sessions[process]

    def park(self, reader: OsProcess, session: Session, blocks: Mapping[int, Block]) -> None:
        """See `zcactor.rpc.hub.Hub`."""
        hello = session.peer_hello
        number = (session.peer_process, session.number) if hello is None else hello.session  # nothing will name that
        self.store.parking.park(reader, (session.peer_process, number), blocks)

    def outlived(self, session: Session) -> None:
        """See `zcactor.rpc.hub.Hub`."""
        self.adoptions.let_go(session.peer_process)

    def describe(self, process: bytes) -> str:
        """A process as messages name it: by the actors in it, by what it said of itself, or else by as many digits as
        ``zcactor status`` shows of a node."""
        labels = sorted(remote.label for remote in list(self.remotes.values()) if remote.location[0] == process)
        if labels:
            more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
            return f"the process of {', '.join(labels[:_NAMED])}{more}"
        session = self.sessions.get(process)
        hello = session.peer_hello if session is not None else self._gone.get(process)
        what = "node agent" if process == self.agent else "process"
        if hello is None:
            return f"{what} {process.hex()[:8]}"
        return f"{what if hello.role == 'worker' else hello.role} {process.hex()[:8]}, pid {hello.pid} on {hello.host}"

    def _named(self, text: str) -> str:
        """`text` of a transport, which knows processes by their ids, as users can read it."""

        def name(match: re.Match[str]) -> str:
            place = f" at {match[2]}" if match[2] else ""
            return self.describe(bytes.fromhex(match[1])) + place

        return _ID.sub(name, text)

    def session_lost(self, session: Session, cause: Exception | None, calls: list[Call]) -> None:
        """See `zcactor.rpc.hub.Hub`."""
        self._all.pop(session, None)
        if session.peer_hello is not None:
            self._gone[session.peer_process] = session.peer_hello
            if len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]
        peer = session.peer_process
        others = (each for each in self._all if each.peer_process == peer != self.process and each.closed is None)
        another = next(others, None)
        if self.sessions.get(peer) is session:
            del self.sessions[peer]
            if another is not None:
                self.sessions[peer] = another
        if another is None:
            self.placements.forget(peer)
            self.origins.left(peer)
        if not self.closing:
            self.adoptions.left(session, another)
        for host in list(self.hosts.values()):
            host.session_closed(session)
        # Of a ConnectionLost the bare message: what is raised for the calls says by itself whether they may have run.
        text = str(cause.args[0] if isinstance(cause, ConnectionLost) else cause or "the connection was closed")
        text = session.given_up or text
        by_actor: dict[RemoteActor, list[Call]] = {actor: [] for actor in self._watchers.pop(session, ())}
        for call in calls:
            if call.target is not None:
                by_actor.setdefault(call.target, []).append(call)
            else:
                call.fail(ConnectionLost(text, call.state.name != "QUEUED"))
        for actor, lost in by_actor.items():
            actor.session = None
            if self.closing:
                actor.die("the runtime was shut down")
                for call in lost:
                    call.fail(ConnectionLost("the runtime was shut down", True))
            elif session.given_up:
                actor.given_up(lost, text)
            else:
                self.start_task(actor.lost(lost, text))
        if self.on_session_lost is not None:
            self.on_session_lost(session)

    def watch(self, session: Session, actor: RemoteActor) -> None:
        """Tell `actor` when `session` is lost."""
        self._watchers.setdefault(session, weakref.WeakKeyDictionary())[actor] = None

    def unwatch(self, session: Session) -> list[RemoteActor]:
        """Tell no actor any more when `session` is lost. Returns those that were to be told."""
        return list(self._watchers.pop(session, ()))

    def watched(self, session: Session) -> bool:
        """Whether a handle here stands for an actor at the other end of `session`."""
        return bool(self._watchers.get(session))

    # ---------------------------------------------------------------- hub

    def hello(self) -> Hello:
        """Who we are."""
        return self._hello

    def call_received(self, incoming: Incoming) -> None:
        """See `zcactor.rpc.hub.Hub`."""
        host = self.hosts.get(incoming.actor)
        if host is None:
            incoming.session.respond(incoming, Status.NO_SUCH_ACTOR, b"", (), 0)
        else:
            host.receive(incoming)

    def cancel_received(self, incoming: Incoming) -> None:
        """See `zcactor.rpc.hub.Hub`."""
        if incoming.host is not None:
            incoming.host.cancel(incoming)

    def read_result(self, call: Call) -> None:
        """See `zcactor.rpc.hub.Hub`."""
        self.start_task(self._read_result(call))

    async def _read_result(self, call: Call) -> None:
        sealed = bool(call.flags & Flags.SPILLED) and len(call.payload) > 0
        found = [self.locations.bring(part, sealed=sealed and part is call.parts[0]) for part in call.parts]
        coming = [task for task in found if isinstance(task, asyncio.Task)]
        if coming:
            await asyncio.wait(coming)
        parts = [task.result() if isinstance(task, asyncio.Task) else task for task in found]
        call.complete(call.status, call.payload, parts, call.flags)

    # ---------------------------------------------------------------- promises

    def export_call(self, call: Call) -> int:
        """Let peers hold the promise `call`; returns its object id."""
        if not call.export_id:
            self._next_export += 1
            call.export_id = self._next_export << 32 | ids.bits(32)
            self.exports[call.export_id] = call
        return call.export_id

    def call_of(self, holder: Any, label: str) -> Call:
        """The promise that a reference names: one of ours, or a stand-in that gets the result when it is needed."""
        if isinstance(holder, OwnRef):
            return holder.call
        owner = holder.owner if isinstance(holder, RefHolder) else b""
        call = Call(owner, self.loop, self.thread)
        call.label = label
        call.holder = holder
        call.retrieved = True
        if isinstance(holder, LostPart):
            call.fail(ObjectLost(holder.reason))
        else:
            call.fetch = lambda c: self.start_task(self._fetch(c))
        return call

    async def _fetch(self, call: Call) -> None:
        holder = call.holder
        try:
            owner = await self.connect(holder.owner)
            sealed = await self.ask(owner, "fetch", holder.id)
        except RemoteError as error:
            call.fail(error.original if isinstance(error.original, ZcactorError) else error)
        except ConnectionLost as error:
            call.fail(ObjectLost(f"the process that owns {call.label or 'the value'} is gone: {error}"))
        except (Exception, asyncio.CancelledError) as error:  # of any kind: its value could not be had, or read
            call.fail(error)  # who awaits the promise looks at it; nobody looks at this task
        else:
            call.complete(sealed.status, sealed.payload, sealed.parts, sealed.flags)

    # ---------------------------------------------------------------- system calls

    def ask(self, session: Session, method: str, *args: Any) -> ObjectRef[Any]:
        """Call the system actor of the peer."""
        return self._ask(session, SYSTEM_INDEX, self._system, method, args)

    def _ask(
        self, session: Session, index: int, interface: Interface, method: str, args: Sequence[Any]
    ) -> ObjectRef[Any]:
        spec = interface.by_name[method]
        payload, parts, flags = self.marshaller.pack_call(tuple(args), {})
        call = Call(self.process, self.loop, self.thread)
        call.label = spec.label
        session.send_call(call, index, spec.code, flags, 0, payload, parts)
        return ObjectRef(call)

    async def ask_agent(self, method: str, *args: Any) -> Any:
        """Call the head's agent. Errors of zcactor's own come out as they are, not as remote errors.

        Raises:
            ConnectionLost: the agent is gone.
        """
        from zcactor.runtime.agent import agent_interface

        return await self.ask_of(await self.connect(self.agent), AGENT_INDEX, agent_interface(), method, args)

    async def ask_members(self, method: str, *args: Any) -> Any:
        """Call the head's `zcactor.runtime.membership.Membership`, likewise."""
        from zcactor.runtime.membership import membership_interface

        return await self.ask_of(await self.connect(self.agent), MEMBERSHIP_INDEX, membership_interface(), method, args)

    async def ask_of(self, session: Session, index: int, interface: Interface, method: str, args: Sequence[Any]) -> Any:
        """Call a system actor of the peer. Errors of zcactor's own come out as they are, not as remote errors.

        Raises:
            ConnectionLost: the peer is gone.
        """
        try:
            return await self._ask(session, index, interface, method, args)
        except RemoteError as error:
            if isinstance(error.original, ZcactorError | ValueError | TypeError):
                raise error.original from None
            raise

    async def locate(self, actor_id: bytes, *, calls_wait: bool = False) -> tuple[str, tuple[bytes, int], str]:
        """Where an actor is: ``("alive", (process, index), "")`` or ``("dead", ..., cause)``.

        Waits for a restart, unless calls wait for the answer: then it may be ``("restarting", ..., cause)``.
        """
        try:
            state, process, index, cause = await self.ask_agent("locate", actor_id, calls_wait)
        except ConnectionLost:
            return "dead", (b"", 0), "its node agent is gone"
        return state, (process, index), cause

    @property
    def address(self) -> str:
        """Where peers on other hosts find this process; empty where they cannot."""
        return address_of(self.endpoint)

    async def silence_of(self, process: bytes) -> tuple[float, str]:
        """What the head knows of the node of `process`; see `zcactor.runtime.membership.Membership.silence`.

        Raises:
            ConnectionLost: the head is gone, or does not answer within a second.
        """
        try:
            async with asyncio.timeout(_HEADS_ANSWER):
                silence, address = await self.ask_members("silence", process)
        except TimeoutError:
            raise ConnectionLost("the cluster's head does not answer") from None
        return silence, address

    # ---------------------------------------------------------------- the end

    async def delivered(self) -> None:
        """Return once every peer has taken in what was sent to it: answers may still wait for credit or for the socket.

        A peer that does not respond is given up after a while.
        """

        async def taken(session: Session) -> None:
            with contextlib.suppress(ConnectionLost):
                await self.ask(session, "ping")  # answered behind all that

        waiting = [self.loop.create_task(taken(session)) for session in self._all if session.closed is None]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=_DELIVERY_TIMEOUT)
            for task in late:
                task.cancel()

    def end_leases(self) -> None:
        """The end of this runtime, where its loop is closed: peers may read on what they have mapped. Idempotent."""
        for session in list(self._all):
            session.end_leases()

    async def close(self) -> None:
        """Close every connection and stop listening. Idempotent."""
        self.unseen.close()
        self.closing = True
        for task in list(self._tasks):
            task.cancel()
        await self.endpoint.aclose()
        for session in list(self._all):
            with contextlib.suppress(ConnectionLost):
                await session.aclose()
        for host in list(self.hosts.values()):
            host.close()
        self.hosts.clear()
        self.threads.close()
        if self.watchdog is not None:
            self.watchdog.close()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=1)
        self.adoptions.close()
        if self.parting is not None:
            self.parting.close()
        if self.vigil is not None:
            self.vigil.close()
        if self.registrar is not None:
            self.registrar.close()
        self.endpoint.dispose()
        self.store.heap.unpin_all()  # nothing is registered any more
        self.placements.clear()
        self.trimmer.close()
        self.store.close()
