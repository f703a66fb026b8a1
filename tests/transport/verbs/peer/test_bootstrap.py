"""Messages of two processes about RDMA: the bounds of every field, any cuts of the stream, and the agreement."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcactor.errors import ProtocolError
from zcactor.transport.verbs.driver.base import MAX_U24, MAX_U32, MAX_U64
from zcactor.transport.verbs.peer.bootstrap import (
    BROUGHT_NBYTES,
    MAX_KEYS,
    MAX_MESSAGE,
    Ask,
    Bring,
    Brought,
    Exported,
    Message,
    Offer,
    PathVerdict,
    PortName,
    Ports,
    QpName,
    Rebuild,
    Rebuilt,
    Resume,
    Tag,
    Tagged,
    agree,
    decode,
    encode,
    split,
)
from zcactor.transport.verbs.peer.tagging import REACH_NBYTES

OFFER = Offer(
    device="mlx5_0", gid=bytes(range(16)), is_global=True, lid=0, mtu=5, max_msg_sz=1 << 30, reads_out=16, reads_in=16,
    control=QpName(1, 2), bulk=QpName(3, 4), depth=64, slot_nbytes=65536, arena_address=1 << 40, seals=(1, 2, 3),
    proof=(4, 5, 6, 7), eager_limit=16384, partition=0xFFFF,
)  # fmt: skip
PORTS = Ports((PortName("mlx5_0", bytes(range(16)), True, 0xFFFF), PortName("mlx5_1", bytes(16), False, 1)))
MESSAGES: list[Message] = [
    PORTS, OFFER, PathVerdict(), PathVerdict("no"), Ask(1, 2, 3, 4), Exported(1, ((2, 3), (4, 0)), 5),
    Exported(1, reason="gone"),
    Bring(1, 2, 3, 1), Bring(1, 2, 3, BROUGHT_NBYTES), Brought(1, bytes(BROUGHT_NBYTES)), Brought(1, reason="gone"),
    Tag(1, 2, 3, 1), Tag(1, 2, 3, REACH_NBYTES), Tagged(1, 2, bytes(2048)), Tagged(1, reason="gone"),
    Rebuild(1, 2), Rebuilt(3, 4), Resume(5),
]  # fmt: skip


def body(**changed: Any) -> bytes:
    """The bytes of an offer with some fields replaced by any values."""
    return msgspec.msgpack.encode({**msgspec.to_builtins(OFFER, builtin_types=(bytes,)), **changed})


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_round_trip(message: Message) -> None:
    data = encode(message)
    assert int.from_bytes(data[:4], "little") == len(data) - 4 <= MAX_MESSAGE
    assert decode(data[4:]) == message
    assert type(decode(data[4:])) is type(message)


BOUNDS: dict[str, tuple[Any, Any]] = {
    "lid": (0, 65535),
    "mtu": (1, 5),
    "max_msg_sz": (1, MAX_U32),
    "reads_out": (1, MAX_U32),
    "reads_in": (1, MAX_U32),
    "depth": (4, 4096),
    "slot_nbytes": (256, 1 << 21),
    "arena_address": (0, MAX_U64),
    "eager_limit": (64, 1 << 20),
    "partition": (0, 0xFFFF),
}


@pytest.mark.parametrize("field", BOUNDS)
def test_bounds_of_an_offer(field: str) -> None:
    low, high = BOUNDS[field]
    for value in (low, high):
        assert getattr(decode(body(**{field: value})), field) == value
    for value in (low - 1, high + 1, float(low), str(low), None, True, [low]):
        if isinstance(value, int) and value > MAX_U64:
            continue  # MessagePack has no such number
        with pytest.raises(ProtocolError, match="makes no sense"):
            decode(body(**{field: value}))


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("control", [[0, 0], [MAX_U24, MAX_U24]], [[-1, 0], [MAX_U24 + 1, 0], [0, MAX_U24 + 1], [1], [1, 2, 3], 1]),
        ("bulk", [[0, 0], [MAX_U24, MAX_U24]], [[-1, 0], [MAX_U24 + 1, 0], [0, MAX_U24 + 1], [], [1, 2, 3], None]),
        ("seals", [[0, 0, 0], [MAX_U64, MAX_U32, MAX_U32]], [[-1, 0, 0], [0, 2**32, 0], [0, 0, 2**32], [0, 0]]),
        ("proof", [[0] * 4, [MAX_U64, *[MAX_U32] * 3]], [[0, 2**32, 0, 0], [0, 0, 2**32, 0], [0, 0, 0, -1], [0] * 5]),
        ("gid", [bytes(16)], [bytes(15), bytes(17), b"", 3, "a" * 16]),
        ("device", ["", "x" * 1000], ["x" * 1001, b"x", 5]),
        ("is_global", [True, False], [0, 1, None, "yes"]),
    ],
)  # fmt: skip
def test_shapes_of_an_offer(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        decode(body(**{field: value}))
    for value in bad:
        with pytest.raises(ProtocolError):
            decode(body(**{field: value}))


def test_every_field_of_an_offer_is_needed() -> None:
    whole = msgspec.msgpack.decode(body())
    for field in whole:
        with pytest.raises(ProtocolError):
            decode(msgspec.msgpack.encode({key: value for key, value in whole.items() if key != field}))


@pytest.mark.parametrize(
    ("tag", "fields", "bounds"),
    [
        ("ask", {"number": 1, "object_id": 2, "offset": 3, "nbytes": 4},
         {"number": MAX_U32, "object_id": MAX_U64, "offset": MAX_U64, "nbytes": MAX_U64}),
        ("exported", {"number": 1, "seal": 3}, {"number": MAX_U32, "seal": 65535}),
        ("tagged", {"number": 1, "first": 2}, {"number": MAX_U32, "first": (1 << 62) - 1}),
        ("rebuild", {"generation": 1, "psn": 2}, {"generation": MAX_U32, "psn": MAX_U24}),
        ("rebuilt", {"generation": 1, "psn": 2}, {"generation": MAX_U32, "psn": MAX_U24}),
        ("resume", {"generation": 1}, {"generation": MAX_U32}),
    ],
)  # fmt: skip
def test_bounds_of_the_others(tag: str, fields: dict[str, int], bounds: dict[str, int]) -> None:
    def message(**changed: Any) -> bytes:
        return msgspec.msgpack.encode({"type": tag, **fields, **changed})

    decode(message())
    for name, high in bounds.items():
        decode(message(**{name: 0}))
        decode(message(**{name: high}))
        bad = [-1, 0.5, "1", None, *([high + 1] if high < MAX_U64 else [])]
        for value in bad:
            with pytest.raises(ProtocolError):
                decode(message(**{name: value}))
    with pytest.raises(ProtocolError):
        decode(message(more=1))


def test_bounds_of_keys() -> None:
    most = Exported(MAX_U32, ((MAX_U32, MAX_U32),) * MAX_KEYS, 65535)
    body = encode(most)[4:]
    assert decode(body) == most
    assert len(body) < (MAX_MESSAGE - BROUGHT_NBYTES) / 2
    wrong: list[Any] = [1, [1], [[1]], [[0, 1]], [[1, -1]], [[1 << 32, 1]], [[1, 1 << 32]], [[1, 1]] * (MAX_KEYS + 1)]
    for keys in wrong:
        with pytest.raises(ProtocolError):
            decode(msgspec.msgpack.encode({"type": "exported", "number": 1, "keys": keys}))


@pytest.mark.parametrize(
    "changed", [{"nbytes": 0}, {"nbytes": REACH_NBYTES + 1}, {"offset": -1}, {"object_id": -1}, {"number": -1}]
)
def test_bounds_of_a_question_about_tags(changed: dict[str, int]) -> None:
    fields = {"type": "tag", "number": MAX_U32, "object_id": MAX_U64, "offset": MAX_U64, "nbytes": REACH_NBYTES}
    decode(msgspec.msgpack.encode(fields))
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode({**fields, **changed}))
    with pytest.raises(ProtocolError):
        decode(encode(Tagged(1, 2, bytes(2049)))[4:])


@pytest.mark.parametrize(
    "wrong",
    [
        Bring(1, 2, 3, 0), Bring(1, 2, 3, BROUGHT_NBYTES + 1), Bring(1, -1, 3, 1),
        Brought(1, bytes(BROUGHT_NBYTES + 1)), Brought(-1), Brought(1, reason="x" * 1001),
    ],
    ids=range(6),
)  # fmt: skip
def test_bounds_of_bytes_that_are_brought(wrong: Message) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(wrong)[4:])


def test_reasons_are_bounded() -> None:
    assert decode(encode(PathVerdict("é" * 1000))[4:]) == PathVerdict("é" * 1000)
    for message in (PathVerdict("x" * 1001), Exported(1, reason="x" * 1001)):
        with pytest.raises(ProtocolError):
            decode(encode(message)[4:])


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "other"}), msgspec.msgpack.encode({"type": 1}),
             msgspec.msgpack.encode(5), msgspec.msgpack.encode([1, 2]), body(type="verdict"), body(unknown=1),
             body() + b"\x00"],
)  # fmt: skip
def test_no_message(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="makes no sense"):
        decode(data)


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_truncated(message: Message) -> None:
    data = encode(message)[4:]
    for end in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:end])


@given(st.binary(max_size=64))
def test_rubbish_raises_nothing_else(data: bytes) -> None:
    try:
        decode(data)
    except ProtocolError:
        pass


@given(st.integers(0, len(body()) - 1), st.integers(0, 255))
def test_a_changed_byte_raises_nothing_else(at: int, byte: int) -> None:
    data = bytearray(body())
    data[at] = byte
    try:
        decode(data)
    except ProtocolError:
        pass


@pytest.mark.slow
def test_split_at_every_byte() -> None:
    stream = b"".join(map(encode, MESSAGES))
    for cut in range(len(stream) + 1):
        buffer = bytearray(stream[:cut])
        found = split(buffer)
        assert found == MESSAGES[: len(found)]
        assert len(buffer) == cut - sum(len(encode(message)) for message in found)
        buffer += stream[cut:]
        assert found + split(buffer) == MESSAGES
        assert not buffer


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.data())
def test_split_however_it_is_cut(messages: list[Message], data: st.DataObject) -> None:
    stream, buffer, found = b"".join(map(encode, messages)), bytearray(), []
    while stream:
        count = data.draw(st.integers(1, len(stream)))
        buffer += stream[:count]
        stream = stream[count:]
        found += split(buffer)
    assert found == messages and not buffer


def test_split_refuses_long_ones_before_they_come() -> None:
    length = (MAX_MESSAGE + 1).to_bytes(4, "little")
    assert split(bytearray(length[:3])) == []
    with pytest.raises(ProtocolError, match=f"announced a message of {MAX_MESSAGE + 1} bytes"):
        split(bytearray(length))
    assert split(bytearray(MAX_MESSAGE.to_bytes(4, "little"))) == []


def test_split_meets_rubbish() -> None:
    for data in (bytes(4), b"\x01\x00\x00\x00\xc1"):
        with pytest.raises(ProtocolError):
            split(bytearray(encode(Resume(1)) + data))


NUMBERS = {"mtu": (1, 5), "max_msg_sz": (1, MAX_U32), "depth": (4, 4096), "slot_nbytes": (256, 1 << 21),
           "eager_limit": (64, 1 << 20), "reads_out": (1, 128), "reads_in": (1, 128)}  # fmt: skip
offers = st.fixed_dictionaries({name: st.integers(*bounds) for name, bounds in NUMBERS.items()}).map(
    lambda numbers: msgspec.structs.replace(OFFER, **numbers)
)


@pytest.mark.slow
@given(offers, offers)
def test_agreement_is_the_minimum_and_the_same_at_both_ends(left: Offer, right: Offer) -> None:
    ours, theirs = agree(left, right), agree(right, left)
    for name in ("mtu", "max_msg_sz", "depth", "slot_nbytes", "eager_limit"):
        assert getattr(ours, name) == getattr(theirs, name) == min(getattr(left, name), getattr(right, name))
    assert ours.reads_out == theirs.reads_in <= min(left.reads_out, right.reads_in)
    assert ours.reads_in == theirs.reads_out <= min(left.reads_in, right.reads_out)


def test_different_fabrics() -> None:
    other = msgspec.structs.replace(OFFER, is_global=False, device="ib0")
    for ours, theirs in ((OFFER, other), (other, OFFER)):
        with pytest.raises(ProtocolError, match="different fabrics"):
            agree(ours, theirs)
