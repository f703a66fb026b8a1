"""The cluster's token, 32 bytes that every process of the cluster holds, and the places where it is found.

The places, in this order: the argument ``token`` of `zcactor.init`, the file that ``ZCACTOR_TOKEN_FILE`` names, the
variable ``ZCACTOR_TOKEN``, the file ``token`` beside the user's ``zcactor.toml``. Its written form is 64 hexadecimal
digits. The token is never taken from a command line and never logged: every user of a host can read command lines.

A holder of the token can run code in every process of the cluster. So a file that others can read is refused, not
warned about. One place has a rule of its own: where ``ZCACTOR_TOKEN_FILE`` names a file of a Secret that Kubernetes has
mounted, see `read_mounted_secret`.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zcactor.errors import AuthenticationError
from zcactor.folders import NoFolder, is_there, shared_by, user_folder, variable_of, writing

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "TOKEN_NBYTES", "default_file", "find_token", "make_token_file", "parse_token", "read_mounted_secret",
    "read_token_file",
]  # fmt: skip

TOKEN_NBYTES: Final = 32
"""Bytes of a token: as many as the digest of the HMAC that proves it, beyond which a key adds no strength (RFC 2104,
3)."""

_MOUNTED: Final = "mount the Secret with defaultMode 0440, and give the pod's securityContext an fsGroup"
"""The remedy where the mode of a mounted Secret is wrong."""


def default_file(environ: Mapping[str, str]) -> Path:
    """The path of the user's token when no other place is given: ``$XDG_CONFIG_HOME/zcactor/token``.

    Raises:
        AuthenticationError: the user has no folder for it.
    """
    try:
        return user_folder("config", environ) / "token"
    except NoFolder as error:
        raise AuthenticationError(f"there is no place for the token: {error}, or ZCACTOR_TOKEN to the token") from error


def parse_token(text: str, source: str) -> bytes:
    """Parse the written form of a token.

    Raises:
        AuthenticationError: `text` is not 64 hexadecimal digits. The message names `source`, and not the text.
    """
    text = text.strip()
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != TOKEN_NBYTES or len(text) != 2 * TOKEN_NBYTES:
        raise AuthenticationError(
            f"{source}: a token is {2 * TOKEN_NBYTES} hexadecimal digits, and this is something else of {len(text)} "
            "characters; make one with: zcactor token"
        )
    return token


def read_token_file(path: Path) -> bytes:
    """Read the token in `path`.

    Raises:
        FileNotFoundError: the file does not exist.
        AuthenticationError: the file is a link, belongs to another user, can be read or written by others, cannot be
            read, or holds no token.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening a pipe must not block
    except FileNotFoundError:
        raise
    except OSError as error:
        raise AuthenticationError(f"the token file {path} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise AuthenticationError(f"the token file {path} is no file")
        check_private("the token file", path, status, f"make a new one (rm {path}; zcactor token)")
        text = os.read(fd, 4 * TOKEN_NBYTES)
    finally:
        os.close(fd)
    return parse_token(text.decode("ascii", "replace"), str(path))


def read_mounted_secret(path: Path) -> bytes | None:
    """Read the token in a file of a Secret, as the kubelet of Kubernetes mounts it into a container.

    There the file is root's, and a link: ``token`` leads to ``..data/token``, and ``..data`` to a folder with one
    version of the Secret. Only root can have made that: the mount is read-only, and everything in it belongs to root.
    The file's group may read it, which is the group of the pod's volumes (``fsGroup``).

    Returns:
        The token; None where `path` is no such file, to which `read_token_file` applies.

    Raises:
        AuthenticationError: it is one, and others than root and the file's group can get at it, this process cannot
            read it, or it holds no token.
    """
    try:
        top = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        version = os.readlink("..data", dir_fd=top)
        if os.readlink(path.name, dir_fd=top) != f"..data/{path.name}" or "/" in version or version == "..":
            return None
        fd = os.open(f"{version}/{path.name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=top)
    except PermissionError:
        raise AuthenticationError(f"the token file {path} cannot be read by uid {os.geteuid()}; {_MOUNTED}") from None
    except OSError:  # there are no links, or they lead nowhere
        return None
    finally:
        folder = os.fstat(top)
        os.close(top)
    try:
        status = os.fstat(fd)
        read_only = bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY) and status.st_dev == folder.st_dev
        if not read_only or not stat.S_ISREG(status.st_mode) or (status.st_uid, folder.st_uid) != (0, 0):
            return None
        if status.st_mode & 0o037:
            raise AuthenticationError(
                f"the token file {path} has mode {stat.S_IMODE(status.st_mode):04o}: every user of the container can "
                f"get at it; {_MOUNTED}"
            )
        text = os.read(fd, 4 * TOKEN_NBYTES)
    finally:
        os.close(fd)
    return parse_token(text.decode("ascii", "replace"), str(path))


def check_private(what: str, path: Path, status: os.stat_result, remedy: str) -> None:
    """Check that a file with a secret belongs to this user, and that no other user may read or write it.

    Args:
        what: description of the file, for the message.
        path: path of the file, for the message.
        status: status of the open file.
        remedy: the next step for the user, for the message.

    Raises:
        AuthenticationError: the file belongs to another user, or its mode gives others access.
    """
    how = shared_by(status, 0o077)
    if how:
        ours = status.st_uid == os.geteuid()
        mend = f", or chmod 600 {path} if you know that nobody did" if ours else ""
        raise AuthenticationError(f"{what} {path} {how}; {remedy}{mend}")


def make_token_file(path: Path) -> bytes:
    """Make a new token and write it to `path`, which only this user can read.

    Raises:
        FileExistsError: `path` exists already.
        NoFolder: the file cannot be written.
    """
    token = secrets.token_bytes(TOKEN_NBYTES)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with writing(path, f"set {variable_of('config')} to a folder of yours"):
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)  # under any umask
            with open(fd, "w", encoding="ascii") as file:
                file.write(token.hex() + "\n")
            os.link(part, path)  # fails where the file exists, and a reader never sees half of it
        finally:
            part.unlink()
    return token


def find_token(argument: str | None, environ: Mapping[str, str]) -> tuple[bytes, str] | None:
    """Find the token in the places that the module's docstring lists.

    Args:
        argument: the token that the program passed, in its written form; it comes first.
        environ: the environment.

    Returns:
        The token and the name of its place; None where no place has one.

    Raises:
        AuthenticationError: the text or file that was found is not a token or is not safe, or ``ZCACTOR_TOKEN_FILE``
            names a file that does not exist.
    """
    if argument is not None:
        return parse_token(argument, "the argument token"), "the argument token"
    named = environ.get("ZCACTOR_TOKEN_FILE")
    if named:
        mounted = read_mounted_secret(Path(named))
        if mounted is not None:
            return mounted, named
        try:
            return read_token_file(Path(named)), named
        except FileNotFoundError:
            raise AuthenticationError(f"ZCACTOR_TOKEN_FILE names {named}, which does not exist") from None
    if environ.get("ZCACTOR_TOKEN"):
        return parse_token(environ["ZCACTOR_TOKEN"], "ZCACTOR_TOKEN"), "ZCACTOR_TOKEN"
    try:
        path = user_folder("config", environ) / "token"
        return (read_token_file(path), str(path)) if is_there(path) else None
    except (NoFolder, FileNotFoundError):
        return None
