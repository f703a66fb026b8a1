"""The ports of this process that peers may reach, and the pairs of ports that two processes try in turn.

Each port has an engine of its own once it is used.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from zcactor.transport.verbs.peer.bootstrap import MAX_PORTS, PortName, Ports, unlike

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.transport.verbs.device.engine import Engine
    from zcactor.transport.verbs.device.viability import Viable

__all__ = ["MAX_PAIRS", "OwnPorts", "pairs_of"]

logger = logging.getLogger("zcactor")

MAX_PAIRS: Final = 3
"""Pairs of ports that are tried for one connection. A pair that fails in silence takes its part of
`zcactor.transport.verbs.peer.connect.PROOF_SECONDS`, and the caller waits for all of them before TCP is used."""


class OwnPorts:
    """The usable ports of this process, the preferred one first. Used on the loop's thread.

    Args:
        first: the engine of the first port.
        found: all ports, of which `first` has the first one. The others are not proven yet.
        opened: makes the engine of another port, or returns the reason against it.
    """

    def __init__(self, first: Engine, found: Sequence[Viable], opened: Callable[[Viable], Engine | str]) -> None:
        self._found: Final = found
        self._opened = opened
        self._engines: dict[int, Engine | str] = {0: first}

    @property
    def engines(self) -> list[Engine]:
        """The engines of the ports in use."""
        return [one for one in self._engines.values() if not isinstance(one, str)]

    def engine(self, number: int) -> Engine | str:
        """Return the engine of a port, which is made at the first call, or the reason against it. A port that could not
        be opened is not opened again."""
        if number not in self._engines:
            made = self._engines[number] = self._opened(self._found[number])
            logger.info("RDMA: %s", made)
        return self._engines[number]

    def offered_to(self, process: bytes, *, even_broken: bool) -> tuple[list[int], str]:
        """Return the numbers of the ports that are offered to a process: those that could be opened, and from which no
        path to it has broken just now, unless `even_broken`. Where there are none, return the reason as well."""
        numbers, reasons = [], []
        for number in range(min(len(self._found), MAX_PORTS)):
            engine = self._engines.get(number)
            why = engine if isinstance(engine, str) else ""
            if engine is not None and not isinstance(engine, str) and not even_broken:
                why = engine.avoided(process)
            if why:
                reasons.append(why)
            else:
                numbers.append(number)
        return numbers, "" if numbers else "; ".join(dict.fromkeys(reasons))

    def names(self, numbers: Sequence[int]) -> Ports:
        """Return the message that offers the ports of these numbers."""
        names = []
        for number in numbers:
            engine = self._engines.get(number)
            found = self._found[number] if engine is None or isinstance(engine, str) else engine.found
            gid = bytes(16) if found.gid is None else found.gid.raw
            names.append(PortName(found.device, gid, found.is_global, found.partition))
        return Ports(tuple(names))


def pairs_of(ours: Sequence[PortName], theirs: Sequence[PortName], *, leads: bool) -> list[tuple[int, int]]:
    """Return the pairs of places in both lists that are tried in turn, at most `MAX_PAIRS`. Both ends get the same.

    The ports that both ends prefer come first. Where that path does not work, cards are probably on networks of their
    own, each with addresses that begin alike: so the pairs with the longest common beginning follow.
    """
    first, second = (ours, theirs) if leads else (theirs, ours)
    found = [(i, j) for i, one in enumerate(first) for j, other in enumerate(second) if not unlike(one, other)]
    found.sort(key=lambda pair: (sum(pair), pair))
    found[1:] = sorted(found[1:], key=lambda pair: (-_alike(first[pair[0]].gid, second[pair[1]].gid), sum(pair), pair))
    return [pair if leads else (pair[1], pair[0]) for pair in found[:MAX_PAIRS]]


def _alike(one: bytes, other: bytes) -> int:
    """Return the number of bits at the beginning of two addresses that are the same."""
    return 128 - (int.from_bytes(one) ^ int.from_bytes(other)).bit_length()
