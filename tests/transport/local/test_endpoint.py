"""Local endpoints: the shared suite, and the peers that they let in."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.conformance.connection import (
    ARENA_NBYTES,
    ConnectedPair,
    MappingSuite,
    Recorder,
    Side,
    connect,
    finish,
    send,
    turns,
)
from tests.transport.local_arena import TOKEN, local_side, memfd, run_directory
from tests.transport.outsiders import victim
from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError, VersionMismatch
from zcactor.transport.base import Connection
from zcactor.transport.local.endpoint import LocalEndpoint
from zcactor.transport.stream.handshake import HELLO_NBYTES, Handshake, HandshakeStatus, Introduction, refusal
from zcactor.transport.stream.record_layer import KEY_NBYTES


class TestLocal(MappingSuite):
    @pytest.fixture
    def sides(self, tmp_path: Path) -> Iterator[tuple[Side, Side]]:
        directory = run_directory(tmp_path)
        with local_side(directory) as left, local_side(directory) as right:
            yield left, right

    async def test_mapping_is_read_only_and_keeps_one_descriptor(self, pair: ConnectedPair) -> None:
        arenas = {inode(side.address) for side in pair.sides}

        def descriptors() -> int:
            numbers = [int(name) for name in os.listdir("/proc/self/fd") if alive(name)]
            return sum(os.fstat(number).st_ino in arenas for number in numbers)

        address = pair.left.map(0, ARENA_NBYTES).address
        assert permissions(address) == "r--s"
        owned = 2 * 2  # two descriptors of each owner in this process: its memfd, and the duplicate in its mmap
        assert descriptors() == owned + 2
        await pair.left.open_writable()
        assert permissions(pair.left.map(0, ARENA_NBYTES, writable=True).address) == "rw-s"
        assert pair.left.map(0, ARENA_NBYTES).address == address
        assert descriptors() == owned + 3

    async def test_an_ended_connection_gives_no_addresses(self, pair: ConnectedPair) -> None:
        await pair.left.open_writable()
        await pair.left.aclose()
        pair.left.mapping = pair.left.writable_mapping = None
        for writable in (False, True):
            with pytest.raises(ConnectionLost, match="nothing more is mapped"):
                pair.left.map(0, 4, writable=writable)

    async def test_socket_file_is_removed(self, pair: ConnectedPair, tmp_path: Path) -> None:
        assert len(list((tmp_path / "run").iterdir())) == 2
        for side in pair.sides:
            await side.endpoint.aclose()
        assert list((tmp_path / "run").iterdir()) == []


def alive(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def mapped(address: int) -> list[str]:
    """The system's facts about the mapping around an address, see proc_pid_maps(5)."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *rest = line.split()
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= address < high:
            return rest
    return ["unmapped"]


def permissions(address: int) -> str:
    return mapped(address)[0]


def inode(address: int) -> int:
    return int(mapped(address)[3])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return run_directory(tmp_path)


@pytest.fixture
async def owner(directory: Path) -> AsyncIterator[tuple[LocalEndpoint, list[Connection]]]:
    """A listening endpoint and the connections that it has accepted."""
    accepted: list[Connection] = []
    with local_side(directory) as side:
        assert isinstance(side.endpoint, LocalEndpoint)
        async with side.endpoint as endpoint:
            await endpoint.start(accepted.append)
            yield endpoint, accepted
        for connection in accepted:
            connection.abort()
        await turns()


Owner = tuple[LocalEndpoint, list[Connection]]


def stranger_hello() -> Introduction:
    return Introduction(secrets.token_bytes(16), os.getpid(), 0, 16, 1024)


class Raw:
    """A client that reads and writes bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def rest(self) -> bytes:
        """The bytes up to the other end's close. Bytes that it left unread make the system report a reset."""
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := await self.reader.read(100):
                received += part
        return received


@contextlib.asynccontextmanager
async def raw(endpoint: LocalEndpoint, directory: Path) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_unix_connection(directory / f"{endpoint.address}.sock")
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


# ---- the peers that are let in


async def test_wrong_token(owner: Owner, directory: Path) -> None:
    endpoint, accepted = owner
    stranger = LocalEndpoint(directory, secrets.token_bytes(16), secrets.token_bytes(32), None, 0)
    with pytest.raises(AuthenticationError, match="refused this process"):
        await stranger.connect(endpoint.address)
    assert accepted == []


async def test_no_token(owner: Owner, directory: Path) -> None:
    endpoint, accepted = owner
    async with raw(endpoint, directory) as client:
        client.writer.write(Handshake(TOKEN, stranger_hello(), accepting=False).opening)
        await client.reader.readexactly(9 + HELLO_NBYTES + KEY_NBYTES)
        client.writer.write(bytes(KEY_NBYTES + 32))
        assert await client.rest() == bytes((HandshakeStatus.AUTH,))
    assert accepted == []


async def test_replayed_proof(owner: Owner, directory: Path) -> None:
    endpoint, accepted = owner
    hello = stranger_hello()
    handshake = Handshake(TOKEN, hello, accepting=False)
    async with raw(endpoint, directory) as client:
        client.writer.write(handshake.opening)
        handshake.receive(await client.reader.readexactly(9))
        proof = handshake.receive(await client.reader.readexactly(HELLO_NBYTES + KEY_NBYTES))
        client.writer.write(proof)
        assert await client.reader.readexactly(1) == bytes((HandshakeStatus.OK,))
    async with raw(endpoint, directory) as client:
        client.writer.write(handshake.opening)
        await client.reader.readexactly(9 + HELLO_NBYTES + KEY_NBYTES)
        client.writer.write(proof)
        assert await client.rest() == bytes((HandshakeStatus.AUTH,))
    assert accepted == []


async def test_impostor_at_the_address(owner: Owner, directory: Path) -> None:
    endpoint, _ = owner
    address = secrets.token_hex(16)
    (directory / f"{address}.sock").symlink_to(f"{endpoint.address}.sock")
    stranger = LocalEndpoint(directory, secrets.token_bytes(16), TOKEN, None, 0)
    with pytest.raises(AuthenticationError, match="in the place of"):
        await stranger.connect(address)


@pytest.mark.parametrize(
    "address", ["", "../" + "a" * 29, "A" * 32, "a" * 31, "a" * 33, "/etc/passwd", "a" * 32 + "\n"]
)
async def test_address_that_is_no_name(directory: Path, address: str) -> None:
    with pytest.raises(ProtocolError, match="32 hexadecimal digits"):
        await LocalEndpoint(directory, bytes(16), TOKEN, None, 0).connect(address)


# A connector of protocol 7, one of Python 3.99, and the bytes that each end must send; frozen.
VERSION_7 = b"ZCAC\x07\x00\x03\x0b"
PYTHON_3_99 = bytes.fromhex("5a434143 0300 03 63".replace(" ", ""))


@pytest.mark.parametrize("preamble", [VERSION_7, PYTHON_3_99])
async def test_connector_of_another_version(
    owner: Owner, directory: Path, preamble: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, accepted = owner
    async with raw(endpoint, directory) as client:
        client.writer.write(preamble + bytes(200))
        assert await client.rest() == refusal(HandshakeStatus.VERSION)
    assert accepted == []
    assert "the peer speaks protocol" in caplog.text


@pytest.mark.parametrize(("preamble", "named"), [(VERSION_7, "protocol 7 "), (PYTHON_3_99, "Python 3.99,")])
async def test_acceptor_of_another_version(directory: Path, preamble: bytes, named: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(preamble + bytes((HandshakeStatus.VERSION,)))
        await reader.read()
        writer.close()

    address = secrets.token_hex(16)
    server = await asyncio.start_unix_server(answer, directory / f"{address}.sock")
    with pytest.raises(VersionMismatch, match=named):
        await LocalEndpoint(directory, bytes(16), TOKEN, None, 0).connect(address)
    server.close()
    await turns()


FOREIGN_CLIENT = """
import os, socket, sys
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
print(sock.recv(100).hex())
"""
FOREIGN_SERVER = """
import os, socket, sys
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A run directory whose parents are open to every user, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.root
async def test_foreign_user_is_refused(open_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    accepted: list[Connection] = []
    with local_side(open_directory) as side:
        await side.endpoint.start(accepted.append)
        path = open_directory / f"{side.endpoint.address}.sock"
        open_directory.chmod(0o755)
        path.chmod(0o777)
        command = [sys.executable, "-c", FOREIGN_CLIENT, str(path)]
        client = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        await side.endpoint.aclose()
    assert bytes.fromhex(client.stdout) == refusal(HandshakeStatus.AUTH)
    assert accepted == []
    assert "uid 65534" in caplog.text


@pytest.mark.root
async def test_foreign_user_is_not_trusted(open_directory: Path) -> None:
    open_directory.chmod(0o777)
    address = secrets.token_hex(16)
    command = [sys.executable, "-c", FOREIGN_SERVER, str(open_directory / f"{address}.sock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert await asyncio.to_thread(server.stdout.readline) == b"ready\n"
        with pytest.raises(AuthenticationError, match="uid 65534"):
            await LocalEndpoint(open_directory, bytes(16), TOKEN, None, 0).connect(address)


# ---- arenas


@pytest.mark.parametrize(("seals", "announced"), [(0, ARENA_NBYTES), (2, ARENA_NBYTES), (6, 2 * ARENA_NBYTES)])
async def test_bad_arena_of_the_acceptor(directory: Path, seals: int, announced: int) -> None:
    with memfd(seals=seals) as fd:
        async with LocalEndpoint(directory, secrets.token_bytes(16), TOKEN, fd, announced) as endpoint:
            await endpoint.start(lambda _: None)
            with pytest.raises(ProtocolError, match="arena"):
                await LocalEndpoint(directory, secrets.token_bytes(16), TOKEN, None, 0).connect(endpoint.address)


@pytest.mark.parametrize(("seals", "announced"), [(0, ARENA_NBYTES), (4, ARENA_NBYTES), (6, 2 * ARENA_NBYTES)])
async def test_bad_arena_of_the_connector(owner: Owner, directory: Path, seals: int, announced: int) -> None:
    endpoint, accepted = owner
    with memfd(seals=seals) as fd:
        stranger = LocalEndpoint(directory, secrets.token_bytes(16), TOKEN, fd, announced)
        connection, recorder = await stranger.connect(endpoint.address), Recorder()
        connection.start(recorder)
        assert isinstance(await recorder.wait_lost(), ConnectionLost)
    assert accepted == []


async def test_arena_announced_and_not_passed(owner: Owner, directory: Path) -> None:
    endpoint, accepted = owner
    hello = Introduction(secrets.token_bytes(16), os.getpid(), 4096, 16, 1024)
    handshake = Handshake(TOKEN, hello, accepting=False)
    async with raw(endpoint, directory) as client:
        client.writer.write(handshake.opening)
        while handshake.wants:
            client.writer.write(handshake.receive(await client.reader.readexactly(handshake.wants)))
        client.writer.write(b"\0")
        await client.rest()
    assert accepted == []


async def test_without_arenas(directory: Path) -> None:
    sides = [
        Side(LocalEndpoint(directory, process, TOKEN, None, 0, depth, limit), process, bytearray())
        for process, depth, limit in [(b"a" * 16, 100, 40_000), (b"b" * 16, 300, 10_000)]
    ]
    pair = await connect(*sides)
    assert pair.left.recv_depth == pair.right.recv_depth == 100
    assert pair.left.eager_limit == pair.right.eager_limit == 10_000
    await pair.left.open_writable()
    assert pair.left.map(0, 0).address == pair.left.map(0, 0, writable=True).address == 0
    with pytest.raises(ProtocolError):
        pair.left.map(0, 1)
    await finish(pair)


async def test_open_writable_when_the_peer_listens_no_more(owner: Owner, directory: Path) -> None:
    endpoint, _ = owner
    connection = await LocalEndpoint(directory, bytes(16), TOKEN, None, 0).connect(endpoint.address)
    await endpoint.aclose()
    with pytest.raises(ConnectionLost):
        await connection.open_writable()
    with pytest.raises(LookupError):
        connection.map(0, 1, writable=True)
    connection.abort()


# ---- the run directory


def test_arguments() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        LocalEndpoint(Path("/"), b"short", TOKEN, None, 0)
    with pytest.raises(ValueError, match="descriptor and a size"):
        LocalEndpoint(Path("/"), bytes(16), TOKEN, None, 4096)


async def test_directory_open_to_others(directory: Path) -> None:
    directory.chmod(0o750)
    endpoint = LocalEndpoint(directory, bytes(16), TOKEN, None, 0)
    assert "chmod 0700" in str(endpoint.viability())
    with pytest.raises(PermissionError, match="0750"):
        await endpoint.start(lambda _: None)


async def test_listening_twice(owner: Owner) -> None:
    with pytest.raises(RuntimeError):
        await owner[0].start(lambda _: None)


async def test_long_directory(tmp_path: Path) -> None:
    parent = tmp_path / ("d" * 120)
    parent.mkdir()
    directory = run_directory(parent)
    with local_side(directory) as left, local_side(directory) as right:
        pair = await connect(left, right)
        recorder = Recorder()
        pair.right.start(recorder)
        send(pair.left, [b"far down"])
        await recorder.wait_frames(1)
        await finish(pair)
    assert list(directory.iterdir()) == []


# ---- a process that is killed

VICTIM = """
import asyncio, sys
from pathlib import Path
from tests.transport.local_arena import local_side
from tests.transport.outsiders import await_death

with local_side(Path(sys.argv[1])) as side:
    side.arena[:5] = b"alive"
    asyncio.run(await_death(side))
"""


@pytest.mark.slow
async def test_killed_process(directory: Path) -> None:
    with victim(VICTIM, str(directory)) as (process, address):
        connection = await LocalEndpoint(directory, bytes(16), TOKEN, None, 0).connect(address)
        assert connection.peer.pid == process.pid
        recorder = Recorder()
        connection.start(recorder)
        await recorder.wait_frames(1)
        process.kill()
        cause = await recorder.wait_lost()
        assert isinstance(cause, ConnectionLost)
        assert str(process.pid) in str(cause)
        assert ctypes.string_at(connection.map(0, 5).address, 5) == b"alive", "readers keep valid maps of a dead owner"
        await turns()
        assert len(recorder.lost) == 1
