"""Hold the glossary of CONTRIBUTING.md against the pages; ``make lint`` runs this program.

::

    python tools/glossary.py [FOLDER]     # this repository by default

Each word has one row, in alphabetical order, with its meaning. Each word is used on a page under ``docs``, or the row
is of no use. A word in the last column, ``not``, is on no page: it would be a second name for the same thing. Code is
not looked at.
"""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Entry", "entries", "main", "problems"]

_ROW: Final = re.compile(r"^\| *([^|]*?) *\| *([^|]*?) *\| *([^|]*?) *\|$", re.MULTILINE)
_CODE: Final = re.compile(r"^(```+).*?^\1|`[^`\n]+`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
HEADING: Final = "## Glossary"


class Entry(NamedTuple):
    """A row of the glossary."""

    word: str
    meaning: str
    instead: tuple[str, ...]
    """The words that are not to be used for it."""


def entries(page: Path) -> list[Entry]:
    """The rows of the glossary on a page, without the head of the table."""
    _, _, rest = page.read_text("utf-8").partition(f"{HEADING}\n")
    rows = _ROW.findall(re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0])
    return [Entry(word, meaning, tuple(filter(None, re.split(r", *", others)))) for word, meaning, others in rows[2:]]


def _uses(word: str, text: str) -> list[int]:
    """The offsets at which a text has a word, in the singular or the plural."""
    return [found.start() for found in re.finditer(rf"\b{re.escape(word)}(?:s|es)?\b", text, re.IGNORECASE)]


def problems(root: Path) -> list[str]:
    """The differences between the glossary and the pages.

    Args:
        root: the folder with ``CONTRIBUTING.md`` and ``docs``.
    """
    page = root / "CONTRIBUTING.md"
    rows = entries(page)
    if not rows:
        return [f"{page}: there is no table under {HEADING!r}"]
    words = [row.word for row in rows]
    found = [f"{page}: {word!r} stands behind {other!r}: sort the rows, and give each word one"
             for other, word in pairwise(words) if not other < word]  # fmt: skip
    found += [f"{page}: {row.word!r} has no meaning" for row in rows if not row.meaning]
    texts = {
        path: _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), path.read_text("utf-8"))
        for path in sorted(root.glob("docs/**/*.md"))
        if "_build" not in path.parts
    }
    for row in rows:
        if not any(_uses(row.word, text) for text in texts.values()):
            found.append(f"{page}: {row.word!r} is on no page under docs: leave it out")
        found += [
            f"{path}:{text.count(chr(10), 0, at) + 1}: {other!r}: the glossary calls it {row.word!r}"
            for other in row.instead
            for path, text in texts.items()
            for at in _uses(other, text)
        ]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Compare and print the differences. Returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    root = Path(given[0]) if given else Path(__file__).resolve().parents[1]
    found = problems(root)
    print("\n".join(found) or f"{len(entries(root / 'CONTRIBUTING.md'))} words: each is used, and means one thing")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
