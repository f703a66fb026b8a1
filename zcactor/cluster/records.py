"""The files that list the nodes of this host: a small one for each node, in its cluster's run directory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from zcactor.workers.run_directory import PREFIX

__all__ = ["NodeFile", "list_nodes", "parent_of", "started_at", "write_record"]

_PATTERN = "node-*.json"


class NodeFile(msgspec.Struct, frozen=True):
    """One node of this host, or a head, started from the command line."""

    node: str
    """The id of its process, 32 hexadecimal digits: a head's is the cluster's as well. Heads with a log in etcd have
    that one in common, and another one here."""
    pid: int
    """The pid of its agent, or of the head."""
    started: int
    """The start of that process, in ticks since boot: another process that gets the same pid began later."""
    role: str
    """``"head"``, ``"standby"`` or ``"member"``, as it was when it was ready: a standby may lead by now."""
    address: str
    """``host:port`` of the node."""
    head: str
    """``host:port`` of its cluster's head."""
    log: str
    """The path of its log; empty for a node without one."""
    launcher: int = 0
    """The pid of the ``zcactor run`` whose node it is, and which ends it; 0 for other nodes."""

    cluster: str = ""
    """The id of the cluster of a head or standby, where that is not `node`."""

    @property
    def name(self) -> str:
        """Its id, as people are told it."""
        return f"node {self.node[:8]}" if self.role == "member" else f"cluster {(self.cluster or self.node)[:8]}"


def started_at(pid: int) -> int | None:
    """The start of a process, in ticks since boot (proc(5), field 22 of ``stat``); None when the process has ended."""
    fields = _status(pid)
    return None if fields is None else int(fields[19])


def parent_of(pid: int) -> int | None:
    """The pid of a process's parent; None when the process has ended."""
    fields = _status(pid)
    return None if fields is None else int(fields[1])


def _status(pid: int) -> list[str] | None:
    """The fields of ``stat`` from the third on; None when the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields


def write_record(directory: Path, record: NodeFile) -> None:
    """Put `record` into a run directory."""
    path = directory / f"node-{record.node}.json"
    part = path.with_suffix(".part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.encode(record))
    part.rename(path)


def list_nodes(base: Path, cluster: str = "*") -> list[NodeFile]:
    """This user's running nodes and heads whose run directories lie in `base`; heads come first.

    Args:
        base: the folder of run directories.
        cluster: the id of a cluster, 32 hexadecimal digits; the default stands for all.
    """
    paths: list[Path] = []
    for directory in base.glob(f"{PREFIX}{cluster}"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # its last node has just removed it
            paths += directory.glob(_PATTERN)
    found = []
    for path in sorted(paths):
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            record = msgspec.json.decode(path.read_bytes(), type=NodeFile)
        except (OSError, UnicodeDecodeError, msgspec.DecodeError):  # the node is just ending; or the file is not ours
            continue
        if started_at(record.pid) == record.started:
            found.append(record)
    return sorted(found, key=lambda record: record.role != "head")
