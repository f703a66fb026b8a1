"""The version of the protocol that two processes have to agree on."""

from __future__ import annotations

from typing import Final

__all__ = ["PROTOCOL_VERSION"]

PROTOCOL_VERSION: Final = 18
"""Rises with each change of the handshake, of the schema or of a field's meaning. Peers of another version are
refused."""
