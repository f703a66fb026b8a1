"""The report of a node that starts, and the search for a head whose term goes on."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zcactor.cluster import daemon
from zcactor.cluster.daemon import TermOver, found_again, until_ready, while_led
from zcactor.errors import ConnectionLost


class FakeAgent:
    """A process that has ended with status 3."""

    pid = 7

    def wait(self) -> int:
        return 3


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def hear(ends: tuple[socket.socket, socket.socket], said: bytes, timeout: float = 20.0, log: Path | None = None) -> str:
    """Have a launcher hear of a node that has said this, and has ended then."""
    ours, theirs = ends
    theirs.sendall(said)
    theirs.close()
    agent: Any = FakeAgent()
    return until_ready(ours, agent, timeout, log)


@pytest.mark.parametrize("said", ["r07@10.0.0.1:7433\nand more", "s07@10.0.0.1:7433"])
def test_a_node_is_ready(ends: tuple[socket.socket, socket.socket], said: str) -> None:
    assert hear(ends, said.encode()) == said


@pytest.mark.parametrize(("code", "error"), [(b"e", ConnectionLost), (b"d", TermOver)])
def test_a_node_says_why_it_cannot_start(
    ends: tuple[socket.socket, socket.socket], code: bytes, error: type[ConnectionLost]
) -> None:
    with pytest.raises(ConnectionLost, match="the node could not start: for a reason") as found:
        hear(ends, code + b"for a reason")
    assert type(found.value) is error


def test_a_node_that_ends_without_a_word(ends: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 3000 + "its last words\n")
    with pytest.raises(ConnectionLost, match=r"ended at its start with status 3; the end of .*log:\nx+its last words"):
        hear(ends, b"", log=log)


def test_a_node_that_says_nothing_in_time(ends: tuple[socket.socket, socket.socket]) -> None:
    agent: Any = FakeAgent()
    with pytest.raises(ConnectionLost, match=r"did not start within 0\.01 s \(spawn_timeout\)"):
        until_ready(ends[0], agent, 0.01, None)


def attempts(*outcomes: Exception | str) -> Callable[[], str]:
    """A join with these outcomes, one after the other."""
    left = [*outcomes]

    def join() -> str:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return join


def test_it_joins_again_as_long_as_heads_decide_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_LOOK_AGAIN", 0.0)
    assert while_led(attempts("joined"), 0.0) == "joined"
    assert while_led(attempts(TermOver("one"), TermOver("two"), "joined"), 60.0) == "joined"
    with pytest.raises(ConnectionLost, match="another reason"):
        while_led(attempts(TermOver("one"), ConnectionLost("another reason"), "joined"), 60.0)


def test_a_head_that_was_found_once_may_be_away() -> None:
    look = found_again(attempts(ConnectionLost("nobody"), "head", ConnectionLost("gone"), "next"))
    with pytest.raises(ConnectionLost, match="nobody") as first:
        look()
    assert type(first.value) is ConnectionLost
    assert look() == "head"
    with pytest.raises(TermOver, match="gone"):
        look()
    assert look() == "next"


def test_it_gives_up_in_time() -> None:
    with pytest.raises(TermOver, match="one"):
        while_led(attempts(*[TermOver("one")] * 9, "joined"), 0.05)
