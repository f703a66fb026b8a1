"""The composition root of one process: its store, its connections, the actors that it hosts and those that it knows of.

Driver, node agent and workers differ in the services that they have for their peers; see `zcactor.rpc.services`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

from zcactor.api.future import failure_of
from zcactor.assembly.devices import device_opener
from zcactor.assembly.endpoints import address_of
from zcactor.assembly.hub import ProcessHub, checker_of
from zcactor.collectives.lazy_groups import LazyGroups
from zcactor.collectives.service import GroupService
from zcactor.errors import ConnectionLost
from zcactor.execution.activity import ActivityService
from zcactor.execution.circles import Circles
from zcactor.execution.runners import Hosts
from zcactor.execution.threads import Threads
from zcactor.execution.watchdog import Watchdog
from zcactor.graphs.service import GraphService
from zcactor.marshal import Marshaller
from zcactor.native import hot
from zcactor.objects.adoption import Adoptions
from zcactor.objects.broadcast_directory import BroadcastDirectory, BroadcastService
from zcactor.objects.device_proof import Proofs
from zcactor.objects.locations import Locations
from zcactor.objects.promises import Promises
from zcactor.objects.pushes import Pushes
from zcactor.objects.registrar import Registrar
from zcactor.objects.resolver import Resolver
from zcactor.objects.succession import Succession
from zcactor.objects.trimmer import Trimmer
from zcactor.objectstore.copies import CopyCounter
from zcactor.objectstore.placement import Placements
from zcactor.observe.stats import Stats, StatsService, stats_of
from zcactor.options import ActorSpec
from zcactor.peers.connections import Connections
from zcactor.peers.failure_detector import FailureDetector
from zcactor.peers.head_link import HeadLink
from zcactor.peers.idle_reaper import IdleReaper
from zcactor.peers.leases import Leases
from zcactor.peers.requests import Requests
from zcactor.peers.simultaneous_open import SimultaneousOpens
from zcactor.peers.unretrieved_errors import UnretrievedErrors
from zcactor.process.broken import BrokenParts
from zcactor.process.cluster import HeadNews
from zcactor.process.lazy_part import LazyPart
from zcactor.process.place import Place
from zcactor.process.places import Places
from zcactor.process.sessions import Sessions
from zcactor.process.tasks import Tasks
from zcactor.rpc.messages import PROTOCOL_VERSION, Hello
from zcactor.rpc.services import SYSTEM_INDEX, Services
from zcactor.shuffling.sides import ShuffleService

if TYPE_CHECKING:
    import asyncio

    from zcactor.config import Config
    from zcactor.execution.threads import Runner
    from zcactor.graphs.graphs import Graphs
    from zcactor.objectstore.store import Store
    from zcactor.rpc.session import Session
    from zcactor.transport.base import Endpoint

__all__ = ["Process"]

_SERVED: Final = ActorSpec("default", max_concurrency=1 << 20)
"""The options of the services, whose calls wait for each other."""


class Process:
    """The runtime of one process, put together from its parts. All methods run on `loop` unless they say otherwise.

    Args:
        process: the process id, 16 random bytes.
        role: ``"driver"``, ``"agent"`` or ``"worker"``.
        config: the settings.
        loop: its event loop.
        store: its arena and the objects in it.
        endpoint: the endpoint by which peers reach it.
        place: its pid and host; None asks the system.
        crew: runs the plain methods of all actors; None gives each actor threads of its own, and shared actors those
            of `Threads`.
    """

    def __init__(
        self, process: bytes, role: str, config: Config, loop: asyncio.AbstractEventLoop, store: Store,
        endpoint: Endpoint, place: Place | None = None, crew: Runner | None = None,
    ) -> None:  # fmt: skip
        self.process, self.role, self.config, self.namespace = process, role, config, config.namespace
        self.loop, self.thread = loop, threading.get_ident()
        self.store, self.endpoint = store, endpoint
        self.place, self.crew = place or Place.here(), crew
        self.leaving = False
        """Whether the process, with its actors, ends soon. The actors may live on elsewhere: the node agent knows."""
        self.checker, self.copies, self.counters = checker_of(config), CopyCounter(), hot.Counters()
        self.marshaller = Marshaller(
            store, self.copies, self.counters, config.eager_limit, seals=endpoint.seals_payloads, checker=self.checker
        )
        self.broken = BrokenParts(loop)
        self.trimmer, self.origins = Trimmer(store.heap, loop, config.store_keep_nbytes), BroadcastDirectory()
        self.placements = Placements(store, max(config.store_keep_nbytes, store.capacity // 8))
        self.registrar: Registrar | None = None
        """The registration of memory with the network card ahead of need, once a peer is reached by RDMA."""
        self.tasks, self.threads = Tasks(loop), Threads("shared actors")
        self.unretrieved_errors, self.hosts = UnretrievedErrors(loop, failure_of), Hosts(self)
        hello = Hello(PROTOCOL_VERSION, process, self.place.pid, self.place.host, sys.version.split()[0], role)
        self.hub = ProcessHub(hello, store, self.counters, self.marshaller, self.hosts, self.checker)
        self.sessions = Sessions(process, head=process if role == "agent" else b"")
        self.places = Places(process, lambda: self.address)
        self.services, self.news = Services(self.place.pid), HeadNews(self.sessions)
        self.requests = Requests(process, self.marshaller, self.tasks)
        self.simultaneous_opens = SimultaneousOpens(self.sessions, self.tasks, self.requests)
        self.connections = Connections(
            self.hub, self.sessions, self.simultaneous_opens, self.places, self.tasks, endpoint, store, config,
            self.place.pid,
        )  # fmt: skip
        self.head = HeadLink(self.sessions, self.connections, self.requests, self.tasks, config.head_timeout)
        self.locations = Locations(
            self.tasks, self.sessions, self.connections, self.requests, store, self.placements, self.counters
        )
        self.promises = Promises(self.place.pid, self.tasks, self.connections, self.requests, self.locations)
        self.leases = Leases(store, self.promises.exports)
        self.pushes = Pushes(self.tasks, self.sessions, self.connections, self.marshaller, self.promises)
        self.resolver = Resolver(
            self.tasks, self.sessions, self.connections, self.requests, self.head, store, self.promises.exports,
            self.locations, self.pushes.expectations, self.copies,
        )  # fmt: skip
        store.open_devices = device_opener(config, loop, self.broken.note, self.resolver.devices.tell_gone)
        self.succession = Succession(
            self.place.pid, self.tasks, self.sessions, self.requests, self.promises, self.resolver, self.locations,
            self.leases,
        )  # fmt: skip
        self.adoptions = Adoptions(
            self.place.pid, self.tasks, self.sessions, self.connections, self.requests, store, self.copies,
            self.locations,
        )  # fmt: skip
        self.groups, self.graphs = LazyGroups(self, self.hosts), LazyPart(self._make_graphs)
        # notices silent peers on other hosts; agents notice each other
        self.failure_detector: FailureDetector | None = None
        self.idle_reaper = IdleReaper(
            self.sessions, self.tasks, self.requests, self.simultaneous_opens, config, keeps=role == "agent"
        )
        self.hub.use(
            self.resolver, self.promises, self.pushes, self.connections, self.adoptions,
            self.simultaneous_opens,
        )  # fmt: skip
        self.connections.on_opened += [self._opened, self.adoptions.met]
        self.connections.on_left += [self._left, self.groups.session_left, self.graphs.session_left]
        if role != "agent":
            self.failure_detector = FailureDetector(self.sessions, self.tasks, self.requests, self.head)
            self.connections.on_opened.append(self.failure_detector.begun)
        activity = ActivityService(self)
        if config.warn_after:
            hosts = self.hosts
            hosts.watchdog = Watchdog(hosts.by_index, self.sessions, self.counters, self.tasks, config.warn_after)
            hosts.watchdog.on_held = Circles(self, activity).search
        devices = self.resolver.devices
        self.hosts.add(SYSTEM_INDEX, Services, "services", _SERVED, interface=self.services.interface)
        self.services.add_rare(GroupService, self.groups)
        self.services.add_rare(GraphService, self.graphs)
        self.serve(
            self.leases, self.adoptions, self.succession, self.promises, self.head, self.idle_reaper,
            self.simultaneous_opens, BroadcastService(self.place.pid, store, self.origins), devices, devices.pieces,
            devices.direct, Proofs(store, devices.direct), StatsService(self), activity, ShuffleService(), self.news,
        )  # fmt: skip

    def serve(self, *services: object) -> None:
        """Answer calls of the remote methods of `services` from now on."""
        for service in services:
            self.services.add(service)
        self.hosts.by_index[SYSTEM_INDEX].adopt(self.services)

    @property
    def address(self) -> str:
        """The address at which peers on other hosts find this process; empty where they cannot."""
        return address_of(self.endpoint)

    def _make_graphs(self) -> Graphs:
        from zcactor.graphs.graphs import Graphs

        return Graphs(self, self.hosts)

    def stats(self) -> Stats:
        """The figures of this process."""
        return stats_of(self)

    def use_numpy(self) -> Any:
        """Let NumPy allocate in the store from now on, in this context and those made from it. Returns the previous
        handler, for `zcactor.objectstore.heap.use_handler`."""
        return self.store.heap.use(self.config.store_min_nbytes)

    def _opened(self, session: Session) -> None:
        extents = session.connection.extents
        if extents is not None and self.registrar is None:
            self.registrar = Registrar(self.store.heap, self.loop, extents, self.copies)

    def _left(self, session: Session, another: Session | None) -> None:
        if another is None:
            self.placements.forget(session.peer_process)
            self.origins.left(session.peer_process)
        if not self.tasks.closing:
            self.adoptions.left(session, another)
        self.hosts.session_closed(session)

    async def close(self) -> None:
        """Close every connection and stop listening. Idempotent."""
        self.unretrieved_errors.close()
        self.tasks.closing = True
        self.tasks.cancel()
        await self.endpoint.aclose()
        for session in list(self.sessions.all()):
            with contextlib.suppress(ConnectionLost):
                await session.aclose()
        self.hosts.close()
        self.threads.close()
        await self.tasks.settled(1.0)
        self.adoptions.close()
        devices, expectations = self.resolver.devices, self.pushes.expectations
        parts = self.groups, self.graphs, expectations, self.idle_reaper, self.failure_detector, self.registrar, devices
        for part in parts:
            if part is not None:
                part.close()
        self.endpoint.dispose()
        self.store.heap.unpin_all()  # the card has no registrations left
        self.placements.clear()
        self.trimmer.close()
        self.store.close()
