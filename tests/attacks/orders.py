"""The values that tests pass between two hosts, and the actor that takes them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

__all__ = ["Order", "Shop", "told"]


class Order:
    """A value that travels as a pickle."""

    def __init__(self, text: str) -> None:
        self.text = text


class Shop:
    """An actor that takes and returns orders, which may be above the eager limit."""

    async def take(self, order: Order) -> str:
        """The letters of an order."""
        return told(order)

    async def make(self, letter: str, count: int) -> Order:
        """An order as a result."""
        return Order(letter * count)

    async def makes(self, letter: str, count: int) -> AsyncIterator[Order]:
        """Orders as items."""
        for _ in range(3):
            yield Order(letter * count)


def told(order: Any) -> str:
    """A value as short text: its letters, and their number."""
    text = getattr(order, "text", order)
    return f"{''.join(sorted(set(text)))}*{len(text)}" if isinstance(text, str) else repr(text)
