"""Messages of arrays over a carrier, encoded or copied through its slots: both ends of the paths without zcactor."""

from __future__ import annotations

import ctypes
import pickle
import struct
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.paths.carriers import Carrier

__all__ = ["WAYS", "Array", "Encoded", "Messages", "Private"]

Array = npt.NDArray[np.float32]

_LENGTH: Final = struct.Struct("<Q")
_MOST: Final = 510
"""Arrays of one message: their number and lengths go before them in less than a page."""


class Messages(Protocol):
    """One end's messages."""

    async def send(self, arrays: Sequence[Array]) -> None:
        """Send a message."""

    async def receive(self) -> list[Array]:
        """Receive a message; the arrays belong to the caller."""


class Encoded:
    """Messages that are pickled whole. Satisfies `Messages`."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    async def send(self, arrays: Sequence[Array]) -> None:
        """Encode into one string of bytes, and send it."""
        data = pickle.dumps(list(arrays), protocol=4)
        await self._carrier.send(memoryview(_LENGTH.pack(len(data))))
        await self._carrier.send(memoryview(data))

    async def receive(self) -> list[Array]:
        """Receive the bytes, and decode them."""
        length = bytearray(_LENGTH.size)
        await self._carrier.receive(memoryview(length))
        data = await self._carrier.take(_LENGTH.unpack(length)[0])
        found: list[Array] = pickle.loads(data)  # comes from this program's other end
        return found


class Private:
    """Messages whose arrays go through the carrier as they are, each into memory for it alone. Satisfies
    `Messages`."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    async def send(self, arrays: Sequence[Array]) -> None:
        """Send the arrays' lengths, and their bytes.

        Raises:
            ValueError: there are too many arrays.
        """
        if len(arrays) > _MOST:
            raise ValueError(f"a message has {len(arrays)} arrays, and at most {_MOST} are allowed: send several")
        lengths = np.zeros(_MOST + 1, np.int64)
        lengths[0] = len(arrays)
        lengths[1 : 1 + len(arrays)] = [len(array) for array in arrays]
        await self._carrier.send(_bytes(lengths))
        for array in arrays:
            await self._carrier.send(_bytes(array))

    async def receive(self) -> list[Array]:
        """Receive the lengths, allocate the arrays, and receive their bytes into them."""
        lengths = np.empty(_MOST + 1, np.int64)
        await self._carrier.receive(_bytes(lengths))
        found: list[Array] = []
        for length in lengths[1 : 1 + lengths[0]].tolist():
            array: Array = np.empty(length, np.float32)
            await self._carrier.receive(_bytes(array))
            found.append(array)
        return found


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    """The memory of an array that may be read-only, as plain bytes.

    A view that NumPy exports would make the array's memory count as lent (PEP 3118) as long as the view exists.
    """
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return memoryview(memory).cast("B")


WAYS: Final[Mapping[str, Callable[[Carrier], Messages]]] = {"encode": Encoded, "private buffers": Private}
"""The messages of each way without zcactor."""
