"""The handshake, byte by byte and without a socket."""

from __future__ import annotations

import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError, VersionMismatch, ZcactorError
from zcactor.transport.auth import PROTOCOL_VERSION, PYTHON, Handshake, Hello, Purpose, Status, preamble, refusal

TOKEN = bytes(range(32))
CONNECTOR = Hello(b"c" * 16, 11, 1 << 40, 1024, 16384, Purpose.WRITABLE_ARENA, nonce=b"1" * 32)
ACCEPTOR = Hello(b"a" * 16, 22, 0, 100, 4096, nonce=b"2" * 32)


def sides(token: bytes = TOKEN) -> tuple[Handshake, Handshake]:
    return Handshake(TOKEN, CONNECTOR, accepting=False), Handshake(token, ACCEPTOR, accepting=True)


def converse(connector: Handshake, acceptor: Handshake) -> list[bytes]:
    """Carry bytes to and fro until both are done; what was sent, in order of sending."""
    log = [connector.opening]
    inbox = {connector: b"", acceptor: connector.opening}
    while connector.wants or acceptor.wants:
        side = acceptor if acceptor.wants and len(inbox[acceptor]) >= acceptor.wants else connector
        other = connector if side is acceptor else acceptor
        data, inbox[side] = inbox[side][: side.wants], inbox[side][side.wants :]
        try:
            answer = side.receive(data)
        except ZcactorError:
            inbox[other] += side.farewell
            raise
        if answer:
            log.append(answer)
            inbox[other] += answer
    return log


def test_both_learn_who_the_other_is() -> None:
    connector, acceptor = sides()
    converse(connector, acceptor)
    assert connector.peer == ACCEPTOR
    assert acceptor.peer == CONNECTOR


def test_bytes_of_version_1() -> None:
    connector, acceptor = sides()
    messages = converse(connector, acceptor)
    begin = b"ZCAC" + struct.pack("<HBB", 1, *PYTHON)
    hello_c = b"1" * 32 + b"c" * 16 + bytes.fromhex("0b000000 0000000000010000 00040000 00400000 01")
    hello_a = b"2" * 32 + b"a" * 16 + bytes.fromhex("16000000 0000000000000000 64000000 00100000 00")
    proof_c = hmac.digest(TOKEN, b"zcactor connector\0" + hello_c + hello_a, "sha256")
    proof_a = hmac.digest(TOKEN, b"zcactor acceptor\0\0" + hello_c + hello_a, "sha256")
    assert messages == [begin + hello_c, begin + b"\0" + hello_a, proof_c, b"\0" + proof_a]


def test_nonces_are_fresh() -> None:
    assert len({Hello(b"p" * 16, 1, 0, 1, 0).nonce for _ in range(100)}) == 100


def test_peer_is_unknown_until_the_end() -> None:
    connector, acceptor = sides()
    acceptor.receive(connector.opening[:8])
    acceptor.receive(connector.opening[8:])
    with pytest.raises(LookupError):
        _ = acceptor.peer


def test_token_length() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Handshake(b"short", CONNECTOR, accepting=False)


def test_acceptor_refuses_a_wrong_proof_and_says_so() -> None:
    connector, acceptor = sides(token=bytes(32))
    with pytest.raises(AuthenticationError, match="does not hold"):
        converse(connector, acceptor)
    assert acceptor.wants
    with pytest.raises(AuthenticationError, match="refused this process"):
        connector.receive(acceptor.farewell)


def test_connector_refuses_a_wrong_proof() -> None:
    connector, _ = sides()
    connector.receive(refusal(Status.OK))
    connector.receive(ACCEPTOR.encode())
    connector.receive(b"\0")
    with pytest.raises(AuthenticationError):
        connector.receive(bytes(32))


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    connector, _ = sides()
    connector.receive(refusal(Status.OK))
    proof = connector.receive(ACCEPTOR.encode())
    connector.receive(b"\0")
    with pytest.raises(AuthenticationError):
        connector.receive(proof)


@pytest.mark.parametrize(
    ("version", "python", "named"),
    [
        (2, PYTHON, "protocol 2 "),
        (0, PYTHON, "protocol 0 "),
        (PROTOCOL_VERSION, (3, 99), r"Python 3\.99,"),
        (PROTOCOL_VERSION, (4, PYTHON[1]), r"Python 4\."),
    ],
)
def test_versions_are_named_on_both_sides(version: int, python: tuple[int, int], named: str) -> None:
    connector, acceptor = sides()
    with pytest.raises(VersionMismatch, match=named) as theirs:
        acceptor.receive(preamble(version, python))
    assert f"protocol {PROTOCOL_VERSION} on Python {PYTHON[0]}.{PYTHON[1]}" in str(theirs.value)
    assert acceptor.farewell == refusal(Status.VERSION)
    with pytest.raises(VersionMismatch, match=named):
        connector.receive(preamble(version, python) + bytes((Status.VERSION,)))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (Status.AUTH, AuthenticationError),
        (Status.VERSION, VersionMismatch),
        (Status.FULL, ConnectionLost),
        (200, ProtocolError),
    ],
)
def test_refusals(status: int, error: type[Exception]) -> None:
    connector, _ = sides()
    with pytest.raises(error):
        connector.receive(preamble() + bytes((status,)))


@pytest.mark.parametrize("data", [b"GET / HT", b"\x16\x03\x01\x02\x00\x01\x00\x01", bytes(8)])
def test_strangers_get_no_answer(data: bytes) -> None:
    _, acceptor = sides()
    with pytest.raises(ProtocolError, match="does not speak"):
        acceptor.receive(data)
    assert acceptor.farewell == b""


@pytest.mark.parametrize(
    "hello",
    [
        Hello(b"p" * 16, 1, (1 << 47) + 1, 1, 0),
        Hello(b"p" * 16, 1, 0, 0, 0),
        Hello(b"p" * 16, 1, 0, (1 << 20) + 1, 0),
        Hello(b"p" * 16, 1, 0, 1, (1 << 20) + 1),
    ],
)
def test_numbers_out_of_bounds(hello: Hello) -> None:
    with pytest.raises(ProtocolError, match="out of bounds"):
        Hello.decode(hello.encode())


def test_unknown_purpose() -> None:
    with pytest.raises(ProtocolError, match="purpose 9"):
        Hello.decode(ACCEPTOR.encode()[:-1] + b"\x09")


@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    connector, acceptor = sides()
    messages = converse(*sides())
    which = data.draw(st.integers(0, len(messages) - 1))
    where = data.draw(st.integers(0, len(messages[which]) - 1))
    flip = data.draw(st.integers(1, 255))
    changed = bytearray(messages[which])
    changed[where] ^= flip

    def tamper(index: int, message: bytes) -> bytes:
        return bytes(changed) if index == which else message

    def attempt() -> None:
        first = tamper(0, connector.opening)
        acceptor.receive(first[:8])
        second = tamper(1, acceptor.receive(first[8:]))
        connector.receive(second[:9])
        third = tamper(2, connector.receive(second[9:]))
        fourth = tamper(3, acceptor.receive(third))
        connector.receive(fourth[:1])
        connector.receive(fourth[1:])

    with pytest.raises((ProtocolError, ConnectionLost)):
        attempt()
    assert connector.wants or acceptor.wants
