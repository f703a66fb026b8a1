"""The first answers to requests, given again."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from zcactor.control.head import FirstAnswers
from zcactor.errors import ConnectionLost, NameTaken


class Work:
    """Work that waits for a gate, and is counted."""

    def __init__(self, error: BaseException | None = None, *, opened: bool = True) -> None:
        self.begun = 0
        self.gate = asyncio.Event()
        self.error = error
        if opened:
            self.gate.set()

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return number


def answers(remembered: int = 8) -> FirstAnswers[int]:
    return FirstAnswers(asyncio.get_running_loop(), remembered)


async def test_a_repeated_request_gets_the_first_answer() -> None:
    table, work = answers(), Work()
    assert [await table.once(b"a", work) for _ in range(3)] == [1, 1, 1]
    assert await table.once(b"b", work) == 2
    assert await table.once(b"a", work) == 1


async def test_a_request_that_is_repeated_while_the_first_is_at_work() -> None:
    table, work = answers(), Work(opened=False)
    asked = [asyncio.ensure_future(table.once(b"a", work)) for _ in range(3)]
    await asyncio.sleep(0)
    assert work.begun == 1
    asked[1].cancel()  # the end of a wait for another one's answer
    await asyncio.wait([asked[1]])
    work.gate.set()
    assert [await asked[0], await asked[2]] == [1, 1]


async def test_an_error_that_is_an_answer_is_given_again() -> None:
    table, work = answers(), Work(NameTaken("it is taken"))
    for _ in range(2):
        with pytest.raises(NameTaken, match="it is taken"):
            await table.once(b"a", work)
    assert work.begun == 1


async def test_an_error_that_is_no_answer_is_not() -> None:
    table, work = answers(), Work(ConnectionLost("not now"))
    with pytest.raises(ConnectionLost):
        await table.once(b"a", work)
    work.error = None
    assert await table.once(b"a", work) == 2


async def test_the_next_one_begins_anew_where_the_first_is_cancelled() -> None:
    table, work = answers(), Work(opened=False)
    first, second = (asyncio.ensure_future(table.once(b"a", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    work.gate.set()
    assert await second == 2
    assert await table.once(b"a", work) == 2


async def test_the_oldest_answer_is_forgotten_first() -> None:
    table, work = answers(2), Work()
    assert [await table.once(name, work) for name in (b"a", b"b", b"c")] == [1, 2, 3]
    assert await table.once(b"b", work) == 2
    assert await table.once(b"a", work) == 4
    assert len(table._asked) == len(table._settled) == 2


async def test_a_remembered_error_keeps_no_frames() -> None:
    class Argument:
        """A value that was passed in the request."""

    table, argument = answers(), Argument()
    seen = weakref.ref(argument)

    async def ask(value: Argument) -> int:
        async def work() -> int:
            raise ValueError(f"no place for {type(value).__name__}")

        return await table.once(b"a", work)

    with pytest.raises(ValueError, match="no place for Argument"):
        await ask(argument)
    del argument
    gc.collect()
    assert seen() is None
    with pytest.raises(ValueError, match="no place for Argument"):
        await table.once(b"a", Work())
