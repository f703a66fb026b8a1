"""The ranks of a group by host, and the ranks that pass parts of arrays from host to host. Pure.

One host are ranks that map each other's memory. Rank k owns part k of an array. On each other host one rank is its
*partner*: the one with the same place among the ranks of its host. So all ranks, and with them all connections and
cards, take an equal share of the bytes between hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Hierarchy", "hosts_of", "part_bounds"]

_LINE: Final = 64
"""Bytes of a cache line: no two ranks write to one."""


class Hierarchy:
    """The ranks of a group by host.

    Args:
        hosts: a number for the host of each rank, in any numbering.
        everywhere: add in the order of the ranks, wherever they are.

    Attributes:
        hosts: the host of each rank; hosts are numbered by their lowest rank.
        ranks: the ranks of each host, in their order.
        everywhere: as given.
        flat: whether sums add in the order of the ranks. Otherwise each host's ranks are added in that order, and then
            the hosts' sums by their lowest rank.
    """

    __slots__ = ("everywhere", "flat", "hosts", "ranks", "size", "terms")

    def __init__(self, hosts: Sequence[int], *, everywhere: bool = False) -> None:
        numbers: dict[int, int] = {}
        self.hosts = tuple([numbers.setdefault(host, len(numbers)) for host in hosts])
        self.size = len(hosts)
        self.ranks: tuple[tuple[int, ...], ...] = tuple(
            [tuple([rank for rank in range(self.size) if self.hosts[rank] == host]) for host in range(len(numbers))]
        )
        self.everywhere = everywhere
        self.flat = everywhere or len(self.ranks) in (1, self.size)
        self.terms: tuple[tuple[int, ...], ...] = (tuple(range(self.size)),) if self.flat else self.ranks
        """The ranks of each term of a sum: terms are made first, and then added in their order."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks map each other's memory."""
        return len(self.ranks) == 1

    def near(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of `rank`, with itself."""
        return self.ranks[self.hosts[rank]]

    def far(self, rank: int) -> list[int]:
        """The ranks on other hosts than `rank`."""
        return [other for other in range(self.size) if self.hosts[other] != self.hosts[rank]]

    def partner(self, rank: int, host: int) -> int:
        """The rank on another host that works for `rank`."""
        there = self.ranks[host]
        return there[self.near(rank).index(rank) % len(there)]

    def partners(self, rank: int) -> list[int]:
        """The partner of `rank` on each other host."""
        return [self.partner(rank, host) for host in range(len(self.ranks)) if host != self.hosts[rank]]

    def served(self, rank: int) -> list[int]:
        """The ranks on other hosts that `rank` is the partner of."""
        return [other for other in self.far(rank) if self.partner(other, self.hosts[rank]) == rank]


def hosts_of(mapped: Sequence[Sequence[int]]) -> list[int]:
    """The host of each process: processes of one host all map each other.

    Args:
        mapped: for each process the numbers of those behind it that it maps, and which map it.
    """
    known = [set(each) for each in mapped]
    hosts: list[list[int]] = []
    found = []
    for process in range(len(known)):
        host = next((n for n, there in enumerate(hosts) if all(process in known[other] for other in there)), len(hosts))
        if host == len(hosts):
            hosts.append([])
        hosts[host].append(process)
        found.append(host)
    return found


def part_bounds(count: int, itemsize: int, parts: int) -> list[int]:
    """The elements at which `count` elements are cut into `parts`, at cache lines: ``parts + 1`` of them."""
    step = max(_LINE // itemsize, 1)
    lines = -(-count // step)
    return [min(lines * each // parts * step, count) for each in range(parts + 1)]
