"""Frames <-> bytes by FlatBuffers' generated code: the slow twin of `zcactor.rpc.codec`.

It reads the output of any FlatBuffers implementation for the schema, HELLO included, behind `verify_frame`, and is the
second opinion in the tests of the fast codec. The pure-Python builder costs 30 to 160 us a frame, so nothing on the
path of a call may use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import flatbuffers

from zcactor.errors import ProtocolError
from zcactor.objectstore.ref import OWNER_NBYTES, Region
from zcactor.rpc.messages import Hello, Kind
from zcactor.rpc.verify import (
    IDENTIFIER,
    MAX_TEXT,
    Buffer,
    Layout,
    check_words,
    read_regions,
    read_releases,
    verify_frame,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Decoded", "decode", "decode_hello", "encode", "encode_hello"]

# flatc's own annotations are wrong (a str is declared where the value is bytes), so its modules are used without
# annotations.
_fbs_frame: Any = import_module("zcactor.rpc._fbs.Frame")
_fbs_hello: Any = import_module("zcactor.rpc._fbs.Hello")
_fbs_region: Any = import_module("zcactor.rpc._fbs.Region")
_fbs_release: Any = import_module("zcactor.rpc._fbs.Release")

Decoded = tuple[int, int, int, int, int, int, int, tuple[Region, ...], tuple[tuple[int, int], ...], int, int]
"""kind, flags, code, credits, actor, id, extra, regions, releases, payload_start, payload_end."""


def _add_hello(builder: flatbuffers.Builder, hello: Hello) -> int:
    """Write the greeting's table; returns its offset in the builder."""
    if len(hello.process) != OWNER_NBYTES:
        raise ValueError(f"Hello.process has {len(hello.process)} bytes; a process id has {OWNER_NBYTES}")
    for name, number in (("session", hello.session), ("twin", hello.twin)):
        if not 0 <= number < 1 << 32:
            raise TypeError(f"Hello.{name} is {number}; it has 32 bits")
    texts = []
    for name, text in (("host", hello.host), ("python", hello.python), ("role", hello.role)):
        encoded = text.encode()
        if len(encoded) > MAX_TEXT:
            raise ValueError(f"Hello.{name} has {len(encoded)} bytes; at most {MAX_TEXT} are allowed")
        texts.append(builder.CreateString(encoded))
    process = builder.CreateByteVector(hello.process)
    _fbs_hello.Start(builder)
    _fbs_hello.AddVersion(builder, hello.version)
    _fbs_hello.AddProcess(builder, process)
    _fbs_hello.AddPid(builder, hello.pid)
    _fbs_hello.AddHost(builder, texts[0])
    _fbs_hello.AddPython(builder, texts[1])
    _fbs_hello.AddRole(builder, texts[2])
    _fbs_hello.AddSession(builder, hello.numbers)
    return int(_fbs_hello.End(builder))


def encode(
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
    hello: Hello | None = None,
) -> bytes:
    """Encode one frame.

    Args:
        kind: a `Kind`; u8 on the wire.
        flags: `Flags`; u8.
        code: method index or `Status`; u16.
        credits: frames consumed since the last one sent; u16.
        actor: local index in the receiving process; u32.
        id: call id; u64.
        extra: nanoseconds, items or an index, by kind; u64.
        regions: objects passed by reference.
        releases: (id, count) of leases that are given back; u64 and u32.
        payload: marshalled bytes.
        hello: the greeting of a HELLO frame; None for other frames.

    Returns:
        The frame with its length prefix; a multiple of 8 bytes.

    Raises:
        ValueError: a greeting's text or process id has a length that the schema does not allow.
        TypeError: a number does not fit its field (FlatBuffers' own check).
    """
    builder = flatbuffers.Builder(256)
    builder.ForceDefaults(True)
    hello_at = _add_hello(builder, hello) if hello is not None else 0
    payload_at = builder.CreateByteVector(bytes(payload))
    _fbs_frame.StartReleasesVector(builder, len(releases))
    for release_id, count in reversed(releases):
        _fbs_release.CreateRelease(builder, release_id, count)
    releases_at = builder.EndVector()
    _fbs_frame.StartRegionsVector(builder, len(regions))
    for region in reversed(regions):
        _fbs_region.CreateRegion(
            builder, region.owner, region.id, region.offset, region.nbytes, region.pin, region.kind,
            region.authenticate, region.seal, region.rkey,
        )  # fmt: skip
    regions_at = builder.EndVector()
    _fbs_frame.Start(builder)
    _fbs_frame.AddKind(builder, kind)
    _fbs_frame.AddFlags(builder, flags)
    _fbs_frame.AddCode(builder, code)
    _fbs_frame.AddCredits(builder, credits)
    _fbs_frame.AddActor(builder, actor)
    _fbs_frame.AddId(builder, id)
    _fbs_frame.AddExtra(builder, extra)
    _fbs_frame.AddRegions(builder, regions_at)
    _fbs_frame.AddReleases(builder, releases_at)
    _fbs_frame.AddPayload(builder, payload_at)
    if hello is not None:
        _fbs_frame.AddHello(builder, hello_at)
    builder.FinishSizePrefixed(_fbs_frame.End(builder), IDENTIFIER)
    return bytes(builder.Output())


def encode_hello(hello: Hello) -> bytes:
    """Encode a HELLO frame with its length prefix.

    Raises:
        ValueError: see `encode`.
        TypeError: see `encode`.
    """
    return encode(Kind.HELLO, 0, 0, 0, 0, 0, 0, (), (), b"", hello)


def _read(data: Buffer, start: int, end: int) -> tuple[Any, Layout]:
    """Verify a frame, and return it with the positions of its vectors."""
    layout = verify_frame(data, start, end)
    frame = _fbs_frame.Frame.GetRootAs(data, start)
    check_words(frame.Kind(), frame.Flags(), frame.Code())
    return frame, layout


def decode(data: Buffer, start: int, end: int) -> Decoded:
    """Decode one frame that is not HELLO, from any encoder.

    Args:
        data: the batch.
        start: offset of the frame's first byte after its length prefix.
        end: offset of the byte after its last, at most ``len(data)``.

    Returns:
        The fields; the payload as offsets into `data`, so that nothing is copied.

    Raises:
        ProtocolError: the bytes are not a valid frame, or it is HELLO. Any other exception is a bug here.
    """
    frame, layout = _read(data, start, end)
    if frame.Kind() == Kind.HELLO:
        raise ProtocolError("a HELLO frame came where calls are spoken; it is valid as a connection's first frame only")
    return (
        frame.Kind(),
        frame.Flags(),
        frame.Code(),
        frame.Credits(),
        frame.Actor(),
        frame.Id(),
        frame.Extra(),
        # By blocks, not by accessors: at 20 us a region, a peer could cost us seconds with one frame.
        read_regions(data, layout.regions, layout.nregions),
        read_releases(data, layout.releases, layout.nreleases),
        layout.payload_start,
        layout.payload_end,
    )


def _text(value: bytes | None) -> str:
    """A verified string of the frame; a string that is left out reads as empty."""
    return str(value or b"", "utf-8")


def decode_hello(data: Buffer, start: int, end: int) -> Hello:
    """Decode a HELLO frame; arguments as in `decode`. The version is returned, not checked.

    Raises:
        ProtocolError: the bytes are not a valid frame, or not HELLO. Any other exception is a bug here.
    """
    frame, _ = _read(data, start, end)
    hello = frame.Hello()
    if frame.Kind() != Kind.HELLO or hello is None:
        raise ProtocolError(f"the first frame is of kind {frame.Kind()} and {'has' if hello else 'lacks'} a greeting")
    process = hello.ProcessAsNumpy().tobytes()
    texts = _text(hello.Host()), _text(hello.Python()), _text(hello.Role())
    numbers = hello.Session()
    return Hello(hello.Version(), process, hello.Pid(), *texts, numbers & 0xFFFFFFFF, numbers >> 32)
