"""The ports of this process that peers may reach, and the pairs of ports that two processes try in turn.

Each port has an engine of its own once it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.logs import logger
from zcactor.transport.verbs.peer.bootstrap import MAX_PORTS, PortName, Ports, unlike

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.transport.verbs.device.engine import Engine
    from zcactor.transport.verbs.device.viability import Viable

__all__ = ["MAX_PAIRS", "OwnPorts", "Pairs"]

REFUSED_SECONDS: Final = 60.0
"""Seconds for which a port that could not be opened is not tried again. An attempt blocks the loop for up to half a
second."""
MAX_PAIRS: Final = 4
"""Pairs of ports that are tried for one connection: all those of two hosts with two cards each. A pair that fails in
silence takes its part of `zcactor.transport.verbs.peer.connect.PROOF_SECONDS`, and the caller waits for all of them
before TCP is used."""


class OwnPorts:
    """The usable ports of this process, the preferred one first. Used on the loop's thread.

    Args:
        first: the engine of the first port.
        found: all ports, of which `first` has the first one. The others are not proven yet.
        opened: makes the engine of another port, or returns the reason against it.
    """

    def __init__(self, first: Engine, found: Sequence[Viable], opened: Callable[[Viable], Engine | str]) -> None:
        self._loop: Final = first.loop
        self._found: Final = found
        self._opened = opened
        self._engines: dict[int, Engine] = {0: first}
        self._refused: dict[int, tuple[str, float]] = {}  # by port that could not be opened: the reason, and until when

    @property
    def engines(self) -> list[Engine]:
        """The engines of the ports in use."""
        return [*self._engines.values()]

    def engine(self, number: int) -> Engine | str:
        """Return the engine of a port, which is made at the first call, or the reason against it."""
        if number in self._engines:
            return self._engines[number]
        why = self._against(number)
        if why:
            return why
        made = self._opened(self._found[number])
        logger.info("RDMA: %s", made)
        if isinstance(made, str):
            self._refused[number] = made, self._loop.time() + REFUSED_SECONDS
        else:
            self._engines[number] = made
        return made

    def _against(self, number: int) -> str:
        """Return the reason why a port cannot be used now, as far as it is known; empty where there is none."""
        if number in self._engines:
            room = self._engines[number].room
            return f"queue pairs cannot be made: {room}" if room else ""
        why, until = self._refused.get(number, ("", 0.0))
        return why if self._loop.time() < until else ""

    def offered_to(self, process: bytes, *, even_broken: bool) -> tuple[list[int], str]:
        """Return the numbers of the ports that are offered to a process: those that can be used, and from which no path
        to it has broken just now, unless `even_broken`. Where there are none, return the reason as well."""
        numbers, reasons = [], []
        for number in range(min(len(self._found), MAX_PORTS)):
            why = self._against(number)
            if number in self._engines and not even_broken:
                why = why or self._engines[number].avoided(process)
            if why:
                reasons.append(why)
            else:
                numbers.append(number)
        return numbers, "" if numbers else "; ".join(dict.fromkeys(reasons))

    def names(self, numbers: Sequence[int]) -> Ports:
        """Return the message that offers the ports of these numbers."""
        names = []
        for number in numbers:
            found = self._engines[number].found if number in self._engines else self._found[number]
            gid = bytes(16) if found.gid is None else found.gid.raw
            names.append(PortName(found.device, gid, found.is_global, found.partition))
        return Ports(tuple(names))


class Pairs:
    """The pairs of ports that two processes try in turn. Both ends get the same.

    The ports that both ends prefer come first. Where that path does not work, one of these cards is dead, or cards are
    on networks of their own, each with addresses that begin alike. So pairs of ports that were in none yet follow, and
    of these the one with the longest common beginning.

    Args:
        ours, theirs: the ports that both ends offer.
        leads: whether this end has connected.
    """

    def __init__(self, ours: Sequence[PortName], theirs: Sequence[PortName], *, leads: bool) -> None:
        self._leads: Final = leads
        self._first, self._second = (ours, theirs) if leads else (theirs, ours)
        self._left = [
            (i, j)
            for i, one in enumerate(self._first)
            for j, other in enumerate(self._second)
            if not unlike(one, other)
        ]
        self._tried: list[tuple[int, int]] = []
        self.most: Final = min(len(self._left), MAX_PAIRS)
        """Number of pairs that are tried at most."""

    def next(self) -> tuple[int, int] | None:
        """Return the places, in both offers, of the next pair to try; None behind the last one."""
        if not self._left or len(self._tried) == MAX_PAIRS:
            return None
        pair = min(self._left, key=self._rank)
        self._left.remove(pair)
        self._tried.append(pair)
        return pair if self._leads else pair[::-1]

    def _rank(self, pair: tuple[int, int]) -> tuple[int, int, int, int]:
        i, j = pair
        used = sum((i == one) + (j == other) for one, other in self._tried)
        return used, -_alike(self._first[i].gid, self._second[j].gid) if self._tried else 0, i + j, i

    def leave_out(self, *, ours: bool, theirs: bool) -> None:
        """Leave the pairs with ports of the last one out that cannot be used, as their end has said. The last pair was
        not tried then, which takes no time, and does not count."""
        i, j = self._tried.pop()
        first, second = (ours, theirs) if self._leads else (theirs, ours)
        self._left = [pair for pair in self._left if not (first and pair[0] == i) and not (second and pair[1] == j)]


def _alike(one: bytes, other: bytes) -> int:
    """Return the number of bits at the beginning of two addresses that are the same."""
    return 128 - (int.from_bytes(one) ^ int.from_bytes(other)).bit_length()
