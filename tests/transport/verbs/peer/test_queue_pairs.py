"""The two queue pairs of a connection: made, connected, connected anew, and closed whole after any failure."""

from __future__ import annotations

import errno
from dataclasses import replace

import msgspec
import pytest

from tests.transport.verbs.parts import EAGER, SLOT, engine_on
from zcactor.errors import ProtocolError
from zcactor.transport.verbs.device.engine import Engine
from zcactor.transport.verbs.device.sizing import (
    DEPTH,
    SEND_DEPTH,
)
from zcactor.transport.verbs.driver.base import Marking, Read, VerbsError
from zcactor.transport.verbs.driver.codes import QpState
from zcactor.transport.verbs.driver.device_resources import ResourceKind
from zcactor.transport.verbs.driver.fake import FakeDevice, FakeFabric
from zcactor.transport.verbs.driver.fake_queues import FakeQueuePair
from zcactor.transport.verbs.peer.bootstrap import agree
from zcactor.transport.verbs.peer.queue_pairs import QueuePairs


def device_of(engine: Engine) -> FakeDevice:
    assert isinstance(engine.device, FakeDevice)
    return engine.device


def join(left: QueuePairs, right: QueuePairs) -> None:
    """Connect both ends."""
    left.connect(right.ours, agree(left.ours, right.ours))
    right.connect(left.ours, agree(right.ours, left.ours))


def reads(left: QueuePairs) -> bool:
    """Whether the left end can READ the right one's proof."""
    address, rkey, nbytes, _ = left.theirs.proof
    area = left.seal_area
    left.bulk.post_reads([Read(1 << 40, area.address(0), nbytes, area.lkey, address, rkey)])
    return left.engine.cq.poll(8)[0].status == 0


async def test_offer(engines: tuple[Engine, Engine]) -> None:
    engine = engines[0]
    pairs = QueuePairs(engine, EAGER)
    ours = pairs.ours
    assert (ours.control.qpn, ours.bulk.qpn) == (pairs.control.qp_num, pairs.bulk.qp_num)
    assert ours.control.psn != ours.bulk.psn, "random numbers; once in 16 million runs they are the same"
    assert ours.gid == device_of(engine).nic.gids[1].raw and ours.is_global
    assert (ours.depth, ours.slot_nbytes, ours.eager_limit) == (DEPTH, engine.slot_nbytes, EAGER)
    assert ours.seals == (engine.seals.address, engine.seals.rkey, engine.seals.count)
    assert ours.arena_address == engine.arena.address
    assert pairs.control.state() == pairs.bulk.state() == QpState.RESET
    pairs.close()


async def test_connect(engines: tuple[Engine, Engine]) -> None:
    left, right = (QueuePairs(engine, EAGER) for engine in engines)
    join(left, right)
    assert reads(left) and reads(right)
    for pairs in (left, right):
        assert isinstance(pairs.control, FakeQueuePair) and isinstance(pairs.bulk, FakeQueuePair)
        assert pairs.control.path is not None and not pairs.control.path.remote_read
        assert pairs.bulk.path is not None and pairs.bulk.path.remote_read
        assert pairs.send_area.count == SEND_DEPTH + 2
    text = left.describe()
    for part in (left.control.qp_num, left.bulk.qp_num, right.control.qp_num, "10.77.0.1", "10.77.0.2", "MTU 4096"):
        assert str(part) in text


async def test_connect_with_the_smaller_numbers(fabric: FakeFabric) -> None:
    fabric.add_nic("a")
    nic = fabric.add_nic("b", max_msg_sz=1 << 20)
    nic.port = replace(nic.port, active_mtu=3)
    nic.attributes = replace(nic.attributes, max_qp_rd_atom=2, max_qp_init_rd_atom=4)
    with engine_on(fabric, "a", SLOT) as one, engine_on(fabric, "b", SLOT) as other:
        left, right = QueuePairs(one, EAGER), QueuePairs(other, EAGER)
        join(left, right)
        for ours, theirs in ((left.bulk, right.bulk), (right.bulk, left.bulk)):
            assert isinstance(ours, FakeQueuePair) and isinstance(theirs, FakeQueuePair)
            assert ours.path is not None and theirs.path is not None
            assert ours.path.mtu == theirs.path.mtu == 3
            assert ours.path.max_rd_atomic == theirs.path.max_dest_rd_atomic
        assert reads(left) and reads(right)


@pytest.mark.parametrize(("limit", "taken"), [(0, 0), (48, 0), (64, 64), (101, 64), (216, 128), (512, 256)])
async def test_as_much_inline_data_as_the_card_takes(fabric: FakeFabric, limit: int, taken: int) -> None:
    fabric.add_nic("a", max_inline=limit)
    with engine_on(fabric, "a", SLOT) as engine:
        pairs = QueuePairs(engine, EAGER)
        assert (pairs.control.max_inline, pairs.bulk.max_inline) == (taken, 0)
        pairs.close()


async def test_packets_are_marked(fabric: FakeFabric) -> None:
    marking = Marking(104, 3, 1)
    for name in "ab":
        fabric.add_nic(name).partitions = (0xFFFF, 0x8123)
    with engine_on(fabric, "a", SLOT) as one, engine_on(fabric, "b", SLOT) as other:
        for engine in (one, other):
            engine.found = replace(engine.found, marking=marking, partition=0x8123)
        left, right = QueuePairs(one, EAGER), QueuePairs(other, EAGER)
        join(left, right)
        for qp in (left.control, left.bulk, right.control, right.bulk):
            assert isinstance(qp, FakeQueuePair) and qp.path is not None and qp.path.marking == marking
        assert left.ours.partition == right.ours.partition == 0x8123
        assert reads(left) and reads(right)


async def test_ends_of_two_partitions(engines: tuple[Engine, Engine]) -> None:
    left, right = (QueuePairs(engine, EAGER) for engine in engines)
    theirs = msgspec.structs.replace(right.ours, partition=0x8123)
    with pytest.raises(ProtocolError, match=r"a here uses partition key 0xffff and the peer's b 0x8123.*pkey_index"):
        left.connect(theirs, agree(left.ours, theirs))
    theirs = msgspec.structs.replace(right.ours, partition=0x7FFF)
    agree(left.ours, theirs)  # a full and a limited member


async def test_rebuild(engines: tuple[Engine, Engine]) -> None:
    left, right = (QueuePairs(engine, EAGER) for engine in engines)
    join(left, right)
    for generation in range(3):
        for pairs in (left, right):
            pairs.bulk.to_error()
        left.rebuild(100 + generation, 200 + generation)
        right.rebuild(200 + generation, 100 + generation)
        assert reads(left) and reads(right)
        assert left.control.state() == QpState.RTS


async def test_close(engines: tuple[Engine, Engine]) -> None:
    before = [len(device_of(engine).ledger) for engine in engines]
    left, right = (QueuePairs(engine, EAGER) for engine in engines)
    join(left, right)
    assert [engine.connections for engine in engines] == [1, 1]
    for pairs in (left, right):
        pairs.close()
        pairs.close()
    assert [engine.connections for engine in engines] == [0, 0]
    # The area of the receives stays, for the next connection.
    assert [len(device_of(engine).ledger) for engine in engines] == [count + 1 for count in before]
    QueuePairs(engines[0], EAGER).close()
    assert len(device_of(engines[0]).ledger) == before[0] + 1


def children(device: FakeDevice) -> list[int]:
    """The number of open objects of each kind."""
    return [len(device.ledger._open[kind]) for kind in ResourceKind]


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "no"), VerbsError("no")], ids=["driver", "check"])
@pytest.mark.parametrize("call", [0, 1])
async def test_a_queue_pair_cannot_be_made(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch, call: int, error: Exception
) -> None:
    engine = engines[0]
    device = device_of(engine)
    QueuePairs(engine, EAGER).close()
    before, calls, make = children(device), [0], device.create_queue_pair

    def create(*args: object, **kwargs: object) -> FakeQueuePair:
        calls[0] += 1
        if calls[0] == call + 1:
            raise error
        return make(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(device, "create_queue_pair", create)
    with pytest.raises(type(error), match="no"):
        QueuePairs(engine, EAGER)
    assert children(device) == before and engine.connections == 0


async def test_no_memory_for_receives(engines: tuple[Engine, Engine]) -> None:
    device = device_of(engines[0])
    before = children(device)
    device.nic.pin_limit = device.nic.pinned
    with pytest.raises(OSError, match="ulimit -l"):
        QueuePairs(engines[0], EAGER)
    assert children(device) == before and engines[0].connections == 0
    device.nic.pin_limit = None
    QueuePairs(engines[0], EAGER).close()


async def test_no_memory_for_seals_or_sends(engines: tuple[Engine, Engine]) -> None:
    left, right = engines
    QueuePairs(left, EAGER).close()  # this leaves receives behind
    device = device_of(left)
    before = children(device)
    device.nic.pin_limit = device.nic.pinned
    with pytest.raises(OSError, match="ulimit -l"):
        QueuePairs(left, EAGER)
    assert children(device) == before
    device.nic.pin_limit += 4096
    pairs, other = QueuePairs(left, EAGER), QueuePairs(right, EAGER)
    with pytest.raises(OSError, match="ulimit -l"):
        pairs.connect(other.ours, agree(pairs.ours, other.ours))
    pairs.close()
    assert children(device) == before and left.connections == 0


@pytest.mark.parametrize("field", ["control", "bulk"])
async def test_no_way_to_the_peer(engines: tuple[Engine, Engine], field: str) -> None:
    device = device_of(engines[0])
    QueuePairs(engines[0], EAGER).close()
    before = children(device)
    left, right = (QueuePairs(engine, EAGER) for engine in engines)
    name = msgspec.structs.replace(getattr(right.ours, field), qpn=0)
    theirs = msgspec.structs.replace(right.ours, **{field: name})
    with pytest.raises(VerbsError, match="qpn is 0"):
        left.connect(theirs, agree(left.ours, theirs))
    left.close()
    assert children(device) == before


@pytest.mark.parametrize("changed", [{"slot_nbytes": 256}, {"max_msg_sz": 1000}], ids=str)
async def test_frames_that_do_not_fit(engines: tuple[Engine, Engine], changed: dict[str, int]) -> None:
    left, right = (QueuePairs(engine, EAGER) for engine in engines)
    theirs = msgspec.structs.replace(right.ours, **changed)
    with pytest.raises(ProtocolError, match=f"up to {SLOT} bytes"):
        left.connect(theirs, agree(left.ours, theirs))


async def test_closing_goes_on_when_the_device_refuses(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines[0]
    QueuePairs(engine, EAGER).close()
    before = children(device_of(engine))
    pairs = QueuePairs(engine, EAGER)
    close = pairs.control.close

    def refuse() -> None:
        close()
        raise OSError(errno.EIO, "the device failed")

    monkeypatch.setattr(pairs.control, "close", refuse)
    with pytest.raises(OSError, match="the device failed"):
        pairs.close()
    pairs.close()
    assert children(device_of(engine)) == before and engine.connections == 0
