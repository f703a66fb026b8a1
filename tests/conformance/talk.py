"""Two sessions that talk to each other, and the model that they are held against.

The model is small. After every case each call is pending or has ended once, `unfinished` holds the pending ones, what
is open at the callee is what was not answered, a lease table holds what the other end still has, and each credit is
somewhere.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from tests.conformance.ends import turns
from zcactor.errors import ConnectionLost, ObjectLost
from zcactor.marshal.arrays import dtype_code, dtype_from_code, known_codes, known_dtypes
from zcactor.marshal.marshaller import Marshaller
from zcactor.marshal.sharing import share
from zcactor.native import hot
from zcactor.objectstore.checking import Checker
from zcactor.objectstore.copies import CopyCounter
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.objectstore.store import Store
from zcactor.rpc.call import Call, CallState
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import PROTOCOL_VERSION, Hello, Status
from zcactor.rpc.parts import Part
from zcactor.rpc.session import Session
from zcactor.rpc.stream import Stream

__all__ = ["DEPTH", "Promise", "RecordingHub", "Talk", "TalkHub"]

DEPTH = 16
"""Frames that either end may have outstanding."""
ACTOR = 2
"""Index of the actor that is called."""
WATCHDOG = 20
"""Seconds after which what a case waits for is not going to come."""
STORE_NBYTES = 64 << 20
ARRAY_NBYTES = 32 << 10
"""More than the eager limit: it goes by reference."""


class Promise(Call):
    """A call that counts how often it was ended."""

    def __init__(self, owner: bytes, loop: asyncio.AbstractEventLoop | None = None, thread: int = 0) -> None:
        super().__init__(owner, loop, thread)
        self.ends = 0

    def complete(self, status: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """See `Call.complete`; counts the ends."""
        self.ends += 1
        super().complete(status, payload, parts, flags)

    def complete_plain(self, value: Any) -> None:
        """See `Call.complete_plain`; counts the ends."""
        self.ends += 1
        super().complete_plain(value)

    def fail(self, error: BaseException) -> None:
        self.ends += 1
        super().fail(error)

    def result(self) -> Any:
        """The plain value of an answer."""
        assert self.done and self.error is None, self.error
        return self.value if self.decoded else msgspec.msgpack.decode(self.payload)


class Lent:
    """The stand-in for an object of the peer's: the lease on it, which goes back when nothing refers to it."""

    def __init__(self, session: Session, leased: int) -> None:
        self.session = session
        self.id = leased

    def __del__(self) -> None:
        self.session.release(self.id)


class Ref:
    """The stand-in for a reference to a result."""


class Held:
    """Something that can be leased; of a third process it is passed under a pin."""

    def __init__(self, object_id: int, owner: bytes | None = None) -> None:
        self.object_id = object_id
        self.owner = owner
        self.lost = False

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        if self.lost:
            raise ObjectLost("its owner is gone")
        if self.owner is not None:
            return self.owner, self.object_id, session.pin(self)
        session.leases.grant(self.object_id, self)
        return session.process, self.object_id, 0


def parts_of(*holders: Held) -> list[Part]:
    """References to them. They name no bytes, which a network card would want to register."""
    return [Part(RegionKind.REF, holder, 0, 0) for holder in holders]


class RecordingHub:
    """The part of a process that its sessions use: records, and answers only where `answer` is set."""

    def __init__(self, process: bytes) -> None:
        self.process = process
        self.counters = hot.Counters()
        self.hosts: dict[int, Any] = {}
        self.received: list[Incoming] = []
        self.cancelled: list[Incoming] = []
        self.again: list[Call] = []
        self.forwards: list[tuple[int, int, int, bytes]] = []
        self.coming: list[tuple[int, int]] = []
        self.takers: dict[int, Any] = {}
        self.checker: Checker | None = None
        self.ref_type: type = Ref
        self.pushed: list[tuple[int, int, int, Any, Sequence[Part]]] = []
        self.answer: Callable[[Incoming], None] | None = None

    def hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, self.process, os.getpid(), "host", "3.11.0", "worker")

    def greeted(self, session: Session) -> None:
        """Note nothing: a session of the suite has no twin."""

    def call_received(self, incoming: Incoming) -> None:
        self.received.append(incoming)
        if self.answer is not None:
            self.answer(incoming)

    def cancel_received(self, incoming: Incoming) -> None:
        self.cancelled.append(incoming)

    def sent_again(self, call: Call) -> None:
        self.again.append(call)

    def forward_received(self, incoming: Incoming, number: int, key: int, target: bytes) -> None:
        self.forwards.append((incoming.id, number, key, target))

    def push_coming(self, word: int, key: int) -> None:
        self.coming.append((word, key))

    def push_received(self, word: int, key: int, status: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        value = msgspec.msgpack.decode(payload) if payload else None
        if word in self.takers:
            self.takers[word](key, value, parts, flags)
        else:
            self.pushed.append((word, key, status, value, parts))

    def push_received_plain(self, word: int, key: int, value: Any) -> None:
        self.pushed.append((word, key, Status.OK, value, ()))

    def argument_received(self, session: Session, object_id: int, key: int, label: str) -> Any:
        raise AssertionError(f"{label} is no argument here")

    def read_result(self, call: Call) -> None:
        raise AssertionError("nothing here is unread")

    def park(self, reader: Any, session: Session, blocks: Any) -> None:
        raise AssertionError(f"{reader} maps nothing for real: {blocks}")


class TalkHub(RecordingHub):
    """The process at one end: records, and does as a process does where a session asks."""

    def __init__(self, process: bytes, store: Store | None) -> None:
        super().__init__(process)
        self.store: Any = store
        self.marshaller = None if store is None else Marshaller(store, CopyCounter(), hot.Counters(), 16384)
        self.dtype_codes = known_codes
        self.dtypes = known_dtypes
        self.lost: list[Exception | None] = []
        self.late: list[tuple[asyncio.Future[Part], Session, Region]] = []
        self.living: weakref.WeakSet[Any] = weakref.WeakSet()
        """Leases here on what is the peer's."""
        self.sharing: Callable[[], None] = lambda: None
        self.ended = threading.Event()

    def share(self, array: Any, address: int, nbytes: int) -> Any:
        self.sharing()
        block: Any = None if self.store is None else share(self.store, array)
        if block is not None and not block.exported:
            self.store.export(block)
        return block

    share_copied = share

    def import_region(self, session: Session, region: Region, unread: bool, sealed: bool) -> tuple[Part, Any]:
        if region.owner == session.peer_process:
            return self.part(session, region, region.id), None
        future: asyncio.Future[Part] = session.loop.create_future()
        self.late.append((future, session, region))
        return Part(0, None, 0, 0), future

    def part(self, session: Session, region: Region, leased: int) -> Part:
        """The part that stands for a region which was leased to this end."""
        lent = Lent(session, leased)
        self.living.add(lent)
        return Part(region.kind, lent, region.offset, region.nbytes)

    def arrive(self) -> None:
        """Lease the objects of third processes now; the pin goes with the part."""
        late, self.late = self.late, []
        for future, session, region in late:
            future.set_result(self.part(session, region, region.pin))

    def outlived(self, session: Session) -> None:
        """The peer would be told; see `zcactor.objects.adoption`."""

    def session_lost(self, session: Session, cause: Exception | None, calls: list[Call]) -> None:
        self.lost.append(cause)
        for call in calls:
            call.fail(ConnectionLost(str(cause), call.state is not CallState.QUEUED))
        self.ended.set()


class Watched(Session):
    """A session that notes the leases that the native part has made."""

    def _make_lease(self, object_id: int, offset: int, nbytes: int) -> Lease:
        lease = super()._make_lease(object_id, offset, nbytes)
        hub: Any = self.hub
        hub.living.add(lease)
        return lease


def plain(incoming: Incoming) -> Any:
    """The plain arguments of a call."""
    payload = incoming.payload
    return payload if type(payload) is list else list(msgspec.msgpack.decode(payload))


class Talk:
    """Two sessions over two connected ends: `a` calls, `b` answers. Where a path has a native part, it is used as
    handles and hosts use it."""

    def __init__(self, connections: tuple[Any, Any], stores: tuple[Store | None, Store | None]) -> None:
        near, far = connections
        loop = asyncio.get_running_loop()
        self.hubs = TalkHub(far.peer.process, stores[0]), TalkHub(near.peer.process, stores[1])
        self.a, self.b = Watched(self.hubs[0], near, loop), Watched(self.hubs[1], far, loop)
        self.calls: list[Promise] = []
        self.unfinished: set[Call] = set()
        """As a handle counts them."""
        self.a.start()
        self.b.start()

    def array(self, value: float, end: int = 0) -> Any:
        """An array that goes by reference, born in the store of an end."""
        array = self.hubs[end].store.empty(ARRAY_NBYTES // 8, np.dtype("f8"))
        array[:] = value
        dtype_from_code(dtype_code(array.dtype))
        return array

    def call(self, *values: Any, parts: Sequence[Part] = (), stream: bool = False) -> Promise:
        """Call with plain values and arrays, or with parts."""
        session = self.a
        call = Promise(session.process, session.loop, session.thread)
        call.refs = 1
        call.on_done = self.unfinished.discard
        if stream:
            call.stream = Stream(call, lambda payload, parts, flags: msgspec.msgpack.decode(payload), session.cancel)
        self.unfinished.add(call)
        try:
            if parts or stream or not session.wire.call(call, ACTOR, 0, values):
                payload, found, flags = self.pack(0, values, parts)
                session.send_call(call, ACTOR, 0, flags, 0, payload, found)
        except BaseException:
            self.unfinished.discard(call)
            raise
        self.calls.append(call)
        return call

    def pack(self, end: int, values: tuple[Any, ...], parts: Sequence[Part]) -> tuple[Any, Sequence[Part], int]:
        """Pack values at one end: payload, parts and flags of a frame."""
        marshaller = self.hubs[end].marshaller
        if parts or marshaller is None:
            return msgspec.msgpack.encode(list(values)), parts, 0
        return marshaller.pack_call(values, {})

    def answer(
        self, incoming: Incoming, value: Any = None, *, parts: Sequence[Part] = (), status: int = Status.OK,
        pushed: int = 0,
    ) -> None:  # fmt: skip
        """Answer a call with a plain value or an array, or with parts."""
        wire = self.b.wire
        if status == Status.OK and not parts and wire.respond(incoming.id, value, False, pushed):
            return
        if isinstance(value, np.ndarray) and self.hubs[1].marshaller is not None:
            payload, parts, flags = self.hubs[1].marshaller.pack(value)
        else:
            payload, flags = msgspec.msgpack.encode(value), 0
        self.b.respond(incoming, status, payload, parts, flags, pushed=pushed)

    def push(self, key: int, word: int, value: Any) -> None:
        """Push a plain value to `b`."""
        wire = self.a.wire
        if not wire.push(key, word, value):
            self.a.push(key, word, Status.OK, msgspec.msgpack.encode(value), (), 0)

    def publish(self, key: int, word: int, *values: Any) -> None:
        """Send plain values to the taker of `word` at `b`."""
        wire = self.a.wire
        if not wire.publish(key, word, values, True):
            self.a.publish(key, word, msgspec.msgpack.encode(values))

    def drop(self, *those: Incoming | Call) -> None:
        """Forget what came with calls or answers: leases go back."""
        for each in those:
            each.payload = None
            each.parts = ()
            if isinstance(each, Call):
                each.value = None

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop go round until the condition holds."""
        async with asyncio.timeout(WATCHDOG):
            while not condition():
                await asyncio.sleep(0)

    async def received(self, count: int) -> list[Incoming]:
        """The calls at the callee, once there are so many."""
        await self.until(lambda: len(self.hubs[1].received) >= count)
        return self.hubs[1].received

    # ---- the model

    def wrong(self) -> list[str]:
        """The differences from the model, once nothing is under way."""
        found = []
        pending = self.a.pending
        for number, call in enumerate(self.calls):
            if (pending.get(call.id) is call) + call.ends != 1:
                found.append(f"call {number} is pending {pending.get(call.id) is call} and has ended {call.ends} times")
        if self.unfinished != {call for call in self.calls if not call.done}:
            found.append("unfinished are not the calls that have not ended")
        for name, session, other in (("a", self.a, self.b), ("b", self.b, self.a)):
            if session.closed is not None:
                tables = session.pending, session.incoming, session.leases, session._backlog
                found += [f"{name} is closed and has {table}" for table in tables if len(table)]
            elif other.closed is None:
                found += self._wrong_between(name, session, other)
        return found

    def _wrong_between(self, name: str, session: Session, other: Session) -> Iterator[str]:
        living = Counter(lease.id for lease in session_hub(other).living)
        held = Counter(session.leases._counts)
        if held != living or session.leases.total != living.total():
            yield f"{name} has leased {held}, and {living} live"
        if set(session.pending) != set(other.incoming):
            yield f"{name} waits for {set(session.pending)}, and {set(other.incoming)} are open"
        if session._backlog or session.credits.available + other.credits.owed != session.credits.window:
            yield (
                f"{name} may send {session.credits.available} frames and the peer owes {other.credits.owed} of "
                f"{session.credits.window}; {len(session._backlog)} wait"
            )

    def tables(self) -> dict[str, Any]:
        """The tables of both ends, without numbers that each path gives as it likes."""
        a, b = self.a, self.b
        open_ = set(a.pending.values())
        return {
            "pending": [call in open_ for call in self.calls],
            "ended": [call.ends for call in self.calls],
            "states": [call.state for call in self.calls],
            "outcomes": [(call.status, type(call.error)) for call in self.calls],
            "unfinished": [call in self.unfinished for call in self.calls],
            "received": len(self.hubs[1].received),
            "open": [incoming.id in b.incoming for incoming in self.hubs[1].received],
            "cancelled": [incoming.cancelled for incoming in self.hubs[1].received],
            "leases": [(len(session.leases), session.leases.total) for session in (a, b)],
            "credits": [(a.credits.available + b.credits.owed, b.credits.available + a.credits.owed)],
            "closed": [session.closed is None for session in (a, b)],
        }

    async def check(self) -> None:
        """Everything is as the model says, as soon as nothing is under way."""
        await turns(10)
        try:
            await self.until(lambda: not self.wrong())
        except TimeoutError:
            raise AssertionError(self.wrong()) from None

    async def close(self) -> None:
        self.a.connection.abort()
        self.b.connection.abort()
        await self.until(lambda: self.hubs[0].lost and self.hubs[1].lost)
        assert [len(hub.lost) for hub in self.hubs] == [1, 1]
        assert not self.wrong()
        # An array leads to its lease and so to the session, and NumPy shows no cycle to the garbage collector.
        self.drop(*self.calls, *self.hubs[0].received, *self.hubs[1].received)


def session_hub(session: Session) -> TalkHub:
    """The hub of one of the two sessions."""
    hub: Any = session.hub
    return hub  # type: ignore[no-any-return]


# ---------------------------------------------------------------- a peer that writes frames by hand
