"""Whether this machine has an RDMA device, as the kernel says without anybody asking a library."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["ROOT", "has_device"]

ROOT: Final = Path("/sys/class/infiniband")
"""Where the kernel lists its RDMA devices."""


def has_device(root: Path = ROOT) -> bool:
    """Whether the kernel lists an RDMA device."""
    return root.is_dir() and any(root.iterdir())
