"""An RDMA fabric in plain Python: adapters, reliable connections, and their faults.

It moves real bytes (`ctypes`) between addresses of this process, and is as strict as the strictest hardware. Keys are
checked against the bounds and the device of their region. Only polled completions free room in a send queue. An event
is raised only when one was asked for. A failed completion has arbitrary values in the fields that verbs leave
undefined. Work is done at once when it is posted, or, with ``manual=True``, only by `FakeFabric.step`. It chooses among
the queue pairs by a seeded random generator, so the same seed gives the same order.

Statuses are those of rdma_rxe of Linux 6.1 for the same faults. Where that is lenient (messages above max_msg_sz) or
differs (LOC_QP_OP for a SEND with a bad lkey, instead of LOC_PROT), the fake follows the specification.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import random
from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Final

from zcactor.transport.verbs.driver.adapter import OpenDevice
from zcactor.transport.verbs.driver.base import (
    Completion,
    DeviceAttributes,
    Gid,
    PortAttributes,
    Read,
    Send,
)
from zcactor.transport.verbs.driver.checks import dma_buf_error, registration_error
from zcactor.transport.verbs.driver.codes import (
    FULL_MEMBER,
    PARTITION,
    CompletionStatus,
    LinkLayer,
    Opcode,
    PortState,
    QpState,
)
from zcactor.transport.verbs.driver.fake_nic import (
    ATTRIBUTES,
    INLINE_LIMITS,
    OVERTAKING,
    DmaBuf,
    EventFd,
    FakeNic,
)
from zcactor.transport.verbs.driver.fake_queues import (
    FakeCompletionQueue,
    FakeMemoryRegion,
    FakeQueuePair,
    FakeSharedReceiveQueue,
    FakeWork,
)
from zcactor.transport.verbs.driver.faults import DeviceFaults, Watcher

if TYPE_CHECKING:
    from zcactor.transport.verbs.driver.base import CompletionQueue, SharedReceiveQueue

__all__ = [
    "FakeBinding",
    "FakeDevice",
    "FakeFabric",
    "Statistics",
]

_MTU_4096: Final = 5
_MAX_MSG_SZ: Final = 8 << 20
"""Bytes of the longest message, as rdma_rxe reports them."""
_NO_TABLE: Final = FULL_MEMBER
"""The key of ports without a table of partitions, which is that of no other port."""
_LINK_LOCAL: Final = Gid(0, ipaddress.IPv6Address("fe80::5054:ff:fe12:3456").packed, True, "eth0")


@dataclass(slots=True)
class Statistics:
    """Counters of a fabric."""

    registrations: int = 0
    reads: int = 0
    """Number of READs that succeeded."""
    bytes_read: int = 0
    sends: int = 0
    """Number of SENDs that succeeded."""
    bytes_sent: int = 0
    rnr: int = 0
    """Messages that found no posted receive."""
    retries: int = 0
    """Repetitions of requests that had no answer."""
    failures: int = 0
    """Requests that completed with another status than SUCCESS or WR_FLUSH."""


class FakeFabric(DeviceFaults):
    """Adapters that reach each other, unless they are of different networks.

    Args:
        seed: seed of the order of the queue pairs, and of the keys.
        manual: whether to do work only in `step` and `drain`.
    """

    watcher: ClassVar[Watcher | None] = None
    """The watcher of all fabrics, for tests."""

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
        max_inline: int = INLINE_LIMITS[-1],
        takes_dma_bufs: bool = True,
        network: str = "",
        requests_left: int | None = None,
    ) -> FakeNic:
        """Add an adapter with the IP address `address`, by default 10.77.0.1, 10.77.0.2 and so on. An InfiniBand
        adapter has a LID instead. The other options are fields of `FakeNic`."""
        number = len(self.nics) + 1
        ip = ipaddress.ip_address(address or f"10.77.0.{number}")
        packed = ip.packed if ip.version == 6 else bytes(10) + b"\xff\xff" + ip.packed
        if link_layer == LinkLayer.ETHERNET:
            gids: tuple[Gid, ...] = (_LINK_LOCAL, Gid(1, packed, True, "eth0"))
        else:
            gids = (Gid(0, b"\xfe\x80" + bytes(6) + number.to_bytes(8, "big"), False),)
        lid = 0 if link_layer == LinkLayer.ETHERNET else number
        port = PortAttributes(1, state, _MTU_4096, max_msg_sz, lid, link_layer)
        nic = self.nics[name] = FakeNic(
            name,
            port,
            gids,
            attributes,
            pin_limit,
            takes_dma_bufs,
            max_inline,
            network=network,
            requests_left=requests_left,
        )
        return nic

    @property
    def devices(self) -> list[FakeNic]:
        """The adapters, in the order in which they were added."""
        return list(self.nics.values())

    def binding(self, *names: str) -> FakeBinding:
        """Make the binding of one host, which has the adapters of these names, by default all."""
        return FakeBinding(self, names or None)

    def statistics(self) -> Statistics:
        """Return a copy of the counters."""
        return replace(self._statistics)

    # ---- faults

    def kill(self, device: FakeDevice) -> None:
        """Simulate the end of the process that opened `device`: its queue pairs do not answer, and its memory is
        unpinned.
        """
        for qp in [qp for qp in self._queue_pairs.values() if qp.device is device]:
            del self._queue_pairs[qp.qp_num]
        for region in [*device.regions.values()]:
            region.revoke()

    def inject(self, qp_num: int, status: CompletionStatus) -> None:
        """Make the next request of that queue pair fail with `status`."""
        self._injected[qp_num] = status

    # ---- work

    def step(self, count: int = 1) -> int:
        """Let `count` requests run, or be retried, one at a time.

        Returns:
            Number of requests that ran: fewer when no work was left.
        """
        for done in range(count):
            ready = [qp for qp in self._queue_pairs.values() if qp.work]
            if not ready:
                return done
            self._run(self.rng.choice(ready))
        return count

    def drain(self) -> int:
        """Run until no work is left. This ends, as all retries are finite."""
        total = 0
        while self.step():
            total += 1
        return total

    def posted(self) -> None:
        """Do the work after a post or a fence, unless ``manual`` is set."""
        if not self.manual and not self._pumping:
            self._pumping = True
            try:
                self.drain()
            finally:
                self._pumping = False

    def new_queue_pair_number(self) -> int:
        """Return a number that no queue pair had before."""
        self._next_qpn += 1
        return self._next_qpn

    def new_key(self) -> int:
        """Make a key like those of rdma_rxe: a counter and eight random bits, so it is no secret."""
        self._next_key += 1
        return self._next_key << 8 | self.rng.randrange(256)

    def attach(self, qp: FakeQueuePair) -> None:
        """Add a queue pair."""
        self._queue_pairs[qp.qp_num] = qp

    def detach(self, qp: FakeQueuePair) -> None:
        """Remove a queue pair. Idempotent."""
        self._queue_pairs.pop(qp.qp_num, None)
        self._injected.pop(qp.qp_num, None)

    def count_registration(self) -> None:
        """Count a registered region."""
        self._statistics.registrations += 1

    def _peer(self, qp: FakeQueuePair) -> FakeQueuePair | None:
        """Return the queue pair that answers `qp`; None when the address, the numbers or the state do not match."""
        remote, path = qp.remote, qp.path
        if remote is None or path is None or not qp.device.nic.active:
            return None
        peer = self._queue_pairs.get(remote.qpn)
        if peer is None or peer.current != QpState.RTS or peer.remote is None or peer.path is None:
            return None
        nic = peer.device.nic
        if nic.network != qp.device.nic.network or not _of_one_partition(qp, peer):
            return None
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

    def _attempt(self, qp: FakeQueuePair, work: FakeWork) -> CompletionStatus | None:
        """Try the first request of `qp`. None when it has to be tried again."""
        assert qp.path is not None
        qp.device.nic.count_request()
        peer = self._peer(qp)
        if peer is None:
            if work.attempts >= qp.path.retry_count:
                return CompletionStatus.RETRY_EXC
            self._statistics.retries += 1
            return None
        if isinstance(work.request, Read):
            if peer.device.nic.reorders_reads:
                self._serve_early(qp, peer)
            return self._read(qp, peer, work.request)
        return self._send(qp, peer, work)

    @staticmethod
    def _serve_early(qp: FakeQueuePair, peer: FakeQueuePair) -> None:
        """Read the memory of the last READ under way first, if it is short."""
        last = None
        for work in islice(qp.work, 1, peer.path.max_dest_rd_atomic if peer.path is not None else 1):
            if not isinstance(work.request, Read) or work.request.fenced:
                break
            last = work
        if last is None or last.early is not None or not isinstance(last.request, Read):
            return
        read = last.request
        region = peer.device.regions.get(read.rkey)
        if 0 < read.nbytes <= OVERTAKING and region is not None and region.holds(read.remote_address, read.nbytes):
            last.early = ctypes.string_at(region.at(read.remote_address), read.nbytes)

    def _read(self, qp: FakeQueuePair, peer: FakeQueuePair, read: Read) -> CompletionStatus:
        assert qp.path is not None
        assert peer.path is not None
        if not peer.path.remote_read or qp.path.max_rd_atomic > peer.path.max_dest_rd_atomic:
            peer.current = QpState.ERR
            return CompletionStatus.REM_INV_REQ
        if read.nbytes:  # a READ of 0 bytes checks no key (InfiniBand Architecture, volume 1, 9.7.4.1.5)
            region = peer.device.regions.get(read.rkey)
            if region is None or not region.remote_read or not region.holds(read.remote_address, read.nbytes):
                peer.current = QpState.ERR
                return CompletionStatus.REM_ACCESS
            if not qp.device.owns(read.lkey, read.address, read.nbytes):
                return CompletionStatus.LOC_PROT
            source, target = region.at(read.remote_address), qp.device.regions[read.lkey].at(read.address)
            early = qp.work[0].early
            ctypes.memmove(target, source if early is None else early, read.nbytes)
        self._statistics.reads += 1
        self._statistics.bytes_read += read.nbytes
        return CompletionStatus.SUCCESS

    def _send(self, qp: FakeQueuePair, peer: FakeQueuePair, work: FakeWork) -> CompletionStatus | None:
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
        if send.nbytes:
            source = work.inline if work.inline is not None else qp.device.regions[send.lkey].at(send.address)
            ctypes.memmove(peer.device.regions[receive.lkey].at(receive.address), source, send.nbytes)
        self._statistics.sends += 1
        self._statistics.bytes_sent += send.nbytes
        peer.cq.push(Completion(receive.wr_id, 0, Opcode.RECV, send.nbytes, peer.qp_num), peer, None)
        return CompletionStatus.SUCCESS


def _of_one_partition(qp: FakeQueuePair, peer: FakeQueuePair) -> bool:
    """Whether both are of one partition, and one of them is a full member."""
    ours, theirs = (
        one.device.nic.partitions[one.path.marking.pkey_index] or _NO_TABLE
        for one in (qp, peer)
        if one.path is not None
    )
    return (ours ^ theirs) & PARTITION == 0 and (ours | theirs) & FULL_MEMBER != 0


class FakeBinding:
    """Satisfies `Binding`."""

    name = "fake"

    def __init__(self, fabric: FakeFabric, names: tuple[str, ...] | None) -> None:
        self._fabric = fabric
        self._names = names
        self.opened: list[FakeDevice] = []
        """All devices that were opened through it. Tests check that they are closed."""

    def devices(self) -> list[str]:
        return [name for name in self._fabric.nics if self._names is None or name in self._names]

    def open(self, name: str) -> FakeDevice:
        if name not in self.devices():
            raise OSError(errno.ENODEV, f"there is no RDMA device {name!r}")
        device = FakeDevice(self._fabric, self._fabric.nics[name])
        self.opened.append(device)
        return device


def _is_writable(address: int, nbytes: int) -> bool:
    """Whether the whole range is mapped with write access, which pinning needs."""
    end = address + nbytes
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:  # in the order of addresses; there may be hundreds before the range
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
    """A process's handle of a `FakeNic`, with a protection domain of its own. Satisfies `Device`."""

    def __init__(self, fabric: FakeFabric, nic: FakeNic) -> None:
        super().__init__(nic.name)
        self.attributes = nic.attributes
        self.fabric = fabric
        self.nic = nic
        self._events: deque[int] = deque()
        self._async_fd: EventFd | None = None  # made at its first use
        nic.devices.append(self)
        self.regions: dict[int, FakeMemoryRegion] = {}
        """Regions by key. Both keys of a region are the same number, as on rdma_rxe."""

    @property
    def async_fd(self) -> int:
        """See `Device`. It is an eventfd."""
        if self._async_fd is None:
            self._async_fd = EventFd(len(self._events))
        return self._async_fd.fd

    @property
    def iwarp(self) -> bool:
        """See `Device`."""
        return self.nic.iwarp

    def tell(self, kind: int) -> None:
        """Raise an asynchronous event."""
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
        """Whether the region of `lkey` contains the range."""
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

    def partition_key(self, port: int, index: int) -> int:
        self.port(port)
        return self.nic.partitions[index] if index < len(self.nic.partitions) else 0

    def register(self, address: int, nbytes: int, *, remote_read: bool) -> FakeMemoryRegion:
        self._check_region(address, nbytes)
        self.fabric.check("register")
        if not _is_writable(address, nbytes):
            raise registration_error(errno.EFAULT, address, nbytes, self.name)
        if self.nic.pin_limit is not None and self.nic.pinned + nbytes > self.nic.pin_limit:
            raise registration_error(errno.ENOMEM, address, nbytes, self.name)
        self.fabric.count_registration()
        return FakeMemoryRegion(self, address, nbytes, remote_read)

    def register_dma_buf(self, fd: int, nbytes: int, *, remote_read: bool) -> FakeMemoryRegion:
        self._check_dma_buf(nbytes)
        self.fabric.check("register_dma_buf")
        if not self.nic.takes_dma_bufs:
            raise dma_buf_error(errno.EOPNOTSUPP, nbytes, self.name)
        if self.nic.pin_limit is not None and self.nic.pinned + nbytes > self.nic.pin_limit:
            raise dma_buf_error(errno.ENOMEM, nbytes, self.name)
        try:
            memory = DmaBuf(fd, nbytes)
        except OSError as error:
            raise dma_buf_error(error.errno or errno.EINVAL, nbytes, self.name) from error
        self.fabric.count_registration()
        return FakeMemoryRegion(self, 0, nbytes, remote_read, memory)

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
        if max_inline > self.nic.max_inline:
            raise OSError(errno.EINVAL, f"{self.name} carries {self.nic.max_inline} bytes inline, not {max_inline}")
        return FakeQueuePair(self, own_cq, own_srq, max_send_wr, max_inline)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.nic.devices.remove(self)
            if self._async_fd is not None:
                self._async_fd.close()
            if refused := self.ledger.close():
                raise refused[0]
