"""Checks and texts of all bindings: a caller's values are checked before the device gets them."""

from __future__ import annotations

import errno
import os
import secrets
from typing import TYPE_CHECKING, Final

from zcactor.transport.verbs.driver.base import MAX_U24, MAX_U32, MAX_U64, VerbsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.transport.verbs.driver.base import PathAttributes, QpAddress, Read, Receive, Send

__all__ = [
    "check_depth",
    "check_dma_buf",
    "check_not_closed",
    "check_path",
    "check_reads",
    "check_receives",
    "check_region",
    "check_sends",
    "dma_buf_error",
    "new_psn",
    "registration_error",
]


def check_not_closed(closed: bool, what: str) -> None:
    """Check that an object is open.

    Raises:
        VerbsError: `what` is closed.
    """
    if closed:
        raise VerbsError(f"the {what} is closed")


def check_depth(value: int, limit: int, what: str, source: str) -> None:
    """Check the depth of a queue.

    Raises:
        VerbsError: `value` is not between 1 and `limit`.
    """
    if not 1 <= value <= limit:
        raise VerbsError(f"{what} is {value}; the device takes 1 to {limit} ({source})")


def check_region(address: int, nbytes: int) -> None:
    """Check a range of memory that is to be registered.

    Raises:
        VerbsError: the range is empty or leaves the address space. Address 0 would make pyverbs allocate memory.
    """
    if address <= 0 or nbytes <= 0 or address + nbytes > MAX_U64:
        raise VerbsError(
            f"cannot register {nbytes} bytes at {address:#x}: both must be positive and the end below 2**64"
        )


def check_dma_buf(nbytes: int) -> None:
    """Check the size of a dma-buf that is to be registered.

    Raises:
        VerbsError: it is not positive, or leaves the address space.
    """
    if not 0 < nbytes <= MAX_U64:
        raise VerbsError(f"cannot register {nbytes} bytes of a dma-buf: the number must be positive and below 2**64")


def dma_buf_error(number: int, nbytes: int, device: str) -> OSError:
    """Make the error for a failure of ibv_reg_dmabuf_mr(3) with errno `number`, with the usual cause."""
    hint = {
        errno.EOPNOTSUPP: "; the adapter's driver registers no memory of GPUs by dma-buf",
        errno.ENOMEM: "; raise RLIMIT_MEMLOCK ('ulimit -l unlimited')",
    }.get(number, "; dma-buf needs Linux 5.12, NVIDIA's open kernel modules, and an adapter that reaches the GPU")
    return OSError(number, f"{device} cannot register a dma-buf of {nbytes:,} bytes: {os.strerror(number)}{hint}")


def _check_buffer(kind: str, wr_id: int, address: int, nbytes: int, lkey: int, limit: int) -> None:
    if not 0 <= nbytes <= limit:
        bound = "the work request's 32 bits" if limit == MAX_U32 else "the port's max_msg_sz: split it"
        raise VerbsError(f"{kind} {wr_id:#x} has {nbytes} bytes; the limit is {limit} ({bound})")
    if not 0 <= wr_id <= MAX_U64:
        raise VerbsError(f"{kind}: wr_id is {wr_id}, which does not fit 64 bits")
    if not 0 <= address <= MAX_U64 - nbytes:
        raise VerbsError(f"{kind} {wr_id:#x}: address {address:#x} with {nbytes} bytes does not fit 64 bits")
    if not 0 <= lkey <= MAX_U32:
        raise VerbsError(f"{kind} {wr_id:#x}: lkey {lkey:#x} does not fit 32 bits")


def check_receives(receives: Iterable[Receive]) -> None:
    """Check receives before they are posted.

    Raises:
        VerbsError: a number does not fit its field.
    """
    for wr_id, address, nbytes, lkey in receives:
        _check_buffer("receive", wr_id, address, nbytes, lkey, MAX_U32)


def check_sends(sends: Iterable[Send], max_inline: int, max_message: int) -> None:
    """Check messages before they are posted.

    Args:
        sends: the messages.
        max_inline: the most bytes that the queue pair carries inline.
        max_message: the most bytes that the port carries in one message.

    Raises:
        VerbsError: a number does not fit its field, or a message is too long.
    """
    limit = min(max_message, MAX_U32)
    for wr_id, address, nbytes, lkey, _, inline in sends:
        _check_buffer("send", wr_id, address, nbytes, lkey, limit)
        if inline and nbytes > max_inline:
            raise VerbsError(f"send {wr_id:#x} has {nbytes} bytes inline; the queue pair carries {max_inline}")


def check_reads(reads: Iterable[Read], max_message: int) -> None:
    """Check READs before they are posted.

    Args:
        reads: the READs.
        max_message: the most bytes that the port carries in one message.

    Raises:
        VerbsError: a number does not fit its field, or a READ is too long.
    """
    limit = min(max_message, MAX_U32)
    for wr_id, address, nbytes, lkey, remote_address, rkey, _, _ in reads:
        _check_buffer("read", wr_id, address, nbytes, lkey, limit)
        if not 0 <= remote_address <= MAX_U64 - nbytes:
            raise VerbsError(
                f"read {wr_id:#x}: remote address {remote_address:#x} with {nbytes} bytes does not fit 64 bits"
            )
        if not 0 <= rkey <= MAX_U32:
            raise VerbsError(f"read {wr_id:#x}: rkey {rkey:#x} does not fit 32 bits")


_PATH_LIMITS: Final = {
    "port": (1, 255),
    "gid_index": (0, 255),
    "psn": (0, MAX_U24),
    "mtu": (1, 5),
    "max_rd_atomic": (0, 255),
    "max_dest_rd_atomic": (0, 255),
    "timeout": (1, 31),
    "retry_count": (0, 6),
    "rnr_retry": (0, 6),
    "min_rnr_timer": (0, 31),
    "hop_limit": (1, 255),
}
"""Smallest and largest value of each field. A timeout of 0 waits for ever; the 7 of the retry counts is explained at
`PathAttributes`."""
_MARKING_LIMITS: Final = {"traffic_class": (0, 255), "service_level": (0, 15), "pkey_index": (0, 0xFFFF)}
_ADDRESS_LIMITS: Final = {"qpn": (1, MAX_U24), "psn": (0, MAX_U24), "lid": (0, 0xFFFF), "mtu": (1, 5)}


def check_path(remote: QpAddress, path: PathAttributes) -> None:
    """Check the attributes of a connection.

    Raises:
        VerbsError: a number does not fit its field or would wait for ever, or the GID is not 16 bytes.
    """
    checked = ((remote, _ADDRESS_LIMITS), (path, _PATH_LIMITS), (path.marking, _MARKING_LIMITS))
    for source, limits in checked:
        for name, (low, high) in limits.items():
            value: int = getattr(source, name)
            if not low <= value <= high:
                raise VerbsError(f"{type(source).__name__}.{name} is {value}; {low} to {high} can be used")
    if len(remote.gid) != 16:
        raise VerbsError(f"QpAddress.gid has {len(remote.gid)} bytes; a GID has 16")


def new_psn() -> int:
    """Draw a random first packet sequence number."""
    return secrets.randbelow(MAX_U24 + 1)  # the only number that a forger of packets has to guess


def registration_error(number: int, address: int, nbytes: int, device: str) -> OSError:
    """Make the error for a failure of ibv_reg_mr(3) with errno `number`, with the usual cause and the remedy."""
    hint = {
        errno.ENOMEM: "; raise RLIMIT_MEMLOCK ('ulimit -l unlimited', memlock in limits.conf, --ulimit in Docker)",
        errno.EFAULT: "; the memory must be mapped with write access, also when peers only read it",
    }.get(number, "")
    return OSError(number, f"{device} cannot register {nbytes:,} bytes at {address:#x}: {os.strerror(number)}{hint}")
