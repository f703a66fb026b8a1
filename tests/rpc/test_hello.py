"""The greeting's bytes: equal to those of FlatBuffers' own code, and read as that code reads them, in any form."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rpc.test_codec import mutated, outcome
from zcactor.rpc import generic, hello
from zcactor.rpc.messages import PROTOCOL_VERSION, Hello

HELLO = Hello(PROTOCOL_VERSION, bytes(range(16)), 4711, "höst", "3.11.2", "driver", 1 << 31, 7)
HELLOS = st.builds(
    Hello,
    st.integers(0, 2**16 - 1),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**32 - 1),
    st.text(max_size=30),
    st.text(max_size=20),
    st.sampled_from(["driver", "agent", "worker", ""]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


@pytest.mark.slow
@given(HELLOS, st.sampled_from([0, 8]))
def test_it_is_what_the_generated_code_writes_and_reads(greeting: Hello, before: int) -> None:
    frame = hello.encode(greeting)
    assert frame == generic.encode_hello(greeting)
    data = bytes(before) + frame
    assert hello.decode(data, before + 4, len(data)) == greeting
    assert hello.decode(memoryview(bytearray(data)), before + 4, len(data)) == greeting


def test_a_frame_of_the_usual_layout_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [generic.encode_hello(HELLO._replace(host="h" * length)) for length in range(1, 9)]
    monkeypatch.delattr(generic, "decode_hello")
    monkeypatch.delattr(generic, "encode_hello")
    for frame in frames:
        found = hello.decode(frame, 4, len(frame))
        assert hello.encode(found) == frame


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"process": b"short"}, ValueError, "process has 5 bytes"),
        ({"host": "h" * 1025}, ValueError, "host has 1025 bytes; at most 1024"),
        ({"version": 1 << 16}, TypeError, "65536"),
        ({"pid": -1}, TypeError, "-1"),
        ({"session": 1 << 32}, TypeError, "session is 4294967296; it has 32 bits"),
        ({"twin": -1}, TypeError, "twin is -1; it has 32 bits"),
    ],
)
def test_what_the_schema_does_not_allow(wrong: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hello.encode(HELLO._replace(**wrong))  # type: ignore[arg-type]


@pytest.mark.slow
def test_broken_frames_are_read_as_the_generated_code_reads_them() -> None:
    rng = random.Random(3)
    accepted = 0
    for number in range(4000):
        data = bytearray(hello.encode(HELLO._replace(host="h" * (number % 9))))
        if number % 2:
            data = bytearray(mutated(rng, bytes(data)))
        else:  # behind the head, which is constant
            data[rng.randrange(136, len(data))] = rng.choice((0, 1, 8, 16, 44, 255, rng.randrange(256)))
        end = max(4, len(data))
        found = outcome(partial(hello.decode, data, 4, end))
        assert found == outcome(partial(generic.decode_hello, data, 4, end))
        accepted += found is not None
    assert 500 < accepted < 3500
