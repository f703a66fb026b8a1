"""A value of a log opens at its place, under its token, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.control import log_seal
from zcactor.control.log_seal import DoesNotOpen, LogSeal

TOKEN = bytes(32)
SEAL = LogSeal(TOKEN, b"main")


@given(st.text(max_size=5), st.text(max_size=5), st.integers(0, 2**64 - 1), st.binary(max_size=20))
def test_a_value_comes_back(kind: str, key: str, epoch: int, value: bytes) -> None:
    sealed = SEAL.seal(kind, key, epoch, value)
    assert len(sealed) == len(value) + 36
    assert LogSeal(TOKEN, b"main").open(kind, key, sealed, latest=epoch) == value
    assert SEAL.seal(kind, key, epoch, value) != sealed


@pytest.mark.parametrize(
    ("seal", "kind", "key", "bounds"),
    [
        (LogSeal(bytes([1]) * 32, b"main"), "actor", "a", {"latest": 9}),
        (LogSeal(TOKEN, b"other"), "actor", "a", {"latest": 9}),
        (SEAL, "recipe", "a", {"latest": 9}),
        (SEAL, "actor", "b", {"latest": 9}),
        (SEAL, "actora", "", {"latest": 9}),
        (SEAL, "actor", "a", {"latest": 6}),
        (SEAL, "actor", "a", {"latest": 9, "earliest": 8}),
    ],
    ids=["token", "log", "kind", "key", "border", "set back", "too early"],
)
def test_a_value_opens_nowhere_else(seal: LogSeal, kind: str, key: str, bounds: dict[str, int]) -> None:
    sealed = SEAL.seal("actor", "a", 7, b"value")
    assert SEAL.open("actor", "a", sealed, latest=7, earliest=7) == b"value"
    with pytest.raises(DoesNotOpen):
        seal.open(kind, key, sealed, **bounds)


def test_a_bit_that_is_changed_anywhere_is_refused() -> None:
    sealed = SEAL.seal("actor", "a", 7, b"value")
    for at in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(DoesNotOpen):
            SEAL.open("actor", "a", bytes(changed), latest=2**64 - 1)
    for nbytes in range(len(sealed)):
        with pytest.raises(DoesNotOpen):
            SEAL.open("actor", "a", sealed[:nbytes], latest=7)


def test_keys_of_many_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_seal, "_KEYS", 2)
    seal = LogSeal(TOKEN, b"main")
    sealed = [seal.seal("name", "a", epoch, b"%d" % epoch) for epoch in range(5)]
    assert [seal.open("name", "a", each, latest=4) for each in sealed] == [b"0", b"1", b"2", b"3", b"4"]
    assert len(seal._keys) <= 2
