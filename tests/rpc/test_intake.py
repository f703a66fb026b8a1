"""Peers that break the rules of the protocol, or stretch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.connection import turns
from tests.conformance.violations import Peer
from tests.rpc.sessions import DEPTH, Hub, Pair, echo
from zcactor.errors import ProtocolError
from zcactor.objectstore.ref import Region
from zcactor.rpc.call import Call
from zcactor.rpc.messages import Flags, Kind
from zcactor.transport.loopback.endpoint import loopback_pair


def new_peer(*, sealed: bool = False) -> Peer:
    """A session on the loopback, and its peer."""
    near, far = loopback_pair(recv_depth=DEPTH)
    near.seals_payloads = sealed
    return Peer(near, far, Hub(far.peer.process))


REGION = Region(0, bytes(16), 9, 0, 100, 0)


class Items:
    """A stream that takes any item."""

    def slot(self, index: int) -> int:
        return index

    def fill(self, *_: Any) -> None: ...


async def test_a_violation_ends_this_connection_only() -> None:
    other = Pair()
    other.hubs[1].answer = echo
    peer = new_peer()
    peer.hello()
    await turns(10)
    peer.frame(Kind.RELEASE, releases=[(5, 1)])
    await turns(30)
    assert isinstance(peer.session.closed, ProtocolError)
    call = other.call(b"\xc1unharmed")
    await other.settle()
    assert call.payload == b"\xc1unharmed"
    await other.close()


def open_stream(peer: Peer) -> Call:
    call = peer.open_call()
    call.stream = Items()
    return call


SPILLED = int(Flags.SPILLED)
SPILLS: dict[str, Callable[[Peer, bytes], Any]] = {
    "call": lambda peer, key: peer.frame(Kind.CALL, message_id=5, flags=SPILLED, regions=[REGION], payload=key),
    "result": lambda peer, key: (
        peer.open_call(),
        peer.frame(Kind.RESPONSE, message_id=1, flags=SPILLED, regions=[REGION], payload=key),  # type: ignore[func-returns-value]
    ),
    "item": lambda peer, key: (
        open_stream(peer),
        peer.frame(Kind.ITEM, message_id=1, flags=SPILLED, regions=[REGION], payload=key),  # type: ignore[func-returns-value]
    ),
}


@pytest.mark.parametrize("name", SPILLS)
@pytest.mark.parametrize(("sealed", "key"), [(True, b""), (True, bytes(48)), (False, b"")])
async def test_a_payload_without_a_key_ends_a_sealed_connection(name: str, sealed: bool, key: bytes) -> None:
    peer = new_peer(sealed=sealed)
    peer.hello()
    await turns(10)
    SPILLS[name](peer, key)
    await turns(30)
    if key or not sealed:
        assert peer.session.closed is None
        peer.session.connection.abort()
        await turns(10)
    else:
        assert isinstance(peer.session.closed, ProtocolError)
        assert "without a key" in str(peer.session.closed)


async def test_the_first_frame_must_be_a_greeting() -> None:
    peer = new_peer()
    peer.frame(Kind.CALL, message_id=1)
    await turns(30)
    assert isinstance(peer.session.closed, ProtocolError)


async def test_what_is_harmless() -> None:
    peer = new_peer()
    peer.hello()
    peer.frame(Kind.CANCEL, message_id=99)  # the cancellation crossed with the answer
    peer.frame(Kind.STREAM_CREDIT, message_id=99, extra=8)
    peer.frame(Kind.CREDIT)
    peer.frame(Kind.GOODBYE)
    await turns(30)
    assert peer.session.closed is None
    assert peer.session.goodbye
    assert not peer.hub.cancelled
    peer.near.abort()
    await turns(10)
