"""A peer that writes the frames which it likes, and violations of the protocol that it commits with them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Any

from tests.conformance.talk import ACTOR, Promise
from zcactor.objectstore.ref import Region
from zcactor.rpc.codec import encode_hello_into, encode_into, frame_size
from zcactor.rpc.messages import PROTOCOL_VERSION, Hello, Kind
from zcactor.rpc.session import Session

__all__ = ["KEY", "NONE", "TARGET", "VIOLATIONS", "WORD", "Peer"]


class Peer:
    """A peer that writes frames by hand to a session, and takes in none."""

    def __init__(self, near: Any, far: Any, hub: Any) -> None:
        self.near, self.far, self.hub = near, far, hub
        self.session = Session(hub, near, asyncio.get_running_loop())
        self.opened: list[Promise] = []
        self.session.start()
        self.far.start(self)

    def frames_received(self, data: memoryview) -> None: ...

    def connection_lost(self, cause: Exception | None) -> None: ...

    def hello(self) -> None:
        """Send the hello message."""
        buffer, offset = self.far.reserve(4096)
        hello = Hello(PROTOCOL_VERSION, self.near.peer.process, 1, "host", "3.11.0", "worker")
        self.far.commit(encode_hello_into(buffer, offset, hello))
        self.far.flush()

    def frame(
        self,
        kind: int,
        *,
        flags: int = 0,
        code: int = 0,
        credits: int = 0,
        message_id: int = 0,
        extra: int = 0,
        regions: Sequence[Region] = (),
        releases: Sequence[tuple[int, int]] = (),
        payload: bytes = b"",
        flush: bool = True,
    ) -> None:
        """Send a frame; without `flush` it goes with the next one."""
        buffer, offset = self.far.reserve(frame_size(len(regions), len(releases), len(payload)))
        written = encode_into(
            buffer, offset, kind, flags, code, credits, 2, message_id, extra, regions, releases, payload
        )
        self.far.commit(written)
        if flush:
            self.far.flush()

    def raw(self, data: bytes) -> None:
        """Send bytes in the place of a frame."""
        buffer, offset = self.far.reserve(len(data) + 4)
        buffer[offset : offset + len(data) + 4] = struct.pack("<I", len(data)) + data
        self.far.commit(len(data) + 4)
        self.far.flush()

    def open_call(self) -> Promise:
        """A call of the session's; its number is 1."""
        call = Promise(self.hub.process, self.session.loop, self.session.thread)
        call.refs = 1
        self.session.send_call(call, ACTOR, 0, 0, 0, b"\x90", ())
        self.opened.append(call)
        return call


NONE = b"\xc0"
"""A plain answer."""
KEY = 1 << 32 | 77
WORD = 1 << 63 | 5
TARGET = b"t" * 16


def whole(kind: int, message_id: int, *, flags: int = 0, extra: int = 0, payload: bytes = b"") -> bytes:
    """A frame without its length prefix."""
    made = bytearray(frame_size(0, 0, len(payload)))
    encode_into(made, 0, kind, flags, 0, 0, 0, message_id, extra, (), (), payload)
    return bytes(made[4:])


def several(*steps: Callable[[Peer], object]) -> Callable[[Peer], None]:
    """Several violations, or steps that lead to one, in this order."""

    def all_of_them(peer: Peer) -> None:
        for step in steps:
            step(peer)

    return all_of_them


def answer(payload: bytes = b"", **fields: Any) -> Callable[[Peer], None]:
    """The answer to the session's call."""
    return lambda peer: peer.frame(Kind.RESPONSE, message_id=1, payload=payload, **fields)


def frames(peer: Peer, count: int) -> None:
    """Send `count` frames at once."""
    for i in range(count):
        peer.frame(Kind.RELEASE, flush=i == count - 1)


VIOLATIONS: dict[str, Callable[[Peer], object]] = {
    "answer to nothing": lambda peer: peer.frame(Kind.RESPONSE, message_id=77),
    "answer twice": several(Peer.open_call, answer(), answer()),
    "call twice": several(*2 * [lambda peer: peer.frame(Kind.CALL, message_id=5)]),
    "item of nothing": lambda peer: peer.frame(Kind.ITEM, message_id=5),
    "item of a call": several(Peer.open_call, lambda peer: peer.frame(Kind.ITEM, message_id=1)),
    "release of nothing": lambda peer: peer.frame(Kind.RELEASE, releases=[(5, 1)]),
    "too many credits": lambda peer: peer.frame(Kind.CREDIT, credits=100),
    "too many frames": lambda peer: frames(peer, 41),
    "not a frame": lambda peer: peer.raw(bytes(range(64))),
    "a short frame": lambda peer: peer.raw(b"x"),
    "a cut frame": lambda peer: peer.raw(b"\x24\0\0\0ZCA1" + bytes(20)),
    "unknown status": several(Peer.open_call, answer(code=99)),
    "push without a key": lambda peer: peer.frame(Kind.PUSH, payload=NONE),
    "push of unknown status": lambda peer: peer.frame(Kind.PUSH, message_id=KEY, code=99),
    "failed push with a value": lambda peer: peer.frame(Kind.PUSH, message_id=KEY, code=1, payload=NONE),
    "failed push with a reference": lambda peer: peer.frame(
        Kind.PUSH, message_id=KEY, code=1, regions=[Region(2, peer.near.peer.process, 5, 0, 0, 0)]
    ),
    "a cut push": lambda peer: peer.raw(whole(Kind.PUSH, KEY, payload=bytes(64))[:-64]),
    "push of a flag that is none": lambda peer: peer.raw(whole(Kind.PUSH, KEY, flags=0x80, payload=NONE)),
    "forward without a key": lambda peer: peer.frame(Kind.FORWARD, message_id=5, payload=TARGET),
    "forward to nobody": lambda peer: peer.frame(Kind.FORWARD, message_id=5, extra=KEY, payload=TARGET[1:]),
    "forward to two": lambda peer: peer.frame(Kind.FORWARD, message_id=5, extra=KEY, payload=2 * TARGET),
    "forward of too high a number": lambda peer: peer.frame(
        Kind.FORWARD, message_id=5, extra=KEY, code=64, payload=TARGET
    ),
    "forward with flags": lambda peer: peer.frame(Kind.FORWARD, message_id=5, extra=KEY, flags=1, payload=TARGET),
    "forward with a reference": lambda peer: peer.frame(
        Kind.FORWARD, message_id=5, extra=KEY, payload=TARGET, regions=[Region(2, peer.near.peer.process, 5, 0, 0, 0)]
    ),
    "a cut forward": lambda peer: peer.raw(whole(Kind.FORWARD, 5, extra=KEY, payload=TARGET)[:-16]),
    "answer with pushes not asked for": several(Peer.open_call, answer(extra=1)),
    # the same in frames that the native part takes in by itself
    "plain answer with pushes not asked for": several(Peer.open_call, answer(NONE, extra=1 << 63)),
    "plain push with too many credits": lambda peer: peer.frame(Kind.PUSH, message_id=KEY, payload=NONE, credits=60000),
    "plain push with a release of nothing": lambda peer: peer.frame(
        Kind.PUSH, message_id=KEY, payload=NONE, releases=[(5, 1)]
    ),
    "plain answer to nothing": lambda peer: peer.frame(Kind.RESPONSE, message_id=77, payload=NONE),
    "plain answer twice": several(Peer.open_call, answer(NONE), answer(NONE)),
    "plain call twice": several(*2 * [lambda peer: peer.frame(Kind.CALL, message_id=5, payload=b"\x90")]),
    "plain answer with too many credits": several(Peer.open_call, answer(NONE, credits=60000)),
    "plain answer with a release of nothing": several(Peer.open_call, answer(NONE, releases=[(5, 1)])),
    "plain call with too many credits": lambda peer: peer.frame(Kind.CALL, message_id=5, payload=b"\x90", credits=100),
}
"""Violations, which no correct peer commits, by name."""
