"""The places at which a process looks for its cluster's head."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HeadPlaces"]


class HeadPlaces:
    """The place ``host:port`` of the head, and those of others that may lead one day. Any thread may use it.

    Args:
        first: where the head was found first; empty where it is found without a place.
    """

    def __init__(self, first: str = "") -> None:
        self._first = first
        self._all = [first]
        self.told = False
        """Whether a head has told the places of all that may lead, so that another one may lead at any time."""

    @property
    def current(self) -> str:
        """The place at which the head is, or is looked for next."""
        return self._all[0]

    @property
    def others(self) -> list[str]:
        """The places besides the present one."""
        return self._all[1:]

    def __contains__(self, place: str) -> bool:
        return place in self._all

    def learn(self, places: Iterable[str]) -> None:
        """Note the places of all that may lead, as the head tells them, whose own is the first. The one at which the
        head was found first stays."""
        self.told = True
        self._all = [*dict.fromkeys(place for place in (*places, self._first) if place)]

    def at(self, place: str) -> None:
        """Note that a head is at `place`: it is looked for there next."""
        self._all = [place, *(each for each in self._all if each != place)]

    def called(self, place: str) -> None:
        """Note that a head at `place` has said that it leads. Others may lead at any time, too."""
        self.told = True
        self.at(place)

    def turn(self) -> None:
        """Look at the next place, because no head was found at the present one."""
        self._all = [*self._all[1:], self._all[0]]
