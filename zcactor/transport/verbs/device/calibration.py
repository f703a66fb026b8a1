"""The times of copies, messages and READs on this device, and the eager limit that follows.

All requests go through one queue pair that is connected to itself, so no peer is needed. Completions are awaited as the
engine awaits them: by the completion channel's descriptor. So a measured READ includes the post, one wake-up, and the
READ of a seal, as each pull does.

It does not include the Python code around a pull, which a payload in a frame does not need: a task, memory for the
object, a future, and a lease that is taken and returned. That code runs on the event loop and cannot be measured within
a few milliseconds. So it is modelled as `PULL_STEPS` times a small piece of such work, which *is* measured, and is slow
where Python is slow.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import select
import time
from contextlib import ExitStack
from ctypes import memmove, memset
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Final

from zcactor.transport.cost import HIGHEST, LOWEST, STEP, CostModel, calibrated
from zcactor.transport.verbs.device.self_loopback import connect_to_itself
from zcactor.transport.verbs.device.versions import SEAL_NBYTES
from zcactor.transport.verbs.driver.base import UNMARKED, Read, Receive, Send
from zcactor.transport.verbs.driver.codes import CompletionStatus, describe_status

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from zcactor.transport.verbs.driver.base import (
        CompletionQueue,
        Device,
        Gid,
        Marking,
        PortAttributes,
        QueuePair,
        SharedReceiveQueue,
    )

__all__ = ["COPIES", "PULL_STEPS", "READS", "SENDS", "calibrate"]

COPIES: Final = (4 << 10, 16 << 10, 64 << 10)
"""Bytes of the copies that are measured."""
READS: Final = (4 << 10, 1 << 20)
"""Bytes of the READs: the small one shows the constant, the large one the rate."""
SENDS: Final = (4 << 10, 16 << 10)
"""Bytes of the messages."""
PULL_STEPS: Final = 30
"""The Python code of a pull beside its READ, in runs of `_step`. Measured with CPython 3.11 and uvloop on the fake
fabric: a `VerbsConnection.pull` of 4 KiB takes 10 to 25 steps longer than `_Rig.read`, and the runtime's work around it
(task, memory, lease) takes 11 to 13. Together that is about 30 us."""

_BUDGET: Final = 1e-3
"""Seconds after which no further sample of a size is taken. There are eight sizes and kinds, so it takes about 10 ms on
real hardware."""
_FEWEST: Final = 3
"""The least number of samples of each size, which a median needs. A READ in an emulated machine takes 50 ms."""
_MOST: Final = 15
_STEPS: Final = 50
"""Runs of `_step` in one sample."""
_SECONDS: Final = 5.0
"""Seconds of waiting for one completion. A request without an answer would fail after 7.5 s with the usual retries."""
_AREA: Final = READS[-1]
"""Bytes of the source and of the target. Copies and messages use one piece after the other, so the caches have as
little of them as of data that was written some time ago."""
_SEND, _RECEIVE, _READ = 1, 2, 3


def calibrate(
    device: Device,
    port: PortAttributes,
    gid: Gid | None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    high: int = HIGHEST,
    marking: Marking = UNMARKED,
) -> CostModel:
    """Measure through a queue pair of `device` that is connected to itself. Blocks for some milliseconds.

    All objects that it makes are closed when it returns or raises. READs and messages are no longer than the port
    allows.

    Args:
        device: an open device.
        port: the port to use.
        gid: the address to use; None on an InfiniBand port, where the LID is used.
        clock: returns seconds.
        high: bytes of the largest limit.
        marking: the marks of packets.

    Raises:
        OSError: a verb or a request failed; the message names it.
        ValueError: `high` is less than 64.
    """
    with ExitStack() as stack:  # closes the queue pair before the memory that it may still write to
        rig = _Rig(device, port, gid, stack, marking)
        steps = _sampled(_steps, clock)
        around = PULL_STEPS * sorted(steps)[len(steps) // 2] / _STEPS
        copies = _measured(rig.copy, COPIES, clock)
        sends = _measured(rig.send, SENDS, clock, port.max_msg_sz)
        small, large = (
            [(nbytes, seconds + around) for nbytes, seconds in _measured(rig.read, (nbytes,), clock, port.max_msg_sz)]
            for nbytes in READS
        )
    return calibrated(copies, small, large, sends=sends, low=min(LOWEST, high // STEP * STEP), high=high)


def _measured(
    run: Callable[[int], None], sizes: tuple[int, ...], clock: Callable[[], float], limit: int = _AREA
) -> list[tuple[int, float]]:
    """Measure the seconds of some runs of each size. Sizes above `limit` are cut to it."""
    return [(n, seconds) for size in sizes for n in (min(size, limit),) for seconds in _sampled(partial(run, n), clock)]


def _sampled(run: Callable[[], None], clock: Callable[[], float]) -> list[float]:
    """Measure the seconds of a few runs of `run`: fewer if it takes long."""
    run()  # the first run faults pages in and fills caches
    samples: list[float] = []
    spent = 0.0
    while len(samples) < _FEWEST or (len(samples) < _MOST and spent < _BUDGET):
        before = clock()
        run()
        samples.append(clock() - before)
        spent += samples[-1]
    return samples


class _Rig:
    """A queue pair that is connected to itself, memory at both of its ends, and the operations to measure.

    Raises:
        OSError: a verb failed. `stack` closes the objects that were made.
    """

    def __init__(
        self, device: Device, port: PortAttributes, gid: Gid | None, stack: ExitStack, marking: Marking
    ) -> None:
        self._name = device.name
        self._source = _memory()
        self._target = _memory()
        self._at = 0
        from_region = device.register(ctypes.addressof(self._source), _AREA + SEAL_NBYTES, remote_read=True)
        stack.callback(from_region.close)
        to_region = device.register(ctypes.addressof(self._target), _AREA + SEAL_NBYTES, remote_read=False)
        stack.callback(to_region.close)
        self._from, self._to = from_region, to_region
        self._cq: CompletionQueue = device.create_completion_queue(8)
        stack.callback(self._cq.close)
        self._srq: SharedReceiveQueue = device.create_shared_receive_queue(1)
        stack.callback(self._srq.close)
        self._qp: QueuePair = device.create_queue_pair(self._cq, self._srq, max_send_wr=4, max_inline=0)
        stack.callback(self._qp.close)
        connect_to_itself(self._qp, device, port, gid, marking)
        self._poller = select.poll()
        self._poller.register(self._cq.fd, select.POLLIN)
        self._cq.arm()

    def _walk(self, nbytes: int) -> int:
        """Return the offset of the next piece."""
        at = self._at if self._at + nbytes <= _AREA else 0
        self._at = at + nbytes
        return at

    def copy(self, nbytes: int) -> None:
        """Copy from the source to the target."""
        at = self._walk(nbytes)
        memmove(self._to.address + at, self._from.address + at, nbytes)

    def send(self, nbytes: int) -> None:
        """Send a message, and wait until it has arrived."""
        at = self._walk(nbytes)
        self._srq.post_receives([Receive(_RECEIVE, self._to.address + at, nbytes, self._to.lkey)])
        self._qp.post_sends([Send(_SEND, self._from.address + at, nbytes, self._from.lkey)])
        self._wait(f"a message of {nbytes} bytes to itself", 2)

    def read(self, nbytes: int) -> None:
        """READ as a pull does: the bytes, and then a seal."""
        to, source = self._to, self._from
        self._qp.post_reads(
            [
                Read(_READ, to.address, nbytes, to.lkey, source.address, source.rkey, signalled=False),
                Read(_READ, to.address + _AREA, SEAL_NBYTES, to.lkey, source.address + _AREA, source.rkey, fenced=True),
            ]
        )
        self._wait(f"a READ of {nbytes} bytes from itself", 1)

    def _wait(self, what: str, completions: int) -> None:
        """Wait for so many completions, with the steps of `zcactor.transport.verbs.device.engine`."""
        cq = self._cq
        while True:
            if not self._poller.poll(_SECONDS * 1000):
                raise OSError(errno.ETIMEDOUT, f"{self._name}: {what} did not complete in {_SECONDS:g} s")
            cq.drain_events()
            cq.arm()
            while found := cq.poll(completions):
                for completion in found:
                    if completion.status != CompletionStatus.SUCCESS:
                        raise OSError(errno.EIO, f"{self._name}: {what} failed: {describe_status(completion.status)}")
                completions -= len(found)
                if not completions:
                    return


def _memory() -> ctypes.Array[ctypes.c_char]:
    """Allocate pages that live as long as the array. All are faulted in, so that no fault is measured."""
    nbytes = _AREA + SEAL_NBYTES
    memory = (ctypes.c_char * nbytes).from_buffer(mmap.mmap(-1, nbytes))
    memset(memory, 1, nbytes)
    return memory


@coroutine
def _pause() -> Generator[None, None, None]:
    """Suspend a coroutine once."""
    yield


async def _step(waiting: dict[int, object], number: int) -> None:
    """Run Python code like that of a pull: a coroutine that stores an entry, waits, and removes the entry."""
    waiting[number] = Read(number, number, number, number, number, number)
    await _pause()
    del waiting[number]


def _steps() -> None:
    """Run `_step` several times."""
    waiting: dict[int, object] = {}
    for number in range(_STEPS):
        step = _step(waiting, number)
        step.send(None)
        try:
            step.send(None)
        except StopIteration:
            continue
