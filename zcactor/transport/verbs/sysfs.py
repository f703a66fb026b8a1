"""The table of addresses of a port, as the kernel shows it in /sys/class/infiniband.

The files are documented in the kernel's Documentation/ABI/stable/sysfs-class-infiniband. They are read instead of
calling ibv_query_gid_table(3) because the ``ibverbs`` package has no call for an entry's type and interface, and
because the table is then the same whichever binding is used.
"""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING, Final

from zcactor.transport.verbs.base import Gid
from zcactor.transport.verbs.presence import ROOT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["gid_table"]

_UNUSED: Final = b":".join([b"0000"] * 8)
"""What most of the hundreds of entries say."""
_GID: Final = re.compile(rb"(?:[0-9a-f]{4}:){7}[0-9a-f]{4}")


def _read(name: str, folder: int | None = None) -> bytes:
    """What the file says, without blanks around it; nothing for an entry that is not in use, which reads as EINVAL."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        try:
            return os.read(fd, 4096).strip()
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.ENOENT, errno.ENODEV}:
            return b""
        raise


def gid_table(device: str, port: int, root: Path = ROOT) -> list[Gid]:
    """The entries in use of one port, by index.

    Raises:
        OSError: there is no such device or port, or the files cannot be read.
    """
    base = f"{root}/{device}/ports/{port}"
    # Relative to the folder: the way to it leads through a link, and would be gone for each of the entries.
    folder = os.open(f"{base}/gids", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        said = {name: text for name in os.listdir(folder) if (text := _read(name, folder)) != _UNUSED}
    finally:
        os.close(folder)
    entries = []
    for index, text in sorted((int(name), text) for name, text in said.items()):
        if _GID.fullmatch(text):
            kind = _read(f"{base}/gid_attrs/types/{index}")
            netdev = _read(f"{base}/gid_attrs/ndevs/{index}").decode("ascii", "replace")
            entries.append(Gid(index, bytes.fromhex(text.decode().replace(":", "")), kind == b"RoCE v2", netdev))
    return entries
