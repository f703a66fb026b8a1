"""The special features of unix sockets: the peer's user, the passing of descriptors, and sockets at paths.

Only bytes before the first frame pass through here, so clarity counts for more than speed. The sockets are
non-blocking. All waiting happens on the running event loop, and leaves no watch behind when it is cancelled.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import socket
import stat
import struct
from typing import TYPE_CHECKING, Final

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.os_process import OsProcess
from zcactor.transport.stream.handshake_io import progressed, readable, writable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "connect",
    "directory_problem",
    "listen",
    "peer_descriptor",
    "peer_process",
    "peer_uid",
    "receive_descriptor",
    "send_descriptor",
    "set_send_buffer",
]

MAX_PATH_NBYTES: Final = 100
"""The longest path, of the 108 bytes of sockaddr_un.sun_path (unix(7)). Longer paths go through /proc."""
BACKLOG: Final = 1024
"""Connections that the kernel holds while the loop is busy. Further connectors get EAGAIN and try again."""
SEND_BUFFER_NBYTES: Final = 1 << 20
"""Bytes that a connection may have under way before its sender has to wait. net.core.wmem_max limits it."""
_FIRST_RETRY: Final = 0.001
_LAST_RETRY: Final = 0.05

_UCRED: Final = struct.Struct("3i")
_DESCRIPTOR_FOLLOWS: Final = b"\1"
_SO_PEERPIDFD: Final = 77
"""The option of unix(7), since Linux 6.5."""
_NO_DESCRIPTOR: Final = b"\0"


def directory_problem(directory: Path) -> str | None:
    """Return the reason against sockets in `directory`, with the remedy; None where there is no reason."""
    try:
        found = directory.lstat()
    except OSError as error:
        return f"the run directory {directory} cannot be used: {error.strerror}; create it with mode 0700"
    if not stat.S_ISDIR(found.st_mode):
        return f"the run directory {directory} is not a directory; remove it or choose another"
    if found.st_uid != os.geteuid():
        return f"the run directory {directory} belongs to uid {found.st_uid}, we are uid {os.geteuid()}; choose another"
    mode = stat.S_IMODE(found.st_mode)
    if mode != 0o700:
        return f"the run directory {directory} has mode {mode:04o}; others must not reach it: chmod 0700 {directory}"
    return None


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Return a name for `path` that fits into a socket address: `path` itself, or one in /proc/self/fd (proc(5))."""
    plain = os.fspath(path)
    if len(os.fsencode(plain)) <= MAX_PATH_NBYTES:
        yield plain
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def listen(path: Path) -> socket.socket:
    """Return a non-blocking socket that listens at `path`.

    Raises:
        OSError: the path exists, or its directory cannot be written to.
    """
    sock = _new_socket()
    try:
        with _short_path(path) as name:
            sock.bind(name)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


async def connect(path: Path) -> socket.socket:
    """Return a non-blocking socket that is connected to `path`. Waits as long as the listener's backlog is full.

    Raises:
        OSError: no process listens there, or this process may not connect.
    """
    sock = _new_socket()
    try:
        delay = _FIRST_RETRY
        with _short_path(path) as name:
            while True:
                try:
                    sock.connect(name)
                except BlockingIOError:
                    # unix(7): unlike TCP's EINPROGRESS, EAGAIN for a full backlog gives nothing to wait for
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, _LAST_RETRY)
                else:
                    return sock
    except BaseException:
        sock.close()
        raise


def peer_uid(sock: socket.socket) -> int:
    """Return the user of the process at the other end when it connected or listened (SO_PEERCRED, unix(7))."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def peer_process(sock: socket.socket) -> OsProcess:
    """Return the process that connected or listened at the other end (SO_PEERCRED)."""
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return OsProcess.of(pid)


def peer_descriptor(sock: socket.socket) -> int | None:
    """A descriptor (pidfd_open(2)) of the process that connected or listened at the other end, which the caller closes.
    None where the system gives none: the process has ended, or is in another PID namespace before Linux 6.5.

    Raises:
        OSError: no descriptor is left (EMFILE).
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno not in {errno.ENOPROTOOPT, errno.EINVAL, errno.ESRCH, errno.ENODATA}:
            raise
    try:
        return peer_process(sock).open()
    except ProcessLookupError:
        return None


def set_send_buffer(sock: socket.socket) -> None:
    """Let the system buffer up to `SEND_BUFFER_NBYTES` before a sender has to wait."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_NBYTES)


async def send_descriptor(sock: socket.socket, fd: int | None) -> None:
    """Pass a duplicate of `fd` to the peer, or the message that there is no descriptor. `fd` stays the caller's.

    Raises:
        OSError: the system reports the connection broken.
    """
    while True:
        try:
            if fd is None:
                sock.send(_NO_DESCRIPTOR)
            else:
                socket.send_fds(sock, [_DESCRIPTOR_FOLLOWS], [fd])
        except BlockingIOError:
            await writable(sock)
        else:
            return


async def receive_descriptor(sock: socket.socket) -> int | None:
    """Receive a descriptor of `send_descriptor`, which the caller closes, or None.

    Raises:
        ProtocolError: the peer passed another number of descriptors than it announced.
        ConnectionLost: the stream ends before that.
        OSError: the system reports the connection broken, or this process may open no more files (EMFILE).
    """
    fds = array.array("i")
    while True:
        try:
            # CMSG_LEN, not CMSG_SPACE, whose padding has room for a second descriptor (cmsg(3))
            word, ancillary, flags, _ = sock.recvmsg(1, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            await readable(sock)
        else:
            break
    progressed()
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if not word:
        problem: Exception = ConnectionLost("the peer closed the connection during the handshake")
    elif word == _DESCRIPTOR_FOLLOWS and len(fds) == 1 and not flags & socket.MSG_CTRUNC:
        return fds[0]
    elif word == _NO_DESCRIPTOR and not fds:
        return None
    elif word == _DESCRIPTOR_FOLLOWS and not fds and flags & socket.MSG_CTRUNC:
        problem = OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: there is none for the memory of a peer")
    else:
        problem = ProtocolError(f"the peer passed {len(fds)} descriptors with the word {word!r}")
    for fd in fds:
        os.close(fd)
    raise problem
