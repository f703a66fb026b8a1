"""Leases that a session grants its peer on the parts of its messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.objectstore.store import Block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.objectstore.checking import Checker
    from zcactor.rpc.parts import Granting, Part

__all__ = ["CheckedGrants", "Grants"]


_ARRAY, _REF = int(RegionKind.ARRAY), int(RegionKind.REF)


def _as_ours(part: Part) -> Part:
    """The part itself or, where its owner has ended, the part of the object of ours that replaces it."""
    holder = part.holder
    if type(holder) is not Lease or holder.adopted is None or part.kind != RegionKind.ARRAY:
        return part
    block, offset = holder.adopted
    return part._replace(holder=block, offset=offset + part.offset - holder.offset)


class Grants:
    """Leases the parts of a message, all or none. Used under the session's lock.

    Args:
        session: the session that grants the leases.
        process: id of this process.
        export_bytes: function of the transport that returns the seal and the rkey by which the peer reads bytes of
            ours, from the object's id, the offset and the length in bytes; None where the peer needs neither.
    """

    def __init__(
        self, session: Granting, process: bytes, export_bytes: Callable[[int, int, int], tuple[int, int]] | None
    ) -> None:
        self._session = session
        self._leases = session.leases
        self._keeps_copies = not session.connection.maps
        self._process = process
        self._export_bytes = export_bytes

    def export(self, parts: Sequence[Part]) -> Sequence[Region]:
        """Lease every part to the peer, or none: the owner of a part that is passed on may have ended.

        Raises:
            Exception: the error of granting a part.
        """
        regions: list[Region] = []
        try:
            for part in map(_as_ours, parts):
                if self._keeps_copies and part.kind == _ARRAY and type(part.holder) is Block:
                    part = part._replace(holder=part.holder.as_sent(part.offset, part.nbytes))
                owner, object_id, pin = part.holder.grant(self._session)
                offset = part.offset
                regions.append(Region(part.kind, owner, object_id, offset, part.nbytes, pin, 0, 0, part.authenticate))
                if part.kind == _REF and (announce := getattr(part.holder, "announce", None)) is not None:
                    regions[-1] = regions[-1]._replace(offset=announce(self._session))
                if self._export_bytes is not None and owner == self._process and part.nbytes:
                    seal, rkey = self._export_bytes(object_id, part.offset, part.nbytes)
                    regions[-1] = regions[-1]._replace(seal=seal, rkey=rkey)
        except BaseException:
            self.take_back(regions)
            raise
        return regions

    def take_back(self, regions: Sequence[Region]) -> None:
        """End the leases that `export` granted for a message that was not sent."""
        for region in regions:
            if not region.pin and region.owner != self._process:
                continue  # the peer's own object on its way home: not leased, and its id may also be an id of ours
            leased = region.pin or region.id
            if self._leases.get(leased) is not None:
                self._leases.release(leased, 1)


class CheckedGrants(Grants):
    """The granting of leases in check mode.

    Args:
        checker: has the digests of the bytes that were passed.
        session, process, export_bytes: as for `Grants`.
    """

    def __init__(
        self, checker: Checker, session: Granting, process: bytes,
        export_bytes: Callable[[int, int, int], tuple[int, int]] | None,
    ) -> None:  # fmt: skip
        super().__init__(session, process, export_bytes)
        self._checker = checker

    def export(self, parts: Sequence[Part]) -> Sequence[Region]:
        """See `Grants.export`.

        Raises:
            RuntimeError: the bytes of a part have changed since it was packed. Nothing was leased.
            Exception: the error of granting a part.
        """
        for part in parts:
            if part.kind == _ARRAY:
                self._checker.use(part.holder)
        return super().export(parts)
