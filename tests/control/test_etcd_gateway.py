"""Requests to several endpoints: the order in which they are asked, users, and what is no etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.control.fake_etcd import FakeEtcd, Held
from tests.transport.certificates import Authority
from zcactor.control.etcd_gateway import EtcdGateway
from zcactor.control.etcd_messages import EtcdRefused, EtcdSilent
from zcactor.control.etcd_url import EtcdAccess, EtcdPlace
from zcactor.control.head_log import LogUnusable

GRANT = "/v3/lease/grant", {"TTL": "2"}
BUSY = 503, 14, "etcdserver: no leader"


@asynccontextmanager
async def gateway(*endpoints: str, access: EtcdAccess = EtcdAccess()) -> AsyncIterator[EtcdGateway]:  # noqa: B008
    made = EtcdGateway(EtcdPlace(endpoints, "main"), access)
    try:
        yield made
    finally:
        await made.aclose()
        await made.aclose()


@asynccontextmanager
async def server(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]) -> AsyncIterator[str]:
    """The address of a server that is no etcd."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        answer(reader, writer)
        writer.close()

    made = await asyncio.start_server(accepted, "127.0.0.1", 0)
    async with made:
        yield f"127.0.0.1:{made.sockets[0].getsockname()[1]}"


async def test_each_endpoint_is_asked_and_the_good_one_kept() -> None:
    async with FakeEtcd(3) as etcd, gateway(*etcd.endpoints) as made:
        etcd.fail("grant", "lost", BUSY)
        for _ in range(2):
            assert (await made.call(*GRANT, within=0))["TTL"] == "2"
        assert [endpoint for endpoint, _ in etcd.seen][:3] == etcd.endpoints
        assert etcd.seen[-1][0] != etcd.endpoints[0]


async def test_the_next_is_asked_where_one_is_silent() -> None:
    async with FakeEtcd(2) as etcd, gateway(*etcd.endpoints) as made:
        held = Held()
        etcd.fail("grant", held)
        assert (await made.call(*GRANT, within=60))["TTL"] == "2"
        assert [endpoint for endpoint, _ in etcd.seen][:2] == etcd.endpoints
        held.go.set()


async def test_nobody_answers() -> None:
    async with FakeEtcd(2) as etcd, gateway(*etcd.endpoints) as made:
        etcd.fail("grant*", BUSY)
        with pytest.raises(EtcdSilent) as raised:
            await made.call(*GRANT, within=0)
        assert str(raised.value) == "; ".join(f"{each} answers: etcdserver: no leader" for each in etcd.endpoints)
        assert raised.value.doubt
        with pytest.raises(EtcdSilent):
            await made.call(*GRANT, within=0, once=True)
        assert etcd.count("grant") == 3


async def test_a_round_that_fails_is_followed_by_another() -> None:
    async with FakeEtcd(2) as etcd, gateway(*etcd.endpoints) as made:
        etcd.fail("grant", *[BUSY] * 5)
        await made.call(*GRANT, within=60)
        assert etcd.count("grant") >= 6


async def test_what_was_not_sent_may_go_elsewhere() -> None:
    async with FakeEtcd() as gone:
        away = gone.endpoints[0]
    async with FakeEtcd() as etcd, gateway(away, *etcd.endpoints) as made:
        await made.call(*GRANT, within=60, once=True)
    async with gateway(away) as made:
        with pytest.raises(EtcdSilent, match=f"{away} cannot be reached: ") as raised:
            await made.call(*GRANT, within=0)
        assert not raised.value.doubt
    async with gateway("name.invalid:1") as made:
        with pytest.raises(EtcdSilent, match="name.invalid:1 cannot be reached: "):
            await made.call(*GRANT, within=0, limit=60)


async def test_a_refusal_is_final() -> None:
    async with FakeEtcd(2) as etcd, gateway(*etcd.endpoints) as made:
        with pytest.raises(EtcdRefused, match="lease not found") as raised:
            await made.call("/v3/lease/revoke", {"ID": "7"}, within=60)
        assert raised.value.code == 5
        assert etcd.count("revoke") == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "does not speak HTTP: it needs the client port of etcd"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "does not speak the protocol of etcd's clients"),
        (b"HTTP/1.1 301 Moved\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n", r"JSON \(status 301\)"),
    ],
)
async def test_another_protocol(words: bytes, expected: str) -> None:
    async with server(lambda _, writer: writer.write(words)) as address, gateway(address) as made:
        with pytest.raises(LogUnusable, match=expected):
            await made.call(*GRANT, within=60)
        assert [each async for each in made.stream("/v3/watch", {}, 60)] == []


async def test_a_server_that_hangs_up() -> None:
    async with server(lambda _, writer: None) as address, gateway(address) as made:
        with pytest.raises(EtcdSilent, match=r"closed the connection without an answer \(if it wants TLS"):
            await made.call(*GRANT, within=0)


async def test_one_of_two_is_no_etcd() -> None:
    async with (
        server(lambda _, writer: writer.write(b"hello\r\n")) as address,
        FakeEtcd() as etcd,
        gateway(address, *etcd.endpoints) as made,
    ):
        await made.call(*GRANT, within=60, once=True)


def user(tmp_path: Path, password: str) -> EtcdAccess:
    file = tmp_path / "password"
    file.write_text(f"{password}\n")
    file.chmod(0o600)
    return EtcdAccess(user="me", password_file=file)


async def test_a_user_proves_itself_again(tmp_path: Path) -> None:
    access = user(tmp_path, "secret")
    async with FakeEtcd(user=("me", "secret")) as etcd, gateway(*etcd.endpoints, access=access) as made:
        await made.call(*GRANT, within=60)
        await made.call(*GRANT, within=60)
        assert etcd.count("authenticate") == 1
        etcd.tokens.clear()
        await made.call(*GRANT, within=60, once=True)
        assert etcd.count("authenticate") == 2


async def test_a_proof_that_is_never_taken(tmp_path: Path) -> None:
    access = user(tmp_path, "secret")
    async with FakeEtcd(user=("me", "secret")) as etcd, gateway(*etcd.endpoints, access=access) as made:
        etcd.fail("grant*", (401, 16, "etcdserver: invalid auth token"))
        with pytest.raises(EtcdSilent, match="invalid auth token"):
            await made.call(*GRANT, within=0)


@pytest.mark.parametrize(
    ("access", "words"),
    [
        (lambda path: EtcdAccess(), "asks for a user"),
        (lambda path: user(path, "wrong"), "refuses the password of user 'me'"),
        (lambda path: EtcdAccess(user="me", password_file=path / "none"), "ZCACTOR_ETCD_PASSWORD_FILE: .*No such file"),
    ],
)
async def test_users_that_are_refused(tmp_path: Path, access: Callable[[Path], EtcdAccess], words: str) -> None:
    async with FakeEtcd(user=("me", "secret")) as etcd, gateway(*etcd.endpoints, access=access(tmp_path)) as made:
        with pytest.raises(LogUnusable, match=words):
            await made.call(*GRANT, within=60)


async def test_a_password_that_others_can_read(tmp_path: Path) -> None:
    access = user(tmp_path, "secret")
    assert access.password_file is not None
    access.password_file.chmod(0o644)
    async with FakeEtcd(user=("me", "secret")) as etcd, gateway(*etcd.endpoints, access=access) as made:
        with pytest.raises(LogUnusable, match="has mode 0644"):
            await made.call(*GRANT, within=60)


async def test_etcd_has_no_users(tmp_path: Path) -> None:
    async with FakeEtcd() as etcd, gateway(*etcd.endpoints, access=user(tmp_path, "secret")) as made:
        with pytest.raises(LogUnusable, match="has no users"):
            await made.call(*GRANT, within=60)


async def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("nothing")
    for path in (bad, tmp_path / "none.pem"):
        with pytest.raises(LogUnusable, match="ZCACTOR_ETCD_CA: .* holds no certificates"):
            EtcdGateway(EtcdPlace(("h:1",), "main"), EtcdAccess(path))
    with pytest.raises(LogUnusable, match="ZCACTOR_ETCD_CERT and ZCACTOR_ETCD_KEY: .* cannot be used"):
        EtcdGateway(EtcdPlace(("h:1",), "main"), EtcdAccess(Authority().folder(tmp_path / "tls") / "ca.pem", bad, bad))


async def test_plain_http_where_tls_is_asked_for(tmp_path: Path) -> None:
    access = EtcdAccess(Authority().folder(tmp_path / "tls") / "ca.pem")
    async with FakeEtcd() as etcd, gateway(*etcd.endpoints, access=access) as made:
        with pytest.raises(LogUnusable, match="does not speak TLS as ZCACTOR_ETCD_CA asks for"):
            await made.call(*GRANT, within=60)
