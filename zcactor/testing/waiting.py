"""Waiting for a condition that no future reports."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["until"]

_PAUSE: Final = 0.001
"""Seconds between two looks, after the first few: the loop has time for its work, and the test ends soon."""
_TURNS: Final = 10
"""Looks that follow each other with one turn of the loop between: most conditions come true within them."""


async def until(predicate: Callable[[], object], message: str, timeout: float = 10.0) -> None:
    """Wait until ``predicate()`` is true.

    Args:
        predicate: function without arguments; it is called on the running loop, and should be quick.
        message: the error's text: the condition that was expected.
        timeout: seconds; a watchdog against hanging, no statement about speed.

    Raises:
        TimeoutError: ``predicate()`` was not true within `timeout` seconds. Its text is `message`.
        Exception: `predicate` raised it.

    Cancelling ends the wait.
    """
    loop = asyncio.get_running_loop()
    end, looks = loop.time() + timeout, 0
    while not predicate():
        if loop.time() >= end:
            raise TimeoutError(message)
        looks += 1
        await asyncio.sleep(0 if looks < _TURNS else _PAUSE)
