"""Payloads as ciphertext: a change at any byte is refused, and one key opens nothing twice."""

from __future__ import annotations

import numpy as np
import pytest

from zcactor.errors import AuthenticationError, ProtocolError
from zcactor.marshal import spilling
from zcactor.marshal.spilling import ENVELOPE_NBYTES, SLACK_NBYTES, seal, unseal

PAYLOAD = bytes(range(256)) * 2


def sealed(payload: bytes = PAYLOAD) -> tuple[bytes, bytearray]:
    room = np.zeros(len(payload) + SLACK_NBYTES, np.uint8)
    envelope = seal(payload, room)
    return envelope, bytearray(room[: len(payload)].tobytes())


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 4096, 1 << 20])
def test_what_was_sealed_is_opened(nbytes: int) -> None:
    payload = bytes(nbytes)
    envelope, ciphertext = sealed(payload)
    assert len(envelope) == ENVELOPE_NBYTES
    assert unseal(envelope, memoryview(ciphertext)) == payload


def test_nothing_of_the_payload_is_in_the_store() -> None:
    secret = b"a text that is easy to find"
    _, ciphertext = sealed(secret * 100)
    assert secret[:4] not in ciphertext


def test_a_bit_that_is_changed_anywhere_is_refused() -> None:
    envelope, ciphertext = sealed()
    for at in range(len(ciphertext)):
        ciphertext[at] ^= 1 << at % 8
        with pytest.raises(ProtocolError, match="a payload of 512 bytes .* was changed on its way"):
            unseal(envelope, ciphertext)
        ciphertext[at] ^= 1 << at % 8
    for at in range(ENVELOPE_NBYTES):
        changed = bytearray(envelope)
        changed[at] ^= 1 << at % 8
        with pytest.raises(ProtocolError, match="was changed on its way"):
            unseal(bytes(changed), ciphertext)
    assert unseal(envelope, ciphertext) == PAYLOAD


@pytest.mark.parametrize("length", [0, 1, 511, 513])
def test_another_length_is_refused(length: int) -> None:
    envelope, ciphertext = sealed()
    with pytest.raises(ProtocolError, match="was changed on its way"):
        unseal(envelope, (ciphertext + b"x")[:length])


@pytest.mark.parametrize("length", [0, 1, ENVELOPE_NBYTES - 1, ENVELOPE_NBYTES + 1])
def test_an_envelope_of_another_length_is_none(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"has {length} bytes instead of {ENVELOPE_NBYTES}"):
        unseal(bytes(length), b"")


def test_each_payload_has_a_key_of_its_own() -> None:
    found = [sealed() for _ in range(100)]
    assert len({envelope[:32] for envelope, _ in found}) == len({bytes(ciphertext) for _, ciphertext in found}) == 100
    with pytest.raises(ProtocolError, match="was changed on its way"):
        unseal(found[0][0], found[1][1])


def test_a_process_that_cannot_open_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    envelope, ciphertext = sealed()
    monkeypatch.setattr(spilling, "can_seal", lambda: False)
    with pytest.raises(AuthenticationError, match=r"not installed here; pip install 'zcactor\[cluster\]'"):
        unseal(envelope, ciphertext)
