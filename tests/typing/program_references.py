"""A reference is accepted where its value is: for the first three positional arguments, and only of the right type."""

from __future__ import annotations

from typing import assert_type

import zcactor as zc


class Stage(zc.Actor):
    @zc.method
    def one(self, value: int) -> str:
        return str(value)

    @zc.method
    def four(self, a: int, b: str, c: float = 0.0, d: bytes = b"", *, flag: bool = False) -> int:
        return a

    @zc.method
    def nested(self, values: list[zc.ObjectRef[int]]) -> int:
        return len(values)

    @zc.method
    async def stream(self, start: int) -> zc.ObjectRef[int]:
        return zc.put(start)


async def right(stage: Stage) -> None:
    number = stage.four(1, "b")
    text = stage.one(number)
    assert_type(number, zc.ObjectRef[int])
    assert_type(text, zc.ObjectRef[str])
    assert_type(await stage.one(number), str)
    assert_type(await stage.four(number, "b"), int)
    assert_type(await stage.four(1, text), int)
    assert_type(await stage.four(number, text, 1.0, b"", flag=True), int)
    assert_type(await stage.four(number, text, c=1.0, flag=True), int)
    assert_type(await stage.four(number, text, number), int)
    assert_type(await stage.four.options(timeout=1)(number, text), int)
    assert_type(await stage.nested([number, number]), int)


async def wrong(stage: Stage, number: zc.ObjectRef[int], text: zc.ObjectRef[str]) -> None:
    stage.one(text)  # expect: mypy[arg-type] pyright[reportCallIssue,reportArgumentType]
    stage.four(number, number)  # expect: mypy[arg-type] pyright[reportCallIssue,reportArgumentType]
    stage.four(text, "b")  # expect: mypy[arg-type] pyright[reportCallIssue,reportArgumentType]
    stage.four(number)  # expect: mypy[call-overload] pyright[reportCallIssue]
    stage.four(number, "b", flag=1)  # expect: mypy[call-overload] pyright[reportCallIssue,reportArgumentType]
    stage.nested([text])  # expect: mypy[list-item] pyright[reportCallIssue,reportArgumentType]
