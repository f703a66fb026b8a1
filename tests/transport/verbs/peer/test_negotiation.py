"""The conversation about RDMA with peers that send other messages, or end in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from typing import Any

import pytest

from tests.conformance.connection import Side, turns
from tests.transport.local_arena import TOKEN
from tests.transport.verbs.sides import endpoint_of, engine_of
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.base import Connection
from zcactor.transport.stream import handshake_io
from zcactor.transport.stream.handshake import Handshake, Introduction, Purpose
from zcactor.transport.tcp.endpoint import parse_address
from zcactor.transport.verbs.peer import negotiation
from zcactor.transport.verbs.peer.bootstrap import Resume, encode


async def authenticated(side: Side) -> socket.socket:
    """A bare socket to `side` that has done the handshake."""
    endpoint = endpoint_of(side)
    _, host, port = parse_address(endpoint.address)
    sock = socket.create_connection((host, port))
    sock.setblocking(False)
    hello = Introduction(secrets.token_bytes(16), os.getpid(), 4096, 16, 1024, Purpose.PEER, rdma=True)
    await handshake_io.introduce(sock, Handshake(TOKEN, hello, accepting=False), endpoint.process.hex())
    return sock


GARBAGE = {
    "nothing": b"",
    "half a length": b"\x10\x00",
    "half a message": b"\x10\x00\x00\x00abc",
    "too long": b"\xff\xff\xff\xff",
    "rubbish": b"\x04\x00\x00\x00abcd",
    "another message": encode(Resume(1)),
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage_instead_of_an_offer(sides: tuple[Side, Side], what: str) -> None:
    accepted: list[Connection] = []
    side = sides[0]
    await side.endpoint.start(accepted.append)
    with await authenticated(side) as sock:
        sock.send(GARBAGE[what])
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while await asyncio.get_running_loop().sock_recv(sock, 4096):
                pass
    assert not accepted
    assert engine_of(side).connections == 0
    await side.endpoint.aclose()


async def test_garbage_instead_of_a_verdict(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer makes its offer, and then sends another message than a verdict."""

    async def both(sock: socket.socket, reason: str) -> str:
        del reason
        await handshake_io.send_all(sock, encode(Resume(1)))
        raise ProtocolError("this end has had enough")

    original = negotiation.both
    turn = 0

    async def one_of_two(sock: socket.socket, reason: str) -> str:
        nonlocal turn
        turn += 1
        return await (both if turn == 1 else original)(sock, reason)

    monkeypatch.setattr(negotiation, "both", one_of_two)
    for side in sides:
        await side.endpoint.start(lambda connection: connection.abort())
    with pytest.raises((ConnectionLost, ProtocolError)):
        await sides[0].endpoint.connect(sides[1].endpoint.address)
    await turns(50)
    for side in sides:
        assert engine_of(side).connections == 0
        await side.endpoint.aclose()


@pytest.mark.parametrize("step", [1, 2, 3, 4])
async def test_peer_dies_at_each_step(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    told = 0
    accepted: list[Connection] = []
    original = negotiation.tell

    async def die(sock: socket.socket, message: Any) -> None:
        nonlocal told
        told += 1
        if told == step:
            raise ConnectionLost("this end has ended")
        await original(sock, message)

    monkeypatch.setattr(negotiation, "tell", die)
    for side in sides:
        await side.endpoint.start(accepted.append)
    with contextlib.suppress(ConnectionLost):
        (await sides[0].endpoint.connect(sides[1].endpoint.address)).abort()
    await turns(50)
    for connection in accepted:
        connection.abort()
    await turns(20)
    for side in sides:
        assert engine_of(side).connections == 0
        await side.endpoint.aclose()
