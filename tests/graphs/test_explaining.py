"""The table of a graph's edges."""

from __future__ import annotations

from zcactor.graphs.explaining import GraphEdge, GraphPlan


def test_the_table_lines_its_columns_up() -> None:
    plan = GraphPlan((GraphEdge("input 0", "Long.name", "local", 8 << 20, 4), GraphEdge("a", "output", "", 0, 0)), 4)
    title, head, *rows = str(plan).splitlines()
    assert title == "graph with 4 runs in flight at most"
    assert head.split() == ["edge", "transport", "bytes", "blocks"]
    assert [row.split() for row in rows] == [
        ["input", "0", "->", "Long.name", "local", "8,388,608", "4"], ["a", "->", "output", "0", "0"],
    ]  # fmt: skip
    assert len({len(line) for line in (head, *rows)}) == 1
