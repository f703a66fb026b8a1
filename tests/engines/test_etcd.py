"""The log of heads in a real etcd. `make test-engines` installs it."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from tests.conformance.head_log import ONE, PATIENCE, TWO, HeadLogTests, Make
from tests.engines.etcds import Etcd
from tests.engines.launching import User
from tests.transport.certificates import Authority
from zcactor.control.etcd_log import EtcdLog
from zcactor.control.etcd_url import EtcdAccess, find_access, parse_url
from zcactor.control.head_log import Change, Deposed, HeadState, LogUnavailable, LogUnusable, Term

pytestmark = pytest.mark.slow

LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop, for time: tests/control has the same on both."""
TOKEN = bytes(32)
_names = (f"c{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def one() -> Iterator[Etcd]:
    """An etcd of one member."""
    with User() as user:
        yield Etcd(user)


@pytest.fixture
def three() -> Iterator[Etcd]:
    """An etcd of three members."""
    with User() as user:
        yield Etcd(user, 3)


@pytest.fixture(scope="module")
def secure() -> Iterator[tuple[Etcd, Authority]]:
    """An etcd with TLS, which wants certificates of its clients."""
    with User() as user:
        authority = Authority()
        yield Etcd(user, 1, authority), authority


@pytest.fixture(scope="module")
def guarded() -> Iterator[Etcd]:
    """An etcd with users: ``app`` may use keys of clusters, and ``other`` none."""
    with User() as user:
        etcd = Etcd(user)
        etcd.call("auth/role/add", {"name": "heads"})
        allowed = {"permType": "READWRITE", "key": "L3pjYWN0b3Iv", "range_end": "L3pjYWN0b3Iw"}
        etcd.call("auth/role/grant", {"name": "heads", "perm": allowed})
        for name, role in (("root", "root"), ("app", "heads"), ("other", "")):
            etcd.call("auth/user/add", {"name": name, "password": f"{name}'s"})
            if role:
                etcd.call("auth/user/grant", {"user": name, "role": role})
        etcd.call("auth/enable", {})
        yield etcd


class TestEtcdLog(HeadLogTests):
    """The suite for `EtcdLog`."""

    @pytest.fixture
    def make(self, one: Etcd) -> Make:
        url = one.url(next(_names))
        return lambda: EtcdLog.at(url, TOKEN, {})


async def recorded(log: EtcdLog, term: Term, change: Change) -> Term:
    """Record a change, in another term where that one is over by now: a slow machine may lose its lease."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await log.record(term, [change])
                return term
            except Deposed:
                term = await log.campaign(ONE)
            except LogUnavailable:
                await asyncio.sleep(0.1)


async def all_of(log: EtcdLog) -> HeadState:
    """The entries that another head finds."""
    async with asyncio.timeout(PATIENCE):
        return await log.load(await log.campaign(TWO))


async def test_a_head_that_ends_without_a_word(one: Etcd) -> None:
    url = one.url(next(_names))
    first, second = EtcdLog.at(url, TOKEN, {}), EtcdLog.at(url, TOKEN, {})
    old = await first.campaign(ONE)
    assert first._keeping is not None
    first._keeping.cancel()
    async with asyncio.timeout(PATIENCE):
        new = await second.campaign(TWO)
    assert time.clock_gettime(time.CLOCK_BOOTTIME) > old.valid_until()
    assert new.epoch > old.epoch
    with pytest.raises(Deposed):
        await first.record(old, [Change("name", "a", b"1")])
    with pytest.raises(Deposed) as raised:
        await first.load(old)
    assert raised.value.known == new.epoch
    assert await second.load(new) == {}
    await first.aclose()
    await second.aclose()


async def test_the_lease_of_a_live_head_is_revoked(one: Etcd) -> None:
    log = EtcdLog.at(one.url(next(_names)), TOKEN, {})
    term = await log.campaign(ONE)
    leaders = log.leaders()
    assert await anext(leaders) is not None
    assert log._term is not None
    one.call("lease/revoke", {"ID": str(log._term.lease)})
    async with asyncio.timeout(PATIENCE):
        assert await anext(leaders) is None
    with pytest.raises(Deposed):
        await log.record(term, [])
    await log.aclose()


async def test_one_of_three_is_killed(three: Etcd) -> None:
    url = three.url("main")
    log, other = EtcdLog.at(url, TOKEN, {}), EtcdLog.at(url, TOKEN, {})
    term = await log.campaign(ONE)
    for number in range(3):
        term = await recorded(log, term, Change("name", f"{number}", b"x"))
    three.kill(log._gateway()._at)
    for number in range(3, 6):
        term = await recorded(log, term, Change("name", f"{number}", b"x"))
    await log.aclose()
    assert await all_of(other) == {"name": {f"{number}": b"x" for number in range(6)}}
    await other.aclose()


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_all_are_away(three: Etcd, how: str) -> None:
    url = three.url("main")
    log, other = EtcdLog.at(url, TOKEN, {}), EtcdLog.at(url, TOKEN, {})
    term = await recorded(log, await log.campaign(ONE), Change("name", "a", b"1"))
    if how == "stopped":
        three.signal(signal.SIGSTOP)
    else:
        three.kill(0, 1, 2)
    recording = asyncio.ensure_future(recorded(log, term, Change("name", "b", b"2")))
    async with asyncio.timeout(PATIENCE):
        while term.valid_until() > time.clock_gettime(time.CLOCK_BOOTTIME):
            await asyncio.sleep(0.05)
    assert not recording.done()
    if how == "stopped":
        three.signal(signal.SIGCONT)
    else:
        await asyncio.to_thread(three.start)
    term = await recording
    await recorded(log, term, Change("name", "c", b"3"))
    await log.aclose()
    assert await all_of(other) == {"name": {"a": b"1", "b": b"2", "c": b"3"}}
    await other.aclose()


async def refused(url: str, environ: dict[str, str], access: EtcdAccess | None = None) -> str:
    """The words with which a campaign is refused."""
    log = EtcdLog(parse_url(url), access or find_access(environ), TOKEN)
    with pytest.raises(LogUnusable) as raised:
        await log.campaign(ONE)
    await log.aclose()
    return str(raised.value)


async def test_tls(secure: tuple[Etcd, Authority], one: Etcd, tmp_path: Path) -> None:
    etcd, authority = secure
    url = etcd.url(next(_names))
    files, stranger = authority.folder(tmp_path / "client"), Authority().folder(tmp_path / "stranger")
    good, strange = (
        {f"ZCACTOR_ETCD_{name.upper()}": str(folder / f"{name}.pem") for name in ("ca", "cert", "key")}
        for folder in (files, stranger)
    )
    log = EtcdLog.at(url, TOKEN, good)
    term = await recorded(log, await log.campaign(ONE), Change("name", "a", b"1"))
    assert await log.load(term) == {"name": {"a": b"1"}}
    await log.aclose()
    ca = {"ZCACTOR_ETCD_CA": strange["ZCACTOR_ETCD_CA"]}
    assert f"a certificate that {stranger}/ca.pem does not vouch for" in await refused(url, {**good, **ca})
    without = {"ZCACTOR_ETCD_CERT": "", "ZCACTOR_ETCD_KEY": ""}
    for environ in ({**strange, "ZCACTOR_ETCD_CA": good["ZCACTOR_ETCD_CA"]}, {**good, **without}):
        assert "refuses this client's certificate, or wants one" in await refused(url, environ)
    for address, environ, words in ((url, {}, r"wants TLS, set"), (one.url("x"), good, "does not speak TLS, unset")):
        log = EtcdLog(parse_url(address), find_access(environ), TOKEN, patience=0.0)
        with pytest.raises(LogUnavailable, match=rf"closed the connection.* \(if it {words} ZCACTOR_ETCD_CA\)"):
            await log.campaign(ONE)
        await log.aclose()


async def test_credentials(guarded: Etcd, tmp_path: Path) -> None:
    url = guarded.url(next(_names))
    file = tmp_path / "password"

    def access(user: str, password: str) -> EtcdAccess:  # this etcd has no TLS, which users otherwise need
        file.write_text(f"{password}\n")
        file.chmod(0o600)
        return EtcdAccess(user=user, password_file=file)

    assert "asks for a user" in await refused(url, {})
    assert "refuses the password of user 'app'" in await refused(url, {}, access("app", "root's"))
    assert "does not let user 'other' read and write" in await refused(url, {}, access("other", "other's"))
    log = EtcdLog(parse_url(url), access("app", "app's"), TOKEN)
    term = await log.campaign(ONE)
    leaders = log.leaders()
    assert await anext(leaders) is not None
    log._gateway()._token = "stale"
    term = await recorded(log, term, Change("name", "a", b"1"))
    assert await log.load(term) == {"name": {"a": b"1"}}
    await log.aclose()


async def test_users_that_etcd_does_not_have(one: Etcd, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.touch(0o600)
    access = EtcdAccess(user="app", password_file=file)
    assert "has no users, and 'app' is to be one" in await refused(one.url("x"), {}, access)


async def test_the_port_of_other_members(one: Etcd) -> None:
    url = f"etcd://127.0.0.1:{one.peer_ports[0]}"
    assert "it needs the client port of etcd 3.4 or newer" in await refused(url, {})


async def test_etcd_is_out_of_space() -> None:
    with User() as user:
        etcd = Etcd(user, 1, None, "--quota-backend-bytes", str(8 << 20))
        log = EtcdLog.at(etcd.url("full"), TOKEN, {})
        term = await log.campaign(ONE)
        written = 0
        with pytest.raises(LogUnavailable, match="out of space"):
            for written in range(100):
                term = await filled(log, term, bytes([written]) * 900_000)
        assert 0 < written < 20
        revision = etcd.call("kv/range", {"key": "YQ=="})["header"]["revision"]
        etcd.call("kv/compaction", {"revision": revision, "physical": True})
        etcd.call("maintenance/defragment", {})
        etcd.call("maintenance/alarm", {"action": "DEACTIVATE", "alarm": "NOSPACE"})
        assert (await all_or_again(log, term))["recipe"]["r"] == bytes([written - 1]) * 900_000
        await log.aclose()


async def filled(log: EtcdLog, term: Term, value: bytes) -> Term:
    """Record a large value, in another term where that one is over by now."""
    while True:
        try:
            await log.record(term, [Change("recipe", "r", value)])
            return term
        except Deposed:
            term = await log.campaign(ONE)


async def all_or_again(log: EtcdLog, term: Term) -> HeadState:
    """All entries, in another term where that one is over by now."""
    try:
        return await log.load(term)
    except Deposed:
        return await log.load(await log.campaign(ONE))
