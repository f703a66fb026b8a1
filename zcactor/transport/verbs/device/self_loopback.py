"""A queue pair that is connected to itself, which tests and measures a device without a peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.transport.verbs.driver.base import UNMARKED, PathAttributes, QpAddress
from zcactor.transport.verbs.driver.checks import new_psn

if TYPE_CHECKING:
    from zcactor.transport.verbs.driver.base import Device, Gid, Marking, PortAttributes, QueuePair

__all__ = ["connect_to_itself"]

_MAX_RD_ATOMIC: Final = 16
"""READs under way at the same time, as for connections to peers, unless the device allows fewer."""


def connect_to_itself(
    qp: QueuePair, device: Device, port: PortAttributes, gid: Gid | None, marking: Marking = UNMARKED
) -> None:
    """Connect `qp`, which is in RESET, to itself.

    Args:
        qp: a queue pair of `device`.
        device: its limit of READs under way counts.
        port: the port to use.
        gid: the address to use; None on an InfiniBand port, where the LID is used.
        marking: the marks of its packets.

    Raises:
        OSError: the verb failed.
    """
    psn = new_psn()
    limits = device.attributes
    reads = max(1, min(_MAX_RD_ATOMIC, limits.max_qp_rd_atom, limits.max_qp_init_rd_atom))
    qp.connect(
        QpAddress(qp.qp_num, psn, bytes(16) if gid is None else gid.raw, port.lid, port.active_mtu),
        PathAttributes(
            port.port,
            0 if gid is None else gid.index,
            psn,
            port.active_mtu,
            is_global=gid is not None,
            max_rd_atomic=reads,
            max_dest_rd_atomic=reads,
            marking=marking,
        ),
    )
