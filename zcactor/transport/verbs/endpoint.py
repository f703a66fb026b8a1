"""Peers that both have a device: met over TCP, connected by queue pairs, proven, and else left with TCP.

Over the authenticated socket both ends first say what they can do (`zcactor.transport.verbs.bootstrap.Offer`). Where
both can, each connects its queue pairs, says so, proves the path by a message and a READ whose bytes are checked, and
says how that went. Each step ends with a verdict of both, so that both come to the same decision: when either end
fails, or is not done in time, the connection goes on over TCP on the same socket, and knows why.

A process that only has peers on its own host has no such endpoint, and never touches a device. Where the host has none,
what drives one is not imported (`zcactor.transport.verbs.joining`).
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from zcactor.config import NOT_BY_TLS
from zcactor.errors import ConnectionLost
from zcactor.transport.sealing import Integrity
from zcactor.transport.tcp import TcpEndpoint
from zcactor.transport.verbs import meeting
from zcactor.transport.verbs.load import Absent

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from zcactor.transport.auth import Hello
    from zcactor.transport.base import Connection
    from zcactor.transport.tls import Tls
    from zcactor.transport.verbs.base import Binding
    from zcactor.transport.verbs.connection import VerbsConnection
    from zcactor.transport.verbs.engine import Engine
    from zcactor.transport.verbs.extents import PinnableArena

__all__ = ["VerbsEndpoint"]

logger = logging.getLogger("zcactor")


class VerbsEndpoint(TcpEndpoint):
    """Connects by RDMA where both ends can, and over TCP where not. Satisfies `zcactor.transport.base.Endpoint`.

    Args, beside those of `TcpEndpoint`:
        arena: this process's memory.
        binding: gives the binding of libibverbs, or why there is none; called by `start`.
        lookup: as of `VerbsConnection`.
        device, device_port, gid_index: which to use, None for the first that works.
        verbs_eager_limit: bytes of the largest payload in a frame by RDMA; None measures it with the device.
        falls_back: whether a peer with which RDMA does not work is served over TCP, instead of refused.
        sealing: as of `TcpEndpoint`. What is said through the socket is sealed then, rkeys among it, and so are the
            frames of a connection, by RDMA as over TCP. Bytes of arrays that are read by RDMA are not encrypted.
        tls: as of `TcpEndpoint`. There is no RDMA then, because what it carries cannot be encrypted.
    """

    kind = "verbs"

    def __init__(
        self,
        host: str,
        process: bytes,
        token: bytes,
        arena: PinnableArena,
        arena_fd: int,
        recv_depth: int = 1024,
        eager_limit: int = 16384,
        *,
        port: int = 0,
        binding: Callable[[], Binding | Absent],
        lookup: Callable[[int], Any],
        device: str | None = None,
        device_port: int | None = None,
        gid_index: int | None = None,
        verbs_eager_limit: int | None = None,
        falls_back: bool = True,
        sealing: bool = False,
        integrity: Integrity = Integrity.AUTO,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(
            host, process, token, arena_fd, arena.nbytes, recv_depth, eager_limit, port=port, sealing=sealing,
            integrity=integrity, tls=tls,
        )  # fmt: skip
        self.engine: Engine | None = None
        """The device in use; None before `start`, and where there is none that works."""
        self.problem = "" if tls is None else f"{NOT_BY_TLS}; add tcp to transports, or unset tls"
        """Why RDMA cannot be used here; empty before it was tried, and where it can."""
        self._arena = arena
        self._binding = binding
        self._lookup = lookup
        self._wanted = (device, device_port, gid_index)
        self._falls_back = falls_back
        self._verbs_eager_limit = verbs_eager_limit
        self._opened = tls is not None

    def viability(self) -> str | None:
        """None when this endpoint can work here, else the reason and the remedy. Where it falls back to TCP, that is
        enough."""
        return super().viability() or (None if self._falls_back else self.problem or None)

    def open_engine(self) -> Engine | None:
        """The engine, made at the first call; None where RDMA cannot be used, and `problem` says why."""
        if not self._opened:
            self._opened = True
            binding = self._binding()
            if isinstance(binding, Absent):
                self.problem = f"{binding.cause}; {binding.fix}"
            else:
                from zcactor.transport.verbs.joining import open_engine  # needs a device, which few hosts have

                device, port, gid_index = self._wanted
                found = open_engine(
                    binding, self._arena, device=device, port=port, gid_index=gid_index, local_address=self._host,
                    eager_limit=self._eager_limit, verbs_eager_limit=self._verbs_eager_limit,
                )  # fmt: skip
                if isinstance(found, str):
                    self.problem = found
                else:
                    self.engine = found
            logger.info("RDMA: %s", self.problem or f"{self.engine}")
        return self.engine

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """See `TcpEndpoint.start`. The device is opened first: that takes longer than a handshake should."""
        self.open_engine()
        await super().start(accepted)

    async def _make_connection(self, sock: socket.socket, hello: Hello, *, accepting: bool) -> Connection:
        """See `TcpEndpoint._make_connection`."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            made = await self._by_rdma(sock, hello, accepting=accepting)
            if isinstance(made, str) and not self._falls_back:
                raise ConnectionLost(f"RDMA does not work between this process and {hello.process.hex()}: {made}")
            undo.pop_all()
        if not isinstance(made, str):
            return made
        connection = await super()._make_connection(sock, hello, accepting=accepting)
        connection.rejected = {"verbs": made}
        return connection

    def _may_use_rdma(self) -> bool:
        return self._tls is None

    async def _by_rdma(self, sock: socket.socket, hello: Hello, *, accepting: bool) -> VerbsConnection | str:
        """The connection, or why there is none; both ends come to the same."""
        if self._tls is not None:
            return self.problem
        if not hello.rdma:
            return "the peer's transports do not allow it"
        engine = self.open_engine()
        if engine is None:
            await meeting.decline(sock, self.problem)
            return self.problem
        avoided = engine.avoided(hello.process) if self._falls_back else ""
        if avoided:
            await meeting.decline(sock, avoided)
            return avoided
        from zcactor.transport.verbs.joining import join

        return await join(
            engine, sock, self._peer(hello), recv_depth=min(hello.recv_depth, self._recv_depth), leads=not accepting,
            lookup=self._lookup, authorize=self._authorized,
        )  # fmt: skip

    def abandon(self) -> None:
        """In a forked child: let go of the socket and of the device, which are the parent's."""
        super().abandon()
        if self.engine is not None:
            self.engine.abandon()

    def dispose(self) -> None:
        """Close the device. Idempotent."""
        if self.engine is not None:
            self.engine.close()
