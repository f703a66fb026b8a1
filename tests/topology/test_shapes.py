"""`zcactor.topology.shapes`: hosts, diameters and bisections of the table, and impossible numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zcactor import topology as shapes
from zcactor.topology import Topology


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "hosts", "diameter", "bisection"),
    [
        *[(shapes.chain(n), n, n - 1, 1) for n in (2, 9, 64)],
        *[(shapes.ring(n), n, n // 2, 2) for n in (3, 8, 64)],
        *[(shapes.mesh(k, k), k * k, 2 * (k - 1), k) for k in (2, 4, 8, 32)],
        *[(shapes.torus(k, k), k * k, k, 2 * k) for k in (4, 8, 32)],
        *[(shapes.tree(radix=3, levels=n), 2**n, 2 * n, 1) for n in (1, 3, 8)],
        *[(shapes.tree(radix=r, levels=2), (r - 1) ** 2, 4, (r - 1) // 2) for r in (5, 9)],
        *[
            (shapes.fat_tree(radix=r, levels=n, blocking=b), 2 * (r // 2) ** n, 2 * n, 2 * (r // 2) ** n // (2 * b))
            for r, n, b in ((4, 1, 1), (4, 2, 1), (4, 3, 1), (8, 2, 2), (8, 3, 4), (16, 3, 1))
        ],
    ],
    ids=str,
)
def test_the_table(topology: Topology, hosts: int, diameter: int, bisection: int) -> None:
    assert topology.hosts == tuple(range(hosts))
    assert (topology.diameter, topology.bisection, topology.bisection_exact) == (diameter, bisection, True)
    assert all(facts["links"] >= 1 for _, _, facts in topology.graph.edges(data=True))


@pytest.mark.parametrize(("radix", "levels", "blocking"), [(4, 3, 1), (4, 4, 2), (8, 2, 1), (6, 3, 3), (8, 3, 2)])
def test_switches_of_a_fat_tree_have_no_more_ports_than_there_are(radix: int, levels: int, blocking: int) -> None:
    topology = shapes.fat_tree(radix=radix, levels=levels, blocking=blocking)
    degrees = {node: degree for node, degree in topology.graph.degree if isinstance(node, tuple)}
    lowest = radix // 2 + radix // 2 // blocking
    assert all(degree == (lowest if node[1] == 1 else radix) for node, degree in degrees.items())


def test_sizes_of_two_have_no_second_link() -> None:
    assert shapes.ring(2).graph.number_of_edges() == 1
    assert shapes.torus(2, 3).graph.number_of_edges() == 3 + 6


def test_a_dragonfly_links_all_groups_alike() -> None:
    topology = shapes.dragonfly(groups=9, routers=4, hosts=2, links=2)
    assert (len(topology.hosts), topology.diameter) == (72, 5)
    pairs: dict[tuple[int, int], int] = {}
    outside = {node: 0 for node in topology.graph if isinstance(node, tuple)}
    for one, other, facts in topology.graph.edges(data=True):
        if isinstance(one, tuple) and isinstance(other, tuple) and one[1] != other[1]:
            key = (min(one[1], other[1]), max(one[1], other[1]))
            pairs[key] = pairs.get(key, 0) + facts["links"]
            outside[one] += facts["links"]
            outside[other] += facts["links"]
    assert set(pairs.values()) == {1} and len(pairs) == 36
    assert set(outside.values()) == {2}


def test_a_dragonfly_with_more_links_than_needed() -> None:
    topology = shapes.dragonfly(groups=3, routers=2, hosts=1, links=2)
    between = [facts["links"] for a, b, facts in topology.graph.edges(data=True) if {type(a), type(b)} == {tuple}]
    assert sum(between) == 3 + 3 * 2  # one inside each group, two between each two groups


def test_a_dragonfly_plus() -> None:
    topology = shapes.dragonfly_plus(groups=3, leaves=2, spines=2, hosts=4)
    assert (len(topology.hosts), topology.diameter) == (24, 5)


def test_a_hamming_mesh() -> None:
    topology = shapes.hamming_mesh(boards=(4, 4), board=(2, 2))
    assert (len(topology.hosts), topology.diameter) == (64, 4)
    assert all(topology.graph.degree[host] == 4 for host in topology.hosts)
    thin = shapes.hamming_mesh(boards=(3, 1), board=(1, 2))
    assert thin.graph.edges[0, ("switch", 0, 0)]["links"] == 2  # both ends of a board with one row


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: shapes.chain(0), r"chain: size must be a whole number >= 1, not 0"),
        (lambda: shapes.ring(2.5), r"ring: size must be a whole number >= 1, not 2.5"),  # type: ignore[arg-type]
        (lambda: shapes.mesh(), r"mesh: give at least one size"),
        (lambda: shapes.torus(4, -1), r"torus: size 2 must be a whole number >= 1, not -1"),
        (lambda: shapes.torus(True, 2), r"torus: size 1 must be a whole number"),
        (lambda: shapes.tree(radix=1, levels=2), r"tree: radix must be a whole number >= 2, not 1"),
        (lambda: shapes.tree(radix=3, levels=0), r"tree: levels must be"),
        (lambda: shapes.fat_tree(radix=5, levels=2), r"radix 5 .* cannot be built: the radix must be even"),
        (lambda: shapes.fat_tree(radix=8, levels=2, blocking=3), r"blocking 3 .* half of it a multiple"),
        (lambda: shapes.fat_tree(radix=8, levels=1, blocking=2), r"one level has no links up"),
        (lambda: shapes.dragonfly(groups=9, routers=2, hosts=1, links=3), r"each needs 4"),
        (lambda: shapes.dragonfly(groups=2, routers=0, hosts=1), r"dragonfly: routers must be"),
        (lambda: shapes.dragonfly_plus(groups=2, leaves=1, spines=0, hosts=1), r"dragonfly_plus: spines must be"),
        (lambda: shapes.hamming_mesh(boards=(2,), board=(2, 2)), r"boards must be two whole numbers"),  # type: ignore[arg-type]
        (lambda: shapes.hamming_mesh(boards=(2, 2), board=(2, 0)), r"board\[1\] must be a whole number >= 1, not 0"),
        (lambda: shapes.ring(4, bandwidth=0), r"bandwidth must be a finite number > 0 bytes/s, not 0"),
        (lambda: shapes.ring(4, latency=-1e-6), r"latency must be a finite number >= 0 s, not -1e-06"),
        (lambda: shapes.ring(4, bandwidth=float("inf")), r"bandwidth must be a finite number"),
    ],
)
def test_impossible_numbers(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
