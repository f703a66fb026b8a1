"""Extents of other processes' GPU memory, imported once each, and the events of their work."""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from zcactor.device.events import EVERYWHERE, OTHERS, Moment
from zcactor.errors import DeviceError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.device.driver import GpuDriver
    from zcactor.device.memory import GpuMemory
    from zcactor.transport.local.extents import ExtentReply, RemoteExtent

__all__ = ["ImportedExtent", "Imports", "OpenEvent"]


class ImportedExtent:
    """An extent that is mapped here, read-only where the driver enforces it. It is unmapped, on the loop, when the last
    lease in it is gone and its owner's process, or the extent there, is gone too.

    Args:
        gpu: the GPU by which it is reached: its own or, where this process does not see that, another with access.
        remote: the extent, with what the owner has exported, which stays the caller's.

    Raises:
        DeviceError: the driver refuses. Nothing is left mapped.
    """

    __slots__ = (
        "__weakref__", "_undo", "address", "gpu", "is_hidden", "leases", "nbytes", "offset", "readonly",
    )  # fmt: skip

    def __init__(self, gpu: GpuMemory, remote: RemoteExtent) -> None:
        driver, device, nbytes = gpu.driver, gpu.index, remote.nbytes
        self.gpu: Final = gpu
        self.is_hidden: Final = gpu.uuid != remote.uuid
        """Whether this process does not see the GPU: arrays in it are copied to `gpu`."""
        self.offset: Final = remote.offset
        self.nbytes: Final = nbytes
        self.leases: Final[WeakValueDictionary[int, Any]] = WeakValueDictionary()
        """The leases on objects in it, by their ids as Python objects."""
        undo = partial(_undo, driver, device, nbytes)
        handle = driver.import_(device, remote.fd, nbytes, remote.uuid)
        self._undo = partial(undo, handle, 0, 0)
        room = driver.reserve(device, nbytes)
        self._undo = partial(undo, handle, room, 0)
        self.readonly: Final = driver.map(device, room, handle, nbytes, False)
        self.address: Final = room
        self._undo = partial(undo, handle, room, room)

    def __del__(self) -> None:
        undo = getattr(self, "_undo", None)
        if undo is not None:  # it names no module, as the interpreter may be ending, and does not keep this object
            self.gpu.tending.when_done([], undo)


def _undo(driver: GpuDriver, device: int, nbytes: int, handle: int, room: int, address: int) -> None:
    """Undo an import, as far as it went. A step that fails leaves its own part, as there is no caller to tell."""
    if address:
        with contextlib.suppress(DeviceError):
            driver.unmap(device, address, nbytes)
    with contextlib.suppress(DeviceError):
        driver.release(device, handle)
    if room:
        with contextlib.suppress(DeviceError):
            driver.unreserve(device, room, nbytes)


class OpenEvent:
    """An event that was opened or promised, which ends with the last moment of it. It stands in the place of a pool,
    which moments keep.

    Args:
        gpu: the GPU that the event belongs to here.
        event: the event.
    """

    def __init__(self, gpu: GpuMemory, event: int) -> None:
        self.gpu: Final = gpu
        self.event: Final = event
        self._end: Final = partial(_end_event, gpu.driver, gpu.index, event)

    def moment(self) -> Moment:
        """The moment of the event, which may be lost."""
        return Moment(self, self.gpu.driver, self.gpu.index, self.event, OTHERS)

    def take_back(self, event: int) -> None:
        """Do nothing: the event stays open."""

    def lane(self, stream: int) -> int:
        """No stream of this process has the work."""
        return EVERYWHERE

    def __del__(self) -> None:
        self.gpu.tending.when_done([], self._end)  # as for an extent


def _end_event(driver: GpuDriver, device: int, event: int) -> None:
    with contextlib.suppress(DeviceError):  # there is no caller to tell
        driver.end_event(device, event)


class _Peer:
    """The imports of one owner."""

    def __init__(self) -> None:
        self.extents: list[ImportedExtent] = []
        """All of them, in the order of their offsets."""
        self.events: WeakValueDictionary[bytes, OpenEvent] = WeakValueDictionary()
        """Opened events, by what was exported."""


class Imports:
    """The extents and events of other processes that this process has. Used on the loop's thread; `find` and `moment`
    from any.

    Args:
        gpus: the GPUs that this process sees.
    """

    def __init__(self, gpus: Sequence[GpuMemory]) -> None:
        self._gpus: Final = {gpu.uuid: gpu for gpu in gpus}
        self._lock: Final = threading.Lock()
        self._peers: dict[bytes, _Peer] = {}
        self._living: WeakValueDictionary[int, ImportedExtent] = WeakValueDictionary()
        """All extents that are mapped, by their addresses."""

    def __len__(self) -> int:
        """The number of extents."""
        return sum(len(peer.extents) for peer in self._peers.values())

    def has_met(self, owner: bytes) -> bool:
        """Whether an owner, of which something was imported, has not ended since."""
        return owner in self._peers

    def find(self, owner: bytes, offset: int, nbytes: int) -> ImportedExtent | None:
        """The extent in which bytes of an owner lie, or None."""
        peer = self._peers.get(owner)
        extents = [] if peer is None else peer.extents
        at = bisect_right(extents, offset, key=lambda each: each.offset) - 1
        if at < 0:
            return None
        found = extents[at]
        return found if offset - found.offset + nbytes <= found.nbytes else None

    def add(self, owner: bytes, answer: ExtentReply) -> str:
        """Import extents. May take milliseconds; one call at a time for an owner.

        Args:
            owner: process id of the owner, 16 bytes.
            answer: the extents, whose descriptors are closed.

        Returns:
            Why some extent could not be imported; empty where all could.

        Raises:
            ProtocolError: an extent overlaps another.
        """
        peer = self._peers.setdefault(owner, _Peer())
        reason = ""
        with contextlib.closing(answer):
            driver = next((gpu.driver for gpu in self._gpus.values()), None)
            if answer.events is not None and driver is not None and driver.shared_events:
                if answer.process is None:
                    return "its owner is in another PID namespace, and Linux before 6.5 does not say when it ends"
                try:
                    driver.add_event_page(answer.events, answer.process)
                except DeviceError as error:
                    return str(error)
            for each in answer.extents:
                reason = self._add(peer, each) or reason
        return reason

    def drop(self, owner: bytes, offset: int) -> None:
        """Forget an extent that the owner has no more. It is unmapped once the last lease in it is gone."""
        peer = self._peers.get(owner)
        if peer is not None:
            with self._lock:
                peer.extents = [each for each in peer.extents if each.offset != offset]

    def _add(self, peer: _Peer, remote: RemoteExtent) -> str:
        end = remote.offset + remote.nbytes
        around = [each for each in peer.extents if each.offset < end and remote.offset < each.offset + each.nbytes]
        if around:
            if [(each.offset, each.nbytes) for each in around] == [remote[:2]]:
                return ""
            raise ProtocolError(f"the peer names an extent at {remote.offset} that overlaps another of its extents")
        gpu = self._gpus.get(remote.uuid) or next(iter(self._gpus.values()), None)
        if gpu is None:
            return "this process sees no GPU"
        try:
            extent = ImportedExtent(gpu, remote)
        except DeviceError as error:
            hidden = f"this process does not see the GPU {remote.uuid}: " if gpu.uuid != remote.uuid else ""
            return f"{hidden}{error}"
        self._living[extent.address] = extent
        with self._lock:  # other threads look at the list meanwhile, so it does not change
            peer.extents = sorted((*peer.extents, extent), key=lambda each: each.offset)
        return ""

    def lease_at(self, low: int, high: int) -> Any:
        """A `DeviceLease` on an object whose bytes contain the addresses ``[low, high)``, or None."""
        for each in self._living.valuerefs():  # a copy: other threads import
            extent = each()
            if extent is not None and extent.address <= low and high <= extent.address + extent.nbytes:
                leases = [found for one in extent.leases.valuerefs() if (found := one()) is not None]
                around = (lease for lease in leases if lease.address <= low and high <= lease.address + lease.nbytes)
                return next(around, None)
        return None

    def moment(self, owner: bytes, exported: bytes, gpu: GpuMemory) -> Moment:
        """The moment of an owner's work, whose event is opened once.

        Raises:
            DeviceError: there is no such event.
        """
        events = self._peers.setdefault(owner, _Peer()).events
        opened = events.get(exported)
        if opened is None:
            opened = events[exported] = OpenEvent(gpu, gpu.driver.open_event(gpu.index, exported))
        return opened.moment()

    def forget(self, owner: bytes) -> None:
        """Forget an owner that has ended. ExtentReply and events that arrays have stay as long as these."""
        self._peers.pop(owner, None)
