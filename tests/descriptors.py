"""The descriptors that this process has open, for tests that look for leaks."""

from __future__ import annotations

import contextlib
import gc
import os

__all__ = ["opened"]


def opened() -> set[tuple[str, str]]:
    """The number of each open descriptor and the file behind it, after a collection has closed those of garbage.

    Compare by ``<=``: threads of earlier tests may close descriptors of theirs meanwhile.
    """
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor, or one that was closed meanwhile
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
