"""The handshake, byte by byte and without a socket."""

from __future__ import annotations

import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError, VersionMismatch, ZcactorError
from zcactor.transport.stream.handshake import (
    HELLO_NBYTES,
    PYTHON,
    Handshake,
    HandshakeStatus,
    Introduction,
    Purpose,
    preamble,
    raise_refusal,
    refusal,
)
from zcactor.transport.stream.record_layer import KEY_NBYTES, NO_KEY, Integrity, KeyExchange, key_exchange
from zcactor.transport.version import PROTOCOL_VERSION

TOKEN = bytes(range(32))
CONNECTOR = Introduction(b"c" * 16, 11, 1 << 40, 1024, 16384, Purpose.WRITABLE_ARENA, nonce=b"1" * 32)
ACCEPTOR = Introduction(b"a" * 16, 22, 0, 100, 4096, nonce=b"2" * 32)


def sides(token: bytes = TOKEN) -> tuple[Handshake, Handshake]:
    return Handshake(TOKEN, CONNECTOR, accepting=False), Handshake(token, ACCEPTOR, accepting=True)


def converse(connector: Handshake, acceptor: Handshake) -> list[bytes]:
    """Carry bytes between both until they are done; return the messages in the order of sending."""
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


def test_bytes_of_version_19() -> None:
    connector, acceptor = sides()
    messages = converse(connector, acceptor)
    begin = b"ZCAC" + struct.pack("<HBB", 19, *PYTHON)
    hello_c = b"1" * 32 + b"c" * 16 + bytes.fromhex("0b000000 0000000000010000 00040000 00400000 01 00 01 00")
    hello_a = b"2" * 32 + b"a" * 16 + bytes.fromhex("16000000 0000000000000000 64000000 00100000 00 00 01 00")
    no_key = bytes(32)
    transcript = begin + begin + hello_c + hello_a + no_key + no_key
    proof_c = hmac.digest(TOKEN, b"zcactor connector\0" + transcript, "sha256")
    proof_a = hmac.digest(TOKEN, b"zcactor acceptor\0\0" + transcript, "sha256")
    assert messages == [begin + hello_c, begin + b"\0" + hello_a + no_key, no_key + proof_c, b"\0" + proof_a]
    assert (connector.seals, acceptor.seals) == (None, None)
    assert connector.transcript == acceptor.transcript == transcript


def test_transcript_is_unknown_until_the_end() -> None:
    connector, acceptor = sides()
    acceptor.receive(connector.opening[:8])
    acceptor.receive(connector.opening[8:])
    with pytest.raises(LookupError):
        _ = acceptor.transcript


@pytest.mark.parametrize("bindings", [(b"1" * 64, b"2" * 64), (b"1" * 64, b""), (b"", b"1" * 64)])
def test_who_is_bound_to_different_streams(bindings: tuple[bytes, bytes]) -> None:
    for seals in (False, True):
        connector = Handshake(TOKEN, replace(PEER, seals=seals), accepting=False, binding=bindings[0])
        acceptor = Handshake(TOKEN, ACCEPTOR, accepting=True, binding=bindings[1])
        with pytest.raises(AuthenticationError, match="does not hold"):
            converse(connector, acceptor)
        with pytest.raises(AuthenticationError, match="refused this process"):
            connector.receive(acceptor.farewell)
    connector = Handshake(TOKEN, PEER, accepting=False, binding=bindings[0])
    acceptor = Handshake(TOKEN, ACCEPTOR, accepting=True, binding=bindings[0])
    converse(connector, acceptor)


@pytest.mark.parametrize("ours", Integrity)
@pytest.mark.parametrize("theirs", Integrity)
def test_the_stricter_wish_for_integrity_holds(ours: Integrity, theirs: Integrity) -> None:
    outsider = Outsider(integrity=(ours, theirs))
    outsider.carry()
    assert outsider.connector.seals is not None and outsider.acceptor.seals is not None
    assert outsider.connector.seals.integrity is outsider.acceptor.seals.integrity is max(ours, theirs)


def test_both_export_the_same_keys_and_no_other_connection_does() -> None:
    found = set()
    for _ in range(3):
        outsider = Outsider()
        outsider.carry()
        assert outsider.connector.seals is not None and outsider.acceptor.seals is not None
        keys = outsider.connector.seals.exporter.keys(b"salt", b"label")
        assert keys == outsider.acceptor.seals.exporter.keys(b"salt", b"label")
        found.add(keys)
    assert len(found) == 3


def test_nonces_are_fresh() -> None:
    assert len({Introduction(b"p" * 16, 1, 0, 1, 0).nonce for _ in range(100)}) == 100


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
    connector.receive(refusal(HandshakeStatus.OK))
    connector.receive(ACCEPTOR.encode() + NO_KEY)
    connector.receive(b"\0")
    with pytest.raises(AuthenticationError):
        connector.receive(bytes(32))


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    connector, _ = sides()
    connector.receive(refusal(HandshakeStatus.OK))
    proof = connector.receive(ACCEPTOR.encode() + NO_KEY)[KEY_NBYTES:]
    connector.receive(b"\0")
    with pytest.raises(AuthenticationError):
        connector.receive(proof)


@pytest.mark.parametrize(
    ("version", "python", "named"),
    [
        (1, PYTHON, "protocol 1 "),
        (2, PYTHON, "protocol 2 "),
        (3, PYTHON, "protocol 3 "),
        (5, PYTHON, "protocol 5 "),
        (7, PYTHON, "protocol 7 "),
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
    assert acceptor.farewell == refusal(HandshakeStatus.VERSION)
    with pytest.raises(VersionMismatch, match=named):
        connector.receive(preamble(version, python) + bytes((HandshakeStatus.VERSION,)))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (HandshakeStatus.AUTH, AuthenticationError),
        (HandshakeStatus.VERSION, VersionMismatch),
        (HandshakeStatus.FULL, ConnectionLost),
        (HandshakeStatus.SEALING, AuthenticationError),
        (HandshakeStatus.TLS, ProtocolError),
        (200, ProtocolError),
    ],
)
def test_refusals(status: int, error: type[Exception]) -> None:
    connector, _ = sides()
    with pytest.raises(error):
        connector.receive(preamble() + bytes((status,)))


@pytest.mark.parametrize("data", [b"GET / HT", b"\x16\x02\x01\x02\x00\x01\x00\x01", bytes(8)])
def test_strangers_get_no_answer(data: bytes) -> None:
    _, acceptor = sides()
    with pytest.raises(ProtocolError, match="does not speak"):
        acceptor.receive(data)
    assert acceptor.farewell == b""


def test_who_speaks_tls_is_told() -> None:
    _, acceptor = sides()
    with pytest.raises(ProtocolError, match="began with TLS.*ZCACTOR_SECURITY"):
        acceptor.receive(b"\x16\x03\x01\x02\x00\x01\x00\x01")
    assert acceptor.farewell == refusal(HandshakeStatus.TLS)


def test_refusals_where_tls_was_to_be() -> None:
    with pytest.raises(ProtocolError, match="speaks no TLS"):
        raise_refusal(refusal(HandshakeStatus.TLS))
    with pytest.raises(ConnectionLost, match="pending"):
        raise_refusal(refusal(HandshakeStatus.FULL))
    with pytest.raises(VersionMismatch):
        raise_refusal(preamble(4) + bytes((HandshakeStatus.VERSION,)))
    for other in (b"", refusal(HandshakeStatus.TLS)[:-1], bytes(9), b"\x16\x03\x03\x00\x7a\x02\x00\x00\x76"):
        raise_refusal(other)


@pytest.mark.parametrize(
    "hello",
    [
        Introduction(b"p" * 16, 1, (1 << 47) + 1, 1, 0),
        Introduction(b"p" * 16, 1, 0, 0, 0),
        Introduction(b"p" * 16, 1, 0, (1 << 20) + 1, 0),
        Introduction(b"p" * 16, 1, 0, 1, (1 << 20) + 1),
    ],
)
def test_numbers_out_of_bounds(hello: Introduction) -> None:
    with pytest.raises(ProtocolError, match="out of bounds"):
        Introduction.decode(hello.encode())


def test_unknown_purpose() -> None:
    with pytest.raises(ProtocolError, match="purpose 9"):
        Introduction.decode(ACCEPTOR.encode()[:-4] + b"\x09\x00\x00\x00")


def test_wishes_out_of_bounds() -> None:
    begin = ACCEPTOR.encode()[:-3]
    for wishes, named in ((b"\2\0\0", "sealing 2"), (b"\0\3\0", "integrity 3"), (b"\0\0\2", "RDMA 2")):
        with pytest.raises(ProtocolError, match=named):
            Introduction.decode(begin + wishes)


@pytest.mark.parametrize("rdma", [False, True])
@pytest.mark.parametrize("integrity", Integrity)
def test_wishes_arrive(rdma: bool, integrity: Integrity) -> None:
    hello = replace(ACCEPTOR, rdma=rdma, integrity=integrity)
    assert Introduction.decode(hello.encode()) == hello


# ---- sealing


class Outsider:
    """An outsider that carries the four messages of a handshake in order, and may change them."""

    def __init__(
        self, *, wanted: tuple[bool, bool] = (True, True), tokens: tuple[bytes, bytes] = (TOKEN, TOKEN),
        integrity: tuple[Integrity, Integrity] = (Integrity.AUTO, Integrity.AUTO), binding: bytes = b"",
    ) -> None:  # fmt: skip
        ours = replace(PEER, seals=wanted[0], integrity=integrity[0])
        theirs = replace(ACCEPTOR, seals=wanted[1], integrity=integrity[1])
        self.connector = Handshake(tokens[0], ours, accepting=False, binding=binding)
        self.acceptor = Handshake(tokens[1], theirs, accepting=True, binding=binding)

    def change(self, index: int, message: bytes) -> bytes:
        """The bytes that arrive for a message."""
        del index
        return message

    def carry(self) -> None:
        """Carry the whole handshake, until an end raises."""
        connector, acceptor = self.connector, self.acceptor
        first = self.change(0, connector.opening)
        acceptor.receive(first[:8])
        second = self.change(1, acceptor.receive(first[8:]))
        connector.receive(second[:9])
        third = self.change(2, connector.receive(second[9:]))
        fourth = self.change(3, acceptor.receive(third))
        connector.receive(fourth[:1])
        connector.receive(fourth[1:])


PEER = replace(CONNECTOR, purpose=Purpose.PEER)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_one_wish_for_sealing_is_enough(wanted: tuple[bool, bool]) -> None:
    outsider = Outsider(wanted=wanted)
    outsider.carry()
    left, right = outsider.connector.seals, outsider.acceptor.seals
    assert left is not None and right is not None
    for one, other in ((left, right), (right, left)):
        for text in (b"first", b"second"):
            record = one.sealer.seal(text)
            assert other.opener.open(record[:4], record[4:]) == text


def test_nobody_wants_sealing() -> None:
    def never() -> KeyExchange | None:
        raise AssertionError("cryptography is imported for nothing")

    connector = Handshake(TOKEN, CONNECTOR, accepting=False, exchange=never)
    converse(connector, Handshake(TOKEN, ACCEPTOR, accepting=True, exchange=never))
    assert connector.seals is None


@pytest.mark.parametrize("purpose", [Purpose.DATA, Purpose.WRITABLE_ARENA])
def test_only_frames_are_sealed(purpose: Purpose) -> None:
    connector = Handshake(TOKEN, replace(PEER, purpose=purpose), accepting=False)
    acceptor = Handshake(TOKEN, replace(ACCEPTOR, seals=True), accepting=True)
    converse(connector, acceptor)
    assert (connector.seals, acceptor.seals) == (None, None)


def test_keys_are_others_each_time_and_in_each_direction() -> None:
    records = []
    for _ in range(3):
        outsider = Outsider()
        outsider.carry()
        assert outsider.connector.seals is not None and outsider.acceptor.seals is not None
        records += [outsider.connector.seals.sealer.seal(b"same"), outsider.acceptor.seals.sealer.seal(b"same")]
    assert len(set(records)) == 6


def test_wrong_token_among_those_who_seal() -> None:
    outsider = Outsider(tokens=(TOKEN, bytes(32)))
    with pytest.raises(AuthenticationError, match="does not hold"):
        outsider.carry()
    assert (outsider.connector.seals, outsider.acceptor.seals) == (None, None)


@pytest.mark.parametrize("swapped", [1, 2, 12])
def test_own_keys_cannot_be_put_in(swapped: int) -> None:
    class Swapping(Outsider):
        def change(self, index: int, message: bytes) -> bytes:
            exchange = key_exchange()
            assert exchange is not None
            if index == 1 and swapped in (1, 12):
                return message[:-KEY_NBYTES] + exchange.public
            if index == 2 and swapped in (2, 12):
                return exchange.public + message[KEY_NBYTES:]
            return message

    outsider = Swapping()
    with pytest.raises(AuthenticationError, match="does not hold"):
        outsider.carry()
    assert (outsider.connector.seals, outsider.acceptor.seals) == (None, None)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("keys_too", [False, True])
def test_sealing_cannot_be_turned_off_on_the_way(wanted: tuple[bool, bool], keys_too: bool) -> None:
    flag = 8 + HELLO_NBYTES - 3

    class Clearing(Outsider):
        def change(self, index: int, message: bytes) -> bytes:
            if index == 0:
                assert message[flag] == wanted[0]
                return message[:flag] + b"\0" + message[flag + 1 :]
            if index == 1:
                assert message[flag + 1] == wanted[1]
                key = NO_KEY if keys_too else message[-KEY_NBYTES:]
                return message[: flag + 1] + b"\0" + message[flag + 2 : -KEY_NBYTES] + key
            return NO_KEY + message[KEY_NBYTES:] if index == 2 and keys_too else message

    outsider = Clearing(wanted=wanted)
    with pytest.raises(AuthenticationError):
        outsider.carry()
    assert outsider.connector.wants and outsider.acceptor.wants


def test_replayed_handshake() -> None:
    recorded: list[bytes] = []

    class Recording(Outsider):
        def change(self, index: int, message: bytes) -> bytes:
            recorded.append(message)
            return message

    Recording().carry()
    acceptor = Handshake(TOKEN, Introduction(b"a" * 16, 22, 0, 100, 4096, seals=True), accepting=True)
    acceptor.receive(recorded[0][:8])
    acceptor.receive(recorded[0][8:])
    with pytest.raises(AuthenticationError):
        acceptor.receive(recorded[2])
    connector = Handshake(TOKEN, Introduction(b"c" * 16, 11, 0, 100, 4096, seals=True), accepting=False)
    connector.receive(recorded[1][:9])
    connector.receive(recorded[1][9:])
    connector.receive(recorded[3][:1])
    with pytest.raises(AuthenticationError):
        connector.receive(recorded[3][1:])


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_acceptor_cannot_seal(wanted: tuple[bool, bool]) -> None:
    connector = Handshake(TOKEN, replace(PEER, seals=wanted[0]), accepting=False)
    acceptor = Handshake(TOKEN, replace(ACCEPTOR, seals=wanted[1]), accepting=True, exchange=lambda: None)
    with pytest.raises(AuthenticationError, match=r"this process cannot: .*; pip install 'zcactor\[cluster\]' here"):
        converse(connector, acceptor)
    with pytest.raises(AuthenticationError, match=r"the peer cannot: .*; pip install 'zcactor\[cluster\]' there"):
        connector.receive(acceptor.farewell)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_connector_cannot_seal(wanted: tuple[bool, bool]) -> None:
    connector = Handshake(TOKEN, replace(PEER, seals=wanted[0]), accepting=False, exchange=lambda: None)
    acceptor = Handshake(TOKEN, replace(ACCEPTOR, seals=wanted[1]), accepting=True)
    with pytest.raises(AuthenticationError, match=r"the peer cannot: .*; pip install 'zcactor\[cluster\]' there"):
        converse(connector, acceptor)
    with pytest.raises(AuthenticationError, match=r"this process cannot: .*; pip install 'zcactor\[cluster\]' here"):
        connector.receive(acceptor.farewell)


def forged(label: bytes, transcript: bytes) -> bytes:
    """A proof, which only a holder of the token can make."""
    return hmac.digest(TOKEN, label + transcript, "sha256")


def test_acceptor_that_would_go_on_in_the_clear() -> None:
    """The peer holds the token and runs other code, which would go on unsealed."""
    for exchange, key in ((lambda: None, b"\x09" + bytes(31)), (key_exchange, NO_KEY)):
        connector = Handshake(TOKEN, replace(PEER, seals=True), accepting=False, exchange=exchange)
        connector.receive(refusal(HandshakeStatus.OK))
        with pytest.raises(AuthenticationError, match="cannot"):
            sent = connector.receive(ACCEPTOR.encode() + key)
            connector.receive(b"\0")
            transcript = preamble() * 2 + connector.opening[8:] + ACCEPTOR.encode() + key + sent[:KEY_NBYTES]
            connector.receive(forged(b"zcactor acceptor\0\0", transcript))
        assert connector.wants


def test_key_whose_secret_anybody_knows() -> None:
    acceptor = Handshake(TOKEN, replace(ACCEPTOR, seals=True), accepting=True)
    acceptor.receive(preamble())
    said = acceptor.receive(PEER.encode())[9:]
    key = b"\x01" + bytes(31)  # of order 1: the secret is zero for any key of the other end (RFC 7748, 6.1)
    with pytest.raises(ProtocolError, match="low order"):
        acceptor.receive(key + forged(b"zcactor connector\0", preamble() * 2 + PEER.encode() + said + key))
    assert acceptor.seals is None


class Flipping(Outsider):
    """An outsider that flips one bit of one message."""

    which, where, bit = 0, 0, 0

    def change(self, index: int, message: bytes) -> bytes:
        """Flip a bit of byte `where` of message number `which`."""
        changed = bytearray(message)
        if index == self.which:
            changed[self.where] ^= 1 << self.bit
        return bytes(changed)


@pytest.mark.parametrize("wanted", [(True, False), (False, False)], ids=["sealed", "not sealed"])
def test_a_bit_flipped_at_each_byte(wanted: tuple[bool, bool]) -> None:
    lengths = (8 + HELLO_NBYTES, 9 + HELLO_NBYTES + KEY_NBYTES, KEY_NBYTES + 32, 33)
    for which, length in enumerate(lengths):
        for where in range(length):
            outsider = Flipping(wanted=wanted)
            outsider.which, outsider.where, outsider.bit = which, where, where % 8
            with pytest.raises((ProtocolError, ConnectionLost)):
                outsider.carry()
            assert outsider.connector.wants, f"message {which}, byte {where}"
            assert outsider.connector.seals is None


@pytest.mark.slow
@given(st.data())
def test_any_changed_byte_is_noticed_where_frames_are_sealed(data: st.DataObject) -> None:
    lengths = (8 + HELLO_NBYTES, 9 + HELLO_NBYTES + KEY_NBYTES, KEY_NBYTES + 32, 33)
    which = data.draw(st.integers(0, 3))
    where = data.draw(st.integers(0, lengths[which] - 1))
    flip = data.draw(st.integers(1, 255))

    class Changing(Outsider):
        def change(self, index: int, message: bytes) -> bytes:
            assert len(message) == lengths[index]
            changed = bytearray(message)
            changed[where if index == which else 0] ^= flip if index == which else 0
            return bytes(changed)

    outsider = Changing(wanted=data.draw(st.sampled_from([(True, True), (True, False), (False, True)])))
    with pytest.raises((ProtocolError, ConnectionLost)):
        outsider.carry()
    assert outsider.connector.wants or outsider.acceptor.wants
    assert outsider.connector.seals is None


@pytest.mark.slow
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
