"""The files that list the nodes of this host: a small one for each node, in its cluster's run directory."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from zcactor.workers.run_directory import PREFIX

__all__ = ["NodeFile", "list_nodes", "parent_of", "started_at", "write_record"]

_PATTERN = "node-*.json"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


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


def list_nodes(base: Path, name: str = "*") -> list[NodeFile]:
    """This user's running nodes and heads whose run directories lie in `base`; heads come first.

    Args:
        base: the folder of run directories.
        name: of a run directory, 32 hexadecimal digits; the default stands for all.
    """
    found = []
    for directory in sorted(base.glob(f"{PREFIX}{name}")):
        for content in _records_in(directory):
            try:
                record = msgspec.json.decode(content, type=NodeFile)
            except (UnicodeDecodeError, msgspec.DecodeError):  # the file is not ours
                continue
            if started_at(record.pid) == record.started:
                found.append(record)
    return sorted(found, key=lambda record: record.role != "head")


def _records_in(directory: Path) -> list[bytes]:
    """The contents of the records in a run directory. Facts about a file are asked of the open file, and not of its
    name: in the temporary directory another user may exchange a link of his meanwhile."""
    found: list[bytes] = []
    with contextlib.ExitStack() as undo:
        try:
            folder = os.open(directory, _FOLDER)
            undo.callback(os.close, folder)
            status = os.fstat(folder)
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                return found
            names = sorted(fnmatch.filter(os.listdir(folder), _PATTERN))
        except OSError:  # its last node has just removed it, or it is no directory
            return found
        for name in names:
            try:
                file = undo.enter_context(open(os.open(name, _FILE, dir_fd=folder), "rb"))
                status = os.fstat(file.fileno())
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
                    found.append(file.read())
            except OSError:  # the node is just ending, or it is a link
                continue
    return found
