"""The out-of-band buffers (PEP 574) of one pickle, each byte of them copied at most once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from zcactor.later import np
from zcactor.marshal.arrays import array_address
from zcactor.marshal.sharing import CLAIMED, share, share_at
from zcactor.native import hot

if TYPE_CHECKING:
    import pickle
    from collections.abc import Sequence

    import numpy.typing as npt

    from zcactor.objectstore.store import Store

__all__ = ["ArrayPacking", "Buffers"]


class ArrayPacking(Protocol):
    """The packing of arrays, as `Buffers` needs it; see `zcactor.marshal.packing.Packing`."""

    store: Store
    eager_limit: int
    closed: list[Any]

    def pack_array(self, array: Any) -> Any:
        """Encode an array by reference, or within the payload."""

    def reference(self, array: Any, holder: Any) -> Any:
        """Encode an array by reference."""

    def pack_groups(self, groups: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Encode groups of arrays whose memory overlaps."""


class Buffers:
    """The buffers of a value that is pickled, and the references to them, which are encoded when all are known.

    Objects of one message may share memory: the columns of two batches of one table, the same dictionary in each chunk.
    Overlapping buffers can be copied together only when all buffers are known.
    """

    def __init__(self, packing: ArrayPacking) -> None:
        self._packing = packing
        self._arrays: list[tuple[npt.NDArray[np.uint8], Any]] = []
        """The bytes of each, and what holds them where they go by reference."""

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer, as ``buffer_callback``. The result says whether the buffer is to be written into the
        pickle.

        Raises:
            ValueError: it is of an array that takes the result of a group's operation under way.
        """
        raw = buffer.raw()
        # The array itself is passed; of any other exporter, what it exports.
        array = raw.obj if isinstance(raw.obj, np.ndarray) else None
        if array is not None and hot.claimed(array):
            raise ValueError(CLAIMED)
        if raw.nbytes < self._packing.eager_limit:
            return True
        holder = None if array is None else share(self._packing.store, array, self._packing.closed)
        self._arrays.append((np.frombuffer(raw, np.uint8), holder))
        return False

    def packed(self) -> list[bytes]:
        """Encode each buffer that is not in the pickle as an extension, in order.

        Raises:
            OutOfMemory: the store cannot hold the copies.
        """
        extensions: list[Any] = [None] * len(self._arrays)
        groups: list[list[int]] = []
        end = 0
        for low, index in sorted((array_address(array), index) for index, (array, _) in enumerate(self._arrays)):
            array, holder = self._arrays[index]
            holder = holder or share_at(self._packing.store, low, low + array.nbytes)
            if holder is not None:
                extensions[index] = self._packing.reference(array, holder)
                continue
            if not groups or low >= end:
                groups.append([])
            groups[-1].append(index)
            end = max(end, low + array.nbytes)
        arrays = [[self._arrays[index][0] for index in group] for group in groups]
        for group, packed in zip(groups, self._packing.pack_groups(arrays), strict=True):
            for index, extension in zip(group, packed, strict=True):
                extensions[index] = extension
        return [extension.data for extension in extensions]
