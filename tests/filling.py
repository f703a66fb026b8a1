"""A store without room."""

from __future__ import annotations

from typing import Any

import numpy as np

import zcactor as zc

__all__ = ["fill_store"]


def fill_store() -> list[Any]:
    """Fill this process's store until it has no room for 1 KiB. Returns the arrays that it took."""
    filling: list[Any] = []
    nbytes = 1 << 40
    while nbytes >= 1024:
        try:
            filling.append(zc.empty(nbytes, np.uint8))
        except zc.OutOfMemory:
            nbytes //= 2
    return filling
