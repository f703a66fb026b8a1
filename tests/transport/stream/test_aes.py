"""AES-256-GCM by libsodium: equal to that of ``cryptography``, and not used where it is missing or differs."""

from __future__ import annotations

import ctypes
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from zcactor.native import hot
from zcactor.transport.stream import aes

KEY, NONCE = bytes(range(32)), bytes(range(12))


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """Let each test look for libsodium anew."""
    aes.libsodium.cache_clear()
    yield
    aes.libsodium.cache_clear()


@pytest.fixture
def addresses() -> tuple[object, object]:
    """The addresses of libsodium's functions."""
    found = aes.libsodium()
    if found is None:
        pytest.skip("no libsodium with AES: PyNaCl is not installed, or the processor has no instructions for it")
    return found


def test_libsodium_is_found_where_it_can_work() -> None:
    sodium = importlib.import_module("nacl._sodium")
    assert (aes.libsodium() is not None) == bool(sodium.lib.crypto_aead_aes256gcm_is_available())


@given(st.binary(max_size=300), st.binary(max_size=20), st.binary(min_size=32, max_size=32))
def test_both_make_the_same(text: bytes, header: bytes, key: bytes) -> None:
    record = aes.encryption(key)(NONCE, text, header)
    assert record == AESGCM(key).encrypt(NONCE, text, header)
    assert aes.decryption(key)(NONCE, record, header) == text


@pytest.mark.parametrize("nbytes", [0, 64 << 10, 1 << 20], ids=["nothing", "64 KiB", "1 MiB"])
def test_any_size(nbytes: int) -> None:
    text = bytes(nbytes)
    record = aes.encryption(KEY)(NONCE, text, b"")
    assert aes.decryption(KEY)(NONCE, record, b"") == text
    with pytest.raises(InvalidTag):
        aes.decryption(KEY)(NONCE, record[:-1], b"")


@pytest.mark.slow
@given(st.binary(min_size=17, max_size=60), st.data())
def test_what_was_changed_does_not_open(text: bytes, data: st.DataObject) -> None:
    record = bytearray(aes.encryption(KEY)(NONCE, text, b"header"))
    record[data.draw(st.integers(0, len(record) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidTag):
        aes.decryption(KEY)(NONCE, bytes(record), b"header")


@pytest.mark.parametrize("record", [b"", b"short", bytes(15), bytes(16)], ids=len)
def test_what_is_too_short_does_not_open(record: bytes) -> None:
    with pytest.raises(InvalidTag):
        aes.decryption(KEY)(NONCE, record, b"")


def test_another_nonce_key_or_header_does_not_open() -> None:
    record = aes.encryption(KEY)(NONCE, b"text", b"header")
    for key, nonce, header in ((bytes(32), NONCE, b"header"), (KEY, bytes(12), b"header"), (KEY, NONCE, b"")):
        with pytest.raises(InvalidTag):
            aes.decryption(key)(nonce, record, header)


class TestCipher:
    """The native type refuses wrong arguments."""

    @pytest.mark.parametrize(
        ("make", "error", "says"),
        [
            (lambda at: hot.Cipher(at, bytes(31)), ValueError, "a key of 31 bytes; it has 32"),
            (lambda at: hot.Cipher(0, KEY), ValueError, "invalid PyCapsule"),
            (lambda at: hot.Cipher(4096, KEY), ValueError, "invalid PyCapsule"),
            (lambda at: hot.Cipher("here", KEY), ValueError, "invalid PyCapsule"),
            (lambda at: hot.Cipher(at, KEY, ValueError), ValueError, "incorrect name"),
            (lambda at: hot.Cipher(at, KEY, key=KEY), TypeError, "no keywords"),  # type: ignore[call-arg]
            (lambda at: hot.Cipher(at, KEY).__init__(at, KEY), RuntimeError, "once"),  # type: ignore[misc]
            (lambda at: hot.Cipher.__new__(hot.Cipher)(NONCE, b"", b""), RuntimeError, "not initialised"),
            (lambda at: hot.Cipher(at, KEY)(bytes(11), b"", b""), ValueError, "a nonce of 11 bytes; it has 12"),
            (lambda at: hot.Cipher(at, KEY)(NONCE, bytearray(1), b""), TypeError, "bytes"),  # type: ignore[arg-type]
            (lambda at: hot.Cipher(at, KEY)(NONCE, b"", b"", text=b""), TypeError, "no keywords"),  # type: ignore[call-arg]
        ],
    )
    def test_is_refused(
        self, addresses: tuple[object, object], make: Callable[[object], object], error: type[Exception], says: str
    ) -> None:
        with pytest.raises(error, match=says):
            make(addresses[0])


# ---- without libsodium, or with another one


def _no_pynacl(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "nacl._sodium", None)


def _stand_in(**functions: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """A libsodium with these functions only."""

    def put(patch: pytest.MonkeyPatch) -> None:
        ffi = types.SimpleNamespace(addressof=getattr, cast=lambda _, function: function)
        lib = types.SimpleNamespace(
            **{"sodium_init": lambda: 0, "crypto_aead_aes256gcm_is_available": lambda: 1, **functions}
        )
        patch.setitem(sys.modules, "nacl._sodium", types.SimpleNamespace(lib=lib, ffi=ffi))

    return put


@pytest.mark.parametrize(
    "put",
    [
        _no_pynacl,
        _stand_in(),
        _stand_in(sodium_init=lambda: -1),
        _stand_in(crypto_aead_aes256gcm_is_available=lambda: 0),
    ],
    ids=["no PyNaCl", "an older one", "not to be set up", "no AES"],
)
def test_otherwise_cryptography_does_it(
    monkeypatch: pytest.MonkeyPatch, put: Callable[[pytest.MonkeyPatch], None]
) -> None:
    put(monkeypatch)
    assert aes.libsodium() is None
    record = aes.encryption(KEY)(NONCE, b"text", b"header")
    assert aes.decryption(KEY)(NONCE, record, b"header") == b"text"
    assert type(aes.encryption(KEY)) is aes._General


ENCRYPT = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p, ctypes.c_ulonglong),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
)
DECRYPT = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p),
    *(ctypes.c_ulonglong, ctypes.c_void_p, ctypes.c_void_p),
)


def address_in(capsule: object) -> int | None:
    """The address of the function in a capsule."""
    look = ctypes.pythonapi.PyCapsule_GetPointer
    look.restype, look.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    found: int | None = look(capsule, b"zcactor.aes256gcm.encrypt")
    return found


@pytest.mark.parametrize("wrong", ["encrypt", "decrypt", "refuses"])
def test_one_that_makes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, addresses: tuple[object, object], wrong: str
) -> None:
    aes.libsodium.cache_clear()
    nothing = ENCRYPT(lambda *_: 0), DECRYPT(lambda *_: -1 if wrong == "refuses" else 0)
    nowhere = [ctypes.cast(function, ctypes.c_void_p).value for function in nothing]
    encrypt = nowhere[0] if wrong == "encrypt" else address_in(addresses[0])
    _stand_in(crypto_aead_aes256gcm_encrypt=encrypt, crypto_aead_aes256gcm_decrypt=nowhere[1])(monkeypatch)
    with caplog.at_level(logging.WARNING, "zcactor"):
        assert aes.libsodium() is None
    assert "sealed by cryptography alone" in caplog.text
