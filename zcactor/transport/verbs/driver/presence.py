"""The presence of an RDMA device on this machine, from the kernel's list and without a library."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["ROOT", "has_device"]

ROOT: Final = Path("/sys/class/infiniband")
"""The folder in which the kernel lists its RDMA devices."""


def has_device(root: Path = ROOT) -> bool:
    """Whether the kernel lists an RDMA device."""
    return root.is_dir() and any(root.iterdir())
