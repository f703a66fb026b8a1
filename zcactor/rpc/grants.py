"""Leases that a session grants its peer, on what its messages refer to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import Region, RegionKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.rpc.parts import Granting, Part

__all__ = ["Grants"]


def _as_ours(part: Part) -> Part:
    """The part itself, or the object of ours that stands for one whose owner has ended."""
    holder = part.holder
    if type(holder) is not Lease or holder.adopted is None or part.kind != RegionKind.ARRAY:
        return part
    block, offset = holder.adopted
    return part._replace(holder=block, offset=offset + part.offset - holder.offset)


class Grants:
    """Leases the parts of a message, all of them or none. Under the session's lock.

    Args:
        session: grants the leases.
        process: id of the process here.
        export_bytes: what the transport gives with bytes of ours for the peer to read them, a seal and a key, from the
            object's id, the offset and the length in bytes; None where the peer needs neither.
    """

    def __init__(
        self, session: Granting, process: bytes, export_bytes: Callable[[int, int, int], tuple[int, int]] | None
    ) -> None:
        self._session = session
        self._leases = session.leases
        self._process = process
        self._export_bytes = export_bytes

    def export(self, parts: Sequence[Part]) -> Sequence[Region]:
        """Lease every part to the peer, or none: the owner of something passed on may be gone.

        Raises what granting a part raises.
        """
        regions: list[Region] = []
        try:
            for part in map(_as_ours, parts):
                owner, object_id, pin = part.holder.grant(self._session)
                regions.append(
                    Region(part.kind, owner, object_id, part.offset, part.nbytes, pin, 0, 0, part.authenticate)
                )
                if self._export_bytes is not None and owner == self._process and part.nbytes:
                    seal, rkey = self._export_bytes(object_id, part.offset, part.nbytes)
                    regions[-1] = regions[-1]._replace(seal=seal, rkey=rkey)
        except BaseException:
            self.take_back(regions)
            raise
        return regions

    def take_back(self, regions: Sequence[Region]) -> None:
        """End the leases that `export` has granted, of a message that was not sent."""
        for region in regions:
            if not region.pin and region.owner != self._process:
                continue  # the peer's own on its way home: nothing was leased, and its id may be one of ours, too
            leased = region.pin or region.id
            if self._leases.get(leased) is not None:
                self._leases.release(leased, 1)
