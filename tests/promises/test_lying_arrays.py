"""Arrays of classes that answer anything for shape, dtype, strides, flags, size and base: their elements arrive."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import zcactor as zc


class Cropped(np.ndarray[Any, Any]):
    shape = property(lambda _: (5,))


class Huge(np.ndarray[Any, Any]):
    shape = property(lambda _: (1 << 40,))


class Halved(np.ndarray[Any, Any]):
    dtype = property(lambda _: np.dtype("f4"))


class Close(np.ndarray[Any, Any]):
    strides = property(lambda _: (8,))


class Contiguous(np.ndarray[Any, Any]):
    flags = property(lambda _: np.zeros(3).flags)


class Large(np.ndarray[Any, Any]):
    nbytes = property(lambda _: 100_000)


class Rootless(np.ndarray[Any, Any]):
    base = property(lambda _: None)


def _broken(_: Any) -> Any:
    raise KeyError("of the class")


class Named(np.ndarray[Any, Any]):
    dtype = property(lambda _: "x")


class Broken(np.ndarray[Any, Any]):
    dtype = property(_broken)
    flags = property(_broken)
    base = property(_broken)


Facts = tuple[str, tuple[int, ...], float]


def facts(array: Any) -> Facts:
    """Dtype, shape and sum of the elements of an array, as NumPy knows them."""
    plain = np.ndarray.view(array, np.ndarray)
    return plain.dtype.str, plain.shape, float(plain.sum())


COUNT = 100_000
KINDS: list[Any] = [Cropped, Huge, Halved, Close, Contiguous, Large, Rootless, Named, Broken]


@zc.actor
class Receiver:
    def take(self, array: Any) -> Facts:
        return facts(array)

    def echo(self, array: Any) -> Any:
        return array


@pytest.mark.parametrize("count", [1000, COUNT])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_lying_array_arrives_as_numpy_knows_it(kind: Any, count: int) -> None:
    every = slice(None, None, 2 if kind in (Close, Contiguous) else 1)
    wanted = facts(np.arange(float(count))[every])
    async with zc.init():
        first: Any = await Receiver.spawn()
        second: Any = await Receiver.spawn()
        array = np.arange(float(count))[every].view(kind)
        assert await first.take(array) == wanted
        assert await second.take(first.echo(array)) == wanted
        received = await first.echo(array)
        assert facts(received) == wanted and await second.take(received) == wanted
        assert await first.take(zc.freeze(np.arange(float(count)))[every].view(kind)) == wanted
        assert facts(zc.freeze(array)) == wanted
        owner = np.arange(float(count))
        zc.put(owner)
        assert await first.take(owner[every].view(kind)) == wanted


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lying_array_is_closed_with_its_memory_and_opened_as_it_was(kind: Any) -> None:
    async with zc.init():
        receiver: Any = await Receiver.spawn()
        for writable in (True, False):
            array = np.ndarray.__new__(kind, (COUNT,), np.float64)
            np.ndarray.view(array, np.ndarray)[:] = 1.0
            np.ndarray.setflags(array, write=writable)
            with pytest.raises(TypeError, match="cannot pickle"):
                await receiver.take([array, threading.Lock()])
            assert np.ndarray.view(array, np.ndarray).flags.writeable is writable
            assert await receiver.take(array) == ("<f8", (COUNT,), float(COUNT))
            assert not np.ndarray.view(array, np.ndarray).flags.writeable
