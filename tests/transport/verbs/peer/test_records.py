"""Sealed messages: a changed, repeated, dropped or reversed one does not open, and no nonce is used twice."""

from __future__ import annotations

import os
from functools import partial

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from zcactor.errors import ForkedProcess, ProtocolError
from zcactor.transport.stream import record_layer
from zcactor.transport.stream.record_layer import RECORD_NBYTES, Exporter, KeyChain
from zcactor.transport.verbs.peer import records as records_module
from zcactor.transport.verbs.peer.records import Records

MESSAGE = b"\x5a" + bytes(range(200))
SLOT = 512


def ends(secret: bytes = bytes(range(32))) -> tuple[Records, Records]:
    return Records(Exporter(secret), leads=True), Records(Exporter(secret), leads=False)


def sealed(end: Records, message: bytes = MESSAGE) -> bytearray:
    slot = bytearray(SLOT)
    nbytes = end.seal_into(memoryview(slot), memoryview(message))
    assert nbytes == len(message) + RECORD_NBYTES and slot[nbytes:] == bytes(SLOT - nbytes)
    return slot[:nbytes]


def opened(end: Records, slot: bytearray) -> bytes:
    return bytes(end.open(memoryview(slot), len(slot)))


def test_messages_arrive_both_ways_in_order() -> None:
    left, right = ends()
    for number in range(20):
        for here, there in ((left, right), (right, left)):
            message = MESSAGE + bytes([number])
            record = sealed(here, message)
            assert MESSAGE[:8] not in record
            assert opened(there, record) == message


def test_what_is_opened_does_not_change_with_the_slot() -> None:
    left, right = ends()
    record = sealed(left)
    view = right.open(memoryview(record), len(record))
    record[:] = bytes(len(record))
    assert view == MESSAGE


def test_a_bit_that_is_changed_anywhere_is_refused() -> None:
    left, right = ends()
    record = sealed(left)
    for at in range(len(record)):
        record[at] ^= 1 << at % 8
        with pytest.raises(ProtocolError, match="does not open|no sealed record of its length"):
            opened(right, record)
        record[at] ^= 1 << at % 8
    assert opened(right, record) == MESSAGE, "the count did not move"


@pytest.mark.parametrize("received", [0, 3, 4, RECORD_NBYTES - 1, RECORD_NBYTES, RECORD_NBYTES + 1, SLOT])
def test_other_lengths_are_refused(received: int) -> None:
    left, right = ends()
    slot = sealed(left) + bytearray(SLOT)
    with pytest.raises(ProtocolError, match=f"a message of {received} bytes that is no sealed record of its length"):
        right.open(memoryview(slot), received)


def test_a_message_that_is_repeated_dropped_or_turned_round_does_not_open() -> None:
    left, right = ends()
    first, second, third = sealed(left), sealed(left), sealed(left)
    assert opened(right, first) == MESSAGE
    for wrong in (first, third):
        with pytest.raises(ProtocolError, match="message 1 from the peer does not open"):
            opened(right, wrong)
    with pytest.raises(ProtocolError, match="does not open"):
        opened(left, second)
    assert opened(right, second) == opened(right, third) == MESSAGE


def test_other_connections_have_other_keys() -> None:
    left, _ = ends()
    _, right = ends(bytes(32))
    with pytest.raises(ProtocolError, match="does not open"):
        opened(right, sealed(left))
    left, right = ends()
    exporter = Exporter(bytes(range(32)))
    assert len({*exporter.keys(b"", records_module._CONNECTOR, records_module._ACCEPTOR)}) == 2


def test_both_ends_take_new_keys_at_the_same_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_layer, "USES_PER_KEY", 3)
    (secret,) = Exporter(bytes(range(32))).keys(b"", records_module._CONNECTOR)
    chain = KeyChain(secret)
    keys = [chain.take() for _ in range(5)]
    left, right = ends()
    for number in range(15):
        record = sealed(left)
        nonce = bytes(4) + number.to_bytes(8, "little")
        assert record[4:] == AESGCM(keys[number // 3]).encrypt(nonce, MESSAGE, bytes(record[:4]))
        assert opened(right, record) == MESSAGE
        for _ in range(number % 3):  # the other direction counts by itself
            assert opened(left, sealed(right)) == MESSAGE


def test_nonces_never_come_twice_also_after_errors() -> None:
    left, _ = ends()
    nonces: list[bytes] = []
    encrypt = left._encrypt
    assert encrypt is not None

    def watched(nonce: bytes, text: bytes, header: bytes) -> bytes:
        nonces.append(nonce)
        if len(nonces) % 3 == 0:
            raise MemoryError
        return encrypt(nonce, text, header)

    left._encrypt = watched
    for number in range(60):
        if number % 3 == 2:
            with pytest.raises(MemoryError):
                sealed(left)
        else:
            sealed(left)
    assert len(set(nonces)) == len(nonces) == 60


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_no_keys() -> None:
    left, right = ends()
    record = sealed(left)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (partial(sealed, left), partial(opened, right, record)):
            try:
                use()
            except ForkedProcess:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert opened(right, record) == MESSAGE
