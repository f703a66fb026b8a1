"""TLS: the folder, the socket, and the errors at both ends when there is no agreement."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509 import InvalidVersion

from tests.conformance.connection import turns
from tests.transport.certificates import DAY, Authority
from tests.transport.local_arena import TOKEN
from tests.transport.outsiders import STRANGERS, rest, server
from tests.transport.tcp_arena import tcp_side
from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError, VersionMismatch
from zcactor.transport.stream import handshake_io
from zcactor.transport.stream import listener as door
from zcactor.transport.stream.handshake import PYTHON, HandshakeStatus, preamble, refusal
from zcactor.transport.stream.handshake_io import readable, receive_exactly, send_all
from zcactor.transport.stream.listener import PER_SOURCE
from zcactor.transport.stream.probe import Identity, identify
from zcactor.transport.stream.tls import BadTls, RefusedTls, Tls, TlsSocket, load_tls
from zcactor.transport.tcp.endpoint import TcpEndpoint, parse_address

# ---- the folder


@pytest.fixture
def folder(authority: Authority, tmp_path: Path) -> Path:
    """A TLS folder that the test may damage."""
    return authority.folder(tmp_path / "tls")


@pytest.fixture(scope="module")
def tls(tls_folder: Path) -> Tls:
    return load_tls(tls_folder)


def test_contexts(tls: Tls) -> None:
    for context in (tls.loaded.client, tls.loaded.server):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert tls.loaded.server.num_tickets == 0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        AuthenticationError, match=f"security is tls:{tmp_path}/none, and ca.pem there cannot be read: No such"
    ):
        load_tls(tmp_path / "none")


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
def test_a_file_that_is_not_there(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(AuthenticationError, match=f"{name} there cannot be read: No such file"):
        load_tls(folder)
    (folder / name).mkdir()
    with pytest.raises(AuthenticationError, match=f"{name} there is no file"):
        load_tls(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
def test_a_file_that_cannot_be_read(folder: Path, name: str) -> None:
    (folder / name).chmod(0)
    with pytest.raises(AuthenticationError, match=f"{name} there cannot be read: Permission denied"):
        load_tls(folder)


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
@pytest.mark.parametrize("content", [b"", b"no PEM\n", os.urandom(1000), b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_file_that_is_no_pem(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(AuthenticationError, match=str(name)):
        load_tls(folder)


def test_a_key_of_another_certificate(folder: Path, authority: Authority, tmp_path: Path) -> None:
    other = authority.folder(tmp_path / "other")
    (folder / "key.pem").write_bytes((other / "key.pem").read_bytes())
    with pytest.raises(AuthenticationError, match="are no certificate and its key.*KEY_VALUES_MISMATCH"):
        load_tls(folder)


def test_an_encrypted_key(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key((folder / "key.pem").read_bytes(), None)
    encrypted = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret"))
    (folder / "key.pem").write_bytes(encrypted)
    with pytest.raises(AuthenticationError, match="not encrypted"):
        load_tls(folder)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644])
def test_a_key_that_others_get_at(folder: Path, mode: int) -> None:
    (folder / "key.pem").chmod(mode)
    with pytest.raises(AuthenticationError, match=f"key.pem has mode {mode:04o}: others can get at it"):
        load_tls(folder)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_modes_that_are_allowed(folder: Path, mode: int) -> None:
    (folder / "key.pem").chmod(mode)
    load_tls(folder)


def test_a_key_of_somebody_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(folder).st_uid + 1)
    with pytest.raises(AuthenticationError, match=r"key.pem belongs to uid \d+, and this process is uid"):
        load_tls(folder)


def test_no_descriptor_is_left(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    load_tls(folder)
    (folder / "key.pem").chmod(0o644)
    with pytest.raises(AuthenticationError):
        load_tls(folder)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.slow
def test_who_has_not_set_it_never_loads_it() -> None:
    program = (
        "import asyncio, sys; asyncio.sslproto = None; before = set(sys.modules)\n"
        "import zcactor.transport.tcp.endpoint, zcactor.transport.stream.probe, zcactor.assembly.endpoints\n"
        "print([m for m in set(sys.modules) - before if m in ('ssl', '_ssl') or '.tls' in m])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


# ---- the socket


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far = listener.accept()[0]
    for sock in (near, far):
        sock.setblocking(False)
    return near, far


@pytest.fixture
async def both(tls: Tls) -> AsyncIterator[tuple[TlsSocket, TlsSocket]]:
    """The connector's end and the acceptor's."""
    near, far = connected()
    left, right = await asyncio.gather(tls.connect(near), tls.accept(far))
    with left, right:
        yield left, right


Both = tuple[TlsSocket, TlsSocket]


async def test_bytes_both_ways(both: Both) -> None:
    left, right = both
    for one, other in ((left, right), (right, left)):
        with pytest.raises(BlockingIOError):
            other.recv(1)
        with pytest.raises(BlockingIOError):
            other.recv_into(bytearray(1))
        await send_all(one, b"hello")
        assert await receive_exactly(other, 5) == b"hello"


async def test_what_is_held_is_given_before_anything_is_awaited(both: Both) -> None:
    left, right = both
    left.send(bytes(range(100)))
    await readable(right)
    assert [right.recv(1)[0] for _ in range(100)] == list(range(100))
    with pytest.raises(BlockingIOError):
        right.recv(1)


async def test_send_that_would_block_goes_on_with_the_same_bytes_and_more(both: Both) -> None:
    left, right = both
    data = os.urandom(8 << 20)
    sent, end, received, blocked = 0, 1 << 20, bytearray(), 0
    while len(received) < len(data):
        with contextlib.suppress(BlockingIOError):
            while sent < len(data):
                try:
                    sent += left.send(memoryview(data)[sent:end])
                    end = min(max(end, sent) + 100_000, len(data))
                except BlockingIOError:
                    blocked += 1
                    end = min(end + 777, len(data))
                    raise
        with contextlib.suppress(BlockingIOError):
            while True:
                received += right.recv(1 << 16)
    assert blocked and received == data


async def test_an_end_without_words(both: Both) -> None:
    left, right = both
    left.send(b"last")
    left.close()
    assert await receive_exactly(right, 4) == b"last"
    await readable(right)
    assert right.recv(10) == b""
    with pytest.raises(OSError, match="Broken pipe|reset") as broken:
        while True:
            right.send(bytes(100_000))
    assert not isinstance(broken.value, ssl.SSLError)


async def test_shutting_down_wakes_a_thread_and_never_goes_on_in_the_clear(both: Both) -> None:
    left, right = both
    left.setblocking(True)
    outcome: list[bytes] = []
    thread = threading.Thread(target=lambda: outcome.append(left.recv(10)))
    thread.start()
    left.shutdown(socket.SHUT_RDWR)
    await asyncio.to_thread(thread.join)
    assert outcome == [b""]
    with pytest.raises(BrokenPipeError):
        left.send(b"secret")
    await readable(right)
    assert socket.socket.recv(right, 1000) == b""


@pytest.mark.parametrize("call", ["recv", "recv_into", "send"])
async def test_an_error_is_not_that_of_the_next_call_on_another_socket(tls: Tls, both: Both, call: str) -> None:
    near, far = connected()
    gone, other = await asyncio.gather(tls.connect(near), tls.accept(far))
    with gone, other:
        gone.shutdown(socket.SHUT_RDWR)
        for _ in range(2):  # the second time, OpenSSL knows the end
            with contextlib.suppress(OSError):
                getattr(gone, call)(bytearray(1) if call != "recv" else 1)
            for one in both:
                with pytest.raises(BlockingIOError):
                    one.recv(1)


async def test_one_thread_sends_while_another_receives(both: Both) -> None:
    left, right = both
    data = os.urandom(4 << 20)
    received: dict[TlsSocket, bytes] = {}

    def receive(sock: TlsSocket) -> None:
        got = bytearray()
        while len(got) < len(data):
            with contextlib.suppress(BlockingIOError):
                got += sock.recv(1 << 16)
        received[sock] = bytes(got)

    def send(sock: TlsSocket) -> None:
        view = memoryview(data)
        while view:
            with contextlib.suppress(BlockingIOError):
                view = view[sock.send(view) :]

    await asyncio.gather(*(asyncio.to_thread(work, sock) for sock in both for work in (receive, send)))
    assert received == {left: data, right: data}


async def test_bytes_that_are_changed_on_their_way(tls: Tls) -> None:
    near, far = connected()
    left, right = await asyncio.gather(tls.connect(near), tls.accept(far))
    with left, right:
        socket.socket.send(left, b"\x17\x03\x03\x00\x30" + bytes(48))
        await readable(right)
        with pytest.raises(BadTls, match="somebody changed it"):
            right.recv(10)


async def test_cancelling_closes_the_socket(tls: Tls) -> None:
    for handshake in (tls.connect, tls.accept):
        near, far = connected()
        with far:
            task = asyncio.create_task(handshake(near))
            await turns()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert near.fileno() == -1
            far.setblocking(True)
            with contextlib.suppress(ConnectionResetError):
                while far.recv(1000):
                    pass


async def test_a_peer_that_hangs_up(tls: Tls) -> None:
    for handshake, opening in ((tls.connect, b""), (tls.accept, b"\x16\x03\x01")):
        near, far = connected()
        far.send(opening)
        far.shutdown(socket.SHUT_WR)
        with far, pytest.raises(ConnectionLost, match="during the TLS handshake"):
            await handshake(near)
        assert near.fileno() == -1


async def test_an_older_version_of_tls(tls: Tls) -> None:
    near, far = connected()
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    client = old.wrap_socket(near, do_handshake_on_connect=False)
    with client, contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    with pytest.raises(ProtocolError, match="is not TLS 1.3"):
        await tls.accept(far)


# ---- endpoints


Sides = Callable[..., Any]


@pytest.fixture
async def endpoint(tls_folder: Path) -> AsyncIterator[TcpEndpoint]:
    """A listening endpoint that aborts every connection."""
    async with listening(tls_folder) as found:
        yield found


@contextlib.asynccontextmanager
async def listening(folder: Path | None) -> AsyncIterator[TcpEndpoint]:
    with tcp_side(tls=folder) as side:
        assert isinstance(side.endpoint, TcpEndpoint)
        await side.endpoint.start(lambda connection: connection.abort())
        yield side.endpoint
        await side.endpoint.aclose()
        await turns()


def stranger(folder: Path | None, token: bytes = TOKEN) -> TcpEndpoint:
    return TcpEndpoint(
        "127.0.0.1", secrets.token_bytes(16), token, None, 0, tls=None if folder is None else load_tls(folder)
    )


async def refused(endpoint: TcpEndpoint, connector: TcpEndpoint, error: type[Exception]) -> str:
    """The message of the connector's error."""
    with pytest.raises(error) as told:
        await connector.connect(endpoint.address)
    while endpoint.pending:
        await asyncio.sleep(0)
    return str(told.value)


@pytest.fixture
def expired(authority: Authority, tmp_path: Path) -> Path:
    return authority.folder(tmp_path / "expired", ends_in=-DAY)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return Authority().folder(tmp_path / "foreign")


async def test_a_connector_whose_certificate_has_expired(
    endpoint: TcpEndpoint, expired: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = await refused(endpoint, stranger(expired), AuthenticationError)
    assert "does not accept this process's certificate" in told and "expired" in told and "cert.pem" in told
    assert "certificate has expired" in caplog.text


async def test_an_acceptor_whose_certificate_has_expired(
    tls_folder: Path, expired: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(expired) as endpoint:
        told = await refused(endpoint, stranger(tls_folder), AuthenticationError)
    assert "the peer's certificate is not accepted: certificate has expired" in told and "ca.pem" in told
    assert "does not accept this process's certificate" in caplog.text


async def test_a_renewed_certificate_is_read_without_a_restart(
    expired: Path, authority: Authority, tls_folder: Path, tmp_path: Path
) -> None:
    async with listening(expired) as endpoint:
        assert "expired" in await refused(endpoint, stranger(tls_folder), AuthenticationError)
        renewed = authority.folder(tmp_path / "renewed")
        for name in ("cert.pem", "key.pem"):
            (renewed / name).rename(expired / name)
        for _ in range(2):
            (await stranger(tls_folder).connect(endpoint.address)).abort()


async def test_half_of_a_renewal_changes_nothing(
    folder: Path, authority: Authority, tls_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = authority.folder(tmp_path / "renewed")
    async with listening(folder) as endpoint:
        (renewed / "cert.pem").rename(folder / "cert.pem")  # of another key
        for _ in range(2):
            (await stranger(tls_folder).connect(endpoint.address)).abort()
        assert caplog.text.count("the former ones are used further") == 1
        (renewed / "key.pem").rename(folder / "key.pem")
        certificate = endpoint_tls(endpoint).loaded.certificate
        (await stranger(tls_folder).connect(endpoint.address)).abort()
        assert endpoint_tls(endpoint).loaded.certificate != certificate


def endpoint_tls(endpoint: TcpEndpoint) -> Tls:
    assert endpoint._tls is not None
    return endpoint._tls


@pytest.mark.parametrize(("ends_in", "said"), [(6 * DAY, "ends on"), (-DAY, "has ended on"), (8 * DAY, "")])
def test_a_certificate_that_ends_within_a_week(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, ends_in: timedelta, said: str
) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    tls = load_tls(authority.folder(tmp_path / "ending", ends_in=ends_in))
    assert before <= tls.ends - ends_in <= datetime.now(UTC)
    words = f"{tmp_path}/ending/cert.pem {said} {tls.ends:%Y-%m-%d}"
    assert (words in caplog.text) == bool(said) == bool(caplog.text)


def test_the_ends_that_certificates_can_state(authority: Authority, tmp_path: Path) -> None:
    for years in (1, 40):  # two digits of a year until 2049, four from then on
        ends_in = years * 365 * DAY
        before = datetime.now(UTC).replace(microsecond=0)
        tls = load_tls(authority.folder(tmp_path / str(years), ends_in=ends_in))
        assert before <= tls.ends - ends_in <= datetime.now(UTC)


@pytest.mark.parametrize("error", [ValueError("a time without seconds"), InvalidVersion("version 4", 4)])
def test_a_certificate_whose_end_cannot_be_read(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:  # fmt: skip
    def refuse(_: bytes) -> None:
        raise error

    folder = authority.folder(tmp_path / "odd")
    monkeypatch.setattr("cryptography.x509.load_der_x509_certificate", refuse)
    assert load_tls(folder).ends > datetime.now(UTC) + 999 * 365 * DAY
    assert f"no warning will come before the certificate in {folder} ends" in caplog.text


async def test_a_connector_of_another_ca(endpoint: TcpEndpoint, foreign: Path) -> None:
    told = await refused(endpoint, stranger(foreign), AuthenticationError)
    assert "the peer's certificate is not accepted" in told


async def test_a_connector_that_is_of_another_ca_and_believes_ours(
    endpoint: TcpEndpoint, foreign: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    (foreign / "ca.pem").write_bytes(authority.certificate)
    told = await refused(endpoint, stranger(foreign), AuthenticationError)
    assert "does not accept this process's certificate" in told and "unknown ca" in told
    assert "the peer's certificate is not accepted" in caplog.text


async def test_a_connector_without_a_certificate(
    endpoint: TcpEndpoint, tls_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode, bare.sslsocket_class = False, ssl.CERT_NONE, TlsSocket
    connector = stranger(None)
    connector._tls = load_tls(tls_folder)
    connector._tls.loaded = replace(connector._tls.loaded, client=bare, certificate=b"")
    told = await refused(endpoint, connector, AuthenticationError)
    assert "certificate required" in told
    assert "has no certificate" in caplog.text


async def test_certificates_do_not_stand_for_the_token(endpoint: TcpEndpoint, tls_folder: Path) -> None:
    told = await refused(endpoint, stranger(tls_folder, secrets.token_bytes(32)), AuthenticationError)
    assert "holds another token" in told


async def test_a_connector_without_tls(endpoint: TcpEndpoint, caplog: pytest.LogCaptureFixture) -> None:
    told = await refused(endpoint, stranger(None), ProtocolError)
    assert "by TLS only" in told and "ZCACTOR_SECURITY" in told
    assert "the peer speaks no TLS" in caplog.text and "ZCACTOR_SECURITY" in caplog.text


async def test_an_acceptor_without_tls(tls_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with listening(None) as endpoint:
        told = await refused(endpoint, stranger(tls_folder), ProtocolError)
    assert "the peer speaks no TLS" in told and "ZCACTOR_SECURITY" in told
    assert "began with TLS" in caplog.text and "ZCACTOR_SECURITY" in caplog.text


async def test_an_acceptor_that_wants_its_frames_sealed_besides(tls_folder: Path) -> None:
    async with listening(tls_folder) as endpoint:
        endpoint._sealing = True
        told = await refused(endpoint, stranger(tls_folder), ProtocolError)
    assert "sealed besides" in told


@pytest.mark.parametrize("opening", STRANGERS.values(), ids=STRANGERS.keys())
async def test_strangers(endpoint: TcpEndpoint, opening: bytes, caplog: pytest.LogCaptureFixture) -> None:
    _, host, port = parse_address(endpoint.address)
    for _ in range(3):
        with socket.create_connection((host, port)) as sock:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.send(opening + bytes(1000))
            answer = await rest(sock)
            assert answer in (b"", refusal(HandshakeStatus.TLS)) or answer[0] == 0x15, "an alert"
    while endpoint.pending:
        await asyncio.sleep(0)
    assert len(caplog.records) == 1


async def test_silence_ends(endpoint: TcpEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 0.02)
    _, host, port = parse_address(endpoint.address)
    for sent in (b"", b"\x16\x03\x01\x02\x00"):
        with socket.create_connection((host, port)) as sock:
            sock.setblocking(False)
            sock.send(sent)
            assert await rest(sock) == b""


async def test_no_more_half_open_handshakes_than_so_many(
    endpoint: TcpEndpoint, tls_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "SILENT", 1000.0)
    monkeypatch.setattr(handshake_io, "ADMITTED_WITHIN", 0.0)
    connector = stranger(tls_folder)
    _, host, port = parse_address(endpoint.address)
    with contextlib.ExitStack() as crowd:
        for _ in range(PER_SOURCE):
            crowd.enter_context(socket.create_connection((host, port)))
        while endpoint.pending < PER_SOURCE:
            await asyncio.sleep(0)
        with pytest.raises(ConnectionLost, match="too many pending handshakes"):
            await connector.connect(endpoint.address)
        crowd.close()
        while endpoint.pending:
            await asyncio.sleep(0)
    monkeypatch.undo()
    (await connector.connect(endpoint.address)).abort()


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError),
        (b"ZCACZCAC", ProtocolError),
        (bytes(9), ProtocolError),
        (preamble(3, PYTHON) + bytes((HandshakeStatus.VERSION,)), VersionMismatch),
        (refusal(HandshakeStatus.FULL), ConnectionLost),
        (b"\x15\x03\x03\x00\x02\x02\x28", ProtocolError),
    ],
)
async def test_something_else_answers(
    tls: Tls, said: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_io, "ADMITTED_WITHIN", 0.0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said)
        await reader.read()

    async with server(answer) as place:
        with pytest.raises(error) as told:
            await identify(place, TOKEN, tls)
    assert type(told.value) is error
    assert place in str(told.value)


async def test_one_that_is_silent(tls_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = stranger(tls_folder)
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConnectionLost, match="did not answer the handshake"),
    ):
        await connector.connect(f"{'a' * 32}@127.0.0.1:{silent.getsockname()[1]}")


# ---- the process at an address


async def test_identify(endpoint: TcpEndpoint, tls: Tls) -> None:
    _, host, port = parse_address(endpoint.address)
    assert await identify(f"{host}:{port}", TOKEN, tls) == Identity(endpoint.process, host, port, host, 0)


async def test_identify_without_tls(endpoint: TcpEndpoint) -> None:
    place = endpoint.address.partition("@")[2]
    with pytest.raises(ProtocolError, match=f"{place}: the peer takes connections by TLS only"):
        await identify(place, TOKEN)


async def test_identify_with_a_certificate_that_is_refused(
    endpoint: TcpEndpoint, foreign: Path, authority: Authority
) -> None:
    place = endpoint.address.partition("@")[2]
    with pytest.raises(AuthenticationError, match="the peer's certificate is not accepted"):
        await identify(place, TOKEN, load_tls(foreign))
    (foreign / "ca.pem").write_bytes(authority.certificate)
    with pytest.raises(AuthenticationError, match=f"{place}: the peer does not accept") as told:
        await identify(place, TOKEN, load_tls(foreign))
    assert type(told.value) is AuthenticationError and isinstance(told.value.__cause__, RefusedTls)


async def test_data_sockets_need_certificates_as_well(tls_folder: Path, foreign: Path) -> None:
    async with listening(tls_folder) as endpoint:
        with pytest.raises(AuthenticationError):
            await stranger(foreign)._connect_data(endpoint.address, bytes(16), None)
        with pytest.raises(ProtocolError, match="by TLS only"):
            await stranger(None)._connect_data(endpoint.address, bytes(16), None)


# ---- a relay with a certificate of its own, and without the token


class Between:
    """A relay that ends TLS at both sides with a certificate of the CA, and carries the plain bytes."""

    def __init__(self, tls: Tls, port: int) -> None:
        self._tls = tls
        self._port = port
        self._tasks: list[asyncio.Task[None]] = []
        self.carried = [b"", b""]
        """The bytes that came from the connector, and from the acceptor."""

    async def __aenter__(self) -> Between:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._tasks.append(asyncio.create_task(self._accept()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    def address(self, process: bytes) -> str:
        """The address by which connectors reach `process` through the relay."""
        return f"{process.hex()}@127.0.0.1:{self._listener.getsockname()[1]}"

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(self._listener)
            self._tasks.append(asyncio.create_task(self._relay(near)))

    async def _relay(self, near: socket.socket) -> None:
        far = socket.create_connection(("127.0.0.1", self._port))
        far.setblocking(False)
        with contextlib.ExitStack() as undo:
            undo.enter_context(far)
            one = undo.enter_context(await self._tls.accept(near))
            other = undo.enter_context(await self._tls.connect(far))
            carrying = [asyncio.create_task(self._carry(*ends)) for ends in ((0, one, other), (1, other, one))]
            try:
                await asyncio.wait(carrying)
            finally:
                for task in carrying:
                    task.cancel()
                await asyncio.gather(*carrying, return_exceptions=True)

    async def _carry(self, direction: int, source: TlsSocket, sink: TlsSocket) -> None:
        while True:
            try:
                data = source.recv(4096)
            except BlockingIOError:
                await readable(source)
                continue
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            self.carried[direction] += data
            await send_all(sink, data)


async def test_a_relay_with_a_certificate_of_its_own(
    tls_folder: Path, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = load_tls(authority.folder(tmp_path / "relay"))
    async with listening(tls_folder) as endpoint:
        place = endpoint.address.partition("@")[2]
        async with Between(own, parse_address(endpoint.address)[2]) as between:
            with pytest.raises(AuthenticationError, match="holds another token"):
                await stranger(tls_folder).connect(between.address(endpoint.process))
            assert "does not hold this cluster's token" in caplog.text
            assert between.carried[0].startswith(preamble()), "it was at the relay that the handshake met"
            with pytest.raises(AuthenticationError):
                await stranger(tls_folder)._connect_data(between.address(endpoint.process), bytes(16), None)
            with pytest.raises(AuthenticationError):
                await identify(between.address(b"").partition("@")[2], TOKEN, load_tls(tls_folder))
        (await stranger(tls_folder).connect(endpoint.address)).abort()  # without the relay
        assert (await identify(place, TOKEN, load_tls(tls_folder))).process == endpoint.process


async def test_hosts_with_certificates_of_their_own(authority: Authority, tmp_path: Path) -> None:
    one, other = (authority.folder(tmp_path / name) for name in ("one", "other"))
    async with listening(one) as endpoint:
        connector = stranger(other)
        for name in ("cert.pem", "key.pem"):  # the files at the time of making count, not later ones
            (one / name).unlink()
            (other / name).write_text("something else")
        (await connector.connect(endpoint.address)).abort()


def test_the_certificate_is_found_among_other_text(authority: Authority, tmp_path: Path) -> None:
    folder = authority.folder(tmp_path / "plain")
    found = load_tls(folder).loaded.certificate
    assert found == ssl.PEM_cert_to_DER_cert((folder / "cert.pem").read_text())
    plain, key = (folder / "cert.pem").read_bytes(), (folder / "key.pem").read_bytes()
    for content in (b"Certificate:\n  Data:\n" + plain + authority.certificate, key + plain, plain + key):
        (folder / "cert.pem").write_bytes(content)
        assert load_tls(folder).loaded.certificate == found
    (folder / "cert.pem").write_bytes(plain.replace(b" CERTIFICATE", b" X509 CERTIFICATE"))
    assert load_tls(folder).loaded.certificate == found
    (folder / "cert.pem").write_bytes(plain.replace(b" CERTIFICATE", b" TRUSTED CERTIFICATE"))
    with pytest.raises(AuthenticationError, match="does not begin with a plain certificate"):
        load_tls(folder)
