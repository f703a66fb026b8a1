"""The run directory: where the sockets of one node lie, private to its user, and gone with the node.

Its driver removes it, or its agent where the driver was killed. When both are killed at once, with a whole control
group for instance, the next node's start removes it: the directory holds a file that driver and agent keep locked
(flock(2)) as long as they live, so that anybody can see whether they do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

__all__ = ["PREFIX", "RunDirectory", "base_directory", "sweep"]

PREFIX = f"zcactor-{os.getuid()}-"
_LOCK = "lock"
_UNLOCKED_AFTER = 60.0
"""Seconds after which a directory without a lock file is removed: its maker ended within the microseconds before it had
made one, or is about to make it."""
_ATTEMPTS = 10


def base_directory() -> Path:
    """Where run directories are made: ``$XDG_RUNTIME_DIR``, or the temporary directory where there is none."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK | os.X_OK):
        return Path(base)
    return Path(tempfile.gettempdir())


def sweep(base: Path) -> list[Path]:
    """Remove the run directories of this user in `base` whose driver and agent are both gone.

    Returns:
        Those removed.
    """
    removed = []
    for directory in base.glob(f"{PREFIX}*"):
        try:
            status = directory.lstat()
            if status.st_uid != os.getuid():
                continue
            fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if time.time() - status.st_mtime > _UNLOCKED_AFTER:
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
            continue
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its owner lives
        else:
            if os.fstat(fd).st_nlink > 0:  # else it was removed meanwhile, and what has its name now is another's
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
        finally:
            os.close(fd)
    return removed


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
        for _ in range(_ATTEMPTS):
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            self.lock_fd = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            """The locked file; -1 once removed. Whoever inherits it keeps the directory in use."""
            if _lock(self.lock_fd):
                return
            os.close(self.lock_fd)  # another start swept it away before it was locked
        raise OSError(f"no run directory could be locked in {base}: it vanished {_ATTEMPTS} times")

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
        """Remove it with all that is in it, or let go of it where others have it as well. Idempotent."""
        if self.lock_fd >= 0:
            if not self._shared or _lock(self.lock_fd):
                shutil.rmtree(self.path, ignore_errors=True)
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
