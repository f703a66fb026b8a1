"""The open device of a process, with the queues that all its connections share.

The event loop watches the descriptor of asynchronous events for changes of the device, its port or its addresses; see
`zcactor.transport.verbs.device.events`.

There is one completion queue, whose descriptor the event loop watches, and one shared receive queue, to which slots are
posted as peers join: never fewer than all peers together may send (`zcactor.transport.credits`), so no message arrives
at an empty queue. That holds within a batch of completions, too: a slot is posted again before its owner may report the
message to the peer as consumed. A process without a peer by RDMA never makes an engine.

While completions arrive, the queue is polled once in each turn of the loop, without events. When a poll finds nothing,
the queue is armed and polled once more, because a completion between the two would raise no event
(ibv_req_notify_cq(3)). Then the loop waits for an event.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import threading
import zlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from zcactor.logs import logger
from zcactor.transport.verbs.device.bounce import Bounce
from zcactor.transport.verbs.device.events import DeviceEvents
from zcactor.transport.verbs.device.gpu_memory import RegisteredGpuMemory
from zcactor.transport.verbs.device.registration_cache import ExtentTable, PinnableArena
from zcactor.transport.verbs.device.sizing import (
    DEPTH,
    FIXED_NBYTES,
    MAX_CQE,
    MAX_READS,
    MAX_RECEIVES,
    PROOF_NBYTES,
    SEND_DEPTH,
    SEND_REQUESTS,
)
from zcactor.transport.verbs.device.slots import SLOT_UNIT, SlotArea
from zcactor.transport.verbs.device.versions import SealTable
from zcactor.transport.verbs.driver.base import MAX_U32, Receive
from zcactor.transport.verbs.driver.codes import QpState

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zcactor.transport.verbs.device.viability import Viable
    from zcactor.transport.verbs.driver.base import Completion, Device, QueuePair

__all__ = ["Completions", "Engine"]

MIN_AVOIDED: Final = 1.0
MAX_AVOIDED: Final = 60.0
"""First and longest time in seconds for which a dead path is not tried again."""
_POLL: Final = 64
"""Completions taken at a time."""


class Completions(Protocol):
    """The callbacks for completions of a queue pair, of its owner."""

    def completed(self, completion: Completion) -> None:
        """Handle the end of a request of the send queue, with success or failure."""

    def received(self, view: memoryview, completion: Completion, slot: int) -> bool:
        """Handle a message in `view`, the slot's bytes. True when the slot may be used again: it is posted before the
        next `turn_ended`, and not at once. Otherwise the owner calls `Engine.give_back` later."""

    def turn_ended(self) -> None:
        """Handle the end of a batch: all completions of this queue pair were reported, and the slots of messages that
        were `received` are posted."""

    def device_failed(self, error: OSError) -> None:
        """Handle the failure of the device: there are no further completions."""

    def path_lost(self, why: str) -> None:
        """Handle the loss of the path: the port is down, or has lost the address of this end."""

    def queue_pair_failed(self, why: str) -> None:
        """Handle a queue pair in ERR, which may be this end's own doing."""

    def failed(self, error: Exception) -> None:
        """End the connection: one of these methods has raised `error`, which the loop's handler has already got."""


class Engine:
    """The device and its shared queues, for `VerbsConnection` and `VerbsEndpoint`. Used on the loop's thread.

    Args:
        device: an open device, which belongs to the engine from here.
        found: the port and GID to use.
        arena: the arena of this process.
        slot_nbytes: bytes of each receive, header included.
        loop: the loop.

    Raises:
        OSError: the device cannot make one of its objects. The device is closed then.
    """

    def __init__(
        self, device: Device, found: Viable, arena: PinnableArena, slot_nbytes: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.device = device
        self.found = found
        self.arena = arena
        self.loop = loop
        self.thread = threading.get_ident()
        self.slot_nbytes = (slot_nbytes + SLOT_UNIT - 1) & -SLOT_UNIT
        self.eager_limit = 0
        """Bytes of the largest payload in a frame by RDMA."""
        self.connections = 0
        self.events = 0
        """Number of wake-ups by the completion channel."""
        self.polls = 0
        self._closed = False
        self._abandoned = False
        self._polling = False
        self._found: deque[Completion] = deque()  # polled, but not reported yet
        self._told: dict[int, Completions] = {}  # owners whose `turn_ended` has to be called
        self._again: list[Receive] = []  # receives of slots that were read and are not posted yet
        self._owners: dict[int, Completions] = {}
        self._pairs: dict[int, QueuePair] = {}  # by number, the pairs of the owners
        self._avoided: dict[bytes, tuple[float, float, str]] = {}  # by process: end, length and reason
        self._slots: list[tuple[SlotArea, int]] = []  # of receives; each is posted or being read
        self._needed = 0  # receives that connections count on
        with contextlib.ExitStack() as undo:
            undo.callback(device.close)
            limits = device.attributes
            self.cq = device.create_completion_queue(min(MAX_CQE, limits.max_cqe))
            self.srq = device.create_shared_receive_queue(min(MAX_RECEIVES, limits.max_srq_wr))
            self.extents = ExtentTable(device, arena)
            self.gpu_memory = RegisteredGpuMemory(device, found.port, found.gid, found.marking)
            self.seals = SealTable(device)
            self.bounce = Bounce(device, loop)
            self._proof = mmap.mmap(-1, PROOF_NBYTES)
            self._proof[:] = os.urandom(PROOF_NBYTES)
            self._proof_anchor = ctypes.c_char.from_buffer(self._proof)
            address = ctypes.addressof(self._proof_anchor)
            self._proof_region = device.register(address, PROOF_NBYTES, remote_read=True)
            self.proof = (address, self._proof_region.rkey, PROOF_NBYTES, zlib.crc32(self._proof))
            """Address, rkey, bytes and CRC-32 of the memory that peers READ to prove the path."""
            self.cq.arm()
            undo.pop_all()
        loop.add_reader(self.cq.fd, self._on_event)
        self._events = DeviceEvents(self)

    def __repr__(self) -> str:
        return f"<Engine on {self.device.name}, {self.connections} connections>"

    # ---- connections

    def avoid(self, process: bytes, why: str) -> None:
        """Use another transport for that process for a second, because the path to it is dead. Each time that this was
        too short, the time doubles, up to a minute."""
        now = self.loop.time()
        until, pause, _ = self._avoided.get(process, (0.0, 0.0, ""))
        pause = min(2 * pause, MAX_AVOIDED) if pause and now < until + MAX_AVOIDED else MIN_AVOIDED
        self._avoided = {key: one for key, one in self._avoided.items() if now < one[0] + MAX_AVOIDED}
        self._avoided[process] = now + pause, pause, why

    def avoided(self, process: bytes) -> str:
        """Return the reason why connections to that process use another transport; empty where they do not."""
        until, pause, why = self._avoided.get(process, (0.0, 0.0, ""))
        return (
            f"RDMA to that process is tried again {pause:g} s after its path broke: {why}"
            if self.loop.time() < until
            else ""
        )

    @property
    def usable(self) -> bool:
        """Whether the device has not failed and is not closed."""
        return not self._closed

    @property
    def room(self) -> str:
        """Return the reason why no further connection can be made; empty where one can."""
        if self._closed:
            return f"{self.device.name} has failed, or is closed"
        if self._events.problem:
            return self._events.problem
        cqe = self._needed + DEPTH + (self.connections + 1) * (SEND_REQUESTS + MAX_READS)
        if cqe > self.cq.depth:
            return f"{self.device.name}: {self.connections} connections fill its completion queue of {self.cq.depth}"
        if self._needed + DEPTH > self.srq.depth:
            return f"{self.device.name}: {self.connections} connections fill its receive queue of {self.srq.depth}"
        limit = self.found.memlock
        if limit is not None:
            slots = (self._needed + DEPTH + (self.connections + 1) * (SEND_DEPTH + 2)) * self.slot_nbytes
            pinned = self.arena.nbytes + FIXED_NBYTES + slots + (self.connections + 1) * MAX_READS * SLOT_UNIT
            if pinned > limit:
                return (
                    f"RLIMIT_MEMLOCK of {limit:,} bytes has room for {self.connections} connections beside the arena "
                    f"of {self.arena.nbytes:,}; ulimit -l unlimited, or a smaller store_capacity"
                )
        return ""

    def join(self) -> None:
        """Post receives for all messages that the peer of a new connection may send.

        Raises:
            OSError: there is no room (see `room`), the memory cannot be registered, or the device failed.
        """
        if self.room:
            raise OSError(self.room)
        first = len(self._slots)
        missing = self._needed + DEPTH - first
        if missing > 0:
            area = SlotArea(self.device, missing, self.slot_nbytes)
            self._slots += [(area, index) for index in range(missing)]
            self._post([self._receive(slot) for slot in range(first, first + missing)])
            if self._closed:  # by `_post`, as the number of posted receives is unknown then
                raise OSError(self.room)
        self._needed += DEPTH
        self.connections += 1

    def leave(self) -> None:
        """Count a connection that has ended. Its receives stay posted for the next one."""
        self._needed -= DEPTH
        self.connections -= 1

    def watch(self, qp: QueuePair, owner: Completions) -> None:
        """Report the completions of `qp` to `owner`."""
        self._owners[qp.qp_num] = owner
        self._pairs[qp.qp_num] = qp

    def unwatch(self, qp: QueuePair) -> None:
        """Report no more completions of `qp`. Slots with messages for it are posted again."""
        self._owners.pop(qp.qp_num, None)
        self._pairs.pop(qp.qp_num, None)

    def slot_view(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        area, index = self._slots[slot]
        return area.views[index]

    def give_back(self, slot: int) -> None:
        """Post a slot again that the owner has kept in `Completions.received`."""
        if not self._closed:
            self._post([self._receive(slot)])

    def _receive(self, slot: int) -> Receive:
        area, index = self._slots[slot]
        return Receive(slot, area.address(index), area.nbytes, area.lkey)

    # ---- completions

    def _on_event(self) -> None:
        self.events += 1
        try:
            self.cq.drain_events()
        except OSError as error:
            self._broken(error)
            return
        if not self._polling:
            self._polling = True
            self._turn()

    def _turn(self) -> None:
        """Poll, and again in the next turn of the loop if there were completions."""
        if self._closed:
            return
        more = True  # also when a signal handler or a defect raises: the loop gets the error, and polling continues
        try:
            found = self._poll() > 0
            if not found:
                self.cq.arm()
                found = self._poll() > 0
            more = found
        except OSError as error:
            more = False
            self._broken(error)
        finally:
            self._polling = more
            if more:
                self.loop.call_soon(self._turn)

    def has_unread(self, *others: int) -> bool:
        """Whether completions may wait that were not reported, or one of the descriptors `others` can be read."""
        waiting = select.poll()
        for fd in (self.cq.fd, *others):
            waiting.register(fd, select.POLLIN)
        return self._polling or bool(waiting.poll(0))

    def poll_now(self) -> None:
        """Take all waiting completions, without waiting for the event."""
        with contextlib.suppress(OSError):  # the loop's next turn raises it, too
            while not self._closed and self._poll():
                pass

    def _poll(self) -> int:
        """Report completions to their owners. An owner that raises is ended, see `_defect`.

        Raises:
            OSError: the device failed.
        """
        found = self._found
        found.extend(self.cq.poll(_POLL))
        self.polls += 1
        if not found and not self._told:
            return 0
        count = len(found)
        try:
            while found:  # an owner may call `poll_now`, and later completions must not be reported before these
                completion = found.popleft()
                owner = self._owners.get(completion.qp_num)
                if owner is not None:
                    self._told[completion.qp_num] = owner
                slot = completion.wr_id
                if slot <= MAX_U32:
                    kept = False
                    try:
                        if owner is not None:
                            kept = not owner.received(self.slot_view(slot), completion, slot)
                    except Exception as error:  # a defect of one connection; the batch has completions of others
                        self._defect(owner, error)
                    finally:
                        if not kept:
                            self._again.append(self._receive(slot))  # an owner that polls posts it as well
                elif owner is not None:
                    try:
                        owner.completed(completion)
                    except Exception as error:  # as above
                        self._defect(owner, error)
        finally:
            again, self._again = self._again, []
            self._post(again)
        while self._told:
            _, owner = self._told.popitem()
            try:
                owner.turn_ended()
            except Exception as error:  # as above
                self._defect(owner, error)
        return count

    def _post(self, receives: list[Receive]) -> None:
        """Post receives. A device that refuses them has failed: messages would arrive at an empty queue."""
        if not receives or self._closed:
            return
        try:
            self.srq.post_receives(receives)
        except OSError as error:
            self._broken(error)
        except Exception as error:
            self.loop.call_exception_handler({"message": "receives could not be posted", "exception": error})
            self._broken(OSError(errno.EIO, f"receives could not be posted: {error!r}"))

    def _defect(self, owner: Completions | None, error: Exception) -> None:
        """End the connection of `owner`, which has raised `error`. All others continue."""
        self.loop.call_exception_handler({"message": "a connection by RDMA failed", "exception": error})
        if owner is None:
            return
        try:
            owner.failed(error)
        except Exception as another:  # nothing more is reported to it then
            self.loop.call_exception_handler({"message": "a connection by RDMA failed to end", "exception": another})
            self._owners = {number: one for number, one in self._owners.items() if one is not owner}

    # ---- changes of the device

    def path_lost(self, why: str) -> None:
        """End all connections: their path is lost."""
        for number, owner in list(self._owners.items()):
            if self._owners.get(number) is owner:
                self._tell(owner, partial(owner.path_lost, why))

    def look_at_queue_pairs(self, why: str) -> None:
        """Report queue pairs in ERR to their owners."""
        self.poll_now()  # waiting completions have the cause
        for number, qp in list(self._pairs.items()):
            owner = self._owners.get(number)
            if owner is None or self._closed:
                continue
            try:
                if qp.state() != QpState.ERR:
                    continue
                text = f"queue pair {number} of {self.device.name} failed: {why}"
            except OSError as error:
                text = f"queue pair {number} of {self.device.name} cannot be asked for its state: {error}"
            self._tell(owner, partial(owner.queue_pair_failed, text))

    def _tell(self, owner: Completions, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:  # as in `_poll`
            self._defect(owner, error)

    def gone(self, error: OSError) -> None:
        """Leave and close the device, which is lost: the system waits for that to remove it."""
        self._broken(error)
        self.loop.call_soon(self.close)  # when the owners have destroyed their queue pairs

    def _broken(self, error: OSError) -> None:
        """Report the failure of the device to all owners."""
        if self._closed:
            return
        logger.error("the RDMA device %s failed: %s", self.device.name, error)
        self._end(error)

    def _end(self, error: OSError) -> None:
        self.loop.remove_reader(self.cq.fd)
        self._events.stop()
        self._closed = True
        for owner in list(self._owners.values()):
            self._tell(owner, partial(owner.device_failed, error))

    # ---- the end

    def abandon(self) -> None:
        """Never use the engine again, in a forked child. The device's objects belong to the parent, and the child's
        garbage collector would destroy them for it, so they are kept for ever. Both share the memory of slots and
        seals, so the child does not write to it any more."""
        self._closed = self._abandoned = True
        self.seals.abandon()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def close(self) -> None:
        """Close the device and all its objects. Connections that are still closing end. Idempotent. Does nothing once
        the engine is abandoned."""
        if self._abandoned:
            return
        if not self._closed:
            self._end(OSError(f"{self.device.name} was closed"))
        try:
            with contextlib.ExitStack() as whatever_fails:
                whatever_fails.callback(self.device.close)
                whatever_fails.callback(self.extents.close)
                self.gpu_memory.close()
        except OSError as error:  # all other objects are closed, and the process cannot use this one
            logger.debug("closing %s: %s", self.device.name, error)
