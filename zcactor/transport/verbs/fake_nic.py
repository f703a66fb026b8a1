"""One adapter of a fake fabric: its port, its addresses and its limits, and the descriptors that tell of events."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field, replace
from typing import Any, Final

from zcactor.transport.verbs.base import DeviceAttributes, Gid, PortAttributes, PortState

__all__ = ["ATTRIBUTES", "EventFd", "FakeNic"]

ATTRIBUTES: Final = DeviceAttributes(
    ports=1, max_qp_rd_atom=128, max_qp_init_rd_atom=128, max_qp_wr=16384, max_srq_wr=32768, max_cqe=32767
)
"""Limits of an adapter, unless a test asks for others: about those of rdma_rxe."""


class EventFd:
    """An eventfd that is closed with its owner: a test that leaves a device to the garbage leaves no descriptor."""

    def __init__(self, count: int) -> None:
        self.fd = os.eventfd(count, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.fd)
        """Close it, once."""


@dataclass(slots=True)
class FakeNic:
    """One adapter. Its fields may be changed while it is in use: a port can go down, pinned memory can run out."""

    name: str
    port: PortAttributes
    gids: tuple[Gid, ...]
    attributes: DeviceAttributes = ATTRIBUTES
    pin_limit: int | None = None
    """Bytes that may be registered by all its devices together, None for any number."""
    pinned: int = 0
    devices: list[Any] = field(default_factory=list, repr=False)
    """What processes have opened of it; see `zcactor.transport.verbs.fake.FakeDevice`."""

    def tell(self, kind: int) -> None:
        """An asynchronous event, told to all who have opened it. Nothing else raises one, so that they can be lost."""
        for device in self.devices:
            device.tell(kind)

    @property
    def active(self) -> bool:
        """Whether packets go in and out."""
        return self.port.state == PortState.ACTIVE

    def set_active(self, active: bool) -> None:
        """Plug the cable in or pull it."""
        self.port = replace(self.port, state=PortState.ACTIVE if active else PortState.DOWN)
