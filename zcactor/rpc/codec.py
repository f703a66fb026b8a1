"""Frames <-> bytes on the hot path: FlatBuffers by template.

A frame's table always has the same layout, so everything up to the scalars is one constant and the scalars are one
``Struct``: encoding patches a template, decoding compares the constant. Bytes count from the length prefix::

      0  u32  length of the rest                        44  u32  offset of regions   (always 40)
      4  u32  root offset                               48  u32  offset of releases
      8  4s   "ZCA1"                                    52  u32  offset of payload
     12  vtable, 24 bytes, then 4 of padding            56  u64  id
     40  i32  table: offset back to the vtable          64  u64  extra
                                                        72  u32  actor
     84  u32  number of regions, then 56 bytes each     76  u16  code,  78  u16  credits
      …  4 bytes of padding                             80  u8   kind,  81  u8   flags, 2 of padding
      …  u32  number of releases, then 16 bytes each
      …  u32  bytes of payload, payload, padding to a multiple of 8

Each struct vector is aligned to 8, counted from the prefix as the C++ verifier does. Frames with another layout, which
other encoders may choose, go through `zcactor.rpc.generic`; the two read each other's bytes. Measured on one core by
``python -m benchmarks codec``: encode 0.5 and decode 0.35 us, with one region 0.7 and 1.1; generated code 28 to 42 us.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import TYPE_CHECKING, Final

from zcactor.errors import ProtocolError
from zcactor.objectstore.ref import REGION_NBYTES, REGION_STRUCT, Region
from zcactor.rpc import hello as greeting
from zcactor.rpc.messages import Hello, Kind
from zcactor.rpc.verify import (
    IDENTIFIER,
    MAX_FLAGS,
    MAX_KIND,
    MAX_REGION_KIND,
    MAX_STATUS,
    MIN_FRAME,
    RELEASE_NBYTES,
    RELEASE_STRUCT,
    Buffer,
    check_region,
    check_words,
    read_regions,
    read_releases,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.rpc.generic import Decoded

__all__ = [
    "TEMPLATE",
    "decode",
    "decode_hello",
    "encode_hello_into",
    "encode_into",
    "frame_at",
    "frame_size",
    "split",
]

_PREFIX: Final = 4
_TABLE: Final = 40
_REGIONS: Final = 84
_HEAD: Final = 88  # bytes before the first region
_EMPTY: Final = 100  # bytes of a frame without regions, releases and payload, before padding

_CONSTANT: Final = struct.pack(
    "<I4s12H4xiI",
    _TABLE - 4,
    IDENTIFIER,
    *(24, 42),  # bytes of the vtable and of the table
    *(40, 41, 36, 38, 32, 16, 24, 4, 8, 12),  # offsets in the table, by slot: kind, flags, code, ..., payload
    _TABLE - 12,
    _REGIONS - 44,
)
_RELEASES_OFFSET: Final = 44  # from field 48 to the count at 92 when there are no regions
_PAYLOAD_OFFSET: Final = 44  # from field 52 to the count at 96 when there are no regions and no releases
_CONSTANT_LEAN: Final = _CONSTANT + struct.pack("<II", _RELEASES_OFFSET, _PAYLOAD_OFFSET)
TEMPLATE: Final = _CONSTANT_LEAN
"""Bytes 4 to 56 of each frame without regions and releases. The native part writes and compares the same bytes."""
_CONSTANT_REGION: Final = _CONSTANT + struct.pack(
    "<II", _RELEASES_OFFSET + REGION_NBYTES, _PAYLOAD_OFFSET + REGION_NBYTES
)

_LEAN: Final = Struct("<I52sQQIHHBB14xI")
"""A frame without regions and releases, up to its payload; the empty counts are among the zeros of ``14x``."""
_LEAN_REGION: Final = Struct("<I52sQQIHHBB2xI16sQQQQBBHI4xII")
"""A frame with one region and no releases, up to its payload."""
_GENERAL: Final = Struct("<I44sIIQQIHHBB2xI")
"""Any frame up to its first region."""
_READ: Final = Struct("<44sIIQQIHHBB2xI4xII")
"""Structs that read without the length prefix. The last two numbers are the counts of releases and payload if the frame
has no regions."""
_READ_NBYTES: Final = _READ.size
_COUNT: Final = Struct("<I")
_RESPONSE: Final = int(Kind.RESPONSE)
_RELEASES_HEAD: Final = Struct("<4xI")
_PADDING: Final = tuple(bytes(n) for n in range(8))

_pack_lean = _LEAN.pack_into
_pack_lean_region = _LEAN_REGION.pack_into
_unpack = _READ.unpack_from
_unpack_region = REGION_STRUCT.unpack_from
_unpack_count = _COUNT.unpack_from


def frame_size(nregions: int, nreleases: int, npayload: int) -> int:
    """The number of bytes that `encode_into` writes, length prefix and padding included; a multiple of 8.

    Args:
        nregions: number of regions.
        nreleases: number of releases.
        npayload: bytes of payload.
    """
    return (_EMPTY + 7 + REGION_NBYTES * nregions + RELEASE_NBYTES * nreleases + npayload) & -8


def encode_into(
    buffer: bytearray | memoryview,
    offset: int,
    kind: int,
    flags: int,
    code: int,
    credits: int,
    actor: int,
    id: int,
    extra: int,
    regions: Sequence[Region],
    releases: Sequence[tuple[int, int]],
    payload: Buffer,
) -> int:
    """Write one frame of any kind but HELLO, with its length prefix, at ``buffer[offset:]``.

    Args:
        buffer: the caller's memory, with at least `frame_size` bytes from `offset` on.
        offset: position of the length prefix; a multiple of 8 from the start of the batch, for alignment.
        kind: a `Kind`; u8 on the wire.
        flags: `Flags`; u8.
        code: method index or `Status`; u16.
        credits: frames consumed since the last one sent; u16.
        actor: local index in the receiving process; u32.
        id: call id; u64.
        extra: nanoseconds, items or an index, by kind; u64.
        regions: objects passed by reference; every owner has 16 bytes, which is not checked here.
        releases: (id, count) of leases that are given back; u64 and u32.
        payload: marshalled bytes, copied into `buffer`; a memoryview must be contiguous and of format ``"B"``.

    Returns:
        Bytes written: ``frame_size(len(regions), len(releases), len(payload))``.

    Raises:
        ValueError: the frame does not fit the buffer, or a number does not fit its field. Bytes of the buffer from
            `offset` on may be overwritten, no others.
    """
    npayload = len(payload)
    nregions = len(regions)
    nreleases = len(releases)
    used = _EMPTY + npayload
    if nregions or nreleases:
        used += REGION_NBYTES * nregions + RELEASE_NBYTES * nreleases
    size = (used + 7) & -8
    if offset + size > len(buffer):  # a bytearray would grow instead of refusing
        raise ValueError(f"a frame of {size} bytes does not fit at offset {offset} of a buffer of {len(buffer)} bytes")
    try:
        if not nregions and not nreleases:
            _pack_lean(buffer, offset, size - 4, _CONSTANT_LEAN, id, extra, actor, code, credits, kind, flags, npayload)
        elif nregions == 1 and not nreleases:
            region_kind, owner, object_id, region_offset, nbytes, pin, seal, rkey, authenticate = regions[0]
            _pack_lean_region(
                buffer,
                offset,
                size - 4,
                _CONSTANT_REGION,
                id,
                extra,
                actor,
                code,
                credits,
                kind,
                flags,
                1,
                owner,
                object_id,
                region_offset,
                nbytes,
                pin,
                region_kind,
                authenticate,
                seal,
                rkey,
                0,
                npayload,
            )
        else:
            position = offset + _HEAD
            releases_offset = _RELEASES_OFFSET + REGION_NBYTES * nregions
            payload_offset = releases_offset + RELEASE_NBYTES * nreleases
            _GENERAL.pack_into(
                buffer,
                offset,
                size - 4,
                _CONSTANT,
                releases_offset,
                payload_offset,
                id,
                extra,
                actor,
                code,
                credits,
                kind,
                flags,
                nregions,
            )
            for region_kind, owner, object_id, region_offset, nbytes, pin, seal, rkey, authenticate in regions:
                REGION_STRUCT.pack_into(
                    buffer, position, owner, object_id, region_offset, nbytes, pin, region_kind, authenticate, seal,
                    rkey,
                )  # fmt: skip
                position += REGION_NBYTES
            _RELEASES_HEAD.pack_into(buffer, position, nreleases)
            position += 8
            for release_id, count in releases:
                RELEASE_STRUCT.pack_into(buffer, position, release_id, count)
                position += RELEASE_NBYTES
            _COUNT.pack_into(buffer, position, npayload)
    except struct.error as error:
        raise ValueError(f"a number does not fit its field of the frame: {error}") from error
    end = offset + used
    if npayload:
        buffer[end - npayload : end] = payload
    if size != used:  # stale bytes of the buffer must not reach the peer
        buffer[end : offset + size] = _PADDING[size - used]
    return size


def _decode_any(data: Buffer, start: int, end: int) -> Decoded:
    """Decode a frame of another layout. FlatBuffers is imported for that, and imports NumPy, too, which few processes
    need at their start."""
    from zcactor.rpc import generic

    return generic.decode(data, start, end)


def decode(data: Buffer, start: int, end: int) -> Decoded:
    """Read one frame that is not HELLO.

    Args:
        data: the batch.
        start: offset of the frame's first byte after its length prefix, from `split`.
        end: offset of the byte after its last, from `split`; at most ``len(data)``.

    Returns:
        kind, flags, code, credits, actor, id, extra, regions, releases, payload_start, payload_end. A
        frame without regions or releases has ``()`` for them. The payload is given as offsets into `data`, so nothing
        is copied. `zcactor.objectstore.ref.check_bounds` checks whether a region lies inside its owner's arena.

    Raises:
        ProtocolError: the bytes are not a valid frame, or the frame is HELLO. The message gives the field, its offset,
            the value and the limit. Any other exception is a bug here.
    """
    if end - start < _READ_NBYTES:
        return _decode_any(data, start, end)
    (
        constant,
        releases_offset,
        payload_offset,
        call_id,
        extra,
        actor,
        code,
        returned,
        kind,
        flags,
        nregions,
        nreleases,
        npayload,
    ) = _unpack(data, start)
    if constant != _CONSTANT or not kind:
        return _decode_any(data, start, end)
    if kind > MAX_KIND or flags > MAX_FLAGS or (code > MAX_STATUS and kind == _RESPONSE):
        check_words(kind, flags, code)
    regions: tuple[Region, ...] = ()
    releases: tuple[tuple[int, int], ...] = ()
    if nregions == nreleases == 0 and releases_offset == _RELEASES_OFFSET and payload_offset == _PAYLOAD_OFFSET:
        payload = start + _READ_NBYTES
    else:
        position = start + _HEAD - _PREFIX
        room = end - position - 12  # bytes left for regions and releases behind the counts of releases and payload
        if nregions * REGION_NBYTES > room or releases_offset != _RELEASES_OFFSET + nregions * REGION_NBYTES:
            return _decode_any(data, start, end)
        room -= nregions * REGION_NBYTES
        releases_at = position + nregions * REGION_NBYTES + 8
        nreleases = _unpack_count(data, releases_at - 4)[0]
        if nreleases * RELEASE_NBYTES > room or payload_offset != releases_offset + nreleases * RELEASE_NBYTES:
            return _decode_any(data, start, end)
        payload = releases_at + nreleases * RELEASE_NBYTES + 4
        npayload = _unpack_count(data, payload - 4)[0]
        if nregions == 1:
            owner, object_id, region_offset, nbytes, pin, region_kind, authenticate, seal, rkey = _unpack_region(
                data, position
            )
            if region_kind > MAX_REGION_KIND or authenticate > 1:
                check_region(object_id, region_kind, authenticate)
            regions = (Region(region_kind, owner, object_id, region_offset, nbytes, pin, seal, rkey, authenticate),)
        elif nregions:
            regions = read_regions(data, position, nregions)
        if nreleases:
            releases = read_releases(data, releases_at, nreleases)
    if npayload > end - payload:
        raise ProtocolError(
            f"payload is {npayload} bytes at offset {payload - start}, outside the frame of {end - start} bytes"
        )
    return kind, flags, code, returned, actor, call_id, extra, regions, releases, payload, payload + npayload


def split(data: Buffer, max_frame: int) -> list[tuple[int, int]]:
    """Find the frames of a batch by their length prefixes. Nothing else is read, and nothing is copied.

    Args:
        data: whole frames, each after its length (u32, little-endian, not counting itself).
        max_frame: bytes of a frame, at most, without the prefix.

    Returns:
        (start, end) of each frame without its prefix, as `decode` takes them; empty for an empty batch.

    Raises:
        ProtocolError: a length is above `max_frame` or below the least of a frame, or the batch ends before the frame
            does. No frame of such a batch is returned.
    """
    total = len(data)
    frames: list[tuple[int, int]] = []
    position = 0
    while position < total:
        frame = frame_at(data, position, total, max_frame)
        frames.append(frame)
        position = frame[1]
    return frames


def frame_at(data: Buffer, position: int, total: int, max_frame: int) -> tuple[int, int]:
    """The frame whose length prefix lies at `position`, as (start, end) without the prefix; see `split`.

    Raises:
        ProtocolError: as `split` does.
    """
    start = position + 4
    if start > total:
        raise ProtocolError(f"the batch ends after {total - position} bytes of a length prefix of 4")
    length = _unpack_count(data, position)[0]
    if not MIN_FRAME <= length <= max_frame:
        raise ProtocolError(
            f"frame at offset {position} has length {length}; {MIN_FRAME} to {max_frame} bytes are allowed"
        )
    end = start + length
    if end > total:
        raise ProtocolError(f"frame at offset {position} has length {length}, but {total - start} bytes are left")
    return start, end


def encode_hello_into(buffer: bytearray | memoryview, offset: int, hello: Hello) -> int:
    """Write a HELLO frame with its length prefix at ``buffer[offset:]``.

    Returns:
        Bytes written.

    Raises:
        ValueError: the frame does not fit the buffer, or the greeting does not fit the schema.
        TypeError: a number of the greeting does not fit its field.
    """
    frame = greeting.encode(hello)
    size = len(frame)
    if offset + size > len(buffer):
        raise ValueError(f"a HELLO of {size} bytes does not fit at offset {offset} of a buffer of {len(buffer)} bytes")
    buffer[offset : offset + size] = frame
    return size


def decode_hello(data: Buffer, start: int, end: int) -> Hello:
    """Read a HELLO frame; arguments as in `decode`. The version is returned, not checked.

    Raises:
        ProtocolError: the bytes are not a valid frame, or not HELLO. Any other exception is a bug here.
    """
    return greeting.decode(data, start, end)
