"""One end of a connection for the native part alone: a `Wire` on a socket, and the objects that it calls."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.marshal.arrays import known_codes, known_dtypes
from zcactor.native import hot
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.store import Block
from zcactor.objectstore.table import LeaseTable
from zcactor.rpc.call import CallState
from zcactor.rpc.codec import TEMPLATE, decode, frame_at
from zcactor.rpc.leasing import LockedLeases
from zcactor.rpc.parts import Announced
from zcactor.rpc.session import Callbacks

__all__ = ["MAX_FRAME", "PEER", "US", "End", "Waiting"]

MAX_FRAME = 32768
US, PEER = b"u" * 16, b"p" * 16


@functools.cache
def arena_of(nbytes: int) -> np.ndarray[Any, Any]:
    """The arena of each end of that size. Nothing writes to it: tests make thousands of ends, and one of a MiB costs
    as much as all else of them."""
    memory = np.arange(nbytes, dtype=np.uint8)
    memory.setflags(write=False)
    return memory


class Ref:
    """A stand-in for a reference to a result."""


class Waiting:
    """A stand-in for a call that waits."""

    def __init__(self) -> None:
        self.value: Any = None
        self.count = 0
        self.id = 0
        self.session: Any = None
        self.state: Any = CallState.QUEUED
        self.forwarded = 0
        self.pushed = 0

    def complete_plain(self, value: Any) -> None:
        self.value = value
        self.count += 1


class End:
    """A `Wire` whose sent bytes are read back from a socket."""

    def __init__(
        self, process: bytes = US, peer: bytes = PEER, arena: int = 1 << 20, depth: int = 1024, *, out: Any = None,
        store: Any = None, share: Any = None,
    ) -> None:  # fmt: skip
        hot.setup(TEMPLATE, ProtocolError, ConnectionLost, CallState.QUEUED, CallState.SENT)
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.setblocking(False)
        self.out: Any = hot.SendBuffer(MAX_FRAME + 4, self.ours.fileno()) if out is None else out
        self.credits = hot.Credits(depth)
        self.leases = LeaseTable()
        self.pending: dict[int, Any] = {}
        self.counters = hot.Counters()
        self.open: dict[int, Any] = {}
        self.backlog: list[Any] = []
        self.hosts: dict[int, Any] = {}
        self.events: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.pushes: list[tuple[int, int, Any]] = []
        self.forwards: list[tuple[int, int, int, bytes]] = []
        self.ahead: dict[int, list[Any]] = {}
        self.others: list[tuple[Any, ...]] = []
        self.takers: dict[int, Any] = {}
        self.leased: list[tuple[int, int, int]] = []
        self.released: list[int] = []
        self.memory = arena_of(arena)
        self.granting = LockedLeases(self.leases, threading.RLock())
        self.on_argument: Callable[..., Any] = lambda *a: a
        self.on_forward: Callable[..., None] = lambda *a: self.forwards.append(a)
        self.closed: Exception | None = None
        self.on_call_soon: Callable[[Callable[[], None]], None] = lambda flush: self.events.append("schedule")
        self.on_error: Callable[[BaseException], None] = lambda error: None
        self.on_share: Callable[[], None] = lambda: None
        self.on_grant: Callable[[], None] = lambda: None
        self.on_lease: Callable[[], None] = lambda: None
        callbacks = Callbacks(
            call=lambda *a: self.calls.append(a),
            frame=self.other,
            batch=lambda: self.events.append("batch"),
            stopped=self.stopped,
            push=lambda *a: self.pushes.append(a),
            argument=lambda *a: self.on_argument(*a),
            forward=lambda *a: self.on_forward(*a),
            lease=self.lease,
            share=share or self.share,
            schedule_flush=lambda: self.events.append("schedule from a thread"),
        )
        given = {
            "leases": self, "pending": self.pending, "open": self.open, "backlog": self.backlog, "hosts": self.hosts,
            "session": self, "loop": self, "takers": self.takers, "ahead": self.ahead, "announced_type": Announced,
            "ref_type": Ref, "block_type": Block, "store": store, "codes": known_codes, "dtypes": known_dtypes,
        }  # fmt: skip
        self.wire: Any = hot.Wire(
            self.out, self.credits, self.counters, process, peer, 16384, MAX_FRAME, arena, callbacks, given
        )

    def call_soon(self, flush: Callable[[], None]) -> None:
        self.on_call_soon(flush)

    def stopped(self, error: BaseException | None) -> None:
        self.events.append("blocked" if error is None else type(error).__name__)
        if error is not None:
            self.on_error(error)

    def share(self, array: Any, address: int, nbytes: int) -> None:
        self.events.append("share")
        self.on_share()

    def grant(self, object_id: int, keep: object) -> None:
        self.granting.grant(object_id, keep)
        self.on_grant()

    def withdraw(self, object_id: int) -> None:
        self.granting.withdraw(object_id)

    def release(self, object_id: int, count: int) -> None:
        self.granting.release(object_id, count)

    def call(self, actor: int, code: int, *args: Any) -> bool:
        """Write a call and keep it in the buffer: another call is open, so this one is not flushed."""
        self.pending.setdefault(0, Waiting())
        sent: bool = self.wire.call(Waiting(), actor, code, args)
        return sent

    def result(self, call_id: int, value: Any) -> bool:
        self.open[call_id] = Waiting()
        self.open.setdefault(0, Waiting())
        done: bool = self.wire.respond(call_id, value, False)
        return done

    def lease(self, object_id: int, offset: int, nbytes: int) -> Lease:
        self.on_lease()
        self.leased.append((object_id, offset, nbytes))
        address = self.memory.__array_interface__["data"][0] + offset
        return Lease(PEER, object_id, offset, nbytes, address, self.memory, self.released.append)

    def other(self, data: memoryview, at: int, total: int) -> int:
        start, end = frame_at(data, at, total, MAX_FRAME)
        self.others.append(decode(data, start, end))
        return end

    def sent(self) -> bytes:
        self.out.flush()
        return self.theirs.recv(1 << 20)

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
