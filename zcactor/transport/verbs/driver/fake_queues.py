"""The objects of a fake device: memory regions, completion queues, receive queues and queue pairs."""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from zcactor.transport.verbs.driver.adapter import OpenQueuePair, OwnedObject
from zcactor.transport.verbs.driver.base import (
    Completion,
    DeviceAttributes,
    PathAttributes,
    PortAttributes,
    QpAddress,
    Read,
    Receive,
    Send,
)
from zcactor.transport.verbs.driver.checks import check_path, check_reads, check_receives, check_sends
from zcactor.transport.verbs.driver.codes import CompletionStatus, Opcode, QpState
from zcactor.transport.verbs.driver.device_resources import DeviceResources, ResourceKind
from zcactor.transport.verbs.driver.fake_nic import DmaBuf, EventFd, FakeNic

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zcactor.transport.verbs.driver.faults import Watcher


__all__ = [
    "UNDEFINED",
    "FakeCompletionQueue",
    "FakeMemoryRegion",
    "FakeQueuePair",
    "FakeSharedReceiveQueue",
    "FakeWork",
]

UNDEFINED: Final = 0xEE
"""Opcode and length of failed completions: verbs leave them undefined, so callers must not use them."""


@dataclass(slots=True)
class FakeWork:
    """One posted request."""

    sequence: int
    request: Send | Read
    inline: bytes | None = None
    attempts: int = 0
    early: bytes | None = None
    """The bytes of a READ that was served before earlier ones."""


class Fabric(Protocol):
    """The methods of `zcactor.transport.verbs.driver.fake.FakeFabric` that the objects of a device call."""

    @property
    def to_come(self) -> Mapping[str, Any]:
        """Planned failures by call."""

    @property
    def watcher(self) -> Watcher | None:
        """The watcher of posted requests, if any."""

    def check(self, call: str) -> None:
        """Raise the planned failure of a call, if any."""

    def meet(self, call: str) -> Any:
        """Take the planned failure of a call; None without one."""

    def new_key(self) -> int:
        """Return a key that no region has."""

    def new_queue_pair_number(self) -> int:
        """Return a number that no queue pair has."""

    def attach(self, qp: FakeQueuePair) -> None:
        """Add a queue pair."""

    def detach(self, qp: FakeQueuePair) -> None:
        """Remove a queue pair."""

    def posted(self) -> None:
        """Do the work after a post or a fence."""


class Opened(Protocol):
    """The methods of `zcactor.transport.verbs.driver.fake.FakeDevice` that the objects of a device call."""

    name: str
    attributes: DeviceAttributes
    nic: FakeNic
    ledger: DeviceResources
    regions: dict[int, FakeMemoryRegion]

    @property
    def fabric(self) -> Fabric:
        """The fabric of the device."""

    def owns(self, lkey: int, address: int, nbytes: int) -> bool:
        """Whether the region of a key contains the range."""

    def port(self, number: int) -> PortAttributes:
        """Return the attributes of a port."""


class FakeMemoryRegion(OwnedObject):
    """Satisfies `MemoryRegion`."""

    kind = ResourceKind.MEMORY_REGION

    def __init__(
        self, device: Opened, address: int, nbytes: int, remote_read: bool, dma_buf: DmaBuf | None = None
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self._dma_buf = dma_buf
        self.remote_read = remote_read
        self.lkey = self.rkey = device.fabric.new_key()
        self.device = device
        device.regions[self.lkey] = self
        device.nic.pinned += nbytes
        super().__init__(device.ledger)

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether the region contains the range."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def at(self, address: int) -> int:
        """The place in this process of a byte that a request names."""
        return address if self._dma_buf is None else self._dma_buf.address + address - self.address

    def revoke(self) -> None:
        """Make the keys invalid. Idempotent."""
        if self.device.regions.pop(self.lkey, None) is not None:
            self.device.nic.pinned -= self.nbytes
            if self._dma_buf is not None:
                self._dma_buf.close()

    def _release(self) -> None:
        self.device.fabric.check("ibv_dereg_mr")
        self.revoke()


class FakeCompletionQueue(OwnedObject):
    """Satisfies `CompletionQueue`. Its descriptor is an eventfd."""

    kind = ResourceKind.COMPLETION_QUEUE

    def __init__(self, device: Opened, depth: int) -> None:
        self.depth = depth
        self._event_fd = EventFd(0)
        self.fd = self._event_fd.fd
        self.overrun = False
        self._device = device
        self._armed = False
        self._waiting: deque[tuple[Completion, FakeQueuePair, int | None]] = deque()
        self.users: list[FakeQueuePair] = []
        super().__init__(device.ledger)

    def push(self, completion: Completion, qp: FakeQueuePair, sequence: int | None) -> None:
        """Add a completion; `sequence` is that of a send. A completion beyond the depth is lost and stops all queue
        pairs.
        """
        if len(self._waiting) >= self.depth:
            self.overrun = True
            for user in self.users:
                user.current = QpState.ERR
        else:
            self._waiting.append((completion, qp, sequence))
        if self._armed:
            self._armed = False
            os.eventfd_write(self.fd, 1)

    def forget(self, qp: FakeQueuePair) -> None:
        """Drop completions of `qp` that were not polled, as destroying or resetting a queue pair does."""
        self._waiting = deque(entry for entry in self._waiting if entry[1] is not qp)

    def arm(self) -> None:
        self._check_overrun()
        if self._device.fabric.to_come:
            self._device.fabric.check("arm")
        self._armed = True

    def drain_events(self) -> int:
        self._check()
        if self._device.fabric.to_come:
            self._device.fabric.check("drain_events")
        try:
            return os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0

    def poll(self, limit: int) -> list[Completion]:
        self._check_overrun()
        if self._device.fabric.to_come:
            self._device.fabric.check("poll")
        found: list[Completion] = []
        while self._waiting and len(found) < limit:
            completion, qp, sequence = self._waiting.popleft()
            if sequence is not None:
                qp.free_through(sequence)
            found.append(completion)
        return found

    def _check_overrun(self) -> None:
        self._check()
        if self.overrun:
            raise OSError(errno.EIO, f"{self._device.name}: more than {self.depth} completions waited: overrun")

    def _release(self) -> None:
        self._event_fd.close()


class FakeSharedReceiveQueue(OwnedObject):
    """Satisfies `SharedReceiveQueue`."""

    kind = ResourceKind.SHARED_RECEIVE_QUEUE

    def __init__(self, device: Opened, depth: int) -> None:
        self.depth = depth
        self.receives: deque[Receive] = deque()
        """Posted receives, oldest first."""
        self._device = device
        super().__init__(device.ledger)

    def post_receives(self, receives: Sequence[Receive]) -> None:
        self._check()
        check_receives(receives)
        fabric = self._device.fabric
        if fabric.to_come and (failure := fabric.meet("post_receives")) is not None:
            self.receives.extend(Receive(*receive) for receive in receives[: int(len(receives) * failure.share)])
            raise failure.error
        room = self.depth - len(self.receives)
        self.receives.extend(Receive(*receive) for receive in receives[:room])
        if fabric.watcher is not None:
            fabric.watcher.posted(self, receives[:room])
        if len(receives) > room:
            raise OSError(errno.ENOMEM, f"{self._device.name}: {self.depth} receives are posted: the queue is full")

    def _release(self) -> None:
        self.receives.clear()


class FakeQueuePair(OpenQueuePair):
    """Satisfies `QueuePair`."""

    def __init__(
        self,
        device: Opened,
        cq: FakeCompletionQueue,
        srq: FakeSharedReceiveQueue | None,
        max_send_wr: int,
        max_inline: int,
    ) -> None:
        self.device = device
        self.cq = cq
        self.srq = srq
        self.qp_num = device.fabric.new_queue_pair_number()
        self.max_inline = max_inline
        self.current = QpState.RESET
        self.remote: QpAddress | None = None
        self.path: PathAttributes | None = None
        self.work: deque[FakeWork] = deque()
        self._max_send_wr = max_send_wr
        self._posted = 0  # number of requests posted so far; the number of each is its sequence
        self._freed = 0  # number of requests that have left the send queue
        cq.users.append(self)
        device.fabric.attach(self)
        super().__init__(device.ledger, cq, srq)

    def __repr__(self) -> str:
        return f"<FakeQueuePair {self.qp_num} of {self.device.name}, {self.current.name}>"

    # ---- for the fabric

    def complete_send(self, status: CompletionStatus) -> None:
        """End the oldest request. Success makes a completion only where that was asked for, failure always."""
        work = self.work.popleft()
        request = work.request
        if status != CompletionStatus.SUCCESS:
            completion = Completion(request.wr_id, status, UNDEFINED, UNDEFINED, self.qp_num)
        elif request.signalled:
            opcode = Opcode.RDMA_READ if isinstance(request, Read) else Opcode.SEND
            completion = Completion(request.wr_id, status, opcode, request.nbytes, self.qp_num)
        else:
            return
        self.cq.push(completion, self, work.sequence)

    def fail_receive(self, receive: Receive, status: CompletionStatus) -> None:
        """Fail `receive`, which has no room for a message that has arrived."""
        self.current = QpState.ERR
        self.cq.push(Completion(receive.wr_id, status, UNDEFINED, UNDEFINED, self.qp_num), self, None)

    def free_through(self, sequence: int) -> None:
        """Free the send queue up to a request whose completion was polled."""
        self._freed = max(self._freed, sequence)

    # ---- verbs

    def connect(self, remote: QpAddress, path: PathAttributes) -> None:
        self._check()
        check_path(remote, path)
        self.device.fabric.check("connect")
        max_message = self.device.port(path.port).max_msg_sz
        if self.current != QpState.RESET:
            raise OSError(errno.EINVAL, f"queue pair {self.qp_num} is in {self.current.name}; only RESET can connect")
        limits = self.device.attributes
        if path.max_rd_atomic > limits.max_qp_init_rd_atom or path.max_dest_rd_atomic > limits.max_qp_rd_atom:
            raise OSError(errno.EINVAL, f"{self.device.name} serves {limits.max_qp_rd_atom} READs at a time")
        if path.is_global and all(gid.index != path.gid_index for gid in self.device.nic.gids):
            raise OSError(errno.EINVAL, f"{self.device.name} has no GID {path.gid_index}")
        if path.marking.pkey_index >= len(self.device.nic.partitions):
            raise OSError(errno.EINVAL, f"{self.device.name} has no partition at {path.marking.pkey_index}")
        self.remote, self.path, self.current = remote, path, QpState.RTS
        self._max_message = max_message

    def to_error(self) -> None:
        self._check()
        self.device.fabric.check("to_error")
        self.current = QpState.ERR
        self.device.fabric.posted()

    def reset(self) -> None:
        self._check()
        self.device.fabric.check("reset")
        self.current = QpState.RESET
        self.remote = self.path = self._max_message = None
        self._forget()

    def _forget(self) -> None:
        self.work.clear()
        self._freed = self._posted
        self.cq.forget(self)

    def state(self) -> QpState:
        self._check()
        return self.current

    def post_sends(self, sends: Sequence[Send]) -> None:
        check_sends(sends, self.max_inline, self._limit())
        self._post_some("post_sends", [Send(*send) for send in sends])

    def post_reads(self, reads: Sequence[Read]) -> None:
        check_reads(reads, self._limit())
        self._post_some("post_reads", [Read(*read) for read in reads])

    def _post_some(self, call: str, requests: Sequence[Send | Read]) -> None:
        fabric = self.device.fabric
        if fabric.to_come and (failure := fabric.meet(call)) is not None:
            self._post(requests[: int(len(requests) * failure.share)])
            raise failure.error
        self._post(requests)

    def _post(self, requests: Iterable[Send | Read]) -> None:
        try:
            for request in requests:
                if self._posted - self._freed >= self._max_send_wr:
                    what = f"{self._max_send_wr} requests whose completion, or that of a later one, has not been polled"
                    raise OSError(errno.ENOMEM, f"{self.device.name}: the send queue of {self.qp_num} is full: {what}")
                if isinstance(request, Send) and self.device.fabric.watcher is not None:
                    self.device.fabric.watcher.sent(self, request)
                self._posted += 1
                copied = isinstance(request, Send) and request.inline
                inline = ctypes.string_at(request.address, request.nbytes) if copied else None
                self.work.append(FakeWork(self._posted, request, inline))
        finally:
            self.device.fabric.posted()

    def _release(self) -> None:
        self.device.fabric.check("destroy_queue_pair")
        self.device.fabric.detach(self)
        self.cq.users.remove(self)
        self._forget()
