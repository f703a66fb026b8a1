"""The first actor, from a plain script: no event loop, and no ``await``."""

import numpy as np

import zcactor as zc


@zc.actor
class Scaler:
    """Multiplies arrays, in a process of its own."""

    @zc.method
    def scale(self, x: np.ndarray, factor: float) -> np.ndarray:
        """The product."""
        return x * factor


with zc.init():
    scaler = Scaler.spawn().result()
    result = scaler.scale(np.ones(1_000_000), 3.0).result()
    print(result.sum(), "with", zc.stats().bytes_copied, "bytes copied")
