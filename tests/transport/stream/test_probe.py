"""First contact with a cluster: addresses as people write them, and the process that answers there."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.conformance.connection import turns
from tests.transport.local_arena import TOKEN
from tests.transport.outsiders import server
from tests.transport.tcp_arena import tcp_side
from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError, VersionMismatch
from zcactor.transport.base import Connection
from zcactor.transport.stream import handshake_io
from zcactor.transport.stream.handshake import HELLO_NBYTES, HandshakeStatus, refusal
from zcactor.transport.stream.probe import Identity, find_leader, identify, parse_host_port
from zcactor.transport.tcp.endpoint import TcpEndpoint, parse_address

VERSION_3 = bytes.fromhex("5a4341430300030b")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:1", "127.0.0.1", 1),
        ("node-7.example:65535", "node-7.example", 65535),
        ("localhost:07433", "localhost", 7433),
        ("[::1]:7433", "::1", 7433),
        ("[2001:db8::1]:80", "2001:db8::1", 80),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_host_port(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    ["", ":", "7433", ":7433", "host", "host:", "host:http", "host:-1", "host:+1", "host: 80", "host:80 ", "host:8_0",
     "host:0", "host:65536", "host:99999999999999999999", "::1:7433", "[::1:7433", "::1]:7433", "a:b:80", "[::1]",
     "host:\u0668\u0660", "host:80\n", "tcp://host:80"],
)  # fmt: skip
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="is no address: ") as refused:
        parse_host_port(text)
    assert repr(text) in str(refused.value)


async def test_what_is_no_address_is_not_tried() -> None:
    with pytest.raises(ValueError, match="is no address"):
        await identify("host", TOKEN)


def test_address_of_an_identity() -> None:
    name = bytes(range(16))
    assert Identity(name, "10.0.0.1", 7433, "10.0.0.2", 0).address == f"{name.hex()}@10.0.0.1:7433"
    assert Identity(name, "::1", 7433, "::1", 0).address == f"{name.hex()}@[::1]:7433"


# ---- an endpoint answers


@pytest.fixture(params=["127.0.0.1", "::1"])
async def listening(request: pytest.FixtureRequest) -> AsyncIterator[tuple[TcpEndpoint, list[Connection]]]:
    """A listening endpoint, and the connections it has accepted."""
    accepted: list[Connection] = []
    with tcp_side(request.param) as side:
        assert isinstance(side.endpoint, TcpEndpoint)
        await side.endpoint.start(accepted.append)
        yield side.endpoint, accepted
        await side.endpoint.aclose()
        await turns()


def place(endpoint: TcpEndpoint) -> str:
    return endpoint.address.partition("@")[2]


async def test_who_it_is(listening: tuple[TcpEndpoint, list[Connection]]) -> None:
    endpoint, accepted = listening
    found = await identify(place(endpoint), TOKEN)
    _, host, port = parse_address(endpoint.address)
    assert found == Identity(endpoint.process, host, port, host, 0)
    assert found.address == endpoint.address
    while endpoint.pending:
        await asyncio.sleep(0)
    await turns()
    assert accepted == []


async def test_the_host_may_be_a_name() -> None:
    with tcp_side("127.0.0.1") as side:
        assert isinstance(side.endpoint, TcpEndpoint)
        await side.endpoint.start(lambda connection: connection.abort())
        found = await identify(f"localhost:{parse_address(side.endpoint.address)[2]}", TOKEN)
        assert found.address == side.endpoint.address
        await side.endpoint.aclose()
        await turns()


async def test_each_address_of_a_name_is_tried(
    listening: tuple[TcpEndpoint, list[Connection]], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, _ = listening
    _, host, port = parse_address(endpoint.address)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        empty = nobody.getsockname()[1]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    async def found(*_: Any, **__: Any) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", empty)),
            (family, socket.SOCK_STREAM, 6, "", (host, port)),
        ]

    resolving = _Resolving(asyncio.get_running_loop(), found)
    monkeypatch.setattr("asyncio.get_running_loop", lambda: resolving)
    identity = await identify(f"head:{port}", TOKEN)
    monkeypatch.undo()
    assert identity.address == endpoint.address


class _Resolving:
    """A loop that looks up names in another way."""

    def __init__(self, loop: asyncio.AbstractEventLoop, getaddrinfo: Any) -> None:
        self._loop = loop
        self.getaddrinfo = getaddrinfo

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


async def test_another_token(listening: tuple[TcpEndpoint, list[Connection]]) -> None:
    endpoint, accepted = listening
    token = secrets.token_bytes(32)
    with pytest.raises(AuthenticationError, match="holds another token") as refused:
        await identify(place(endpoint), token)
    assert place(endpoint) in str(refused.value)
    assert token.hex() not in repr(refused.value)
    assert accepted == []


# ---- another server answers, or none


async def test_nobody_there(listening: tuple[TcpEndpoint, list[Connection]]) -> None:
    endpoint, _ = listening
    await endpoint.aclose()
    with pytest.raises(ConnectionLost, match="cannot be reached over TCP: Connection refused") as lost:
        await identify(place(endpoint), TOKEN)
    assert place(endpoint) in str(lost.value)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 64 + ".invalid"])
async def test_no_host_of_that_name(host: str) -> None:
    with pytest.raises(ConnectionLost, match=f"no host is called '{host}': "):
        await identify(f"{host}:7433", TOKEN)


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", bytes(9), b"-ERR unknown command\r\n"]
)
async def test_something_else_answers(said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8 + HELLO_NBYTES)
        writer.write(said)
        await reader.read()

    async with server(answer) as address:
        with pytest.raises(ProtocolError, match="does not speak zcactor's protocol") as refused:
            await identify(address, TOKEN)
    assert type(refused.value) is ProtocolError
    assert address in str(refused.value)


async def test_another_version() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8 + HELLO_NBYTES)
        writer.write(VERSION_3 + bytes((HandshakeStatus.VERSION,)))
        await reader.read()

    async with server(answer) as address:
        with pytest.raises(VersionMismatch, match="protocol 3 ") as refused:
            await identify(address, TOKEN)
    assert address in str(refused.value)


async def test_one_that_is_busy_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_io, "ADMITTED_WITHIN", 0.1)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(refusal(HandshakeStatus.FULL))

    async with server(answer) as address:
        with pytest.raises(ConnectionLost) as lost:
            await identify(address, TOKEN)
    assert address in str(lost.value)


async def test_one_that_hangs_up() -> None:
    async def answer(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.readexactly(8 + HELLO_NBYTES)

    async with server(answer) as address:
        with pytest.raises(ConnectionLost, match="closed the connection during the handshake") as lost:
            await identify(address, TOKEN)
    assert address in str(lost.value)


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_one_that_hangs_up_and_answers_when_it_is_asked_again(
    listening: tuple[TcpEndpoint, list[Connection]], how: str
) -> None:
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            if how == "closed":
                await reader.readexactly(8 + HELLO_NBYTES)
            return  # with unread bytes the system resets the connection
        there, back = await asyncio.open_connection(*parse_host_port(place(listening[0])))
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await asyncio.gather(_relayed(reader, back), _relayed(there, writer))

    async with server(answer) as address:
        with pytest.raises(ConnectionLost, match="closed the connection during the handshake|reset"):
            await find_leader(address, TOKEN, patience=0)
        asked = 0
        found = await find_leader(address, TOKEN, patience=60)
    assert found.process == listening[0].process and asked == 2


async def _relayed(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()
    target.close()


async def test_one_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionLost, match=f"{address} did not answer the handshake"):
            await identify(address, TOKEN)


async def test_cancelling_closes_the_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        loop = asyncio.get_running_loop()
        task = loop.create_task(identify(f"127.0.0.1:{silent.getsockname()[1]}", TOKEN))
        theirs, _ = await loop.sock_accept(silent)
        with theirs:
            assert len(await loop.sock_recv(theirs, 1)) == 1
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            with contextlib.suppress(ConnectionResetError):
                while await loop.sock_recv(theirs, 1000):
                    pass
