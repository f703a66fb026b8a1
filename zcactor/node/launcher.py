"""The agent's end of the socket to its launcher, for a node of a run.

Both ends send lines of JSON, objects with one key each. From the launcher: ``{"watch": true}`` (tell which ranks have
joined, now and after each change) and ``{"end": [status, text, grace]}``, both to the head's agent. To the launcher:
``{"ranks": [[rank, host, pid], ...]}`` from the head's agent, and ``{"over": [status, text]}`` from a member's, when
the head has said that the run is over.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from zcactor.control.head import Head

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from zcactor.control.node_agent import NodeAgent

__all__ = ["LauncherLine"]


class LauncherLine:
    """The talk of an agent with the command that started it.

    Args:
        agent: the head's or a member's.
        end: called with a grace in seconds to end the node.
    """

    def __init__(self, agent: Head | NodeAgent, end: Callable[[float], None]) -> None:
        self._agent = agent
        self._end = end
        self._writer: asyncio.StreamWriter | None = None
        self._control: socket.socket | None = None
        self._over = b""
        """The line with the end of the run, until it is sent."""
        if not isinstance(agent, Head):
            agent.over = self._tell_over

    def ready(self, control: socket.socket, address: str) -> None:
        """Tell over `control` that the node is ready, and the end of the run if that has come already."""
        self._control = control
        self._send(b"r" + address.encode() + b"\n" + self._over)

    def _send(self, data: bytes) -> None:
        # At once, and not by the loop, which may be about to end: a few hundred bytes, for which the socket has room.
        assert self._control is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the launcher is gone, which `serve` notices
            self._control.send(data)

    async def serve(self, control: socket.socket) -> None:
        """Talk over `control` until the launcher is gone, and then end the node. Cancelling ends the talk."""
        self._control = control
        reader, self._writer = await asyncio.open_connection(sock=control.dup())  # which the loop closes
        if isinstance(self._agent, Head):
            self._agent.members.ranks.changed = self._tell_ranks
        try:
            while line := await reader.readline():
                told = msgspec.json.decode(line)
                if not isinstance(self._agent, Head):
                    continue
                if "watch" in told:
                    self._tell_ranks()
                if "end" in told:
                    status, text, grace = told["end"]
                    self._agent.members.tell_over(status, text)
                    self._end(grace)
        except (BrokenPipeError, ConnectionResetError):  # the launcher was killed, perhaps with lines of ours unread
            pass
        finally:
            self._writer.close()
        self._end(0.0)

    def _tell_ranks(self) -> None:
        assert isinstance(self._agent, Head)
        self._tell("ranks", self._agent.members.ranks.joined())

    def _tell_over(self, status: int, text: str) -> None:
        self._over = msgspec.json.encode({"over": [status, text]}) + b"\n"
        if self._control is not None:
            self._send(self._over)

    def _tell(self, key: str, value: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(msgspec.json.encode({key: value}) + b"\n")
