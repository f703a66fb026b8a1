"""Snapshots as notebooks show them."""

from __future__ import annotations

from dataclasses import dataclass

from zcactor.observe.html import Listing, line, table


@dataclass
class Shelf:
    name: str | None
    held: dict[str, float]
    rows: tuple[str, ...]


def test_a_listing_is_a_list_that_shows_a_table() -> None:
    shelves = Listing([Shelf("<a>", {"CPU": 2.0, "GPU": 0.5}, ("x", "y")), Shelf(None, {}, ())])
    assert shelves == [Shelf("<a>", {"CPU": 2.0, "GPU": 0.5}, ("x", "y")), Shelf(None, {}, ())]
    assert shelves._repr_html_() == (
        "<table><tr><th>name</th><th>held</th><th>rows</th></tr>"
        "<tr><td>&lt;a&gt;</td><td>CPU: 2, GPU: 0.5</td><td>x, y</td></tr>"
        "<tr><td></td><td></td><td></td></tr></table>"
    )
    assert Listing()._repr_html_() == "none"


def test_cells_and_tables_are_short() -> None:
    shown = table(("n",), [("y" * 1000,), *((number,) for number in range(1, 150))])
    assert f"<td>{'y' * 77}...</td>" in shown
    assert "<td>99</td>" in shown and "<td>100</td>" not in shown
    assert shown.endswith("<p>and 50 more</p>")
    assert line("<script>", "a & b") == "<code>&lt;script&gt;</code> a &amp; b"
