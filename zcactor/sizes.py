"""Sizes of memory as text, and the limit of names."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["LONGEST_NAME", "size", "sized"]

LONGEST_NAME: Final = 1_000
"""Characters of a name, at most: names stand in messages, and in each entry of the head's log about an actor."""

_UNITS: Final = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30,
    "TIB": 1 << 40,
}  # fmt: skip


def size(text: str) -> int:
    """The bytes of a size such as ``"256MiB"``.

    Raises:
        ValueError: `text` is no size.
    """
    found = re.fullmatch(r"(\d{1,30})(?:\.(\d{1,30}))? *([KMGT]?i?B?)", text, re.IGNORECASE | re.ASCII)
    if found is None or found[3].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size: write for instance 256MiB, 1GiB or 1048576")
    unit, part = _UNITS[found[3].upper()], found[2] or "0"
    divisor: int = 10 ** len(part)
    return int(found[1]) * unit + int(part) * unit // divisor


def sized(count: int) -> str:
    """A number of bytes with its unit, as in ``"1.5 GiB"``."""
    value, names = float(count), ("bytes", "KiB", "MiB", "GiB", "TiB")
    unit = 0
    while round(value, 1) >= 1024 and unit < len(names) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count:,} byte{'s' * (count != 1)}" if unit == 0 else f"{value:.1f} {names[unit]}".replace(".0 ", " ")
