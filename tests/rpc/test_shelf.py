"""The shelf of calls that wait for one promise."""

from __future__ import annotations

from typing import Any

from zcactor.rpc.shelf import Shelf


class Wire:
    """The native part of a connection with a shelved call."""

    def __init__(self, shelf: Shelf, word: int) -> None:
        self.shelf, self.word = shelf, word
        self.count = 0

    def take_down(self) -> None:
        self.count += 1
        del self.shelf[self.word]


def test_all_calls_are_taken_down() -> None:
    shelf = Shelf()
    assert not shelf.open and not shelf
    wires: list[Any] = [Wire(shelf, word) for word in (3, 5)]
    for wire in wires:
        shelf[wire.word] = wire
    shelf.take_down()
    shelf.take_down()
    assert [wire.count for wire in wires] == [1, 1] and not shelf
