"""Endpoints with arenas for the tests of connections over TCP."""

from __future__ import annotations

import contextlib
import mmap
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tests.conformance.connection import ARENA_NBYTES, Side, turns
from tests.transport.local_arena import TOKEN, memfd
from zcactor.transport.stream.record_layer import Integrity
from zcactor.transport.stream.tls import load_tls
from zcactor.transport.tcp.endpoint import TcpEndpoint


@contextlib.contextmanager
def tcp_side(
    host: str = "127.0.0.1", nbytes: int = ARENA_NBYTES, *, sealing: bool = False, tls: Path | None = None,
    integrity: Integrity = Integrity.AUTO,
) -> Iterator[Side]:  # fmt: skip
    """An endpoint at `host`, not started, with an arena of its own; `tls` is a folder with certificates."""
    made = None if tls is None else load_tls(tls)
    with memfd(nbytes) as fd, mmap.mmap(fd, nbytes) as arena:
        process = secrets.token_bytes(16)
        with memoryview(arena) as view:
            endpoint = TcpEndpoint(host, process, TOKEN, fd, nbytes, sealing=sealing, integrity=integrity, tls=made)
            yield Side(endpoint, process, view)


@contextlib.asynccontextmanager
async def tcp_listener(host: str) -> AsyncIterator[TcpEndpoint]:
    """An endpoint that listens at `host`, greets, and ends each connection."""
    with tcp_side(host) as side:
        assert isinstance(side.endpoint, TcpEndpoint)
        await side.endpoint.start(lambda connection: connection.abort())
        yield side.endpoint
        await side.endpoint.aclose()
        await turns()
