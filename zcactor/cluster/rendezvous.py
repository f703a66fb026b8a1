"""The ways in which the ranks of a run find its head: the name of its host and a port, or a file in a shared folder.

A head's process id is made from the run's id and the token (`cluster_of`). So a rank that meets a process at a port
knows whether that is the head of its own run, and not another run's or a foreign program.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import secrets
import socket
import stat
import time
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError, VersionMismatch, ZcactorError
from zcactor.folders import user_folder, writing
from zcactor.ids import ProcessId
from zcactor.transport.stream.probe import Identity, identify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zcactor.transport.stream.tls import Tls

__all__ = [
    "PORTS", "Meeting", "address_text", "addresses_of", "bindable", "cluster_of", "first_port", "folder_of", "living",
    "outward", "seek", "sweep_meetings",
]  # fmt: skip

PORTS: Final = 16
"""The ports that a head tries, one after the other, and at which the others look for it."""
_FIRST, _SPAN = 20000, 10000
"""The range from which a run's first port is taken: below the ports that Linux gives to outgoing connections
(net.ipv4.ip_local_port_range begins at 32768)."""
_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
"""Seconds between two looks for the head, at first and at last."""
_OWN_NAME: Final = "127.0.1.1"
"""The address that Debian's installer gives to a host's own name in /etc/hosts. Other hosts know that name by another
address."""
_OLD: Final = 86400.0
"""Seconds after which the file of a run is removed by a later run: its head was killed."""
_NAME: Final = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]{16})?")
"""The names of files of runs, and of those that are being written."""
_NOTE_NBYTES: Final = 4096
"""Bytes that are read of the file of a run: more than it has."""


def first_port(run: str) -> int:
    """The first of the `PORTS` ports of a run's head."""
    return _FIRST + int.from_bytes(blake2b(run.encode(), digest_size=4).digest(), "big") % _SPAN


def cluster_of(run: str, token: bytes) -> ProcessId:
    """The process id of the head of the run called `run`. Without the token nobody can foretell it."""
    return ProcessId(blake2b(run.encode(), key=token, digest_size=16).digest())


def address_text(host: str, port: int) -> str:
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def outward() -> str:
    """The address of this host from which packets to other hosts go out; the loopback address where there is no way
    out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737); nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])


def addresses_of(name: str) -> list[str]:
    """The IP addresses of a host.

    Raises:
        ConnectionLost: no host has this name.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        raise ConnectionLost(f"no host is called {name!r}: {getattr(error, 'strerror', None) or error}") from error
    texts = dict.fromkeys(str(place[0]) for *_, place in found)
    return list(dict.fromkeys(outward() if text == _OWN_NAME else text for text in texts))


def bindable(host: str, port: int) -> bool:
    """Whether a process may listen at `port` of the address `host` of this machine now.

    Raises:
        OSError: this machine does not have the address, or the port is not for this user.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)  # without it, two processes with SO_REUSEADDR may both bind
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def folder_of(environ: Mapping[str, str]) -> Path:
    """The folder in which ranks find each other: ``ZCACTOR_RENDEZVOUS``, or ``$XDG_STATE_HOME/zcactor/runs``.

    Raises:
        NoFolder: the user has no folder for it.
    """
    named = environ.get("ZCACTOR_RENDEZVOUS")
    if named:
        return Path(named)
    return user_folder("state", environ) / "runs"


class _Note(msgspec.Struct, forbid_unknown_fields=True):
    """The contents of a run's file."""

    run: str
    address: str
    host: str
    pid: int


def _name_of(run: str) -> str:
    """The name of a run's file."""
    return blake2b(run.encode(), digest_size=16).hexdigest()


class Meeting:
    """The file by which the ranks of a run find its head.

    Args:
        folder: the folder that all hosts share.
        run: the id of the run.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._run = run
        self.path = folder / _name_of(run)

    def look(self) -> str | None:
        """The head's address, ``host:port``; None as long as the file is not there.

        Raises:
            AuthenticationError: the file belongs to another user, or others may write it.
            OSError: it cannot be read.
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not stat.S_ISREG(status.st_mode):
                raise AuthenticationError(
                    f"{self.path} belongs to uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}: only "
                    "this user may write the plain file by which ranks find each other; remove it"
                )
            try:
                note = msgspec.json.decode(file.read(_NOTE_NBYTES), type=_Note)
            except msgspec.DecodeError:
                return None
        return note.address if note.run == self._run else None

    def publish(self, address: str) -> None:
        """Write the head's address.

        Raises:
            NoFolder: the file cannot be written.
        """
        part = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}")
        with writing(self.path, "set ZCACTOR_RENDEZVOUS to a folder that all hosts share"):
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(_Note(self._run, address, socket.gethostname(), os.getpid())))
            part.rename(self.path)

    def remove(self, address: str) -> None:
        """Remove the file, unless another head has written it meanwhile."""
        with contextlib.suppress(OSError, AuthenticationError):
            if self.look() == address:
                self.path.unlink()


def sweep_meetings(folder: Path, now: float) -> None:
    """Remove the files of runs in `folder` that are older than a day. The folder may be one that users have put their
    own files into: a file of a run is this user's, has the name that belongs to the run in it, and nothing else in it.

    Args:
        folder: see `folder_of`.
        now: seconds since the epoch.
    """
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    _sweep_one(path, now - _OLD)


def _sweep_one(path: Path, before: float) -> None:
    """Remove the file at `path` where it is one of a run and was last written earlier than `before`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mtime >= before:
            return
        try:
            note = msgspec.json.decode(file.read(_NOTE_NBYTES), type=_Note)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if path.name.partition(".")[0] == _name_of(note.run) and os.path.samestat(path.lstat(), status):
            path.unlink()


async def seek(
    places: Callable[[], Sequence[str]], run: str, token: Callable[[], bytes | None], tls: Tls | None, deadline: float,
    *, exact: bool,
) -> str:  # fmt: skip
    """Look for the head of a run until it answers.

    Args:
        places: the addresses, ``host:port``, at which it may be now; called before each look. It may raise
            `ConnectionLost`, with the reason why there are no places yet.
        run: the id of the run.
        token: the cluster's token now; None where there is no token yet.
        tls: the certificates where all bytes pass through TLS, otherwise None.
        deadline: the time of giving up, in seconds of ``time.monotonic()``.
        exact: whether the head is nowhere else. A process there that refuses this one is an error then, and not a
            stranger.

    Returns:
        The address at which it answers.

    Raises:
        ConnectionLost: it did not answer in time. The message says what was found instead.
        AuthenticationError: there is no token, or the head has another one.
        VersionMismatch: the head has another version of the protocol or of Python.
    """
    pause = _PAUSE
    asked: dict[str, asyncio.Task[Identity]] = {}
    seen: dict[str, str] = {}
    try:
        while True:
            secret = token()
            nowhere = "no process has said where it is"
            try:
                found = places()
            except ConnectionLost as error:
                found, nowhere = (), str(error.args[0])
            if secret is not None:
                for address in found:
                    if address not in asked:
                        asked[address] = asyncio.create_task(identify(address, secret, tls))
            if asked:  # a stranger that accepts and is silent is not waited for
                await asyncio.wait(asked.values(), timeout=pause)
            for address in [address for address, task in asked.items() if task.done()]:
                task = asked.pop(address)
                seen[address] = _reason(address, task, exact=exact)
                if not seen[address]:
                    assert secret is not None
                    if task.result().process == cluster_of(run, secret):
                        return address
                    seen[address] = f"{address}: the head of another run or cluster is there"
            if time.monotonic() + pause > deadline:
                if secret is None:
                    raise AuthenticationError("there is no token")
                raise ConnectionLost("; ".join(seen[address] for address in found if address in seen) or nowhere)
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)


def _reason(address: str, task: asyncio.Task[Identity], *, exact: bool) -> str:
    """The reason why the process at `address` is not the head; empty where it has identified itself."""
    try:
        task.result()
    except (AuthenticationError, VersionMismatch) as error:
        if exact:
            raise
        return str(error)
    except ProtocolError:
        return f"{address}: a program listens there that is not zcactor's"
    except ConnectionLost as error:
        return str(error.args[0])
    return ""


async def living(address: str, run: str, token: bytes, tls: Tls | None) -> bool:
    """Whether the head of the run called `run` answers at `address`."""
    try:
        return (await identify(address, token, tls)).process == cluster_of(run, token)
    except ZcactorError:
        return False
