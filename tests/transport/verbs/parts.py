"""Parts of a connection by RDMA, each without the rest: open devices of a fake fabric, connected queue pairs, engines.

None of them waits: the test says when the fabric works and when completions are taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
from collections.abc import Iterator

from tests.transport.local_arena import memfd
from tests.transport.verbs.sides import Arena
from zcactor.transport.verbs.device.engine import Engine
from zcactor.transport.verbs.device.sizing import slot_nbytes_for
from zcactor.transport.verbs.device.viability import Viable
from zcactor.transport.verbs.driver.base import Completion, PathAttributes, QpAddress
from zcactor.transport.verbs.driver.fake import FakeDevice, FakeFabric
from zcactor.transport.verbs.driver.fake_queues import FakeCompletionQueue

MIB = 1 << 20
EAGER = 1024
"""The eager limit of a connection."""
SLOT = slot_nbytes_for(EAGER)
"""Bytes of a slot for that limit."""


def open_device(fabric: FakeFabric, name: str) -> FakeDevice:
    """Open an adapter of that name, and make it if it does not exist."""
    if name not in fabric.nics:
        fabric.add_nic(name)
    return fabric.binding(name).open(name)


class Memory:
    """Mapped bytes and their address. It takes weak references, as the keeper of a pull does."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.nbytes = nbytes


class Wire:
    """Two connected queue pairs, each on a device and completion queue of its own.

    The right one has no receives unless it gets a shared receive queue of that depth.
    """

    def __init__(
        self, fabric: FakeFabric, *, max_send_wr: int = 64, max_inline: int = 0, receives: int = 0, depth: int = 4096
    ) -> None:
        self.fabric = fabric
        self.devices = (open_device(fabric, "fake0"), open_device(fabric, "fake1"))
        self.cqs = tuple(device.create_completion_queue(depth) for device in self.devices)
        self.srq = self.devices[1].create_shared_receive_queue(receives) if receives else None
        self.left, self.right = (
            device.create_queue_pair(cq, srq, max_send_wr=max_send_wr, max_inline=max_inline)
            for device, cq, srq in zip(self.devices, self.cqs, (None, self.srq), strict=True)
        )
        self.join()

    def join(self) -> None:
        """Connect both queue pairs, which are in RESET."""
        pairs = ((self.left, self.right, 1), (self.right, self.left, 2))
        for ours, theirs, psn in pairs:
            gid = theirs.device.nic.gids[1].raw
            ours.connect(QpAddress(theirs.qp_num, 3 - psn, gid, 0, 5), PathAttributes(1, 1, psn, 5))

    def rejoin(self) -> None:
        """Connect both queue pairs anew; they are drained."""
        for qp in (self.left, self.right):
            qp.reset()
        self.join()

    @property
    def cq(self) -> FakeCompletionQueue:
        """The left queue pair's completion queue."""
        return self.cqs[0]

    def completions(self) -> list[Completion]:
        """The completions of the left queue pair."""
        return self.cq.poll(1 << 16)


def viable(device: FakeDevice) -> Viable:
    """The answer of `viability` for a fake device on Ethernet."""
    return Viable("fake", device.name, device.port(1), device.gids(1)[1], device.attributes)


@contextlib.contextmanager
def arena(nbytes: int = 1 << 16) -> Iterator[Arena]:
    """An arena in a memfd."""
    with memfd(nbytes) as fd:
        yield Arena(fd, nbytes)


@contextlib.contextmanager
def engine_on(fabric: FakeFabric, name: str, slot_nbytes: int = 1024, nbytes: int = 1 << 16) -> Iterator[Engine]:
    """An engine on an adapter of that name, for use inside the running loop."""
    device = open_device(fabric, name)
    with arena(nbytes) as memory:
        engine = Engine(device, viable(device), memory, slot_nbytes, asyncio.get_running_loop())
        try:
            yield engine
        finally:
            engine.close()
