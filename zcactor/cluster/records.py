"""The files that list the nodes of this host: a small one for each node, in its cluster's run directory and in the
user's state folder (`zcactor.workers.kept_records`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.transport.os_process import parent_of, started_at
from zcactor.workers.kept_records import contents_in, kept_nodes
from zcactor.workers.run_directory import PREFIX, base_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NodeFile", "list_nodes", "nodes_here", "parent_of", "started_at", "write_record"]

_WRITABLE: Final = 0o022


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
    space: str = ""
    """The host and namespace in which its pid counts: `zcactor.transport.os_process.pid_space`."""
    directory: str = ""
    """The path of its run directory."""
    session: str = ""
    """The ``XDG_RUNTIME_DIR`` with which it was started; empty where it had none."""

    @property
    def name(self) -> str:
        """Its id, as people are told it."""
        return f"node {self.node[:8]}" if self.role == "member" else f"cluster {(self.cluster or self.node)[:8]}"


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
        for content in contents_in(directory, _WRITABLE):
            try:
                record = msgspec.json.decode(content, type=NodeFile)
            except (UnicodeDecodeError, msgspec.DecodeError):  # the file is not ours
                continue
            if started_at(record.pid) == record.started:
                found.append(record)
    return sorted(found, key=lambda record: record.role != "head")


def nodes_here(names: Sequence[str] = ("*",)) -> list[NodeFile]:
    """This user's running nodes and heads on this host, as far as this session may know them; heads come first.

    These are those whose run directories lie in this session's folder, and those of the state folder: started in
    another session, or left without a run directory.

    Args:
        names: of their run directories, 32 hexadecimal digits each; the default stands for all.
    """
    found = [record for name in names for record in list_nodes(base_directory(), name)]
    known = {(record.pid, record.started) for record in found}
    wanted = {f"{PREFIX}{name}" for name in names}
    for kept, content in kept_nodes(os.environ):
        if kept.is_apart or (kept.pid, kept.started) in known:
            continue
        if "*" in names or Path(kept.directory).name in wanted:
            try:
                found.append(msgspec.json.decode(content, type=NodeFile))
            except msgspec.DecodeError:  # it was written by another version
                continue
    return sorted(found, key=lambda record: record.role != "head")
