"""Moving whole frames between two processes, and reaching the peer's bytes in place.

``base`` holds the shapes (`Connection`, `Endpoint`, `Receiver`), ``local`` speaks over a unix socket and passes the
arena as a memfd, ``loopback`` joins two ends inside one process and can break them on purpose. ``auth`` is the
handshake that every wire begins with; it does no I/O. Nothing here knows calls, credits or actors.
"""

from zcactor.transport.base import LENGTH_PREFIX, Connection, Endpoint, PeerInfo, Receiver, RemoteRegion

__all__ = ["LENGTH_PREFIX", "Connection", "Endpoint", "PeerInfo", "Receiver", "RemoteRegion"]
