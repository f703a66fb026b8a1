"""YAML text of plain data. Pure: no parser and no library, only what manifests are made of."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["yaml_text"]

_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
"""Strings that need no quotes, but for `_WORDS`."""
_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})
"""Words that YAML 1.1, which kubectl reads, takes for something else than a string, in any case of letters."""
_LONGEST_KEY: Final = 1_000
"""Characters of a key that needs no mark: readers look for the colon behind it in the first 1,024 (YAML 1.1, 7.2)."""
_SHORT: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


def yaml_text(documents: Iterable[dict[str, Any]]) -> str:
    """Write documents of dictionaries, lists, strings, integers and booleans, one after the other.

    Args:
        documents: the documents. Keys are strings; a string has no lone surrogates, which no text can hold.

    Raises:
        TypeError: there is a value of another type.
    """
    return "".join("---\n" + "".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> Iterator[str]:
    """The lines of a dictionary or a list that is not empty, without indentation."""
    parts = value.items() if isinstance(value, dict) else ((None, part) for part in value)
    for key, part in parts:
        head = "-" if key is None else f"{_scalar(key)}:"
        if len(head) > _LONGEST_KEY:
            yield f"? {head[:-1]}"
            head = ":"
        if not isinstance(part, dict | list) or not part:
            yield f"{head} {_scalar(part)}"
            continue
        inner = _lines(part)
        if key is None:  # the first line stands beside the dash
            yield f"- {next(inner)}"
        else:
            yield head
        yield from (f"  {line}" for line in inner)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if value in ({}, []):
        return "{}" if isinstance(value, dict) else "[]"
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is a {type(value).__name__}: YAML text is made of plain data only")
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return f'"{"".join(map(_escaped, value))}"'


def _escaped(letter: str) -> str:
    """A character between double quotes. Only printable ASCII stands for itself: YAML 1.1 breaks lines at others."""
    code = ord(letter)
    if letter in _SHORT:
        return _SHORT[letter]
    if 0x20 <= code < 0x7F:
        return letter
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
