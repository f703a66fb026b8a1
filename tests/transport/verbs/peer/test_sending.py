"""The sending half of a control queue pair, against a peer that counts everything."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.conformance.connection import put, send
from tests.transport.verbs.parts import Memory, Wire
from zcactor.errors import ConnectionLost
from zcactor.transport.credits import RESERVED, Credits
from zcactor.transport.frames import LENGTH_PREFIX
from zcactor.transport.stream.record_layer import RECORD_NBYTES, Exporter
from zcactor.transport.verbs.device.slots import BYE, CREDIT, DATA, HEADER_NBYTES, PROBE, SlotArea, read_header
from zcactor.transport.verbs.driver.base import Receive, Send
from zcactor.transport.verbs.driver.codes import CompletionStatus
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.peer.records import Records
from zcactor.transport.verbs.peer.sending import SEND_ID, SIGNAL_EVERY, SlotSender

SLOT = 256
MAX_RESERVE = SLOT - HEADER_NBYTES
DEPTH = 20
"""Messages under way; more than there are from one message that asks for a completion to the next."""
WINDOW = 6
KEY = bytes(range(32))


class Bench:
    """A sender at the left end of a wire, and a peer that has receives for its window and two messages more."""

    def __init__(
        self, *, inline: int = 0, window: int = WINDOW, manual: bool = True, seed: int = 0, sealed: bool = False,
    ) -> None:  # fmt: skip
        depth = window + RESERVED
        self.fabric = FakeFabric(manual=manual, seed=seed)
        self.wire = Wire(self.fabric, max_send_wr=DEPTH + 2, max_inline=inline, receives=depth)
        self.slot = SLOT + (RECORD_NBYTES + 63 & -64 if sealed else 0)
        self.area = SlotArea(self.wire.devices[0], DEPTH + 2, self.slot)
        records, self.opener = ((Records(Exporter(KEY), leads=leads) if sealed else None) for leads in (True, False))
        self.credits = Credits(depth)
        self.woken = 0
        self.failures: list[BaseException] = []
        self.sender = SlotSender(
            self.wire.left, self.area, DEPTH, MAX_RESERVE, self.credits, self._wake, self.failures.append, records,
        )  # fmt: skip
        self.memory = Memory(depth * self.slot)
        self.region = self.wire.devices[1].register(self.memory.address, depth * self.slot, remote_read=False)
        self.window = window
        self.kinds: list[int] = []
        self.frames: list[bytes] = []
        self.expected = 0
        self.owed = 0
        """Messages that the peer has consumed and not reported."""
        self.told = 0
        """Credits that were sent to the peer."""
        for slot in range(depth):
            self._post(slot)

    def _wake(self) -> None:
        self.woken += 1

    def _post(self, slot: int) -> None:
        assert self.wire.srq is not None
        address = self.memory.address + slot * self.slot
        self.wire.srq.post_receives([Receive(slot, address, self.slot, self.region.lkey)])

    def receive(self, limit: int = 1000) -> None:
        """Let the peer take messages, check every byte of them, and consume them."""
        for completion in self.wire.cqs[1].poll(limit):
            assert completion.status == CompletionStatus.SUCCESS
            slot = completion.wr_id
            view = memoryview(ctypes.string_at(self.memory.address + slot * self.slot, completion.byte_len))
            if self.opener is not None:
                view = self.opener.open(view, completion.byte_len)
            kind, credits, nbytes = read_header(view, len(view), self.expected)
            self.expected += 1
            self.told += credits
            self.kinds.append(kind)
            self.owed += kind in (DATA, PROBE)
            assert (nbytes > 0) == (kind == DATA)
            at = HEADER_NBYTES
            while at < len(view):
                (length,) = struct.unpack_from("<I", view, at)
                frame = bytes(view[at + LENGTH_PREFIX : at + LENGTH_PREFIX + length])
                assert len(frame) == length, "a message ends inside a frame"
                self.frames.append(frame)
                at += LENGTH_PREFIX + length
            self._post(slot)

    def acknowledge(self, limit: int = 1000) -> None:
        """Hand on the sender's completions."""
        for completion in self.wire.cq.poll(limit):
            assert completion.status == CompletionStatus.SUCCESS
            self.sender.done(completion.wr_id & ~SEND_ID)

    def give(self, count: int) -> None:
        """Let the peer report that `count` messages were consumed."""
        self.owed -= count
        self.credits.returned(count)
        self.sender.pump()

    def settle(self) -> None:
        """Let every possible step happen."""
        before = (-1, 0, 0)
        while before != (before := (self.sender.messages, self.expected, self.owed)):
            self.fabric.drain()
            self.receive()
            self.acknowledge()
            self.give(self.owed)
            self.sender.return_credits()
        statistics = self.fabric.statistics()
        assert (statistics.rnr, statistics.retries, statistics.failures) == (0, 0, 0)
        assert not self.failures


def frame(number: int, nbytes: int) -> bytes:
    """A frame that differs from all others."""
    return struct.pack("<I", number) + bytes(((number * 7 + 1) % 256,)) * nbytes


class Machine(RuleBasedStateMachine):
    """All possible steps in any order. Frames that were committed and flushed arrive once, whole and in order."""

    def __init__(self) -> None:
        super().__init__()
        self.bench: Bench
        self.committed: list[bytes] = []
        self.flushed = 0
        self.open: bytes | None = None
        self.count = 0
        self.consumed = 0
        self.closing = False

    @initialize(
        inline=st.sampled_from([0, 64, 512]), window=st.integers(1, 10), seed=st.integers(0, 1000),
        sealed=st.booleans(),
    )  # fmt: skip
    def begin(self, inline: int, window: int, seed: int, sealed: bool) -> None:
        self.bench = Bench(inline=inline, window=window, seed=seed, sealed=sealed)

    @precondition(lambda self: self.open is None and not self.closing)
    @rule(nbytes=st.integers(0, MAX_RESERVE - LENGTH_PREFIX - 4), slack=st.integers(0, 30))
    def reserve(self, nbytes: int, slack: int) -> None:
        self.count += 1
        data = frame(self.count, nbytes)
        room = min(LENGTH_PREFIX + len(data) + slack, MAX_RESERVE)
        buffer, offset = self.bench.sender.reserve(room)
        buffer[offset : offset + room] = b"\xdd" * room
        struct.pack_into("<I", buffer, offset, len(data))
        self.place = buffer, offset
        self.open = data

    @precondition(lambda self: self.open is not None)
    @rule()
    def commit(self) -> None:
        assert self.open is not None
        buffer, offset = self.place
        start = offset + LENGTH_PREFIX
        buffer[start : start + len(self.open)] = self.open
        self.bench.sender.commit(LENGTH_PREFIX + len(self.open))
        self.committed.append(self.open)
        self.open = None

    @rule()
    def flush(self) -> None:
        self.open = None  # a reservation without a commit is given up
        self.bench.sender.flush()
        self.flushed = len(self.committed)

    @rule(count=st.integers(1, 40))
    def work(self, count: int) -> None:
        self.bench.fabric.step(count)

    @rule(limit=st.integers(1, 10))
    def receive(self, limit: int) -> None:
        self.bench.receive(limit)

    @rule(limit=st.integers(1, 3))
    def acknowledge(self, limit: int) -> None:
        self.bench.acknowledge(limit)

    @precondition(lambda self: self.bench.owed)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        self.bench.give(data.draw(st.integers(1, self.bench.owed)))

    @rule(data=st.data())
    def incoming(self, data: st.DataObject) -> None:
        """Let the peer send as far as it may; the credits for its messages go back."""
        may = self.bench.window - (self.consumed - self.bench.told)
        count = data.draw(st.integers(0, may))
        self.bench.credits.consumed(count)
        self.consumed += count
        self.bench.sender.return_credits()

    @rule()
    def pump(self) -> None:
        self.bench.sender.pump()

    @precondition(lambda self: self.open is None and not self.closing)
    @rule()
    def say_bye(self) -> None:
        self.closing = True
        self.bench.sender.refuse("closing")
        self.bench.sender.say_bye()
        self.flushed = len(self.committed)

    @invariant()
    def in_order_and_whole(self) -> None:
        if hasattr(self, "bench"):
            frames = self.bench.frames
            assert frames == self.committed[: len(frames)]
            kinds = self.bench.kinds
            assert BYE not in kinds or DATA not in kinds[kinds.index(BYE) :], "frames came behind the last message"

    @invariant()
    def credits_hold(self) -> None:
        if hasattr(self, "bench"):
            bench = self.bench
            assert len(bench.wire.left.work) <= DEPTH + 2
            assert bench.sender.messages - bench.expected <= bench.window + RESERVED
            statistics = bench.fabric.statistics()
            assert (statistics.rnr, statistics.failures) == (0, 0)
            assert not bench.failures

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.open = None
        bench = self.bench
        bench.sender.flush()
        bench.settle()
        assert bench.frames == self.committed
        assert bench.kinds.count(BYE) == self.closing
        assert not bench.sender.pending
        due = bench.window // 2 + 1
        assert self.closing or self.consumed - bench.told < due, "credits that were due have not been sent"


TestMachine = pytest.mark.slow(Machine.TestCase)
TestMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


# ---- messages


def test_frames_of_a_batch_share_a_message() -> None:
    bench = Bench()
    send(bench.sender, [b"a", b"bc", b""])
    assert bench.sender.messages == 1
    bench.settle()
    assert bench.frames == [b"a", b"bc", b""]


@pytest.mark.parametrize("inline", [0, 512])
def test_sealed_messages(inline: int) -> None:
    bench = Bench(sealed=True, inline=inline, window=3)
    frames = [frame(number, number * 7 % (MAX_RESERVE - 20)) for number in range(200)]
    for at, data in enumerate(frames):
        send(bench.sender, [data])
        if at % 5 == 0:
            bench.settle()
    bench.sender.say_bye()
    bench.settle()
    assert bench.frames == frames and bench.kinds[-1] == BYE
    slots = b"".join(bytes(view) for view in bench.area.views)
    assert not any(data[4:] in slots for data in frames if len(data) > 40 and data[4]), "frames are never in a slot"


def test_nothing_leaves_without_flush() -> None:
    bench = Bench()
    put(bench.sender, b"held")
    bench.sender.pump()
    assert bench.sender.pending and bench.sender.messages == 0
    bench.sender.flush()
    bench.sender.flush()
    assert bench.sender.messages == 1


def test_under_pressure_there_are_few_large_messages() -> None:
    bench = Bench()
    for i in range(100):
        send(bench.sender, [b"%d" % i])
    assert bench.sender.messages == WINDOW
    bench.settle()
    assert bench.frames == [b"%d" % i for i in range(100)]
    assert bench.sender.messages < 12


def test_limit() -> None:
    bench = Bench()
    bench.sender.reserve(MAX_RESERVE)
    with pytest.raises(ValueError, match=f"limit is {MAX_RESERVE}"):
        bench.sender.reserve(MAX_RESERVE + 1)
    send(bench.sender, [b"x" * (MAX_RESERVE - LENGTH_PREFIX)])
    bench.settle()
    assert bench.frames == [b"x" * (MAX_RESERVE - LENGTH_PREFIX)]


@pytest.mark.parametrize("inline", [0, 64, 512])
def test_inline_and_signalled(inline: int) -> None:
    bench = Bench(inline=inline, window=40)
    sent: list[Send] = []
    post = bench.wire.left.post_sends

    def note(sends: Sequence[Send]) -> None:
        sent.extend(sends)
        post(sends)

    bench.wire.left.post_sends = note  # type: ignore[method-assign]
    for i in range(100):
        send(bench.sender, [b"x" * (i % 100)])
        bench.settle()
    assert [one.inline for one in sent] == [one.nbytes <= inline for one in sent]
    assert [i for i, one in enumerate(sent, 1) if one.signalled] == list(range(SIGNAL_EVERY, 101, SIGNAL_EVERY))
    assert [one.wr_id for one in sent] == [SEND_ID | i for i in range(100)]


@pytest.mark.parametrize("inline", [0, 512])
def test_slots_are_not_used_while_they_are_sent_from(inline: int) -> None:
    """The device reads a slot as late as it can, and must see the committed bytes."""
    bench = Bench(inline=inline, window=100)
    expected: list[bytes] = []
    for i in range(300):
        expected.append(frame(i, i % 200))
        send(bench.sender, expected[-1:])
        if i % 37 == 36:
            busy = [work.request.address for work in bench.wire.left.work if not work.request.inline]  # type: ignore[union-attr]
            assert len(set(busy)) == len(busy) <= DEPTH
            bench.settle()
    bench.settle()
    assert bench.frames == expected


# ---- credits, probe and goodbye


def test_credits_by_themselves() -> None:
    bench = Bench()
    bench.credits.consumed(3)
    bench.sender.return_credits()
    assert bench.sender.messages == 0, "not more than half of the window"
    bench.credits.consumed(1)
    bench.sender.return_credits()
    bench.sender.return_credits()
    bench.settle()
    assert (bench.kinds, bench.told) == ([CREDIT], 4)


def test_credits_ride_along() -> None:
    bench = Bench()
    bench.credits.consumed(5)
    send(bench.sender, [b"x"])
    bench.sender.return_credits()
    bench.settle()
    assert (bench.kinds, bench.told) == ([DATA], 5)


def test_credits_leave_though_there_is_no_credit() -> None:
    bench = Bench()
    for _ in range(WINDOW + 3):
        send(bench.sender, [b"x" * 200])
    assert bench.sender.messages == WINDOW and bench.credits.available == 0
    bench.credits.consumed(WINDOW)
    bench.sender.return_credits()
    assert bench.sender.messages == WINDOW + 1
    bench.fabric.drain()
    bench.receive()
    assert bench.told == WINDOW and bench.fabric.statistics().rnr == 0


def test_probe() -> None:
    bench = Bench()
    bench.sender.probe()
    assert bench.credits.available == WINDOW - 1
    bench.fabric.drain()
    bench.receive()
    assert bench.kinds == [PROBE]
    bench.acknowledge()
    assert not bench.sender.under_way


def test_probe_fails() -> None:
    bench = Bench()

    def refuse(sends: Sequence[Send]) -> None:
        raise OSError(5, "no")

    bench.wire.left.post_sends = refuse  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no"):
        bench.sender.probe()
    assert not bench.failures


def test_goodbye_goes_last_and_once() -> None:
    bench = Bench()
    for i in range(20):
        send(bench.sender, [b"%d" % i])
    put(bench.sender, b"committed only")
    bench.sender.refuse("closing")
    bench.sender.say_bye()
    assert bench.sender.bye == -1, "frames are waiting"
    bench.sender.say_bye()
    bench.settle()
    assert bench.frames == [*(b"%d" % i for i in range(20)), b"committed only"]
    assert bench.kinds.index(BYE) == len(bench.kinds) - 1 == bench.sender.bye
    bench.sender.say_bye()
    bench.settle()
    assert bench.kinds.count(BYE) == 1
    assert not bench.sender.under_way


# ---- the end


def test_refuse() -> None:
    bench = Bench()
    put(bench.sender, b"before")
    bench.sender.refuse("closing")
    bench.sender.refuse("another reason")
    with pytest.raises(ConnectionLost, match="closing"):
        bench.sender.reserve(10)
    bench.sender.flush()
    bench.settle()
    assert bench.frames == [b"before"]


def test_drop() -> None:
    bench = Bench()
    for i in range(WINDOW + 10):
        send(bench.sender, [b"%03d" % i * 60])
    bench.sender.drop("gone")
    assert not bench.sender.pending
    with pytest.raises(ConnectionLost, match="gone"):
        bench.sender.reserve(10)
    bench.sender.flush()
    bench.sender.say_bye()
    bench.settle()
    assert bench.frames == [b"%03d" % i * 60 for i in range(WINDOW)], "what was posted is the peer's to get"
    assert bench.kinds[-1] == BYE


def test_close() -> None:
    bench = Bench()
    send(bench.sender, [b"x"])
    bench.sender.close("closed")
    with pytest.raises(ConnectionLost, match="closed"):
        bench.sender.reserve(10)
    bench.sender.say_bye()
    bench.sender.pump()
    bench.sender.flush()
    bench.credits.consumed(WINDOW)
    bench.sender.return_credits()
    assert bench.sender.messages == 1


def test_commit_behind_drop_brings_nothing_back() -> None:
    """A thread is encoding a frame while the loop's thread closes the connection."""
    bench = Bench()
    put(bench.sender, b"not flushed")
    buffer, offset = bench.sender.reserve(20)
    bench.sender.drop("gone")
    buffer[offset : offset + 20] = struct.pack("<I16s", 16, b"late")
    with pytest.raises(ConnectionLost, match="gone"):
        bench.sender.commit(20)
    bench.sender.flush()
    bench.sender.say_bye()
    bench.settle()
    assert bench.frames == []


def test_post_fails() -> None:
    bench = Bench()

    def refuse(sends: Sequence[Send]) -> None:
        raise OSError(5, "no")

    bench.wire.left.post_sends = refuse  # type: ignore[method-assign]
    send(bench.sender, [b"x"])
    assert [getattr(error, "errno", None) for error in bench.failures] == [5]
    send(bench.sender, [b"x"])
    bench.sender.pump()
    assert len(bench.failures) == 1


def test_a_signals_handler_raises_while_messages_are_posted() -> None:
    """The caller gets the exception, and the connection ends: nobody knows what was posted."""
    bench = Bench()

    def stop(sends: Sequence[Send]) -> None:
        raise TimeoutError("the handler of SIGALRM")

    bench.wire.left.post_sends = stop  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="SIGALRM"):
        send(bench.sender, [b"x"])
    assert [str(error) for error in bench.failures] == ["the handler of SIGALRM"]


# ---- threads


class Looked:
    """A writer whose first look, when it finds no bytes, is followed by an action of another thread."""

    def __init__(self, writer: Any, then: Callable[[], None]) -> None:
        self._writer = writer
        self._then: Callable[[], None] | None = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    @property
    def pending(self) -> int:
        found: int = self._writer.pending
        if not found and self._then is not None:
            then, self._then = self._then, None
            thread = threading.Thread(target=then)
            thread.start()
            thread.join()
        return found


@pytest.mark.parametrize("sealed", [False, True])
def test_a_flush_just_when_the_sender_finds_nothing_more_is_not_lost(sealed: bool) -> None:
    bench = Bench(sealed=sealed)
    looked = Looked(bench.sender.native, lambda: send(bench.sender, [b"late"]))
    put(bench.sender, b"first")
    bench.sender.native = looked  # type: ignore[assignment]
    bench.sender.flush()
    assert bench.woken == 1
    bench.sender.pump()  # as after the wake-up
    bench.settle()
    assert bench.frames == [b"first", b"late"]


@pytest.mark.parametrize("inline", [0, 512])
def test_several_writers(inline: int) -> None:
    bench = Bench(inline=inline, manual=False)
    lock, done = threading.Lock(), deque[int]()
    each = 300

    def write(writer: int) -> None:
        for i in range(each):
            with lock:
                send(bench.sender, [struct.pack("<II", writer, i) * (i % 20 + 1)])
        done.append(writer)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    while len(done) < len(threads):
        bench.sender.pump()
        bench.receive()
        bench.acknowledge()
        bench.give(bench.owed)
    for thread in threads:
        thread.join()
    assert bench.woken > 0
    bench.sender.flush()
    bench.settle()
    assert len(bench.frames) == 3 * each
    for writer in range(3):
        mine = [each for each in bench.frames if struct.unpack_from("<I", each)[0] == writer]
        assert mine == [struct.pack("<II", writer, i) * (i % 20 + 1) for i in range(each)]
    assert bench.fabric.statistics().rnr == 0
