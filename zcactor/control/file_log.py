"""A head's log in a folder of its host: an SQLite database, and a lock, which the head holds as long as it leads.

Values are sealed (`zcactor.control.log_seal`), and only the head's user may read and write the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from zcactor.control.head_log import (
    MAX_NBYTES,
    Candidate,
    Deposed,
    LastingTerm,
    LeaderAt,
    LogInUse,
    LogUnavailable,
    LogUnusable,
    check_batch,
)
from zcactor.control.leading import Leading
from zcactor.control.log_seal import NOT_OURS, DoesNotOpen, LogSeal
from zcactor.folders import make_folder, shared_by

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from zcactor.control.head_log import Change, HeadState, Term

__all__ = ["FRESH", "FileLog", "file_system_of", "look_into"]

T = TypeVar("T")
NAME: Final = "log.db"
"""The name of the database in its folder."""
APPLICATION: Final = 0x7A636861
"""The database's application_id: ``zcha``."""
_BEGUN: Final = "-begun"
"""The end of the name of the file beside it."""
VERSION: Final = 2
"""The database's user_version."""
_REMOTE: Final = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "gpfs", "lustre", "nfs", "nfs4", "pvfs2",
        "smb3", "smbfs",
    }
)  # fmt: skip
"""File systems of other hosts. A write-ahead log needs memory that all users of the database share (sqlite.org/wal)."""
_SCHEMA: Final = """
CREATE TABLE entries (kind TEXT, key TEXT, value BLOB NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE terms (epoch INTEGER NOT NULL, log BLOB NOT NULL);
INSERT INTO terms VALUES (0, randomblob(16));
"""
_LARGEST_EPOCH: Final = 1 << 62
_ROOM: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
)
"""Results of SQLite that tell of the disk or of permissions, and not of the database."""
FRESH: Final = "start with --fresh to move it aside and begin a new cluster, or with --state DIR for another folder"


class _Begun(msgspec.Struct, frozen=True):
    """The facts of the database in a file beside it, so that a lost or older one is not taken for a new one."""

    epoch: int
    """The last term that has begun."""
    cluster: bool
    """Whether the database has the entry of a cluster."""


class FileLog:
    """The log of the only head of a host; see `zcactor.control.head_log.HeadLog`.

    Every statement runs in one thread, so the loop goes on. Batches of one turn of the loop are one transaction.

    Args:
        folder: the folder, made where it is missing.
        token: the cluster's token, under which values are sealed.
        fresh: whether a database that is there is moved aside.
        mounts: the text of ``/proc/self/mountinfo``; None reads it.
    """

    recipe_nbytes: int = MAX_NBYTES - (64 << 10)  # the rest is for keys, and for other entries of the batch

    def __init__(self, folder: Path, token: bytes, *, fresh: bool = False, mounts: str | None = None) -> None:
        self.path = folder / NAME
        self._folder = folder
        self._token = token
        self._seal = LogSeal(token, b"")
        self._fresh = fresh
        self._mounts = mounts
        self._leading = Leading()
        self._term: LastingTerm | None = None
        self._epoch = 0
        self._has_cluster = False
        self._lock_fd = -1
        self._database: sqlite3.Connection | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[tuple[Sequence[Change], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- terms

    async def campaign(self, me: Candidate) -> Term:
        if self._term is not None:
            raise LogInUse(str(self._folder), me)
        self._thread = ThreadPoolExecutor(1, "zcactor-log")
        try:
            self._epoch = await asyncio.shield(self._in_thread(lambda: self._open(me)))
        except BaseException:
            await self._close()
            raise
        self._term = LastingTerm(self._epoch)
        self._leading.lead(LeaderAt(self._epoch, me.address))
        return self._term

    def leaders(self) -> AsyncIterator[LeaderAt | None]:
        return self._leading.changes()

    async def resign(self, term: Term) -> None:
        if self._term is not None and self._term.epoch == term.epoch:
            await self.aclose()

    async def aclose(self) -> None:
        self._term = None
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._close()
        if self._leading.leader is not None:
            self._leading.lead(None)

    async def _close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(thread, self._let_go))
            thread.shutdown(wait=False)

    def _let_go(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _check(self, term: Term) -> None:
        if self._term is None or self._term.epoch != term.epoch:
            raise Deposed(term.epoch, self._epoch)

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        assert self._thread is not None
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    # ---------------------------------------------------------------- entries

    async def load(self, term: Term) -> HeadState:
        self._check(term)
        try:
            return await self._in_thread(self._load)
        except sqlite3.Error as error:
            raise LogUnavailable(str(self.path), f"it cannot be read: {error}") from error

    def _load(self) -> HeadState:
        state: dict[str, dict[str, bytes]] = {}
        assert self._database is not None
        for kind, key, sealed in self._database.execute("SELECT kind, key, value FROM entries"):
            try:
                value = self._seal.open(kind, key, sealed, latest=self._epoch)
            except DoesNotOpen:
                raise LogUnusable(
                    f"the log {self.path} has an entry {kind} {key!r} of somebody else: {NOT_OURS}; use the token with "
                    f"which the log was begun, or {FRESH}"
                ) from None
            state.setdefault(kind, {})[key] = value
        return state

    async def record(self, term: Term, changes: Sequence[Change]) -> None:
        check_batch(changes)
        self._check(term)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((tuple(changes), done))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_all())
        await done

    async def _write_all(self) -> None:
        """Write what is pending, and what becomes so meanwhile: each time all in one transaction."""
        while self._pending:
            batches, self._pending = self._pending, []
            failure: LogUnavailable | None = None
            try:
                await self._in_thread(partial(self._write, [change for each, _ in batches for change in each]))
            except sqlite3.Error as error:
                failure = LogUnavailable(str(self.path), f"it cannot be written: {error}")
            for _, done in batches:
                if not done.done():
                    done.set_result(None) if failure is None else done.set_exception(failure)
        self._writing = None

    def _write(self, changes: Sequence[Change]) -> None:
        database = self._database
        assert database is not None
        cluster = [value is not None for kind, _, value in changes if kind == "cluster"]
        if cluster and not cluster[-1]:
            self._note(cluster=False)  # before the entry goes: this head may be killed in between
        database.execute("BEGIN IMMEDIATE")
        try:
            for kind, key, value in changes:
                if value is None:
                    database.execute("DELETE FROM entries WHERE kind = ? AND key = ?", (kind, key))
                else:
                    sealed = self._seal.seal(kind, key, self._epoch, value)
                    database.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", (kind, key, sealed))
            database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled it back already
                database.execute("ROLLBACK")
            raise
        if cluster and cluster[-1] and not self._has_cluster:
            self._checkpoint(database)
            self._note(cluster=True)

    # ---------------------------------------------------------------- opening

    def _open(self, me: Candidate) -> int:
        """Lock the folder, open the database and begin a term. Returns its epoch."""
        try:
            make_folder(self._folder)
            self._refuse_remote()
            _refuse_others(self._folder)
            self._lock(me)
            if self._fresh:
                self._move_aside()
        except OSError as error:
            raise LogUnusable(
                f"{self._folder} cannot hold a log: {error.strerror}; give another folder with --state DIR"
            ) from error
        try:
            begun = self._begun()
            if not self.path.exists():
                if begun is not None:
                    raise LogUnusable(
                        f"the log {self.path} is missing, and its term {begun.epoch} has begun: put it back; or {FRESH}"
                    )
                self._make()
            self._database = database = self._connect(self.path)
            self._examine(database)
            self._compare(database, begun)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            database.execute("BEGIN IMMEDIATE")
            database.execute("UPDATE terms SET epoch = epoch + 1")
            epoch, name = _term_in(database, self.path)
            database.execute("COMMIT")
            self._checkpoint(database)
            self._epoch = epoch
            self._note(cluster=begun is not None and begun.cluster)
        except (sqlite3.Error, OSError) as error:
            if _is_for_room(error):
                raise LogUnusable(
                    f"the log {self.path} cannot be written: {error}; make room on its disk, or make it writable, and "
                    "start again"
                ) from error
            raise LogUnusable(f"the log {self.path} is damaged: {error}; {FRESH}") from error
        self._seal = LogSeal(self._token, name)
        return epoch

    def _begun(self) -> _Begun | None:
        """The facts beside the database; None beside a new one."""
        path = self.path.with_name(f"{self.path.name}{_BEGUN}")
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Begun)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LogUnusable(f"{path}, beside the log, is damaged: {error}; {FRESH}") from error

    def _note(self, *, cluster: bool) -> None:
        """Write beside the database that this term has begun, and whether there is the entry of a cluster."""
        self._has_cluster = cluster
        path = self.path.with_name(f"{self.path.name}{_BEGUN}")
        part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(_Begun(self._epoch, cluster)))
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        _sync(self._folder)

    @staticmethod
    def _checkpoint(database: sqlite3.Connection) -> None:
        """Bring all that is written into the database itself: it does not need its log of writes then."""
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _compare(self, database: sqlite3.Connection, begun: _Begun | None) -> None:
        """Check that the database is as late as what is known beside it.

        Raises:
            LogUnusable: it is not: it is an older copy, or its log of writes is lost.
        """
        epoch, _ = _term_in(database, self.path)
        if begun is None:
            return
        again = f"put {self.path} back together with {self.path.name}-wal; or {FRESH}"
        if epoch < begun.epoch:
            raise LogUnusable(f"the log {self.path} ends with term {epoch}, and term {begun.epoch} has begun: {again}")
        known = database.execute("SELECT count(*) FROM entries WHERE kind = 'cluster'").fetchone()[0]
        if begun.cluster and not known:
            raise LogUnusable(f"the log {self.path} has lost the entry of its cluster: {again}")

    def _refuse_remote(self) -> None:
        mounts = self._mounts
        if mounts is None:
            mounts = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
        kind = file_system_of(self._folder.resolve(), mounts)
        if kind in _REMOTE:
            raise LogUnusable(
                f"{self._folder} is on a file system of another host ({kind}), where the log is not safe; give a "
                "folder on this host with --state DIR"
            )

    def _lock(self, me: Candidate) -> None:
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with open(fd, "rb") as file:
                try:
                    holder = msgspec.json.decode(file.read(4096), type=Candidate)
                except msgspec.DecodeError:  # it has just taken the lock
                    holder = None
            raise LogInUse(str(self._folder), holder) from None
        self._lock_fd = fd
        left = os.pread(fd, 4096, 0).strip(b"\0")
        if left and not left.startswith(b"{"):
            raise LogUnusable(
                f"{self._folder / 'lock'} is not zcactor's: give a folder of the log's own with --state DIR"
            )
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(me), 0)

    def _move_aside(self) -> None:
        aside = f".old-{secrets.token_hex(4)}"
        for suffix in ("", "-wal", "-shm", _BEGUN):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{self.path}{suffix}", f"{self.path}{aside}{suffix}")

    @staticmethod
    def _connect(path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def _make(self) -> None:
        """Make an empty database beside its place, and move it there when it is whole: an empty file is a damaged log
        then, and not a new one.

        Raises:
            LogUnusable: there is a write-ahead log of a database that is gone.
            sqlite3.Error: the database cannot be made.
        """
        writes = self.path.with_name(f"{self.path.name}-wal")
        if writes.exists():
            raise LogUnusable(f"the log {self.path} is missing beside {writes}; {FRESH}")
        part = self.path.with_name(f"{self.path.name}.part")
        for suffix in ("", "-journal", "-wal", "-shm"):
            part.with_name(f"{part.name}{suffix}").unlink(missing_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with contextlib.closing(self._connect(part)) as database:
            # Nobody reads it before it has its name, so it is written to the disk once, and not at each of seven steps.
            database.execute("PRAGMA synchronous = OFF")
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; COMMIT;"
            )
        _sync(part)
        part.rename(self.path)
        _sync(self._folder)

    def _examine(self, database: sqlite3.Connection) -> None:
        """Check that the database is ours and whole.

        Raises:
            LogUnusable: it is another program's, a newer zcactor's, or damaged.
            sqlite3.Error: it is no database.
        """
        if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise LogUnusable(f"the log {self.path} is damaged: it is empty; {FRESH}")
        if _pragma(database, "application_id") != APPLICATION:
            raise LogUnusable(f"{self.path} is another program's database; give another folder with --state DIR")
        version = _pragma(database, "user_version")
        if version != VERSION:
            raise LogUnusable(
                f"the log {self.path} has version {version}, and this zcactor knows version {VERSION}: start the head "
                f"with the zcactor that wrote it; or {FRESH}"
            )
        found = _pragma(database, "quick_check")
        if found != "ok":
            raise LogUnusable(f"the log {self.path} is damaged: {found}; {FRESH}")


def _term_in(database: sqlite3.Connection, path: Path) -> tuple[int, bytes]:
    """The epoch of the last term in the log at `path`, and the log's name.

    Raises:
        LogUnusable: they are missing, or no such values.
    """
    found = database.execute("SELECT epoch, log FROM terms").fetchall()
    epoch, name = found[0] if len(found) == 1 else (None, None)
    if type(epoch) is not int or not 0 <= epoch < _LARGEST_EPOCH or type(name) is not bytes:
        raise LogUnusable(f"the log {path} is damaged: it has no number of its last term; {FRESH}")
    return epoch, name


def look_into(folder: Path, kind: str, token: bytes) -> dict[str, bytes]:
    """The entries of one kind in the log of `folder`, without a term: they may be those of a head that lives. Empty
    where there is no log, or none that can be read, or one of somebody else; the next term finds out why."""
    path = folder / NAME
    if not path.is_file():
        return {}
    try:
        _refuse_others(folder)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            epoch, name = _term_in(database, path)
            found = database.execute("SELECT key, value FROM entries WHERE kind = ?", (kind,)).fetchall()
            seal = LogSeal(token, name)
            return {key: seal.open(kind, key, sealed, latest=epoch) for key, sealed in found}
    except (sqlite3.Error, OSError, LogUnusable, DoesNotOpen):
        return {}


def _refuse_others(folder: Path) -> None:
    """Check that a log's folder and files are this user's, and that nobody else may write the one or read the others.

    Raises:
        LogUnusable: others can get at them.
        OSError: the folder cannot be looked at.
    """
    files = [(folder / f"{NAME}{suffix}", 0o077) for suffix in ("", "-wal", "-shm", "-journal", _BEGUN)]
    for path, forbidden in [(folder, 0o022), *files]:
        try:
            status = path.stat() if path is folder else path.lstat()
        except FileNotFoundError:
            continue
        is_kind = path is folder or stat.S_ISREG(status.st_mode)
        why = shared_by(status, forbidden) if is_kind else "is no file"
        if not why:
            continue
        raise LogUnusable(
            f"{path} {why}. A head runs what its log says: give a folder of your own with --state DIR, or run chmod "
            f"go-rwx {path} if you know that nobody else did"
        )


def _is_for_room(error: Exception) -> bool:
    """Whether an error tells of the disk or of permissions, and not of a database that is damaged."""
    if isinstance(error, OSError):
        return True
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in _ROOM and code != sqlite3.SQLITE_IOERR_SHORT_READ


def _sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _pragma(database: sqlite3.Connection, name: str) -> Any:
    return database.execute(f"PRAGMA {name}").fetchone()[0]


def file_system_of(path: Path, mounts: str) -> str:
    """The type of the file system on which `path` is, such as ``ext4``; empty where that is unknown.

    Args:
        path: an absolute path without links.
        mounts: the text of ``/proc/self/mountinfo`` (proc(5)).
    """
    best, kind = -1, ""
    for line in mounts.splitlines():
        left, dash, right = line.partition(" - ")
        fields = left.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape")  # blanks are \040
        if len(point) >= best and path.is_relative_to(point):
            best, kind = len(point), right.split(" ")[0]
    return kind
