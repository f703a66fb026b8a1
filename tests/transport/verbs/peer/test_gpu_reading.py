"""READs between the GPU memory of two ends on a fake fabric, and keys and seals that do not fit."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from tests.conformance.connection import ConnectedPair, Recorder
from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.objects.device_direct import reading_of
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.peer.connection import GpuReading

NBYTES = 3 << 20
PLACE = 5 << 48
"""The place of the object among the extents of its owner."""


class Block:
    """An object in GPU memory."""

    offset, nbytes = PLACE, NBYTES - 4096


@dataclass
class Ends:
    """Memory of a GPU at both ends: the right one has an object from byte 4096 on."""

    left: GpuReading
    right: GpuReading
    fds: tuple[int, int]
    here: Any
    there: Any
    data: bytes
    block: Block

    def wanted(self) -> RemoteRegion:
        """The object, as its owner names it."""
        seal = self.right.seal(77, self.block)
        return RemoteRegion(77, PLACE, self.block.nbytes, seal, self.there.rkey)

    async def read(self, wanted: RemoteRegion) -> bytes:
        """Read it to byte 0. Returns what is there."""
        await self.left.pull(wanted, 4096, 0, self.here.lkey, self)
        return os.pread(self.fds[0], wanted.nbytes, 0)


@pytest.fixture
async def ends(pair: ConnectedPair) -> AsyncIterator[Ends]:
    readings: list[Any] = [reading_of(each) for each in (pair.left, pair.right)]
    data = os.urandom(NBYTES)
    fds, regions = [], []
    for reading, content in zip(readings, (bytes(NBYTES), data), strict=True):
        fd = os.memfd_create("zcactor-gpu0")
        os.write(fd, content)
        fds.append(fd)
        regions.append(await reading.memory.get(4096, NBYTES, lambda fd=fd: os.dup(fd)))
    yield Ends(readings[0], readings[1], (fds[0], fds[1]), regions[0], regions[1], data, Block())
    for fd in fds:
        os.close(fd)


async def test_bytes_go_from_gpu_to_gpu(ends: Ends, left: Recorder, right: Recorder) -> None:
    assert await ends.read(ends.wanted()) == ends.data[4096:]
    part = replace(ends.wanted(), offset=PLACE + 100, nbytes=1)
    await ends.left.pull(part, 4196, NBYTES - 1, ends.here.lkey, None)
    assert os.pread(ends.fds[0], 1, NBYTES - 1) == ends.data[4196:4197]


async def test_an_object_that_was_freed(ends: Ends, left: Recorder, right: Recorder) -> None:
    wanted = ends.wanted()
    assert wanted.seal
    ends.block = Block()
    with pytest.raises(ObjectLost, match="it has been freed"):
        await ends.read(wanted)


@pytest.mark.parametrize("wrong", ["rkey", "bytes", "revoked"])
async def test_memory_that_the_owners_card_refuses(ends: Ends, left: Recorder, right: Recorder, wrong: str) -> None:
    wanted = ends.wanted()
    if wrong == "revoked":
        ends.right.memory.forget(4096)
    elif wrong == "rkey":
        wanted = replace(wanted, rkey=0x666)
    else:
        wanted = replace(wanted, nbytes=wanted.nbytes + 1)
    with pytest.raises(ObjectLost, match="failed"):
        await ends.read(wanted)
    if wrong != "revoked":
        assert await ends.read(ends.wanted()) == ends.data[4096:], "the queue pairs are connected again"


async def test_a_destination_that_our_card_refuses(ends: Ends, left: Recorder, right: Recorder) -> None:
    wanted = ends.wanted()
    ends.left.memory.forget(4096)
    with pytest.raises(OSError, match="failed"):
        await ends.read(wanted)


async def test_numbers_beyond_the_address_space(ends: Ends, left: Recorder, right: Recorder) -> None:
    with pytest.raises(ProtocolError, match="nothing can lie there"):
        await ends.left.pull(ends.wanted(), (1 << 64) - 1, 0, ends.here.lkey, None)


async def test_a_connection_that_ends(
    ends: Ends, pair: ConnectedPair, left: Recorder, right: Recorder, fabric: FakeFabric
) -> None:
    wanted = ends.wanted()
    fabric.manual = True
    reading = asyncio.ensure_future(ends.read(wanted))
    await asyncio.sleep(0)
    fabric.step()
    pair.right.abort()
    fabric.manual = False
    fabric.drain()
    with pytest.raises(ConnectionLost):
        await reading
    with pytest.raises(ConnectionLost):
        await ends.read(wanted)
