"""The out-of-band buffers (PEP 574) of one pickle, each byte of them copied at most once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from zcactor.marshal.arrays import array_address
from zcactor.marshal.sharing import share

if TYPE_CHECKING:
    import pickle
    from collections.abc import Sequence

    from zcactor.objectstore.store import Store

__all__ = ["Buffers", "Lowering"]


class Lowering(Protocol):
    """What refers to arrays; see `zcactor.marshal.marshaller.Packing`."""

    store: Store
    eager_limit: int

    def lower_array(self, array: Any, *, seal: bool = True) -> Any:
        """One by reference, or within the payload."""

    def lower_groups(self, groups: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Those of which groups overlap."""


class Buffers:
    """Collects buffers while a value is pickled, and refers to them when all are there.

    Objects of one message may share memory: the columns of two batches of one table, the same dictionary in each chunk.
    Only when all buffers are known can the overlapping ones be copied together.
    """

    def __init__(self, packing: Lowering) -> None:
        self._packing = packing
        self._arrays: list[npt.NDArray[np.uint8]] = []

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """``buffer_callback``: whether the buffer is to be written into the pickle."""
        raw = buffer.raw()
        if raw.nbytes < self._packing.eager_limit:
            return True
        if isinstance(raw.obj, np.ndarray):
            share(self._packing.store, raw.obj)  # not a copy: then whoever owns it may not write to it either
        self._arrays.append(np.frombuffer(raw, np.uint8))
        return False

    def lowered(self) -> list[bytes]:
        """One encoded extension for each buffer that is not in the pickle, in order.

        Raises:
            OutOfMemory: the store cannot hold the copies.
        """
        extensions: list[Any] = [None] * len(self._arrays)
        groups: list[list[int]] = []
        end = 0
        for low, index in sorted((array_address(array), index) for index, array in enumerate(self._arrays)):
            array = self._arrays[index]
            if self._packing.store.contains(low, low + array.nbytes):
                extensions[index] = self._packing.lower_array(array, seal=False)
                continue
            if not groups or low >= end:
                groups.append([])
            groups[-1].append(index)
            end = max(end, low + array.nbytes)
        arrays = [[self._arrays[index] for index in group] for group in groups]
        for group, lowered in zip(groups, self._packing.lower_groups(arrays), strict=True):
            for index, extension in zip(group, lowered, strict=True):
                extensions[index] = extension
        return [extension.data for extension in extensions]
