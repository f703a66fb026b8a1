"""Payloads above the eager limit in the store: ciphertext in processes whose payloads may leave the host.

A machine between two hosts can read and change the bytes that are pulled, and a payload may be a pickle, which is code.
So its bytes are ciphertext of AES-256-GCM (NIST SP 800-38D) under a fresh random key of their own, and key and tag
travel in the frame, which is encrypted. That protects the bytes on every way: from the owner or from another process's
copy, by a socket or by RDMA READ. A key is used for one payload only, so the nonce is zero.

The package ``cryptography`` is imported when the first such payload is made or opened.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import AuthenticationError, ProtocolError
from zcactor.transport.stream.record_layer import KEY_NBYTES, REMEDY, TAG_NBYTES, can_seal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["ENVELOPE_NBYTES", "SLACK_NBYTES", "seal", "unseal"]

ENVELOPE_NBYTES: Final = KEY_NBYTES + TAG_NBYTES
"""Bytes of an envelope, the key and the tag: it travels in the frame in the payload's place."""
SLACK_NBYTES: Final = 15
"""Bytes that must follow the ciphertext: `cryptography` needs room for a block less one byte."""
_NONCE: Final = bytes(12)


def seal(payload: bytes, room: npt.NDArray[np.uint8]) -> bytes:
    """Encrypt `payload` into `room`.

    Args:
        payload: at most 64 GiB.
        room: at least ``len(payload) + SLACK_NBYTES`` bytes; the ciphertext is the first ``len(payload)``.

    Returns:
        The envelope.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    key = secrets.token_bytes(KEY_NBYTES)
    encryptor = Cipher(AES256(key), GCM(_NONCE)).encryptor()
    encryptor.update_into(payload, room.data)
    encryptor.finalize()
    return key + encryptor.tag


def unseal(envelope: bytes, ciphertext: Any) -> bytes:
    """Decrypt a payload into memory of its own.

    Args:
        envelope: the result of `seal`.
        ciphertext: a contiguous buffer of bytes. They may change meanwhile: the bytes returned are the bytes that were
            authenticated.

    Returns:
        The payload.

    Raises:
        ProtocolError: `ciphertext` is not the encrypted payload, or `envelope` is not an envelope.
        AuthenticationError: the package ``cryptography`` is not installed here.
    """
    if len(envelope) != ENVELOPE_NBYTES:
        raise ProtocolError(
            f"the envelope of a payload above the eager limit has {len(envelope)} bytes instead of {ENVELOPE_NBYTES}"
        )
    if not can_seal():
        raise AuthenticationError(
            f"a payload above the eager limit comes sealed, and cryptography is not installed here; {REMEDY}"
        )
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    decryptor = Cipher(AES256(envelope[:KEY_NBYTES]), GCM(_NONCE, envelope[KEY_NBYTES:])).decryptor()
    payload = decryptor.update(ciphertext)
    try:
        decryptor.finalize()
    except InvalidTag as error:
        raise ProtocolError(
            f"a payload of {len(payload)} bytes above the eager limit is not the one that its sender sealed: it was "
            f"changed on its way"
        ) from error
    return payload
