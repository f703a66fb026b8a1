"""One process of a program: its store, its connections, the actors it hosts and those it knows of.

Driver, node agent and workers are all made of this; they differ in which system actors they host. A system actor is an
ordinary one with a reserved index: every control operation (lease an object, get a promise, make an actor) is a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from zcactor.errors import ConnectionLost
from zcactor.future import failure_of
from zcactor.marshal import Marshaller, arrays
from zcactor.objectstore.copies import CopyCounter
from zcactor.objectstore.placement import Placements
from zcactor.observe.stats import Stats, stats_of
from zcactor.rpc.counters import new_counters
from zcactor.rpc.messages import PROTOCOL_VERSION, Hello, Status
from zcactor.runtime.adoption import Adoptions
from zcactor.runtime.connections import Connections
from zcactor.runtime.endpoints import address_of
from zcactor.runtime.head import MEMBERSHIP_INDEX, HeadLink
from zcactor.runtime.host import ActorHost
from zcactor.runtime.locations import Locations
from zcactor.runtime.origins import Origins
from zcactor.runtime.parting import Parting
from zcactor.runtime.place import Place
from zcactor.runtime.promises import Promises
from zcactor.runtime.registering import Registrar
from zcactor.runtime.requests import SYSTEM_INDEX, Requests
from zcactor.runtime.resolver import Resolver
from zcactor.runtime.sessions import Sessions
from zcactor.runtime.system import SystemActor, system_interface
from zcactor.runtime.tasks import Tasks
from zcactor.runtime.threads import Threads
from zcactor.runtime.trimming import Trimmer
from zcactor.runtime.twins import Twins
from zcactor.runtime.unseen import Unseen
from zcactor.runtime.vigil import Vigil
from zcactor.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.config import Config
    from zcactor.interface import Interface
    from zcactor.objectstore.store import Block, Store
    from zcactor.rpc.incoming import Incoming
    from zcactor.rpc.session import Session
    from zcactor.runtime.threads import Runner
    from zcactor.transport.base import Endpoint
    from zcactor.transport.os_process import OsProcess
    from zcactor.transport.verbs.connection import VerbsConnection

__all__ = ["Process"]

FIRST_ACTOR_INDEX = 2
_DELIVERY_TIMEOUT = 5.0
"""Seconds that a peer has to take in the last answers of an actor that stops."""


def _agent_interface() -> Interface:
    from zcactor.runtime.agent import agent_interface

    return agent_interface()


def _membership_interface() -> Interface:
    from zcactor.runtime.membership import membership_interface

    return membership_interface()


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
        self.tasks = Tasks(loop)
        self.sessions = Sessions(process)
        system = system_interface()
        self.requests = Requests(process, self.marshaller, self.tasks, system)
        self.twins = Twins(self.sessions, self.tasks, self.requests)
        self.connections = Connections(
            self, self.sessions, self.twins, self.tasks, endpoint, store, config, self.place.pid
        )
        self.head = HeadLink(self.sessions, self.connections, self.requests, _agent_interface, _membership_interface)
        self.locations = Locations(
            self.tasks, self.sessions, self.connections, self.requests, store, self.placements, self.counters
        )
        self.promises = Promises(self.tasks, self.connections, self.requests, self.locations)
        self.resolver = Resolver(
            self.tasks, self.sessions, self.connections, self.requests, store, self.promises.exports, self.locations
        )
        self.adoptions = Adoptions(self.tasks, self.connections, self.requests, store, self.copies, self.locations)
        self.origins = Origins()
        self.registrar: Registrar | None = None
        """Registers memory with the network card ahead of need, once a peer is reached by RDMA."""
        self.last_system_index = MEMBERSHIP_INDEX if role == "agent" else SYSTEM_INDEX
        self.namespace = config.namespace
        self.share = self.marshaller.share
        self.dtype_codes, self.dtypes = arrays.known_codes, arrays.known_dtypes
        self.hosts: dict[int, ActorHost] = {}
        self.leaving = False
        """Whether it ends soon, actors and all. They may live on elsewhere: the node agent knows."""
        self._next_index = FIRST_ACTOR_INDEX
        self._hello = Hello(PROTOCOL_VERSION, process, self.place.pid, self.place.host, sys.version.split()[0], role)
        self.threads = Threads("shared actors")
        self.vigil = None if role == "agent" else Vigil(self.sessions, self.tasks, self.requests, self.head)
        """Notices peers on other hosts that are silent."""
        self.watchdog: Watchdog | None = None
        if config.warn_after:
            self.watchdog = Watchdog(
                self.hosts, self.sessions, self.counters, self.tasks, self.last_system_index, config.warn_after
            )
        self.unseen = Unseen(loop, failure_of)
        self.parting: Parting | None = None
        """Closes idle connections, once there are any by RDMA."""
        if role == "agent":
            self.sessions.head = process
        self.connections.on_opened += [self._opened, self.adoptions.met]
        if self.vigil is not None:
            self.connections.on_opened.append(self.vigil.begun)
        self.connections.on_left.append(self._left)
        # What sessions ask of it, see `zcactor.rpc.hub.Hub`.
        self.import_region, self.read_result = self.resolver.import_region, self.promises.read_result
        self.session_lost = self.connections.session_lost
        self.system = SystemActor(
            self.place.pid, store, self.sessions, self.promises, self.adoptions, self.origins, self.twins,
            lambda: self.parting, self.stats,
        )  # fmt: skip
        self.add_host(SYSTEM_INDEX, SystemActor, "system", interface=system).adopt(self.system)

    @property
    def agent(self) -> bytes:
        """Process id of the head's node agent, which knows every actor; of the only one, where there is one node."""
        return self.sessions.head

    def _opened(self, session: Session) -> None:
        connection = session.connection
        if connection.kind == "verbs" and self.registrar is None:
            extents = cast("VerbsConnection", connection).extents
            extents.copied = partial(self.copies.count, "destination cannot be registered")
            extents.brought = partial(self.copies.count, "owner cannot register its memory")
            self.registrar = Registrar(self.store.heap, self.loop, extents)
            if self.config.verbs_idle_timeout:
                self.parting = Parting(self.sessions, self.tasks, self.requests, self.config.verbs_idle_timeout)

    def _left(self, session: Session, another: Session | None) -> None:
        if another is None:
            self.placements.forget(session.peer_process)
            self.origins.left(session.peer_process)
        if not self.tasks.closing:
            self.adoptions.left(session, another)
        for host in list(self.hosts.values()):
            host.session_closed(session)

    def park(self, reader: OsProcess, session: Session, blocks: Mapping[int, Block]) -> None:
        """See `zcactor.rpc.hub.Hub`."""
        hello = session.peer_hello
        number = (session.peer_process, session.number) if hello is None else hello.session  # nothing will name that
        self.store.parking.park(reader, (session.peer_process, number), blocks)

    def outlived(self, session: Session) -> None:
        """See `zcactor.rpc.hub.Hub`."""
        self.adoptions.let_go(session.peer_process)

    @property
    def address(self) -> str:
        """Where peers on other hosts find this process; empty where they cannot."""
        return address_of(self.endpoint)

    def stats(self) -> Stats:
        """What it has done."""
        return stats_of(self)

    def use_numpy(self) -> Any:
        """NumPy allocates in the store from now on, in this context and those made from it. Returns the handler that
        was set, for `zcactor.objectstore.heap.use_handler`."""
        return self.store.heap.use(self.config.store_min_nbytes)

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

    # ---------------------------------------------------------------- the end

    async def delivered(self) -> None:
        """Return once every peer has taken in what was sent to it: answers may still wait for credit or for the socket.

        A peer that does not respond is given up after a while.
        """

        async def taken(session: Session) -> None:
            with contextlib.suppress(ConnectionLost):
                await self.requests.ask(session, "ping")  # answered behind all that

        waiting = [self.loop.create_task(taken(session)) for session in self.sessions.all() if session.closed is None]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=_DELIVERY_TIMEOUT)
            for task in late:
                task.cancel()

    def end_leases(self) -> None:
        """The end of this runtime, where its loop is closed: peers may read on what they have mapped. Idempotent."""
        for session in list(self.sessions.all()):
            session.end_leases()

    async def close(self) -> None:
        """Close every connection and stop listening. Idempotent."""
        self.unseen.close()
        self.tasks.closing = True
        self.tasks.cancel()
        await self.endpoint.aclose()
        for session in list(self.sessions.all()):
            with contextlib.suppress(ConnectionLost):
                await session.aclose()
        for host in list(self.hosts.values()):
            host.close()
        self.hosts.clear()
        self.threads.close()
        if self.watchdog is not None:
            self.watchdog.close()
        await self.tasks.settled(1.0)
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
