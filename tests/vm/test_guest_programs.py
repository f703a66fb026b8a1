"""Whole programs whose processes reach each other only by RDMA, over a real device."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.vm.guest import guest_only
from tests.vm.guest_actors import MIB, ROWS, Batch, Shard, checksum

pytestmark = guest_only
in_the_node = pytest.mark.asyncio(loop_scope="module")
"""All tests share one node and its loop: starting one takes seconds in a guest."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def node() -> AsyncIterator[zc.Runtime]:
    """A node whose processes can reach each other by RDMA only."""
    async with zc.init(transports=("verbs",), store_capacity=1088 * MIB) as node:
        yield node


@pytest.fixture
def since(node: zc.Runtime) -> zc.Stats:
    """The statistics of this process before the test."""
    return zc.stats()


async def spawn(rows: int, **options: Any) -> Any:
    """Spawn an actor; its handle is untyped, because the methods are called remotely."""
    return await Shard.options(**options).spawn(rows)


def only_read(stats: zc.Stats, nbytes: int | None = None, since: zc.Stats | None = None) -> bool:
    """Whether all arrays came by READ, and READs brought `nbytes` bytes; counted from `since` on, or from the start."""

    def more(name: str) -> int:
        value: int = getattr(stats, name) - (getattr(since, name) if since is not None else 0)
        return value

    rest = more("bytes_copied") or more("bytes_received") or more("bytes_mapped")
    return not rest and (nbytes is None or more("bytes_read") == nbytes)


@in_the_node
async def test_the_whole_program(since: zc.Stats) -> None:
    shard = await spawn(ROWS)
    path = await zc.explain(shard)
    assert path.transport == "verbs"
    assert path.rtt > 0
    grad = np.ones(ROWS)
    assert await shard.push(grad) == 1.0
    weights = shard.weights_now()
    other = await spawn(ROWS, name="mirror", max_restarts=3)
    assert await other.push(weights) == pytest.approx(0.1)
    before = zc.stats().bytes_read - since.bytes_read
    seen = [float(row[-1]) async for row in shard.batches(3)]
    assert seen == [0.0, 1.0, 2.0]
    assert only_read(zc.stats(), 3 * MIB + before, since)
    assert only_read(await zc.stats(shard), MIB)
    assert only_read(await zc.stats(other), MIB)


@in_the_node
async def test_calls_with_arrays_copy_nothing(since: zc.Stats) -> None:
    shard = await spawn(ROWS)
    for _ in range(20):
        await shard.push(np.ones(ROWS))
    assert only_read(zc.stats(), 0, since)
    assert only_read(await zc.stats(shard), 20 * MIB)


@in_the_node
async def test_a_call_with_an_array_takes_two_frames(since: zc.Stats) -> None:
    shard = await spawn(ROWS)
    await shard.push(np.ones(ROWS))
    calls, frames = 4, set()
    for _ in range(5):  # now and then another frame is among them: one of the agent's, or a release by itself
        before = zc.stats()
        for _ in range(calls):
            await shard.push(np.ones(ROWS))
        after = zc.stats()
        frames.add((after.frames_sent - before.frames_sent, after.frames_received - before.frames_received))
    assert (calls, calls) in frames
    assert all(calls <= sent <= calls + 1 and calls <= received <= calls + 1 for sent, received in frames)


@in_the_node
async def test_what_is_passed_on_does_not_come_through_the_caller(since: zc.Stats) -> None:
    first, second = await asyncio.gather(spawn(8), spawn(8))
    total = await second.sum_of(first.words(4 * MIB))
    assert total == await first.sum_of_words()
    assert only_read(await zc.stats(second), 4 * MIB)
    assert only_read(zc.stats(), 0, since)


@in_the_node
async def test_references_pass_from_actor_to_actor(since: zc.Stats) -> None:
    first, second, third = await asyncio.gather(*(spawn(8) for _ in range(3)))
    ref: Any = first.words(16 * MIB)
    for shard in (second, third):
        ref = shard.keep(ref)
    array = await ref
    assert checksum(array) == await first.sum_of_words()
    assert not array.flags.writeable
    assert only_read(zc.stats(), None, since)
    for shard, nbytes in ((first, 0), (second, 16 * MIB), (third, 16 * MIB)):
        assert only_read(await zc.stats(shard), nbytes)
    assert await second.nested({"x": zc.put(np.full(ROWS, 7.0)), "y": 1}) == 7.0
    assert await third.nested({"x": first.keep(np.full(ROWS, 8.0))}) == 8.0
    del ref, array
    await first.keep(np.zeros(1))


@in_the_node
async def test_the_edges_of_a_graph_are_read(since: zc.Stats) -> None:
    first, second = await asyncio.gather(spawn(8), spawn(8))
    async with zc.graph() as g:
        g.output(second.sum_of.bind(first.words.bind(g.input())))
    run = await g.compile()
    assert {edge.transport for edge in run.explain().edges} == {"verbs"}
    wanted = await run(4 * MIB)
    assert wanted == await first.sum_of_words()
    before = await zc.stats(second)
    for _ in range(4):
        assert await run(4 * MIB) == wanted
    assert only_read(await zc.stats(second), 16 * MIB, before)
    assert only_read(zc.stats(), 0, since)
    await run.close()


@in_the_node
async def test_a_group_reduces_over_rdma(since: zc.Stats) -> None:
    shards = await asyncio.gather(*(spawn(8) for _ in range(2)))
    group = await zc.group(shards)
    for nbytes in (64, MIB):
        sums = await asyncio.gather(*(shard.reduced(group, nbytes) for shard in shards))
        assert sums == [2.0 * nbytes] * 2


@in_the_node
async def test_values_of_many_kinds(since: zc.Stats) -> None:
    shard = await spawn(8)
    batch = await shard.batch(Batch("b", np.zeros(ROWS), [np.ones(ROWS), np.ones(4)]))
    assert (batch.name, batch.inputs[-1], [label[-1] for label in batch.labels]) == ("b!", 1.0, [2.0, 2.0])
    mine = np.full(ROWS, 2.0)
    moved = await shard.scale(zc.move(mine), 3.0)
    assert moved[-1] == 6.0
    moved[0] = 0.0
    back = await shard.scale(zc.move(moved), 2.0)
    assert (back[0], back[1]) == (0.0, 12.0)
    strided = np.arange(4 * ROWS, dtype=float).reshape(4, ROWS)[::2, ::-1]
    kept = await shard.keep(strided)
    np.testing.assert_array_equal(kept, strided)
    after = zc.stats()
    assert (after.bytes_received, after.bytes_mapped) == (since.bytes_received, since.bytes_mapped)


@in_the_node
async def test_names_restarts_and_kills(since: zc.Stats) -> None:
    shard = await spawn(8, name="one", max_restarts=1)
    again = await zc.get_actor("one")
    assert again == shard
    ref = shard.words(4 * MIB)
    await zc.wait([ref])
    total = await shard.sum_of_words()
    os.kill(await shard.pid(), signal.SIGKILL)
    assert checksum(await ref) == total  # bytes that have arrived belong to the reader
    del ref
    while True:
        try:
            assert await shard.restarts() == 1
            break
        except zc.ActorUnavailable:
            await asyncio.sleep(0)  # the error may be there at once, while the loop has yet to hear of the restart
    assert (await zc.explain(shard)).transport == "verbs"
    assert await shard.push(np.full(8, 3.0)) == 3.0
    assert len(await shard.words(4 * MIB)) == MIB // 2
    waiting = shard.wait()
    await zc.kill(shard)
    with pytest.raises(zc.ActorDied):
        await waiting
    with pytest.raises(zc.NoSuchActor):
        await zc.get_actor("one")


@in_the_node
async def test_errors_and_cancelling(since: zc.Stats) -> None:
    shard = await spawn(8)
    with pytest.raises(ValueError, match="on purpose"):
        await shard.fail("on purpose")
    with pytest.raises(TypeError):
        shard.fail()
    waiting = shard.wait()
    await shard.pid()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await shard.was_cancelled()
    with pytest.raises(zc.DeadlineExceeded):
        await shard.wait.options(timeout=0.5)()
    assert await shard.push(np.full(8, 2.0)) == 2.0


@in_the_node
async def test_a_stream_that_is_left(since: zc.Stats) -> None:
    shard = await spawn(8)
    async for row in shard.batches(1000):
        if row[0] == 20:
            break
    used = (await zc.stats(shard)).store_used
    assert used < 100 * MIB
    assert await shard.push(np.ones(8)) == 1.0


@pytest.mark.parametrize(
    "nbytes", [64 * MIB, *(pytest.param(size, marks=pytest.mark.slow) for size in (256 * MIB, 1 << 30))]
)
@in_the_node
async def test_large_arrays(since: zc.Stats, nbytes: int) -> None:
    shard = await spawn(8)
    array = await shard.words(nbytes)
    assert array.nbytes == nbytes
    assert checksum(array) == await shard.sum_of_words()
    assert only_read(zc.stats(), nbytes, since)


@pytest.mark.slow
def test_too_little_memory_may_be_locked() -> None:
    """`little_memory.py`: RDMA is refused with its reason and the remedy, and TCP is used."""
    program = "ulimit -l 64; exec " + shlex.join([sys.executable, str(Path(__file__).with_name("little_memory.py"))])
    command = ["setpriv", "--bounding-set", "-ipc_lock", "--", "sh", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    reason, fix = "RLIMIT_MEMLOCK is 65,536 bytes and the arena needs", "ulimit -l unlimited"
    assert reason in facts["viability"] and fix in facts["viability"]
    assert (facts["value"], facts["transport"]) == (2.0, "tcp")
    assert (facts["received"], facts["read"]) == (1 << 20, 0)
    assert "RLIMIT_MEMLOCK" in facts["alone"]
    assert reason in facts["rejected"]["verbs"] and fix in facts["rejected"]["verbs"]


@pytest.mark.slow
def test_arrays_on_gpus_are_read_from_host_memory() -> None:
    """`gpu_arrays.py`: the card registers no fake GPU's memory, so arrays go as by any card that does not reach a
    GPU."""
    command = [sys.executable, str(Path(__file__).with_name("gpu_arrays.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["path"], facts["proven"]) == ("host", True)
    assert {"mapped", "gpudirect"} <= facts["rejected"].keys()
    nbytes = facts["nbytes"]
    assert facts["there"] == ["DeviceArray", 3 * nbytes]
    assert facts["here"] == ["DeviceArray", 5 * nbytes]
    for moved in facts["moved"]:
        assert moved == {"read": nbytes, "received": 0, "mapped": 0, "through host memory": 2}


@pytest.mark.slow
def test_the_doctor() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zcactor", "doctor"], capture_output=True, text=True, timeout=140, check=False
    )
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "chosen rxe0 port 1, GID 1 (10.77.0.1); a READ through it was proven" in words
    assert "verbs yes a READ through rxe0 port 1 with GID 1 (10.77.0.1) was done" in words
