"""The table of sessions: the one that is used for a peer, watchers of an end, and labels of processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

import zcactor as zc
from tests.assembly.test_process import PATIENCE, Echo
from zcactor.process import context
from zcactor.process.sessions import Sessions

US, THEM = b"u" * 16, b"t" * 16


@pytest.fixture
async def node() -> AsyncIterator[zc.Runtime]:
    async with asyncio.timeout(PATIENCE), zc.init() as made:
        yield made


def session_to(peer: bytes) -> Any:
    class Session(SimpleNamespace):
        __hash__ = object.__hash__  # type: ignore[assignment]

    return Session(peer_process=peer, peer_hello=None, closed=None)


def test_another_connection_to_the_same_peer_takes_over() -> None:
    sessions = Sessions(US)
    first, second, lost = session_to(THEM), session_to(THEM), session_to(THEM)
    for each in (first, second, lost):
        sessions.add(each)
    lost.closed = zc.ConnectionLost("lost")
    sessions.used[THEM] = first
    assert sessions.remove(first) is second
    assert sessions.used[THEM] is second
    assert sessions.remove(second) is None
    assert THEM not in sessions.used
    assert list(sessions.all()) == [lost]


def test_a_process_has_two_connections_to_itself_and_neither_takes_over() -> None:
    sessions = Sessions(US)
    ours, others = session_to(US), session_to(US)
    sessions.add(others)
    sessions.add(ours)
    sessions.used[US] = ours
    assert sessions.remove(ours) is None
    assert not sessions.used


def test_watchers_are_kept_by_nobody_else() -> None:
    sessions, session = Sessions(US), session_to(THEM)
    watcher: Any = session_to(US)  # any object that can be referred to weakly
    assert not sessions.watched(session)
    sessions.watch(session, watcher)
    assert sessions.watched(session)
    assert sessions.unwatch(session) == [watcher]
    assert not sessions.watched(session) and sessions.unwatch(session) == []
    sessions.watch(session, watcher)
    del watcher
    assert not sessions.watched(session)


def test_processes_are_named_and_paths_are_left_as_they_are() -> None:
    sessions, digits = Sessions(US), "0123456789abcdef" * 2
    for text, named in (
        (f"process {digits} is gone", "process 01234567 is gone"),
        (f"no RDMA to {digits}: no card", "no RDMA to process 01234567: no card"),
        (f"{digits}@127.0.0.1:5, it hung up", "process 01234567 at 127.0.0.1:5, it hung up"),
        (f"the peer ({digits})", "the peer (process 01234567)"),
    ):
        assert sessions.named(text) == named
    for path in (
        f"/tmp/zcactor-0-{digits}", f"/tmp/zcactor-0-{digits}/x", f"/run/{digits}", f"/run/a {digits}/b",
        f"{digits}.sock", f"node-{digits}.json", f"./{digits}-1", f"/tmp/a+{digits}", f"/tmp/a:{digits}",
    ):  # fmt: skip
        assert sessions.named(f"not reached in {path}: refused") == f"not reached in {path}: refused"


@pytest.mark.slow
async def test_processes_are_named_by_what_they_are(node: zc.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    process = context.current()
    echo: Any = await zc.spawn(Echo)
    pid = await echo.pid()
    place = echo._remote.location[0]
    label = echo._remote.label
    assert process.sessions.describe(place) == f"the process of {label}"
    host = socket.gethostname()
    agent: Any = node
    describe, head = process.sessions.describe, process.sessions.head
    assert describe(head) == f"agent {head.hex()[:8]}, pid {agent._agent.pid} on {host}"
    digits = place.hex()
    for text, named in [
        (f"process {digits} does not listen", f"the process of {label} does not listen"),
        (
            f"process {digits}@10.0.0.1:2 cannot be reached: x",
            f"the process of {label} at 10.0.0.1:2 cannot be reached: x",
        ),
        (f"at {digits}@[::1]:2: refused", f"at the process of {label} at [::1]:2: refused"),
        (f"/run/{digits}.sock is missing", f"/run/{digits}.sock is missing"),
        (f"process {'a' * 32}, too", "process aaaaaaaa, too"),
    ]:
        assert process.sessions.named(text) == named
    await zc.kill(echo)
    with pytest.raises(zc.ConnectionLost) as lost:
        await process.connections.connect(place)
    assert label in str(lost.value)
    assert digits not in str(lost.value)
    monkeypatch.setattr(process.sessions, "remotes", {})
    assert describe(place) == f"process {digits[:8]}, pid {pid} on {host}", "as it said itself, while it lived"
    with pytest.raises(zc.ConnectionLost, match=f"process {'b' * 8} "):
        await process.connections.connect(bytes.fromhex("b" * 32))
