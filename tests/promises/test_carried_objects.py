"""What the user passes arrives as it is, or the error says which part cannot travel, and what to do."""

from __future__ import annotations

import asyncio
import copy
import functools
from typing import Any

import numpy as np

import zcactor as zc
from tests import carried
from zcactor.config import Config

PATIENCE = 60.0
EAGER = Config().eager_limit


async def _failure(call: Any) -> BaseException:
    try:
        found = await call
    except BaseException as error:
        return error
    raise AssertionError(f"it gave {found!r}")


async def test_errors_of_unpickling_are_told_as_they_are() -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        carrier: Any = await carried.Carrier.spawn()
        for name, (make, kind) in carried.RAISING.items():
            quiet = issubclass(kind, Exception)
            for take in (carrier.take, carrier.take_inline, carrier.take_async):
                for value in (make(), [make()]):
                    error = await _failure(take(value))
                    assert isinstance(error, kind if quiet else zc.RemoteError), (name, error)
                    assert not isinstance(error, zc.ProtocolError)
            # a promise among the arguments: they are unpickled before the method's turn
            error = await _failure(carrier.take(make(), carrier.call(carrier.note, 1)))
            assert isinstance(error, kind if quiet else zc.RemoteError), (name, error)
            error = await _failure(carrier.give(name))
            assert type(error) is kind, (name, error)
            error = await _failure(zc.put(make()))
            assert type(error) is kind, (name, error)
            assert await carrier.take(1) == 1


async def test_a_method_of_a_handle_travels_as_the_handle_does() -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        first: Any = await carried.Carrier.spawn()
        second: Any = await carried.Carrier.spawn()
        for number, method in enumerate(
            [first.note, first.note.options(timeout=30), functools.partial(first.note), lambda n: first.note(n)], 1
        ):
            assert await second.call(method, 7) == number
        assert await second.drain(first.numbers, 3) == [0, 1, 2]
        assert await second.echo({"back": first.note}) == {"back": first.note}
        again = await second.echo(first.note.options(timeout=30))
        assert again == first.note.options(timeout=30) != first.note
        assert hash(await second.echo(first.note)) == hash(first.note)
        assert first.note != second.note != 3
        assert copy.copy(first.note) == copy.deepcopy(first.note) == first.note
        assert first.note.__name__ == "note"


def _colours(count: int, colours: Any) -> np.ndarray[Any, Any]:
    return np.zeros(count, np.dtype("i1", metadata=colours))


async def test_metadata_of_dtypes_is_kept() -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        carrier: Any = await carried.Carrier.spawn()
        for count in (0, 1, EAGER - 1, EAGER, EAGER + 1):
            await _check_metadata(carrier, count)


async def _check_metadata(carrier: Any, count: int) -> None:
    colours = {"enum": {"RED": 0, "GREEN": 1}}
    plain = np.zeros(count, "i1")
    assert await carrier.metadata(plain) is None
    for metadata in (colours, {"vlen": str}):
        array = _colours(count, metadata)
        assert await carrier.metadata(array) == metadata
        assert await carrier.metadata(array[::-1]) == metadata
        back = await carrier.echo(array)
        assert back.dtype.metadata == metadata and back.tobytes() == array.tobytes()
        nested = await carrier.echo([{"a": array}, plain])
        assert nested[0]["a"].dtype.metadata == metadata and nested[1].dtype.metadata is None
        assert (await zc.put(array)).dtype.metadata == metadata
        handed = await carrier.echo(zc.move(array.copy()))
        assert handed.dtype.metadata == metadata
    inner = np.dtype("i1", metadata=colours)
    record = np.zeros(count, np.dtype([("c", inner), ("d", inner, (2,))], metadata={"kind": "table"}))
    for found in (await carrier.echo(record), await carrier.echo(record.view(np.recarray))):
        assert found.dtype == record.dtype
        assert found.dtype.fields["c"][0].metadata == colours
        assert found.dtype.fields["d"][0].subdtype[0].metadata == colours
    assert (await carrier.echo(record)).dtype.metadata == {"kind": "table"}
    assert await carrier.metadata(plain) is None
