"""Frames in a stream of bytes: each stands behind its length, a little-endian u32 that does not count itself."""

from __future__ import annotations

import struct
from typing import Final

from zcactor.errors import ProtocolError
from zcactor.transport.base import LENGTH_PREFIX

__all__ = ["max_frame_for", "whole_frames"]

MIN_MAX_FRAME: Final = 32 << 10
"""Bytes: room for the references of a call with many arrays, also where the eager limit is small."""
FRAME_HEADROOM: Final = 16 << 10
"""Bytes of a frame beside its eager payload: the fields of the call (under 512), and the rest for about 80 references
to arrays, of which one with shape and strides takes about 200."""

_unpack_length = struct.Struct("<I").unpack_from


def max_frame_for(eager_limit: int) -> int:
    """Return the bytes of the largest frame, without its prefix, for payloads of up to `eager_limit` bytes."""
    return max(MIN_MAX_FRAME, eager_limit + FRAME_HEADROOM)


def whole_frames(buffer: bytes | bytearray | memoryview, end: int, max_frame: int) -> int:
    """Return the number of bytes, among the first `end` bytes of `buffer`, that are whole frames.

    Frames before a bad prefix are counted, so that delivery does not depend on how the stream was cut into reads.

    Raises:
        ProtocolError: the first frame announces more than `max_frame` bytes.
    """
    done = 0
    while end - done >= LENGTH_PREFIX:
        (length,) = _unpack_length(buffer, done)
        if length > max_frame:
            if done == 0:
                raise ProtocolError(f"the peer announced a frame of {length} bytes; at most {max_frame} are allowed")
            break
        following = done + LENGTH_PREFIX + length
        if following > end:
            break
        done = following
    return done
