"""The encryption of the values in a head's log: write access to a log must not make anybody the cluster's user.

Recipes of actors are pickles, and a pickle runs its maker's code where it is read. So each value of a log is sealed
by AES-256-GCM (NIST SP 800-38D) under a key of the cluster's token::

    epoch (u64, little-endian)   nonce (12)   ciphertext   tag (16)

Each epoch has a key of its own, so that random nonces do not repeat under it. The associated data are the log's name,
the value's kind and key, and the epoch: a value opens nowhere else. Somebody who can write to the log can still take
values away, and put back earlier ones of the same key.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.control.head_log import LogUnusable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["NOT_OURS", "DoesNotOpen", "LogSeal"]

NOT_OURS: Final = "it does not open with this cluster's token"
_EPOCH: Final = struct.Struct("<Q")
_NONCE_NBYTES: Final = 12
_LABEL: Final = b"zcactor log 1\0"
_KEYS: Final = 64
"""Keys that are kept, of as many epochs."""


class DoesNotOpen(Exception):
    """A value was not sealed for its place in this log by a holder of the token."""


class LogSeal:
    """The seal of one log.

    Args:
        token: the cluster's.
        log: the name that tells this log from others of the same token.
    """

    def __init__(self, token: bytes, log: bytes) -> None:
        self._token = token
        self._log = log
        self._keys: dict[int, AESGCM] = {}

    def seal(self, kind: str, key: str, epoch: int, value: bytes) -> bytes:
        """Encrypt a value.

        Raises:
            LogUnusable: the package ``cryptography`` is not installed.
        """
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        return _EPOCH.pack(epoch) + nonce + self._key(epoch).encrypt(nonce, value, self._beside(kind, key, epoch))

    def open(self, kind: str, key: str, sealed: bytes, *, latest: int, earliest: int = 0) -> bytes:
        """Decrypt a value.

        Args:
            kind, key: its place.
            sealed: of `seal`.
            latest, earliest: the bounds of its epoch.

        Raises:
            DoesNotOpen: it is not what `seal` has made for this place, or its epoch is out of the bounds.
            LogUnusable: the package ``cryptography`` is not installed.
        """
        head = _EPOCH.size + _NONCE_NBYTES
        if type(sealed) is not bytes or len(sealed) < head:  # another user may have written another type
            raise DoesNotOpen
        epoch: int = _EPOCH.unpack_from(sealed)[0]
        if not earliest <= epoch <= latest:
            raise DoesNotOpen
        cipher = self._key(epoch)
        from cryptography.exceptions import InvalidTag

        try:
            return cipher.decrypt(sealed[_EPOCH.size : head], sealed[head:], self._beside(kind, key, epoch))
        except InvalidTag:
            raise DoesNotOpen from None

    def _key(self, epoch: int) -> AESGCM:
        known = self._keys.get(epoch)
        if known is None:
            try:
                from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            except ImportError as error:
                raise LogUnusable(
                    "what a head's log holds is sealed, and cryptography is not installed; pip install "
                    "'zcactor[cluster]'"
                ) from error
            secret = hmac.digest(self._token, _LABEL + msgspec.msgpack.encode((self._log, epoch)), "sha256")
            if len(self._keys) >= _KEYS:
                self._keys.clear()
            known = self._keys[epoch] = AESGCM(secret)
        return known

    def _beside(self, kind: str, key: str, epoch: int) -> bytes:
        return msgspec.msgpack.encode((self._log, kind, key, epoch))
