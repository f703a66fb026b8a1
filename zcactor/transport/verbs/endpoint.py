"""Peers that both have a device: they connect over TCP, then by queue pairs, or stay with TCP.

Over the authenticated socket both ends first send the ports that they can use, and agree on pairs of them, which are
tried in turn (`zcactor.transport.verbs.peer.ports`). For each pair they send their abilities
(`zcactor.transport.verbs.peer.bootstrap.Offer`). Each connects its queue pairs, says so, proves the path by a message
and a READ whose bytes are checked, and sends the result. Each step ends with a verdict of both ends, so that both
decide alike. When one end fails with all pairs, or is not done in time, the connection continues over TCP on the same
socket, and has the reasons.

A process with peers on its own host only has no such endpoint, and never touches a device. Where the host has no
device, the code for devices is not imported (`zcactor.transport.verbs.peer.connect`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from zcactor.config import MAX_VERBS_EAGER_LIMIT, NOT_BY_TLS, rdma_of, security_of
from zcactor.errors import ConnectionLost
from zcactor.logs import logger
from zcactor.transport.registry import EndpointSettings, Transport
from zcactor.transport.stream.record_layer import Integrity
from zcactor.transport.tcp.endpoint import TcpEndpoint
from zcactor.transport.verbs.driver.bindings import Absent, bindings
from zcactor.transport.verbs.driver.presence import has_device
from zcactor.transport.verbs.peer import negotiation

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from zcactor.transport.base import Connection
    from zcactor.transport.stream.handshake import Introduction
    from zcactor.transport.stream.tls import Tls
    from zcactor.transport.verbs.device.engine import Engine
    from zcactor.transport.verbs.device.registration_cache import PinnableArena
    from zcactor.transport.verbs.driver.base import Binding
    from zcactor.transport.verbs.peer.connection import VerbsConnection
    from zcactor.transport.verbs.peer.ports import OwnPorts

__all__ = ["TRANSPORT", "VerbsEndpoint"]


class VerbsEndpoint(TcpEndpoint):
    """An endpoint by RDMA where both ends can, and by TCP otherwise. Satisfies `zcactor.transport.base.Endpoint`.

    Args, beside those of `TcpEndpoint`:
        arena: the arena of this process.
        binding: returns the binding of libibverbs, or the reason why there is no binding; called by `start`.
        lookup: as for `VerbsConnection`.
        device, device_port, gid_index: the device to use; with None all ports that work are offered to peers.
        verbs_eager_limit: bytes of the largest payload in a frame by RDMA.
        marks: traffic class, service level and index of the partition's key of all packets by RDMA.
        falls_back: whether TCP is used for a peer with which RDMA does not work. Otherwise the peer is refused.
        sealing: as for `TcpEndpoint`. Messages on the socket, with rkeys among them, are encrypted then, and so are the
            frames of a connection, by RDMA as over TCP. Bytes of arrays that are read by RDMA are not encrypted.
        tls: as for `TcpEndpoint`. There is no RDMA then, because its bytes cannot be encrypted.
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
        verbs_eager_limit: int = MAX_VERBS_EAGER_LIMIT,
        marks: tuple[int, int, int] = (0, 0, 0),
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
        """The engine of the preferred port; None before `start`, and without a device that works."""
        self._ports: OwnPorts | None = None
        self.problem = "" if tls is None else f"{NOT_BY_TLS}; add tcp to transports, or unset security"
        """The reason against RDMA here; empty before an attempt, and where RDMA can be used."""
        self._arena = arena
        self._binding = binding
        self._lookup = lookup
        self._wanted = (device, device_port, gid_index)
        self._marks = marks
        self._falls_back = falls_back
        self._verbs_eager_limit = verbs_eager_limit
        self._opened = tls is not None

    @property
    def engines(self) -> list[Engine]:
        """The engines of the ports in use, that of the preferred one first."""
        return [] if self._ports is None else self._ports.engines

    def viability(self) -> str | None:
        """Return None when this endpoint can work here, else the reason and the remedy. With a fall-back to TCP it can
        always work."""
        return super().viability() or (None if self._falls_back else self.problem or None)

    def open_engine(self) -> Engine | None:
        """Return the engine, made at the first call. None where RDMA cannot be used: `problem` has the reason."""
        if not self._opened:
            self._opened = True
            binding = self._binding()
            if isinstance(binding, Absent):
                self.problem = f"{binding.cause}; {binding.fix}"
            else:
                from zcactor.transport.verbs.peer.connect import open_ports  # few hosts have a device, which it is for

                device, port, gid_index = self._wanted
                found = open_ports(
                    binding, self._arena, device=device, port=port, gid_index=gid_index, local_address=self._host,
                    eager_limit=self._verbs_eager_limit, marks=self._marks,
                )  # fmt: skip
                if isinstance(found, str):
                    self.problem = found
                else:
                    self._ports = found
                    (self.engine,) = found.engines
            logger.info("RDMA: %s", self.problem or f"{self.engine}")
        return self.engine

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """See `TcpEndpoint.start`. The device is opened first, as that takes longer than a handshake may take."""
        self.open_engine()
        await super().start(accepted)

    async def _make_connection(self, sock: socket.socket, hello: Introduction, *, accepting: bool) -> Connection:
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

    async def _by_rdma(self, sock: socket.socket, hello: Introduction, *, accepting: bool) -> VerbsConnection | str:
        """Make the connection, or return the reason against it. Both ends decide alike."""
        if self._tls is not None:
            return self.problem
        if not hello.rdma:
            return "the peer's transports do not allow it"
        self.open_engine()
        if self._ports is None:
            await negotiation.decline(sock, self.problem)
            return self.problem
        numbers, avoided = self._ports.offered_to(hello.process, even_broken=not self._falls_back)
        if avoided:
            await negotiation.decline(sock, avoided)
            return avoided
        from zcactor.transport.verbs.peer.connect import join

        return await join(
            self._ports, numbers, sock, self._peer(hello), leads=not accepting,
            recv_depth=min(hello.recv_depth, self._recv_depth), lookup=self._lookup, authorize=self._authorized,
        )  # fmt: skip

    def abandon(self) -> None:
        """Close a forked child's copy of the socket, and never use the device again, which belongs to the parent."""
        super().abandon()
        for engine in self.engines:
            engine.abandon()

    def dispose(self) -> None:
        """Close the devices. Idempotent."""
        for engine in self.engines:
            engine.close()


def _endpoint(settings: EndpointSettings) -> VerbsEndpoint:
    config, store = settings.config, settings.store
    rdma, security = rdma_of(config.verbs), security_of(config.security)
    arena = store.arena
    endpoint = VerbsEndpoint(
        config.host, settings.process, settings.token, arena, arena.fd, config.recv_depth, config.eager_limit,
        binding=lambda: bindings(rdma.binding, quick=True), lookup=store.lookup, device=rdma.device,
        device_port=rdma.port, gid_index=rdma.gid_index, marks=rdma.marks,
        verbs_eager_limit=min(2 * config.eager_limit, MAX_VERBS_EAGER_LIMIT),
        falls_back="tcp" in settings.names, port=settings.port, sealing=security.sealing,
        integrity=Integrity[security.integrity.upper()], tls=settings.tls,
    )  # fmt: skip
    endpoint.let_in(settings)
    return endpoint


def _preload() -> None:
    if has_device():
        import zcactor.transport.verbs.peer.connect  # noqa: F401


TRANSPORT: Final = Transport(_endpoint, shares="tcp", preload=_preload)
"""See `zcactor.transport.registry`."""
