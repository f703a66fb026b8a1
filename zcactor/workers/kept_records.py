"""The records of this host's nodes in the user's state folder, which outlast their run directories.

A run directory lies where the environment of its session says: in ``$XDG_RUNTIME_DIR``, which cron and sudo do not
have, and which the system removes at the last logout. So each node that a command has started is recorded in the state
folder as well. Processes of another session find it by that, and meet it in its run directory as long as that is there.

Other hosts may share the state folder, as over NFS, and pids mean another process there. So a record names the space in
which its pid counts. It counts only where its process lives there. A process removes its own record, and those of
processes that have ended in its space of pids.

Two folders that were both named by ``XDG_RUNTIME_DIR`` keep their nodes apart as long as both are there.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.folders import NoFolder, make_folder, shared_by, user_folder
from zcactor.logs import logger
from zcactor.transport.os_process import pid_space, started_at
from zcactor.transport.registry import SUFFIXES
from zcactor.workers.run_directory import PREFIX, base_directory, named_base

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Kept", "contents_in", "keep", "kept_nodes", "kept_path", "meeting_base", "nodes_apart", "out_of_reach"]

_PATTERN: Final = "node-*.json"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PRIVATE: Final = 0o077
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)


class Kept(msgspec.Struct, frozen=True):
    """The part of a node's record by which it is found; see `zcactor.cluster.records.NodeFile`."""

    node: str
    pid: int
    started: int
    address: str
    space: str
    directory: str
    session: str
    cluster: str = ""
    role: str = ""

    @property
    def lives(self) -> bool:
        """Whether its process lives, where its pid counts here."""
        return started_at(self.pid) == self.started

    @property
    def process(self) -> str:
        """The id of its process, 32 hexadecimal digits."""
        return self.cluster or self.node

    @property
    def described(self) -> str:
        """The node, for messages."""
        return f"the node at {self.address} (pid {self.pid})"

    @property
    def is_apart(self) -> bool:
        """Whether this process and the node were given run directories in two folders, which are both there."""
        own = named_base()
        return bool(self.session and own and self.session != own and os.path.isdir(self.directory))


def kept_path(node: str, environ: Mapping[str, str]) -> str:
    """The path of a node's record in the state folder; empty where the user has none.

    Args:
        node: the id in the record, 32 hexadecimal digits.
        environ: the environment.
    """
    try:
        return str(user_folder("state", environ) / "nodes" / f"node-{node}.json")
    except NoFolder:
        return ""


def keep(path: str, content: bytes) -> bool:
    """Write a record to the state folder. Where that cannot be done, the node goes on without, and the log says why.

    Args:
        path: from `kept_path`; nothing is written where it is empty.
        content: the record.

    Returns:
        Whether it was written.
    """
    if not path:
        return False
    folder, name = os.path.split(path)
    part = f"{name}.part"
    try:
        make_folder(Path(folder))
        with contextlib.ExitStack() as undo:
            into = os.open(folder, _FOLDER)
            undo.callback(os.close, into)
            problem = shared_by(os.fstat(into), _PRIVATE)
            if problem:
                logger.info("this node is not recorded in %s, which %s", folder, problem)
                return False
            _sweep(into)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(part, flags, 0o600, dir_fd=into), "wb") as file:
                os.fchmod(file.fileno(), 0o600)  # under any umask
                file.write(content)
            os.replace(part, name, src_dir_fd=into, dst_dir_fd=into)
    except OSError as error:
        logger.info("this node is not recorded in %s: %s", folder, error)
        return False
    return True


def contents_in(directory: Path, forbidden: int) -> list[bytes]:
    """The contents of the records in a folder of this user.

    Args:
        directory: the folder.
        forbidden: the bits of a mode, of folder or file, with which nothing is read.

    Raises:
        OSError: no descriptor is left (EMFILE).
    """
    with contextlib.ExitStack() as undo:
        try:
            folder = os.open(directory, _FOLDER)
            undo.callback(os.close, folder)
            if shared_by(os.fstat(folder), forbidden):
                return []
            return [content for _, _, content in _records_in(folder, forbidden)]
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                raise
            return []  # its last node has just removed it, or it is no directory


def _records_in(folder: int, forbidden: int) -> Iterator[tuple[str, os.stat_result, bytes]]:
    """The records in an open folder: name, status and content. Facts about a file are asked of the open file, and not
    of its name: in the temporary directory another user may exchange a link of his meanwhile."""
    for name in sorted(fnmatch.filter(os.listdir(folder), _PATTERN)):
        try:
            with open(os.open(name, _FILE, dir_fd=folder), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or shared_by(status, forbidden):
                    continue
                content = file.read()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                raise
            continue  # the node is just ending, or it is a link
        yield name, status, content


def _decoded(content: bytes) -> Kept | None:
    try:
        return msgspec.json.decode(content, type=Kept)
    except (UnicodeDecodeError, msgspec.DecodeError):  # the file is not ours
        return None


def _sweep(folder: int) -> None:
    """Remove the records of processes of this space of pids that were killed: they have removed none."""
    here = pid_space()
    for name, status, content in _records_in(folder, _PRIVATE):
        record = _decoded(content)
        if record is None or record.space != here or record.lives:
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), status):
                os.unlink(name, dir_fd=folder)


def kept_nodes(environ: Mapping[str, str]) -> list[tuple[Kept, bytes]]:
    """The records in the state folder whose process lives here, each with its whole content.

    Args:
        environ: the environment.
    """
    path = kept_path("", environ)
    if not path:
        return []
    found, here = [], pid_space()
    for content in contents_in(Path(path).parent, _PRIVATE):
        record = _decoded(content)
        if record is not None and record.space == here and record.lives:
            found.append((record, content))
    return found


def _of(names: Sequence[str], environ: Mapping[str, str]) -> list[Kept]:
    """The living nodes of a cluster, by the names of its run directory."""
    wanted = {f"{PREFIX}{name}" for name in names}
    return [record for record, _ in kept_nodes(environ) if Path(record.directory).name in wanted]


def meeting_base(names: Sequence[str], environ: Mapping[str, str]) -> Path:
    """The folder in which processes of a cluster meet: that of the session, or the one of a node that a command of
    another session has started.

    Args:
        names: those of the cluster's run directory; see `zcactor.workers.run_directory.shared_names`.
        environ: the environment.
    """
    base = base_directory()
    places = [Path(record.directory) for record in _of(names, environ) if not record.is_apart]
    if not any(place.parent == base for place in places):
        for place in places:
            if _is_usable(place):
                return place.parent
    return base


def _is_usable(directory: Path) -> bool:
    """Whether it is a run directory that this user alone can use."""
    try:
        status = directory.lstat()
    except OSError:  # it is gone, or this process may not look
        return False
    private = stat.S_ISDIR(status.st_mode) and not shared_by(status, _PRIVATE)
    return private and os.access(directory.parent, os.W_OK | os.X_OK)


def out_of_reach(names: Sequence[str], directory: Path, environ: Mapping[str, str]) -> tuple[str, bool]:
    """Describe the nodes of a cluster that run on this host, and that have no sockets in this process's run directory.

    Args:
        names: those of the cluster's run directory.
        directory: this process's run directory.
        environ: the environment.

    Returns:
        A sentence with the remedy, empty where there is no such node; and whether a folder is gone.
    """
    apart: dict[str, list[str]] = {}
    lost: dict[str, list[str]] = {}
    for record in _of(names, environ):
        place = Path(record.directory)
        if record.role == "standby" and place.is_dir() and not _serves(record, place):  # it has sockets once it leads
            continue
        if not _serves(record, directory):
            group, folder = (apart, record.session) if record.is_apart else (lost, record.directory)
            group.setdefault(folder, []).append(record.described)
    told = [
        f"{' and '.join(nodes)} on this host has its run directory in XDG_RUNTIME_DIR={session}, and this process in "
        f"{named_base()}"
        for session, nodes in apart.items()
    ] + [
        f"{' and '.join(nodes)} on this host has lost its run directory {place}, as after a logout: start it again "
        "where XDG_RUNTIME_DIR names a folder that stays, or have it stay by 'loginctl enable-linger'"
        for place, nodes in lost.items()
    ]
    return "; ".join(told), bool(lost)


def _serves(record: Kept, directory: Path) -> bool:
    """Whether the process of a record has sockets in a run directory."""
    return any((directory / f"{record.process}.{suffix}").exists() for suffix in SUFFIXES)


def nodes_apart(environ: Mapping[str, str]) -> str:
    """Name the nodes of this host that this session does not list, with the reason; empty where there are none.

    Args:
        environ: the environment.
    """
    return "; ".join(
        f"{record.described} runs with XDG_RUNTIME_DIR={record.session}, here it is {named_base()}"
        for record, _ in kept_nodes(environ)
        if record.is_apart
    )
