"""The user's folders for settings, secrets and state, as the XDG Base Directory Specification has them.

A folder in which this process may not even look holds no file of the user's: programs run under other users' homes, and
in containers without one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "NoFolder", "expanded", "folder_problem", "is_there", "make_folder", "opened_at_once", "shared_by", "user_folder",
    "variable_of", "working_directory", "writing",
]  # fmt: skip

_PLACES: Final = {"config": ("XDG_CONFIG_HOME", ".config"), "state": ("XDG_STATE_HOME", ".local/state")}


class NoFolder(OSError):
    """A folder of the user's that is not there, or cannot be written to. The message has the remedy."""


def variable_of(kind: Literal["config", "state"]) -> str:
    """The name of the variable that names the folder around `user_folder`."""
    return _PLACES[kind][0]


def user_folder(kind: Literal["config", "state"], environ: Mapping[str, str]) -> Path:
    """The folder ``zcactor`` in ``$XDG_CONFIG_HOME`` or ``$XDG_STATE_HOME``, or below the home directory. It may be
    missing.

    Args:
        kind: ``"config"`` for settings and the token, ``"state"`` for logs and what heads and runs write down.
        environ: the environment. Relative paths in it are passed over, as the specification wants it.

    Raises:
        NoFolder: no variable names a folder, and the user has no home directory.
    """
    variable, below = _PLACES[kind]
    named = environ.get(variable, "")
    if os.path.isabs(named):
        return Path(named, "zcactor")
    return Path(_home(environ, variable), below, "zcactor")


def _home(environ: Mapping[str, str], variable: str) -> str:
    home = environ.get("HOME", "")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            home = ""
    if not os.path.isabs(home):
        raise NoFolder(
            f"HOME is not set to an absolute path, and user {os.getuid()} has no entry in the system's list of users: "
            f"set {variable} to a folder of yours"
        )
    return home


def expanded(path: str, environ: Mapping[str, str]) -> Path:
    """`path`, where ``~`` stands for this user's home directory, and ``~name`` for another's.

    Raises:
        NoFolder: that user has no home directory.
    """
    if not path.startswith("~"):
        return Path(path)
    name, _, rest = path[1:].partition("/")
    try:
        home = pwd.getpwnam(name).pw_dir if name else _home(environ, "HOME")
    except KeyError:
        raise NoFolder(f"{path}: there is no user {name!r}") from None
    return Path(home, rest)


def opened_at_once(path: str, flags: int) -> int:
    """The opener, for ``open``, of a file that a stranger may have made: a FIFO is opened without a wait for its
    writer, so that its status tells what it is."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def shared_by(status: os.stat_result, forbidden: int, *, by_root: bool = False) -> str:
    """The way in which others than this user can get at a file or folder, for a message; empty where none can.

    Args:
        status: of the open file, or of the folder.
        forbidden: the bits of its mode that let others do what they must not.
        by_root: whether it may belong to root, too.
    """
    if status.st_uid != os.geteuid() and not (by_root and status.st_uid == 0):
        return f"belongs to uid {status.st_uid}, and this process is uid {os.geteuid()}"
    if status.st_mode & forbidden:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}: others can get at it, and may have"
    return ""


def working_directory() -> str:
    """The path of the working directory; empty where it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def is_there(path: Path) -> bool:
    """Whether there is a file, as far as this process may look.

    Raises:
        OSError: the file system gave another answer than yes or no.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    return True


def folder_problem(kind: Literal["config", "state"], environ: Mapping[str, str]) -> str:
    """The reason why this user can write nothing to the folder, with the remedy; empty where that can be done.

    Nothing is made: the nearest folder that is there has to let this process write.
    """
    try:
        folder = user_folder(kind, environ)
    except NoFolder as error:
        return str(error)
    nearest = next(each for each in (folder, *folder.parents) if is_there(each))
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return ""
    why = "cannot be written to" if nearest.is_dir() else "is a file"
    return f"{folder} cannot be used, as {nearest} {why}: set {variable_of(kind)} to a folder of yours"


@contextlib.contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Make the folder around `path`, for this user alone, before the block writes the file.

    Args:
        path: the path of the file.
        remedy: the next step for the user, for the message.

    Raises:
        NoFolder: the folder cannot be made, or the block raised an ``OSError`` other than ``FileExistsError``.
    """
    try:
        make_folder(path.parent)
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise NoFolder(f"{path} cannot be written: {error.strerror or error}; {remedy}") from error


def make_folder(folder: Path) -> None:
    """Make a folder where it is missing, and those around it, with mode 0700 under any umask.

    Raises:
        OSError: one of them cannot be made, or something else has its name.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():  # else another process has made it at the same moment
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file") from None
        return
    folder.chmod(0o700)
