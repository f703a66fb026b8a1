"""Who belongs to a cluster: the head's side of nodes and programs that join, are lost or leave."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Any, Protocol

from zcactor.errors import AuthenticationError, ConnectionLost, ZcactorError
from zcactor.interface import Interface
from zcactor.runtime.head import AGENT_INDEX
from zcactor.runtime.host import current_call
from zcactor.runtime.member import member_interface
from zcactor.runtime.nodes import DriverRecord, NodeRecord, Nodes, RemotePool

if TYPE_CHECKING:
    from zcactor.context import Runtime
    from zcactor.rpc.session import Session
    from zcactor.runtime.pool import WorkerRecord

__all__ = ["Membership", "membership_interface"]

logger = logging.getLogger("zcactor")
FENCE = 8.0
"""Seconds after which a node whose cable was cut has noticed it, too, and has ended its workers: the five of
`zcactor.transport.tcp`, and time to act. Until then its actors do not start elsewhere, nor are their names free."""
_LAST_WORD = 1.0
"""Seconds beyond their grace that nodes get to tell that their workers have ended."""


class Agent(Protocol):
    """What it needs of the head's `zcactor.runtime.agent.NodeAgent`."""

    process: Runtime
    driver: bytes
    closing: bool

    async def worker_ready(self, process: bytes, pid: int, address: str) -> None:
        """A worker of another node serves."""

    def worker_ended(self, record: WorkerRecord) -> None:
        """One has ended."""

    def show(self, driver: bytes, stream: str, prefix: str, lines: list[str]) -> None:
        """It has printed something."""

    async def show_all(self) -> None:
        """Show what is left of that."""

    def stop_owned(self, driver: bytes) -> list[asyncio.Task[None]]:
        """A program is about to go."""

    def end_owned(self, driver: bytes) -> None:
        """It has gone."""


class Membership:
    """The actor that nodes and programs join at: index 2 of the head's process.

    Args:
        agent: the head's, which knows the actors.
        nodes: what it knows of the nodes.
        heartbeat: seconds between two pings of a node.
        hang_after: seconds without an answer until it counts as lost.
    """

    def __init__(self, agent: Agent, nodes: Nodes, heartbeat: float, hang_after: float) -> None:
        self._agent = agent
        self._process = agent.process
        self._nodes = nodes
        self._remote: dict[NodeRecord, tuple[RemotePool, Session]] = {}
        self._heartbeat = heartbeat
        self._hang_after = hang_after
        self._fenced: dict[NodeRecord, None] = {}
        """Nodes that cannot be reached and are not given up yet."""
        self._none_left = asyncio.Event()
        self._none_left.set()

    # ---------------------------------------------------------------- nodes

    async def join_node(self, facts: dict[str, Any], resources: dict[str, float]) -> None:
        """The caller is the agent of a node that belongs to the cluster from now on.

        Args:
            facts: see `zcactor.runtime.nodes.facts_of`.
            resources: amounts by name.
        """
        self._refuse_if_embedded()
        session = current_call.get().session
        pool = RemotePool(self._process.loop, functools.partial(self._tell, session), self._agent.worker_ended)
        node = NodeRecord(session.peer_process, pool, facts)
        node.heard = self._process.loop.time()
        self._remote[node] = pool, session
        self._none_left.clear()
        self._nodes.add(node, resources)
        logger.info("%s has joined at %s", node.label, facts["address"])
        self._process.tasks.start(self._watch(node, session))

    def _refuse_if_embedded(self) -> None:
        if self._agent.driver:
            raise ConnectionLost("this node is embedded in a program and takes no others; use zcactor start --head")
        if self._agent.closing:
            raise ConnectionLost("the cluster is shutting down")

    def _tell(self, session: Session, method: str, *args: Any) -> None:
        self._process.tasks.start(self._ask(session, method, *args))

    async def _ask(self, session: Session, method: str, *args: Any) -> None:
        try:
            await self._process.requests.ask_of(session, AGENT_INDEX, member_interface(), method, args)
        except ConnectionLost as error:  # the node is being taken for lost, and all that it should do with it
            logger.debug("a node was not told to %s: %s", method, error)

    async def _watch(self, node: NodeRecord, session: Session) -> None:
        """Ping a node as long as it answers: one whose agent is stopped keeps its connection."""
        while session.closed is None:
            try:
                async with asyncio.timeout(self._hang_after):
                    await self._process.requests.ask(session, "ping")
            except TimeoutError:
                self._unreachable(node, f"it did not respond for {self._hang_after:g} s")
                await session.aclose()
                return
            except ZcactorError:
                return
            node.heard = self._process.loop.time()
            await asyncio.sleep(self._heartbeat)

    async def leave_node(self) -> None:
        """The calling node is about to end its workers, and takes no more."""
        peer = current_call.get().session.peer_process
        node = self._nodes.by_id.get(peer.hex())
        if node is not None and node in self._remote:
            self._nodes.remove(node)

    def _unreachable(self, node: NodeRecord, cause: str) -> None:
        """Nobody knows whether a node still runs: nothing is placed on it from now on, and it is given up once it must
        have given us up."""
        logger.warning("%s cannot be reached: %s", node.label, cause)
        self._fenced[node] = None
        if self._nodes.by_id.get(node.id) is node:
            self._nodes.remove(node)
        self._process.tasks.start(self._fence(node, cause))

    async def _fence(self, node: NodeRecord, cause: str) -> None:
        if not self._agent.closing:
            await asyncio.sleep(FENCE)
        self._fenced.pop(node, None)
        self._lost(node, cause)

    def _lost(self, node: NodeRecord, cause: str) -> None:
        """A node is gone: its actors are dead, or start again elsewhere. Its agent, which loses us as well, ends them
        where they are."""
        pool, _ = self._remote.pop(node, (None, None))
        if pool is None:
            return
        if not self._agent.closing:
            logger.warning("%s is lost: %s", node.label, cause)
        if self._nodes.by_id.get(node.id) is node:
            self._nodes.remove(node)
        pool.lost(f"its {node.label} was lost: {cause}")
        if not self._remote:
            self._none_left.set()

    async def worker_ready(self, process: bytes, pid: int, address: str) -> None:
        """A worker of the calling node has started."""
        await self._agent.worker_ready(process, pid, address)

    async def worker_ended(self, process: bytes, cause: str) -> None:
        """A worker of the calling node has ended, or could not be started."""
        self._pool_of_caller().worker_ended(process, cause)

    async def worker_said(self, driver: bytes, stream: str, text: str) -> None:
        """A worker of the calling node has printed something, which its `driver` is to be shown."""
        self._agent.show(driver, stream, "", text.splitlines())

    def _pool_of_caller(self) -> RemotePool:
        peer = current_call.get().session.peer_process
        for node, (pool, _) in self._remote.items():
            if node.process == peer:
                return pool
        raise AuthenticationError("this process is the agent of no node of this cluster")

    # ---------------------------------------------------------------- programs

    async def join_driver(self, address: str, machine: str) -> None:
        """The caller is a program that uses the cluster from now on, until it leaves or its connection ends.

        Args:
            address: where it listens for peers of other hosts.
            machine: see `zcactor.runtime.nodes.machine_of`.
        """
        self._refuse_if_embedded()
        process = current_call.get().session.peer_process
        self._nodes.drivers[process] = DriverRecord(process, machine)
        self._nodes.addresses[process] = address

    async def leave_driver(self, grace: float) -> None:
        """The calling program is about to go: what was made for it is stopped in order within `grace` seconds, and
        then at once."""
        driver = current_call.get().session.peer_process
        ending = self._agent.stop_owned(driver)
        if ending:
            await asyncio.wait(ending, timeout=grace)
        self._agent.end_owned(driver)
        await self._agent.show_all()

    async def find(self, process: bytes) -> str:
        """Where a process listens for peers of other hosts."""
        return self._nodes.find(process)

    async def silence(self, process: bytes) -> tuple[float, str]:
        """How many seconds ago a sign of life came from the node that `process` belongs to, and where that process
        listens; -1 and what is known where the node is given up, or the process unknown."""
        address = self._nodes.addresses.get(process, "")
        for node, (pool, _) in self._remote.items():
            if process in (node.process, *pool.by_process):
                heard = self._process.loop.time() if node.heard is None else node.heard
                return -1.0 if node in self._fenced else self._process.loop.time() - heard, address
        known = process == self._process.process or process in self._nodes.drivers or self._nodes.worker(process)
        return 0.0 if known else -1.0, address

    # ---------------------------------------------------------------- ends

    def session_lost(self, session: Session) -> None:
        """A connection has ended, and there is no other to that process."""
        peer = session.peer_process
        if self._nodes.drivers.pop(peer, None) is not None:
            self._nodes.addresses.pop(peer, None)
            self._agent.end_owned(peer)
        for node, (_, its_session) in list(self._remote.items()):
            if its_session is session and node not in self._fenced:
                cause = f"the connection to it ended ({session.closed})"
                if _ended_there(session.closed):
                    self._lost(node, cause)
                else:
                    self._unreachable(node, cause)

    async def end(self, grace: float) -> None:
        """End every other node, and wait for that a little longer than `grace` seconds."""
        for _, session in list(self._remote.values()):
            self._tell(session, "end", grace)
        try:
            async with asyncio.timeout(grace + _LAST_WORD):
                await self._none_left.wait()
        except TimeoutError:
            logger.warning("%d nodes did not end in time", len(self._remote))


def _ended_there(error: Exception | None) -> bool:
    """Whether a connection ended because the process at its other end did, and not because nothing came through."""
    system = error.__cause__ if error is not None else None
    return not isinstance(system, OSError) or isinstance(system, ConnectionResetError | BrokenPipeError)


@functools.cache
def membership_interface() -> Interface:
    """The methods of the head's `Membership`."""
    return Interface.of(Membership)
