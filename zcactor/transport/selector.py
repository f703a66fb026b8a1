"""The choice of a transport for each peer: the first allowed one that works for the pair.

Processes of one host find each other in the run directory. It has the unix socket of each process, and a file with the
address of each process that listens by TCP, which only its user can read. A peer that cannot be reached by one
transport is tried by the next, and `Connection.rejected` has the reasons. (UCX decides likewise, for each peer and by
capability: Shamis et al., "UCX: An Open Source Framework for HPC Network APIs and Beyond", HOTI 2015.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from typing import TYPE_CHECKING, Final

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.base import Endpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from zcactor.transport.base import Connection

__all__ = ["FIRST_REST", "LONGEST_REST", "SelectingEndpoint"]

FIRST_REST, LONGEST_REST = 1.0, 10.0
"""First and longest time in seconds for which a failed address is not tried again. Each further failure doubles the
time. Otherwise each call would wait for as long as a connection takes to fail."""
_NAME: Final = re.compile(r"[0-9a-f]{32}")


class _Resting:
    """The addresses that have failed."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[float, float, str]] = {}
        """The end of the pause, its length, and the failure, by address."""

    def check(self, address: str, now: float) -> None:
        """Refuse an address whose pause is not over.

        Raises:
            ConnectionLost: the pause is not over. The message has the rest of it, and the failure.
        """
        until, _, reason = self._failed.get(address, (now, 0.0, ""))
        if now < until:
            raise ConnectionLost(f"{address} is not tried again for {until - now:.1f} s, because it failed: {reason}")

    def failed(self, address: str, now: float, reason: object) -> None:
        """Begin a pause: no process was reached at `address`."""
        self._failed = {place: entry for place, entry in self._failed.items() if now < entry[0] + LONGEST_REST}
        _, pause, _ = self._failed.get(address, (0.0, FIRST_REST / 2, ""))
        pause = min(2 * pause, LONGEST_REST)
        self._failed[address] = now + pause, pause, str(reason)

    def reached(self, address: str) -> None:
        """Forget the failures of `address`: a process has answered there."""
        self._failed.pop(address, None)


class SelectingEndpoint(Endpoint):
    """Several endpoints as one. Satisfies `zcactor.transport.base.Endpoint`; addresses are processes' names.

    Args:
        directory: the folder in which addresses are published; this user's, mode 0700.
        process: 16 random bytes that name this process.
        ways: the endpoints in the order of preference. Those that are `by_name` connect by the process's name, all
            others by the published address.
    """

    kind = "any"

    def __init__(self, directory: Path, process: bytes, ways: Sequence[Endpoint]) -> None:
        self.address = process.hex()
        self.ways = tuple(ways)
        self.seals_payloads = any(way.seals_payloads for way in ways)
        self.find: Callable[[str], Awaitable[str]] | None = None
        """Returns the address of a process on another host, or raises ConnectionLost."""
        self.is_urgent: Callable[[str], bool] = lambda _: False
        """Whether an address is tried at once, also where it has failed a moment ago: its process is being sought."""
        self.elsewhere: Callable[[str], str] = lambda _: ""
        """Returns the address of a process that may be elsewhere than the run directory says; empty for all others."""
        self._directory = directory
        self._resting = _Resting()

    @property
    def far_address(self) -> str:
        """The address of the endpoint that leads to other hosts; empty where there is no such endpoint."""
        return next((way.address for way in self.ways if not way.by_name), "")

    def find_by(self, find: Callable[[str], Awaitable[str]]) -> None:
        """See `zcactor.transport.base.Endpoint.find_by`."""
        self.find = find

    def viability(self) -> str | None:
        """Return None when one of the endpoints can work here, else the reasons against all."""
        problems = {way.kind: way.viability() for way in self.ways}
        if None in problems.values():
            return None
        return "; ".join(f"{kind}: {problem}" for kind, problem in problems.items())

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """Listen by all endpoints. See `zcactor.transport.base.Endpoint.start`."""
        for way in self.ways:
            await way.start(accepted)
            if not way.by_name:
                self._publish(way)

    def _publish(self, way: Endpoint) -> None:
        path = self._path(self.address, way.kind)
        part = path.with_suffix(".part")  # no process reads half an address
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            file.write(way.address)
        part.rename(path)

    def _withdraw(self, way: Endpoint) -> None:
        """Remove the address that `_publish` has written. A later head of the cluster may have put its own there."""
        path = self._path(self.address, way.kind)
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes() == way.address.encode("ascii"):
                path.unlink()

    def _path(self, process: str, kind: str) -> Path:
        if not _NAME.fullmatch(process):
            raise ProtocolError(f"{process!r} is no name of a process: it must be 32 hexadecimal digits")
        return self._directory / f"{process}.{kind}"

    async def connect(self, address: str) -> Connection:
        """Connect by the first endpoint that works. See `zcactor.transport.base.Endpoint.connect`.

        Raises:
            ConnectionLost: no endpoint works, or the address has failed a moment ago. The message has the reason
                against each endpoint.
        """
        rejected: dict[str, str] = {}
        failure: ConnectionLost | None = None
        moved = self.elsewhere(address)
        if moved and moved in self._published(address):
            moved = ""
        for way in self.ways:
            problem = None if way.by_name else way.viability()
            if moved and way.by_name:
                problem = "it is elsewhere now"
            if problem is not None:
                rejected[way.kind] = problem
                continue
            try:
                connection = await self._connect(way, moved or await self._address(address, way))
            except ConnectionLost as error:
                rejected[way.kind] = str(error.args[0])
                failure = error
                continue
            connection.rejected = {**rejected, **connection.rejected}
            return connection
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in rejected.items())
        raise ConnectionLost(f"process {address} cannot be reached: {reasons}") from failure

    async def _connect(self, way: Endpoint, address: str) -> Connection:
        """Connect by one endpoint, unless `address` is on another host and has failed a moment ago."""
        if way.by_name:
            return await way.connect(address)
        loop = asyncio.get_running_loop()
        if not self.is_urgent(address):
            self._resting.check(address, loop.time())
        try:
            connection = await way.connect(address)
        except ConnectionLost as error:
            self._resting.failed(address, loop.time(), error.args[0])
            raise
        self._resting.reached(address)
        return connection

    async def _address(self, process: str, way: Endpoint) -> str:
        if way.by_name:
            return process
        try:
            return self._path(process, way.kind).read_text("ascii")
        except FileNotFoundError:
            if self.find is not None:
                return await self.find(process)
            raise ConnectionLost(f"process {process} does not listen by {way.kind}, or has ended") from None

    def _published(self, process: str) -> list[str]:
        """The addresses of a process in the run directory."""
        found = []
        for way in self.ways:
            if not way.by_name:
                with contextlib.suppress(FileNotFoundError):
                    found.append(self._path(process, way.kind).read_text("ascii"))
        return found

    def abandon(self) -> None:
        """Abandon all endpoints, in a forked child."""
        for way in self.ways:
            way.abandon()

    async def aclose(self) -> None:
        """Stop listening and remove the published addresses. Connections stay open. Idempotent."""
        for way in self.ways:
            if not way.by_name:
                self._withdraw(way)
            await way.aclose()

    def dispose(self) -> None:
        """See `zcactor.transport.base.Endpoint.dispose`."""
        for way in self.ways:
            way.dispose()
