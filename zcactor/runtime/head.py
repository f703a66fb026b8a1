"""What a process asks of the head, whose node agent knows every node and every actor."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.interface import Interface
    from zcactor.runtime.connections import Connections
    from zcactor.runtime.requests import Requests
    from zcactor.runtime.sessions import Sessions

__all__ = ["AGENT_INDEX", "MEMBERSHIP_INDEX", "HeadLink"]

AGENT_INDEX: Final = 1
"""Index of the node agent's actor in its process."""
MEMBERSHIP_INDEX: Final = 2
"""Index of the `zcactor.runtime.membership.Membership` in the head's process."""
_ANSWER: Final = 1.0
"""Seconds in which the head is to say what it knows; calls that nobody answers wait for it."""


class HeadLink:
    """Asks it. From any thread's loop.

    Args:
        sessions: know which process it is.
        connections: to it.
        requests: of the process.
        agent, members: give the interfaces of its two system actors. Called when they are first needed: most processes
            never import what these are made of.
    """

    def __init__(
        self, sessions: Sessions, connections: Connections, requests: Requests, agent: Callable[[], Interface],
        members: Callable[[], Interface],
    ) -> None:  # fmt: skip
        self._sessions = sessions
        self._connections = connections
        self._requests = requests
        self._agent = agent
        self._members = members

    @property
    def process(self) -> bytes:
        """The head's."""
        return self._sessions.head

    async def ask_agent(self, method: str, *args: Any) -> Any:
        """Call the head's agent. Errors of zcactor's own come out as they are, not as remote errors.

        Raises:
            ConnectionLost: the agent is gone.
        """
        session = await self._connections.connect(self._sessions.head)
        return await self._requests.ask_of(session, AGENT_INDEX, self._agent(), method, args)

    async def ask_members(self, method: str, *args: Any) -> Any:
        """Call the head's `zcactor.runtime.membership.Membership`, likewise."""
        session = await self._connections.connect(self._sessions.head)
        return await self._requests.ask_of(session, MEMBERSHIP_INDEX, self._members(), method, args)

    async def locate(self, actor_id: bytes, *, calls_wait: bool = False) -> tuple[str, tuple[bytes, int], str]:
        """Where an actor is: ``("alive", (process, index), "")`` or ``("dead", ..., cause)``.

        Waits for a restart, unless calls wait for the answer: then it may be ``("restarting", ..., cause)``.
        """
        try:
            state, process, index, cause = await self.ask_agent("locate", actor_id, calls_wait)
        except ConnectionLost:
            return "dead", (b"", 0), "its node agent is gone"
        return state, (process, index), cause

    async def silence_of(self, process: bytes) -> tuple[float, str]:
        """What the head knows of the node of `process`; see `zcactor.runtime.membership.Membership.silence`.

        Raises:
            ConnectionLost: the head is gone, or does not answer within a second.
        """
        try:
            async with asyncio.timeout(_ANSWER):
                silence, address = await self.ask_members("silence", process)
        except TimeoutError:
            raise ConnectionLost("the cluster's head does not answer") from None
        return silence, address
