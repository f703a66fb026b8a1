"""Ends of connections over a real device: in the test's own process, and in others that it may kill.

A `Node` is an endpoint with an arena. A `Peer` is a node in a process of its own: its methods are called by name, and
their results come back through a pipe. Such processes are forked (`tests/vm/nursery.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import struct
import weakref
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.conformance.connection import PullKeeper, Recorder, send
from tests.transport.local_arena import TOKEN, memfd
from tests.transport.verbs.sides import Arena, Whole
from tests.vm.nursery import Child
from zcactor.transport import Connection, RemoteRegion
from zcactor.transport.verbs.driver.base import Read
from zcactor.transport.verbs.driver.bindings import bindings
from zcactor.transport.verbs.endpoint import VerbsEndpoint
from zcactor.transport.verbs.peer.connection import VerbsConnection

MADV_POPULATE_WRITE = 23  # of Linux 5.14; madvise(2)

ALL = 1
"""The id of the object that spans all of a node's arena."""

NUMBER = struct.Struct("<I")

WORK = bytes(1 << 18)
"""The work of one call: a batch of calls takes longer than a device retries where no receive is posted."""


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that are the same for the same seed, with a period of an odd number of bytes."""
    piece = random.Random(seed).randbytes((1 << 20) - 3)
    return (piece * (nbytes // len(piece) + 1))[:nbytes]


class Resident(Arena):
    """An arena that another thread may write to while it is being pinned."""

    def pin(self, offset: int, nbytes: int) -> None:
        """Make all pages resident, and leave their contents alone."""
        self.memory.madvise(MADV_POPULATE_WRITE, offset, nbytes)


class Link(Recorder):
    """One connection of a node, with the frames that it has received."""

    def __init__(self, node: Node, connection: Connection) -> None:
        super().__init__()
        self.node = node
        self.connection = connection
        self.answers = False
        """Whether each frame goes back at once, before the next message of the batch is looked at."""
        connection.start(self)

    def frames_received(self, data: memoryview) -> None:
        """Record frames, and where `answers` is set send each back after some work."""
        before = len(self.frames)
        super().frames_received(data)
        if self.answers:
            for frame in self.frames[before:]:
                zlib.crc32(WORK)
                send(self.connection, [frame])

    @property
    def verbs(self) -> VerbsConnection:
        """The connection, which has to be an RDMA one."""
        assert isinstance(self.connection, VerbsConnection), self.connection.rejected
        return self.connection

    def connection_lost(self, cause: Exception | None) -> None:
        """Record the end, and remove the link from the node."""
        super().connection_lost(cause)
        self.node.links.remove(self)

    async def take(self, count: int) -> list[bytes]:
        """Wait for the next frames, and take them out of the record."""
        await self.wait_frames(count)
        taken = self.frames[:count]
        del self.frames[:count]
        return taken


class Node:
    """An endpoint with an arena.

    Args:
        nbytes: bytes of the arena.
        host, port: the address to listen at.
        process: its name, 16 bytes; random by default.
        binding: as `zcactor.transport.verbs.driver.bindings.bindings` takes it.
        falls_back: serve peers over TCP where RDMA does not work.
    """

    def __init__(
        self,
        nbytes: int = 1 << 20,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        process: bytes | None = None,
        binding: str | None = None,
        falls_back: bool = False,
    ) -> None:
        self._stack = contextlib.ExitStack()
        fd = self._stack.enter_context(memfd(nbytes))
        self.arena = Resident(fd, nbytes)
        self.objects: dict[int, Whole] = {ALL: Whole(0, nbytes)}
        self.endpoint = VerbsEndpoint(
            host, process or secrets.token_bytes(16), TOKEN, self.arena, fd, port=port,
            binding=lambda: bindings(binding), lookup=self.objects.get, falls_back=falls_back, verbs_eager_limit=16384,
        )  # fmt: skip
        self.links: list[Link] = []
        """The open links, the oldest first."""
        self.accepted: asyncio.Queue[Link] = asyncio.Queue()
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Listen."""
        await self.endpoint.start(lambda connection: self.accepted.put_nowait(self.link(connection)))

    def link(self, connection: Connection) -> Link:
        """Make a link of a connection."""
        link = Link(self, connection)
        self.links.append(link)
        return link

    async def connect(self, address: str) -> Link:
        """Connect to the node that listens at `address`."""
        return self.link(await self.endpoint.connect(address))

    async def close(self) -> None:
        """Close all connections, the endpoint and the arena."""
        for task in self._tasks:
            task.cancel()
        for link in list(self.links):
            link.connection.abort()
            await link.wait_lost()
        engine = self.endpoint.engine
        while engine is not None and engine.connections:
            await asyncio.sleep(0)
        await self.endpoint.aclose()
        self.endpoint.dispose()
        self._stack.close()

    # ---- commands for a peer; `link` is the index of a connection, the oldest first

    async def accept(self) -> None:
        """Wait for a connection from a peer."""
        await self.accepted.get()

    async def fill(self, seed: int, nbytes: int) -> None:
        """Write `pattern` to the start of the arena."""
        self.arena.memory[:nbytes] = pattern(seed, nbytes)

    async def free(self, object_id: int) -> None:
        """Forget an object."""
        del self.objects[object_id]

    async def make(self, object_id: int, offset: int, nbytes: int) -> None:
        """Add an object of these bytes."""
        self.objects[object_id] = Whole(offset, nbytes)

    async def export(self, object_id: int, link: int = 0) -> tuple[int, int]:
        """Wait until an object is registered; return its seal and its rkey."""
        found, connection = self.objects[object_id], self.links[link].verbs
        await connection.extents.get(found.offset, found.nbytes)
        assert connection.export is not None
        return connection.export(object_id, found.offset, found.nbytes)

    async def revoke(self, offset: int, nbytes: int) -> None:
        """Unregister the memory around these bytes while peers may be reading it."""
        assert self.endpoint.engine is not None
        region = self.endpoint.engine.extents.find(offset, nbytes)
        assert region is not None
        region.close()

    async def send(self, count: int, nbytes: int = 0, link: int = 0) -> None:
        """Send numbered frames."""
        connection = self.links[link].connection
        for number in range(count):
            send(connection, [NUMBER.pack(number) + bytes(nbytes)])
            if number % 16 == 15:
                await asyncio.sleep(0)

    async def numbers(self, count: int, link: int = 0) -> list[int]:
        """Wait for the next frames, and return their numbers."""
        return [NUMBER.unpack_from(frame)[0] for frame in await self.links[link].take(count)]

    async def answer(self, link: int = 0) -> None:
        """Send each frame back at once, from now on."""
        self.links[link].answers = True

    async def flood(self, link: int = 0) -> None:
        """Send frames without end, from now on."""
        connection = self.links[link].verbs

        async def endlessly() -> None:
            while True:
                while connection._sender.pending:
                    await asyncio.sleep(0)
                send(connection, [bytes(connection.max_frame)] * 16)

        self._tasks.append(asyncio.create_task(endlessly()))
        while connection._sender.messages < 100:  # more messages than the peer has receives for
            await asyncio.sleep(0)

    async def block(self, fifo: str) -> None:
        """From the next turn of the loop on, block in a system call until another process writes to the file."""
        asyncio.get_running_loop().call_soon(lambda: Path(fifo).read_bytes())

    async def die_reading(self, nbytes: int, link: int = 0) -> None:
        """Pull, and die by SIGKILL in the middle."""
        link_ = self.links[link]
        in_the_middle_of_reads(link_.verbs, lambda: os.kill(os.getpid(), signal.SIGKILL))
        await pull_of(self, link_, 0, nbytes)[0]

    async def registered(self) -> None:
        """Wait until the start of the arena is registered, which every connection begins in the background."""
        assert self.endpoint.engine is not None
        await self.endpoint.engine.extents.get(0, 1)

    async def connections(self) -> int:
        """The number of connections that use the device."""
        assert self.endpoint.engine is not None
        return self.endpoint.engine.connections

    async def resident(self) -> tuple[int, int]:
        """Bytes of memory and open descriptors of this process."""
        return resident(), len(os.listdir("/proc/self/fd"))


def in_the_middle_of_reads(connection: VerbsConnection, action: Callable[[], None]) -> None:
    """Call `action` when some of the next pull's READs have been posted, and others have not.

    A test cannot meet that moment from outside: on a small machine the device may do all READs before the loop goes on.
    """
    puller = connection.puller
    pair = puller._qp
    posted = []

    class Counting:
        def post_reads(self, reads: Sequence[Read]) -> None:
            pair.post_reads(reads)
            posted.append(reads)
            if len(posted) == 2:
                action()

        def __getattr__(self, name: str) -> Any:
            return getattr(pair, name)

    puller._qp = Counting()


def pull_of(node: Node, link: Link, offset: int, nbytes: int, address: int = 0) -> tuple[asyncio.Task[None], Any]:
    """Start a pull of the peer's memory.

    Returns its task, and a weak reference to an object that it keeps while memory here may be written to.
    """
    keeper = PullKeeper()
    target = node.arena.address + address
    coroutine = link.connection.pull(RemoteRegion(ALL, offset, nbytes), target, keeper)
    return asyncio.create_task(coroutine), weakref.ref(keeper)


def same(node: Node, seed: int, nbytes: int, at: int = 0) -> bool:
    """Whether these bytes of the arena are the bytes of `pattern`."""
    with memoryview(node.arena.memory) as view:
        return zlib.crc32(view[at : at + nbytes]) == zlib.crc32(pattern(seed, nbytes))


# ---- in processes of their own


class Peer:
    """A node in a process of its own, which ends with the block. Takes the arguments of `Node`."""

    def __init__(self, nbytes: int = 1 << 20, **settings: Any) -> None:
        self.process = Child(_serve, nbytes, settings)
        self.address: str = self.process.pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.pipe.close()

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the node, and return its result."""
        self.process.pipe.send((method, arguments))
        return await asyncio.to_thread(self.process.pipe.recv)

    async def connected(self, node: Node) -> Link:
        """Connect from `node`; return the link when the peer has accepted it as well."""
        link = await node.connect(self.address)
        await self.ask("accept")
        return link


def _serve(pipe: Pipe, nbytes: int, settings: dict[str, Any]) -> None:
    asyncio.run(_answer(pipe, Node(nbytes, **settings)))


async def _answer(pipe: Pipe, node: Node) -> None:
    await node.start()
    pipe.send(node.endpoint.address)
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), asked.set)
    while True:
        await asked.wait()
        asked.clear()
        while pipe.poll():
            method, arguments = pipe.recv()
            pipe.send(await getattr(node, method)(*arguments))


@contextlib.asynccontextmanager
async def listening(nbytes: int = 1 << 20, **settings: Any) -> AsyncIterator[Node]:
    """A node in this process."""
    node = Node(nbytes, **settings)
    try:
        await node.start()
        yield node
    finally:  # a failing test must not leave the device's objects to the garbage collector
        await node.close()


@contextlib.contextmanager
def fifo(folder: Path) -> Iterator[str]:
    """The path of a FIFO to block on; leaving the block lets the readers go on."""
    path = folder / "fifo"
    os.mkfifo(path)
    yield str(path)
    path.write_bytes(b"")
