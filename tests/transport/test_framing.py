"""Finding frames in a stream that was cut at any place."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.errors import ProtocolError
from zcactor.transport.frames import max_frame_for, whole_frames

LIMIT = 300


def stream(lengths: list[int]) -> bytes:
    return b"".join(struct.pack("<I", n) + bytes(n) for n in lengths)


@pytest.mark.slow
@given(st.lists(st.integers(0, LIMIT), max_size=20), st.data())
def test_counts_whole_frames_only(lengths: list[int], data: st.DataObject) -> None:
    whole = stream(lengths)
    end = data.draw(st.integers(0, len(whole)))
    expected, position = 0, 0
    for length in lengths:
        position += 4 + length
        if position <= end:
            expected = position
    # The bytes behind `end` are left over from earlier and must not be looked at.
    assert whole_frames(whole[:end] + b"\xff" * 8, end, LIMIT) == expected


@pytest.mark.parametrize("length", [LIMIT + 1, 2**31, 2**32 - 1])
def test_prefix_beyond_the_limit(length: int) -> None:
    bad = struct.pack("<I", length)
    with pytest.raises(ProtocolError, match=str(length)):
        whole_frames(bad, 4, LIMIT)
    good = stream([5, 6])
    assert whole_frames(good + bad, len(good) + 4, LIMIT) == len(good)


@pytest.mark.parametrize(("eager", "frame"), [(0, 32 << 10), (16 << 10, 32 << 10), (1 << 20, (1 << 20) + (16 << 10))])
def test_max_frame(eager: int, frame: int) -> None:
    assert max_frame_for(eager) == frame
