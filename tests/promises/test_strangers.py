"""The promises of SECURITY.md about those without the token: the bytes that are obeyed, and those that become code."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import sqlite3
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from tests.conformance.head_log import ONE
from tests.control.fake_etcd import FakeEtcd
from zcactor.assembly.endpoints import make_endpoint
from zcactor.cluster.records import NodeFile, list_nodes, started_at, write_record
from zcactor.config import FILE_NAME, Config, load_config
from zcactor.control.etcd_log import EtcdLog
from zcactor.control.etcd_messages import text_of
from zcactor.control.file_log import FileLog, look_into
from zcactor.control.head_log import Change, LogUnusable
from zcactor.objectstore.store import Store
from zcactor.transport.stream import aes
from zcactor.workers.run_directory import PREFIX, RunDirectory, shared_names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STRANGER = 65534


# ---- settings


@pytest.mark.parametrize("kind", ["pipe", "folder", "circle"])
def test_settings_that_are_no_file_are_named_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / FILE_NAME
    if kind == "pipe":
        os.mkfifo(path)  # nobody writes to it
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    with pytest.raises(ValueError, match=f"{path} is no file of settings.*: remove it, or start the program elsewhere"):
        load_config(directory=tmp_path, user_directory=tmp_path / "none", environ={})


@pytest.mark.root
@pytest.mark.parametrize("place", ["directory", "user_directory"])
@pytest.mark.parametrize("theirs", ["file", "folder"])
def test_settings_of_another_user_are_not_obeyed(tmp_path: Path, place: str, theirs: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / FILE_NAME
    file.write_text('address = "10.0.0.9:7433"\n')
    options: Any = {"directory": tmp_path, "user_directory": tmp_path, place: folder, "environ": {}}
    assert load_config(**options)[0].address == "10.0.0.9:7433"
    owned = file if theirs == "file" else folder
    os.chown(owned, STRANGER, STRANGER)
    with pytest.raises(ValueError, match=f"{file} is not obeyed: the {theirs} {owned} belongs to uid {STRANGER}"):
        load_config(**options)


@pytest.mark.parametrize(("mode", "what"), [(0o666, "file"), (0o1777, "folder"), (0o777, "folder")])
def test_settings_that_others_may_write_are_not_obeyed(tmp_path: Path, mode: int, what: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / FILE_NAME
    options: Any = {"directory": folder, "user_directory": tmp_path, "environ": {}}
    changed = file if what == "file" else folder
    folder.chmod(mode if what == "folder" else 0o755)
    assert load_config(**options)[0] == Config(), "no file, so nobody's settings"
    file.write_text("recv_depth = 7\n")
    changed.chmod(mode)
    why = f"{what} {changed} has mode {mode:04o}: others can get at it, and may have.*start the prog"
    with pytest.raises(ValueError, match=why):
        load_config(**options)
    changed.chmod(mode & ~0o022)
    assert load_config(**options)[0].recv_depth == 7


@pytest.mark.root
@pytest.mark.parametrize(("gid", "obeyed"), [(0, True), (STRANGER, False)])
def test_a_group_of_the_user_alone_may_write_settings(tmp_path: Path, gid: int, obeyed: bool) -> None:
    file = tmp_path / FILE_NAME
    file.write_text("recv_depth = 7\n")
    os.chown(file, -1, gid)
    file.chmod(0o664)
    options: Any = {"directory": tmp_path, "user_directory": tmp_path / "none", "environ": {}}
    if obeyed:
        assert load_config(**options)[0].recv_depth == 7
        return
    with pytest.raises(ValueError, match="has mode 0664: others can get at it, and may have"):
        load_config(**options)


# ---- frames on this host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.1"])
@pytest.mark.parametrize("transports", ["tcp", "verbs,tcp"])
def test_frames_over_tcp_are_sealed_at_every_address(tmp_path: Path, host: str, transports: str) -> None:
    with contextlib.closing(Store(1 << 20, b"s" * 16)) as store:
        made: Any = make_endpoint(Config(host=host, transports=transports), tmp_path, b"p" * 16, bytes(32), store)
        assert all(way._sealing for way in made.ways)
        off = Config(host=host, transports=transports, security="off")
        plain: Any = make_endpoint(off, tmp_path, b"p" * 16, bytes(32), store)
        assert not any(way._sealing for way in plain.ways)


# ---- a head's log in etcd


def _kv(etcd: FakeEtcd, name: str, key: str) -> dict[str, Any]:
    return etcd.keys[f"/zcactor/{name}/{key}".encode()]


def _plant(etcd: FakeEtcd, name: str, key: str, kv: dict[str, Any]) -> None:
    """Write what somebody who can write to etcd has found elsewhere there."""
    etcd._put({**kv, "key": text_of(f"/zcactor/{name}/{key}".encode())})


async def _led(etcd: FakeEtcd, name: str, token: bytes, *changes: Change) -> EtcdLog:
    log = EtcdLog.at(f"{etcd.url.rpartition('/')[0]}/{name}", token, {})
    term = await log.campaign(ONE)
    await log.record(term, changes)
    return log


SECRET = b"hunter2-secret-argument"
RECIPE = Change("recipe", "r", SECRET)


async def test_who_can_write_to_etcd_reads_no_value_there() -> None:
    async with FakeEtcd() as etcd:
        log = await _led(etcd, "prod", bytes(32), RECIPE)
        log.announce(ONE)
        await log.cluster(b"c" * 16)
        written = b"".join(base64.b64decode(kv["value"]) for kv in etcd.keys.values())
        assert SECRET not in written and ONE.address.encode() not in written and b"c" * 16 not in written
        await log.aclose()


@pytest.mark.parametrize("source", ["mallory's", "another key", "plain"])
async def test_who_can_write_to_etcd_adds_no_entry(source: str) -> None:
    """With values that he has made in a cluster of his own, or has moved, a head would run his code."""
    async with FakeEtcd() as etcd:
        log = await _led(etcd, "prod", bytes(32), RECIPE)
        await log.aclose()
        theirs = await _led(etcd, "mallory", b"m" * 32, RECIPE)
        await theirs.aclose()
        kv = {
            "mallory's": _kv(etcd, "mallory", "entries/recipe/r"), "another key": _kv(etcd, "prod", "entries/recipe/r"),
            "plain": {"value": text_of(b"a pickle")},
        }[source]  # fmt: skip
        _plant(etcd, "prod", "entries/recipe/x", kv)
        log = EtcdLog.at(f"{etcd.url.rpartition('/')[0]}/prod", bytes(32), {})
        term = await log.campaign(ONE)
        words = "the key /zcactor/prod/entries/recipe/x in etcd was written by somebody else.*etcdctl del --prefix"
        with pytest.raises(LogUnusable, match=words):
            await log.load(term)
        await log.aclose()


async def test_who_can_write_to_etcd_makes_nobody_the_head_or_a_candidate() -> None:
    async with FakeEtcd() as etcd:
        log = await _led(etcd, "prod", bytes(32), RECIPE)
        theirs = await _led(etcd, "mallory", b"m" * 32)
        theirs.announce(ONE)
        while etcd.count("announce") < 1 or not any(b"/mallory/candidates/" in key for key in etcd.keys):
            await asyncio.sleep(0)
        _plant(etcd, "prod", f"candidates/{ONE.address}", _kv(etcd, "mallory", f"candidates/{ONE.address}"))
        assert await log.candidates() == []
        follower = EtcdLog.at(f"{etcd.url.rpartition('/')[0]}/prod", bytes(32), {})
        leaders = follower.leaders()
        assert await anext(leaders) is not None
        own = dict(_kv(etcd, "prod", "head"))
        _plant(etcd, "prod", "head", _kv(etcd, "mallory", "head"))
        with pytest.raises(LogUnusable, match="the key /zcactor/prod/head in etcd was written by somebody else"):
            await anext(leaders)
        _plant(etcd, "prod", "head", {**own, "lease": _kv(etcd, "mallory", "head")["lease"]})
        other = EtcdLog.at(f"{etcd.url.rpartition('/')[0]}/prod", bytes(32), {})
        with pytest.raises(LogUnusable, match="/zcactor/prod/head"):
            await anext(other.leaders())
        _plant(etcd, "prod", "cluster", {"value": text_of(b"m" * 16)})
        _plant(etcd, "prod", "head", own)
        with pytest.raises(LogUnusable, match="/zcactor/prod/cluster"):
            await log.cluster(b"c" * 16)
        for each in (log, theirs, follower, other):
            await each.aclose()


# ---- a head's log in a folder


async def _written(folder: Path, token: bytes, *changes: Change) -> Path:
    log = FileLog(folder, token)
    await log.record(await log.campaign(ONE), changes)
    await log.aclose()
    return log.path


async def test_a_log_of_another_token_is_refused(tmp_path: Path) -> None:
    path = await _written(tmp_path, b"m" * 32, RECIPE)
    log = FileLog(tmp_path, bytes(32))
    term = await log.campaign(ONE)
    with pytest.raises(LogUnusable, match=f"{path} has an entry recipe 'r' of somebody else.*start with --fresh"):
        await log.load(term)
    await log.aclose()
    assert look_into(tmp_path, "recipe", bytes(32)) == {}
    assert look_into(tmp_path, "recipe", b"m" * 32) == {"r": SECRET}
    assert SECRET not in path.read_bytes()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("UPDATE entries SET value = 5", "has an entry recipe 'r' of somebody else"),
        ("DELETE FROM terms", "no number of its last term"),
        ("UPDATE terms SET epoch = 'x'", "no number of its last term"),
        ("UPDATE terms SET log = 'x'", "no number of its last term"),
    ],
)
async def test_a_log_with_values_of_other_types_is_refused(tmp_path: Path, change: str, why: str) -> None:
    path = await _written(tmp_path, bytes(32), RECIPE)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(change)
    assert look_into(tmp_path, "recipe", bytes(32)) == {}
    log = FileLog(tmp_path, bytes(32))
    with pytest.raises(LogUnusable, match=why):
        await log.load(await log.campaign(ONE))
    await log.aclose()


async def test_a_pipe_in_the_place_of_a_logs_file_is_refused(tmp_path: Path) -> None:
    path = await _written(tmp_path, bytes(32), RECIPE)
    os.mkfifo(path.with_name(f"{path.name}-journal"), 0o600)
    with pytest.raises(LogUnusable, match="-journal is no file"):
        await FileLog(tmp_path, bytes(32)).campaign(ONE)


@pytest.mark.parametrize("change", ["the entries", "the epoch"])
async def test_entries_of_another_log_or_time_are_refused(tmp_path: Path, change: str) -> None:
    path = await _written(tmp_path / "a", bytes(32), RECIPE)
    other = await _written(tmp_path / "b", bytes(32), RECIPE)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        if change == "the entries":
            database.execute("ATTACH ? AS other", (str(other),))
            database.execute("UPDATE entries SET value = (SELECT value FROM other.entries)")
        else:
            database.execute("UPDATE terms SET epoch = -1")
    log = FileLog(path.parent, bytes(32))
    refusals = {"the entries": "has an entry recipe 'r' of somebody else", "the epoch": "no number of its last term"}
    with pytest.raises(LogUnusable, match=refusals[change]):
        await log.load(await log.campaign(ONE))
    await log.aclose()


@pytest.mark.parametrize(
    ("which", "how"),
    [
        ("", "mode"), ("-wal", "mode"), ("folder", "mode"), ("", "link"), ("-wal", "link"),
        *(pytest.param(which, "owner", marks=pytest.mark.root) for which in ("", "-wal", "folder")),
    ],
)  # fmt: skip
async def test_a_log_that_others_can_get_at_is_refused(tmp_path: Path, which: str, how: str) -> None:
    path = await _written(tmp_path / "state", bytes(32), RECIPE)
    target = path.parent if which == "folder" else path.with_name(path.name + which)
    if which == "-wal":
        target.touch(0o600)
    if how == "mode":
        target.chmod(0o777 if which == "folder" else 0o644)
    elif how == "owner":
        os.chown(target, STRANGER, STRANGER)
    else:
        target.rename(tmp_path / "elsewhere")
        target.symlink_to(tmp_path / "elsewhere")
    words = {"mode": "others can get at it", "owner": f"belongs to uid {STRANGER}", "link": "is no file"}[how]
    for _ in range(2):
        with pytest.raises(LogUnusable, match=f"{target} .*{words}.*give a folder of your own with --state DIR"):
            await FileLog(path.parent, bytes(32)).campaign(ONE)
    assert look_into(path.parent, "recipe", bytes(32)) == {}


# ---- records of nodes, by which `stop` and `status` find processes


def _recorded(base: Path) -> Path:
    directory = base / f"{PREFIX}{'c' * 32}"
    directory.mkdir(mode=0o700)
    started = started_at(os.getpid())
    assert started is not None
    write_record(directory, NodeFile("1" * 32, os.getpid(), started, "member", "127.0.0.1:1", "127.0.0.1:7433", ""))
    assert len(list_nodes(base)) == 1
    return directory


@pytest.mark.parametrize("what", ["the folder is a link", "the record is a link", "a pipe", "a folder"])
def test_records_are_not_looked_for_through_links(tmp_path: Path, what: str) -> None:
    """`stop` would end what another user's link leads to by then."""
    directory = _recorded(tmp_path)
    (record,) = directory.iterdir()
    if what == "the folder is a link":
        directory.rename(tmp_path / "elsewhere")
        directory.symlink_to(tmp_path / "elsewhere")
    else:
        record.rename(tmp_path / "elsewhere")
        make: dict[str, Callable[[], None]] = {
            "the record is a link": partial(record.symlink_to, tmp_path / "elsewhere"),
            "a pipe": partial(os.mkfifo, record),
            "a folder": record.mkdir,
        }
        make[what]()
    assert list_nodes(tmp_path) == []


@pytest.mark.parametrize("which", ["folder", "record"])
@pytest.mark.parametrize("how", ["mode", pytest.param("owner", marks=pytest.mark.root)])
def test_records_that_others_may_write_are_left_out(tmp_path: Path, which: str, how: str) -> None:
    directory = _recorded(tmp_path)
    (record,) = directory.iterdir()
    target = directory if which == "folder" else record
    if how == "mode":
        target.chmod(0o777)
    else:
        os.chown(target, STRANGER, STRANGER)
    assert list_nodes(tmp_path) == []


# ---- keys in a forked child


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("by", ["libsodium", "cryptography"])
def test_no_cipher_of_the_parent_works_in_a_forked_child(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the parent's key it would repeat the parent's nonces."""
    if by == "cryptography":
        monkeypatch.setattr(aes, "libsodium", lambda: None)
    key, nonce = bytes(32), bytes(12)
    encrypt, decrypt = aes.encryption(key), aes.decryption(key)
    record = encrypt(nonce, b"text", b"head")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = []
        for apply, text in ((encrypt, b"text"), (decrypt, record)):
            try:
                told.append(repr(apply(nonce, text, b"head")))
            except BaseException as error:
                told.append(type(error).__name__)
        again = aes.encryption(key)(nonce, b"text", b"head") == record
        os.write(writing, " ".join([*told, str(again)]).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        assert file.read() == b"ForkedProcess ForkedProcess True"
    os.waitpid(child, 0)
    assert decrypt(nonce, record, b"head") == b"text"


# ---- what calls itself etcd


def test_a_password_does_not_go_in_the_clear() -> None:
    environ = {"ZCACTOR_ETCD_USER": "me", "ZCACTOR_ETCD_PASSWORD_FILE": "/password"}
    with pytest.raises(ValueError, match="ZCACTOR_ETCD_USER is set, and ZCACTOR_ETCD_CA is not: the password would go"):
        EtcdLog.at("etcd://127.0.0.1:2379", bytes(32), environ)
    EtcdLog.at("etcd://127.0.0.1:2379", bytes(32), environ | {"ZCACTOR_ETCD_CA": "/ca"})


@pytest.mark.parametrize(
    "answer",
    [
        {}, {"token": "t"}, {"header": {}}, {"header": {"revision": "x"}}, {"header": {"revision": "1"}},
        {"header": {"revision": "1"}, "responses": [{}, {}, {}]},
        {"header": {"revision": "1"}, "responses": 3},
        {"header": {"revision": "1"}, "responses": [{"response_range": {"kvs": [{"key": "?"}]}}] * 3},
        {"header": {"revision": "1"}, "responses": [{"response_range": {}}] * 2},
    ],
)  # fmt: skip
async def test_an_odd_answer_is_told_in_a_sentence(answer: dict[str, Any]) -> None:
    async def odd(_: web.Request) -> web.Response:
        return web.json_response(answer)

    application = web.Application()
    application.router.add_post("/{path:.*}", odd)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    log = EtcdLog.at(f"etcd://{host}:{port}/x", bytes(32), {})
    with pytest.raises(LogUnusable, match=f"{host}:{port} answers /v3/kv/txn otherwise than etcd does .*etcd 3.4"):
        await log.campaign(ONE)
    await log.aclose()
    await runner.cleanup()


# ---- names that a stranger learns


@pytest.mark.root
def test_nobody_takes_the_place_of_a_run_directory(tmp_path: Path) -> None:
    """A head's id, which is the cluster's, is told to everybody who connects."""
    cluster, token = "c" * 32, bytes(32)
    names = shared_names(cluster, token)
    assert len({cluster, *names, *shared_names(cluster, b"m" * 32), *shared_names("d" * 32, token)}) == 25

    def squat(name: str) -> None:
        path = tmp_path / f"{PREFIX}{name}"
        path.mkdir()
        os.chown(path, STRANGER, STRANGER)

    squat(cluster)
    first, second = (RunDirectory.shared(tmp_path, *names) for _ in range(2))
    assert first.path == second.path == tmp_path / f"{PREFIX}{names[0]}"
    first.remove()
    second.remove()
    squat(names[0])  # it was seen in use
    third = RunDirectory.shared(tmp_path, *names)
    assert third.path == tmp_path / f"{PREFIX}{names[1]}"
    third.remove()
    for name in names[1:]:
        squat(name)
    with pytest.raises(PermissionError, match=f"{names[-1]} is in the way: it must be a directory that only we can"):
        RunDirectory.shared(tmp_path, *names)
