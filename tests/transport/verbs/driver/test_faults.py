"""One fault at one step of a conversation of eight peers: it stays with the peer it belongs to, and leaves nothing.

Each pair of peers sends calls, which are answered within the batch, and both read arrays of the other. Then one call of
the device fails, or a request, or a list is posted in part, or a callback raises, or the device reports an event that
may concern all users of the port. After any of these every call and every pull ends once, other peers go on, all
receives are posted, and in the end everything is as before. Cards and faults are drawn, and a failure names its seed:
``--rounds N`` makes N times as many.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import uvloop

from tests.conformance.connection import ARENA_NBYTES, PullKeeper, Side, region, send, turns
from tests.transport.verbs.sides import drawn_network, endpoint_of, fake_sides
from zcactor.errors import ConnectionLost, ObjectLost
from zcactor.transport import Connection
from zcactor.transport.verbs.device.engine import Engine
from zcactor.transport.verbs.driver.codes import CompletionStatus, EventType, QpState
from zcactor.transport.verbs.driver.fake import FakeDevice, FakeFabric
from zcactor.transport.verbs.driver.fake_nic import FakeNic
from zcactor.transport.verbs.driver.fake_queues import FakeQueuePair, FakeSharedReceiveQueue
from zcactor.transport.verbs.driver.faults import FAILING
from zcactor.transport.verbs.peer.bulk import BulkPair
from zcactor.transport.verbs.peer.connection import VerbsConnection
from zcactor.transport.verbs.peer.inbox import Inbox
from zcactor.transport.verbs.peer.pulling import Puller

PEERS = 8
CALLS = 6
DRAWS = 100
"""Conversations on each loop; the two loops draw different ones."""
EAGER_LIMIT = 16384
"""The eager limit, which the engines then do not have to measure."""
WATCHDOG = 20.0
"""Seconds for one conversation, which takes a twentieth of a second."""
DEADLY = ("post_receives", "poll", "arm", "drain_events", "async_events")
"""Calls whose failure means the end of the device."""
DEADLY_EVENTS = (EventType.DEVICE_FATAL, EventType.CQ_ERR, EventType.SRQ_ERR)
"""Events that mean the end of the device."""
EVENTS = ("port down", "address changed", "queue pair failed", "nothing", *DEADLY_EVENTS)
CALLBACKS: tuple[tuple[type, str], ...] = (
    (Inbox, "received"), (VerbsConnection, "completed"), (Inbox, "turn_ended"),
    (BulkPair, "take"), (Puller, "_list_ended"),
)  # fmt: skip
ERRORS = (OSError(errno.EBUSY, "busy"), OSError(errno.ENOMEM, "no memory"), RuntimeError("a defect"))


@dataclass(frozen=True)
class Fault:
    """A fault to inject, after a number of good steps of its kind."""

    kind: str
    what: Any
    error: Exception
    after: int
    share: float

    def __repr__(self) -> str:
        return f"<{self.kind} {self.what}, {self.error!r}, after {self.after}, {self.share:g} posted>"


NO_FAULT = Fault("none", None, ERRORS[0], 0, 0.0)


def fault_of(draw: random.Random) -> Fault:
    """Draw a fault."""
    kind, error = draw.choice(("call", "status", "callback", "event")), draw.choice(ERRORS)
    if kind == "call":
        return Fault(kind, draw.choice(FAILING), error, draw.randint(0, 40), draw.choice((0.0, 0.5, 1.0)))
    if kind == "event":
        return Fault(kind, draw.choice(EVENTS), ERRORS[0], draw.randrange(2 * PEERS), draw.choice((0.0, 1.0)))
    if kind == "status":
        status = draw.choice(list(CompletionStatus)[1:])
        return Fault(kind, status, ERRORS[0], draw.randrange(2 * PEERS), draw.choice((0.0, 1.0)))
    return Fault(kind, draw.choice(CALLBACKS), error, draw.randint(0, 40), 0.0)


class Caller:
    """One end, which calls, answers within the batch, and records the end of each of its calls."""

    def __init__(self, connection: VerbsConnection) -> None:
        self.connection = connection
        self.open: set[int] = set()
        self.ended: list[int] = []
        self.lost = 0
        self.next = 0
        self.idle = asyncio.Event()
        connection.start(self)

    def call(self, count: int) -> None:
        """Make calls, each a message of its own as far as credits go."""
        for _ in range(count):
            self.next += 1
            try:
                send(self.connection, [b"?%d" % self.next])
            except ConnectionLost:
                self.ended.append(self.next)
            else:
                if not self.lost:
                    self.open.add(self.next)
        self._look()

    def frames_received(self, data: memoryview) -> None:
        """Answer calls, and end the calls of answers."""
        at = 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 4], "little")
            frame = bytes(data[at + 4 : at + 4 + length])
            at += 4 + length
            if frame[:1] == b"?":
                with contextlib.suppress(ConnectionLost):
                    send(self.connection, [b"!" + frame[1:]])
            else:
                self.open.remove(int(frame[1:]))
                self.ended.append(int(frame[1:]))
        self._look()

    def connection_lost(self, cause: Exception | None) -> None:
        """End all open calls."""
        del cause
        self.lost += 1
        self.ended += self.open
        self.open.clear()
        self._look()

    def _look(self) -> None:
        if self.open:
            self.idle.clear()
        else:
            self.idle.set()


def happens(fault: Fault, nic: FakeNic, connection: VerbsConnection) -> None:
    """Let an event happen at the adapter that one end of a connection uses."""
    match fault.what:
        case "port down":
            nic.set_active(False)
            nic.tell(EventType.PORT_ERR)
        case "address changed":
            nic.gids = (nic.gids[0], replace(nic.gids[1], raw=nic.gids[1].raw[:-1] + b"\x63"))
            nic.tell(EventType.GID_CHANGE)
        case "queue pair failed":
            failed = connection.pairs.bulk if fault.share else connection.pairs.control
            assert isinstance(failed, FakeQueuePair)
            failed.current = QpState.ERR
            nic.tell(EventType.QP_FATAL)
        case "nothing":
            for kind in (EventType.PORT_ERR, EventType.GID_CHANGE, EventType.QP_ACCESS_ERR, EventType.COMM_EST, 99):
                nic.tell(kind)
        case deadly:
            nic.tell(deadly)


def raising(cls: type, name: str, error: Exception, after: int) -> Callable[..., Any]:
    """A method that raises once, after `after` good calls."""
    original = getattr(cls, name)
    left = after

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            raise error
        return original(self, *arguments, **named)

    return method


async def pulled(end: VerbsConnection, target: Side, source: Side, at: int, keepers: list[weakref.ref[Any]]) -> str:
    """Pull bytes, and return the outcome as a word."""
    nbytes = ARENA_NBYTES // (2 * PEERS)
    keeper = PullKeeper()
    keepers.append(weakref.ref(keeper))
    try:
        await end.pull(region(at, nbytes), target.address + at, keeper)
    except (ConnectionLost, ObjectLost, OSError) as error:
        return type(error).__name__
    assert target.arena[at : at + nbytes] == source.arena[at : at + nbytes], "other bytes came"
    return "whole"


def whole(engine: Engine) -> None:
    """Check that all receives of the engine are posted."""
    assert isinstance(engine.srq, FakeSharedReceiveQueue)
    assert sorted(one.wr_id for one in engine.srq.receives) == list(range(len(engine._slots)))


def regions_of(engine: Engine) -> int:
    """The number of regions of an engine without connections: shared ones, receives, and extents."""
    areas = {id(area) for area, _ in engine._slots}
    return 3 + len(areas) + len(engine.extents._regions)


async def round_of(ends: list[Caller], sides: tuple[Side, Side], keepers: list[weakref.ref[Any]]) -> list[str]:
    """Make calls and pulls of all ends at once; return the outcomes of the pulls."""
    nbytes = ARENA_NBYTES // (2 * PEERS)
    tasks = []
    for number, caller in enumerate(ends):
        mine, other = sides if number < len(ends) // 2 else sides[::-1]
        tasks.append(asyncio.create_task(pulled(caller.connection, mine, other, number * nbytes, keepers)))
        caller.call(CALLS)
    found = await asyncio.gather(*tasks)
    await asyncio.gather(*(caller.idle.wait() for caller in ends))
    return found


def peers_of(numbers: Iterator[int]) -> set[int]:
    """The peers of these ends."""
    return {number % PEERS for number in numbers}


async def conversation(fault: Fault, fabric: FakeFabric, keepers: list[weakref.ref[Any]]) -> list[FakeDevice]:
    """Hold a conversation; return its devices, which are closed."""
    told: set[str] = set()  # texts, not exceptions, whose tracebacks would keep objects alive that have to go
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.add(str(context.get("exception"))))
    error = type(fault.error)(*fault.error.args)
    with fake_sides(fabric, verbs_eager_limit=EAGER_LIMIT) as sides, pytest.MonkeyPatch.context() as patch:
        for number, side in enumerate(sides):
            side.arena[:] = bytes([number + 1]) * ARENA_NBYTES
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        for side in sides:
            await side.endpoint.start(accepted.put_nowait)
        lefts, rights = [], []
        for _ in range(PEERS):
            lefts.append(await sides[0].endpoint.connect(sides[1].endpoint.address))
            rights.append(await accepted.get())
        callers = [Caller(end) for end in (*lefts, *rights) if isinstance(end, VerbsConnection)]
        assert len(callers) == 2 * PEERS
        engines = [callers[number].connection.pairs.engine for number in (0, PEERS)]

        if fault.kind == "call":
            fabric.fail(fault.what, error, after=fault.after, share=fault.share)
        elif fault.kind == "status":
            pairs = callers[fault.after].connection.pairs
            fabric.inject((pairs.bulk if fault.share else pairs.control).qp_num, fault.what)
        elif fault.kind == "event":
            happens(fault, device_of(engines[fault.after // PEERS]).nic, callers[fault.after].connection)
        elif fault.kind == "callback":
            cls, name = fault.what
            patch.setattr(cls, name, raising(cls, name, error, fault.after))
        found = await round_of(callers, sides, keepers)
        while any(device._events for nic in fabric.nics.values() for device in nic.devices):
            await asyncio.sleep(0)
        await turns(5)

        dead = [not engine.usable for engine in engines]
        lost = peers_of(number for number, caller in enumerate(callers) if caller.lost)
        assert any(dead) or fault.kind != "event" or fault.what not in DEADLY_EVENTS
        if any(dead):
            assert fault.what in (DEADLY_EVENTS if fault.kind == "event" else DEADLY), (
                "no connection's fault is the device's"
            )
        elif fault.kind == "event" and fault.what in {"port down", "address changed"}:
            assert len(lost) == PEERS, "nothing can get through, and nobody waits for retries"
        else:
            assert not lost or fault.what != "nothing"
            assert len(lost) <= 1, "one fault is of one connection"
            failed = peers_of(number for number, how in enumerate(found) if how != "whole")
            assert len(failed | lost) <= 1, "and so are the pulls that it ends"
            alive = [caller for number, caller in enumerate(callers) if number % PEERS not in lost]
            # A fault that has not struck yet strikes where everything ends.
            if fault.kind != "call" or fabric.failed:
                again = await round_of(alive, sides, keepers)
                assert set(again) <= {"whole"} or fault.kind == "callback", again
                assert not any(caller.lost for caller in alive) or fault.kind == "callback"
        for one in callers:
            one.connection.abort()
        for one in callers:
            await one.connection.aclose()
        for engine in engines:
            while engine.usable and engine.connections:
                await asyncio.sleep(0)
            if engine.usable:
                whole(engine)
        for caller in callers:
            assert sorted(caller.ended) == list(range(1, caller.next + 1)), "a call has not ended, or twice"
            assert caller.lost == 1
        error.with_traceback(None)
        gc.collect()
        if all(engine.usable for engine in engines):
            assert not any(keeper() for keeper in keepers), "a destination is kept for nothing"
            assert len(fabric._queue_pairs) <= spare_of(fault, "destroy_queue_pair")
            for engine in engines:
                more = len(device_of(engine).regions) - regions_of(engine)
                assert more <= spare_of(fault, "ibv_dereg_mr", "destroy_queue_pair")
        for side in sides:
            await side.endpoint.aclose()
        devices = [device_of(engine) for side in sides for engine in endpoint_of(side).engines]
        for side in sides:
            with contextlib.suppress(type(fault.error)):  # closing the device may meet the fault
                side.endpoint.dispose()
    assert told <= {str(fault.error)}
    return devices


def device_of(engine: Engine) -> FakeDevice:
    """The device that an engine has opened."""
    assert isinstance(engine.device, FakeDevice)
    return engine.device


def spare_of(fault: Fault, *calls: str) -> int:
    """The number of objects that the fault has kept from being destroyed by one of these calls."""
    return int(fault.kind == "call" and fault.what in calls)


def used() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


async def held(fault: Fault, seed: int) -> None:
    """Hold a conversation, and check that nothing of it stays."""
    fabric = drawn_network(seed)
    keepers: list[weakref.ref[Any]] = []
    async with asyncio.timeout(WATCHDOG):
        devices = await conversation(fault, fabric, keepers)
    gc.collect()
    # This holds for a device that has failed, too: it is closed.
    assert not any(keeper() for keeper in keepers), "a destination is kept for nothing"
    assert all(device.closed for device in devices)
    assert len(fabric._queue_pairs) <= spare_of(fault, "destroy_queue_pair")
    assert sum(len(device.regions) for device in devices) <= spare_of(fault, "ibv_dereg_mr")


@pytest.mark.slow
@pytest.mark.timeout(3600)  # for a great many rounds: each draw has a watchdog
async def test_one_fault_is_of_one_peer(rounds: int) -> None:
    await held(NO_FAULT, 0)
    await turns(50)  # the sockets of the first one are closed by then
    before = used()
    gc.freeze()  # otherwise every draw would search the same objects
    try:
        count = DRAWS * rounds
        first = count * isinstance(asyncio.get_running_loop(), uvloop.Loop)
        for seed in range(first, first + count):
            fault = fault_of(random.Random(seed))
            try:
                await held(fault, seed)
                async with asyncio.timeout(WATCHDOG):
                    while any(now > then for now, then in zip(used(), before, strict=True)):
                        await asyncio.sleep(0)
            except Exception as error:
                error.add_note(f"seed {seed}: {fault}; threads and descriptors {used()}, and before {before}")
                raise
    finally:
        gc.unfreeze()
