"""The engine: receives for all messages that peers may send, an owner for every completion, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from tests.conformance.connection import turns
from tests.transport.verbs.parts import EAGER, SLOT, engine_on
from zcactor.transport.verbs.device.engine import Engine
from zcactor.transport.verbs.device.sizing import DEPTH, PROOF_NBYTES
from zcactor.transport.verbs.driver import fake
from zcactor.transport.verbs.driver.base import Completion, Read, Receive, Send
from zcactor.transport.verbs.driver.codes import CompletionStatus
from zcactor.transport.verbs.driver.fake import FakeDevice, FakeFabric
from zcactor.transport.verbs.driver.fake_queues import FakeSharedReceiveQueue
from zcactor.transport.verbs.peer.bootstrap import agree
from zcactor.transport.verbs.peer.queue_pairs import QueuePairs

SEND = 1 << 62


@dataclass
class Owner:
    """An owner of queue pairs that records the calls of the engine."""

    keeps: bool = False
    completions: list[Completion] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    turns: int = 0
    lost: list[OSError] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    defects: list[Exception] = field(default_factory=list)
    raises: dict[str, Exception] = field(default_factory=dict)
    """The error that each method raises, once."""
    then: Callable[[], None] = lambda: None

    def _fail(self, method: str) -> None:
        error = self.raises.pop(method, None)
        if error is not None:
            raise error

    def completed(self, completion: Completion) -> None:
        """See `Completions`."""
        self.completions.append(completion)
        self._fail("completed")
        self.then()

    def received(self, view: memoryview, completion: Completion, slot: int) -> bool:
        """See `Completions`."""
        self.messages.append(bytes(view[: completion.byte_len]))
        self.slots.append(slot)
        self._fail("received")
        self.then()
        return not self.keeps

    def turn_ended(self) -> None:
        """See `Completions`."""
        self._fail("turn_ended")
        self.turns += 1

    def path_lost(self, why: str) -> None:
        """See `Completions`."""
        self.paths.append(why)
        self._fail("path_lost")

    def queue_pair_failed(self, why: str) -> None:
        """See `Completions`."""
        self.failures.append(why)
        self._fail("queue_pair_failed")

    def device_failed(self, error: OSError) -> None:
        """See `Completions`."""
        self.lost.append(error)
        self._fail("device_failed")

    def failed(self, error: Exception) -> None:
        """See `Completions`."""
        self.defects.append(error)
        self._fail("failed")


def posted(engine: Engine) -> int:
    """The number of receives in the queue."""
    assert isinstance(engine.srq, FakeSharedReceiveQueue)
    return len(engine.srq.receives)


class Link:
    """A pair of connected queue pairs with an owner at each end."""

    def __init__(self, engines: tuple[Engine, Engine]) -> None:
        self.left, self.right = (QueuePairs(engine, EAGER) for engine in engines)
        self.left.connect(self.right.ours, agree(self.left.ours, self.right.ours))
        self.right.connect(self.left.ours, agree(self.right.ours, self.left.ours))
        self.owners = Owner(), Owner()
        for pairs, owner in zip((self.left, self.right), self.owners, strict=True):
            pairs.engine.watch(pairs.control, owner)
            pairs.engine.watch(pairs.bulk, owner)
        self.sent = 0

    def send(self, data: bytes, *, back: bool = False) -> None:
        """Send one message, from left to right unless it is `back`."""
        pairs = self.right if back else self.left
        area = pairs.send_area
        ctypes.memmove(area.address(self.sent % 32), data, len(data))
        pairs.control.post_sends([Send(SEND | self.sent, area.address(self.sent % 32), len(data), area.lkey)])
        self.sent += 1


async def test_receives_are_posted_for_those_who_join(engines: tuple[Engine, Engine]) -> None:
    engine = engines[0]
    assert posted(engine) == 0
    pairs = [QueuePairs(engine, EAGER) for _ in range(3)]
    assert (posted(engine), engine.connections) == (3 * DEPTH, 3)
    pairs.pop().close()
    assert posted(engine) == 3 * DEPTH, "receives that are posted cannot be taken back"
    pairs.append(QueuePairs(engine, EAGER))
    assert posted(engine) == 3 * DEPTH, "they serve the next one"
    pairs.append(QueuePairs(engine, EAGER))
    assert posted(engine) == 4 * DEPTH
    for one in pairs:
        one.close()
    assert engine.connections == 0


@pytest.mark.parametrize("limit", ["max_srq_wr", "max_cqe"])
async def test_room_for_so_many(fabric: FakeFabric, limit: str) -> None:
    nic = fabric.add_nic("a")
    nic.attributes = replace(nic.attributes, **{limit: 1000})
    with engine_on(fabric, "a", SLOT) as engine:
        pairs = []
        while not engine.room:
            pairs.append(QueuePairs(engine, EAGER))
        assert 3 < len(pairs) <= 1000 // DEPTH
        before = posted(engine), engine.connections
        with pytest.raises(OSError, match=f"{len(pairs)} connections fill its"):
            QueuePairs(engine, EAGER)
        assert (posted(engine), engine.connections) == before
        pairs.pop().close()
        QueuePairs(engine, EAGER)


async def test_parts_that_cannot_be_made(fabric: FakeFabric) -> None:
    fabric.add_nic("a", pin_limit=10_000)
    binding = fabric.binding("a")
    with pytest.raises(OSError, match="ulimit -l"), engine_on(fabric, "a", SLOT):
        pass
    assert fabric.nics["a"].pinned == 0
    del binding


async def test_the_proof_can_be_read(engines: tuple[Engine, Engine]) -> None:
    link = Link(engines)
    address, rkey, nbytes, _ = link.left.theirs.proof
    assert nbytes == PROOF_NBYTES
    area = link.left.seal_area
    link.left.bulk.post_reads([Read(1 << 60, area.address(0), nbytes, area.lkey, address, rkey)])
    await turns()
    (completion,) = link.owners[0].completions
    assert completion.status == CompletionStatus.SUCCESS
    assert ctypes.string_at(area.address(0), nbytes) == ctypes.string_at(address, nbytes) != bytes(nbytes)


async def test_everyone_is_told_of_ones_own(engines: tuple[Engine, Engine]) -> None:
    links = [Link(engines) for _ in range(3)]
    for number, link in enumerate(links):
        link.send(b"to the right %d" % number)
        link.send(b"back %d" % number, back=True)
    await turns(10)
    for number, link in enumerate(links):
        assert link.owners[1].messages == [b"to the right %d" % number]
        assert link.owners[0].messages == [b"back %d" % number]
        assert [completion.wr_id for completion in link.owners[0].completions] == [SEND]
        assert link.owners[0].turns >= 1


async def test_slots_are_used_again(engines: tuple[Engine, Engine], fabric: FakeFabric) -> None:
    links = [Link(engines) for _ in range(4)]
    count = 20 * DEPTH
    for i in range(count):
        for link in links:
            link.send(b"%d" % i, back=i % 2 == 0)
        if i % (DEPTH // 4) == 0:
            await turns(10)
    await turns(50)
    for link in links:
        assert link.owners[1].messages == [b"%d" % i for i in range(1, count, 2)]
        assert link.owners[0].messages == [b"%d" % i for i in range(0, count, 2)]
    assert (fabric.statistics().rnr, fabric.statistics().retries) == (0, 0)
    assert posted(engines[0]) == posted(engines[1]) == 4 * DEPTH


async def test_slots_that_are_kept(engines: tuple[Engine, Engine]) -> None:
    engine = engines[1]
    link = Link(engines)
    link.owners[1].keeps = True
    for i in range(10):
        link.send(b"%d" % i)
    await turns(10)
    slots = link.owners[1].slots
    assert posted(engine) == DEPTH - 10 and len(set(slots)) == 10
    assert [bytes(engine.slot_view(slot)[:1]) for slot in slots] == [b"%d" % i for i in range(10)]
    for slot in slots:
        engine.give_back(slot)
    assert posted(engine) == DEPTH


async def test_messages_for_nobody(engines: tuple[Engine, Engine]) -> None:
    link = Link(engines)
    engines[1].unwatch(link.right.control)
    link.send(b"x")
    await turns(10)
    assert not link.owners[1].messages
    assert posted(engines[1]) == DEPTH
    engines[1].unwatch(link.right.control)


async def test_quiet_when_there_is_nothing_to_do(engines: tuple[Engine, Engine]) -> None:
    await turns(20)
    assert (engines[0].polls, engines[0].events) == (0, 0)
    link = Link(engines)
    link.send(b"x")
    await turns(20)
    polls = engines[0].polls
    await turns(20)
    assert engines[0].polls == polls > 0
    assert engines[0].events == 1


@pytest.mark.parametrize("when", ["arm", "poll", "drain_events"])
@pytest.mark.parametrize("after", [False, True])
async def test_no_completion_is_missed(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch, when: str, after: bool
) -> None:
    """A message comes just before, or just after, each single step of the engine, once."""
    for number in range(1, 6):
        link = Link(engines)
        cq = engines[1].cq
        original = getattr(cq, when)
        calls = 0

        def step(*args: int) -> object:
            nonlocal calls
            calls += 1
            if calls == number and not after:  # noqa: B023  # called while `number` is what it was
                link.send(b"between")  # noqa: B023
            result: object = original(*args)  # noqa: B023
            if calls == number and after:  # noqa: B023
                link.send(b"between")  # noqa: B023
            return result

        monkeypatch.setattr(cq, when, step)
        for _ in range(5):
            link.send(b"first")
            await turns(10)
        monkeypatch.setattr(cq, when, original)
        await turns(10)
        assert sorted(link.owners[1].messages) == [b"between"] * (calls >= number) + [b"first"] * 5
        assert calls >= min(number, 2)
        link.left.close()
        link.right.close()


async def test_polling_from_inside_keeps_the_order(engines: tuple[Engine, Engine]) -> None:
    first, second = Link(engines), Link(engines)

    def poll() -> None:
        first.owners[1].then = lambda: None
        second.send(b"3")
        engines[1].poll_now()

    first.owners[1].then = poll
    first.send(b"1")
    for data in (b"1", b"2"):
        second.send(data)
    await turns(10)
    assert second.owners[1].messages == [b"1", b"2", b"3"]


async def test_poll_now(engines: tuple[Engine, Engine]) -> None:
    link = Link(engines)
    for i in range(200):
        link.send(b"%d" % i)
        if i % 32 == 31:
            engines[1].poll_now()
            engines[0].poll_now()
    engines[1].poll_now()
    assert len(link.owners[1].messages) == 200
    await turns(10)
    link.send(b"the event still comes")
    await turns(10)
    assert link.owners[1].messages[-1] == b"the event still comes"


async def test_overrun_ends_everyone(fabric: FakeFabric, caplog: pytest.LogCaptureFixture) -> None:
    with engine_on(fabric, "a", SLOT) as left, engine_on(fabric, "b", SLOT) as right:
        links = [Link((left, right)) for _ in range(2)]
        right.cq.depth = 4  # type: ignore[attr-defined, unused-ignore]
        for _ in range(5):
            links[0].send(b"x")
        await turns(10)
        for link in links:
            assert {str(error) for error in link.owners[1].lost}
            assert all("overrun" in str(error) for error in link.owners[1].lost)
            assert not link.owners[0].lost
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert "has failed" in right.room
        with pytest.raises(OSError, match="has failed"):
            QueuePairs(right, EAGER)
        right.give_back(0)
        right.poll_now()


@pytest.mark.parametrize("call", ["poll", "arm", "drain_events"])
async def test_device_failure(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(engines)

    def fail(*_: int) -> None:
        raise OSError(errno.EIO, "the device is gone")

    monkeypatch.setattr(engines[1].cq, call, fail)
    link.send(b"x")
    await turns(10)
    assert [str(error) for error in link.owners[1].lost] == ["[Errno 5] the device is gone"] * 2  # control and bulk
    link.send(b"x")
    await turns(10)
    assert len(link.owners[1].lost) == 2
    engines[1].close()


@pytest.mark.parametrize("call", ["poll", "arm", "drain_events"])
@pytest.mark.parametrize("after", range(4))
async def test_a_defect_of_the_binding_ends_no_polling(
    engines: tuple[Engine, Engine], fabric: FakeFabric, call: str, after: int
) -> None:
    """The defect goes to the loop's handler, and every message is delivered all the same."""
    seen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(str(context["exception"])))
    link = Link(engines)
    await turns(10)
    fabric.fail(call, RuntimeError("a defect"), after=after)
    for _ in range(5):
        link.send(b"x")
        await turns(10)
    assert fabric.failed and seen == ["a defect"]
    assert link.owners[1].messages == [b"x"] * 5
    assert all(engine.usable for engine in engines)


async def test_close(fabric: FakeFabric) -> None:
    with engine_on(fabric, "a", SLOT) as engine:
        device = engine.device
        assert isinstance(device, FakeDevice)
        QueuePairs(engine, EAGER)
        fd = engine.cq.fd
        engine.close()
        engine.close()
        assert device.closed and len(device.ledger) == 0 and fabric.nics["a"].pinned == 0
        assert not asyncio.get_running_loop().remove_reader(fd)
        assert "closed" in engine.room


@pytest.mark.parametrize(
    "error", [OSError(errno.EBUSY, "busy"), RuntimeError("a defect")], ids=lambda one: type(one).__name__
)
@pytest.mark.parametrize("refused", range(4))
async def test_memory_that_cannot_be_unregistered_leaves_nothing_else_open(
    fabric: FakeFabric, refused: int, error: Exception
) -> None:
    """Each of them may fail: the registered arena, memory that all connections share, and receives."""
    with engine_on(fabric, "a", SLOT) as engine:
        device, fd = engine.device, engine.cq.fd
        assert isinstance(device, FakeDevice)
        await engine.extents.get(0, 1)
        regions = len(device.regions)
        assert regions == 4
        fabric.fail("ibv_dereg_mr", error, after=refused)
        with contextlib.nullcontext() if isinstance(error, OSError) else pytest.raises(RuntimeError, match="a defect"):
            engine.close()
        assert fabric.failed and device.closed and len(device.ledger) == 0
        assert len(device.regions) == 1, "that which was refused"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


async def test_abandon(fabric: FakeFabric) -> None:
    with engine_on(fabric, "a", SLOT) as engine:
        engine.abandon()
        engine.give_back(0)
        engine.poll_now()
        assert engine.polls == 0
        asyncio.get_running_loop().remove_reader(engine.cq.fd)


async def test_it_says_who_it_is(engines: tuple[Engine, Engine]) -> None:
    QueuePairs(engines[0], EAGER)
    assert repr(engines[0]) == "<Engine on a, 1 connections>"


@pytest.fixture
async def told() -> list[Exception]:
    """The errors that the loop's handler gets."""
    found: list[Exception] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context["exception"]))
    return found


@pytest.mark.parametrize("error", [LookupError("a defect"), OSError(errno.EBUSY, "ibv_dereg_mr")], ids=["any", "EBUSY"])
@pytest.mark.parametrize("method", ["received", "completed", "turn_ended"])
async def test_what_an_owner_raises_is_its_own_end(
    engines: tuple[Engine, Engine], told: list[Exception], method: str, error: Exception
) -> None:
    """A callback of one of three connections fails in a batch: the others get all messages, and nothing is closed."""
    links = [Link(engines) for _ in range(3)]
    links[1].owners[1].raises[method] = error
    for number in range(5):
        for link in links:
            link.send(b"%d" % number)
            link.send(b"%d" % number, back=True)
    await turns(10)
    assert told == links[1].owners[1].defects == [error]
    for link in links:
        assert link.owners[1].messages == link.owners[0].messages == [b"%d" % number for number in range(5)]
        assert len(link.owners[1].completions) == 5
        assert link.owners[1].turns + (link is links[1] and method == "turn_ended") >= 1
    assert [posted(engine) for engine in engines] == [3 * DEPTH] * 2
    assert not any(engine.room for engine in engines)
    links[0].send(b"later")
    await turns(10)
    assert links[0].owners[1].messages[-1] == b"later"


async def test_one_that_cannot_even_end_is_told_nothing_more(
    engines: tuple[Engine, Engine], told: list[Exception]
) -> None:
    links = [Link(engines) for _ in range(2)]
    owner = links[0].owners[1]
    owner.raises = {"received": LookupError("a defect"), "failed": LookupError("another")}
    for link in (*links, *links):
        link.send(b"x")
    await turns(10)
    assert [str(error) for error in told] == ["a defect", "another"]
    assert owner.messages == [b"x"]
    assert links[1].owners[1].messages == [b"x", b"x"]
    assert posted(engines[1]) == 2 * DEPTH


async def test_all_hear_of_a_device_that_failed(
    engines: tuple[Engine, Engine], told: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    links = [Link(engines) for _ in range(3)]
    for link in links:
        link.owners[1].raises["device_failed"] = LookupError("a defect")

    def fail(_: int) -> list[Completion]:
        raise OSError(errno.EIO, "the device is gone")

    monkeypatch.setattr(engines[1].cq, "poll", fail)
    links[0].send(b"x")
    await turns(10)
    assert all(len(link.owners[1].lost) == 2 for link in links)  # one for control, one for bulk
    assert len(told) == 3


@pytest.mark.parametrize("when", ["join", "turn", "give back"])
async def test_receives_that_are_posted_in_part_are_a_failed_device(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The number of posted receives is unknown after that, so the device is given up."""
    with engine_on(fabric, "a", SLOT) as left, engine_on(fabric, "b", SLOT) as right:
        link = Link((left, right))
        link.owners[1].keeps = when == "give back"
        link.send(b"x")
        if when == "give back":
            await turns(10)
        post = right.srq.post_receives

        def some(receives: Sequence[Receive]) -> None:
            post(receives[: len(receives) // 2])
            raise OSError(errno.ENOMEM, "no room")

        monkeypatch.setattr(right.srq, "post_receives", some)
        if when == "join":
            with pytest.raises(OSError, match="has failed"):
                QueuePairs(right, EAGER)
            assert right.connections == 1
        elif when == "give back":
            right.give_back(link.owners[1].slots[0])
        await turns(10)
        assert "has failed" in right.room
        assert {str(error) for error in link.owners[1].lost} == {"[Errno 12] no room"}


async def test_many_connections_that_end_at_once_do_not_hold_up_the_loop(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is beside much memory that stays registered: 50 ms for 244 connections. The watchdog has 500."""
    monkeypatch.setattr(fake, "_is_writable", lambda *_: True)  # the original reads a file for each region
    with engine_on(fabric, "a", SLOT) as engine:
        for number in range(2000):
            engine.device.register((number + 1) << 20, 4096, remote_read=True)
        pairs: list[QueuePairs] = []
        while not engine.room and len(pairs) < 244:
            pairs.append(QueuePairs(engine, EAGER))
        assert len(pairs) == 244
        before = time.thread_time()
        for one in pairs:
            one.close()
        assert time.thread_time() - before < 0.5
        assert engine.connections == 0


async def test_room_for_a_thousand_where_the_device_has_queues_that_long(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "_is_writable", lambda *_: True)
    nic = fabric.add_nic("a")
    nic.attributes = replace(nic.attributes, max_cqe=1 << 22, max_srq_wr=1 << 16)
    with engine_on(fabric, "a", 64) as engine:
        while not engine.room:
            engine.join()
        assert engine.connections >= 1000
        assert f"{engine.connections} connections fill its" in engine.room
        while engine.connections:
            engine.leave()
