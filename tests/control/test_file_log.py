"""The log in a folder: damage, other programs, full disks, and heads that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import sqlite3
import stat
from pathlib import Path

import pytest

from tests.conformance.head_log import ONE, TWO, HeadLogTests, Make
from tests.driver.programs import Program
from zcactor.control.entries import emptying_changes, opened_change
from zcactor.control.file_log import VERSION, FileLog, file_system_of, look_into
from zcactor.control.head_log import Change, LogInUse, LogUnavailable, LogUnusable
from zcactor.ids import ProcessId

TOKEN = bytes(32)


class TestFileLog(HeadLogTests):
    """The suite for `FileLog`."""

    waits = False

    @pytest.fixture
    def make(self, tmp_path: Path) -> Make:
        return lambda: FileLog(tmp_path / "state" / "n1-7433", TOKEN)


async def written(folder: Path, *changes: Change) -> Path:
    """A log with entries, which nobody uses. Returns its file."""
    log = FileLog(folder, TOKEN)
    term = await log.campaign(ONE)
    await log.record(term, changes or [Change("name", "a", b"1")])
    await log.aclose()
    return log.path


async def refused(folder: Path, **options: object) -> str:
    """The message of a log that cannot be used, now and the next time: its folder is not left locked."""
    messages = []
    for _ in range(2):
        log = FileLog(folder, TOKEN, **options)  # type: ignore[arg-type]
        with pytest.raises(LogUnusable) as raised:
            await log.campaign(ONE)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    return messages[0]


async def test_only_its_user_reads_it(tmp_path: Path) -> None:
    path = await written(tmp_path / "state")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o600}


@pytest.mark.parametrize("damage", ["text", "half", "empty", "garbled"])
async def test_a_log_that_is_damaged(tmp_path: Path, damage: str) -> None:
    path = await written(tmp_path, *(Change("actor", str(number), bytes(500)) for number in range(100)))
    data = path.read_bytes()
    half, garbled = data[: len(data) // 2], data[:4096] + bytes(len(data) - 4096)
    path.write_bytes({"text": b"no database" * 100, "half": half, "empty": b"", "garbled": garbled}[damage])
    message = await refused(tmp_path)
    assert str(path) in message and "damaged" in message and "start with --fresh to move it aside" in message


async def test_a_database_that_is_gone_beside_its_log_of_writes(tmp_path: Path) -> None:
    path = await written(tmp_path)
    path.rename(tmp_path / "log.db-wal")
    assert "is missing, and its term 1 has begun" in await refused(tmp_path)
    (tmp_path / "log.db-begun").unlink()
    assert "is missing beside" in await refused(tmp_path)


async def test_nothing_is_taken_for_empty(tmp_path: Path) -> None:
    """The file beside the database tells that it had more."""
    path = await written(tmp_path, opened_change(ProcessId(bytes(16)), "a:1"))
    kept = {each.name: each.read_bytes() for each in tmp_path.iterdir()}

    def restore() -> None:
        for name, data in kept.items():
            (tmp_path / name).write_bytes(data)
            (tmp_path / name).chmod(0o600)

    path.unlink()
    assert f"the log {path} is missing, and its term 1 has begun: put it back; or start" in await refused(tmp_path)
    restore()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM entries WHERE kind = 'cluster'")
        database.commit()
    assert "has lost the entry of its cluster: put" in await refused(tmp_path)
    restore()
    log = FileLog(tmp_path, TOKEN)
    await log.campaign(ONE)
    await log.aclose()
    path.write_bytes(kept[path.name])
    assert f"the log {path} ends with term 1, and term 2 has begun: put {path} back" in await refused(tmp_path)
    (tmp_path / "log.db-begun").write_bytes(b"{}")
    assert "beside the log, is damaged" in await refused(tmp_path)
    log = FileLog(tmp_path, TOKEN, fresh=True)
    assert await log.load(await log.campaign(ONE)) == {}
    await log.aclose()


async def test_a_term_that_has_begun_needs_no_log_of_writes(tmp_path: Path) -> None:
    """A head that is killed leaves its beginning in the database itself."""
    log = FileLog(tmp_path / "log", TOKEN)
    term = await log.campaign(ONE)
    await log.record(term, [opened_change(ProcessId(bytes(16)), "a:1")])
    (tmp_path / "copy").mkdir()
    for name in ("log.db", "log.db-begun"):
        shutil.copy(tmp_path / "log" / name, tmp_path / "copy")
    later = FileLog(tmp_path / "copy", TOKEN)
    again = await later.campaign(ONE)
    assert again.epoch == 2
    assert set(await later.load(again)) == {"cluster"}
    await later.aclose()
    await log.record(term, emptying_changes({"cluster": {"state": b""}}))
    await log.aclose()
    log = FileLog(tmp_path / "log", TOKEN)
    assert await log.load(await log.campaign(ONE)) == {}, "a cluster that has ended is gone by order"
    await log.aclose()


@pytest.mark.parametrize("statement", ["UPDATE terms SET epoch = 'abc'", "DELETE FROM terms",
                                       "UPDATE terms SET epoch = 9223372036854775807"])  # fmt: skip
async def test_a_term_without_a_number(tmp_path: Path, statement: str) -> None:
    path = await written(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(statement)
        database.commit()
    assert "is damaged: it has no number of its last term; start with --fresh" in await refused(tmp_path)


async def test_a_disk_without_room_is_no_reason_to_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileLog, "_make", full)
    message = await refused(tmp_path)
    assert "No space left on device; make room on its disk" in message
    assert "--fresh" not in message


async def test_a_file_of_somebody_else_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("my notes")
    assert f"{tmp_path / 'lock'} is not zcactor's" in await refused(tmp_path)
    assert (tmp_path / "lock").read_text() == "my notes"


async def test_a_log_that_is_moved_aside(tmp_path: Path) -> None:
    path = await written(tmp_path)
    before = path.read_bytes()
    log = FileLog(tmp_path, TOKEN, fresh=True)
    term = await log.campaign(ONE)
    assert await log.load(term) == {}
    await log.aclose()
    (aside,) = [path for path in tmp_path.glob("log.db.old-*") if not path.name.endswith("-begun")]
    assert aside.read_bytes() == before


async def test_a_log_of_another_version_or_program(tmp_path: Path) -> None:
    path = await written(tmp_path / "newer")
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {VERSION + 1}")
    database.close()
    message = await refused(path.parent)
    assert f"has version {VERSION + 1}, and this zcactor knows version {VERSION}" in message
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "log.db"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE notes (text)")
    database.close()
    other.chmod(0o600)
    assert f"{other} is another program's database" in await refused(other.parent)


async def test_a_folder_that_cannot_hold_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert f"cannot hold a log: {tmp_path}/file is a file" in await refused(tmp_path / "file")
    (tmp_path / "state" / "log.db").mkdir(parents=True)
    log = FileLog(tmp_path / "state", TOKEN)
    with pytest.raises(LogUnusable, match="log.db is no file"):
        await log.campaign(ONE)


async def test_a_file_system_of_another_host(tmp_path: Path) -> None:
    mounts = f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:9 / {tmp_path} rw - nfs4 server:/home rw\n"
    message = await refused(tmp_path / "state", mounts=mounts)
    assert "on a file system of another host (nfs4)" in message


def test_file_systems() -> None:
    mounts = (
        "1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "2 1 0:9 / /home rw - nfs4 server:/home rw\n"
        "3 2 0:7 / /home/my\\040disk rw - xfs /dev/sdb rw\n"
        "nonsense\n"
    )
    assert file_system_of(Path("/var/lib"), mounts) == "ext4"
    assert file_system_of(Path("/homework"), mounts) == "ext4"
    assert file_system_of(Path("/home/me"), mounts) == "nfs4"
    assert file_system_of(Path("/home/my disk/state"), mounts) == "xfs"
    assert file_system_of(Path("/home"), "") == ""
    assert file_system_of(Path("/"), Path("/proc/self/mountinfo").read_text())


async def test_a_full_disk(tmp_path: Path) -> None:
    log = FileLog(tmp_path, TOKEN)
    term = await log.campaign(ONE)
    await log.record(term, [Change("name", "a", b"1")])
    assert log._database is not None
    pages = log._database.execute("PRAGMA page_count").fetchone()[0]
    log._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LogUnavailable, match=f"{log.path}: it cannot be written: database or disk is full") as raised:
        await log.record(term, [Change("name", "a", b"2"), Change("recipe", "r", bytes(100_000))])
    assert raised.value.log == str(log.path)
    assert await log.load(term) == {"name": {"a": b"1"}}
    log._database.execute(f"PRAGMA max_page_count = {pages + 1000}")
    await log.record(term, [Change("recipe", "r", bytes(100_000))])
    assert set(await log.load(term)) == {"name", "recipe"}
    await log.aclose()


async def test_batches_of_one_turn_are_one_transaction(tmp_path: Path) -> None:
    log = FileLog(tmp_path, TOKEN)
    term = await log.campaign(ONE)
    commits: list[str] = []
    assert log._database is not None
    log._database.set_trace_callback(lambda statement: commits.append(statement) if statement == "COMMIT" else None)
    await asyncio.gather(*(log.record(term, [Change("name", str(number), b"x")]) for number in range(30)))
    assert len(commits) == 1
    given_up = asyncio.ensure_future(log.record(term, [Change("name", "later", b"x")]))
    await asyncio.sleep(0)
    given_up.cancel()
    await log.aclose()
    assert given_up.cancelled()
    after = FileLog(tmp_path, TOKEN)
    assert len((await after.load(await after.campaign(ONE)))["name"]) == 31
    await after.aclose()


KILLED = """
from pathlib import Path
from zcactor.control.file_log import FileLog
from zcactor.control.head_log import Candidate, Change
async def main():
    log = FileLog(Path(FOLDER), bytes(32))
    term = await log.campaign(Candidate("10.0.0.1:7433", "n1", os.getpid()))
    number = 0
    while True:
        await log.record(term, [Change("name", str(number), b"x"), Change("cluster", "last", b"%d" % number)])
        tell(durable=number)
        number += 1
zc.run(main())
"""


@pytest.mark.slow
async def test_what_was_recorded_outlives_a_kill(tmp_path: Path) -> None:
    with Program(f"FOLDER = {str(tmp_path)!r}\n{KILLED}") as program:
        durable = max(program.told("durable") for _ in range(20))
        second = FileLog(tmp_path, TOKEN)
        with pytest.raises(LogInUse, match=rf"the head at 10.0.0.1:7433 on n1 \(pid {program.pid}\)"):
            await second.campaign(TWO)
        program.process.kill()
        assert program.status() == -signal.SIGKILL
    state = await second.load(await second.campaign(TWO))
    last = int(state["cluster"]["last"])
    assert last >= durable
    assert set(state["name"]) == {str(number) for number in range(last + 1)}
    await second.aclose()


async def test_a_look_without_a_term(tmp_path: Path) -> None:
    assert look_into(tmp_path, "name", TOKEN) == {}
    log = FileLog(tmp_path, TOKEN)
    term = await log.campaign(ONE)
    await log.record(term, [Change("name", "a", b"1"), Change("actor", "b", b"2")])
    assert look_into(tmp_path, "name", TOKEN) == {"a": b"1"}, "though its head lives"
    await log.aclose()
    assert look_into(tmp_path, "actor", TOKEN) == {"b": b"2"}
    log.path.write_bytes(b"nonsense" * 100)
    assert look_into(tmp_path, "actor", TOKEN) == {}
