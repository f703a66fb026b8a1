"""The verbs that zcactor uses, as shapes that a binding or a fake can have.

The words and numbers are those of the InfiniBand architecture as libibverbs spells them (``<infiniband/verbs.h>``);
man pages are named where a contract is theirs. The interface is small on purpose: reliable connections only, SEND into
one shared receive queue, and READ. Nothing here may be written to by a peer.

Errors come in three kinds. `VerbsError` is a mistake of the caller's that was found before the device saw it.
`OSError` carries the errno of a verb that failed. A work request that fails after it was accepted raises nothing:
its `Completion` has another status than `CompletionStatus.SUCCESS`.

Objects belong to one thread, but memory may be registered on any. They do not survive ``fork``: a child must not touch
them, not even to close them.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MAX_U24",
    "MAX_U32",
    "MAX_U64",
    "Binding",
    "Completion",
    "CompletionQueue",
    "CompletionStatus",
    "Device",
    "DeviceAttributes",
    "EventType",
    "Gid",
    "LinkLayer",
    "MemoryRegion",
    "Opcode",
    "PathAttributes",
    "PortAttributes",
    "PortState",
    "QpAddress",
    "QpState",
    "QueuePair",
    "Read",
    "Receive",
    "Send",
    "SharedReceiveQueue",
    "VerbsError",
    "describe_event",
    "describe_status",
]

MAX_U24: Final = 2**24 - 1
"""Largest queue pair number and packet sequence number."""
MAX_U32: Final = 2**32 - 1
"""Largest key, and largest length of one work request in bytes: ``ibv_sge.length`` is 32 bits wide."""
MAX_U64: Final = 2**64 - 1
"""Largest address and largest ``wr_id``."""


class VerbsError(ValueError):
    """The caller asked for what no device can do: a length above a limit, a closed object, a bad key. Nothing
    happened; the message names the value and the limit."""


class CompletionStatus(IntEnum):
    """``enum ibv_wc_status``; ibv_poll_cq(3). Every value but the first means that the queue pair is in ERR."""

    SUCCESS = 0
    LOC_LEN = 1
    LOC_QP_OP = 2
    LOC_EEC_OP = 3
    LOC_PROT = 4
    WR_FLUSH = 5
    MW_BIND = 6
    BAD_RESP = 7
    LOC_ACCESS = 8
    REM_INV_REQ = 9
    REM_ACCESS = 10
    REM_OP = 11
    RETRY_EXC = 12
    RNR_RETRY_EXC = 13
    LOC_RDD_VIOL = 14
    REM_INV_RD_REQ = 15
    REM_ABORT = 16
    INV_EECN = 17
    INV_EEC_STATE = 18
    FATAL = 19
    RESP_TIMEOUT = 20
    GENERAL = 21


_MEANINGS: Final = {
    CompletionStatus.SUCCESS: "done",
    CompletionStatus.LOC_LEN: "the message is longer than the receive buffer or than the port's max_msg_sz",
    CompletionStatus.LOC_QP_OP: "the device could not carry out the request; rdma_rxe means a bad lkey by it",
    CompletionStatus.LOC_PROT: "the local buffer is not inside a memory region with that lkey",
    CompletionStatus.WR_FLUSH: "the queue pair was in ERR: an earlier request failed, or this end fenced it",
    CompletionStatus.REM_INV_REQ: "the peer's queue pair does not allow the request, or its receive buffer is small",
    CompletionStatus.REM_ACCESS: "the peer has no readable memory region with that rkey around that range",
    CompletionStatus.REM_OP: "the peer could not do its part: its receive buffer has a bad lkey",
    CompletionStatus.RETRY_EXC: "the peer does not answer: it is dead, fenced or reset, or the path is broken",
    CompletionStatus.RNR_RETRY_EXC: "the peer had no receive posted for too long",
}


def describe_status(status: int) -> str:
    """One line for a message: the status's name, number and usual meaning. Unknown numbers are fine."""
    try:
        known = CompletionStatus(status)
    except ValueError:
        return f"status {status}"
    meaning = _MEANINGS.get(known)
    return f"{known.name} ({status})" if meaning is None else f"{known.name} ({status}): {meaning}"


class Opcode(IntEnum):
    """``enum ibv_wc_opcode``, as far as this interface produces them."""

    SEND = 0
    RDMA_READ = 2
    RECV = 128


class EventType(IntEnum):
    """``enum ibv_event_type``; ibv_get_async_event(3)."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19


def describe_event(kind: int) -> str:
    """An event's name and number. Unknown numbers are fine."""
    try:
        return f"{EventType(kind).name} ({kind})"
    except ValueError:
        return f"event {kind}"


class QpState(IntEnum):
    """``enum ibv_qp_state``; ibv_modify_qp(3)."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class PortState(IntEnum):
    """``enum ibv_port_state``; ibv_query_port(3)."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class LinkLayer(IntEnum):
    """What is under the port: it decides how a peer is addressed. Unspecified means InfiniBand, as in verbs.h."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's table of addresses; ibv_query_gid_table(3)."""

    index: int
    raw: bytes
    """16 bytes in network order."""
    roce_v2: bool
    """Whether packets with it go over UDP; otherwise InfiniBand or RoCE v1, which no router forwards."""
    netdev: str = ""
    """The network interface, ``""`` where there is none."""

    @property
    def address(self) -> str:
        """The IP address it stands for: dotted for an IPv4-mapped one, else IPv6."""
        ip = ipaddress.IPv6Address(self.raw)
        return str(ip.ipv4_mapped or ip)

    @property
    def link_local(self) -> bool:
        """Whether it is only good on its own link (fe80::/10), where no address of a host is found."""
        return ipaddress.IPv6Address(self.raw).is_link_local


@dataclass(frozen=True, slots=True)
class PortAttributes:
    """ibv_query_port(3)."""

    port: int
    """1 and up."""
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
    """One work completion; ibv_poll_cq(3). When `status` is not SUCCESS only `wr_id`, `status` and `qp_num` mean
    anything."""

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
    """Copy `nbytes` at the peer's `remote_address` to the local `address`; ibv_post_send(3)."""

    wr_id: int
    address: int
    nbytes: int
    lkey: int
    remote_address: int
    rkey: int
    signalled: bool = True


@dataclass(frozen=True, slots=True)
class QpAddress:
    """What a peer must know to connect to a queue pair. Both ends exchange theirs over another channel."""

    qpn: int
    psn: int
    """First packet sequence number the peer sends with, 24 bits; random, as an RDMA peer is only told apart by it."""
    gid: bytes
    """16 bytes; zeros where only the LID counts."""
    lid: int
    mtu: int
    """The active MTU of its port, as ``enum ibv_mtu``."""


@dataclass(frozen=True, slots=True)
class PathAttributes:
    """This end of a connection; ibv_modify_qp(3)."""

    port: int
    gid_index: int
    """Entry of this port's table to send from; not used where `is_global` is False."""
    psn: int
    """The number that this end's `QpAddress` told the peer."""
    mtu: int
    """Active MTU of the port, as ``enum ibv_mtu``. The smaller of both ends' is used: unequal ones lose messages."""
    is_global: bool = True
    """Address the peer by GID (always on Ethernet) instead of by LID."""
    max_rd_atomic: int = 16
    """READs this end has outstanding; at most the peer's `max_dest_rd_atomic`, or they fail."""
    max_dest_rd_atomic: int = 16
    """READs of the peer that this end serves at a time."""
    remote_read: bool = True
    """Whether the peer may READ through this queue pair at all."""
    timeout: int = 18
    """Wait for an answer of 4.096 us * 2**timeout: 1.07 s. A dead peer is noticed sooner, by the socket beside."""
    retry_count: int = 6
    """Retries when no answer comes, 0 to 6. 7 retries for ever on rdma_rxe (rxe_comp.c), so it is refused."""
    rnr_retry: int = 6
    """Retries when the peer has no receive posted, 0 to 6. 7 means for ever, which hides a bug; it is refused."""
    min_rnr_timer: int = 12
    """What this end asks of a sender it has no receive for: code 12 is 0.64 ms."""
    hop_limit: int = 64


@runtime_checkable
class MemoryRegion(Protocol):
    """Registered, and so pinned, memory; ibv_reg_mr(3). It does not keep the memory alive: the owner does."""

    address: int
    nbytes: int
    lkey: int
    rkey: int

    def close(self) -> None:
        """Revoke the keys and unpin. A later READ by a peer fails with REM_ACCESS. Idempotent.

        Raises:
            OSError: the kernel refused; the region is unusable all the same.
        """


@runtime_checkable
class CompletionQueue(Protocol):
    """Completions of any number of queue pairs, and a descriptor that an event loop can wait for.

    The order that loses no wake-up is: `drain_events`, then `arm`, then `poll` until it returns nothing. A completion
    that came before `arm` may raise no event, so polling first and arming last can wait for ever. The device drops
    everything when more completions than `depth` are waiting: keep the sum of what is posted below it.
    """

    depth: int
    """Entries the caller may count on."""
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
            How many there were.

        Raises:
            OSError: the device failed.
        """

    def poll(self, limit: int) -> Sequence[Completion]:
        """At most `limit` completions, oldest first, empty when there are none; ibv_poll_cq(3).

        Those of one queue pair's send queue come in the order of posting. Nothing is promised between queue pairs.

        Raises:
            OSError: the device failed or the queue has overrun (EIO).
        """

    def close(self) -> None:
        """Idempotent.

        Raises:
            OSError: EBUSY while a queue pair uses it; then it stays open.
        """


@runtime_checkable
class SharedReceiveQueue(Protocol):
    """Receives that the messages of many queue pairs take from; ibv_create_srq(3)."""

    depth: int
    """Receives that can be posted at a time."""

    def post_receives(self, receives: Sequence[Receive]) -> None:
        """Post all as one chain.

        Raises:
            VerbsError: a number does not fit its field; nothing was posted.
            OSError: ENOMEM when the queue is full: those before the first that did not fit are posted.
        """

    def close(self) -> None:
        """Posted receives are forgotten without completions. Idempotent.

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
        """RESET to INIT to RTR to RTS. The first request may be posted once *both* ends have returned from this.

        Raises:
            VerbsError: a number does not fit its field, or a retry count is 7.
            OSError: EINVAL when it is not in RESET, or when the device cannot serve the attributes; ENETUNREACH or
                ETIMEDOUT when there is no route to the GID.
        """

    def to_error(self) -> None:
        """Fence: nothing of the peer's is served any more, and everything queued completes with WR_FLUSH.

        Raises:
            OSError: the device failed.
        """

    def reset(self) -> None:
        """Back to RESET, to `connect` again. Drain first: what is queued or not yet polled may vanish.

        Raises:
            OSError: the device failed.
        """

    def state(self) -> QpState:
        """The state as the device has it, not a cached copy.

        Raises:
            OSError: the device failed.
        """

    def post_sends(self, sends: Sequence[Send]) -> None:
        """Post all as one chain. The send queue's room comes back only with completions that have been polled: signal
        at least one request of each `max_send_wr`.

        Raises:
            VerbsError: a number does not fit its field, a message is longer than the port takes, inline data is longer
                than `max_inline`, or the queue pair was never connected; nothing was posted.
            OSError: ENOMEM when the send queue is full: those before the first that did not fit are posted, so count
                beforehand, or fence with `to_error` and drain.
        """

    def post_reads(self, reads: Sequence[Read]) -> None:
        """The same for READs; raises the same."""

    def close(self) -> None:
        """Destroy it. What is queued vanishes *without completions*: fence and drain first. Idempotent.

        Raises:
            OSError: the device failed.
        """


@runtime_checkable
class Device(Protocol):
    """One opened device with one protection domain, in which everything made from it lives."""

    name: str
    """As ``rdma link`` shows it, ``mlx5_0``."""
    attributes: DeviceAttributes

    @property
    def async_fd(self) -> int | None:
        """Readable when an asynchronous event waits, or the device is gone. Non-blocking. None where the binding does
        not tell it."""

    def async_events(self) -> Sequence[int]:
        """Take and acknowledge all asynchronous events that wait, without blocking; ibv_get_async_event(3),
        ibv_ack_async_event(3). Which port or queue pair one is of is not told, because no binding tells it: what it
        says is that something is to be looked at.

        Returns:
            An `EventType` of each, or a number that only the driver knows.

        Raises:
            OSError: the device is gone.
        """

    def port(self, number: int) -> PortAttributes:
        """The port's attributes now.

        Raises:
            OSError: there is no such port, or the device failed.
        """

    def gids(self, port: int) -> Sequence[Gid]:
        """The entries in use of the port's table, by index.

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

    def create_completion_queue(self, depth: int) -> CompletionQueue:
        """A queue for at least `depth` completions, not armed.

        Raises:
            VerbsError: `depth` is not between 1 and ``attributes.max_cqe``.
            OSError: the device failed.
        """

    def create_shared_receive_queue(self, depth: int) -> SharedReceiveQueue:
        """A queue for at least `depth` receives of one buffer each.

        Raises:
            VerbsError: `depth` is not between 1 and ``attributes.max_srq_wr``.
            OSError: the device failed.
        """

    def create_queue_pair(
        self, cq: CompletionQueue, srq: SharedReceiveQueue | None, *, max_send_wr: int, max_inline: int
    ) -> QueuePair:
        """A queue pair in RESET. Sends and receives complete on `cq`; without `srq` it receives nothing.

        Args:
            cq: of this device.
            srq: of this device.
            max_send_wr: requests that may be outstanding.
            max_inline: bytes wished for; `QueuePair.max_inline` says what was granted.

        Raises:
            VerbsError: `max_send_wr` is not between 1 and ``attributes.max_qp_wr``, or a queue is closed.
            OSError: EINVAL for more inline data than the device can carry; the device failed.
        """

    def close(self) -> None:
        """Close what was made from it and is still open, queue pairs first, then itself. Idempotent.

        Raises:
            OSError: something refused; everything else was closed all the same.
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
