"""The numbers of libibverbs that zcactor uses, and their meanings.

They are those of ``<infiniband/verbs.h>``. Drivers report other numbers as well, and the functions that describe a
number accept them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = [
    "DEFAULT_PARTITION",
    "FULL_MEMBER",
    "PARTITION",
    "CompletionStatus",
    "EventType",
    "LinkLayer",
    "Opcode",
    "PortState",
    "QpState",
    "describe_event",
    "describe_status",
]

FULL_MEMBER: Final = 0x8000
"""Bit of the key of a partition: a port without it, a limited member, reaches full members only (InfiniBand
Architecture, volume 1, 10.9.1.1)."""
PARTITION: Final = 0x7FFF
"""The other bits of the key: the partition's number."""
DEFAULT_PARTITION: Final = FULL_MEMBER | PARTITION
"""The key of full members of the default partition, which each RoCE port has at place 0."""


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
    """Describe a status in one line: name, number and usual meaning. Any number is accepted."""
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
    """Describe an event by name and number. Any number is accepted."""
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
    """The link layer of a port, which decides how a peer is addressed. Unspecified means InfiniBand, as in verbs.h."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2
