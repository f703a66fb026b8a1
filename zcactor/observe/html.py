"""Snapshots as short tables of HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Listing", "line", "table"]

T = TypeVar("T")
_ROWS: Final = 100
"""Rows of a table, at most: notebooks are read by people."""
_LENGTH: Final = 80
"""Characters of a cell, at most."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of escaped texts; further rows than a reader looks at are counted."""
    shown = [_row("th", head)]
    left = 0
    for number, row in enumerate(rows):
        if number < _ROWS:
            shown.append(_row("td", row))
        else:
            left += 1
    more = f"<p>and {left:,} more</p>" if left else ""
    return f"<table>{''.join(shown)}</table>{more}"


def line(code: str, text: str) -> str:
    """One line: escaped code, and a text about it."""
    return f"<code>{escape(_cut(code))}</code> {escape(text)}"


def _row(tag: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(_cut(_text(cell)))}</{tag}>' for cell in cells)}</tr>"


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}..."


class Listing(list[T]):
    """A list of snapshots, all of one dataclass, that notebooks show as a table."""

    def _repr_html_(self) -> str:
        if not self:
            return "none"
        names = [field.name for field in fields(self[0])]  # type: ignore[arg-type]
        return table(names, ([getattr(each, name) for name in names] for each in self))
