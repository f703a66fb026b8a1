"""The way to each peer: the first of the allowed transports that works for the pair, and why the others do not.

Processes of one host find each other in the run directory: the unix socket of each lies there, and, where it listens
for peers by TCP, a file with its address, which only its user can read. A peer that cannot be reached one way is tried
the next; `Connection.rejected` keeps why. (UCX decides likewise, per peer and by capability: Shamis et al., "UCX: An
Open Source Framework for HPC Network APIs and Beyond", HOTI 2015.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from typing import TYPE_CHECKING, Final

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.endpoints import EndpointContext

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from zcactor.transport.base import Connection, Endpoint

__all__ = ["FIRST_REST", "LONGEST_REST", "SelectingEndpoint"]

log = logging.getLogger("zcactor.transport")
FIRST_REST, LONGEST_REST = 1.0, 10.0
"""Seconds in which an address at which nobody was reached is not tried again, doubled by each further failure: calls to
it would each wait for as long as a connection takes to fail."""
_NAME: Final = re.compile(r"[0-9a-f]{32}")


class _Resting:
    """The addresses that have failed."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[float, float, str]] = {}
        """Until when, for how long, and why."""

    def check(self, address: str, now: float) -> None:
        """Refuse an address for a while after it has failed.

        Raises:
            ConnectionLost: the while is not over; the message has the rest of it, and the failure's reason.
        """
        until, _, reason = self._failed.get(address, (now, 0.0, ""))
        if now < until:
            raise ConnectionLost(f"{address} is not tried again for {until - now:.1f} s, because it failed: {reason}")

    def failed(self, address: str, now: float, reason: object) -> None:
        """Nobody was reached there."""
        self._failed = {place: entry for place, entry in self._failed.items() if now < entry[0] + LONGEST_REST}
        _, pause, _ = self._failed.get(address, (0.0, FIRST_REST / 2, ""))
        pause = min(2 * pause, LONGEST_REST)
        self._failed[address] = now + pause, pause, str(reason)

    def reached(self, address: str) -> None:
        """Somebody answers there."""
        self._failed.pop(address, None)


class SelectingEndpoint(EndpointContext):
    """Several endpoints as one. Satisfies `zcactor.transport.base.Endpoint`; addresses are processes' names.

    Args:
        directory: where addresses are published; ours, mode 0700.
        process: 16 random bytes that name this process.
        ways: the endpoints in the order of preference. One of kind ``"local"`` is connected to by the process's name,
            the others by the address that is published.
        required: the kind that connections to other hosts must have; empty for any. What came about in another way is
            closed, whoever connected.
    """

    kind = "any"

    def __init__(self, directory: Path, process: bytes, ways: Sequence[Endpoint], required: str = "") -> None:
        self.address = process.hex()
        self.ways = tuple(ways)
        self.seals_payloads = any(way.seals_payloads for way in ways)
        self.find: Callable[[str], Awaitable[str]] | None = None
        """Gives the address of a process that is not on this host; raises ConnectionLost where there is none."""
        self._directory = directory
        self._required = required
        self._resting = _Resting()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def far_address(self) -> str:
        """The address of the way that leads to other hosts."""
        return next((way.address for way in self.ways if way.kind != "local"), "")

    def find_by(self, find: Callable[[str], Awaitable[str]]) -> None:
        """See `zcactor.transport.base.Endpoint.find_by`."""
        self.find = find

    def viability(self) -> str | None:
        """None when one of the ways can work here, else the reasons against all."""
        problems = {way.kind: way.viability() for way in self.ways}
        if None in problems.values():
            return None
        return "; ".join(f"{kind}: {problem}" for kind, problem in problems.items())

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """Listen in all ways. See `zcactor.transport.base.Endpoint.start`."""

        def take(connection: Connection) -> None:
            if self._fits(connection):
                accepted(connection)
                return
            log.warning("refused a connection: %s", self._misfit(connection))
            task = asyncio.get_running_loop().create_task(connection.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

        for way in self.ways:
            await way.start(take if self._required else accepted)
            if way.kind != "local":
                self._publish(way)

    def _fits(self, connection: Connection) -> bool:
        return connection.kind in (self._required or connection.kind, "local")

    def _misfit(self, connection: Connection) -> str:
        reason = connection.rejected.get(self._required, "it is not among the transports")
        return (
            f"process {connection.peer.process.hex()} is reached by {connection.kind}, and require={self._required!r} "
            f"takes nothing else: {reason}"
        )

    def _publish(self, way: Endpoint) -> None:
        path = self._path(self.address, way.kind)
        part = path.with_suffix(".part")  # nobody reads half an address
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            file.write(way.address)
        part.rename(path)

    def _path(self, process: str, kind: str) -> Path:
        if not _NAME.fullmatch(process):
            raise ProtocolError(f"{process!r} is no name of a process: it must be 32 hexadecimal digits")
        return self._directory / f"{process}.{kind}"

    async def connect(self, address: str) -> Connection:
        """Connect in the first way that works. See `zcactor.transport.base.Endpoint.connect`.

        Raises:
            ConnectionLost: none works, or none that is required, or an address that has failed is not tried again yet;
                the message has the reason against each.
        """
        rejected: dict[str, str] = {}
        for way in self.ways:
            problem = None if way.kind == "local" else way.viability()
            if problem is not None:
                rejected[way.kind] = problem
                continue
            try:
                connection = await self._connect(way, await self._address(address, way.kind))
            except ConnectionLost as error:
                rejected[way.kind] = str(error.args[0])
                continue
            connection.rejected = {**rejected, **connection.rejected}
            if not self._fits(connection):
                await connection.aclose()
                raise ConnectionLost(self._misfit(connection))
            return connection
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in rejected.items())
        raise ConnectionLost(f"process {address} cannot be reached: {reasons}")

    async def _connect(self, way: Endpoint, address: str) -> Connection:
        """Connect in one way, unless `address` is of another host and has failed a moment ago."""
        if way.kind == "local":
            return await way.connect(address)
        loop = asyncio.get_running_loop()
        self._resting.check(address, loop.time())
        try:
            connection = await way.connect(address)
        except ConnectionLost as error:
            self._resting.failed(address, loop.time(), error.args[0])
            raise
        self._resting.reached(address)
        return connection

    async def _address(self, process: str, kind: str) -> str:
        if kind == "local":
            return process
        try:
            return self._path(process, kind).read_text("ascii")
        except FileNotFoundError:
            if self.find is not None:
                return await self.find(process)
            raise ConnectionLost(f"process {process} does not listen by {kind}, or has ended") from None

    def abandon(self) -> None:
        """In a forked child: let go of what is the parent's."""
        for way in self.ways:
            way.abandon()

    async def aclose(self) -> None:
        """Stop listening and remove what was published. Connections stay open. Idempotent."""
        for way in self.ways:
            if way.kind != "local":
                with contextlib.suppress(FileNotFoundError):
                    self._path(self.address, way.kind).unlink()
            await way.aclose()

    def dispose(self) -> None:
        """See `zcactor.transport.base.Endpoint.dispose`."""
        for way in self.ways:
            way.dispose()
