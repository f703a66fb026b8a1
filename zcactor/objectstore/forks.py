"""Forks of this process, before which memory becomes private that the program has arrays over.

The heap does that for the store's own memory (``heap/forks.c``), and is told here which of its blocks have arrays.
Arrays that were moved here lie in other processes' memory, and become private here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Protocol

from zcactor.transport.mapping import all_windows

if TYPE_CHECKING:
    from weakref import ref

    from zcactor.objectstore.lease import Lease

__all__ = ["living_leases", "stores"]


class _Store(Protocol):
    def show_blocks(self) -> None: ...


stores: Final[dict[int, ref[_Store]]] = {}
"""The stores of this process, by ``id``: a dictionary can be copied while another thread adds to it."""


def living_leases(*, writable: bool = False) -> list[Lease]:
    """The living leases on mapped bytes of other processes; with `writable` those in writable windows alone."""
    found = [
        seen()
        for window in all_windows()
        if not writable or (window.file is not None and window.file.writable)
        for seen in window.leases.copy().values()
    ]
    return [lease for lease in found if lease is not None]


def _before() -> None:
    for each in stores.copy().values():
        if (store := each()) is not None:
            store.show_blocks()
    for lease in living_leases(writable=True):
        if lease.nbytes and not lease.forked:
            lease.mapping.make_private(lease.address - lease.mapping.base, lease.nbytes)
            lease.forked = True


os.register_at_fork(before=_before)
