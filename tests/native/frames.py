"""Frames for the native part, by the Python codec, and an actor that notes the calls which come of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.native.ends import MAX_FRAME, PEER
from tests.native.mutants import KEY, promise
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.rpc.codec import decode, encode_into, frame_at, frame_size
from zcactor.rpc.messages import Kind

__all__ = ["TARGET", "Host", "announced", "call_with", "frame", "read"]

TARGET = b"t" * 16
"""The process that FORWARD frames name."""


class Host:
    """An actor that notes its calls."""

    def __init__(self) -> None:
        self.plain: list[Any] = []
        self.linked: list[Any] = []

    def receive_plain(self, session: Any, *call: Any) -> None:
        self.plain.append(call)

    def receive_linked(self, session: Any, *call: Any) -> None:
        self.linked.append(call)


def frame(
    kind: int, message_id: int, payload: bytes = b"", *, actor: int = 2, code: int = 0, credits: int = 0,
    extra: int = 0, regions: Sequence[Region] = (), releases: Sequence[tuple[int, int]] = (),
) -> bytes:  # fmt: skip
    """One frame of the peer."""
    buffer = bytearray(frame_size(len(regions), len(releases), len(payload)))
    encode_into(buffer, 0, kind, 0, code, credits, actor, message_id, extra, regions, releases, payload)
    return bytes(buffer)


def read(data: bytes) -> tuple[Any, ...]:
    """Kind, code, message id, extra field, regions and payload of the first frame in `data`."""
    start, end = frame_at(data, 0, len(data), MAX_FRAME)
    kind, _, code, _, _, message_id, extra, regions, _, low, high = decode(data, start, end)
    return kind, code, message_id, extra, regions, data[low:high]


def announced(key: int = KEY, owner: bytes = PEER, kind: int = RegionKind.REF, nbytes: int = 0, pin: int = 0) -> Region:
    """A promise whose outcome will be pushed."""
    return Region(kind, owner, 9, key, nbytes, pin)


def call_with(region: Region, argument: bytes | None = None) -> bytes:
    """Call 5 to actor 2, with a promise and the number 7 as arguments."""
    return frame(Kind.CALL, 5, b"\x92" + (argument or promise(0)) + b"\x07", regions=[region])
