"""The run directory: where the sockets of one node lie, private to its user, and gone with the node.

Its driver removes it, or its agent where the driver was killed. When both are killed at once, with a whole control
group for instance, the next node's start removes it: the directory holds a file that driver and agent keep locked
(flock(2)) as long as they live, so that anybody can see whether they do. A second file marks it as made here. Removing
one takes away the files that processes of zcactor put there and then the directory if it is empty: what somebody else
has put there stays, and so does the directory around it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["PREFIX", "RunDirectory", "base_directory", "sweep"]

PREFIX = f"zcactor-{os.getuid()}-"
_NAME: Final = re.compile(re.escape(PREFIX) + "[0-9a-f]{32}")
_LOCK: Final = "lock"
_MARKER: Final = "made-by-zcactor"
"""The file that tells a directory of ours from one that only has such a name. It is made once the lock is held, so a
directory with it and without a holder of the lock has been left."""
_OURS: Final = re.compile(r".*\.sock|[0-9a-f]{32}\.(tcp|verbs|part)|node-.*\.(json|part)")
"""Sockets, published addresses and records of nodes (`zcactor.transport.select`, `zcactor.cluster.records`)."""
_ATTEMPTS = 10
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def base_directory() -> Path:
    """Where run directories are made: ``$XDG_RUNTIME_DIR``, or the temporary directory where there is none."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK | os.X_OK):
        return Path(base)
    return Path(tempfile.gettempdir())


def sweep(base: Path) -> list[Path]:
    """Remove the run directories of this user in `base` whose driver and agent are both gone.

    Returns:
        Those that were left and are emptied of what was made here; they exist on where there is something else in them.
    """
    removed = []
    for directory in base.glob(f"{PREFIX}*"):
        if not _NAME.fullmatch(directory.name):
            continue
        with contextlib.ExitStack() as undo:
            try:
                folder = os.open(directory, _DIRECTORY)
                undo.callback(os.close, folder)
                if os.fstat(folder).st_uid != os.getuid() or not _is_marked(folder):
                    continue
                lock = os.open(_LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
            except OSError:
                continue  # it has just gone, or is none of ours
            undo.callback(os.close, lock)
            if _lock(lock):  # else its owner lives, or it was removed meanwhile and what has its name now is another's
                _empty(directory, folder)
                removed.append(directory)
    return removed


def _is_marked(folder: int) -> bool:
    try:
        status = os.stat(_MARKER, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def _empty(directory: Path, folder: int) -> None:
    """Take away what was made here, and the directory if nothing else is in it. Its lock is held exclusively.

    The lock's file goes last: as long as it is there, newcomers to a shared directory wait for us.
    """
    names = [name for name in os.listdir(folder) if _OURS.fullmatch(name)]
    for name in [*names, _MARKER, _LOCK]:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # it has just gone; or is none of ours
            os.unlink(name, dir_fd=folder)
    with contextlib.suppress(OSError):  # there is something else in it, or somebody joins it
        directory.rmdir()


class RunDirectory:
    """A fresh run directory, mode 0700, and its lock.

    Args:
        base: where to make it; left-over ones there are removed first.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, base: Path) -> None:
        sweep(base)
        self._shared = False
        self.path = base / f"{PREFIX}{secrets.token_hex(16)}"
        self.path.mkdir(mode=0o700)
        self.lock_fd = os.open(self.path / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        """The locked file; -1 once removed. Whoever inherits it keeps the directory in use."""
        fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._mark()

    def _mark(self) -> None:
        """From here on the directory is swept once nobody holds its lock."""
        os.close(os.open(self.path / _MARKER, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    @classmethod
    def shared(cls, base: Path, name: str) -> RunDirectory:
        """The run directory called `name` that processes of one cluster have in common, made where there is none yet.

        The last of them that lets go of it removes it.

        Args:
            base: where it lies; left-over ones there are removed first.
            name: of the cluster.

        Raises:
            PermissionError: there is something of that name that is not ours, or open to others.
            OSError: it cannot be made.
        """
        sweep(base)
        self = cls.__new__(cls)
        self.path = base / f"{PREFIX}{name}"
        self._shared = True
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            with contextlib.suppress(FileNotFoundError):  # the last one who had it was just removing it
                status = self.path.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                    raise PermissionError(f"{self.path} is in the way: it must be a directory that only we can use")
                self.lock_fd = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                fcntl.flock(self.lock_fd, fcntl.LOCK_SH)  # waits for one who is removing it
                if os.fstat(self.lock_fd).st_nlink > 0:
                    self._mark()
                    return self
                os.close(self.lock_fd)
        raise OSError(f"the run directory {self.path} could not be locked: it vanished {_ATTEMPTS} times")

    @classmethod
    def inherited(cls, path: Path, lock_fd: int, *, shared: bool) -> RunDirectory:
        """The run directory that the process which started this one has made or joined, with the lock it passed on."""
        self = cls.__new__(cls)
        self.path, self.lock_fd, self._shared = path, lock_fd, shared
        return self

    def remove(self) -> None:
        """Remove it with all that was made in it, or let go of it where others have it as well. Idempotent."""
        if self.lock_fd >= 0:
            if not self._shared or _lock(self.lock_fd):
                with contextlib.suppress(FileNotFoundError):  # somebody else has removed it
                    folder = os.open(self.path, _DIRECTORY)
                    try:
                        _empty(self.path, folder)
                    finally:
                        os.close(folder)
            self.forget()

    def forget(self) -> None:
        """Let go of the lock and leave the directory alone."""
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def _lock(fd: int) -> bool:
    """Lock it, unless somebody has, or has removed it meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(fd).st_nlink > 0
