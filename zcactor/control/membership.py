"""The members of a cluster: the head's side of nodes and programs that join, are lost or leave."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVarTuple

from zcactor.control.entries import driver_change, member_change
from zcactor.control.failover import Failover, ReportedWorker
from zcactor.control.head_log import Change
from zcactor.control.node_table import DriverRecord, NodeRecord, NodeTable, RemotePool
from zcactor.errors import AuthenticationError, ConnectionLost, HeadUnavailable, ProtocolError, ZcactorError
from zcactor.ids import ProcessId
from zcactor.logs import logger
from zcactor.options import checked_name, checked_seconds
from zcactor.peers.head_link import HeadLink
from zcactor.peers.losses import ended_there, is_refused
from zcactor.process.cluster import HeadNews, MembershipService, NodeService
from zcactor.process.epochs import Deposed
from zcactor.rpc.services import Services, caller, calling_process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from zcactor.control.draining import Draining
    from zcactor.control.handle_grants import HandleGrants
    from zcactor.control.leader_lease import LeaderLease
    from zcactor.control.recipes import Recipes
    from zcactor.control.recorder import HeadRecorder
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["HeadAgent", "JoinedRank", "Membership", "Ranks", "Showing", "Successors"]

Ts = TypeVarTuple("Ts")
if TYPE_CHECKING:
    Order = Callable[[Any, int, *Ts], Coroutine[Any, Any, None]]
    """A method of `NodeService` that takes the epoch of the head first."""


class Successors:
    """The nodes that leave, and those that are to follow them. Used on the head's loop."""

    def __init__(self) -> None:
        self._expected: dict[str, asyncio.Future[NodeRecord]] = {}
        """The nodes that follow, by the ids of those that leave."""

    def are_expected_for(self, node: NodeRecord) -> bool:
        """Whether a node leaves by an order, so that its end is no loss."""
        return node.id in self._expected

    def joined(self, node: NodeRecord, follows: str) -> None:
        """Note a node that has joined in the place of another, whose id is `follows`."""
        expected = self._expected.get(follows)
        if expected is not None and not expected.done():
            expected.set_result(node)

    async def after(self, node: NodeRecord, leave: Callable[[], None], limit: float | None) -> NodeRecord | None:
        """Have a node leave by ``leave()``, and wait until it is gone, and then for the node in its place.

        Args:
            node: the node.
            leave: asks it to end.
            limit: seconds that the node in its place may take to join; None where none is to start.

        Returns:
            The node in its place, if one is to start.

        Raises:
            ConnectionLost: none has joined in time.
        """
        expected: asyncio.Future[NodeRecord] = asyncio.get_running_loop().create_future()
        self._expected[node.id] = expected
        try:
            leave()
            await node.gone.wait()
            if limit is None:
                return None
            try:
                async with asyncio.timeout(limit):
                    return await expected
            except TimeoutError:
                log = "see the newest log in its ~/.local/state/zcactor/logs"
                raise ConnectionLost(f"{node.label} has left and did not start again in {limit:g} s; {log}") from None
        finally:
            del self._expected[node.id]


class JoinedRank(NamedTuple):
    """A node of a run: its rank, and where it is."""

    rank: int
    host: str
    pid: int


class Ranks:
    """The table of the ranks whose nodes belong to the cluster. Nodes without a rank are not in it.

    Args:
        own: the facts about the head's own node, if any; see `zcactor.control.node_table.facts_of`.
    """

    def __init__(self, own: Mapping[str, Any]) -> None:
        self._by_node: dict[str, JoinedRank] = {}
        self.changed: Callable[[], None] = lambda: None
        """Called after each change."""
        self.join("", own)

    def join(self, node: str, facts: Mapping[str, Any]) -> None:
        """Note that a node has joined.

        Args:
            node: its id.
            facts: about it; it has a rank where they have ``"rank"``.

        Raises:
            ConnectionLost: a node with that rank is there already.
        """
        rank = facts.get("rank")
        if rank is None:
            return
        for other in self._by_node.values():
            if other.rank == rank:
                raise ConnectionLost(
                    f"rank {rank} has joined already, from {other.host} with pid {other.pid}; each rank of a run "
                    "is started once"
                )
        self._by_node[node] = JoinedRank(rank, facts["host"], facts["pid"])
        self.changed()

    def leave(self, node: str) -> None:
        """Note that a node is gone. Idempotent."""
        if self._by_node.pop(node, None) is not None:
            self.changed()

    def joined(self) -> list[JoinedRank]:
        """The ranks that are there, in order."""
        return sorted(self._by_node.values())


class HeadAgent(Protocol):
    """The parts of `zcactor.control.head.Head` that the membership needs."""

    process: LocalProcess
    driver: ProcessId
    closing: bool
    recorder: HeadRecorder
    draining: Draining
    grants: HandleGrants
    recipes: Recipes

    async def worker_ready(self, process: ProcessId, pid: int, address: str) -> None:
        """Note that a worker of another node serves."""

    def worker_ended(self, record: WorkerRecord) -> None:
        """Note the end of a worker."""

    def stop_owned(self, driver: ProcessId, grace: float) -> list[asyncio.Task[None]]:
        """Begin to stop the actors of a program that is about to go in `grace` seconds."""

    def end_owned(self, driver: ProcessId) -> None:
        """Retire the actors of a program that is gone."""


class Showing(Protocol):
    """A console for the output of workers; see `zcactor.control.head.Console`."""

    def show(self, driver: ProcessId, stream: str, prefix: str, lines: list[str]) -> None:
        """Show the output of a worker on another node."""

    async def show_all(self, driver: ProcessId | None = None) -> None:
        """Wait until the rest of the output is shown, at one program or at all."""


FENCE = 8.0
"""Seconds after which a node whose cable was cut has noticed that, too, and has ended its workers: the five of
`zcactor.transport.tcp.endpoint`, and time to act. Until then its actors do not start elsewhere, nor are their names
free."""
_BEYOND = 2.0
"""Seconds beyond the patience of nodes until all of them have ended."""
_JOINING = 2.0
"""Seconds that a program which joins waits for the log: calls need none, and all else is recorded after it."""
_LEAVING = 1.0
"""Seconds in which a node that does not accept a connection may say that it leaves."""
_LAST_WORD = 1.0
"""Seconds beyond their grace that nodes get to report that their workers have ended."""


class Membership(MembershipService):
    """The actor that nodes and programs join at: index 2 of the head's process.

    Args:
        agent: the head, which knows the actors.
        nodes: the head's table of nodes.
        console: shows the output of their workers.
        heartbeat: seconds between two pings of a node.
        hang_after: seconds without an answer after which a node counts as lost.
    """

    def __init__(
        self, agent: HeadAgent, nodes: NodeTable, console: Showing, heartbeat: float, hang_after: float
    ) -> None:
        self._agent = agent
        self._console = console
        self._process = agent.process
        self._nodes = nodes
        self._remote: dict[NodeRecord, tuple[RemotePool, Session]] = {}
        """Nodes that have joined and are not given up."""
        self._agents: dict[ProcessId, NodeRecord] = {}
        """The same nodes, by their agents."""
        self._heartbeat = heartbeat
        self._hang_after = hang_after
        self._fenced: dict[NodeRecord, None] = {}
        """Nodes that cannot be reached and are not given up yet."""
        self._successors = Successors()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._some_node = asyncio.Event()
        if nodes.own is not None:
            self._some_node.set()
        self.ranks = Ranks({} if nodes.own is None else nodes.own.facts)
        """The ranks of a run that have joined."""
        self.patience = 0.0
        """Seconds that nodes go on without a head, as those that join are told; 0 without a log."""
        self.log = ""
        self.taking_over: Failover | None = None
        """The take-over, where this head goes on where an earlier one has ended."""
        self.leader_lease: LeaderLease | None = None
        """The rights of this head, where others can lead in its place."""
        self.tell_heads: Callable[[], None] = lambda: None
        self.identify: Callable[[str], Awaitable[object]] | None = None
        """Asks the process at ``host:port`` for its name; None where members are not connected to (simulation)."""

    # ---------------------------------------------------------------- nodes

    async def join_node(self, facts: dict[str, Any], resources: dict[str, float]) -> tuple[float, str]:
        """See `MembershipService`."""
        self._refuse_if_embedded()
        session = caller()
        process = ProcessId(session.peer_process)
        try:
            if self.leader_lease is not None:
                self.leader_lease.joining(process.hex())
            timeout = self._process.config.head_timeout
            if not await self._agent.recorder.record_within(timeout, member_change(process, facts, resources)):
                raise HeadUnavailable(self.log, timeout)
            if self.leader_lease is not None:
                self.leader_lease.joined(process.hex())
            self._refuse_if_embedded(session)
            node = self._add_node(session, facts, resources)
            if self.taking_over is not None:
                self.taking_over.joined(node)
        except (ConnectionLost, HeadUnavailable, asyncio.CancelledError):  # it may be recorded all the same
            self.forget("member", process)
            raise
        logger.info("%s has joined at %s", node.label, facts["address"])
        place = facts["address"].rpartition("@")[2]
        if self.identify is not None and place:
            self._process.tasks.start(self._connect_back(self.identify, node, place))
        return self.patience, self.log

    async def _connect_back(self, identify: Callable[[str], Awaitable[object]], node: NodeRecord, place: str) -> None:
        """Warn where a member that has connected to this host accepts no connection from here: its actors could not be
        called, and arrays could be pulled from it by its own sockets only. A member that leaves, or a cluster that
        ends, is no reason."""
        try:
            await identify(place)
        except (ConnectionLost, ProtocolError) as error:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(node.removed.wait(), _LEAVING)
            if self._agent.closing or not self._nodes.has(node):
                return
            logger.warning(
                "%s has joined, and cannot be reached from the head's host: %s. Its processes have to be reached: let "
                "its firewall pass the ports that they listen at, which the setting ports bounds (ZCACTOR_PORTS), and "
                "see that host is an address that other hosts reach (ZCACTOR_HOST)", node.label, error.args[0],
            )  # fmt: skip

    def _add_node(self, session: Session, facts: Mapping[str, Any], resources: Mapping[str, float]) -> NodeRecord:
        pool = RemotePool(self._process.loop, functools.partial(self._tell, session), self._agent.worker_ended)
        node = NodeRecord(ProcessId(session.peer_process), pool, facts)
        self.ranks.join(node.id, facts)
        node.heard = self._process.loop.time()
        self._remote[node] = pool, session
        self._agents[node.process] = node
        self._none_left.clear()
        self._nodes.add(node, resources)
        self._some_node.set()
        self._process.tasks.start(self._watch(node, session))
        self.tell_heads()
        self._successors.joined(node, facts.get("follows", ""))
        self._agent.recipes.look()
        return node

    async def return_node(
        self, facts: dict[str, Any], resources: dict[str, float], workers: list[ReportedWorker], held: list[int]
    ) -> list[int] | None:
        """See `MembershipService`."""
        session = caller()
        taking = self.taking_over
        if taking is None or not taking.expects(calling_process()):
            return None
        if session.closed is not None:
            return None
        node = self._add_node(session, facts, resources)
        logger.info("%s has returned with %d workers", node.label, len(workers))
        taking.returned(node, [ReportedWorker(*worker) for worker in workers])
        return self._agent.grants.lease(session, held)

    async def some_node(self) -> None:
        """Wait for the first node: a head can be asked before the node beside it has joined."""
        await self._some_node.wait()

    @property
    def is_taking_over(self) -> bool:
        """Whether it is not decided yet what goes on of an earlier head's cluster."""
        return self.taking_over is not None and not self.taking_over.done.is_set()

    async def taken_over(self) -> None:
        """Wait until it is decided what goes on of an earlier head's cluster."""
        if self.taking_over is not None:
            await self.taking_over.done.wait()

    def forget(self, kind: str, process: ProcessId) -> None:
        """Note that a node or a program is gone."""
        if self._agent.closing:
            return
        self._agent.recorder.note(Change(kind, process.hex(), None))
        if kind == "member" and self.leader_lease is not None:
            self.leader_lease.joining(process.hex())
            self._process.tasks.start(self._left(self.leader_lease, process))

    async def _left(self, leader_lease: LeaderLease, member: ProcessId) -> None:
        with contextlib.suppress(Deposed):
            await self._agent.recorder.noted()
            leader_lease.left(member.hex())

    def _refuse_if_embedded(self, session: Session | None = None) -> None:
        if self._agent.driver:
            raise ConnectionLost("this node is embedded in a program and takes no others; use zcactor start --head")
        if self._agent.closing:
            raise ConnectionLost("the cluster is shutting down")
        if session is not None and session.closed is not None:
            raise ConnectionLost("the connection ended before the head's log had taken that it joins")

    def _tell(self, session: Session, method: Order[*Ts], *args: *Ts) -> None:
        self._process.tasks.start(self._ask(session, method, *args))

    async def _ask(self, session: Session, method: Order[*Ts], *args: *Ts) -> bool:
        """Order something of a node, once this head has a term. Returns whether it was done."""
        if self.leader_lease is not None and not await self.leader_lease.lasts():
            return False
        return await self._order(session, method, *args)

    async def _order(self, session: Session, method: Order[*Ts], *args: *Ts) -> bool:
        recorder = self._agent.recorder
        if recorder.is_deposed:
            return False
        try:
            await self._process.requests.ask_of(session, method, recorder.epoch, *args)
        except Deposed as error:
            recorder.depose(error.known)
        except ConnectionLost as error:  # the node is about to be taken for lost, so the request has lost its purpose
            logger.debug("a node was not told to %s: %s", method.__name__, error)
        else:
            return True
        return False

    async def _watch(self, node: NodeRecord, session: Session) -> None:
        """Ping a node as long as it answers: a node whose agent is stopped keeps its connection."""
        while session.closed is None:
            try:
                async with asyncio.timeout(self._hang_after):
                    await self._ping(node, session)
            except TimeoutError:
                self._unreachable(node, f"it did not respond for {self._hang_after:g} s")
                await session.aclose()
                return
            except ZcactorError:
                return
            node.heard = self._process.loop.time()
            await asyncio.sleep(self._heartbeat)

    async def _ping(self, node: NodeRecord, session: Session) -> None:
        if self.leader_lease is None:
            await self._process.requests.ask(session, Services.ping)
            return
        asked = self.leader_lease.now()
        if await self._order(
            session, NodeService.serves
        ):  # also without a term: nodes stay with a head that hears from them
            self.leader_lease.serves(node.id, asked)

    async def leave_node(self, epoch: int) -> None:
        """See `MembershipService`."""
        self._agent.recorder.take(epoch)
        peer = calling_process()
        node = self._agents.get(peer)
        if node is not None:
            self._remove(node)

    def _remove(self, node: NodeRecord) -> None:
        """Take a node out of the table, unless it has left before."""
        if self._nodes.has(node):
            self._nodes.remove(node)
            node.removed.set()
            self.ranks.leave(node.id)
            self._agent.recipes.look()

    def _unreachable(self, node: NodeRecord, cause: str) -> None:
        """Fence a node: stop placing actors on it, and give it up once it must have given the head up."""
        logger.warning("%s cannot be reached: %s", node.label, cause)
        self._fenced[node] = None
        self._remove(node)
        self._process.tasks.start(self._fence(node, cause))

    @property
    def fence(self) -> float:
        """Seconds after which a node that lost the head has ended its workers: it has noticed the loss, and has looked
        for the head in vain."""
        return max(FENCE, self.patience + _BEYOND) if self.patience else FENCE

    async def _fence(self, node: NodeRecord, cause: str) -> None:
        if not self._agent.closing:
            await asyncio.sleep(self.fence)
        self._fenced.pop(node, None)
        self._lost(node, cause)

    async def _examine(self, node: NodeRecord, cause: str) -> None:
        """Give a node up whose agent ended the connection: at once where nobody listens in its place, and otherwise
        after the fence, because it may be looking for its head."""
        self._fenced[node] = None
        self._remove(node)
        if self.leader_lease is not None and not await self.leader_lease.lasts():
            return  # a node of a later head must not meet this one
        try:
            session = await self._process.connections.connect(node.process)
        except (ConnectionLost, ProtocolError) as error:
            if is_refused(error):
                self._fenced.pop(node, None)
                self._lost(node, cause)
                return
        else:
            await self._ask(session, NodeService.end, 0.0, False)
        self._unreachable(node, cause)

    def _lost(self, node: NodeRecord, cause: str) -> None:
        """Give a node up: its actors are dead, or start again elsewhere. Its agent, which loses the head as well, ends
        them where they are."""
        pool, _ = self._remote.pop(node, (None, None))
        if pool is None:
            return
        self.forget("member", node.process)
        if self._agents.get(node.process) is node:
            del self._agents[node.process]
        if not self._agent.closing and not self._successors.are_expected_for(node):
            logger.warning("%s is lost: %s", node.label, cause)
        self._remove(node)
        pool.lost(f"its {node.label} was lost: {cause}")
        node.gone.set()
        if not self._remote:
            self._none_left.set()

    async def drain(self, name: str, timeout: float | None, again: bool) -> dict[str, Any]:
        """See `MembershipService`."""
        self._refuse_if_embedded()
        name, timeout = checked_name("the name of a node", name), checked_seconds(timeout, "drain")
        asking = calling_process()  # lines for a node go to this head's log
        done = await self._agent.draining.drain(name, timeout, again, b"" if asking in self._agents else asking)
        await self._console.show_all(asking)  # lines on the progress come before the result
        return done

    async def end_node(self, node: NodeRecord, grace: float, again: bool) -> NodeRecord | None:
        """Have a node end, and wait for that, and with `again` for the node that starts in its place.

        Raises:
            ConnectionLost: the node has not come back within `spawn_timeout`.
        """

        def leave() -> None:
            if node in self._remote:
                self._tell(self._remote[node][1], NodeService.end, grace, again)

        await self._agent.recipes.leave(node)
        return await self._successors.after(node, leave, self._process.config.spawn_timeout if again else None)

    async def worker_started(self, epoch: int, process: ProcessId, pid: int, address: str) -> None:
        """See `MembershipService`."""
        self._agent.recorder.take(epoch)
        await self._agent.worker_ready(process, pid, address)

    async def worker_ended(self, epoch: int, process: ProcessId, cause: str) -> None:
        """See `MembershipService`."""
        self._agent.recorder.take(epoch)
        self._pool_of_caller().worker_ended(process, cause)

    async def worker_said(self, epoch: int, driver: ProcessId, stream: str, text: str) -> None:
        """See `MembershipService`."""
        self._agent.recorder.take(epoch)
        self._console.show(driver, stream, "", text.splitlines())

    def _pool_of_caller(self) -> RemotePool:
        peer = calling_process()
        node = self._agents.get(peer)
        if node is None:
            raise AuthenticationError("this process is the agent of no node of this cluster")
        return self._remote[node][0]

    async def join_driver(self, address: str, machine: str) -> tuple[float, str]:
        """See `MembershipService`."""
        session = caller()
        self._refuse_if_embedded(session)
        process = ProcessId(session.peer_process)
        try:
            if self.taking_over is None or not self.taking_over.driver_returned(process):  # the log has it not yet
                await self._agent.recorder.told(_JOINING, driver_change(process, address, machine))
                self._refuse_if_embedded(session)
        except (ConnectionLost, asyncio.CancelledError):
            self.forget("driver", process)
            raise
        self._nodes.drivers[process] = DriverRecord(process, machine)
        self._nodes.addresses[process] = address
        self.tell_heads()
        return self.patience, self.log

    async def return_driver(self, address: str, machine: str, held: list[int]) -> list[int]:
        """See `MembershipService`."""
        await self.join_driver(address, machine)
        return self._agent.grants.lease(caller(), held)

    async def leave_driver(self, grace: float) -> None:
        """See `MembershipService`."""
        driver = calling_process()
        ending = self._agent.stop_owned(driver, grace)
        if ending:
            await asyncio.wait(ending, timeout=grace)
        self._agent.end_owned(driver)
        await self._console.show_all()

    async def find(self, process: ProcessId) -> str:
        """See `MembershipService`."""
        taking = self.taking_over
        if taking is not None and process not in self._nodes.addresses:
            await taking.done.wait()  # its node may be about to return
        return self._nodes.find(process)

    async def call_back(self, process: ProcessId, caller: ProcessId) -> bool:
        """See `MembershipService`."""
        session = self._process.sessions.used.get(process)
        if process not in self._nodes.drivers or session is None or session.closed is not None:
            return False
        return await self._process.requests.ask(session, HeadLink.connect_to, caller)

    async def silence(self, process: ProcessId) -> tuple[float, str]:
        """See `MembershipService`."""
        address = self._nodes.addresses.get(process, "")
        node = self._agents.get(process) or self._nodes.host_of(process)
        if node is not None and node.heard is not None:
            return -1.0 if node in self._fenced else self._process.loop.time() - node.heard, address
        known = process == self._process.process or process in self._nodes.drivers or node is not None
        return 0.0 if known or self.is_taking_over else -1.0, address

    def session_lost(self, session: Session) -> None:
        """Note the end of the last connection to a process."""
        peer = ProcessId(session.peer_process)
        if self._nodes.drivers.pop(peer, None) is not None:
            self._nodes.addresses.pop(peer, None)
            self.forget("driver", peer)
            self._agent.end_owned(peer)
        node = self._agents.get(peer)
        if node is not None and node not in self._fenced:
            cause = f"the connection to it ended ({session.closed})"
            if not ended_there(session.closed):
                self._unreachable(node, cause)
            elif self.patience and not self._agent.closing and not self._nodes.has_ended(node):
                self._process.tasks.start(self._examine(node, cause))
            else:
                self._lost(node, cause)

    def tell_over(self, status: int, text: str) -> None:
        """Tell every other node that the run is over, with the program's exit status and a line for people. They learn
        it before a later `end` reaches them, because calls of one caller start in order."""
        for _, session in list(self._remote.values()):
            self._tell(session, NodeService.run_over, status, text)

    def tell_end(self, grace: float) -> None:
        """Tell every other node to end: in order within `grace` seconds. Where it is ending already, a grace of 0 ends
        that of before."""
        for _, session in list(self._remote.values()):
            self._tell(session, NodeService.end, grace, False)

    async def _tell_program(self, session: Session) -> None:
        try:
            await self._process.requests.ask(session, HeadNews.head_ends)
        except ZcactorError as error:  # it has just ended
            logger.debug("a program was not told that the head ends: %s", error)

    async def end(self, grace: float) -> None:
        """End every other node, and wait for that a little longer than `grace` seconds. Programs are told."""
        for driver in self._nodes.drivers:
            session = self._process.sessions.used.get(driver)
            if session is not None:
                self._process.tasks.start(self._tell_program(session))
        self.tell_end(grace)
        try:
            async with asyncio.timeout(grace + _LAST_WORD):
                await self._none_left.wait()
        except TimeoutError:
            logger.warning("%d nodes did not end in time", len(self._remote))
