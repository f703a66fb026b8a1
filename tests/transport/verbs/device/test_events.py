"""Asynchronous events: the connections that each concerns, the path that is used instead, and no harm beyond that."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.conformance.connection import ConnectedPair, Recorder, region, send, turns
from tests.transport.verbs.parts import SLOT, engine_on
from tests.transport.verbs.sides import device_of, endpoint_of, engine_of, fake_sides
from zcactor.errors import ConnectionLost
from zcactor.testing import until
from zcactor.transport.base import Connection
from zcactor.transport.verbs.device import events
from zcactor.transport.verbs.driver.base import Gid
from zcactor.transport.verbs.driver.codes import EventType, QpState
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.driver.fake_queues import FakeQueuePair
from zcactor.transport.verbs.peer import connect as joining
from zcactor.transport.verbs.peer.connection import VerbsConnection

LOST = [EventType.DEVICE_FATAL, EventType.CQ_ERR, EventType.SRQ_ERR]
PORT = [EventType.PORT_ERR, EventType.PORT_ACTIVE, EventType.GID_CHANGE, EventType.LID_CHANGE, EventType.PKEY_CHANGE,
        EventType.SM_CHANGE, EventType.CLIENT_REREGISTER]  # fmt: skip
OTHER = Gid(1, ipaddress.IPv6Address("::ffff:10.77.0.99").packed, True, "eth0")


@pytest.fixture
def ends(pair: ConnectedPair) -> tuple[Recorder, Recorder]:
    """Start both ends with recorders."""
    recorders = Recorder(), Recorder()
    for end, recorder in zip((pair.left, pair.right), recorders, strict=True):
        end.start(recorder)
    return recorders


def verbs(end: Connection) -> VerbsConnection:
    """An end that has to be an RDMA connection."""
    assert isinstance(end, VerbsConnection)
    return end


async def further(pair: ConnectedPair) -> Connection:
    """Make a second connection, whose accepting end closes with the connecting one."""
    made = await pair.sides[0].endpoint.connect(pair.sides[1].endpoint.address)
    other = await pair.accepted.get()
    assert made.kind == other.kind
    if made.kind == "tcp":
        assert "verbs" in other.rejected
    made.abort()
    other.abort()
    return made


async def goes_on(pair: ConnectedPair, left: Recorder, right: Recorder) -> None:
    """Check that frames and bytes get through."""
    frames = len(right.frames)
    send(pair.left, [b"there"])
    assert (await right.wait_frames(frames + 1))[-1] == b"there"
    pair.sides[1].arena[:4] = os.urandom(4)
    await pair.left.pull(region(0, 4), pair.sides[0].address, pair.sides[0])
    assert pair.sides[0].arena[:4] == pair.sides[1].arena[:4]
    assert not left.lost and not right.lost


@pytest.mark.parametrize("number", [0, 1])
async def test_a_port_that_goes_down(
    pair: ConnectedPair,
    ends: tuple[Recorder, Recorder],
    fabric: FakeFabric,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    caplog.set_level(logging.INFO)
    side, nic = pair.sides[number], fabric.nics[f"fake{number}"]
    pull = asyncio.ensure_future(pair.left.pull(region(0, 4), pair.sides[0].address, pair.sides[0]))
    await pull
    nic.set_active(False)
    nic.tell(EventType.PORT_ERR)
    cause = await ends[number].wait_lost()
    assert isinstance(cause, ConnectionLost) and cause.maybe_executed
    assert f"fake{number} port 1 is DOWN, not ACTIVE" in str(cause)
    assert isinstance(await ends[1 - number].wait_lost(), ConnectionLost)
    assert engine_of(side).usable
    tcp = await further(pair)
    assert tcp.kind == "tcp"
    assert f"fake{number} port 1 is DOWN, not ACTIVE" in tcp.rejected["verbs"]
    assert "RETRY_EXC" not in tcp.rejected["verbs"], "nobody waits for the device"
    (told,) = [record.getMessage() for record in caplog.records if "cannot be used for now" in record.getMessage()]
    assert f"fake{number} port 1 is DOWN" in told and "1 connections end" in told
    nic.tell(EventType.PORT_ERR)
    nic.tell(EventType.GID_CHANGE)
    await turns(20)
    nic.set_active(True)
    nic.tell(EventType.PORT_ACTIVE)
    await until(lambda: not engine_of(side).room, "the port counts as down", 20)
    assert (await further(pair)).kind == "verbs"
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot be used for now" in one for one in said) == 1
    assert any(f"can be used again: fake{number} port 1 with GID 1 (10.77.0.{number + 1})" in one for one in said)


async def test_a_pull_under_way_when_the_port_goes_down(
    pair: ConnectedPair, ends: tuple[Recorder, Recorder], fabric: FakeFabric
) -> None:
    await pair.left.pull(region(0, 4), pair.sides[0].address, pair.sides[0])
    fabric.manual = True
    pull = asyncio.ensure_future(pair.left.pull(region(0, 4096), pair.sides[0].address, pair.sides[0]))
    await turns(20)
    fabric.nics["fake0"].set_active(False)
    fabric.nics["fake0"].tell(EventType.PORT_ERR)
    with pytest.raises(ConnectionLost):
        await pull
    assert "is DOWN" in str(await ends[0].wait_lost())
    fabric.manual = False
    fabric.posted()


@pytest.mark.parametrize("usable", [True, False])
async def test_an_address_that_changes(
    pair: ConnectedPair,
    ends: tuple[Recorder, Recorder],
    fabric: FakeFabric,
    caplog: pytest.LogCaptureFixture,
    usable: bool,
) -> None:
    nic = fabric.nics["fake0"]
    nic.gids = (nic.gids[0], OTHER) if usable else nic.gids[:1]
    nic.tell(EventType.GID_CHANGE)
    cause = str(await ends[0].wait_lost())
    await ends[1].wait_lost()
    made = await further(pair)
    if usable:
        assert "fake0 port 1 has no GID 1 (10.77.0.1) any more, and GID 1 (10.77.0.99) instead" in cause
        assert made.kind == "verbs" and "10.77.0.99" in verbs(made).describe()
        engine = engine_of(pair.sides[0])
        assert engine.gpu_memory.path == (engine.found.port, OTHER, engine.found.marking)
        assert any("10.77.0.99" in record.getMessage() for record in caplog.records)
    else:
        assert "fake0 port 1 has no usable RoCE v2 GID" in cause
        assert made.kind == "tcp" and "no usable RoCE v2 GID" in made.rejected["verbs"]
        assert "ip addr add" in made.rejected["verbs"], "and what to do about it"


@pytest.mark.parametrize("kind", PORT, ids=lambda kind: kind.name)
async def test_a_port_that_is_as_it_was(
    pair: ConnectedPair,
    ends: tuple[Recorder, Recorder],
    fabric: FakeFabric,
    caplog: pytest.LogCaptureFixture,
    kind: EventType,
) -> None:
    nic = fabric.nics["fake0"]
    nic.gids = (*nic.gids, replace(OTHER, index=2))  # as of another network interface
    nic.tell(kind)
    await turns(20)
    await goes_on(pair, *ends)
    assert (await further(pair)).kind == "verbs"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", LOST, ids=lambda kind: kind.name)
async def test_a_device_that_is_removed(
    pair: ConnectedPair,
    ends: tuple[Recorder, Recorder],
    fabric: FakeFabric,
    caplog: pytest.LogCaptureFixture,
    kind: EventType,
) -> None:
    device = device_of(pair.sides[0])
    fabric.nics["fake0"].tell(kind)
    cause = await ends[0].wait_lost()
    assert isinstance(cause, ConnectionLost) and kind.name in str(cause)
    await ends[1].wait_lost()
    await until(lambda: device.closed, "the device is open", 20)
    assert len(device.ledger) == 0 and not device.regions, "the system waits for that"
    assert not engine_of(pair.sides[0]).usable and engine_of(pair.sides[1]).usable
    made = await further(pair)
    assert made.kind == "tcp" and "fake0 has failed" in made.rejected["verbs"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "fake0" in caplog.text and kind.name in caplog.text


async def test_events_that_cannot_be_read_any_more(
    pair: ConnectedPair, ends: tuple[Recorder, Recorder], fabric: FakeFabric
) -> None:
    device = device_of(pair.sides[0])
    fabric.fail("async_events", OSError(5, "the device is gone"))
    fabric.nics["fake0"].tell(EventType.PORT_ACTIVE)
    assert "the device is gone" in str(await ends[0].wait_lost())
    await until(lambda: device.closed, "the device is open", 20)
    assert (await further(pair)).kind == "tcp"


@pytest.mark.parametrize("kind", [EventType.QP_FATAL, EventType.QP_REQ_ERR, EventType.QP_ACCESS_ERR])
async def test_a_queue_pair_that_fails_is_one_connections(
    pair: ConnectedPair, ends: tuple[Recorder, Recorder], fabric: FakeFabric, kind: EventType
) -> None:
    other = await pair.sides[0].endpoint.connect(pair.sides[1].endpoint.address)
    accepted = await pair.accepted.get()
    lost = Recorder()
    other.start(lost)
    control = verbs(other).pairs.control
    assert isinstance(control, FakeQueuePair)
    control.current = QpState.ERR
    fabric.nics["fake0"].tell(kind)
    cause = await lost.wait_lost()
    assert isinstance(cause, ConnectionLost) and cause.maybe_executed
    assert f"queue pair {control.qp_num} of fake0 failed: {kind.name}" in str(cause)
    await goes_on(pair, *ends)
    accepted.abort()


async def test_a_bulk_queue_pair_that_fails_is_connected_anew(
    pair: ConnectedPair, ends: tuple[Recorder, Recorder], fabric: FakeFabric
) -> None:
    for number, end in enumerate((pair.left, pair.right)):
        bulk = verbs(end).pairs.bulk
        assert isinstance(bulk, FakeQueuePair)
        bulk.current = QpState.ERR
        fabric.nics[f"fake{number}"].tell(EventType.QP_FATAL)
        await until(
            lambda: [verbs(one).generation for one in (pair.left, pair.right)] == [number + 1] * 2,  # noqa: B023
            "no new queue pairs were made",
            20,
        )
        await until(lambda: all(verbs(one).puller.up for one in (pair.left, pair.right)), "pulls do not work again", 20)
        await goes_on(pair, *ends)


async def test_queue_pairs_that_cannot_be_asked(
    pair: ConnectedPair, ends: tuple[Recorder, Recorder], fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> QpState:
        raise OSError(5, "no answer")

    monkeypatch.setattr(verbs(pair.left).pairs.control, "state", fail)
    fabric.nics["fake0"].tell(EventType.QP_FATAL)
    assert "cannot be asked for its state: [Errno 5] no answer" in str(await ends[0].wait_lost())


async def test_fenced_queue_pairs_are_no_failures(
    pair: ConnectedPair, ends: tuple[Recorder, Recorder], fabric: FakeFabric
) -> None:
    fabric.manual = True
    verbs(pair.left).puller.fence()  # this completes once the fabric works
    engine_of(pair.sides[0]).look_at_queue_pairs("QP_FATAL (1)")
    assert not ends[0].lost and verbs(pair.left).generation == 0
    fabric.manual = False
    fabric.posted()


async def test_queue_pairs_are_looked_at_once_a_second(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's bad requests can cause such events at will, and each look asks for the state of all queue pairs."""
    looks: list[str] = []
    delays: list[float] = []
    with engine_on(fabric, "a", SLOT) as engine:
        monkeypatch.setattr(engine, "look_at_queue_pairs", looks.append)
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def soon(delay: float, *arguments: object) -> asyncio.TimerHandle:
            delays.append(delay)
            return call_later(0, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(engine, "loop", _Loop(loop, soon))
        for _ in range(3):
            for _ in range(10):
                fabric.nics["a"].tell(EventType.QP_ACCESS_ERR)
                await turns(2)
            await until(lambda: len(looks) == len(delays), "the looks did not end", 20)
    assert delays[0] == 0.0
    assert delays[1:] and set(delays[1:]) == {events.LOOK_SECONDS}
    assert set(looks) == {"QP_ACCESS_ERR (3)"}


class _Loop:
    """A loop that records its timers, and whose clock stands still."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call_later: Callable[..., asyncio.TimerHandle]) -> None:
        self.remove_reader, self.call_later = loop.remove_reader, call_later

    def time(self) -> float:
        """A constant time."""
        return 1000.0


async def test_usual_and_unknown_kinds_change_nothing(
    pair: ConnectedPair, ends: tuple[Recorder, Recorder], fabric: FakeFabric, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = set(EventType) - set(LOST) - set(PORT)
    nic = fabric.nics["fake0"]
    for _ in range(3):
        for kind in sorted(kinds):
            nic.tell(kind)
        for unknown in (77, 2**31 - 1, -1):
            nic.tell(unknown)
        await turns(20)
    await goes_on(pair, *ends)
    told = sorted(record.getMessage().split(" tells of ")[1] for record in caplog.records)
    names = ["PATH_MIG (6)", "PATH_MIG_ERR (7)", "WQ_FATAL (19)", "event -1", "event 2147483647", "event 77"]
    assert told == [f"{name}, which changes nothing here" for name in names], "each once"


async def test_events_before_a_connection_and_at_the_end(fabric: FakeFabric) -> None:
    with engine_on(fabric, "a", SLOT) as engine:
        nic = fabric.nics["a"]
        nic.set_active(False)
        nic.tell(EventType.PORT_ERR)
        await until(lambda: engine.room, "the port counts as up", 20)
        assert "a port 1 is DOWN" in engine.room
        fd = engine.device.async_fd
        assert fd is not None
        nic.tell(EventType.QP_FATAL)
        await turns(20)
        nic.tell(EventType.PORT_ACTIVE)
        engine.close()
        engine.close()
        assert not asyncio.get_running_loop().remove_reader(fd)


@pytest.mark.parametrize("event", ["path_lost", "queue_pair_failed"])
async def test_what_an_owner_raises_is_its_own_end(
    pair: ConnectedPair, fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    seen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(str(context["exception"])))
    left = Recorder()
    pair.left.start(left)

    def fail(_: str) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(pair.left, event, fail)
    if event == "path_lost":
        fabric.nics["fake0"].set_active(False)
        fabric.nics["fake0"].tell(EventType.PORT_ERR)
    else:
        control = verbs(pair.left).pairs.control
        assert isinstance(control, FakeQueuePair)
        control.current = QpState.ERR
        fabric.nics["fake0"].tell(EventType.QP_FATAL)
    assert "a defect" in str(await left.wait_lost())
    assert seen == ["a defect"]


async def test_a_port_that_goes_down_while_a_path_is_proven(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "PROOF_SECONDS", 20.0)  # the event ends the proof before the time does
    with fake_sides(fabric) as sides:
        for side in sides:
            endpoint_of(side).open_engine()
        fabric.manual = True
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        for side in sides:
            await side.endpoint.start(accepted.put_nowait)
        connecting = asyncio.ensure_future(sides[0].endpoint.connect(sides[1].endpoint.address))
        await until(
            lambda: all(len(engine_of(side)._owners) == 2 for side in sides), "the connections were not begun", 20
        )
        for nic in fabric.nics.values():
            nic.set_active(False)
            nic.tell(EventType.PORT_ERR)
        made = await connecting
        other = await accepted.get()
        assert made.kind == other.kind == "tcp"
        assert "fake0 port 1 is DOWN" in made.rejected["verbs"]
        fabric.manual = False
        fabric.posted()
        await until(lambda: not any(engine_of(side).connections for side in sides), "connections are left", 20)
        for end in (made, other):
            end.abort()
        for side in sides:
            await side.endpoint.aclose()


async def test_a_binding_that_tells_of_no_events(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcactor.transport.verbs.driver.fake.FakeDevice.async_fd", None)
    with engine_on(fabric, "a", SLOT) as engine:
        fabric.nics["a"].tell(EventType.DEVICE_FATAL)
        await turns(20)
        assert engine.usable
