"""``zcactor start --head --standby --force``: the look at the head that leads, and what is printed. With a real etcd:
``tests/engines/test_heads.py``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.control.fake_etcd import FakeEtcd
from tests.transport.local_arena import TOKEN
from zcactor.cli import nodes
from zcactor.config import Config
from zcactor.control.etcd_log import EtcdLog
from zcactor.control.head_log import Candidate
from zcactor.driver import driver
from zcactor.errors import ConnectionLost
from zcactor.process import context
from zcactor.process.cluster import HeadService

PORT = 7433
HERE = f"127.0.0.1:{PORT}"
CONFIG = Config(head_timeout=60.0)


@pytest.fixture
async def etcd(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeEtcd]:
    monkeypatch.setenv("ZCACTOR_TOKEN", TOKEN.hex())
    async with FakeEtcd() as made:
        yield made


@contextlib.asynccontextmanager
async def leading(etcd: FakeEtcd, address: str) -> AsyncIterator[None]:
    """A head at that address leads inside the block."""
    log = EtcdLog.at(etcd.url, TOKEN, {})
    try:
        await log.campaign(Candidate(address, "a", 1))
        yield
    finally:
        await log.aclose()


async def test_no_head_leads(etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await nodes.is_there(CONFIG, etcd.url, PORT)
    async with leading(etcd, "127.0.0.1:1"):
        assert not await nodes.is_there(CONFIG, etcd.url, PORT), "it was killed"
    monkeypatch.delenv("ZCACTOR_TOKEN")
    monkeypatch.setattr(nodes, "find_token", lambda *_: None)
    assert not await nodes.is_there(CONFIG, etcd.url, PORT)


async def test_a_head_leads(etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    state = "taking over"

    async def told(config: Config, method: Any) -> dict[str, str]:
        assert (config.address, method) == (where, HeadService.leader)
        return {"state": state}

    monkeypatch.setattr(nodes, "_ask_head", told)
    for where, there in ((HERE, True), ("10.0.0.2:7433", False)):
        async with leading(etcd, where):
            assert await nodes.is_there(CONFIG, etcd.url, PORT) is there
    state, where = "leading", "10.0.0.3:7433"
    async with leading(etcd, where):
        with pytest.raises(ConnectionLost, match=f"the head at {where} leads and acts: start this one without --force"):
            await nodes.is_there(CONFIG, etcd.url, PORT)


@pytest.mark.usefixtures("etcd")
async def test_an_etcd_that_does_not_answer() -> None:
    with pytest.raises(ConnectionLost, match=r"etcd://127\.0\.0\.1:1/x does not answer in 0\.01 s"):
        await nodes.is_there(Config(head_timeout=0.01), "etcd://127.0.0.1:1/x", PORT)


@pytest.mark.parametrize(
    ("waits_for", "answer", "lines"),
    [
        (
            ["node bb (b)"], ["node bb (b)", "node cc (c)"],
            ["it waits for node bb (b)", "the head acts; it has given up node bb (b), node cc (c)"],
        ),
        ([], [], ["the head acts; it has given up no node"]),
        ([], ValueError("nothing to force"), ["nothing to force"]),
    ],
)  # fmt: skip
async def test_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], waits_for: list[str],
    answer: list[str] | ValueError, lines: list[str],
) -> None:  # fmt: skip
    addresses = []

    async def ask(method: Any) -> Any:
        if method is HeadService.leader:
            return {"waits_for": waits_for}
        if isinstance(answer, ValueError):
            raise answer
        return answer

    @contextlib.asynccontextmanager
    async def init(config: Config) -> AsyncIterator[None]:
        addresses.append(config.address)
        yield

    monkeypatch.setattr(driver, "init", init)
    monkeypatch.setattr(context, "current", lambda: SimpleNamespace(head=SimpleNamespace(ask=ask)))
    await nodes.have_it_act(CONFIG, "etcd://h:1")
    assert addresses == ["etcd://h:1"]
    assert capsys.readouterr().err.splitlines() == [f"zcactor: {line}" for line in lines]
