"""The versions of the protocol by which two processes can talk."""

from __future__ import annotations

from typing import Final

__all__ = ["OLDEST_SERVED", "PROTOCOL_VERSION"]

PROTOCOL_VERSION: Final = 19
"""Rises with each change of the handshake, of the schema, of a field's meaning or of a remote method."""
OLDEST_SERVED: Final = 19
"""The oldest version of a peer that this process serves, so that a cluster is upgraded node by node. The newer one of
two ends decides: it knows both versions, and sends nothing that the older one does not know.

A field that is added at the end of a table of the schema, and a remote method with a further number, leave it as it is.
It rises to `PROTOCOL_VERSION` with any other change of the handshake, of the frames, of a method's arguments or of a
name of this package that pickles carry.
"""
