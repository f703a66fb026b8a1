"""The native part gives and takes the same bytes as the Python codec, and survives any bytes at all."""

from __future__ import annotations

import contextlib
import math
import random
import socket
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.marshal.arrays import dtype_code, dtype_from_code, known_codes, known_dtypes
from zcactor.marshal.marshaller import Marshaller
from zcactor.native import hot
from zcactor.objectstore.copies import CopyCounter
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import Region
from zcactor.objectstore.store import Block, Store
from zcactor.objectstore.table import LeaseTable
from zcactor.rpc.codec import TEMPLATE, decode, encode_into, frame_at, frame_size
from zcactor.rpc.counters import Counters
from zcactor.rpc.messages import Kind, Status
from zcactor.rpc.protocol import CallState
from zcactor.transport.credits import Credits

pytestmark = pytest.mark.skipif(hot is None, reason="the native part was not built, or ZCACTOR_NATIVE=0")

MAX_FRAME = 32768
US, PEER = b"u" * 16, b"p" * 16
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=300),
    st.binary(max_size=300),
)


class Waiting:
    """Stands for a call that waits."""

    def __init__(self) -> None:
        self.value: Any = None
        self.count = 0
        self.id = 0
        self.session: Any = None
        self.state: Any = None

    def complete_plain(self, value: Any) -> None:
        self.value = value
        self.count += 1


class End:
    """A `Wire` whose sent bytes are read back from a socket."""

    def __init__(self, process: bytes = US, peer: bytes = PEER, arena: int = 1 << 20, depth: int = 1024) -> None:
        if hot is not None:
            hot.setup(TEMPLATE, ProtocolError, ConnectionLost, CallState.QUEUED, CallState.SENT)
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.setblocking(False)
        self.out = hot.SendBuffer(MAX_FRAME + 4, self.ours.fileno())
        self.credits = hot.Credits(depth)
        self.leases = LeaseTable()
        self.pending: dict[int, Any] = {}
        self.counters = hot.Counters()
        self.open: dict[int, Any] = {}
        self.backlog: list[Any] = []
        self.hosts: dict[int, Any] = {}
        self.events: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.others: list[tuple[Any, ...]] = []
        self.leased: list[tuple[int, int, int]] = []
        self.released: list[int] = []
        self.memory = np.arange(arena, dtype=np.uint8)
        given = {
            "leases": self.leases, "pending": self.pending, "open": self.open, "backlog": self.backlog,
            "hosts": self.hosts, "session": self, "make_lease": self.lease,
            "on_call": lambda *a: self.calls.append(a), "on_other": self.other,
            "on_batch": lambda: self.events.append("batch"), "on_blocked": lambda: self.events.append("blocked"),
            "on_broken": lambda error: self.events.append(type(error).__name__),
            "schedule_flush": lambda: self.events.append("schedule"), "share": self.share, "block_type": Block,
            "codes": known_codes, "dtypes": known_dtypes,
        }  # fmt: skip
        self.wire = hot.Wire(self.out, self.credits, self.counters, process, peer, 16384, MAX_FRAME, arena, given)

    def share(self, array: Any, address: int, nbytes: int) -> None:
        self.events.append("share")

    def call(self, actor: int, code: int, *args: Any) -> bool:
        """Write a call, and keep it in the buffer: another is open, so it is not flushed."""
        self.pending.setdefault(0, Waiting())
        sent: bool = self.wire.call(Waiting(), actor, code, args)
        return sent

    def result(self, call_id: int, value: Any) -> bool:
        self.open[call_id] = Waiting()
        self.open.setdefault(0, Waiting())
        done: bool = self.wire.respond(call_id, value, False)
        return done

    def lease(self, object_id: int, offset: int, nbytes: int) -> Lease:
        self.leased.append((object_id, offset, nbytes))
        address = self.memory.__array_interface__["data"][0] + offset
        return Lease(PEER, object_id, offset, nbytes, address, self.memory, self.released.append)

    def other(self, data: bytes, at: int, total: int) -> int:
        start, end = frame_at(data, at, total, MAX_FRAME)
        self.others.append(decode(data, start, end))
        return end

    def sent(self) -> bytes:
        self.out.flush()
        return self.theirs.recv(1 << 20)

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def end() -> Any:
    made = End()
    yield made
    made.close()


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


@settings(max_examples=300, deadline=None)
@given(st.lists(plain, max_size=15))
def test_calls_read_as_the_python_codec_reads_them(values: list[Any]) -> None:
    end = End()
    try:
        assert end.call(7, 3, *values)
        frame = end.sent()
        start, stop = frame_at(frame, 0, len(frame), MAX_FRAME)
        kind, flags, code, credits, actor, call, extra, regions, releases, low, high = decode(frame, start, stop)
        assert (kind, flags, code, credits, actor, call, extra, regions, releases) == (
            Kind.CALL,
            0,
            3,
            0,
            7,
            1,
            0,
            (),
            (),
        )
        assert high - low == end.counters.bytes_eager
        read = msgspec.msgpack.decode(frame[low:high])
        assert len(read) == len(values) and all(map(same, read, values))
        assert len(frame) % 8 == 0
    finally:
        end.close()


@settings(max_examples=300, deadline=None)
@given(plain)
def test_results_read_as_the_python_codec_reads_them(value: Any) -> None:
    end = End()
    try:
        assert end.result(5, value)
        frame = end.sent()
        fields = decode(frame, *frame_at(frame, 0, len(frame), MAX_FRAME))
        assert fields[:7] == (Kind.RESPONSE, 0, Status.OK, 0, 0, 5, 0)
        assert same(msgspec.msgpack.decode(frame[fields[9] : fields[10]]), value)
    finally:
        end.close()


@settings(max_examples=300, deadline=None)
@given(st.lists(plain, max_size=15), plain)
def test_reads_what_the_python_codec_writes(values: list[Any], result: Any) -> None:
    end = End()
    try:
        call = end.pending[8] = Waiting()
        batch = b""
        for kind, payload in (
            (Kind.CALL, msgspec.msgpack.encode(values)),
            (Kind.RESPONSE, msgspec.msgpack.encode(result)),
        ):
            buffer = bytearray(frame_size(0, 0, len(payload)))
            encode_into(buffer, 0, kind, 0, 0, 0, 4, 8, 77 if kind is Kind.CALL else 0, (), (), payload)
            batch += bytes(buffer)
        end.wire.feed(batch)
        assert end.counters.frames_received == 2
        ((actor, call_id, code, timeout, read),) = end.calls
        assert (call_id, actor, code, timeout) == (8, 4, 0, 77)
        assert len(read) == len(values) and all(map(same, read, values))
        assert call.count == 1 and same(call.value, result) and not end.pending
        assert end.credits.owed == 2
    finally:
        end.close()


@pytest.mark.parametrize(
    "value", [1 << 64, -(1 << 63) - 1, "\ud800", [1], (1,), {}, 1j, np.float64(1), "x" * 20000, object()]
)
def test_leaves_to_python_what_is_not_plain(end: End, value: Any) -> None:
    assert not end.call(1, 1, value)
    assert not end.result(1, value)
    assert end.credits.available == end.credits.window
    assert end.out.pending == 0


def test_writes_nothing_without_a_credit() -> None:
    end = End(depth=4)
    try:
        assert end.call(1, 1) and end.call(1, 1)
        assert not end.call(1, 1)
    finally:
        end.close()


def test_an_array_shared_before_goes_by_reference_and_arrives_in_place() -> None:
    store = Store(1 << 22, PEER)
    block = store.allocate(1 << 16)
    root = np.asarray(block)
    array = root.view(np.float32).reshape(128, 128)
    array[:] = 3
    sender, receiver = End(process=PEER, peer=US), End(arena=1 << 22)
    try:
        assert not sender.call(1, 1, array), "not sealed yet: Python shares it"
        store.seal(block, root)
        array.setflags(write=False)
        store.export(block)
        dtype_code(array.dtype)
        known_dtypes[known_codes[array.dtype]] = array.dtype
        sender.wire.release(4711)
        assert sender.call(1, 2, 5, array[64:], "x")
        frame = sender.sent()
        assert sender.leases.get(block.id) is block and sender.leases.total == 1
        fields = decode(frame, *frame_at(frame, 0, len(frame), MAX_FRAME))
        ((_, owner, object_id, offset, nbytes, pin, _, _),) = fields[7]
        assert (owner, object_id, offset, nbytes, pin) == (PEER, block.id, block.offset + (1 << 15), 1 << 15, 0)
        assert fields[8] == ((4711, 1),) and sender.wire.releases == 0
        receiver.leases.grant(4711, object())
        receiver.wire.feed(frame)
        assert receiver.counters.frames_received == 1
        assert receiver.leases.total == 0
        ((*_, (five, received, text)),) = receiver.calls
        assert (five, text) == (5, "x")
        assert received.shape == (64, 128) and received.dtype == np.float32 and not received.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            received.flags.writeable = True
        assert receiver.leased == [(block.id, offset, nbytes)] and receiver.released == []
        receiver.calls.clear()
        del received
        assert receiver.released == [block.id]
    finally:
        sender.close()
        receiver.close()


SMALL = [
    np.arange(10.0),
    np.arange(24, dtype="<i4").reshape(2, 3, 4),
    np.array(7.5),
    np.zeros((0, 3), "u1"),
    np.arange(200, dtype=">f4"),
    np.array(["2026-11-21", "NaT"], "datetime64[D]"),
    np.ones(2000),
    np.ones((1,) * 8, bool),
]


def _agree(ours: Any, theirs: Any) -> None:
    assert type(ours) is np.ndarray and ours.dtype == theirs.dtype and ours.shape == theirs.shape
    np.testing.assert_array_equal(ours, theirs)
    assert not ours.flags.writeable


@pytest.mark.parametrize("array", SMALL, ids=[f"{a.dtype}{a.shape}" for a in SMALL])
def test_small_arrays_ride_in_the_frame_as_the_marshaller_writes_them(end: End, array: Any) -> None:
    store = Store(1 << 22, US)
    marshaller = Marshaller(store, CopyCounter(), Counters(), 16384)
    payload, parts, flags = marshaller.pack_call((array, 3), {})
    assert not parts and not flags
    dtype_from_code(dtype_code(array.dtype))  # known from here on, as after a first message
    buffer = bytearray(frame_size(0, 0, len(payload)))
    encode_into(buffer, 0, Kind.CALL, 0, 0, 0, 4, 8, 0, (), (), payload)
    end.wire.feed(bytes(buffer))
    ((*_, (received, three)),) = end.calls
    assert three == 3 and end.others == []
    _agree(received, array)

    assert end.call(1, 2, array, "x")
    frame = end.sent()
    fields = decode(frame, *frame_at(frame, 0, len(frame), MAX_FRAME))
    first, second = marshaller.unpack(frame[fields[9] : fields[10]], (), 0)
    assert second == "x"
    _agree(first, array)

    waiting = end.pending[77] = Waiting()
    payload, parts, flags = marshaller.pack(array)
    buffer = bytearray(frame_size(0, 0, len(payload)))
    encode_into(buffer, 0, Kind.RESPONSE, 0, 0, 0, 0, 77, 0, (), (), payload)
    end.wire.feed(bytes(buffer))
    _agree(waiting.value, array)


def test_an_array_as_a_result_arrives_in_place(end: End) -> None:
    known_dtypes["<f8"] = np.dtype("<f8")
    end.memory[4096 : 4096 + 32768].view("f8")[:] = 5
    array = bytes([0xC7, 14, 3, 0x93, 0, 0xA3]) + b"<f8" + bytes([0x91, 0xCF]) + (4096).to_bytes(8, "big")
    array = array[:1] + bytes([len(array) - 3]) + array[2:]
    region = Region(0, PEER, 9, 4096, 32768, 0)
    buffer = bytearray(frame_size(1, 0, len(array)))
    encode_into(buffer, 0, Kind.RESPONSE, 0, 0, 0, 0, 5, 0, (region,), (), array)
    with contextlib.suppress(ProtocolError):
        end.wire.feed(bytes(buffer))
    assert end.leased == [], "nobody waits for it: no lease is taken"
    waiting = end.pending[5] = Waiting()
    end.wire.feed(bytes(buffer))
    assert waiting.count == 1 and waiting.value.shape == (4096,) and (waiting.value == 5).all()
    assert not waiting.value.flags.writeable and end.leased == [(9, 4096, 32768)]
    waiting.value = None
    assert end.released == [9]


def test_credits_are_those_of_the_pure_class() -> None:
    rng = random.Random(5)
    native, pure = hot.Credits(20), Credits(20)
    for _ in range(5000):
        name, argument = rng.choice(
            [("take", None), ("returned", rng.randrange(6)), ("consumed", 1), ("take_owed", None)]
        )
        outcomes = []
        for one in (native, pure):
            method = getattr(one, name)
            try:
                outcomes.append(method() if argument is None else method(argument))
            except ProtocolError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        assert (native.available, native.owed, native.due) == (pure.available, pure.owed, pure.due)


def test_send_buffer_keeps_order_over_a_full_socket(end: End) -> None:
    expected = bytearray()
    received = bytearray()
    blocked = False
    for number in range(4000):
        piece = bytes([number % 251]) * (number % 700 + 1)
        buffer, offset = end.out.reserve(len(piece))
        buffer[offset : offset + len(piece)] = piece
        end.out.commit(len(piece))
        expected += piece
        blocked = end.out.flush() or blocked
        if number % 900 == 899:
            received += end.theirs.recv(1 << 16)
            end.out.resume()
    assert blocked
    while len(received) < len(expected):
        received += end.theirs.recv(1 << 20)
        end.out.resume()
    assert received == expected and end.out.pending == 0


def test_send_buffer_refuses(end: End) -> None:
    with pytest.raises(ValueError, match="too large"):
        end.out.reserve(MAX_FRAME + 5)
    end.out.refuse("closed here")
    with pytest.raises(ConnectionLost, match="closed here"):
        end.out.reserve(8)
    assert not end.call(1, 1)


def test_a_call_alone_is_sent_at_once_and_others_at_the_end_of_the_turn(end: End) -> None:
    first = Waiting()
    assert end.wire.call(first, 1, 1, ()) and end.out.pending == 0 and end.events == []
    assert (first.id, first.session, first.state) == (1, end, CallState.SENT)
    assert end.wire.call(Waiting(), 1, 1, ()) and end.wire.call(Waiting(), 1, 1, ())
    assert end.out.pending > 0 and end.events == ["schedule"], "asked for once"
    assert end.counters.calls == end.counters.frames_sent == 3
    assert end.wire.next_id() == 4


def test_a_call_that_goes_the_other_way_is_as_it_was(end: End) -> None:
    call = Waiting()
    assert not end.wire.call(call, 1, 1, ([],))
    assert not end.pending and call.state is CallState.QUEUED
    end.backlog.append("a frame that waits for a credit")
    assert not end.call(1, 1), "nothing overtakes it"
    assert not end.result(5, None) and 5 in end.open


def test_a_call_is_answered_once(end: End) -> None:
    assert end.result(5, "x") and 5 not in end.open
    sent = end.counters.frames_sent
    assert end.wire.respond(5, "y", False) and end.counters.frames_sent == sent


def _call_frame(call_id: int, *values: Any) -> bytes:
    payload = msgspec.msgpack.encode(values)
    buffer = bytearray(frame_size(0, 0, len(payload)))
    encode_into(buffer, 0, Kind.CALL, 0, 0, 0, 4, call_id, 0, (), (), payload)
    return bytes(buffer)


def test_a_call_goes_to_its_host_and_what_answers_a_batch_leaves_together(end: End) -> None:
    class Host:
        def receive_plain(self, session: Any, call_id: int, code: int, timeout_ns: int, args: list[Any]) -> None:
            assert (session, code, timeout_ns) == (end, 0, 0)
            end.open[call_id] = self
            assert end.wire.respond(call_id, args[0], False)
            unsent.append(end.out.pending)

    unsent: list[int] = []
    end.hosts[4] = Host()
    end.wire.feed(b"".join(_call_frame(i, i) for i in range(1, 4)))
    assert 0 < unsent[0] < unsent[1] < unsent[2] and end.out.pending == 0 and not end.open
    received = end.sent() if end.out.pending else end.theirs.recv(1 << 20)
    assert len(received) == unsent[2]
    end.wire.feed(_call_frame(9, 1))
    assert len(unsent) == 4 and end.events == []


def test_a_batch_that_uses_up_the_window_asks_for_credits() -> None:
    end = End(depth=6)
    try:
        end.wire.feed(b"".join(_call_frame(i) for i in range(1, 4)))
        assert end.credits.due and end.events == ["batch"]
    finally:
        end.close()


class Reading:
    """A native reader at one end of a socket pair."""

    def __init__(self, end: End, wire: Any = None) -> None:
        self.taken: list[bytes] = []
        self.ended: list[tuple[Any, bool]] = []
        self.defect: Exception | None = None
        self.reader = hot.Reader(
            end.ours.fileno(), MAX_FRAME + 4, MAX_FRAME, wire, self.deliver, lambda *a: self.ended.append(a)
        )
        self.send = end.theirs.send

    def deliver(self, data: memoryview) -> None:
        if self.defect is not None:
            raise self.defect
        self.taken.append(bytes(data))


def test_a_reader_delivers_whole_frames_only(end: End) -> None:
    reading = Reading(end)
    assert not reading.reader.readable(), "nothing is there"
    first, second = _call_frame(1, "a" * 50), _call_frame(2)
    reading.send(first + second[:30])
    assert reading.reader.readable() and reading.taken == [first]
    reading.send(second[30:])
    assert reading.reader.readable() and reading.taken == [first, second] and reading.ended == []
    direct = Reading(end, end.wire)
    direct.send(first)
    assert direct.reader.readable() and direct.taken == [] and end.calls == [(4, 1, 0, 0, ["a" * 50])]


def test_a_reader_tells_how_it_ended(end: End) -> None:
    reading = Reading(end)
    reading.send(_call_frame(1) + (MAX_FRAME + 1).to_bytes(4, "little"))
    assert not reading.reader.readable() and reading.taken == [_call_frame(1)]
    ((error, from_receiver),) = reading.ended
    assert isinstance(error, ProtocolError) and str(MAX_FRAME + 1) in str(error) and from_receiver

    failing = Reading(end)
    failing.defect = OSError("not of the socket")
    failing.send(_call_frame(1))
    assert not failing.reader.readable() and failing.ended == [(failing.defect, True)]

    ending = Reading(end)
    end.theirs.close()
    assert not ending.reader.readable() and ending.ended == [(None, False)]
    ending.reader.close()
    assert not ending.reader.readable() and len(ending.ended) == 1


def _mutants(seed: int, count: int) -> Any:
    rng = random.Random(seed)
    pool: list[bytes] = []
    for values in ([], [1, 2.5], ["abc", None, True], [b"x" * 300, -5, 1 << 40]):
        payload = msgspec.msgpack.encode(values)
        for regions in ((), (Region(0, PEER, 9, 4096, 64, 0),)):
            buffer = bytearray(frame_size(len(regions), 1, len(payload)))
            encode_into(buffer, 0, 1, 0, 0, 0, 2, 1, 0, regions, ((3, 1),), payload)
            pool.append(bytes(buffer))
    array = bytes([0x91, 0xC7, 14, 3, 0x93, 0, 0xA3]) + b"<f8" + bytes([0x91, 0xCF]) + (8).to_bytes(8, "big")
    array = array[:2] + bytes([len(array) - 4]) + array[3:]
    buffer = bytearray(frame_size(1, 0, len(array)))
    encode_into(buffer, 0, 1, 0, 0, 0, 2, 1, 0, (Region(0, PEER, 9, 4096, 64, 0),), (), array)
    pool += [bytes(buffer)] * 6
    for _ in range(count):
        frame = bytearray(rng.choice(pool))
        for _ in range(rng.randrange(1, 5)):
            frame[rng.randrange(4, len(frame))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        if rng.random() < 0.2:
            frame = frame[: rng.randrange(4, len(frame))]
            frame[:4] = (len(frame) - 4).to_bytes(4, "little")
        yield bytes(frame) if rng.random() < 0.95 else rng.randbytes(rng.randrange(1, 200))


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_frames_raise_protocol_error_or_stay_in_bounds(count: int) -> None:
    known_dtypes["<f8"] = np.dtype("<f8")
    taken = refused = 0
    end = End()
    try:
        for frame in _mutants(11, count):
            for object_id in (3,):
                end.leases.grant(object_id, None)
            end.credits.take_owed()
            end.leased.clear()
            before = end.counters.frames_received
            try:
                end.wire.feed(frame)
                taken += end.counters.frames_received - before
            except ProtocolError:
                refused += 1
            for _, offset, nbytes in end.leased:
                assert 0 <= offset <= offset + nbytes <= 1 << 20
            for *_, arguments in end.calls:
                for value in arguments:
                    if isinstance(value, np.ndarray):
                        assert value.nbytes <= 1 << 20
                        value.tobytes()
            end.calls.clear()
            end.others.clear()
            end.leases.clear()
    finally:
        end.close()
    assert taken > count // 100 and refused > count // 100
