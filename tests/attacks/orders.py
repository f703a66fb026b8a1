"""What is passed between two hosts while somebody is in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

__all__ = ["Order", "Shop", "told"]


class Order:
    """Travels as a pickle."""

    def __init__(self, text: str) -> None:
        self.text = text


class Shop:
    """An actor that takes, makes and gives what may be above the eager limit."""

    async def take(self, order: Order) -> str:
        """What is in it."""
        return told(order)

    async def make(self, letter: str, count: int) -> Order:
        """A result."""
        return Order(letter * count)

    async def makes(self, letter: str, count: int) -> AsyncIterator[Order]:
        """Items."""
        for _ in range(3):
            yield Order(letter * count)


def told(order: Any) -> str:
    """A value as short text: which letters it has, and how many."""
    text = getattr(order, "text", order)
    return f"{''.join(sorted(set(text)))}*{len(text)}" if isinstance(text, str) else repr(text)
