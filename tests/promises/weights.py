"""A server of weights that it updates in place, and its readers: in a module that a new process imports at once."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

import zcactor as zc

__all__ = ["SERVED", "Layers", "Reader", "Server", "checksum"]

N = 100_000
SERVED: dict[str, Callable[[], Any]] = {
    "reshape": lambda: np.zeros(2 * N).reshape(200, -1),
    "zc.zeros.reshape": lambda: zc.zeros(2 * N).reshape(200, -1),
    "np.zeros": lambda: np.zeros((200, N // 100)),
    "x.T": lambda: np.zeros((N // 100, 200)).T,
}


@zc.actor
class Server:
    """Serve rows of weights, and update them in place."""

    def __init__(self, how: str) -> None:
        self.weights = SERVED[how]() if how else np.zeros(0)

    def take(self, weights: Any) -> None:
        """Own weights that were moved here."""
        self.weights = weights.reshape(200, -1)

    def rows(self) -> Any:
        """Half of the weights."""
        return self.weights[:100]

    def update(self) -> None:
        """A step."""
        self.weights += 1


@zc.actor
class Layers:
    """A model whose layers are views of one vector."""

    def __init__(self) -> None:
        self.flat = np.zeros(4 * N)
        self.first, self.second = self.flat[: 2 * N].reshape(200, -1), self.flat[2 * N :]

    def layer(self) -> Any:
        """A layer."""
        return self.first

    def rows(self) -> Any:
        """Half of a layer."""
        return self.first[:100]

    def step(self, flat: bool) -> None:
        """Write to the vector, or to the layers."""
        if flat:
            self.flat += 1
        else:
            self.first += 1
            self.second += 1


@zc.actor
class Reader:
    """Read rows of a `Server` once, and keep them."""

    def __init__(self) -> None:
        self.value: Any = None

    async def read(self, server: Any) -> float:
        """Read and keep. Returns the first element."""
        self.value = await server.rows()
        return float(self.value.flat[0])

    def sum(self) -> int:
        """The checksum of the rows that were read."""
        return checksum(self.value)


def checksum(rows: Any) -> int:
    """A checksum of the elements of an array."""
    return zlib.crc32(np.ascontiguousarray(rows).tobytes())
