"""Data sockets and the memory kept of pulled arrays: TCP on this machine alone, without namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

import zcactor as zc
from benchmarks.harness import Measurement, Scale, at_most, exactly, spread
from benchmarks.machine import descriptors
from tests.conformance.connection import Recorder
from tests.transport.tcp_arena import tcp_side
from zcactor.process import context
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.stream.handshake import Handshake, Purpose
from zcactor.transport.tcp import crew, pull
from zcactor.transport.tcp.authenticated import DataSeal
from zcactor.transport.tcp.connection import TcpConnection
from zcactor.transport.tcp.endpoint import TcpEndpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zcactor.transport.base import Connection, Endpoint

__all__ = ["idle", "keeping", "sockets"]

MIB: Final = 1 << 20
OPENED: Final = 200
MILLISECONDS: Final = 0.2
PEERS: Final = 1000
SHORT: Final = 20.0
"""The factor by which a minute is shorter here, and with it all times after which idle resources end."""
RESULTS, RESULT_MIB, STORE_MIB = 8, 100, 1024

Array = npt.NDArray[np.float64]


@contextlib.contextmanager
def _descriptors(wanted: int) -> Iterator[None]:
    """Raise the limit of descriptors for this process.

    Raises:
        OSError, ValueError: the system allows no more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(hard, wanted)))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _until(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether `holds` becomes true within that time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.01)
    return True


def _shaken(reader: Endpoint, owner: Endpoint, purpose: Purpose) -> tuple[Handshake, Handshake]:
    """Both ends of a complete handshake that no socket carries."""
    assert isinstance(reader, TcpEndpoint)
    assert isinstance(owner, TcpEndpoint)
    with socket.socket() as sock:
        left = reader._handshake(sock, purpose, accepting=False)
        right = owner._handshake(sock, Purpose.PEER, accepting=True)
    said, heard = bytearray(left.opening), bytearray()
    while left.wants or right.wants:
        for end, taken, given in ((right, said, heard), (left, heard, said)):
            if end.wants and len(taken) >= end.wants:
                message = bytes(taken[: end.wants])
                del taken[: end.wants]
                given += end.receive(message)
    return left, right


def _computed(reader: Endpoint, owner: Endpoint) -> float:
    """Milliseconds of processor time that both ends compute for a data socket: its handshake and its keys."""
    seals = [end.seals for end in _shaken(reader, owner, Purpose.PEER)]
    before = time.process_time()
    for _ in range(OPENED):
        for end, its in zip(_shaken(reader, owner, Purpose.DATA), seals, strict=True):
            if its is not None:
                DataSeal.of(its, end.transcript)
    return (time.process_time() - before) / OPENED * 1e3


async def sockets(scale: Scale) -> list[Measurement]:
    """Measure the processor time of both ends, which are in this process, for each newly opened data socket: their
    computing, and the whole time, with the system's share, the wake-up of the other end, and the thread that
    answers."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    computed: dict[bool, list[float]] = {False: [], True: []}
    for sealing in (False, True):
        with tcp_side(nbytes=MIB, sealing=sealing) as owner, tcp_side(nbytes=MIB, sealing=sealing) as reader:
            accepted: asyncio.Queue[Connection] = asyncio.Queue()
            await owner.endpoint.start(accepted.put_nowait)
            try:
                for turn in range(scale.runs + 1):
                    pairs, channels = [], []
                    for _ in range(OPENED // pull.STREAMS):
                        connection = await reader.endpoint.connect(owner.endpoint.address)
                        pairs += [connection, await accepted.get()]
                        assert isinstance(connection, TcpConnection)
                    for end in pairs:
                        end.start(Recorder())
                    before = time.process_time()
                    for end in pairs[::2]:
                        assert isinstance(end, TcpConnection)
                        channels += [await end._puller._connect() for _ in range(pull.STREAMS)]
                    spent = (time.process_time() - before) / OPENED * 1e3
                    for channel in channels:
                        channel.close()
                    for end in pairs:
                        end.abort()
                    if turn:
                        taken[sealing].append(spent)
                        computed[sealing].append(_computed(reader.endpoint, owner.endpoint))
            finally:
                await owner.endpoint.aclose()
                await reader.endpoint.aclose()
    return [
        Measurement("over_tcp", f"opening a data socket{how}, {what} of both ends", median(times[sealing]), "ms",
                    budget=budget, runs=len(times[sealing]), spread=spread(times[sealing]))
        for sealing, how in ((False, ""), (True, ", sealed"))
        for times, what, budget in (
            (computed, "computing", at_most(MILLISECONDS, "value")), (taken, "processor time", None)
        )
    ]  # fmt: skip


async def idle(scale: Scale) -> list[Measurement]:
    """Measure the leftovers of the data sockets of many peers that pulled once."""
    idle_seconds, rest = pull.IDLE, crew.REST
    pull.IDLE, crew.REST = idle_seconds / SHORT, rest / SHORT  # type: ignore[misc]
    connections: list[Connection] = []
    accepted: list[Connection] = []
    try:
        with _descriptors(6 * PEERS), tcp_side(nbytes=MIB) as owner, tcp_side(nbytes=MIB) as reader:

            def accept(connection: Connection) -> None:
                connection.start(Recorder())
                accepted.append(connection)

            await owner.endpoint.start(accept)
            try:
                for _ in range(PEERS):
                    connection = await reader.endpoint.connect(owner.endpoint.address)
                    connection.start(Recorder())
                    connections.append(connection)
                await _until(lambda: len(accepted) == PEERS, 30)
                open_before = descriptors()
                threads = set(threading.enumerate())
                for connection in connections:
                    await connection.pull(RemoteRegion(1, 0, 4096), reader.address, reader)
                pulled_at = time.monotonic()

                def left() -> tuple[int, int]:
                    data = [t for t in threading.enumerate() if t not in threads and t.name.startswith("zcactor data")]
                    return descriptors() - open_before, len(data)

                most = left()
                await _until(lambda: time.monotonic() - pulled_at >= 60 / SHORT, 60)
                sockets_left, threads_left = left()
            finally:
                for connection in connections + accepted:
                    connection.abort()
                await owner.endpoint.aclose()
                await reader.endpoint.aclose()
    finally:
        pull.IDLE, crew.REST = idle_seconds, rest  # type: ignore[misc]
    name = f"{PEERS:,} TCP peers that pulled once, a minute later"
    return [
        Measurement("over_tcp", f"{name}: data sockets of both ends", max(0, sockets_left), "", most[0], "right after",
                    exactly(0)),
        Measurement("over_tcp", f"{name}: threads", threads_left, "", most[1], "right after", exactly(0)),
    ]  # fmt: skip


@zc.actor
class Maker:
    """An actor that returns arrays."""

    def make(self, nbytes: int) -> Array:
        """Make an array of ones."""
        return np.ones(nbytes // 8)


async def keeping(scale: Scale) -> list[Measurement]:
    """Measure the memory that the store still uses one turn of the loop after results that came over TCP were
    dropped."""
    async with zc.init(transports=("tcp",), config=zc.Config(store_capacity=STORE_MIB * MIB)):
        process = context.current()
        keep, heap = process.config.store_keep_nbytes, process.store.heap
        maker: Any = await zc.spawn(Maker)
        held: list[Array] = [await maker.make(RESULT_MIB * MIB) for _ in range(RESULTS)]
        most = heap.used
        held.clear()
        await asyncio.sleep(0)
        used = heap.used
    name = f"{RESULTS} results of {RESULT_MIB} MiB held and dropped over TCP: used"
    return [Measurement("over_tcp", name, used / MIB, "MiB", most / MIB, "held", at_most(keep / MIB, "value"))]
