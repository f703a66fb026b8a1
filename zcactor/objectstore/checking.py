"""Check mode: digests of the bytes that were shared, and the errors that name an array whose bytes have changed since.

Memory goes by reference once nobody should write to it any more. Views, buffers and memoryviews that were made before
still can. Check mode (the setting ``check``) finds these writes: it keeps a digest of each region of memory that a
message has referred to, and compares when the region is passed again, when a message that refers to it is sent, and
when the last lease of a peer on it ends.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from weakref import ref

from zcactor.logs import logger
from zcactor.native import hot
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.store import Block
from zcactor.objectstore.table import LeaseTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["Checker"]

_PASSING = ("zcactor", "pickle", "cloudpickle", "copyreg")
"""Packages whose functions stand between the program's line and the packing of an array."""
_RUNNING = ("asyncio", "threading", "concurrent", "uvloop")
"""Packages that run functions by themselves: their callers pass nothing."""


class _Watched:
    """The regions of one holder that messages have referred to."""

    __slots__ = ("entry", "regions", "reported")

    def __init__(self, entry: ref[Block | Lease]) -> None:
        self.entry = entry
        self.regions: dict[tuple[int, int], tuple[int, str]] = {}
        """The digest and the description of each region, by its offset in the owner's arena and its length."""
        self.reported = False
        """Whether a change was reported, which happens once."""


class Checker:
    """The check mode of one process. Any thread may call any method.

    Args:
        actor: function that returns the label of the actor whose method runs in this context, or an empty string.
    """

    def __init__(self, actor: Callable[[], str]) -> None:
        self.found: list[str] = []
        """The changes that were found at the ends of leases."""
        self._actor = actor
        self._watched: dict[int, _Watched] = {}  # by id of the holder

    def note(self, holder: Any, offset: int, nbytes: int, array: NDArray[Any]) -> None:
        """Note that a message refers to bytes of `holder` for `array`.

        Args:
            holder: a `Block` or a `Lease`; other holders are not checked.
            offset: offset of the first byte in the arena of the owner.
            nbytes: bytes of the region.
            array: the array, for the text of errors.

        Raises:
            RuntimeError: the bytes have changed since they were passed before.
        """
        if type(holder) not in (Block, Lease) or not nbytes:
            return
        watched = self._watched.get(id(holder))
        if watched is None:
            key = id(holder)
            entry = ref(holder, lambda _: self._watched.pop(key, None))
            watched = self._watched[key] = _Watched(entry)
        end, region = offset + nbytes, (offset, nbytes)
        fresh = region not in watched.regions
        for other in list(watched.regions) if fresh else [region]:
            if other[0] < end and offset < sum(other):
                self._compare(holder, watched, other, "it was passed again")
        if fresh:
            watched.regions[region] = _digest(holder, region), self._described(array)

    def use(self, holder: Any) -> None:
        """Compare the bytes of `holder`, to which a message refers that is about to be sent.

        Raises:
            RuntimeError: the bytes have changed since they were passed.
        """
        watched = self._watched.get(id(holder))
        if watched is not None:
            for region in list(watched.regions):
                self._compare(holder, watched, region, "the message with it was sent")

    def _compare(self, holder: Any, watched: _Watched, region: tuple[int, int], moment: str) -> None:
        digest, described = watched.regions[region]
        if _digest(holder, region) != digest:
            watched.reported = True
            raise RuntimeError(_changed(holder, region, described, moment))

    def forget(self, holder: Any) -> None:
        """Forget the bytes of `holder`, which the program may have changed: its memory was open again."""
        self._watched.pop(id(holder), None)

    def ended(self, holder: Any) -> None:
        """Compare the bytes of `holder`, on which a peer's last lease ends. A change is logged once, and kept for
        `raise_found`."""
        watched = self._watched.get(id(holder))
        if watched is None or watched.reported:
            return
        for region, (digest, described) in list(watched.regions.items()):
            if _digest(holder, region) != digest:
                watched.reported = True
                text = _changed(holder, region, described, "the last lease of a peer on it ended")
                self.found.append(text)
                logger.error("%s", text)
                return

    def leases(self) -> LeaseTable:
        """Make a table of leases whose ends are checked."""
        return _CheckedLeases(self)

    def raise_found(self) -> None:
        """Raise the changes that were found at the ends of leases, if any.

        Raises:
            RuntimeError: there were some.
        """
        if self.found:
            found, self.found = self.found, []
            raise RuntimeError("\n".join(found))

    def _described(self, array: NDArray[Any]) -> str:
        actor = self._actor()
        by = f" by {actor}" if actor else ""
        return f"{array.dtype} of shape {array.shape}, first passed{by} {_place()}"


class _CheckedLeases(LeaseTable):
    """The leases of a peer in check mode."""

    __slots__ = ("_checker",)

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker

    def release(self, object_id: int, count: int) -> Any:
        """See `LeaseTable.release`."""
        if self._counts.get(object_id) == count:
            self._checker.ended(self._keeps[object_id])
        return super().release(object_id, count)

    def end(self) -> dict[int, Any]:
        """See `LeaseTable.end`."""
        for holder in self._keeps.values():
            self._checker.ended(holder)
        return super().end()


def _digest(holder: Any, region: tuple[int, int]) -> int:
    offset, nbytes = region
    digest: int = hot.digest(holder.address + offset - holder.offset, nbytes)
    return digest


def _changed(holder: Any, region: tuple[int, int], described: str, moment: str) -> str:
    start = region[0] - holder.offset
    return (
        f"check mode: an array has changed after it was passed: {described}. Bytes {start:,} to {start + region[1]:,} "
        f"of object {holder.id:#018x} are not those that were passed (found when {moment}). Its memory was closed, so "
        "a view, buffer or memoryview that is older than the passing was written to. Write to none of these, take "
        "views of x = zc.freeze(x) instead, or pass x.copy()"
    )


def _place() -> str:
    """The line of the program that passes something."""
    frame = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _RUNNING:
            break
        if package not in _PASSING:
            code = frame.f_code
            return f"at {code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return "as a result or an item"
