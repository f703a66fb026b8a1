"""Whole frames between two processes, and access to the peer's bytes in place.

``base`` has the shapes (`Connection`, `Endpoint`, `Receiver`). ``local`` speaks over a unix socket and passes the arena
as a memfd, ``tcp`` pulls bytes over sockets of their own, ``verbs`` by RDMA READ; ``selector`` takes the first of them
that works for a peer; ``loopback`` joins two ends inside one process and can break them on purpose. ``stream`` is what
all sockets share: framing, encrypted records, and the handshake before the first frame. ``credits`` and ``cost`` are
the arithmetic of flow control and of the size up to which a payload travels within a frame. Nothing here knows calls or
actors.
"""

from zcactor.transport.base import LENGTH_PREFIX, Connection, Endpoint, PeerInfo, Receiver, RemoteRegion

__all__ = ["LENGTH_PREFIX", "Connection", "Endpoint", "PeerInfo", "Receiver", "RemoteRegion"]
