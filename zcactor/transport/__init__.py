"""Moving whole frames between two processes, and reaching the peer's bytes in place.

``base`` holds the shapes (`Connection`, `Endpoint`, `Receiver`). ``local`` speaks over a unix socket and passes the
arena as a memfd, ``tcp`` pulls bytes over sockets of their own, ``verbs`` by RDMA READ; ``select`` takes the first of
them that works for a peer; ``loopback`` joins two ends inside one process and can break them on purpose. ``auth`` is
the handshake that every wire begins with, without I/O; ``credits`` and ``cost`` are the arithmetic of flow control and
of what rides in a frame. Nothing here knows calls or actors.
"""

from zcactor.transport.base import LENGTH_PREFIX, Connection, Endpoint, PeerInfo, Receiver, RemoteRegion

__all__ = ["LENGTH_PREFIX", "Connection", "Endpoint", "PeerInfo", "Receiver", "RemoteRegion"]
