"""Fields of exceptions that cannot travel are left out of a message: all else of it arrives, and is as it was."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import zcactor as zc

COUNT = 100_000


class Odd(Exception):
    """An exception with a field that cannot travel."""

    data: Any = None

    def __init__(self, text: str = "odd", data: Any = None) -> None:
        super().__init__(text)
        self.lock = threading.Lock()
        if data is not None:
            self.data = data


def made(where: str) -> Any:
    """An array in the store, or outside of it."""
    return zc.ones(COUNT) if where == "store" else np.frombuffer(bytearray(8 * COUNT), np.uint8)


@zc.actor
class Holder:
    def __init__(self) -> None:
        self.array = zc.ones(COUNT)

    def take(self, value: Any) -> Any:
        self.kept = value
        return float(value["a"].sum()) if isinstance(value, dict) else type(value.data).__name__

    def give(self) -> Any:
        return {"a": zc.move(self.array), "e": Odd()}

    def fail(self) -> None:
        raise Odd("moved", zc.move(self.array))

    def fail_with(self, data: Any) -> None:
        raise Odd("with data", {"plain": self.array, "left out": [self.array, threading.Lock()]}[data])

    def write(self) -> float:
        self.array[0] += 1
        return float(self.array[0])


async def test_a_move_beside_an_exception_is_done_once() -> None:
    async with zc.init():
        holder: Any = await Holder.spawn()
        moved = zc.ones(COUNT)
        assert await holder.take({"a": zc.move(moved), "e": Odd()}) == COUNT
        with pytest.raises(ValueError, match="handed over"):
            moved.sum()
        given = await holder.give()
        assert given["a"].sum() == COUNT and isinstance(given["e"], Odd)
        with pytest.raises(ValueError, match="handed over"):
            await holder.write()


async def test_a_moved_field_arrives_with_its_exception() -> None:
    async with zc.init():
        holder: Any = await Holder.spawn()
        with pytest.raises(Odd) as caught:
            await holder.fail()
        assert caught.value.data.sum() == COUNT
        with pytest.raises(ValueError, match="handed over"):
            await holder.write()


@pytest.mark.parametrize("where", ["store", "elsewhere"])
async def test_an_array_that_is_left_out_stays_writable(where: str) -> None:
    async with zc.init():
        holder: Any = await Holder.spawn()
        array = made(where)
        moved = zc.ones(COUNT)
        assert await holder.take(Odd("odd", [array, zc.move(moved), threading.Lock()])) == "NoneType"
        array[0] = 7
        moved[0] = 7
        with pytest.raises(Odd) as caught:
            await holder.fail_with("left out")
        assert caught.value.data is None
        assert await holder.write() == 2


class Calling:
    """An object that passes an array while it is pickled, and cannot be."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        self.call()
        raise TypeError("it cannot travel")


@pytest.mark.parametrize("where", ["store", "elsewhere"])
@pytest.mark.parametrize("first", [0, 1])
async def test_an_array_that_another_call_passes_meanwhile_stays_closed(where: str, first: int) -> None:
    async with zc.init():
        holder: Any = await Holder.spawn()
        array, calls = made(where), list[Any]()
        data = [array, array]
        data[1 - first] = Calling(lambda: calls.append(holder.take({"a": array})))
        assert await holder.take(Odd("odd", data)) == "NoneType"
        assert calls and [await each for each in calls] == [float(array.sum())] * len(calls)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


@pytest.mark.parametrize("where", ["store", "elsewhere"])
async def test_an_array_that_is_sent_beside_one_that_is_left_out_is_closed(where: str) -> None:
    async with zc.init():
        holder: Any = await Holder.spawn()
        array = made(where)
        wanted = float(array.sum())
        assert await holder.take({"e": Odd("odd", [array, threading.Lock()]), "a": array}) == wanted
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
        with pytest.raises(Odd):
            await holder.fail_with("plain")
        with pytest.raises(ValueError, match="read-only"):
            await holder.write()
