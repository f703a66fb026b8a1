"""The run directory: the sockets of one node in a directory that is private to its user, and gone with the node.

The driver removes it, or the agent where the driver was killed. When both are killed at once, with a whole control
group for instance, the start of a later node removes it: the directory holds a file that driver and agent keep locked
(flock(2)) as long as they live, so any process can tell whether they do. A second file marks the directory as zcactor's
own. Removing takes away the files that processes of zcactor have put there, and then the directory if it is empty.
Other files stay, and so does the directory around them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Final

from zcactor.machine import file_lock_missing

__all__ = ["PREFIX", "RunDirectory", "base_directory", "named_base", "shared_names", "sweep"]

PREFIX = f"zcactor-{os.getuid()}-"
_NAME: Final = re.compile(re.escape(PREFIX) + "[0-9a-f]{32}")
_LOCK: Final = "lock"
_MARKER: Final = "made-by-zcactor"
"""The file that distinguishes a directory of ours from another with such a name. It is made under the lock, so a marked
directory without a holder of the lock has been left behind."""
_OURS: Final = re.compile(r"[0-9a-f]{32}\.(sock|status|tcp|verbs|part)|node-[0-9a-f]{32}\.(json|part)")
"""Sockets, published addresses and records of nodes (`zcactor.transport.selector`, `zcactor.node.reports`,
`zcactor.cluster.records`)."""
_ATTEMPTS = 10
_NAMES: Final = 8
"""Names of a shared directory: one more than a stranger takes who sees each in use."""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def named_base() -> str:
    """``$XDG_RUNTIME_DIR``; empty where that is not set or not writable."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return base if base and os.access(base, os.W_OK | os.X_OK) else ""


def base_directory() -> Path:
    """The folder of run directories: `named_base`, or the temporary directory where that is empty."""
    return Path(named_base() or tempfile.gettempdir())


def sweep(base: Path) -> list[Path]:
    """Remove the run directories of this user in `base` whose driver and agent are both gone.

    Returns:
        The directories that were left behind, now without the files made here. A directory with other files in it
        stays.
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
                continue  # the directory has just gone, or is not ours
            undo.callback(os.close, lock)
            if _lock(lock):  # else its owner lives, or it is removed already and its name is another directory's
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
    """Take away the files made here, and the directory if it is empty then. The caller holds its lock exclusively.

    The lock's file goes last: as long as it is there, newcomers to a shared directory wait for us.
    """
    names = [name for name in os.listdir(folder) if _OURS.fullmatch(name)]
    for name in [*names, _MARKER, _LOCK]:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # the file has just gone, or is not ours
            os.unlink(name, dir_fd=folder)
    with contextlib.suppress(OSError):  # the directory has other files, or another process joins it
        directory.rmdir()


def shared_names(cluster: str, token: bytes) -> list[str]:
    """The names of the run directory that the processes of a cluster share on this host, the first one first.

    Another user who knows one could take it in a temporary directory, and so keep nodes from starting. A cluster's id
    is told to everybody who connects, so the names are made from the token. Further names are for those that somebody
    has seen in use here, or on another host, and taken since.

    Args:
        cluster: the cluster's id, 32 hexadecimal digits.
        token: the cluster's.
    """
    label = b"zcactor run directory\0" + cluster.encode()
    return [hmac.digest(token, label + bytes([number]), "sha256")[:16].hex() for number in range(_NAMES)]


class RunDirectory:
    """A fresh run directory, mode 0700, and its lock.

    Args:
        base: the folder to make it in; left-over run directories there are removed first.

    Raises:
        CallMissing: the file system has no locks.
        OSError: the directory cannot be made.
    """

    def __init__(self, base: Path) -> None:
        sweep(base)
        self._shared = False
        self.path = base / f"{PREFIX}{secrets.token_hex(16)}"
        self.path.mkdir(mode=0o700)
        self.lock_fd = -1
        """The locked file; -1 once removed. A process that inherits it keeps the directory in use."""
        try:
            self.path.chmod(0o700)  # under any umask
            self.lock_fd = os.open(self.path / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            _flock(self.path, self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._mark()
        except OSError:
            self._undo()
            raise

    def _mark(self) -> None:
        """Mark the directory: from here on it is swept once no process holds its lock."""
        os.close(os.open(self.path / _MARKER, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    @classmethod
    def shared(cls, base: Path, *names: str) -> RunDirectory:
        """The run directory that processes of one cluster share, by the first of `names` that nobody else has taken.
        The first of them makes it.

        The last process that lets go of it removes it.

        Args:
            base: the folder in which it lies; left-over run directories there are removed first.
            names: those of `shared_names`.

        Raises:
            PermissionError: a file or directory of each name belongs to another user, or is open to others.
            CallMissing: the file system has no locks.
            OSError: the directory cannot be made.
        """
        sweep(base)
        for name in names[:-1]:
            with contextlib.suppress(PermissionError):
                return cls._shared_as(base, name)
        return cls._shared_as(base, names[-1])

    @classmethod
    def _shared_as(cls, base: Path, name: str) -> RunDirectory:
        self = cls.__new__(cls)
        self.path = base / f"{PREFIX}{name}"
        self._shared = True
        for _ in range(_ATTEMPTS):
            made = False
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
                made = True
            with contextlib.suppress(FileNotFoundError):  # its last user was just removing it
                if made:
                    self.path.chmod(0o700)  # under any umask
                status = self.path.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                    raise PermissionError(f"{self.path} is in the way: it must be a directory that only we can use")
                self.lock_fd = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    _flock(self.path, self.lock_fd, fcntl.LOCK_SH)  # waits for a process that is removing it
                except OSError:
                    if made:
                        self._undo()
                    raise
                if os.fstat(self.lock_fd).st_nlink > 0:
                    self._mark()
                    return self
                os.close(self.lock_fd)
        raise OSError(f"the run directory {self.path} could not be locked: it vanished {_ATTEMPTS} times")

    @classmethod
    def inherited(cls, path: Path, lock_fd: int, *, shared: bool) -> RunDirectory:
        """The run directory of the process which started this one, with the lock that it passed on."""
        self = cls.__new__(cls)
        self.path, self.lock_fd, self._shared = path, lock_fd, shared
        return self

    @classmethod
    def of_lock(cls, lock_fd: int) -> RunDirectory | None:
        """The shared run directory to which an inherited lock belongs; None where that is no run directory's."""
        path = Path(os.readlink(f"/proc/self/fd/{lock_fd}"))
        known = path.name == _LOCK and _NAME.fullmatch(path.parent.name)
        return cls.inherited(path.parent, lock_fd, shared=True) if known else None

    def remove(self) -> None:
        """Remove the directory with all that was made in it, or only let go of it where other processes share it.
        Idempotent."""
        if self.lock_fd >= 0:
            if not self._shared or _lock(self.lock_fd):
                with contextlib.suppress(FileNotFoundError):  # another process has removed it
                    folder = os.open(self.path, _DIRECTORY)
                    try:
                        _empty(self.path, folder)
                    finally:
                        os.close(folder)
            self.forget()

    def _undo(self) -> None:
        """Take a directory away that was just made, and could not be locked or marked."""
        for name in (_MARKER, _LOCK):
            (self.path / name).unlink(missing_ok=True)
        self.path.rmdir()
        self.forget()

    def forget(self) -> None:
        """Let go of the lock and leave the directory alone."""
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def _flock(path: Path, fd: int, how: int) -> None:
    """Lock the file of a directory; see flock(2).

    Raises:
        BlockingIOError: another process holds the lock.
        CallMissing: the file system has no locks.
    """
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        raise
    except OSError as error:
        raise file_lock_missing(path / _LOCK, error) from error


def _lock(fd: int) -> bool:
    """Lock it; False when another process holds the lock, the file was removed meanwhile, or its file system has no
    locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return os.fstat(fd).st_nlink > 0
