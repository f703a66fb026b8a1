"""The place of an input, and the way to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from zcactor.collectives.sources import OUTSIDE, operand_at, source_of
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.process.context import current

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(log_to_driver=False) as node:
        yield node


async def test_arrays_of_the_store_stay_where_they_are() -> None:
    process = current()
    whole = zc.ones((40, 50))
    for array in (whole, whole[3:], whole.T, whole[::2, ::-1], np.ones(100_000)):
        before = zc.stats().bytes_copied
        source = source_of(process, array)
        assert source.owner == b"" and source.array is array
        operand = operand_at(process, process.process, source.offset, source.layout, array)
        found = operand.array
        if found is None:
            assert array.flags.c_contiguous and operand.address == array.ctypes.data
        else:
            assert found.strides == array.strides and not found.flags.writeable
            assert np.array_equal(found, array) and operand.address == array.ctypes.data
        assert zc.stats().bytes_copied == before


async def test_others_are_copied_once_and_counted() -> None:
    process = current()
    array = np.arange(20).reshape(4, 5).T
    source = source_of(process, array)
    assert source.array is not array and zc.in_store(source.array)
    assert np.array_equal(source.array, array)
    assert zc.stats().copies[OUTSIDE].nbytes == array.nbytes


async def test_places_outside_of_the_arena_are_refused() -> None:
    process = current()
    like = np.ones((3, 4))
    end = process.store.arena.nbytes
    layout = source_of(process, zc.ones((4, 3)).T).layout
    for offset, given in ((-1, b""), (end - 95, b""), (end - 8, layout)):
        with pytest.raises(ProtocolError):
            operand_at(process, process.process, offset, given, like)
    with pytest.raises(ProtocolError, match="2 axes came with 1 strides"):
        operand_at(process, process.process, 0, source_of(process, zc.ones(30)[::3]).layout, like)
    with pytest.raises(ConnectionLost, match="has ended"):
        operand_at(process, bytes(16), 0, b"", like)
