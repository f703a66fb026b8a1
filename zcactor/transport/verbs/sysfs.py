"""The table of addresses of a port, as the kernel shows it in /sys/class/infiniband.

The files are documented in the kernel's Documentation/ABI/stable/sysfs-class-infiniband. They are read instead of
calling ibv_query_gid_table(3) because the ``ibverbs`` package has no call for an entry's type and interface, and
because the table is then the same whichever binding is used.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from zcactor.transport.verbs.base import Gid
from zcactor.transport.verbs.load import ROOT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["gid_table"]

_UNUSED = "0" * 32


def _read(path: str) -> str:
    """The file's text without blanks around it; empty for an entry that is not in use, which reads as EINVAL.

    By bare system calls: tables have hundreds of entries, nearly all of them empty.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 4096).decode("ascii", "replace").strip()
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.ENOENT, errno.ENODEV}:
            return ""
        raise


def gid_table(device: str, port: int, root: Path = ROOT) -> list[Gid]:
    """The entries in use of one port, by index.

    Raises:
        OSError: there is no such device or port, or the files cannot be read.
    """
    base = f"{root}/{device}/ports/{port}"
    entries = []
    for index in sorted(map(int, os.listdir(f"{base}/gids"))):
        text = _read(f"{base}/gids/{index}").replace(":", "")
        if len(text) == 32 and text != _UNUSED:
            kind = _read(f"{base}/gid_attrs/types/{index}")
            netdev = _read(f"{base}/gid_attrs/ndevs/{index}")
            entries.append(Gid(index, bytes.fromhex(text), kind == "RoCE v2", netdev))
    return entries
