"""Each rule of the verifier, broken one at a time."""

from __future__ import annotations

import tracemalloc
from struct import pack_into

import pytest

from zcactor.errors import ProtocolError
from zcactor.objectstore.ref import Region
from zcactor.rpc import codec, generic
from zcactor.rpc.messages import Hello, Kind
from zcactor.rpc.verify import MAX_KIND, MIN_FRAME, check_words, verify_frame

HUGE = [2**31 - 1, 2**31, 2**32 - 1]


def frame() -> bytearray:
    """A frame with one region, one release and four bytes of payload, laid out by the template: 216 bytes."""
    data = bytearray(codec.frame_size(1, 1, 4))
    region = Region(0, bytes(16), 1, 2, 3, 0)
    codec.encode_into(data, 0, Kind.CALL, 0, 1, 2, 3, 4, 5, (region,), ((6, 1),), b"abcd")
    return data


def refuse(data: bytearray, message: str) -> None:
    """Check that both readers refuse the frame with the same kind of error, and allocate next to nothing for it."""
    for decode in (codec.decode, generic.decode):
        peaks = []
        for _ in range(3):  # memory is traced for the whole process: other threads and finalizers only ever add to it
            tracemalloc.start()
            try:
                with pytest.raises(ProtocolError, match=message):
                    decode(data, 4, len(data))
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
        assert min(peaks) < len(data) + 32768


def test_valid_frame_tells_where_its_vectors_are() -> None:
    layout = verify_frame(frame(), 4, len(frame()))
    assert layout == (88, 1, 152, 1, 172, 176)


@pytest.mark.parametrize("length", [0, 1, 4, 8, MIN_FRAME - 1])
def test_too_short(length: int) -> None:
    refuse(frame()[: 4 + length], f"has {length} bytes; the smallest has {MIN_FRAME}")


@pytest.mark.parametrize("value", [2, 128, 255])
def test_wrong_word_of_authentication(value: int) -> None:
    data = frame()
    data[88 + 49] = value
    refuse(data, f"region of object 1 says {value} of authentication; 0 and 1 are known")


def test_wrong_identifier() -> None:
    data = frame()
    data[8:12] = b"HTTP"
    refuse(data, "identifier b'HTTP' at offset 4; b'ZCA1'")


@pytest.mark.parametrize(
    ("value", "message"), [(0, "points at itself"), (38, "not aligned"), (216, "outside the frame")]
)
def test_wrong_root(value: int, message: str) -> None:
    data = frame()
    pack_into("<I", data, 4, value)
    refuse(data, message)


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("at", [4, 44, 48, 52])
def test_huge_offset(at: int, value: int) -> None:
    data = frame()
    pack_into("<I", data, at, value)
    refuse(data, "outside the frame")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (12, 0, "vtable of Frame has size 0"),
        (12, 3, "vtable of Frame has size 3"),
        (12, 5, "vtable of Frame has size 5"),
        (12, 0xFFFE, "vtable of Frame is 65534 bytes"),
        (14, 0, "table Frame has size 0"),
        (14, 41, r"Frame.flags is 1 bytes at offset 41 of its table, which has 41"),
        (14, 0xFFFF, "table Frame is 65535 bytes"),
        (16, 3, "Frame.kind is 1 bytes at offset 3"),
        (20, 37, "Frame.code at offset 73 is not aligned to 2"),
        (26, 20, "Frame.id at offset 56 is not aligned to 8"),
        (26, 0xFFFF, "Frame.id is 8 bytes at offset 65535"),
        (34, 6, "Frame.payload at offset 42 is not aligned to 4"),
    ],
)
def test_wrong_vtable(at: int, value: int, message: str) -> None:
    data = frame()
    pack_into("<H", data, at, value)
    refuse(data, message)


@pytest.mark.parametrize("value", [-(2**31), -200, 2**31 - 1, 41])
def test_vtable_elsewhere(value: int) -> None:
    data = frame()
    pack_into("<i", data, 40, value)
    refuse(data, "vtable of Frame")


@pytest.mark.parametrize("count", [3, *HUGE])
def test_count_beyond_the_frame(count: int) -> None:
    for at, name, element in ((84, "regions", 56), (148, "releases", 16)):
        data = frame()
        pack_into("<I", data, at, count)
        # The true sizes of both vectors leave room for two elements at most.
        refuse(data, f"Frame.{name} has {count} elements of {element} bytes; the frame has room for")


@pytest.mark.parametrize("count", [9, *HUGE])
def test_payload_beyond_the_frame(count: int) -> None:
    data = frame()
    pack_into("<I", data, 168, count)
    refuse(data, f"{count} ")


def test_struct_vector_that_is_not_aligned() -> None:
    data = frame()
    pack_into("<I", data, 44, 44)  # one word further: the padding there reads as a count
    pack_into("<I", data, 88, 1)
    refuse(data, "Frame.regions at offset 88 is not aligned to 8")


def test_fields_that_are_left_out_are_zero_or_empty() -> None:
    data = frame()
    data[20:36] = bytes(16)  # code, credits, actor, ..., payload
    expected = (1, 0, 0, 0, 0, 0, 0, (), (), len(data), len(data))
    assert codec.decode(data, 4, len(data)) == generic.decode(data, 4, len(data)) == expected


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (80, MAX_KIND + 1, f"kind {MAX_KIND + 1}; known kinds are 0 to {MAX_KIND}"),
        (80, 255, "kind 255"),
        (81, 4, "flags 0x04; known bits are 0x03"),
        (81, 128, "flags 0x80"),
        (80, 0, "HELLO"),
        (136, 5, "kind 5; known kinds are 0 to 4"),
    ],
)
def test_unknown_values(at: int, value: int, message: str) -> None:
    data = frame()
    data[at] = value
    refuse(data, message)


def test_unknown_status() -> None:
    data = frame()
    data[80] = Kind.RESPONSE
    data[76] = 8
    refuse(data, "status 8; known statuses are 0 to 7")


@pytest.mark.parametrize(("kind", "flags", "code"), [(-1, 0, 0), (MAX_KIND + 1, 0, 0), (1, 4, 0), (2, 0, 8)])
def test_words_out_of_range(kind: int, flags: int, code: int) -> None:
    with pytest.raises(ProtocolError):
        check_words(kind, flags, code)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"hostname\0", b"\xff" * 8 + b"\0", "Hello.host is not UTF-8 at byte 0"),
        (b"hostname\0", b"hostname!", "Hello.host of 8 bytes is not ended by a zero byte"),
        (b"\x08\0\0\0hostname", b"\xff\xff\xff\xffhostname", "Hello.host has 4294967295 elements"),
        (b"\x10\0\0\0pppp", b"\x0f\0\0\0pppp", "Hello.process has 15 bytes; a process id has 16"),
    ],
)
def test_broken_greeting(old: bytes, new: bytes, message: str) -> None:
    data = generic.encode_hello(Hello(1, b"p" * 16, 1, "hostname", "3.11.2", "worker"))
    assert data.count(old) == 1
    data = data.replace(old, new)
    with pytest.raises(ProtocolError, match=message):
        codec.decode_hello(data, 4, len(data))


def test_greeting_with_an_endless_string() -> None:
    data = generic.encode_hello(Hello(1, b"p" * 16, 1, "h" * 1024, "3.11.2", "worker"))
    assert codec.decode_hello(data, 4, len(data)).host == "h" * 1024
    data = data.replace(b"\0\x04\0\0hhhh", b"\x01\x04\0\0hhhh")
    with pytest.raises(ProtocolError, match=r"Hello\.host has 1025 bytes; at most 1024"):
        codec.decode_hello(data, 4, len(data))
