"""Generators and async generators are streams: iterated with ``async for``, never awaited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import assert_type

import zcactor as zc


class Source(zc.Actor):
    @zc.method
    async def batches(self, count: int) -> AsyncIterator[int]:
        for i in range(count):
            yield i

    @zc.method
    async def generator(self, count: int) -> AsyncGenerator[bytes, None]:
        yield bytes(count)

    @zc.method
    def rows(self, count: int) -> Iterator[str]:
        yield str(count)

    @zc.method(concurrency_group="io")
    def steps(self, count: int) -> Generator[float, None, None]:
        yield float(count)

    @zc.method
    def all_rows(self, count: int) -> list[str]:
        return [str(count)]


async def right(source: Source, count: zc.ObjectRef[int]) -> None:
    assert_type(source.batches(3), zc.ObjectStream[int])
    async for number in source.batches(count=3):
        assert_type(number, int)
    async for data in source.generator(3):
        assert_type(data, bytes)
    async for text in source.rows(count):
        assert_type(text, str)
    async for step in source.steps.options(timeout=3)(3):
        assert_type(step, float)
    assert_type([row async for row in source.rows(3)], list[str])
    assert_type(await source.all_rows(3), list[str])
    stream = source.rows(3)
    await stream.aclose()


def in_a_thread_without_a_loop(source: Source) -> None:
    for text in source.rows(3):
        assert_type(text, str)
    assert_type(source.rows(3).next(timeout=1), str)
    assert_type(source.all_rows(3).result(), list[str])
    assert_type(zc.get([source.all_rows(3)]).result(1), list[list[str]])
    assert_type(zc.stop(source).result(), None)
    assert_type(zc.spawn(Source).result(), Source)


async def wrong(source: Source) -> None:
    await source.batches(3)  # expect: mypy[misc] pyright[reportGeneralTypeIssues]
    async for row in source.all_rows(3):  # expect: mypy[attr-defined] pyright[reportGeneralTypeIssues]
        print(row)
    source.rows("3")  # expect: mypy[call-overload] pyright[reportCallIssue,reportArgumentType]
    source.batches(cout=3)  # expect: mypy[call-overload] pyright[reportCallIssue]
    items: list[int] = [row async for row in source.rows(3)]  # expect: mypy[misc] pyright[reportAssignmentType]
    print(items)
