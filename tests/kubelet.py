"""Volumes of Secrets as the kubelet of Kubernetes makes them, mounted by a shell in a mount namespace of its own."""

from __future__ import annotations

import shlex

__all__ = ["GROUP", "mounting"]

GROUP = 65532
"""The group of the pod's volumes (``fsGroup``)."""
VERSION = "..2026_11_26_09_00_00.1234567890"


def mounting(folder: str, token: str, *, mode: int = 0o440, owner: int = 0, read_only: bool = True) -> str:
    """The commands of a shell that mount a Secret with one key, ``token``.

    A memory file system with the sticky bit has a folder for each version, a link ``..data`` to the newest one, and a
    link for each key; containers see it through a read-only mount.
    """
    place = shlex.quote(folder)
    commands = [
        "set -e",
        f"mkdir -p {place}",
        f"mount -t tmpfs -o mode=1777 tmpfs {place}",
        f"mkdir -m 755 {place}/{VERSION}",
        f"printf %s {shlex.quote(token)} >{place}/{VERSION}/token",
        f"chown {owner}:{GROUP} {place}/{VERSION}/token",
        f"chmod {mode:o} {place}/{VERSION}/token",
        f"ln -s {VERSION} {place}/..data",
        f"ln -s ..data/token {place}/token",
    ]
    if read_only:
        commands.append(f"mount -o remount,bind,ro {place}")
    return "; ".join(commands)
