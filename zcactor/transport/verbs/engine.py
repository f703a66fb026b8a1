"""One process's device, opened: the queues that all its connections share, and the loop's eye on them.

There is one completion queue, on whose descriptor the event loop waits, and one shared receive queue, into which slots
are posted as peers join: never fewer than all peers together may send (`zcactor.transport.credits`), so no message ever
meets an empty queue. A process without a peer over RDMA never makes an engine.

While completions come the queue is polled once a turn of the loop, without events; when a poll finds none, it is armed,
polled once more, because a completion between the two would raise no event (ibv_req_notify_cq(3)), and left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import zlib
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from zcactor.transport.verbs.base import MAX_U32, Receive
from zcactor.transport.verbs.extents import ExtentTable, PinnableArena
from zcactor.transport.verbs.pulling import MAX_READS
from zcactor.transport.verbs.seals import Seals
from zcactor.transport.verbs.slots import SlotArea

if TYPE_CHECKING:
    import asyncio

    from zcactor.transport.verbs.base import Completion, Device, QueuePair
    from zcactor.transport.verbs.viability import Viable

__all__ = ["DEPTH", "PROOF_NBYTES", "SEND_DEPTH", "Completions", "Engine"]

DEPTH: Final = 34
"""Messages that a peer may send before it hears of credits, with the two that take none. More than one loop's turn
brings: several frames share a message."""
SEND_DEPTH: Final = 32
"""Messages of one connection that may be under way."""
SEND_REQUESTS: Final = SEND_DEPTH + 4
"""Requests of a control queue pair: its messages, and those that end it."""
PROOF_NBYTES: Final = 4096
"""Bytes that prove a path."""
_CQE: Final = 1 << 15
_RECEIVES: Final = 1 << 14
_POLL: Final = 64
"""Completions taken at a time."""

logger = logging.getLogger("zcactor")


class Completions(Protocol):
    """Who is told of the completions of a queue pair."""

    def completed(self, completion: Completion) -> None:
        """A request of the send queue has ended, well or badly."""

    def received(self, view: memoryview, completion: Completion, slot: int) -> bool:
        """A message has arrived in `view`, the slot's bytes. True when the slot may be used again at once; else it is
        given back to `Engine.give_back`."""

    def turn_ended(self) -> None:
        """All completions of this turn that are for this queue pair have been told."""

    def device_failed(self, error: OSError) -> None:
        """There will be no further completions."""


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
        self.slot_nbytes = (slot_nbytes + 63) & -64
        self.eager_limit = 0
        """Bytes of the largest payload in a frame by RDMA; see `zcactor.transport.cost`."""
        self.eager_reason = ""
        """Why it is that, for people."""
        self.connections = 0
        self.events = 0
        """Wake-ups by the completion channel."""
        self.polls = 0
        self._closed = False
        self._polling = False
        self._found: deque[Completion] = deque()  # polled, and nobody has been told yet
        self._owners: dict[int, Completions] = {}
        self._slots: list[tuple[SlotArea, int]] = []  # of receives, all of them posted or being looked at
        self._needed = 0  # receives that connections count on
        with contextlib.ExitStack() as undo:
            undo.callback(device.close)
            limits = device.attributes
            self.cq = device.create_completion_queue(min(_CQE, limits.max_cqe))
            self.srq = device.create_shared_receive_queue(min(_RECEIVES, limits.max_srq_wr))
            self.extents = ExtentTable(device, arena)
            self.seals = Seals(device)
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

    def __repr__(self) -> str:
        return f"<Engine on {self.device.name}, {self.connections} connections>"

    # ---- connections

    @property
    def room(self) -> str:
        """Empty, or why no further connection can be made."""
        if self._closed:
            return f"{self.device.name} has failed, or is closed"
        cqe = self._needed + DEPTH + (self.connections + 1) * (SEND_REQUESTS + MAX_READS)
        if cqe > self.cq.depth:
            return f"{self.device.name}: {self.connections} connections fill its completion queue of {self.cq.depth}"
        if self._needed + DEPTH > self.srq.depth:
            return f"{self.device.name}: {self.connections} connections fill its receive queue of {self.srq.depth}"
        return ""

    def join(self) -> None:
        """A connection is being made: post receives for all that its peer may send.

        Raises:
            OSError: there is no room (see `room`), or the memory cannot be registered.
        """
        if self.room:
            raise OSError(self.room)
        first = len(self._slots)
        missing = self._needed + DEPTH - first
        if missing > 0:
            area = SlotArea(self.device, missing, self.slot_nbytes)
            self._slots += [(area, index) for index in range(missing)]
            self.srq.post_receives([self._receive(slot) for slot in range(first, first + missing)])
        self._needed += DEPTH
        self.connections += 1

    def leave(self) -> None:
        """A connection has ended. Its receives stay posted, for the next one."""
        self._needed -= DEPTH
        self.connections -= 1

    def watch(self, qp: QueuePair, owner: Completions) -> None:
        """Tell `owner` of the completions of `qp`."""
        self._owners[qp.qp_num] = owner

    def unwatch(self, qp: QueuePair) -> None:
        """Completions of `qp` are of no interest any more; slots in which it received are posted again."""
        self._owners.pop(qp.qp_num, None)

    def slot_view(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        area, index = self._slots[slot]
        return area.views[index]

    def give_back(self, slot: int) -> None:
        """A slot that was kept in `Completions.received` may be used again."""
        if not self._closed:
            self.srq.post_receives([self._receive(slot)])

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
        more = True  # also when whoever is told raises: that goes on to the loop's handler, and the polling as well
        try:
            more = self._poll() > 0
            if not more:
                self.cq.arm()
                more = self._poll() > 0
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
        found = self._found
        found.extend(self.cq.poll(_POLL))
        self.polls += 1
        if not found:
            return 0
        count = len(found)
        told: dict[int, Completions] = {}
        again: list[Receive] = []
        while found:  # an owner may poll as well (`poll_now`), and must not be told of later ones before these
            completion = found.popleft()
            owner = self._owners.get(completion.qp_num)
            slot = completion.wr_id
            if slot <= MAX_U32:
                view = self.slot_view(slot)
                if owner is None or owner.received(view, completion, slot):
                    again.append(self._receive(slot))
            elif owner is not None:
                owner.completed(completion)
            if owner is not None:
                told[completion.qp_num] = owner
        if again and not self._closed:
            self.srq.post_receives(again)
        for owner in told.values():
            owner.turn_ended()
        return count

    def _broken(self, error: OSError) -> None:
        """The device has failed: whoever uses it learns of it."""
        if self._closed:
            return
        logger.error("the RDMA device %s failed: %s", self.device.name, error)
        self.loop.remove_reader(self.cq.fd)
        self._closed = True
        for owner in list(self._owners.values()):
            owner.device_failed(error)

    # ---- the end

    def abandon(self) -> None:
        """In a forked child: never touch anything here again. The device's objects are the parent's, and the child's
        garbage collector would destroy them for it, so they are kept for ever."""
        self._closed = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def close(self) -> None:
        """Close the device and everything made from it. What still lingers of connections ends. Idempotent."""
        if not self._closed:
            self._closed = True
            self.loop.remove_reader(self.cq.fd)
            for owner in list(self._owners.values()):
                owner.device_failed(OSError(f"{self.device.name} was closed"))
        self.extents.close()
        try:
            self.device.close()
        except OSError as error:  # everything else was closed all the same, and the process has no use for it
            logger.debug("closing %s: %s", self.device.name, error)
