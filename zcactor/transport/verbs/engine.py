"""One process's device, opened: the queues that all its connections share, and the loop's eye on them.

What happens to the device itself, to its port or to an address of it, the loop hears by the descriptor of its
asynchronous events; see `zcactor.transport.verbs.events`.

There is one completion queue, on whose descriptor the event loop waits, and one shared receive queue, into which slots
are posted as peers join: never fewer than all peers together may send (`zcactor.transport.credits`), so no message ever
meets an empty queue. That holds within a batch of completions, too: a slot is posted again before its owner may tell
the peer that its message was consumed. A process without a peer over RDMA never makes an engine.

While completions come the queue is polled once a turn of the loop, without events; when a poll finds none, it is armed,
polled once more, because a completion between the two would raise no event (ibv_req_notify_cq(3)), and left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
import zlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from zcactor.transport.verbs.base import MAX_U32, QpState, Receive
from zcactor.transport.verbs.bounce import Bounce
from zcactor.transport.verbs.events import DeviceEvents
from zcactor.transport.verbs.extents import ExtentTable, PinnableArena
from zcactor.transport.verbs.pulling import MAX_READS
from zcactor.transport.verbs.seals import Seals
from zcactor.transport.verbs.sizing import (
    DEPTH,
    FIXED_NBYTES,
    MAX_CQE,
    MAX_RECEIVES,
    PROOF_NBYTES,
    SEND_DEPTH,
    SEND_REQUESTS,
)
from zcactor.transport.verbs.slots import SLOT_UNIT, SlotArea

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zcactor.transport.verbs.base import Completion, Device, QueuePair
    from zcactor.transport.verbs.viability import Viable

__all__ = ["Completions", "Engine"]

MIN_AVOIDED: Final = 1.0
MAX_AVOIDED: Final = 60.0
"""Seconds for which a path that is dead is not tried again, the first time and at most."""
_POLL: Final = 64
"""Completions taken at a time."""

logger = logging.getLogger("zcactor")


class Completions(Protocol):
    """Who is told of the completions of a queue pair."""

    def completed(self, completion: Completion) -> None:
        """A request of the send queue has ended, well or badly."""

    def received(self, view: memoryview, completion: Completion, slot: int) -> bool:
        """A message has arrived in `view`, the slot's bytes. True when the slot may be used again: it is posted before
        the next `turn_ended`, and not at once. Else it is given back to `Engine.give_back`."""

    def turn_ended(self) -> None:
        """Completions for this queue pair have been told, and the slots of those that were `received` are posted."""

    def device_failed(self, error: OSError) -> None:
        """There will be no further completions."""

    def path_lost(self, why: str) -> None:
        """The port is down, or has lost the address that this end is connected by."""

    def queue_pair_failed(self, why: str) -> None:
        """The queue pair is in ERR, though maybe by this end's own doing."""

    def failed(self, error: Exception) -> None:
        """One of these methods has raised `error`, which the loop's handler has been told of: end."""


class Engine:
    """Satisfies no protocol: it is what `VerbsConnection` and `VerbsEndpoint` work with. On the loop's thread.

    Args:
        device: opened; belongs to the engine from here.
        found: the port and GID to use.
        arena: this process's memory.
        slot_nbytes: bytes of each receive, header included.
        loop: the loop.

    Raises:
        OSError: the device cannot make one of its parts; it is closed.
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
        """Bytes of the largest payload in a frame by RDMA; see `zcactor.transport.cost`."""
        self.eager_reason = ""
        """Why it is that, for people."""
        self.connections = 0
        self.events = 0
        """Wake-ups by the completion channel."""
        self.polls = 0
        self._closed = False
        self._abandoned = False
        self._polling = False
        self._found: deque[Completion] = deque()  # polled, and nobody has been told yet
        self._told: dict[int, Completions] = {}  # owners that are to hear of the turn's end
        self._again: list[Receive] = []  # of slots that have been read, and are not posted yet
        self._owners: dict[int, Completions] = {}
        self._pairs: dict[int, QueuePair] = {}  # that they own
        self._avoided: dict[bytes, tuple[float, float, str]] = {}  # by process: until when, for how long, why
        self._slots: list[tuple[SlotArea, int]] = []  # of receives, all of them posted or being looked at
        self._needed = 0  # receives that connections count on
        with contextlib.ExitStack() as undo:
            undo.callback(device.close)
            limits = device.attributes
            self.cq = device.create_completion_queue(min(MAX_CQE, limits.max_cqe))
            self.srq = device.create_shared_receive_queue(min(MAX_RECEIVES, limits.max_srq_wr))
            self.extents = ExtentTable(device, arena)
            self.seals = Seals(device)
            self.bounce = Bounce(device, loop)
            self._proof = mmap.mmap(-1, PROOF_NBYTES)
            self._proof[:] = os.urandom(PROOF_NBYTES)
            self._proof_anchor = ctypes.c_char.from_buffer(self._proof)
            address = ctypes.addressof(self._proof_anchor)
            self._proof_region = device.register(address, PROOF_NBYTES, remote_read=True)
            self.proof = (address, self._proof_region.rkey, PROOF_NBYTES, zlib.crc32(self._proof))
            """Address, rkey, bytes and CRC-32 of what peers READ to prove the path."""
            self.cq.arm()
            undo.pop_all()
        loop.add_reader(self.cq.fd, self._on_event)
        self._events = DeviceEvents(self)

    def __repr__(self) -> str:
        return f"<Engine on {self.device.name}, {self.connections} connections>"

    # ---- connections

    def avoid(self, process: bytes, why: str) -> None:
        """The path to that process is dead: for a second connections to it go another way, and for twice as long, up to
        a minute, whenever that proves to be too short."""
        now = self.loop.time()
        until, pause, _ = self._avoided.get(process, (0.0, 0.0, ""))
        pause = min(2 * pause, MAX_AVOIDED) if pause and now < until + MAX_AVOIDED else MIN_AVOIDED
        self._avoided = {key: one for key, one in self._avoided.items() if now < one[0] + MAX_AVOIDED}
        self._avoided[process] = now + pause, pause, why

    def avoided(self, process: bytes) -> str:
        """Why connections to that process go another way; empty where they do not."""
        until, pause, why = self._avoided.get(process, (0.0, 0.0, ""))
        return (
            f"RDMA to that process is tried again {pause:g} s after its path broke: {why}"
            if self.loop.time() < until
            else ""
        )

    @property
    def usable(self) -> bool:
        """Whether the device works, as far as anybody knows, and is not closed."""
        return not self._closed

    @property
    def room(self) -> str:
        """Empty, or why no further connection can be made."""
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
        """A connection is being made: post receives for all that its peer may send.

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
            if self._closed:  # by that: nobody knows how many of them are posted
                raise OSError(self.room)
        self._needed += DEPTH
        self.connections += 1

    def leave(self) -> None:
        """A connection has ended. Its receives stay posted, for the next one."""
        self._needed -= DEPTH
        self.connections -= 1

    def watch(self, qp: QueuePair, owner: Completions) -> None:
        """Tell `owner` of the completions of `qp`."""
        self._owners[qp.qp_num] = owner
        self._pairs[qp.qp_num] = qp

    def unwatch(self, qp: QueuePair) -> None:
        """Completions of `qp` are of no interest any more; slots in which it received are posted again."""
        self._owners.pop(qp.qp_num, None)
        self._pairs.pop(qp.qp_num, None)

    def slot_view(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        area, index = self._slots[slot]
        return area.views[index]

    def give_back(self, slot: int) -> None:
        """A slot that was kept in `Completions.received` may be used again."""
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
        """Poll, and come again in the next turn of the loop if that brought anything."""
        if self._closed:
            return
        more = True  # also when a signal's handler raises, or a defect: that goes to the loop, and the polling on
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

    def poll_now(self) -> None:
        """Take everything that waits, without waiting for the event."""
        with contextlib.suppress(OSError):  # the loop's turn will meet it, too
            while not self._closed and self._poll():
                pass

    def _poll(self) -> int:
        """Tell owners of what has completed. What an owner raises ends that owner, see `_defect`.

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
            while found:  # an owner may poll as well (`poll_now`), and must not be told of later ones before these
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
                    except Exception as error:  # of one connection; the batch is also others'
                        self._defect(owner, error)
                    finally:
                        if not kept:
                            self._again.append(self._receive(slot))  # an owner that polls posts it with its own
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
        """Post them. A device that takes no receives has failed: messages would meet an empty queue."""
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
        """What `owner` was told of has raised: its connection ends, and all others go on."""
        self.loop.call_exception_handler({"message": "a connection by RDMA failed", "exception": error})
        if owner is None:
            return
        try:
            owner.failed(error)
        except Exception as another:  # then it is told nothing more
            self.loop.call_exception_handler({"message": "a connection by RDMA failed to end", "exception": another})
            self._owners = {number: one for number, one in self._owners.items() if one is not owner}

    # ---- what happens to the device

    def path_lost(self, why: str) -> None:
        """The connections there are cannot go on."""
        for number, owner in list(self._owners.items()):
            if self._owners.get(number) is owner:
                self._tell(owner, partial(owner.path_lost, why))

    def look_at_queue_pairs(self, why: str) -> None:
        """Tell owners of queue pairs that are in ERR."""
        self.poll_now()  # completions that wait say more
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
        """The device is of no use any more: it is left, and closed, as the system waits for that to remove it."""
        self._broken(error)
        self.loop.call_soon(self.close)  # when owners have taken down theirs

    def _broken(self, error: OSError) -> None:
        """The device has failed: whoever uses it learns of it."""
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
        """In a forked child: never touch anything here again. The device's objects are the parent's, and the child's
        garbage collector would destroy them for it, so they are kept for ever. Slots and seals lie in memory that both
        share: nothing here writes to it from now on."""
        self._closed = self._abandoned = True
        self.seals.abandon()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def close(self) -> None:
        """Close the device and everything made from it. What still lingers of connections ends. Idempotent; does
        nothing once it is abandoned."""
        if self._abandoned:
            return
        if not self._closed:
            self._end(OSError(f"{self.device.name} was closed"))
        try:
            with contextlib.ExitStack() as whatever_fails:
                whatever_fails.callback(self.device.close)
                self.extents.close()
        except OSError as error:  # everything else was closed all the same, and the process has no use for it
            logger.debug("closing %s: %s", self.device.name, error)
