"""PMI-1: its lines, and the talk with a launcher that a thread plays."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from zcactor.cluster.pmi import KeyValueSpace, line_of, parsed
from zcactor.errors import ConnectionLost, ProtocolError

PATIENCE = 60.0


def test_lines() -> None:
    assert line_of("init", pmi_version=1, pmi_subversion=1) == b"cmd=init pmi_version=1 pmi_subversion=1\n"
    assert parsed(b"cmd=get_result rc=0 value=10.0.0.1:7=x\n", "get_result")["value"] == "10.0.0.1:7=x"
    for value in ("two words", "", "line\n"):
        with pytest.raises(ValueError, match="no blanks"):
            line_of("put", value=value)
    with pytest.raises(ValueError, match="at most 1024 bytes"):
        line_of("put", value="v" * 1024)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"cmd=other rc=0\n", "where PMI-1 has cmd=get_result"),
        (b"\xff\n", "where PMI-1 has cmd=get_result"),
        (b"cmd=get_result rc=-1 msg=unknown_key\n", "refused: cmd=get_result rc=-1 msg=unknown_key"),
    ],
)
def test_answers_that_are_wrong(line: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parsed(line, "get_result")


class Launcher:
    """A launcher for one rank. It answers requests by `answers` until there are no more."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        self.rank, self._sock = socket.socketpair()
        self._answers = answers
        self.heard: list[bytes] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self._sock, self._sock.makefile("rb") as file:
            for line in file:
                self.heard.append(line)
                answer = self._answers.get(line.split()[0].decode().removeprefix("cmd="))
                if answer is None:
                    return
                for part in (answer[:5], answer[5:]):  # in two parts, as a socket may deliver it
                    self._sock.sendall(part)

    def close(self) -> None:
        self.rank.close()
        self._thread.join()


GOOD = {
    "init": b"cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n",
    "get_my_kvsname": b"cmd=my_kvsname kvsname=kvs_7_0\n",
    "put": b"cmd=put_result rc=0\n",
    "barrier_in": b"cmd=barrier_out\n",
    "get": b"cmd=get_result rc=0 value=127.0.0.1:7\n",
    "finalize": b"cmd=finalize_ack\n",
}


@pytest.fixture
def launcher() -> Iterator[Callable[[dict[str, bytes]], Launcher]]:
    made: list[Launcher] = []

    def make(answers: dict[str, bytes]) -> Launcher:
        made.append(Launcher(answers))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_talk(launcher: Callable[[dict[str, bytes]], Launcher]) -> None:
    played = launcher(GOOD)
    space = KeyValueSpace(played.rank.fileno(), time.monotonic() + PATIENCE)
    assert space.name == "kvs_7_0"
    space.put("zcactor", "127.0.0.1:7")
    space.barrier()
    assert space.get("zcactor") == "127.0.0.1:7"
    space.finalize()
    assert played.heard == [
        b"cmd=init pmi_version=1 pmi_subversion=1\n", b"cmd=get_my_kvsname\n",
        b"cmd=put kvsname=kvs_7_0 key=zcactor value=127.0.0.1:7\n", b"cmd=barrier_in\n",
        b"cmd=get kvsname=kvs_7_0 key=zcactor\n", b"cmd=finalize\n",
    ]  # fmt: skip


def test_a_launcher_that_goes(launcher: Callable[[dict[str, bytes]], Launcher]) -> None:
    played = launcher({name: answer for name, answer in GOOD.items() if name != "barrier_in"})
    space = KeyValueSpace(played.rank.fileno(), time.monotonic() + PATIENCE)
    with pytest.raises(ConnectionLost, match="the launcher is gone"):
        space.barrier()


def test_a_launcher_that_is_silent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ConnectionLost, match="did not answer in time: it owes an answer to init"):
        KeyValueSpace(ours.fileno(), time.monotonic())


def test_a_line_without_an_end() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"x" * 2000)
    with ours, theirs, pytest.raises(ProtocolError, match="longer than PMI-1 allows"):
        KeyValueSpace(ours.fileno(), time.monotonic() + PATIENCE)


def test_a_descriptor_that_is_closed() -> None:
    ours, theirs = socket.socketpair()
    fd = ours.fileno()
    ours.close()
    theirs.close()
    with pytest.raises(ConnectionLost, match=rf"descriptor {fd} \(PMI_FD\) fails"):
        KeyValueSpace(fd, time.monotonic() + PATIENCE)
