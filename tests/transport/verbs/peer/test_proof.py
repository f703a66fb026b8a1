"""A path counts as proven when a message and a READ have come through with the right bytes."""

from __future__ import annotations

import asyncio
import ctypes
import zlib
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.transport.verbs.device.sizing import PROOF_NBYTES
from zcactor.transport.verbs.peer.connection import PathProof


class Bench:
    """Queue pairs whose READ the test does."""

    def __init__(self, nbytes: int = 64, content: bytes = b"p" * 64) -> None:
        self.memory = ctypes.create_string_buffer(PROOF_NBYTES)
        self.probes = 0
        self.reads: list[Any] = []
        area = SimpleNamespace(address=lambda _: ctypes.addressof(self.memory), lkey=5)
        pairs: Any = SimpleNamespace(
            theirs=SimpleNamespace(proof=(0x1000, 7, nbytes, zlib.crc32(content))), seal_area=area,
            bulk=SimpleNamespace(post_reads=self.reads.extend),
        )  # fmt: skip
        self.sender: Any = SimpleNamespace(probe=self._probe)
        self.proof = PathProof(pairs, asyncio.get_running_loop())

    def _probe(self) -> None:
        self.probes += 1

    async def begun(self) -> asyncio.Future[str]:
        """Start the proof; it has posted all its requests on return."""
        running = asyncio.ensure_future(self.proof.run(self.sender))
        await asyncio.sleep(0)
        return running


async def test_both_ways() -> None:
    bench = Bench()
    running = await bench.begun()
    (read,) = bench.reads
    assert (read.remote_address, read.rkey, read.nbytes, read.lkey, bench.probes) == (0x1000, 7, 64, 5, 1)
    bench.memory.raw = b"p" * 64 + bytes(PROOF_NBYTES - 64)
    bench.proof.read.set_result("")
    await asyncio.sleep(0)
    assert not running.done(), "the peer's message is not here"
    bench.proof.probed()
    bench.proof.probed()
    assert await running == ""
    bench.proof.fail("too late")


async def test_other_bytes() -> None:
    bench = Bench()
    running = await bench.begun()
    bench.proof.read.set_result("")
    bench.proof.probed()
    assert "delivered other bytes" in await running


@pytest.mark.parametrize("nbytes", [0, PROOF_NBYTES + 1])
async def test_a_number_of_bytes_that_is_of_no_use(nbytes: int) -> None:
    bench = Bench(nbytes)
    assert f"the peer offers {nbytes} bytes" in await bench.proof.run(bench.sender)
    assert not bench.reads and not bench.probes


async def test_what_has_failed() -> None:
    bench = Bench()
    running = await bench.begun()
    bench.proof.fail("a message failed")
    assert await running == "a message failed"
