"""The verifier, which makes a peer's FlatBuffers bytes safe to read.

The Python package of FlatBuffers has accessors but no verifier: on mutated frames the accessors raise errors of
``struct``, or silently return other bytes (measured: 46 % and 51 % of 100,000). `verify_frame` walks the frame as the
C++ ``Verifier`` does: every offset, vtable, vector and string lies inside the frame and is aligned. Nothing recurses
and nothing is allocated in proportion to a number that the peer sent before that number has been checked against the
frame's length. Tables nest at most two deep, because the schema says so.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from zcactor.errors import ProtocolError
from zcactor.objectstore.ref import OWNER_NBYTES, REGION_NBYTES, REGION_STRUCT, Region, RegionKind
from zcactor.rpc.messages import Flags, Kind, Status

__all__ = [
    "IDENTIFIER",
    "MAX_FLAGS",
    "MAX_KIND",
    "MAX_REGION_KIND",
    "MAX_STATUS",
    "MAX_TEXT",
    "MIN_FRAME",
    "RELEASE_NBYTES",
    "RELEASE_STRUCT",
    "Buffer",
    "Layout",
    "check_region",
    "check_words",
    "read_regions",
    "read_releases",
    "verify_frame",
]

Buffer = bytes | bytearray | memoryview
"""A buffer that frames are read from: one-dimensional, contiguous, of bytes."""

IDENTIFIER: Final = b"ZCA1"
"""FlatBuffers' file identifier: bytes 4 to 8 of each frame."""

MIN_FRAME: Final = 16
"""Bytes of the smallest FlatBuffers table with an identifier: root offset, identifier, vtable header, table header."""

MAX_TEXT: Final = 1024
"""Bytes of a string in HELLO, at most. Host names end at 255 by POSIX, so this only refuses nonsense."""

RELEASE_STRUCT: Final = Struct("<QI4x")
"""Layout of a release: id, count, 4 bytes of padding."""
RELEASE_NBYTES: Final = RELEASE_STRUCT.size

MAX_KIND: Final = int(max(Kind))
MAX_FLAGS: Final = int(Flags.KWARGS | Flags.SPILLED)
MAX_STATUS: Final = int(max(Status))
MAX_REGION_KIND: Final = int(max(RegionKind))
_RESPONSE: Final = int(Kind.RESPONSE)

_U16: Final = Struct("<H")
_U32: Final = Struct("<I")
_I32: Final = Struct("<i")
_SIZE_PREFIX: Final = 4  # bytes before the frame; alignment counts from there, as the C++ verifier has it
_VTABLE_HEADER: Final = 4  # bytes: size of the vtable, size of the table's inline part


class Layout(NamedTuple):
    """The positions of the vectors of a verified frame: absolute offsets into the verified buffer."""

    regions: int
    nregions: int
    releases: int
    nreleases: int
    payload_start: int
    payload_end: int


class _Table(NamedTuple):
    """A table whose vtable and inline part lie inside the frame."""

    name: str
    position: int
    nbytes: int
    vtable: int
    vtable_nbytes: int


# Slot number and bytes of each scalar, in the order of the schema.
_FRAME_SCALARS: Final = (
    ("kind", 0, 1),
    ("flags", 1, 1),
    ("code", 2, 2),
    ("credits", 3, 2),
    ("actor", 4, 4),
    ("id", 5, 8),
    ("extra", 6, 8),
)
_REGIONS, _RELEASES, _PAYLOAD, _HELLO = 7, 8, 9, 10
_HELLO_SCALARS: Final = (("version", 0, 2), ("pid", 2, 4), ("session", 6, 8))
_HELLO_PROCESS: Final = 1
_HELLO_STRINGS: Final = (("host", 3), ("python", 4), ("role", 5))


def check_words(kind: int, flags: int, code: int) -> None:
    """Check the enumerated scalars of a frame.

    Raises:
        ProtocolError: unknown kind, unknown flag bits, or a RESPONSE with an unknown status.
    """
    if not 0 <= kind <= MAX_KIND:
        raise ProtocolError(f"frame has kind {kind}; known kinds are 0 to {MAX_KIND}")
    if flags & ~MAX_FLAGS:
        raise ProtocolError(f"frame has flags {flags:#04x}; known bits are {MAX_FLAGS:#04x}")
    if kind == _RESPONSE and code > MAX_STATUS:
        raise ProtocolError(f"RESPONSE has status {code}; known statuses are 0 to {MAX_STATUS}")


def check_region(object_id: int, kind: int, authenticate: int) -> None:
    """Check the enumerated fields of a region.

    Raises:
        ProtocolError: the kind is unknown, or `authenticate` is neither 0 nor 1.
    """
    if kind > MAX_REGION_KIND:
        raise ProtocolError(f"region of object {object_id} has kind {kind}; known kinds are 0 to {MAX_REGION_KIND}")
    if authenticate > 1:
        raise ProtocolError(f"region of object {object_id} says {authenticate} of authentication; 0 and 1 are known")


def read_regions(data: Buffer, position: int, count: int) -> tuple[Region, ...]:
    """Read `count` regions at `position`; the caller has checked that they lie inside the frame.

    Raises:
        ProtocolError: as `check_region`.
    """
    regions = []
    view = memoryview(data)[position : position + count * REGION_NBYTES]
    for owner, object_id, offset, nbytes, pin, kind, authenticate, seal, rkey in REGION_STRUCT.iter_unpack(view):
        if kind > MAX_REGION_KIND or authenticate > 1:
            check_region(object_id, kind, authenticate)
        regions.append(Region(kind, owner, object_id, offset, nbytes, pin, seal, rkey, authenticate))
    return tuple(regions)


def read_releases(data: Buffer, position: int, count: int) -> tuple[tuple[int, int], ...]:
    """Read `count` releases, (id, count) each, at `position`; the caller has checked that they lie inside the frame."""
    view = memoryview(data)[position : position + count * RELEASE_NBYTES]
    return tuple(RELEASE_STRUCT.iter_unpack(view))


class _Walk:
    """One frame during its verification: its bytes and limits, and the reading of offsets inside them."""

    __slots__ = ("data", "end", "start")

    def __init__(self, data: Buffer, start: int, end: int) -> None:
        self.data = data
        self.start = start
        self.end = end

    def require(self, what: str, position: int, nbytes: int, align: int) -> None:
        """Check that `nbytes` at `position` lie inside the frame and are aligned."""
        if position < self.start or position > self.end or nbytes > self.end - position:
            raise ProtocolError(
                f"{what} is {nbytes} bytes at offset {position - self.start}, "
                f"outside the frame of {self.end - self.start} bytes"
            )
        if (position - self.start + _SIZE_PREFIX) % align:
            raise ProtocolError(f"{what} at offset {position - self.start} is not aligned to {align} bytes")

    def follow(self, what: str, position: int) -> int:
        """Follow the unsigned offset stored at `position`, which has been checked."""
        offset: int = _U32.unpack_from(self.data, position)[0]
        if offset == 0:
            raise ProtocolError(f"{what}: the offset at {position - self.start} is 0, which points at itself")
        return position + offset

    def table(self, name: str, position: int) -> _Table:
        """Check the table at `position`, its vtable included."""
        self.require(f"table {name}", position, 4, 4)
        vtable = position - _I32.unpack_from(self.data, position)[0]
        self.require(f"vtable of {name}", vtable, _VTABLE_HEADER, 2)
        vtable_nbytes: int = _U16.unpack_from(self.data, vtable)[0]
        nbytes: int = _U16.unpack_from(self.data, vtable + 2)[0]
        if vtable_nbytes < _VTABLE_HEADER or vtable_nbytes % 2:
            raise ProtocolError(f"vtable of {name} has size {vtable_nbytes}; an even number from 4 up is needed")
        if nbytes < 4:
            raise ProtocolError(f"table {name} has size {nbytes}; at least 4 bytes are needed")
        self.require(f"vtable of {name}", vtable, vtable_nbytes, 2)
        self.require(f"table {name}", position, nbytes, 4)
        return _Table(name, position, nbytes, vtable, vtable_nbytes)

    def field(self, table: _Table, name: str, slot: int, nbytes: int) -> int:
        """The checked position of a field's inline bytes; -1 when the table leaves the field out."""
        entry = _VTABLE_HEADER + 2 * slot
        if entry + 2 > table.vtable_nbytes:
            return -1
        offset: int = _U16.unpack_from(self.data, table.vtable + entry)[0]
        if offset == 0:
            return -1
        if offset < 4 or offset + nbytes > table.nbytes:
            raise ProtocolError(
                f"{table.name}.{name} is {nbytes} bytes at offset {offset} of its table, which has {table.nbytes}"
            )
        self.require(f"{table.name}.{name}", table.position + offset, nbytes, nbytes)
        return table.position + offset

    def vector(self, table: _Table, name: str, slot: int, element: int, align: int) -> tuple[int, int]:
        """The checked position of a vector's first element, and the number of elements; (end of frame, 0) for a vector
        left out."""
        field = self.field(table, name, slot, 4)
        if field < 0:
            return self.end, 0
        what = f"{table.name}.{name}"
        position = self.follow(what, field)
        self.require(what, position, 4, 4)
        count: int = _U32.unpack_from(self.data, position)[0]
        position += 4
        limit = (self.end - position) // element
        if count > limit:
            raise ProtocolError(f"{what} has {count} elements of {element} bytes; the frame has room for {limit}")
        if count:
            self.require(what, position, count * element, align)
        return position, count

    def string(self, table: _Table, name: str, slot: int) -> None:
        """Check a string: UTF-8, ended by a zero byte inside the frame, at most `MAX_TEXT` bytes."""
        position, count = self.vector(table, name, slot, 1, 1)
        what = f"{table.name}.{name}"
        if count > MAX_TEXT:
            raise ProtocolError(f"{what} has {count} bytes; at most {MAX_TEXT} are allowed")
        if position + count < self.end and self.data[position + count] == 0:
            try:
                str(self.data[position : position + count], "utf-8")
            except UnicodeDecodeError as error:
                raise ProtocolError(f"{what} is not UTF-8 at byte {error.start}") from error
            return
        if position != self.end or count:  # a string that is left out has no end to check
            raise ProtocolError(f"{what} of {count} bytes is not ended by a zero byte")

    def hello(self, frame: _Table) -> None:
        """Check the nested greeting, if the frame has one."""
        field = self.field(frame, "hello", _HELLO, 4)
        if field < 0:
            return
        hello = self.table("Hello", self.follow("Frame.hello", field))
        for name, slot, nbytes in _HELLO_SCALARS:
            self.field(hello, name, slot, nbytes)
        _, count = self.vector(hello, "process", _HELLO_PROCESS, 1, 1)
        if count != OWNER_NBYTES:
            raise ProtocolError(f"Hello.process has {count} bytes; a process id has {OWNER_NBYTES}")
        for name, slot in _HELLO_STRINGS:
            self.string(hello, name, slot)


def verify_frame(data: Buffer, start: int, end: int) -> Layout:
    """Check that the generated accessors can read one frame without reading outside of it.

    Args:
        data: the batch.
        start: offset of the frame's first byte after its length prefix.
        end: offset of the byte after its last, at most ``len(data)``.

    Returns:
        The positions of the vectors. A vector that is left out is empty, at `end`.

    Raises:
        ProtocolError: a part of the frame is out of bounds, misaligned, too long or not UTF-8. The message gives the
            part, its offset, the value and the limit. Bytes of any content raise no other exception.
    """
    if end - start < MIN_FRAME:
        raise ProtocolError(f"frame has {end - start} bytes; the smallest has {MIN_FRAME}")
    identifier = bytes(data[start + 4 : start + 8])
    if identifier != IDENTIFIER:
        raise ProtocolError(f"frame has identifier {identifier!r} at offset 4; {IDENTIFIER!r} is needed")
    walk = _Walk(data, start, end)
    frame = walk.table("Frame", walk.follow("root", start))
    for name, slot, nbytes in _FRAME_SCALARS:
        walk.field(frame, name, slot, nbytes)
    regions, nregions = walk.vector(frame, "regions", _REGIONS, REGION_NBYTES, 8)
    releases, nreleases = walk.vector(frame, "releases", _RELEASES, RELEASE_NBYTES, 8)
    payload, npayload = walk.vector(frame, "payload", _PAYLOAD, 1, 1)
    walk.hello(frame)
    return Layout(regions, nregions, releases, nreleases, payload, payload + npayload)
