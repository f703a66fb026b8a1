"""The native part writes and reads the same bytes as the Python codec, and survives any bytes at all."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.ends import MAX_FRAME, PEER, US, End, Waiting
from tests.native.frames import frame
from tests.native.mutants import Feeder
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.marshal.arrays import dtype_code, dtype_from_code, known_codes, known_dtypes
from zcactor.marshal.marshaller import Marshaller
from zcactor.native import hot
from zcactor.objectstore.copies import CopyCounter
from zcactor.objectstore.ref import Region
from zcactor.objectstore.store import Store
from zcactor.rpc.call import CallState
from zcactor.rpc.codec import decode, encode_into, frame_at, frame_size
from zcactor.rpc.messages import Kind, Status

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=300),
    st.binary(max_size=300),
)


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 255), st.integers(0, 255), st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF),
    st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=100), st.integers(0, 70),
    st.lists(st.integers(0, 2**64 - 1), max_size=3),
)  # fmt: skip
def test_writes_any_frame_as_the_python_codec_does(
    kind: int, flags: int, code: int, actor: int, message_id: int, extra: int, payload: bytes, owed: int,
    releases: list[int],
) -> None:  # fmt: skip
    end = End()
    try:
        end.credits.consumed(owed)
        for object_id in releases:
            end.wire.release(object_id)
        before = end.credits.available
        assert end.wire.frame(kind, flags, code, actor, message_id, extra, payload)
        taken = tuple((object_id, 1) for object_id in releases)
        expected = bytearray(frame_size(0, len(taken), len(payload)))
        encode_into(expected, 0, kind, flags, code, owed, actor, message_id, extra, (), taken, payload)
        assert end.sent() == expected
        assert (end.credits.available, end.credits.owed, end.wire.releases) == (before, 0, 0)
        assert (end.counters.frames_sent, end.counters.bytes_eager) == (1, len(payload))
    finally:
        end.close()


@pytest.mark.parametrize(
    "fields",
    [
        (256, 0, 0, 0, 0, 0, b""),
        (1, 256, 0, 0, 0, 0, b""),
        (1, 0, 1 << 16, 0, 0, 0, b""),
        (1, 0, 0, 1 << 32, 0, 0, b""),
        (1, 0, 0, 0, 1 << 64, 0, b""),
        (1, 0, 0, 0, 0, -1, b""),
        (1, 0, 0, 0, 0, 0, bytearray(3)),
        (1, 0, 0, 0, 0, 0, bytes(MAX_FRAME)),
    ],
)
def test_frames_that_python_must_write(end: End, fields: Any) -> None:
    end.credits.consumed(1)
    end.wire.release(7)
    assert not end.wire.frame(*fields)
    assert (end.credits.owed, end.wire.releases, end.counters.frames_sent, end.out.pending) == (1, 1, 0, 0)


def test_frames_of_a_connection_that_is_closed_or_releases_too_much_are_left_to_python(end: End) -> None:
    for object_id in range(65):
        end.wire.release(object_id)
    assert not end.wire.frame(1, 0, 0, 0, 0, 0, b"")
    end.wire.take_releases(1)
    assert end.wire.frame(1, 0, 0, 0, 0, 0, b"")
    end.out.refuse("closed")
    assert not end.wire.frame(1, 0, 0, 0, 0, 0, b"")
    for wrong in ((), (1, 0, 0, 0, 0, b""), (1, 0, 0, 0, 0, 0, b"", 0), ("1", 0, 0, 0, 0, 0, b"")):
        with pytest.raises(TypeError):
            end.wire.frame(*wrong)


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
    sender, receiver = End(process=PEER, peer=US, store=store), End(arena=1 << 22)
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
        ((_, owner, object_id, offset, nbytes, pin, _, _, authenticate),) = fields[7]
        assert (owner, object_id, offset, nbytes, pin) == (PEER, block.id, block.offset + (1 << 15), 1 << 15, 0)
        assert authenticate == 0, "what goes this way belongs to no pickle"
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


def _agree(ours: Any, theirs: Any, *, argument: bool = False) -> None:
    assert type(ours) is np.ndarray and ours.dtype == theirs.dtype and ours.shape == theirs.shape
    np.testing.assert_array_equal(ours, theirs)
    assert ours.flags.writeable is argument


@pytest.mark.parametrize("array", SMALL, ids=[f"{a.dtype}{a.shape}" for a in SMALL])
def test_small_arrays_ride_in_the_frame_as_the_marshaller_writes_them(end: End, array: Any) -> None:
    store = Store(1 << 22, US)
    marshaller = Marshaller(store, CopyCounter(), hot.Counters(), 16384)
    payload, parts, flags = marshaller.pack_call((array, 3), {})
    assert not parts and not flags
    dtype_from_code(dtype_code(array.dtype))  # the dtype is known from here on, as after a first message
    buffer = bytearray(frame_size(0, 0, len(payload)))
    encode_into(buffer, 0, Kind.CALL, 0, 0, 0, 4, 8, 0, (), (), payload)
    end.wire.feed(bytes(buffer))
    ((*_, (received, three)),) = end.calls
    assert three == 3 and end.others == []
    _agree(received, array, argument=True)

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
    end.memory = end.memory.copy()
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


def test_bytes_that_are_in_a_frame_twice_are_mapped_once(end: End) -> None:
    known_dtypes["<f8"] = np.dtype("<f8")
    arrays = [bytes([0xC7, 10, 3, 0x93, i, 0xA3]) + b"<f8" + bytes([0x91, 0xCD, 0x10, 0]) for i in range(3)]
    payload = bytes([0x93]) + b"".join(bytes([a[0], len(a) - 3]) + a[2:] for a in arrays)
    regions = tuple(Region(0, PEER, 9, offset, 32768, 0) for offset in (4096, 4096, 8192))
    buffer = bytearray(frame_size(3, 0, len(payload)))
    encode_into(buffer, 0, Kind.CALL, 0, 1, 0, 1, 1, 0, regions, (), payload)
    end.wire.feed(bytes(buffer))
    ((*_, values),) = end.calls
    assert [array.nbytes for array in values] == [32768] * 3 and len(end.leased) == 3
    assert end.counters.bytes_mapped == 2 * 32768


def test_references_of_pickles_are_pythons_to_read(end: End) -> None:
    known_dtypes["<f8"] = np.dtype("<f8")
    array = bytes([0x91, 0xC7, 11, 3, 0x93, 0, 0xA3]) + b"<f8" + bytes([0x91, 0xCD, 0x10, 0])
    array = array[:2] + bytes([len(array) - 4]) + array[3:]
    for authenticate in (0, 1):
        buffer = bytearray(frame_size(1, 0, len(array)))
        region = Region(0, PEER, 9, 4096, 32768, 0, 0, 0, authenticate)
        encode_into(buffer, 0, Kind.CALL, 0, 1, 0, 1, 1 + authenticate, 0, (region,), (), array)
        end.wire.feed(bytes(buffer))
        assert (len(end.calls), len(end.others)) == (1, authenticate)


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
    return frame(Kind.CALL, call_id, msgspec.msgpack.encode(values), actor=4)


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


@pytest.mark.parametrize("count", [3_000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_mutated_frames_raise_protocol_error_or_stay_in_bounds(count: int) -> None:
    feeder = Feeder(11)
    for _ in range(count):
        feeder.turn()
    feeder.close()
    assert feeder.taken > count // 20
    assert feeder.refused > count // 100
    assert feeder.passed_on > count // 100


def test_a_class_has_one_number_until_it_changes() -> None:
    class Base:
        pass

    class Derived(Base):
        pass

    first = hot.type_version(Derived)
    assert first == hot.type_version(Derived) > 0
    assert hot.type_version(Base) != first
    Base.attribute = 1  # type: ignore[attr-defined]
    second = hot.type_version(Derived)
    assert second not in (0, first)
    del Base.attribute  # type: ignore[attr-defined]
    assert hot.type_version(Derived) not in (0, first, second)
    for wrong in (None, 1, Derived()):
        with pytest.raises(TypeError, match="a class is needed"):
            hot.type_version(wrong)  # type: ignore[arg-type]


def test_a_class_whose_lookup_fails_says_so() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise ZeroDivisionError(name)

    with pytest.raises(ZeroDivisionError, match="__init__"):
        hot.type_version(Meta("Odd", (), {}))


def test_a_call_without_an_answer_is_not_kept(end: End) -> None:
    assert end.wire.tell(1, 2, (7, b"x"), False) and end.out.pending == 0 and not end.pending
    assert end.wire.tell(1, 2, (8,), True) and end.out.pending > 0 and end.events == ["schedule"], "another follows"
    assert end.wire.tell(1, 2, (9,), False) and end.out.pending == 0, "both went together"
    assert end.counters.calls == end.counters.frames_sent == 3
    end.pending[0] = Waiting()
    assert end.wire.tell(1, 2, (), False) and end.out.pending > 0, "with what else is on its way"


def test_calls_without_answers_that_a_batch_causes_leave_together(end: End) -> None:
    class Host:
        def receive_plain(self, session: Any, call_id: int, code: int, timeout_ns: int, args: list[Any]) -> None:
            assert end.wire.tell(1, 2, (call_id,), False)
            unsent.append(end.out.pending)

    unsent: list[int] = []
    end.hosts[4] = Host()
    end.wire.feed(b"".join(_call_frame(i, i) for i in range(1, 4)))
    assert 0 < unsent[0] < unsent[1] < unsent[2] and end.out.pending == 0
    assert len(end.theirs.recv(1 << 20)) == unsent[2]


def test_a_call_without_an_answer_goes_the_other_way_as_others_do(end: End) -> None:
    assert not end.wire.tell(1, 2, ([],), False)
    end.backlog.append("a frame that waits for a credit")
    assert not end.wire.tell(1, 2, (), False)
    with pytest.raises(TypeError, match=r"tell\(actor, code, args, more\)"):
        end.wire.tell(1, 2, ())
    with pytest.raises(OverflowError):
        end.wire.tell(-1, 2, (), False)
    assert end.out.pending == 0 and end.counters.calls == 0


def test_counts_that_no_account_holds_are_refused() -> None:
    credits = hot.Credits(20)
    assert credits.take()
    for count in (sys.maxsize, sys.maxsize - 17, 19):
        with pytest.raises(ProtocolError):
            credits.returned(count)
        with pytest.raises(ProtocolError):
            credits.consumed(count)
    assert (credits.available, credits.owed) == (17, 0)
