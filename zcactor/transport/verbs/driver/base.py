"""The verbs that zcactor uses, as interfaces of a binding or a fake.

The names and numbers are those of the InfiniBand architecture as libibverbs spells them (``<infiniband/verbs.h>``). Man
pages are named where they have the contract. The interface is small on purpose: reliable connections only, SEND into
one shared receive queue, and READ. A peer cannot write to memory of this process.

There are three kinds of errors. `VerbsError` is a mistake of the caller, found before the device is called. `OSError`
has the errno of a verb that failed. A work request that fails after it was accepted raises nothing: its `Completion`
has another status than `CompletionStatus.SUCCESS`.

Objects belong to one thread, but any thread may register memory. A forked child must not use the objects, and must not
close them.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.transport.verbs.driver.codes import QpState

__all__ = [
    "MAX_U24",
    "MAX_U32",
    "MAX_U64",
    "UNMARKED",
    "Binding",
    "Completion",
    "CompletionQueue",
    "Device",
    "DeviceAttributes",
    "Gid",
    "Marking",
    "MemoryRegion",
    "PathAttributes",
    "PortAttributes",
    "QpAddress",
    "QueuePair",
    "Read",
    "Receive",
    "Send",
    "SharedReceiveQueue",
    "VerbsError",
]

MAX_U24: Final = 2**24 - 1
"""Largest queue pair number and packet sequence number."""
MAX_U32: Final = 2**32 - 1
"""Largest key, and largest length of one work request in bytes: ``ibv_sge.length`` is 32 bits wide."""
MAX_U64: Final = 2**64 - 1
"""Largest address and largest ``wr_id``."""


class VerbsError(ValueError):
    """A request that no device can do: a length above a limit, a closed object, a bad key. Nothing was changed. The
    message names the value and the limit."""


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's table of addresses; ibv_query_gid_table(3)."""

    index: int
    raw: bytes
    """16 bytes in network order."""
    roce_v2: bool
    """Whether its packets use UDP. Otherwise they are of InfiniBand or RoCE v1, which routers do not forward."""
    netdev: str = ""
    """The network interface, or ``""``."""

    @property
    def address(self) -> str:
        """The IP address of this GID: dotted for an IPv4-mapped one, else IPv6."""
        ip = ipaddress.IPv6Address(self.raw)
        return str(ip.ipv4_mapped or ip)

    @property
    def link_local(self) -> bool:
        """Whether it is valid on its own link only (fe80::/10)."""
        return ipaddress.IPv6Address(self.raw).is_link_local


@dataclass(frozen=True, slots=True)
class PortAttributes:
    """ibv_query_port(3)."""

    port: int
    """Its number, from 1."""
    state: int
    """A `PortState`."""
    active_mtu: int
    """``enum ibv_mtu``: 1 to 5 for 256 to 4096 bytes."""
    max_msg_sz: int
    """Longest message, READs included, in bytes. rdma_rxe reports 8 MiB and does not enforce it, hardware does."""
    lid: int
    """The address inside an InfiniBand subnet; 0 on Ethernet."""
    link_layer: int
    """A `LinkLayer`."""


@dataclass(frozen=True, slots=True)
class DeviceAttributes:
    """ibv_query_device(3)."""

    ports: int
    max_qp_rd_atom: int
    """READs that one queue pair can serve at a time, as responder."""
    max_qp_init_rd_atom: int
    """READs that one queue pair can have outstanding, as initiator."""
    max_qp_wr: int
    """Work requests of one send queue."""
    max_srq_wr: int
    """Work requests of one shared receive queue."""
    max_cqe: int
    """Entries of one completion queue."""


class Completion(NamedTuple):
    """One work completion; ibv_poll_cq(3). When `status` is not SUCCESS, only `wr_id`, `status` and `qp_num` are
    defined."""

    wr_id: int
    status: int
    """A `CompletionStatus`, or a number that only the driver knows."""
    opcode: int
    """An `Opcode`."""
    byte_len: int
    """Bytes received or read; undefined for a SEND."""
    qp_num: int
    """The local queue pair, also for a receive from the shared queue."""


class Receive(NamedTuple):
    """Room for one message; ibv_post_srq_recv(3). The bytes belong to the device until its completion."""

    wr_id: int
    address: int
    nbytes: int
    lkey: int


class Send(NamedTuple):
    """One message; ibv_post_send(3). The bytes belong to the device until its completion, or that of a later signalled
    request of the queue pair; with `inline` they are copied before the call returns and `lkey` is not used."""

    wr_id: int
    address: int
    nbytes: int
    lkey: int
    signalled: bool = True
    inline: bool = False


class Read(NamedTuple):
    """Copy `nbytes` at the peer's `remote_address` to the local `address`; ibv_post_send(3).

    The peer's card may read the bytes of several READs under way in any order: completions come in the order of
    posting, and say nothing about the order in which memory was read. A `fenced` READ is sent when all earlier ones
    have ended.
    """

    wr_id: int
    address: int
    nbytes: int
    lkey: int
    remote_address: int
    rkey: int
    signalled: bool = True
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class QpAddress:
    """The address of a queue pair for the peer that connects to it. The ends exchange theirs over another channel."""

    qpn: int
    psn: int
    """First packet sequence number that the peer sends with, 24 bits. It is random, as only it identifies an RDMA
    peer."""
    gid: bytes
    """16 bytes; zeros where the LID is the address."""
    lid: int
    mtu: int
    """The active MTU of its port, as ``enum ibv_mtu``."""


@dataclass(frozen=True, slots=True)
class Marking:
    """The marks of all packets of this process, by which switches choose a queue and a network for them."""

    traffic_class: int = 0
    """8 bits of the global header, of which RoCE v2 makes the DSCP (the upper 6) and ECN of its IP header."""
    service_level: int = 0
    """4 bits of the local header of InfiniBand, and the priority of RoCE in a VLAN."""
    pkey_index: int = 0
    """The place of the partition's key in the port's table."""


UNMARKED: Final = Marking()
"""The marks of packets without settings."""


@dataclass(frozen=True, slots=True)
class PathAttributes:
    """This end of a connection; ibv_modify_qp(3)."""

    port: int
    gid_index: int
    """Entry of this port's table to send from; not used where `is_global` is False."""
    psn: int
    """The number in this end's `QpAddress`."""
    mtu: int
    """Active MTU of the port, as ``enum ibv_mtu``. The smaller of both ends' is used: unequal ones lose messages."""
    is_global: bool = True
    """Address the peer by GID (always on Ethernet) instead of by LID."""
    max_rd_atomic: int = 16
    """READs this end has outstanding; at most the peer's `max_dest_rd_atomic`, or they fail."""
    max_dest_rd_atomic: int = 16
    """READs of the peer that this end serves at a time."""
    remote_read: bool = True
    """Whether the peer may READ through this queue pair."""
    timeout: int = 18
    """Wait for an answer of 4.096 us * 2**timeout: 1.07 s. The TCP socket reports a dead peer sooner."""
    retry_count: int = 6
    """Retries when no answer comes, 0 to 6. 7 retries for ever on rdma_rxe (rxe_comp.c), so it is refused."""
    rnr_retry: int = 6
    """Retries when the peer has no receive posted, 0 to 6. 7 means for ever, which would hide a defect, and is
    refused."""
    min_rnr_timer: int = 12
    """Code of the time after which a sender repeats a message that met no receive: 12 is 0.64 ms."""
    hop_limit: int = 64
    marking: Marking = UNMARKED


@runtime_checkable
class MemoryRegion(Protocol):
    """Registered, and so pinned, memory; ibv_reg_mr(3). It does not keep the memory alive: the owner does. Any thread
    may close it."""

    address: int
    """The number by which requests name its first byte."""
    nbytes: int
    lkey: int
    rkey: int

    def close(self) -> None:
        """Revoke the keys and unpin. A later READ by a peer fails with REM_ACCESS. Idempotent.

        Raises:
            OSError: the kernel refused; the region cannot be used in that case either.
        """


@runtime_checkable
class CompletionQueue(Protocol):
    """Completions of any number of queue pairs, and a descriptor that an event loop can wait for.

    The order that loses no wake-up is: `drain_events`, then `arm`, then `poll` until it returns nothing. A completion
    before `arm` may raise no event, so a caller that polls first and arms last can wait for ever. The device drops all
    completions when more than `depth` are waiting: keep the number of posted requests below it.
    """

    depth: int
    """Entries that the caller may use."""
    fd: int
    """Readable when an event waits. Non-blocking."""

    def arm(self) -> None:
        """Ask for one event at the next completion; ibv_req_notify_cq(3).

        Raises:
            OSError: the device failed or the queue has overrun (EIO).
        """

    def drain_events(self) -> int:
        """Take and acknowledge all waiting events without blocking; ibv_get_cq_event(3), ibv_ack_cq_events(3).

        Returns:
            Number of events.

        Raises:
            OSError: the device failed.
        """

    def poll(self, limit: int) -> Sequence[Completion]:
        """Take at most `limit` completions, oldest first; ibv_poll_cq(3). Empty when there are no completions.

        Those of one queue pair's send queue are in the order of posting. There is no order between queue pairs.

        Raises:
            OSError: the device failed or the queue has overrun (EIO).
        """

    def close(self) -> None:
        """Destroy the queue. Idempotent.

        Raises:
            OSError: EBUSY while a queue pair uses it; then it stays open.
        """


@runtime_checkable
class SharedReceiveQueue(Protocol):
    """Receives for the messages of many queue pairs; ibv_create_srq(3)."""

    depth: int
    """Receives that can be posted at a time."""

    def post_receives(self, receives: Sequence[Receive]) -> None:
        """Post all as one chain.

        Raises:
            VerbsError: a number does not fit its field; nothing was posted.
            OSError: ENOMEM when the queue is full: those before the first that did not fit are posted.
        """

    def close(self) -> None:
        """Destroy the queue. Posted receives get no completions. Idempotent.

        Raises:
            OSError: EBUSY while a queue pair uses it; then it stays open.
        """


@runtime_checkable
class QueuePair(Protocol):
    """One end of a reliable connection (IBV_QPT_RC); ibv_create_qp(3)."""

    qp_num: int
    max_inline: int
    """Bytes that a SEND may carry inline, as the driver granted them."""

    def connect(self, remote: QpAddress, path: PathAttributes) -> None:
        """Change from RESET to INIT, RTR and RTS. The first request may be posted once *both* ends have returned from
        this.

        Raises:
            VerbsError: a number does not fit its field, or a retry count is 7.
            OSError: EINVAL when it is not in RESET, or when the device cannot serve the attributes; ENETUNREACH or
                ETIMEDOUT when there is no route to the GID.
        """

    def to_error(self) -> None:
        """Fence the queue pair: no request of the peer is served any more, and all queued ones complete with WR_FLUSH.

        Raises:
            OSError: the device failed.
        """

    def reset(self) -> None:
        """Change to RESET, for another `connect`. Drain first: requests and completions in queues may be lost.

        Raises:
            OSError: the device failed.
        """

    def state(self) -> QpState:
        """Return the state from the device, not a cached copy.

        Raises:
            OSError: the device failed.
        """

    def post_sends(self, sends: Sequence[Send]) -> None:
        """Post all as one chain. Only polled completions free room in the send queue: signal at least one request of
        each `max_send_wr`.

        Raises:
            VerbsError: a number does not fit its field, a message is longer than the port takes, inline data is longer
                than `max_inline`, or the queue pair was never connected; nothing was posted.
            OSError: ENOMEM when the send queue is full: those before the first that did not fit are posted, so count
                beforehand, or fence with `to_error` and drain.
        """

    def post_reads(self, reads: Sequence[Read]) -> None:
        """Post READs; otherwise as `post_sends`, which raises the same."""

    def close(self) -> None:
        """Destroy the queue pair. Queued requests are lost *without completions*: fence and drain first. Idempotent.

        Raises:
            OSError: the device failed.
        """


@runtime_checkable
class Device(Protocol):
    """One opened device with one protection domain, to which all its objects belong."""

    name: str
    """The name in ``rdma link``, for instance ``mlx5_0``."""
    attributes: DeviceAttributes

    @property
    def async_fd(self) -> int | None:
        """A non-blocking descriptor that is readable when an asynchronous event waits, or the device is gone. None
        where the binding has no such descriptor."""

    @property
    def iwarp(self) -> bool:
        """Whether it speaks iWARP instead of InfiniBand or RoCE."""

    def async_events(self) -> Sequence[int]:
        """Take and acknowledge all waiting asynchronous events, without blocking; ibv_get_async_event(3),
        ibv_ack_async_event(3). No binding reports the port or queue pair of an event, so the caller looks at all of
        them.

        Returns:
            An `EventType` of each, or a number that only the driver knows.

        Raises:
            OSError: the device is gone.
        """

    def port(self, number: int) -> PortAttributes:
        """Return the port's present attributes.

        Raises:
            OSError: there is no such port, or the device failed.
        """

    def gids(self, port: int) -> Sequence[Gid]:
        """Return the used entries of the port's table of addresses, by index.

        Raises:
            OSError: the table cannot be read.
        """

    def partition_key(self, port: int, index: int) -> int:
        """Return the key of a partition from the port's table; ibv_query_pkey(3). 0 where there is none at `index`.

        Raises:
            OSError: the table cannot be read.
        """

    def register(self, address: int, nbytes: int, *, remote_read: bool) -> MemoryRegion:
        """Pin memory that is mapped with write access. The device may write there; peers may read it if
        `remote_read`, and never write.

        Raises:
            VerbsError: the range is empty, or does not lie inside the address space.
            OSError: ENOMEM above RLIMIT_MEMLOCK, EFAULT for memory that is not mapped writable.
        """

    def register_dma_buf(self, fd: int, nbytes: int, *, remote_read: bool) -> MemoryRegion:
        """Register the first `nbytes` of a dma-buf, which is memory of a GPU; ibv_reg_dmabuf_mr(3). `fd` stays the
        caller's, and may be closed once this returns. Requests name the bytes from 0 on, which is the region's
        `address`.

        Raises:
            VerbsError: the size is not positive.
            OSError: EOPNOTSUPP where the binding, the kernel or the device registers no dma-buf; EBADF or EINVAL for a
                descriptor of other things, or of fewer bytes.
        """

    def create_completion_queue(self, depth: int) -> CompletionQueue:
        """Create a queue for at least `depth` completions, which is not armed.

        Raises:
            VerbsError: `depth` is not between 1 and ``attributes.max_cqe``.
            OSError: the device failed.
        """

    def create_shared_receive_queue(self, depth: int) -> SharedReceiveQueue:
        """Create a queue for at least `depth` receives of one buffer each.

        Raises:
            VerbsError: `depth` is not between 1 and ``attributes.max_srq_wr``.
            OSError: the device failed.
        """

    def create_queue_pair(
        self, cq: CompletionQueue, srq: SharedReceiveQueue | None, *, max_send_wr: int, max_inline: int
    ) -> QueuePair:
        """Create a queue pair in RESET. Sends and receives complete on `cq`. Without `srq` it receives nothing.

        Args:
            cq: of this device.
            srq: of this device.
            max_send_wr: requests that may be outstanding.
            max_inline: bytes of inline data that the caller asks for; `QueuePair.max_inline` has the granted number.

        Raises:
            VerbsError: `max_send_wr` is not between 1 and ``attributes.max_qp_wr``, or a queue is closed.
            OSError: EINVAL for more inline data than the device can carry; the device failed.
        """

    def close(self) -> None:
        """Close all open objects of the device, queue pairs first, and then the device. Idempotent.

        Raises:
            OSError: an object refused; all others are closed.
        """


@runtime_checkable
class Binding(Protocol):
    """A way to reach devices."""

    name: str
    """``"pyverbs"``, ``"ibverbs"`` or ``"fake"``."""

    def devices(self) -> Sequence[str]:
        """Names of the devices, in the order of the library.

        Raises:
            OSError: the kernel has no RDMA (ENOSYS, ENODEV).
        """

    def open(self, name: str) -> Device:
        """Open a device and allocate its protection domain. Open each once in a process.

        Raises:
            OSError: ENODEV when there is no such device; EACCES without access to /dev/infiniband.
        """
