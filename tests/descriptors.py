"""The descriptors that this process has open, for tests that everything was closed."""

from __future__ import annotations

import gc
import os


def opened() -> set[str]:
    """The numbers of the open descriptors, after garbage that has some was collected."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))
