"""Whole frames between two processes, and access to the peer's bytes in place.

``frames`` and ``bytes`` are the two seams of a transport: `Frames` carries frames, and `Bytes` maps or pulls the peer's
bytes. A `Connection` of ``base`` has both, and an `Endpoint` makes connections. ``local`` speaks over a unix socket and
passes the arena as a memfd, ``tcp`` pulls bytes over sockets of their own, ``verbs`` by RDMA READ; ``selector`` takes
the first of them that works for a peer; ``loopback`` joins two ends inside one process and can break them on purpose.
``stream`` is what all sockets share: encrypted records, and the handshake before the first frame. ``credits`` is the
arithmetic of flow control. Nothing here knows calls or actors.
"""

from zcactor.transport.base import Connection, Endpoint
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.frames import LENGTH_PREFIX, PeerInfo, Receiver

__all__ = ["LENGTH_PREFIX", "Connection", "Endpoint", "PeerInfo", "Receiver", "RemoteRegion"]
