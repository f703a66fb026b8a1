"""JAX arrays over memory of the store; run by tests/test_interop.py in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

import zcactor as zc
from tests.marshal.wire import Wire, address

COUNT = 50_000


@zc.actor
class User:
    """An actor that uses its argument."""

    @zc.method
    def total(self, value: jax.Array) -> tuple[float, int]:
        """Sum, and bytes copied in this process."""
        return float(value.sum()), zc.stats().bytes_copied


def in_one_process() -> None:
    """Arrays between two marshallers go by reference, and arrive equal."""
    wire = Wire()
    array = wire.left.store.empty((100, 500), "f4")
    array.fill(2)
    value = jax.device_put(array, may_alias=True)
    assert value.unsafe_buffer_pointer() == address(array)
    got = wire.send({"j": value, "s": {1}})["j"]
    assert isinstance(got, jax.Array)
    assert got.unsafe_buffer_pointer() == address(array)
    assert bool((got == value).all())
    assert wire.right.bytes_copied == 0
    assert "argument outside the store" not in wire.left.copies.snapshot()
    small = (jnp.ones(5, jnp.bfloat16), jnp.ones(()), jnp.zeros((0, 3)))
    for other in (*small, jnp.arange(5000), jnp.ones(3000, "i2")):
        got = wire.send(other)
        assert got.dtype == other.dtype
        assert got.shape == other.shape
        assert bool((got == other).all())


async def between_processes() -> None:
    """Arrays between processes are copied on neither side."""
    async with zc.init():
        user = await zc.spawn(User)
        value = jax.device_put(zc.ones(COUNT, "f4"), may_alias=True)
        assert await user.total(value) == (COUNT, 0)
        assert "argument outside the store" not in zc.stats().copies


if __name__ == "__main__":
    in_one_process()
    zc.run(between_processes())
