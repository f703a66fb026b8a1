"""The tables of addresses and partitions of a port, from the kernel's files in /sys/class/infiniband.

The kernel documents the files in Documentation/ABI/stable/sysfs-class-infiniband. They replace a call of
ibv_query_gid_table(3), because the ``ibverbs`` package has no call for an entry's type and interface, and because the
table is the same for all bindings then.
"""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING, Final

from zcactor.transport.verbs.driver.base import Gid
from zcactor.transport.verbs.driver.presence import ROOT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["gid_table", "partition_key"]

_UNUSED: Final = b":".join([b"0000"] * 8)
"""The content of an unused entry, as most of the hundreds of entries are."""
_GID: Final = re.compile(rb"(?:[0-9a-f]{4}:){7}[0-9a-f]{4}")


def _read(name: str, folder: int | None = None) -> bytes:
    """Return the content of the file without blanks at its ends; empty for an unused entry, which reads as EINVAL."""
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
    """Return the used entries of one port, by index.

    Raises:
        OSError: there is no such device or port, or the files cannot be read.
    """
    base = f"{root}/{device}/ports/{port}"
    # Relative to the folder: its path has a symbolic link, which would be resolved for each of the entries.
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


def partition_key(device: str, port: int, index: int, root: Path = ROOT) -> int:
    """Return the key at one place of the port's table of partitions; 0 where there is none.

    Raises:
        OSError: the file cannot be read.
    """
    return int(_read(f"{root}/{device}/ports/{port}/pkeys/{index}") or b"0", 16)
