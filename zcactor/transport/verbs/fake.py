"""An RDMA fabric in plain Python: several adapters, reliable connections, and everything that can go wrong with them.

It moves real bytes (`ctypes`) between addresses of this process, and is as strict as the strictest hardware: keys are
checked against their region's bounds and device, room in a send queue comes back only with completions that were
polled, an event is raised only when one was asked for, and a completion that failed carries rubbish where verbs promise
nothing. Work is done at once when it is posted, or, with ``manual=True``, only in `FakeFabric.step`, which picks among
the queue pairs by a seeded random generator: the same seed gives the same order.

Statuses are those that rdma_rxe of Linux 6.1 showed for the same faults. Where it is lenient (messages above
max_msg_sz) or differs (LOC_QP_OP for a SEND with a bad lkey, instead of LOC_PROT) the fake follows the specification.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import random
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from zcactor.transport.verbs.adapter import Child, OpenDevice, OpenQueuePair
from zcactor.transport.verbs.base import (
    Completion,
    CompletionStatus,
    DeviceAttributes,
    Gid,
    LinkLayer,
    Opcode,
    PathAttributes,
    PortAttributes,
    PortState,
    QpAddress,
    QpState,
    Read,
    Receive,
    Send,
)
from zcactor.transport.verbs.checks import check_path, check_reads, check_receives, check_sends, registration_error
from zcactor.transport.verbs.fake_nic import ATTRIBUTES, EventFd, FakeNic
from zcactor.transport.verbs.faults import Faults, Watcher
from zcactor.transport.verbs.ledger import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zcactor.transport.verbs.base import CompletionQueue, SharedReceiveQueue

__all__ = [
    "UNDEFINED",
    "FakeBinding",
    "FakeCompletionQueue",
    "FakeDevice",
    "FakeFabric",
    "FakeMemoryRegion",
    "FakeQueuePair",
    "FakeSharedReceiveQueue",
    "Statistics",
]

UNDEFINED: Final = 0xEE
"""Opcode and length of completions that failed: verbs say nothing about them, so nobody may look."""
_MTU_4096: Final = 5
_MAX_INLINE: Final = 512
"""Bytes; rdma_rxe grants up to this and answers EINVAL to 1024."""
_MAX_MSG_SZ: Final = 8 << 20
"""Bytes; what rdma_rxe reports."""
_LINK_LOCAL: Final = Gid(0, ipaddress.IPv6Address("fe80::5054:ff:fe12:3456").packed, True, "eth0")


@dataclass(slots=True)
class Statistics:
    """What a fabric has done so far."""

    registrations: int = 0
    reads: int = 0
    """READs that succeeded."""
    bytes_read: int = 0
    sends: int = 0
    """SENDs that succeeded."""
    bytes_sent: int = 0
    rnr: int = 0
    """Times that a message found no receive posted."""
    retries: int = 0
    """Times that a request was repeated because nobody answered."""
    failures: int = 0
    """Requests that completed with another status than SUCCESS or WR_FLUSH."""


@dataclass(slots=True)
class _Work:
    """One posted request."""

    sequence: int
    request: Send | Read
    inline: bytes | None = None
    attempts: int = 0


class FakeFabric(Faults):
    """Adapters that all reach each other.

    Args:
        seed: of the order in which queue pairs get their turn, and of the keys.
        manual: do nothing until `step` or `drain` is called.
    """

    watcher: ClassVar[Watcher | None] = None
    """Of all fabrics; for tests."""

    def __init__(self, *, seed: int = 0, manual: bool = False) -> None:
        super().__init__()
        self.manual = manual
        self.rng = random.Random(seed)
        self._statistics = Statistics()
        self.nics: dict[str, FakeNic] = {}
        self._queue_pairs: dict[int, FakeQueuePair] = {}
        self._injected: dict[int, CompletionStatus] = {}
        self._next_qpn = 17
        self._next_key = 1
        self._pumping = False

    # ---- hardware

    def add_nic(
        self,
        name: str,
        address: str = "",
        *,
        link_layer: LinkLayer = LinkLayer.ETHERNET,
        state: PortState = PortState.ACTIVE,
        max_msg_sz: int = _MAX_MSG_SZ,
        attributes: DeviceAttributes = ATTRIBUTES,
        pin_limit: int | None = None,
    ) -> FakeNic:
        """An adapter with the IP address `address`; by default 10.77.0.1, 10.77.0.2 and so on. An InfiniBand one has a
        LID instead."""
        number = len(self.nics) + 1
        ip = ipaddress.ip_address(address or f"10.77.0.{number}")
        packed = ip.packed if ip.version == 6 else bytes(10) + b"\xff\xff" + ip.packed
        if link_layer == LinkLayer.ETHERNET:
            gids: tuple[Gid, ...] = (_LINK_LOCAL, Gid(1, packed, True, "eth0"))
        else:
            gids = (Gid(0, b"\xfe\x80" + bytes(6) + number.to_bytes(8, "big"), False),)
        lid = 0 if link_layer == LinkLayer.ETHERNET else number
        port = PortAttributes(1, state, _MTU_4096, max_msg_sz, lid, link_layer)
        nic = self.nics[name] = FakeNic(name, port, gids, attributes, pin_limit)
        return nic

    def binding(self, *names: str) -> FakeBinding:
        """What one host sees: the adapters of these names, by default all."""
        return FakeBinding(self, names or None)

    def statistics(self) -> Statistics:
        """A copy of the counters."""
        return replace(self._statistics)

    # ---- faults

    def kill(self, device: FakeDevice) -> None:
        """The process that opened `device` is gone: its queue pairs answer nothing and its memory is unpinned."""
        for qp in [qp for qp in self._queue_pairs.values() if qp.device is device]:
            del self._queue_pairs[qp.qp_num]
        for region in [*device.regions.values()]:
            region.revoke()

    def inject(self, qp_num: int, status: CompletionStatus) -> None:
        """The next request of that queue pair fails with `status`."""
        self._injected[qp_num] = status

    # ---- work

    def step(self, count: int = 1) -> int:
        """Let `count` requests run, or be retried, one at a time.

        Returns:
            How many did: fewer when nothing was left to do.
        """
        for done in range(count):
            ready = [qp for qp in self._queue_pairs.values() if qp.work]
            if not ready:
                return done
            self._run(self.rng.choice(ready))
        return count

    def drain(self) -> int:
        """Run until nothing is left to do. Ends, as all retries are finite."""
        total = 0
        while self.step():
            total += 1
        return total

    def posted(self) -> None:
        """Something was posted or fenced."""
        if not self.manual and not self._pumping:
            self._pumping = True
            try:
                self.drain()
            finally:
                self._pumping = False

    def new_queue_pair_number(self) -> int:
        """A number that no queue pair had before."""
        self._next_qpn += 1
        return self._next_qpn

    def new_key(self) -> int:
        """A key as rdma_rxe makes them: a running index and eight random bits, so no secret."""
        self._next_key += 1
        return self._next_key << 8 | self.rng.randrange(256)

    def attach(self, qp: FakeQueuePair) -> None:
        """`qp` exists."""
        self._queue_pairs[qp.qp_num] = qp

    def detach(self, qp: FakeQueuePair) -> None:
        """`qp` does not exist any more. Idempotent."""
        self._queue_pairs.pop(qp.qp_num, None)
        self._injected.pop(qp.qp_num, None)

    def count_registration(self) -> None:
        """One more region."""
        self._statistics.registrations += 1

    def _peer(self, qp: FakeQueuePair) -> FakeQueuePair | None:
        """The queue pair that answers `qp`: none when the address, the numbers or the state do not match."""
        remote, path = qp.remote, qp.path
        if remote is None or path is None or not qp.device.nic.active:
            return None
        peer = self._queue_pairs.get(remote.qpn)
        if peer is None or peer.current != QpState.RTS or peer.remote is None or peer.path is None:
            return None
        nic = peer.device.nic
        by_lid = nic.port.lid == remote.lid
        reached = any(gid.raw == remote.gid for gid in nic.gids) if path.is_global else by_lid
        numbers_match = (peer.remote.qpn, peer.remote.psn, remote.psn) == (qp.qp_num, path.psn, peer.path.psn)
        return peer if reached and nic.active and numbers_match else None

    def _run(self, qp: FakeQueuePair) -> None:
        work = qp.work[0]
        if qp.current == QpState.ERR:
            qp.complete_send(CompletionStatus.WR_FLUSH)
            return
        status = self._injected.pop(qp.qp_num, None) or self._attempt(qp, work)
        if status is None:
            work.attempts += 1
        elif status == CompletionStatus.SUCCESS:
            qp.complete_send(status)
        else:
            self._statistics.failures += 1
            qp.current = QpState.ERR
            qp.complete_send(status)

    def _attempt(self, qp: FakeQueuePair, work: _Work) -> CompletionStatus | None:
        """Try the request at the head of `qp`. None when it must be tried again."""
        assert qp.path is not None
        peer = self._peer(qp)
        if peer is None:
            if work.attempts >= qp.path.retry_count:
                return CompletionStatus.RETRY_EXC
            self._statistics.retries += 1
            return None
        if isinstance(work.request, Read):
            return self._read(qp, peer, work.request)
        return self._send(qp, peer, work)

    def _read(self, qp: FakeQueuePair, peer: FakeQueuePair, read: Read) -> CompletionStatus:
        assert qp.path is not None
        assert peer.path is not None
        if not peer.path.remote_read or qp.path.max_rd_atomic > peer.path.max_dest_rd_atomic:
            peer.current = QpState.ERR
            return CompletionStatus.REM_INV_REQ
        if read.nbytes:  # a READ of nothing checks no key (InfiniBand Architecture, volume 1, 9.7.4.1.5)
            region = peer.device.regions.get(read.rkey)
            if region is None or not region.remote_read or not region.holds(read.remote_address, read.nbytes):
                peer.current = QpState.ERR
                return CompletionStatus.REM_ACCESS
            if not qp.device.owns(read.lkey, read.address, read.nbytes):
                return CompletionStatus.LOC_PROT
            ctypes.memmove(read.address, read.remote_address, read.nbytes)
        self._statistics.reads += 1
        self._statistics.bytes_read += read.nbytes
        return CompletionStatus.SUCCESS

    def _send(self, qp: FakeQueuePair, peer: FakeQueuePair, work: _Work) -> CompletionStatus | None:
        assert qp.path is not None
        assert isinstance(work.request, Send)
        send = work.request
        if work.inline is None and send.nbytes and not qp.device.owns(send.lkey, send.address, send.nbytes):
            return CompletionStatus.LOC_PROT
        if peer.srq is None or not peer.srq.receives:
            self._statistics.rnr += 1
            if self.watcher is not None:
                self.watcher.missed(qp, peer)
            return CompletionStatus.RNR_RETRY_EXC if work.attempts >= qp.path.rnr_retry else None
        receive = peer.srq.receives.popleft()
        if self.watcher is not None:
            self.watcher.took(qp, peer, send, receive)
        if send.nbytes > receive.nbytes:
            peer.fail_receive(receive, CompletionStatus.LOC_LEN)
            return CompletionStatus.REM_INV_REQ
        if not peer.device.owns(receive.lkey, receive.address, receive.nbytes):
            peer.fail_receive(receive, CompletionStatus.LOC_PROT)
            return CompletionStatus.REM_OP
        source = work.inline if work.inline is not None else send.address
        ctypes.memmove(receive.address, source, send.nbytes)
        self._statistics.sends += 1
        self._statistics.bytes_sent += send.nbytes
        peer.cq.push(Completion(receive.wr_id, 0, Opcode.RECV, send.nbytes, peer.qp_num), peer, None)
        return CompletionStatus.SUCCESS


class FakeBinding:
    """Satisfies `Binding`."""

    name = "fake"

    def __init__(self, fabric: FakeFabric, names: tuple[str, ...] | None) -> None:
        self._fabric = fabric
        self._names = names
        self.opened: list[FakeDevice] = []
        """Every device that was ever opened through it, for tests to see that it was closed."""

    def devices(self) -> list[str]:
        return [name for name in self._fabric.nics if self._names is None or name in self._names]

    def open(self, name: str) -> FakeDevice:
        if name not in self.devices():
            raise OSError(errno.ENODEV, f"there is no RDMA device {name!r}")
        device = FakeDevice(self._fabric, self._fabric.nics[name])
        self.opened.append(device)
        return device


def _is_writable(address: int, nbytes: int) -> bool:
    """Whether the whole range is mapped with write access, as pinning asks for."""
    end = address + nbytes
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:  # in the order of addresses; hundreds may lie before the range, so they cost little
            low, _, rest = line.partition(b"-")
            high, _, mode = rest.partition(b" ")
            until = int(high, 16)
            if until <= address:
                continue
            if int(low, 16) > address or mode[1:2] != b"w":
                return False
            address = until
            if address >= end:
                return True
    return False


class FakeDevice(OpenDevice):
    """Satisfies `Device`: one process's handle of a `FakeNic`, with a protection domain of its own."""

    def __init__(self, fabric: FakeFabric, nic: FakeNic) -> None:
        super().__init__(nic.name)
        self.attributes = nic.attributes
        self.fabric = fabric
        self.nic = nic
        self._events: deque[int] = deque()
        self._async_fd: EventFd | None = None  # made when it is wanted
        nic.devices.append(self)
        self.regions: dict[int, FakeMemoryRegion] = {}
        """By key; lkey and rkey of a region are the same number, as on rdma_rxe."""

    @property
    def async_fd(self) -> int:
        """See `Device`. An eventfd."""
        if self._async_fd is None:
            self._async_fd = EventFd(len(self._events))
        return self._async_fd.fd

    def tell(self, kind: int) -> None:
        """An asynchronous event."""
        self._events.append(kind)
        if self._async_fd is not None:
            os.eventfd_write(self._async_fd.fd, 1)

    def async_events(self) -> list[int]:
        self._check()
        self.fabric.check("async_events")
        found, self._events = [*self._events], deque()
        if found and self._async_fd is not None:
            os.eventfd_read(self._async_fd.fd)
        return found

    def owns(self, lkey: int, address: int, nbytes: int) -> bool:
        """Whether `lkey` covers that range."""
        region = self.regions.get(lkey)
        return region is not None and region.holds(address, nbytes)

    def port(self, number: int) -> PortAttributes:
        self._check()
        if number != 1:
            raise OSError(errno.EINVAL, f"{self.name} has ports 1 to 1, not {number}")
        return self.nic.port

    def gids(self, port: int) -> list[Gid]:
        self.port(port)
        return list(self.nic.gids)

    def register(self, address: int, nbytes: int, *, remote_read: bool) -> FakeMemoryRegion:
        self._check_region(address, nbytes)
        self.fabric.check("register")
        if not _is_writable(address, nbytes):
            raise registration_error(errno.EFAULT, address, nbytes, self.name)
        if self.nic.pin_limit is not None and self.nic.pinned + nbytes > self.nic.pin_limit:
            raise registration_error(errno.ENOMEM, address, nbytes, self.name)
        self.fabric.count_registration()
        return FakeMemoryRegion(self, address, nbytes, remote_read)

    def create_completion_queue(self, depth: int) -> FakeCompletionQueue:
        self._check_completion_queue(depth)
        return FakeCompletionQueue(self, depth)

    def create_shared_receive_queue(self, depth: int) -> FakeSharedReceiveQueue:
        self._check_shared_receive_queue(depth)
        return FakeSharedReceiveQueue(self, depth)

    def create_queue_pair(
        self, cq: CompletionQueue, srq: SharedReceiveQueue | None, *, max_send_wr: int, max_inline: int
    ) -> FakeQueuePair:
        self._check_queue_pair(max_send_wr)
        self.fabric.check("create_queue_pair")
        own_cq = self._own(FakeCompletionQueue, cq)
        own_srq = None if srq is None else self._own(FakeSharedReceiveQueue, srq)
        if max_inline > _MAX_INLINE:
            raise OSError(errno.EINVAL, f"{self.name} carries {_MAX_INLINE} bytes inline, not {max_inline}")
        return FakeQueuePair(self, own_cq, own_srq, max_send_wr, max_inline)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.nic.devices.remove(self)
            if self._async_fd is not None:
                self._async_fd.close()
            if refused := self.ledger.close():
                raise refused[0]


class FakeMemoryRegion(Child):
    """Satisfies `MemoryRegion`."""

    kind = Kind.MEMORY_REGION

    def __init__(self, device: FakeDevice, address: int, nbytes: int, remote_read: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.remote_read = remote_read
        self.lkey = self.rkey = device.fabric.new_key()
        self.device = device
        device.regions[self.lkey] = self
        device.nic.pinned += nbytes
        super().__init__(device.ledger)

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether the range lies inside."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def revoke(self) -> None:
        """Its keys open nothing any more. Idempotent."""
        if self.device.regions.pop(self.lkey, None) is not None:
            self.device.nic.pinned -= self.nbytes

    def _release(self) -> None:
        self.device.fabric.check("ibv_dereg_mr")
        self.revoke()


class FakeCompletionQueue(Child):
    """Satisfies `CompletionQueue`. Its descriptor is an eventfd."""

    kind = Kind.COMPLETION_QUEUE

    def __init__(self, device: FakeDevice, depth: int) -> None:
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
        """One more completion, `sequence` that of a send. One too many loses it and stops every queue pair."""
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
        """Drop what `qp` completed and nobody polled, as destroying or resetting it does."""
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


class FakeSharedReceiveQueue(Child):
    """Satisfies `SharedReceiveQueue`."""

    kind = Kind.SHARED_RECEIVE_QUEUE

    def __init__(self, device: FakeDevice, depth: int) -> None:
        self.depth = depth
        self.receives: deque[Receive] = deque()
        """What is posted, oldest first."""
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
        device: FakeDevice,
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
        self.work: deque[_Work] = deque()
        self._max_send_wr = max_send_wr
        self._posted = 0  # requests ever posted; each one's number is its sequence
        self._freed = 0  # those whose room came back
        cq.users.append(self)
        device.fabric.attach(self)
        super().__init__(device.ledger, cq, srq)

    def __repr__(self) -> str:
        return f"<FakeQueuePair {self.qp_num} of {self.device.name}, {self.current.name}>"

    # ---- what the fabric does to it

    def complete_send(self, status: CompletionStatus) -> None:
        """The oldest request is done. Success is only told when it was asked for, failure always."""
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
        """A message came that `receive` cannot take."""
        self.current = QpState.ERR
        self.cq.push(Completion(receive.wr_id, status, UNDEFINED, UNDEFINED, self.qp_num), self, None)

    def free_through(self, sequence: int) -> None:
        """A completion was polled: everything posted up to it has left the send queue."""
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
                self.work.append(_Work(self._posted, request, inline))
        finally:
            self.device.fabric.posted()

    def _release(self) -> None:
        self.device.fabric.check("destroy_queue_pair")
        self.device.fabric.detach(self)
        self.cq.users.remove(self)
        self._forget()
