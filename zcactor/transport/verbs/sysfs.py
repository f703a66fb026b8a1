"""The table of addresses of a port, as the kernel shows it in /sys/class/infiniband.

The files are documented in the kernel's Documentation/ABI/stable/sysfs-class-infiniband. They are read instead of
calling ibv_query_gid_table(3) because the ``ibverbs`` package has no call for an entry's type and interface, and
because the table is then the same whichever binding is used.
"""

from __future__ import annotations

import errno
from pathlib import Path

from zcactor.transport.verbs.base import Gid

__all__ = ["ROOT", "gid_table", "has_rdma"]

ROOT = Path("/sys/class/infiniband")

_UNUSED = bytes(16)


def has_rdma(root: Path = ROOT) -> bool:
    """Whether the kernel has the RDMA core loaded at all."""
    return root.is_dir()


def _read(path: Path) -> str:
    """The file's text without blanks around it; empty for an entry that is not in use, which reads as EINVAL."""
    try:
        return path.read_text().strip()
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.ENOENT, errno.ENODEV}:
            return ""
        raise


def gid_table(device: str, port: int, root: Path = ROOT) -> list[Gid]:
    """The entries in use of one port, by index.

    Raises:
        OSError: there is no such device or port, or the files cannot be read.
    """
    base = root / device / "ports" / str(port)
    entries = []
    for path in sorted((base / "gids").iterdir(), key=lambda path: int(path.name)):
        text = _read(path).replace(":", "")
        raw = bytes.fromhex(text) if len(text) == 32 else _UNUSED
        if raw == _UNUSED:
            continue
        index = int(path.name)
        kind = _read(base / "gid_attrs" / "types" / path.name)
        netdev = _read(base / "gid_attrs" / "ndevs" / path.name)
        entries.append(Gid(index, raw, kind == "RoCE v2", netdev))
    return entries
