"""The files that list the nodes of this host: a small one for each node, in its cluster's run directory."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from zcactor.workers.run_directory import PREFIX

__all__ = ["NodeFile", "list_nodes", "parent_of", "started_at", "write_record"]

_PATTERN = "node-*.json"


class NodeFile(msgspec.Struct, frozen=True):
    """One node of this host, started from the command line."""

    node: str
    """32 hexadecimal digits."""
    pid: int
    """The pid of its agent."""
    started: int
    """The start of that process, in ticks since boot: another process that gets the same pid began later."""
    role: str
    """``"head"`` or ``"member"``."""
    address: str
    """``host:port`` of the node."""
    head: str
    """``host:port`` of its cluster's head."""
    log: str
    """The path of its log; empty for a node without one."""
    launcher: int = 0
    """The pid of the ``zcactor run`` whose node it is, and which ends it; 0 for other nodes."""


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


def list_nodes(base: Path) -> list[NodeFile]:
    """This user's running nodes whose run directories lie in `base`; heads come first."""
    found = []
    for path in sorted(base.glob(f"{PREFIX}*/{_PATTERN}")):
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            record = msgspec.json.decode(path.read_bytes(), type=NodeFile)
        except (OSError, UnicodeDecodeError, msgspec.DecodeError):  # the node is just ending; or the file is not ours
            continue
        if started_at(record.pid) == record.started:
            found.append(record)
    return sorted(found, key=lambda record: record.role != "head")
