"""Peers that break the rules of the protocol, or only stretch them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.conformance.connection import turns
from tests.rpc.sessions import DEPTH, Hub, Pair, echo
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.objectstore.ref import Region
from zcactor.rpc.call import Call
from zcactor.rpc.codec import encode_hello_into, encode_into, frame_size
from zcactor.rpc.messages import PROTOCOL_VERSION, Hello, Kind
from zcactor.rpc.session import Session
from zcactor.transport.loopback import loopback_pair


class Peer:
    """Writes frames by hand to a session."""

    def __init__(self) -> None:
        self.near, self.far = loopback_pair(recv_depth=DEPTH)
        self.hub = Hub(self.far.peer.process)
        self.session = Session(self.hub, self.near, asyncio.get_running_loop())
        self.session.start()
        self.far.start(self)

    def frames_received(self, data: memoryview) -> None: ...

    def connection_lost(self, cause: Exception | None) -> None: ...

    def hello(self) -> None:
        buffer, offset = self.far.reserve(4096)
        hello = Hello(PROTOCOL_VERSION, self.near.peer.process, 1, "host", "3.11.0", "worker")
        self.far.commit(encode_hello_into(buffer, offset, hello))
        self.far.flush()

    def frame(
        self,
        kind: int,
        *,
        code: int = 0,
        credits: int = 0,
        message_id: int = 0,
        extra: int = 0,
        regions: Sequence[Region] = (),
        releases: Sequence[tuple[int, int]] = (),
        payload: bytes = b"",
        flush: bool = True,
    ) -> None:
        buffer, offset = self.far.reserve(frame_size(len(regions), len(releases), len(payload)))
        written = encode_into(buffer, offset, kind, 0, code, credits, 2, message_id, extra, regions, releases, payload)
        self.far.commit(written)
        if flush:
            self.far.flush()

    def raw(self, data: bytes) -> None:
        buffer, offset = self.far.reserve(len(data) + 4)
        buffer[offset : offset + len(data) + 4] = struct.pack("<I", len(data)) + data
        self.far.commit(len(data) + 4)
        self.far.flush()


def open_call(peer: Peer) -> Call:
    call = Call(peer.hub.process, peer.session.loop, peer.session.thread)
    call.refs = 1
    peer.session.send_call(call, 2, 0, 0, 0, b"", ())
    return call


VIOLATIONS: dict[str, Callable[[Peer], Any]] = {
    "answer to nothing": lambda peer: peer.frame(Kind.RESPONSE, message_id=77),
    "answer twice": lambda peer: (
        open_call(peer),
        peer.frame(Kind.RESPONSE, message_id=1),  # type: ignore[func-returns-value]
        peer.frame(Kind.RESPONSE, message_id=1),  # type: ignore[func-returns-value]
    ),
    "call twice": lambda peer: (peer.frame(Kind.CALL, message_id=5), peer.frame(Kind.CALL, message_id=5)),  # type: ignore[func-returns-value]
    "item of nothing": lambda peer: peer.frame(Kind.ITEM, message_id=5),
    "item of a call": lambda peer: (open_call(peer), peer.frame(Kind.ITEM, message_id=1)),  # type: ignore[func-returns-value]
    "release of nothing": lambda peer: peer.frame(Kind.RELEASE, releases=[(5, 1)]),
    "too many credits": lambda peer: peer.frame(Kind.CREDIT, credits=100),
    "too many frames": lambda peer: [peer.frame(Kind.RELEASE, flush=i == 40) for i in range(41)],  # type: ignore[func-returns-value]
    "not a frame": lambda peer: peer.raw(bytes(range(64))),
    "a short frame": lambda peer: peer.raw(b"x"),
    "a cut frame": lambda peer: peer.raw(b"\x24\0\0\0ZCA1" + bytes(20)),
    "unknown status": lambda peer: (open_call(peer), peer.frame(Kind.RESPONSE, message_id=1, code=99)),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_violations_end_this_connection_only(name: str) -> None:
    other = Pair()
    other.hubs[1].answer = echo
    peer = Peer()
    peer.hello()
    await turns(10)
    violate = VIOLATIONS[name]
    try:
        violate(peer)
    except ConnectionLost:  # the loopback refuses what comes after the end
        pass
    await turns(30)
    assert isinstance(peer.session.closed, ProtocolError)
    ((cause, _),) = peer.hub.lost
    assert isinstance(cause, ProtocolError)
    call = other.call(b"\xc1unharmed")
    await other.settle()
    assert call.payload == b"\xc1unharmed"
    await other.close()


async def test_the_first_frame_must_be_a_greeting() -> None:
    peer = Peer()
    peer.frame(Kind.CALL, message_id=1)
    await turns(30)
    assert isinstance(peer.session.closed, ProtocolError)


async def test_what_is_harmless() -> None:
    peer = Peer()
    peer.hello()
    peer.frame(Kind.CANCEL, message_id=99)  # crossed with its answer
    peer.frame(Kind.STREAM_CREDIT, message_id=99, extra=8)
    peer.frame(Kind.CREDIT)
    peer.frame(Kind.GOODBYE)
    await turns(30)
    assert peer.session.closed is None
    assert peer.session.goodbye
    assert not peer.hub.cancelled
    peer.near.abort()
    await turns(10)
