"""The two queue pairs of one connection: creation, connection and destruction."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from zcactor.errors import ProtocolError
from zcactor.transport.verbs.device.making import make_bulk, make_control
from zcactor.transport.verbs.device.sizing import DEPTH, MAX_READS, SEND_DEPTH, slot_nbytes_for
from zcactor.transport.verbs.device.slots import SlotArea
from zcactor.transport.verbs.device.versions import SEAL_NBYTES
from zcactor.transport.verbs.driver.base import Gid, PathAttributes, QpAddress, VerbsError
from zcactor.transport.verbs.driver.checks import new_psn
from zcactor.transport.verbs.peer.bootstrap import Agreement, Offer, QpName

if TYPE_CHECKING:
    from zcactor.transport.verbs.device.engine import Engine
    from zcactor.transport.verbs.driver.base import QueuePair

__all__ = ["QueuePairs"]

_MAX_RD_ATOMIC: Final = 16
"""READs under way at the same time on one queue pair. More gain nothing, and cost resources of the responder."""


class QueuePairs:
    """The queue pairs of one end, `control` and `bulk`, with their memory.

    Args:
        engine: the engine of their device.
        eager_limit: bytes of the largest payload in a frame that this process asks for.

    Raises:
        OSError: there is no room for another connection, or the device cannot make them. Nothing is left open.
        VerbsError: the device's queues are too short. Nothing is left open.
    """

    def __init__(self, engine: Engine, eager_limit: int) -> None:
        self.engine: Final = engine
        self.theirs: Offer
        """The peer's offer, once connected."""
        self.agreed: Agreement
        self.send_area: SlotArea
        self._closed = False
        engine.join()
        self._pairs: list[QueuePair] = []
        self._areas: list[SlotArea] = []
        try:
            self.control = self._keep(make_control(engine.device, engine.cq, engine.srq))
            self.bulk = self._keep(make_bulk(engine.device, engine.cq))
            self.seal_area = SlotArea(engine.device, MAX_READS, SEAL_NBYTES)
            self._areas.append(self.seal_area)
        except (OSError, VerbsError):
            self.close()
            raise
        found = engine.found
        limits = found.attributes
        self._control_psn, self._bulk_psn = new_psn(), new_psn()
        self.ours: Final = Offer(
            device=engine.device.name,
            gid=bytes(16) if found.gid is None else found.gid.raw,
            is_global=found.is_global,
            lid=found.port.lid,
            mtu=found.port.active_mtu,
            max_msg_sz=found.port.max_msg_sz,
            reads_out=max(1, min(_MAX_RD_ATOMIC, limits.max_qp_init_rd_atom)),
            reads_in=max(1, min(_MAX_RD_ATOMIC, limits.max_qp_rd_atom)),
            control=QpName(self.control.qp_num, self._control_psn),
            bulk=QpName(self.bulk.qp_num, self._bulk_psn),
            depth=DEPTH,
            slot_nbytes=engine.slot_nbytes,
            arena_address=engine.arena.address,
            seals=(engine.seals.address, engine.seals.rkey, engine.seals.count),
            proof=engine.proof,
            eager_limit=eager_limit,
            partition=found.partition,
        )

    def _keep(self, qp: QueuePair) -> QueuePair:
        self._pairs.append(qp)
        return qp

    def connect(self, theirs: Offer, agreed: Agreement) -> None:
        """Connect both to the peer's queue pairs. The peer does the same, and neither end posts before both have.

        Raises:
            OSError: there is no route to the peer's address, or the device failed.
            ProtocolError: the largest frame does not fit the peer's receives, or the longest message of the port.
        """
        self.theirs, self.agreed = theirs, agreed
        slot_nbytes = slot_nbytes_for(agreed.eager_limit)
        if slot_nbytes > min(agreed.slot_nbytes, agreed.max_msg_sz):
            raise ProtocolError(
                f"messages have up to {slot_nbytes} bytes; {theirs.device} has receives of {theirs.slot_nbytes}, and "
                f"{agreed.max_msg_sz} bytes go into a message"
            )
        self.send_area = SlotArea(self.engine.device, SEND_DEPTH + 2, slot_nbytes)
        self._areas.append(self.send_area)
        self.control.connect(self._address(theirs.control), self._path(self._control_psn, remote_read=False))
        self.bulk.connect(self._address(theirs.bulk), self._path(self._bulk_psn, remote_read=True))

    def rebuild(self, our_psn: int, their_psn: int) -> None:
        """Connect the bulk pair anew, which has to be drained.

        Raises:
            OSError: the device failed.
        """
        self.bulk.reset()
        name = QpName(self.theirs.bulk.qpn, their_psn)
        self.bulk.connect(self._address(name), self._path(our_psn, remote_read=True))

    def _address(self, name: QpName) -> QpAddress:
        theirs = self.theirs
        return QpAddress(name.qpn, name.psn, theirs.gid, theirs.lid, theirs.mtu)

    def _path(self, psn: int, *, remote_read: bool) -> PathAttributes:
        found, agreed = self.engine.found, self.agreed
        return PathAttributes(
            found.port.port,
            0 if found.gid is None else found.gid.index,
            psn,
            agreed.mtu,
            is_global=found.is_global,
            max_rd_atomic=agreed.reads_out,
            max_dest_rd_atomic=agreed.reads_in,
            remote_read=remote_read,
            marking=found.marking,
        )

    def describe(self) -> str:
        """Describe both ends, for messages about the path."""
        theirs, mtu = self.theirs, 128 << self.agreed.mtu
        return (
            f"queue pairs {self.control.qp_num} and {self.bulk.qp_num} of {self.engine.device.name} "
            f"({self._host(self.ours)}) to {theirs.control.qpn} and {theirs.bulk.qpn} of {theirs.device} "
            f"({self._host(theirs)}), MTU {mtu}"
        )

    @staticmethod
    def _host(offer: Offer) -> str:
        return f"GID {Gid(0, offer.gid, True).address}" if offer.is_global else f"LID {offer.lid}"

    def close(self) -> None:
        """Destroy both and unregister their memory. They have to be drained, unless the process ends. Idempotent.

        Raises:
            OSError: the device refused for one object; all others are closed.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as last_first:
            last_first.callback(self.engine.leave)
            for area in self._areas:
                last_first.callback(area.close)
            for qp in self._pairs:
                self.engine.unwatch(qp)
                last_first.callback(qp.close)
