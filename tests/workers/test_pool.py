"""The pool of workers, with the test in the place of its zygote."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zcactor.ids import ProcessId
from zcactor.workers.pool import Pool, describe_exit
from zcactor.workers.worker_table import WorkerRecord

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
DRIVER = ProcessId(bytes(16))


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "its process exited with status 0"),
        (3 << 8, "its process exited with status 3"),
        (signal.SIGKILL, "its process was killed by signal 9 (SIGKILL) (perhaps the kernel, out of memory)"),
        (signal.SIGSEGV | 0x80, "its process was killed by signal 11 (SIGSEGV)"),
        (None, "its process ended"),
        (signal.SIGRTMIN + 1, "its process was killed by signal 35"),
    ],
)
def test_exits_in_words(status: int | None, text: str) -> None:
    assert describe_exit(status) == text


class Harness:
    """A pool whose zygote is the test."""

    def __init__(self, directory: Path) -> None:
        ours, self.zygote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.zygote.setblocking(False)
        self.output: list[tuple[str, str, list[str]]] = []
        self.ended: list[WorkerRecord] = []
        self.lost = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.pool = Pool(
            self.loop, ours, {"directory": str(directory)},
            output=lambda stream, worker, lines: self.output.append((stream, worker.label, lines)),
            ended=self.ended.append, lost=self.lost.set,
        )  # fmt: skip

    async def request(self) -> tuple[dict[str, Any], list[int]]:
        """The pool's next request, with its descriptors."""
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self.zygote, 1 << 20, 2)
            except BlockingIOError:
                await asyncio.sleep(0)
                continue
            return msgspec.msgpack.decode(message), fds

    def report(self, **facts: Any) -> None:
        """Send a report to the pool."""
        self.zygote.send(msgspec.msgpack.encode(facts))


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    async with asyncio.timeout(PATIENCE):
        made = Harness(tmp_path)
        before = len(os.listdir("/proc/self/fd"))
        yield made
        for record in list(made.pool.by_process.values()):
            record.pid = 0  # no process at all
        made.pool.close()
        made.zygote.close()
        assert len(os.listdir("/proc/self/fd")) <= before - 2


async def test_a_worker_from_start_to_end(harness: Harness, tmp_path: Path) -> None:
    record = harness.pool.start("Shard", {"A": "1"}, DRIVER, shared=False)
    request, (out, error) = await harness.request()
    assert request["env"] == {"A": "1"}
    assert request["label"] == "Shard"
    assert request["process"] == record.process
    (tmp_path / f"{record.process.hex()}.sock").touch()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)  # the id of no process
    harness.report(pid=pid)
    os.write(out, b"one\ntwo")
    os.write(error, b"oops\n")
    while len(harness.output) < 2:
        await asyncio.sleep(0)
    assert sorted(harness.output) == [("stderr", "Shard", ["oops"]), ("stdout", "Shard", ["one"])]
    harness.report(pid=pid, status=3 << 8)
    assert await record.ended == "its process exited with status 3"
    with pytest.raises(RuntimeError, match="status 3"):
        await record.ready
    assert harness.ended == [record]
    assert not harness.pool.by_process
    assert not list(tmp_path.iterdir()), "the socket that it could not remove itself"
    os.close(out)
    os.close(error)
    while len(harness.output) < 3:
        await asyncio.sleep(0)
    assert harness.output[2] == ("stdout", "Shard", ["two"])


async def test_few_requests_are_under_way_at_once(harness: Harness) -> None:
    records = [harness.pool.start(str(number), {}, DRIVER, shared=False) for number in range(30)]
    assert len({record.take_index() for record in records}) == 1
    seen = [(await harness.request()) for _ in range(8)]
    with pytest.raises(BlockingIOError):
        harness.zygote.recv(1)
    records[20].kill("too late")
    records[21].kill()
    for record in records:
        if record in records[20:22]:
            continue
        if record is not records[0] and len(seen) < 28:
            seen.append(await harness.request())
        harness.report(pid=0, error="no more processes")
        assert "no more processes" in await record.ended
    assert [request["label"] for request, _ in seen] == [str(n) for n in range(30) if n not in (20, 21)]
    for _, fds in seen:
        for fd in fds:
            os.close(fd)
    assert await records[20].ended == "too late"
    assert "not needed" in await records[21].ended


async def test_a_worker_that_is_killed_before_it_exists(harness: Harness) -> None:
    record = harness.pool.start("Shard", {}, DRIVER, shared=False)
    _, fds = await harness.request()
    record.kill("changed its mind")
    pid = os.fork()
    if pid == 0:
        signal.pause()
    harness.report(pid=pid)
    assert os.waitstatus_to_exitcode(await asyncio.to_thread(lambda: os.waitpid(pid, 0)[1])) == -signal.SIGKILL
    harness.report(pid=pid, status=9)
    assert await record.ended == "changed its mind"
    record.kill("again")
    for fd in fds:
        os.close(fd)


async def test_too_large_an_environment(harness: Harness) -> None:
    with pytest.raises(ValueError, match="at most 131072"):
        harness.pool.start("Shard", {"A": "x" * (1 << 18)}, DRIVER, shared=False)
    assert not harness.pool.by_process
    record = harness.pool.start("Shard", {"A": "x" * 100_000}, DRIVER, shared=False)
    request, fds = await harness.request()
    assert len(request["env"]["A"]) == 100_000
    assert not record.ready.done()
    for fd in fds:
        os.close(fd)


async def test_the_zygote_is_gone(harness: Harness) -> None:
    record = harness.pool.start("Shard", {}, DRIVER, shared=False)
    harness.zygote.close()
    await harness.lost.wait()
    assert "zygote" in await record.ended
    harness.pool.start("Shard", {}, DRIVER, shared=False)


async def test_the_last_output(harness: Harness) -> None:
    harness.pool.start("Shard", {}, DRIVER, shared=False)
    _, (out, error) = await harness.request()
    os.write(out, b"last\nwords")
    harness.pool.drain_output()
    assert harness.output == [("stdout", "Shard", ["last"]), ("stdout", "Shard", ["words"])]
    await harness.pool.wait_all(0.0)
    os.close(out)
    os.close(error)
