"""AES-256-GCM for records, as a function of nonce, text and what is authenticated beside it.

The package ``cryptography`` has it, by way of OpenSSL's general interface. After a process's sleep, and whoever waits
for an answer sleeps, one call of that takes 4 µs for 200 bytes, as most of its code has left the caches by then.
libsodium's function for this one cipher takes 0.6 µs. So where PyNaCl is installed, which brings libsodium, and the
processor has instructions for AES, without which libsodium has no AES, the native part calls that function.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Final

from zcactor.native import hot

if TYPE_CHECKING:
    from collections.abc import Callable

    Apply = Callable[[bytes, bytes, bytes], bytes]
    """``apply(nonce, text, authenticated)``"""

__all__ = ["decryption", "encryption", "libsodium"]

logger = logging.getLogger(__name__)

_KEY: Final = bytes(range(32))
_TEXT: Final = b"the same from both"


def encryption(key: bytes) -> Apply:
    """What makes ciphertext and tag.

    Args:
        key: 32 bytes.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    functions = libsodium()
    return AESGCM(key).encrypt if functions is None else hot.Cipher(functions[0], key)


def decryption(key: bytes) -> Apply:
    """What makes the text of ciphertext and tag, and raises `cryptography.exceptions.InvalidTag` where these are not
    what the key, the nonce and what is authenticated demand.

    Args:
        key: 32 bytes.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    functions = libsodium()
    return AESGCM(key).decrypt if functions is None else hot.Cipher(functions[1], key, InvalidTag)


@functools.cache
def libsodium() -> tuple[int, int] | None:
    """Where its functions for encryption and decryption are. None: it is not here or has no AES, there is no native
    part, or it does not make what ``cryptography`` makes."""
    if hot is None:
        return None
    try:
        sodium = importlib.import_module("nacl._sodium")  # PyNaCl has no public name for functions' addresses
        lib, ffi = sodium.lib, sodium.ffi
        if lib.sodium_init() < 0 or not lib.crypto_aead_aes256gcm_is_available():
            return None
        encrypt, decrypt = (
            int(ffi.cast("uintptr_t", ffi.addressof(lib, f"crypto_aead_aes256gcm_{name}")))
            for name in ("encrypt", "decrypt")
        )
    except (ImportError, AttributeError):
        return None
    if not _agrees(encrypt, decrypt):
        logger.warning("libsodium's AES-256-GCM is not that of cryptography; frames are sealed by cryptography alone")
        return None
    return encrypt, decrypt


def _agrees(encrypt: int, decrypt: int) -> bool:
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
