"""The tables of addresses and partitions of a port, and the place of a card, from the kernel's files in /sys.

The kernel documents the files in Documentation/ABI/stable/sysfs-class-infiniband. They replace a call of
ibv_query_gid_table(3), because the ``ibverbs`` package has no call for an entry's type and interface, and because the
table is the same for all bindings then.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zcactor.transport.verbs.driver.base import Gid
from zcactor.transport.verbs.driver.presence import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["gid_table", "nearness", "partition_key", "speaks_iwarp"]

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


def speaks_iwarp(device: str, root: Path = ROOT) -> bool:
    """Whether a card speaks iWARP: the kernel calls it an RNIC.

    Raises:
        OSError: the file cannot be read.
    """
    return _read(f"{root}/{device}/node_type").startswith(b"4:")


def partition_key(device: str, port: int, index: int, root: Path = ROOT) -> int:
    """Return the key at one place of the port's table of partitions; 0 where there is none.

    Raises:
        OSError: the file cannot be read.
    """
    return int(_read(f"{root}/{device}/ports/{port}/pkeys/{index}") or b"0", 16)


def nearness(device: str, environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Return how near a card is to the GPUs of this process: the number of bridges of PCI that both lie behind, of the
    nearest GPU. 0 where this cannot be told.

    A node names the GPUs of an actor's process by their UUIDs in CUDA_VISIBLE_DEVICES. NVIDIA's driver has the place of
    each in /proc. Without such names the GPUs of this process are unknown, unless the host has only one.

    Args:
        device: the card.
        environ: the environment of this process.
        root: the folder of ``proc`` and ``sys``.
    """
    names = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    ours = {name.strip() for name in names if "GPU-" in name}  # a number may be that of another order than PCI's
    try:
        card = (root / "sys/class/infiniband" / device / "device").resolve(strict=True)
        places = sorted((root / "proc/driver/nvidia/gpus").iterdir())
        if len(places) > 1:
            places = [place for place in places if ours & set((place / "information").read_text().split())]
        gpus = [(root / "sys/bus/pci/devices" / place.name).resolve(strict=True) for place in places]
    except OSError:  # no card of PCI, no GPU, or a container that hides them
        return 0
    return max((len(Path(os.path.commonpath((card, gpu))).parts) for gpu in gpus), default=0)
