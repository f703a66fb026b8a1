"""The hosts of a run and the processes on them: agents, workers and drivers, made as `zcactor start` makes real ones.

Everything in a process is the package's own. The simulated parts are passed to it: its loop, its place, an arena
without a file, an endpoint in a simulated network, a crew without threads, and workers that are forked by an event.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from simulation.endpoint import SimEndpoint
from simulation.workers import SimWorkers
from zcactor import ids
from zcactor.assembly.agents import assemble_agent
from zcactor.assembly.endpoints import find_through, may_read
from zcactor.assembly.process import Process
from zcactor.control.bootstrap import Bootstrap
from zcactor.control.election import Election
from zcactor.control.head import Head
from zcactor.control.head_log import Candidate, LogUnavailable
from zcactor.control.head_watch import HeadWatch
from zcactor.control.memory_log import MemoryLog
from zcactor.control.node_agent import NodeAgent
from zcactor.control.node_table import facts_of
from zcactor.driver.head_search import HeadSearch
from zcactor.errors import ZcactorError
from zcactor.node.agent_main import Door
from zcactor.node.worker_main import serve
from zcactor.objectstore.arena import Arena
from zcactor.objectstore.store import Store
from zcactor.process.cluster import MembershipService
from zcactor.process.epochs import Deposed
from zcactor.process.head_outage import HeadGone
from zcactor.process.place import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from simulation.loop import SimLoop
    from simulation.network import Network
    from simulation.shared_log import SharedBook
    from zcactor.config import Config
    from zcactor.control.entries import Entries
    from zcactor.control.head_log import HeadLog
    from zcactor.ids import ProcessId
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["Cluster", "Host", "LoopCrew", "SimBootstrap", "SimElection"]


class SimBootstrap(Bootstrap):
    """The steps of a head whose term ends with its process.

    Args:
        log, cluster, patience: see `zcactor.control.bootstrap.Bootstrap`.
        endpoint: of the head, by which it calls nodes and programs.
    """

    def __init__(self, log: HeadLog, cluster: ProcessId, patience: float, endpoint: SimEndpoint) -> None:
        super().__init__(log, "the shared log", cluster, patience)
        self.endpoint = endpoint

    async def lead(self, me: Candidate) -> None:
        """Wait until this head leads.

        Raises:
            LogUnavailable: its log does not answer.
        """
        await self.campaign(me)

    async def refuses(self, address: str) -> bool:
        """See `Bootstrap.refuses`."""
        return await self.endpoint.refuses(address)


class SimElection(Election, SimBootstrap):
    """The steps of a head whose term is a lease. It is the only one of its cluster."""

    def __init__(self, log: HeadLog, cluster: ProcessId, patience: float, endpoint: SimEndpoint) -> None:
        super().__init__(log, cluster, patience, endpoint)
        self.own = endpoint.address
        self.stood = True  # no command waits for it, which could be told that the log does not answer

    async def lead(self, me: Candidate) -> None:
        """Wait until this head leads."""
        await self.win(me)

    async def candidates(self) -> Sequence[str]:
        """See `Election.candidates`."""
        return (self.own,)

    async def summon(self, address: str, epoch: int) -> None:
        """See `Election.summon`."""
        await self.endpoint.summon(address, self.own, epoch)


WAKING: Final = (1e-6, 50e-6)
"""Virtual seconds from a submission until the thread begins."""


class LoopCrew:
    """A crew that runs functions on a loop. Satisfies `zcactor.execution.threads.Runner`.

    Args:
        loop: of the process.
    """

    wanted = True
    """Others may want to run between two calls of one actor, as they would on threads."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._drawn = loop.world.random(f"crew/{loop.name}")

    def submit(self, function: Callable[[], None]) -> None:
        """See `Runner.submit`."""
        self._loop.at(self._loop.world.now + self._drawn.uniform(*WAKING), function)

    def close(self) -> None:
        """See `Runner.close`: this crew has no threads to end."""


EXTENT = 1 << 20
"""Bytes by which an arena is handed out; small arenas have no room for more."""
AGAIN: Final = 0.5
"""Virtual seconds until a node or a program looks again for a head whose term was over."""
TRIES: Final = 20
"""The number of times that a program does so."""


class Host:
    """One host: its agent and workers, while they live."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.agent: SimLoop | None = None
        self.node: Head | NodeAgent | None = None
        self.workers: SimWorkers | None = None
        self.starting = False
        """Whether the supervisor is about to start its agent again."""
        self.boots = 0
        """The number of its boots."""

    @property
    def machine(self) -> str:
        """The name of this host and its boot; see `zcactor.control.node_table.machine_of`."""
        return f"boot-{self.boots}-of-{self.name}"


class Cluster:
    """A head's host, further hosts, and the programs that use them.

    Args:
        network: the network between the hosts.
        config: the settings of every process.
        resources: of each node, amounts by name.
        heartbeat, hang_after: see `zcactor.control.head.Head`.
        native: whether every process uses the native wire.
    """

    def __init__(
        self, network: Network, config: Config, resources: dict[str, float], heartbeat: float = 1.0,
        hang_after: float = 10.0, *, native: bool = False,
    ) -> None:  # fmt: skip
        self.network = network
        self.world = network.world
        self.config = config
        self.resources = resources
        self.heartbeat = heartbeat
        self.hang_after = hang_after
        self.native = native
        self.hosts: dict[str, Host] = {}
        self.head_host: Host | None = None
        self.head_id = b""
        self.joined = 0
        """Nodes that have ever joined."""
        self.on_process: Callable[[Process, SimLoop], None] = lambda *_: None
        """Called with each process as it is made."""
        self.make_log: Callable[[], HeadLog] = MemoryLog
        """The maker of the head's log."""
        self.book: SharedBook | None = None
        """The memory of that log, which outlives the head: a head that is started again goes on with the cluster. None
        where the cluster ends with its head."""
        self.on_head: Callable[[Head], None] = lambda _: None
        """Called with each head that has a log which outlives it, before it begins."""
        self.on_head_lost: Callable[[Head], None] = lambda _: None
        """Called with each head that is killed, as it was then."""
        self.on_take_over: Callable[[Entries], None] = lambda _: None
        """Called with the entries of the log with which a head goes on."""
        self._pids = 100
        self._workers = 0

    @property
    def elects(self) -> bool:
        """Whether the head's term may end before the head does."""
        return self.book is not None and self.book.ends_by_itself

    # ---------------------------------------------------------------- processes

    def _process(self, loop: SimLoop, role: str, host: Host, process: bytes) -> Process:
        """Make a process, in its own first step, with the parts that every process has."""
        self._pids += 1
        place = Place(self._pids, host.name)
        arena = Arena(self.config.store_capacity or 1 << 24, EXTENT, groups=(), seed=self.world.number(loop.name))
        store = Store(0, process, arena=arena)
        endpoint = SimEndpoint(
            self.network, loop, process, place, (arena.address, arena.nbytes), arena.heap, self.config.recv_depth,
            self.config.eager_limit, self.native,
        )  # fmt: skip
        endpoint.authorize = may_read
        made: Any = loop
        made_process = Process(process, role, self.config, made, store, endpoint, place, LoopCrew(loop))
        loop.process = made_process
        if role == "agent" and not self.head_id:
            self.head_id = process
        made_process.sessions.head = self.head_id
        made_process.locations.machine = host.machine
        find_through(endpoint, made_process.places, made_process.head, self.head_id.hex())
        self.on_process(made_process, loop)
        return made_process

    def is_apart(self, here: str, there: str) -> bool:
        """Whether the host `there` may not have noticed yet that an actor on it was ended: the news from the host
        `here` or from the head's may be under way."""
        head = self.head_host.name if self.head_host is not None else here
        return self.network.is_late(here, there) or self.network.is_late(head, there)

    def kill(self, loop: SimLoop, cause: str, *, silently: bool = False) -> None:
        """End a process at once; `silently` where its host goes with it."""
        if loop.dead:
            return
        process = loop.process
        self.world.end(loop, cause)
        if process is not None:
            endpoint = process.endpoint
            assert isinstance(endpoint, SimEndpoint)
            if self.network.listening.get(endpoint.address) is endpoint:
                del self.network.listening[endpoint.address]
        for connection in list(loop.connections):
            connection.vanish(silently=silently)
        host = self.hosts[loop.host]
        if loop is host.agent:
            if host is self.head_host and self.book is not None:
                if not self.elects:
                    self.book.free()
                if isinstance(host.node, Head):
                    self.on_head_lost(host.node)
            host.agent = host.node = None
            for other in [each for each in self.world.loops.values() if each.host == host.name]:
                if other.name.startswith("w"):  # its zygote ends with it, and all workers
                    self.kill(other, "the node's zygote ended, and all workers with it", silently=silently)
        elif host.workers is not None and host.agent is not None:
            host.workers.gone(loop, cause)

    def crash(self) -> None:
        """End the caller's process at once. Other processes see no effect of the rest of its present step."""
        loop: Any = asyncio.get_running_loop()
        self.kill(loop, "its process exited with status 3")

    # ---------------------------------------------------------------- nodes

    def start_agent(self, name: str) -> SimLoop:
        """Start the agent of a host; the first agent of all is the head, and so is each later one on its host where the
        head's log outlives it."""
        host = self.hosts.get(name)
        if host is None:
            host = self.hosts[name] = Host(name)
        host.boots += 1
        loop = host.agent = self.world.process(name, f"agent{host.boots}.{name}")
        is_head = self.head_host is None or (host is self.head_host and self.book is not None)
        if is_head:
            self.head_host = host
        loop.begin(self._agent(loop, host, is_head=is_head))
        return loop

    async def _agent(self, loop: SimLoop, host: Host, *, is_head: bool) -> None:
        known = ids.ProcessId(self.head_id) if is_head and self.head_id else ids.new_process()
        process = self._process(loop, "agent", host, known)
        begun: SimBootstrap | None = None
        if is_head and self.book is not None:
            assert isinstance(process.endpoint, SimEndpoint)
            make = SimElection if self.elects else SimBootstrap
            begun = make(self.make_log(), known, self.config.head_patience, process.endpoint)
            try:
                await begun.lead(Candidate(process.address, host.name, process.place.pid))
            except LogUnavailable:
                self.kill(loop, "its log did not answer")
                return
            if begun.entries is not None:
                self.on_take_over(begun.entries)
        door = Door(process.connections.accepted)
        await process.endpoint.start(door.accepted)
        node: Head | NodeAgent
        workers = host.workers = SimWorkers(
            loop, lambda record: self._fork(host, record), lambda victim, cause: self.kill(victim, cause),
            lambda record: node.worker_ended(record),
        )  # fmt: skip
        facts = facts_of(process.address, ["local", "tcp"], host.machine, process.place)
        log = (begun.log if begun is not None else self.make_log()) if is_head else None
        node = host.node = assemble_agent(process, workers, facts, self.resources, self.heartbeat, self.hang_after, log)
        try:
            if isinstance(node, NodeAgent):
                self._hear(process, node.watch)
                door.open()
                await node.join(facts, self.resources)
            elif begun is None:
                await node.recorder.lead()
            else:
                self.on_head(node)
                await begun.begin(node, process.address)
        except ZcactorError as error:
            self.world.note(loop.label, "refused", why=type(error).__name__)
            again = self.elects and isinstance(error, Deposed | HeadGone)
            if again:
                await asyncio.sleep(AGAIN)
            self.kill(loop, "it could not join" if log is None else "its log did not answer")
            head = self.head_host
            if again and head is not None and not self.network.is_off(head.name):
                self.start_agent(host.name)  # as `zcactor.cluster.daemon.while_led` does
            return
        door.open()
        self.joined += 1
        self.world.note(loop.label, "joined")
        await node.finished
        if isinstance(node, Head):
            await node.recorder.aclose()
        await process.close()
        again = isinstance(begun, SimElection) and begun.again
        self.kill(loop, "its term is over" if again else "its process exited with status 0")
        if again:
            self.start_agent(host.name)

    @staticmethod
    def _hear(process: Process, watch: HeadWatch) -> None:
        """Have a process hear of heads that call it."""
        assert isinstance(process.endpoint, SimEndpoint)
        process.endpoint.summoned = watch.summoned

    # ---------------------------------------------------------------- workers and drivers

    def _fork(self, host: Host, record: WorkerRecord) -> SimLoop:
        self._workers += 1
        loop = self.world.process(host.name, f"w{self._workers}")
        assert host.agent is not None
        assert host.agent.process is not None
        loop.begin(self._worker(loop, host, record.process, host.agent.process.process.hex()))
        return loop

    async def _worker(self, loop: SimLoop, host: Host, name: bytes, node: str) -> None:
        process = self._process(loop, "worker", host, name)
        await serve(process, node)
        self.kill(loop, "its process exited with status 0")

    def start_driver(
        self, name: str, host: str, program: Callable[[Process], Coroutine[Any, Any, None]]
    ) -> SimLoop:  # fmt: skip
        """Run `program` in a new process, once that has joined the cluster."""
        loop = self.world.process(host, name)
        loop.begin(self._driver(loop, self.hosts[host], program))
        return loop

    async def _driver(self, loop: SimLoop, host: Host, program: Callable[[Process], Coroutine[Any, Any, None]]) -> None:
        process = self._process(loop, "driver", host, ids.new_process())
        await process.endpoint.start(process.connections.accepted)
        for left in reversed(range(TRIES if self.elects else 1)):
            try:
                joined = await process.head.ask(MembershipService.join_driver, process.address, host.machine)
                break
            except ZcactorError as error:
                self.world.note(loop.label, "refused", why=type(error).__name__)
                if left:  # as programs do that find another head then
                    await asyncio.sleep(AGAIN)
        else:
            self.kill(loop, "it could not join")
            return
        process.head.outage.joined(*joined)
        process.news.on_head_ends = process.head.outage.give_up
        process.connections.on_lost = HeadSearch(process, host.machine).session_lost
        watch = HeadWatch(process, process.news.known)
        process.news.on_heads = watch.told
        self._hear(process, watch)
        await program(process)

    # ---------------------------------------------------------------- hosts

    def switch_off(self, name: str) -> None:
        """Switch off the power of a host: no process gets a word of it."""
        for loop in [each for each in self.world.loops.values() if each.host == name]:
            self.kill(loop, "its host is off", silently=True)
        self.network.switch_off(name)

    def switch_on(self, name: str) -> None:
        """Switch a host on: after a boot, its node joins anew."""
        self.network.switch_on(name)
        self.start_agent(name)
