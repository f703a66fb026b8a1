"""The ranks of a group by host."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zcactor.collectives.hierarchy import Hierarchy, hosts_of, part_bounds

placements = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def test_hosts_are_numbered_by_their_lowest_rank() -> None:
    hierarchy = Hierarchy([7, 2, 7, 5])
    assert hierarchy.hosts == (0, 1, 0, 2)
    assert hierarchy.ranks == ((0, 2), (1,), (3,)) == hierarchy.terms
    assert not hierarchy.flat and not hierarchy.one_host
    assert Hierarchy([7, 2, 7, 5], everywhere=True).terms == ((0, 1, 2, 3),)
    assert Hierarchy([3, 3]).one_host and Hierarchy([3, 3]).terms == ((0, 1),) == Hierarchy([0, 1]).terms


def test_local_ranks_of_equal_hosts_exchange_with_each_other() -> None:
    hierarchy = Hierarchy([0, 0, 1, 1, 2, 2])
    assert hierarchy.partners(1) == [3, 5] == hierarchy.served(1)
    assert hierarchy.near(3) == (2, 3) and hierarchy.far(3) == [0, 1, 4, 5]


@given(placements)
def test_each_part_is_taken_once_by_each_other_host(hosts: list[int]) -> None:
    hierarchy = Hierarchy(hosts)
    for rank in range(hierarchy.size):
        takers = [other for other in range(hierarchy.size) if rank in hierarchy.served(other)]
        assert sorted(hierarchy.hosts[taker] for taker in takers) == sorted(
            {*hierarchy.hosts} - {hierarchy.hosts[rank]}
        )
        assert sorted(takers) == sorted(hierarchy.partners(rank))
        assert sorted((*hierarchy.near(rank), *hierarchy.far(rank))) == list(range(hierarchy.size))


@given(placements)
def test_processes_of_one_host_all_map_each_other(hosts: list[int]) -> None:
    size = len(hosts)
    mapped = [[other for other in range(at, size) if hosts[other] == hosts[at]] for at in range(size)]
    assert Hierarchy(hosts_of(mapped)).hosts == Hierarchy(hosts).hosts


def test_a_process_that_not_all_of_a_host_map_is_on_another_one() -> None:
    assert hosts_of([[0, 1, 2], [1], [2]]) == [0, 0, 1]


@given(st.integers(0, 1000), st.sampled_from([1, 2, 4, 8, 16, 100]), st.integers(1, 9))
def test_parts_are_cut_at_cache_lines(count: int, itemsize: int, parts: int) -> None:
    bounds = part_bounds(count, itemsize, parts)
    assert bounds[0] == 0 and bounds[-1] == count and bounds == sorted(bounds) and len(bounds) == parts + 1
    assert all(bound * itemsize % 64 == 0 for bound in bounds[1:-1] if bound < count and itemsize <= 16)
