"""One check of `tools/gpu_check.py`: its result, and its early end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Check", "Skip", "require"]

Check: TypeAlias = Callable[[str], tuple[str, dict[str, Any]]]
"""A check: from the driver, ``cuda`` or ``fake``, to a line about what was seen, and figures by their names."""


class Skip(Exception):
    """The end of a check that cannot be made here. Its text is the reason."""


def require(what: object, otherwise: str) -> None:
    """Fail the check unless something holds.

    Raises:
        AssertionError: it does not; with the text.
    """
    if not what:
        raise AssertionError(otherwise)
