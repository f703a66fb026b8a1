"""The ranks of a group by host."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zcactor.collectives.rails import Rails, hosts_of, part_bounds

placements = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def test_hosts_are_numbered_by_their_lowest_rank() -> None:
    rails = Rails([7, 2, 7, 5])
    assert rails.hosts == (0, 1, 0, 2)
    assert rails.ranks == ((0, 2), (1,), (3,)) == rails.terms
    assert not rails.flat and not rails.one_host
    assert Rails([7, 2, 7, 5], everywhere=True).terms == ((0, 1, 2, 3),)
    assert Rails([3, 3]).one_host and Rails([3, 3]).terms == ((0, 1),) == Rails([0, 1]).terms


def test_local_ranks_of_equal_hosts_exchange_with_each_other() -> None:
    rails = Rails([0, 0, 1, 1, 2, 2])
    assert rails.partners(1) == [3, 5] == rails.served(1)
    assert rails.near(3) == (2, 3) and rails.far(3) == [0, 1, 4, 5]


@given(placements)
def test_each_part_is_taken_once_by_each_other_host(hosts: list[int]) -> None:
    rails = Rails(hosts)
    for rank in range(rails.size):
        takers = [other for other in range(rails.size) if rank in rails.served(other)]
        assert sorted(rails.hosts[taker] for taker in takers) == sorted({*rails.hosts} - {rails.hosts[rank]})
        assert sorted(takers) == sorted(rails.partners(rank))
        assert sorted((*rails.near(rank), *rails.far(rank))) == list(range(rails.size))


@given(placements)
def test_processes_of_one_host_all_map_each_other(hosts: list[int]) -> None:
    size = len(hosts)
    mapped = [[other for other in range(at, size) if hosts[other] == hosts[at]] for at in range(size)]
    assert Rails(hosts_of(mapped)).hosts == Rails(hosts).hosts


def test_a_process_that_not_all_of_a_host_map_is_on_another_one() -> None:
    assert hosts_of([[0, 1, 2], [1], [2]]) == [0, 0, 1]


@given(st.integers(0, 1000), st.sampled_from([1, 2, 4, 8, 16, 100]), st.integers(1, 9))
def test_parts_are_cut_at_cache_lines(count: int, itemsize: int, parts: int) -> None:
    bounds = part_bounds(count, itemsize, parts)
    assert bounds[0] == 0 and bounds[-1] == count and bounds == sorted(bounds) and len(bounds) == parts + 1
    assert all(bound * itemsize % 64 == 0 for bound in bounds[1:-1] if bound < count and itemsize <= 16)
