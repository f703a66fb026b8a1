"""Bare queue pairs: the least that RDMA costs through the binding that zcactor uses, without zcactor above it.

Loops over `zcactor.transport.verbs.driver.base`: READs in lists, with as many under way as in
`zcactor.transport.verbs.peer.pulling`, and small messages to and fro, each waiting for completions by the descriptor of
the completion channel on the event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import secrets
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from zcactor.transport.verbs.device.sizing import MAX_READS
from zcactor.transport.verbs.device.viability import NotViable, viability
from zcactor.transport.verbs.driver.base import MAX_U24, PathAttributes, QpAddress, Read, Receive, Send
from zcactor.transport.verbs.driver.bindings import Absent, bindings
from zcactor.transport.verbs.driver.codes import CompletionStatus, describe_status
from zcactor.transport.verbs.peer.pulling import LIST_READS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from zcactor.transport.verbs.device.viability import Viable
    from zcactor.transport.verbs.driver.base import Binding, Completion, Device

__all__ = ["Wire", "address_from", "lists_of", "plain", "usable", "viable"]


class Wire:
    """A bare queue pair and its resources, on the running loop. Closed by `stack`.

    Args:
        device: makes all resources.
        found: the port and GID.
        nbytes: of a message.
        stack: closes the resources.
    """

    RING: Final = 16

    def __init__(self, device: Device, found: Viable, nbytes: int, stack: ExitStack) -> None:
        self._found = found
        self._loop = asyncio.get_running_loop()
        self._memory = mmap.mmap(-1, (self.RING + 1) * nbytes)
        anchor = ctypes.c_char.from_buffer(self._memory)
        self._region = device.register(ctypes.addressof(anchor), len(self._memory), remote_read=False)
        stack.callback(self._region.close)
        self._cq = cq = device.create_completion_queue(256)
        stack.callback(cq.close)
        self._srq = device.create_shared_receive_queue(self.RING)
        stack.callback(self._srq.close)
        self._qp = device.create_queue_pair(cq, self._srq, max_send_wr=MAX_READS, max_inline=nbytes)
        stack.callback(self._qp.close)
        address, lkey = self._region.address, self._region.lkey
        self._receives = [[Receive(i, address + i * nbytes, nbytes, lkey)] for i in range(self.RING)]
        for receive in self._receives:
            self._srq.post_receives(receive)
        # signalled now and then, so that the queue's room comes back
        self._sends = [[Send(1 << 32, address + self.RING * nbytes, nbytes, lkey, i == 0, True)] for i in range(16)]
        self._sent = 0
        self._psn = secrets.randbelow(MAX_U24 + 1)
        self._left: list[list[Read]] = []
        self._under_way = 0
        self._waiter: asyncio.Future[None] | None = None
        self._echoes = False
        cq.arm()
        self._loop.add_reader(cq.fd, self._on_event)
        stack.callback(self._loop.remove_reader, cq.fd)

    @property
    def address(self) -> QpAddress:
        """The address of the queue pair, for the other end."""
        found = self._found
        gid = bytes(16) if found.gid is None else found.gid.raw
        return QpAddress(self._qp.qp_num, self._psn, gid, found.port.lid, found.port.active_mtu)

    def connect(self, remote: QpAddress, *, echoes: bool) -> None:
        """Connect to the other end; with `echoes` every message goes back."""
        found = self._found
        reads = max(1, min(16, found.attributes.max_qp_rd_atom, found.attributes.max_qp_init_rd_atom))
        self._echoes = echoes
        self._qp.connect(
            remote,
            PathAttributes(
                found.port.port,
                0 if found.gid is None else found.gid.index,
                self._psn,
                found.port.active_mtu,
                is_global=found.is_global,
                max_rd_atomic=reads,
                max_dest_rd_atomic=reads,
            ),
        )

    def ping(self) -> asyncio.Future[None]:
        """Send a message. The future is done when a message has come back."""
        self._waiter = waiter = self._loop.create_future()
        self._send()
        return waiter

    def _send(self) -> None:
        self._qp.post_sends(self._sends[self._sent & 15])
        self._sent += 1

    def read(self, lists: Sequence[list[Read]]) -> asyncio.Future[None]:
        """Post lists of READs, with as many under way as in `Puller`. The future is done when all have ended."""
        self._waiter = waiter = self._loop.create_future()
        self._left = list(reversed(lists))
        self._pump()
        return waiter

    def _pump(self) -> None:
        while self._left and self._under_way + LIST_READS + 1 <= MAX_READS:
            reads = self._left.pop()
            self._under_way += len(reads)
            self._qp.post_reads(reads)

    def _on_event(self) -> None:
        cq = self._cq
        cq.drain_events()
        cq.arm()
        while found := cq.poll(16):
            for completion in found:
                self._completed(completion)

    def _completed(self, completion: Completion) -> None:
        number, status = completion.wr_id, completion.status
        waiter = self._waiter
        if status != CompletionStatus.SUCCESS:
            if waiter is not None and not waiter.done():
                waiter.set_exception(OSError(f"a bare request failed: {describe_status(status)}"))
        elif number < self.RING:
            self._srq.post_receives(self._receives[number])
            if self._echoes:
                self._send()
            elif waiter is not None:
                waiter.set_result(None)
        elif number != 1 << 32:
            self._under_way -= number - (1 << 33)
            if self._left:
                self._pump()
            elif not self._under_way and waiter is not None:
                waiter.set_result(None)


def lists_of(target: int, lkey: int, source: int, rkey: int, nbytes: int, piece: int) -> list[list[Read]]:
    """The READs of `nbytes`, in lists of which the last one asks for a completion; its number has the list's length."""
    reads = [
        Read(0, target + at, min(piece, nbytes - at), lkey, source + at, rkey, signalled=False)
        for at in range(0, nbytes, piece)
    ]
    lists = [reads[first : first + LIST_READS] for first in range(0, len(reads), LIST_READS)]
    for one in lists:
        one[-1] = one[-1]._replace(signalled=True, wr_id=(1 << 33) + len(one))
    return lists


def plain(address: QpAddress) -> dict[str, Any]:
    """The address in the types of JSON."""
    return {**asdict(address), "gid": address.gid.hex()}


def address_from(fields: dict[str, Any]) -> QpAddress:
    """The inverse of `plain`."""
    return QpAddress(**{**fields, "gid": bytes.fromhex(fields["gid"])})


def viable(name: str | None) -> tuple[Binding, Viable] | None:
    """The binding of that name, or the first that finds a device, and a port that works. None without such a port; the
    reason goes to standard error."""
    found = bindings(name)
    port = found if isinstance(found, Absent) else viability(found, arena_nbytes=0)
    if isinstance(found, Absent) or isinstance(port, Absent | NotViable):
        print(port, file=sys.stderr)
        return None
    return found, port


def usable(name: str) -> Binding:
    """The binding of that name.

    Raises:
        OSError: it finds no device.
    """
    found = bindings(name)
    if isinstance(found, Absent):
        raise OSError(str(found))
    return found
