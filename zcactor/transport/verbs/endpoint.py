"""Peers that both have a device: met over TCP, connected by queue pairs, proven, and else left with TCP.

Over the authenticated socket both ends first say what they can do (`zcactor.transport.verbs.bootstrap.Offer`). Where
both can, each connects its queue pairs, says so, proves the path by a message and a READ whose bytes are checked, and
says how that went. Each step ends with a verdict of both, so that both come to the same decision: when either end
fails, or is not done within `PROOF_SECONDS`, the connection goes on over TCP on the same socket, and knows why.

A process that only has peers on its own host has no such endpoint, and never touches a device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

from zcactor.config import NOT_BY_TLS
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.greeting import receive_exactly, send_all
from zcactor.transport.tcp import TcpEndpoint
from zcactor.transport.verbs.base import VerbsError
from zcactor.transport.verbs.bootstrap import MAX_MESSAGE, MAX_REASON, Message, Offer, Verdict, agree, decode, encode
from zcactor.transport.verbs.calibration import calibrate
from zcactor.transport.verbs.connection import VerbsConnection
from zcactor.transport.verbs.engine import Engine
from zcactor.transport.verbs.load import Absent
from zcactor.transport.verbs.pair import QueuePairs, slot_nbytes_for
from zcactor.transport.verbs.viability import NotViable, Viable, viability

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from zcactor.transport.auth import Hello
    from zcactor.transport.base import Connection
    from zcactor.transport.tls import Tls
    from zcactor.transport.verbs.base import Binding, Device
    from zcactor.transport.verbs.extents import PinnableArena

__all__ = ["PROOF_SECONDS", "VerbsEndpoint"]

MAX_VERBS_EAGER_LIMIT: Final = 32768
"""Bytes; slots have room for that and for the rest of a frame, and each peer takes 68 of them."""
PROOF_SECONDS: Final = 1.5
"""How long an end tries to prove a path. The device's own retries take 7.5 s and are not waited for."""

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
            frames of a connection that goes on over TCP. Frames and bytes by RDMA are not: isolate the fabric.
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
        tls: Tls | None = None,
    ) -> None:
        super().__init__(
            host, process, token, arena_fd, arena.nbytes, recv_depth, eager_limit, port=port, sealing=sealing, tls=tls
        )
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
            device, port, gid_index = self._wanted
            binding = self._binding()
            found = viability(
                binding, arena_nbytes=self._arena.nbytes, device=device, port=port, gid_index=gid_index,
                local_address=self._host,
            )  # fmt: skip
            if isinstance(found, NotViable) or isinstance(binding, Absent):
                self.problem = str(found)
            else:
                try:
                    opened = binding.open(found.device)
                    limit, reason = self._choose_limit(opened, found)
                    slot = slot_nbytes_for(limit)
                    self.engine = Engine(opened, found, self._arena, slot, asyncio.get_running_loop())
                    self.engine.eager_limit, self.engine.eager_reason = limit, reason
                except (OSError, VerbsError) as error:
                    self.problem = f"{found.device} cannot be used: {error}"
            logger.info("RDMA: %s", self.problem or f"{self.engine}")
        return self.engine

    def _choose_limit(self, device: Device, found: Viable) -> tuple[int, str]:
        """The eager limit by RDMA, and why it is that."""
        if self._verbs_eager_limit is not None:
            limit = min(self._verbs_eager_limit, MAX_VERBS_EAGER_LIMIT)
            return limit, f"arrays of at least {limit} bytes by reference: verbs_eager_limit says so"
        try:
            model = calibrate(device, found.port, found.gid, high=MAX_VERBS_EAGER_LIMIT)
        except OSError as error:
            limit = self._eager_limit
            return limit, f"arrays of at least {limit} bytes by reference: nothing could be measured ({error})"
        return model.eager_limit, model.reason

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
        if isinstance(made, VerbsConnection):
            return made
        connection = await super()._make_connection(sock, hello, accepting=accepting)
        connection.rejected = {"verbs": made}
        return connection

    async def _by_rdma(self, sock: socket.socket, hello: Hello, *, accepting: bool) -> VerbsConnection | str:
        """The connection, or why there is none; both ends come to the same."""
        pairs, reason = self._prepare()
        with contextlib.ExitStack() as undo:
            if pairs is not None:
                undo.callback(pairs.close)
            await _tell(sock, Verdict(reason[:MAX_REASON]) if pairs is None else pairs.ours)
            theirs = await _told(sock)
            if pairs is None:
                return reason
            if isinstance(theirs, Verdict):
                return f"the peer cannot use RDMA: {theirs.reason}"
            if not isinstance(theirs, Offer):
                raise ProtocolError(f"the peer answered an offer of RDMA with {type(theirs).__name__.lower()!r}")
            reason = self._connect(pairs, theirs)
            if reason:
                await _both(sock, reason)
                return reason
            undo.pop_all()
        # Before the peer hears that we are ready, as it may send its first message then.
        connection = VerbsConnection(
            pairs,
            self._peer(hello),
            recv_depth=min(hello.recv_depth, self._recv_depth),
            leads=not accepting,
            lookup=self._lookup,
        )
        proven = False
        try:
            reason = await _both(sock, "")
            if not reason:
                reason = await _both(sock, await self._prove(connection))
            proven = not reason
        finally:
            if not proven:
                connection.give_up()
        if reason:
            return f"{reason} ({pairs.describe()})"
        connection.adopt(sock)
        pairs.engine.extents.ahead(0, 1)
        return connection

    def _prepare(self) -> tuple[QueuePairs | None, str]:
        """Our end, or why there is none."""
        engine = self.open_engine()
        if engine is None:
            return None, self.problem
        try:
            return QueuePairs(engine, engine.eager_limit), ""
        except (OSError, VerbsError) as error:
            return None, f"queue pairs cannot be made: {error}"

    def _connect(self, pairs: QueuePairs, theirs: Offer) -> str:
        """Connect our end; what went wrong."""
        try:
            pairs.connect(theirs, agree(pairs.ours, theirs))
        except (OSError, VerbsError, ProtocolError) as error:
            return f"the queue pairs cannot be connected: {error}"
        return ""

    async def _prove(self, connection: VerbsConnection) -> str:
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                return await connection.prove()
        except TimeoutError:
            return f"neither a message nor a READ got through in {PROOF_SECONDS:g} s"
        except OSError as error:
            return f"the path could not be tried: {error}"

    def abandon(self) -> None:
        """In a forked child: let go of the socket and of the device, which are the parent's."""
        super().abandon()
        if self.engine is not None:
            self.engine.abandon()

    def dispose(self) -> None:
        """Close the device. Idempotent."""
        if self.engine is not None:
            self.engine.close()


async def _tell(sock: socket.socket, message: Message) -> None:
    await send_all(sock, encode(message))


async def _told(sock: socket.socket) -> Message:
    """The peer's next message.

    Raises:
        ProtocolError: it is none.
        ConnectionLost: the peer went away.
    """
    length = int.from_bytes(await receive_exactly(sock, 4), "little")
    if length > MAX_MESSAGE:
        raise ProtocolError(f"the peer announced a message of {length} bytes about RDMA; {MAX_MESSAGE} are allowed")
    return decode(await receive_exactly(sock, length))


async def _both(sock: socket.socket, reason: str) -> str:
    """Exchange verdicts: empty when both ends succeeded, else what went wrong at one."""
    await _tell(sock, Verdict(reason[:MAX_REASON]))
    theirs = await _told(sock)
    if not isinstance(theirs, Verdict):
        raise ProtocolError(f"the peer sent {type(theirs).__name__.lower()!r} in the place of a verdict")
    return reason or (f"at the peer: {theirs.reason}" if theirs.reason else "")
