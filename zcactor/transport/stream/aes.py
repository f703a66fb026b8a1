"""AES-256-GCM for records, as a function of nonce, text and associated data.

The package ``cryptography`` calls OpenSSL's general interface. After a sleep, as of a process that waits for an answer,
one such call takes 4 µs for 200 bytes, because most of its code has left the caches by then. libsodium's function for
this one cipher takes 0.6 µs. So the native part calls that function where PyNaCl is installed, which brings libsodium,
and where the processor has instructions for AES, which libsodium needs.

In a forked child no function of the parent's works: it would repeat the parent's nonces.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import weakref
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from zcactor.errors import ForkedProcess
from zcactor.logs import logger
from zcactor.native import hot

if TYPE_CHECKING:
    from collections.abc import Callable

    Apply = Callable[[bytes, bytes, bytes], bytes]
    """``apply(nonce, text, authenticated)``"""

__all__ = ["KeyHolder", "decryption", "encryption", "forgotten", "hold", "libsodium"]

_KEY: Final = bytes(range(32))
_TEXT: Final = b"the same from both"
_ENCRYPT: Final = b"zcactor.aes256gcm.encrypt"
"""Names of the capsules. A capsule does not copy its name, so these live as long as the process."""
_DECRYPT: Final = b"zcactor.aes256gcm.decrypt"


class KeyHolder(Protocol):
    """An object with keys of this process."""

    def forget(self) -> object:
        """Drop all keys. Functions that need a key raise `ForkedProcess` from here on."""


_holders: weakref.WeakSet[KeyHolder] = weakref.WeakSet()


def hold(holder: KeyHolder) -> None:
    """Have the keys of a holder dropped in each forked child: with them it would repeat the parent's nonces."""
    _holders.add(holder)


def _forked() -> None:
    for holder in list(_holders):
        holder.forget()


os.register_at_fork(after_in_child=_forked)


def forgotten(*_: object) -> NoReturn:
    """Raise `ForkedProcess`: the keys were dropped."""
    raise ForkedProcess("this connection belongs to the process that forked this one: its keys cannot be used here")


class _General:
    """A function of ``cryptography``, until a forked child drops it."""

    __slots__ = ("__weakref__", "_apply")

    def __init__(self, apply: Apply) -> None:
        self._apply = apply

    def __call__(self, nonce: bytes, text: bytes, authenticated: bytes) -> bytes:
        return self._apply(nonce, text, authenticated)

    def forget(self) -> None:
        """Drop the key. Every further call raises `ForkedProcess`."""
        self._apply = forgotten


def _noted(function: Any) -> Apply:
    hold(function)
    made: Apply = function
    return made


def encryption(key: bytes) -> Apply:
    """Return the function that makes ciphertext and tag. In a forked child it raises `ForkedProcess`.

    Args:
        key: 32 bytes.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    functions = libsodium()
    return _noted(_General(AESGCM(key).encrypt) if functions is None else hot.Cipher(functions[0], key))


def decryption(key: bytes) -> Apply:
    """Return the function that makes the text from ciphertext and tag. It raises `cryptography.exceptions.InvalidTag`
    where the tag does not fit key, nonce, ciphertext and associated data. In a forked child it raises `ForkedProcess`.

    Args:
        key: 32 bytes.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    functions = libsodium()
    return _noted(_General(AESGCM(key).decrypt) if functions is None else hot.Cipher(functions[1], key, InvalidTag))


@functools.cache
def libsodium() -> tuple[object, object] | None:
    """Return capsules with libsodium's functions for encryption and decryption. None where libsodium is missing, has no
    AES, or makes other bytes than ``cryptography``."""
    try:
        sodium = importlib.import_module("nacl._sodium")  # PyNaCl has no public name for functions' addresses
        lib, ffi = sodium.lib, sodium.ffi
        if lib.sodium_init() < 0 or not lib.crypto_aead_aes256gcm_is_available():
            return None
        encrypt, decrypt = (
            _capsule(int(ffi.cast("uintptr_t", ffi.addressof(lib, f"crypto_aead_aes256gcm_{name}"))), capsule)
            for name, capsule in (("encrypt", _ENCRYPT), ("decrypt", _DECRYPT))
        )
    except (ImportError, AttributeError):
        return None
    if not _agrees(encrypt, decrypt):
        logger.warning("libsodium's AES-256-GCM is not that of cryptography; frames are sealed by cryptography alone")
        return None
    return encrypt, decrypt


def _capsule(address: int, name: bytes) -> object:
    """Wrap a function's address for the native part: a capsule, which no caller confuses with a number."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    made: object = new(address, name, None)
    return made


def _agrees(encrypt: object, decrypt: object) -> bool:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce, header = _KEY[:12], _KEY[:4]
    record = AESGCM(_KEY).encrypt(nonce, _TEXT, header)
    if hot.Cipher(encrypt, _KEY)(nonce, _TEXT, header) != record:
        return False
    try:
        opened: bytes = hot.Cipher(decrypt, _KEY, InvalidTag)(nonce, record, header)
    except InvalidTag:
        return False
    return opened == _TEXT
