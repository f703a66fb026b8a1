"""An attacker on the cable, without any secret: flips a bit of a value, replays a request, swaps a pickle.

The attacker finds the value by its own bytes. With any one bit changed the call ends with an error and no changed value
is delivered. Each attack is also made on a cluster with weaker settings, where it succeeds: it is a real one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.attacks.hosts import TOKEN, Hosts, cluster, missing
from tests.attacks.program import NBYTES
from tests.hosts.netns import Program

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

KINDS = ["argument", "result", "item", "put"]
PLACES = {"first chunk": 0, "middle chunk": NBYTES // 2, "last chunk": NBYTES}

Attacked = tuple[Hosts, Program]


def joined(settings: dict[str, str]) -> Iterator[Attacked]:
    """Start a program that has joined a cluster with these settings, and has an actor on the other host."""
    with (
        cluster(settings) as (hosts, head),
        hosts.a.python("-m", "tests.attacks.program", head, env={**TOKEN, **settings}) as program,
    ):
        assert program.ask("spawn")[0] == "tcp"
        yield hosts, program


@pytest.fixture(scope="module")
def guarded() -> Iterator[Attacked]:
    """A cluster with default settings."""
    yield from joined({})


@pytest.fixture(scope="module")
def bare() -> Iterator[Attacked]:
    """A cluster whose frames are not sealed, so nothing is protected."""
    yield from joined({"ZCACTOR_SECURITY": "off"})


def mark() -> str:
    """32 letters that occur nowhere else, in hexadecimal."""
    return secrets.token_hex(16).encode().hex()


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_changes_anything(guarded: Attacked, kind: str) -> None:
    hosts, program = guarded
    marker = mark()
    hosts.between.ask("watch", marker=marker)
    assert program.ask(kind, mark=marker, place=NBYTES // 2) == "right"
    seen, changed = hosts.between.ask("told")
    assert seen > 0 and changed == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_is_flipped(guarded: Attacked, kind: str, place: str) -> None:
    hosts, program = guarded
    marker = mark()
    hosts.between.ask("watch", marker=marker, bit=secrets.randbelow(256))
    outcome = program.ask(kind, mark=marker, place=PLACES[place])
    if outcome == "ActorUnavailable" and not hosts.between.ask("told")[1]:
        # The call was on its way when the other host ended the connection because of the bit before.
        outcome = program.ask(kind, mark=marker, place=PLACES[place])
    assert hosts.between.ask("told")[1] == 1
    assert outcome not in {"right", "changed", "TimeoutError"}
    hosts.between.ask("watch", marker="")
    again = program.ask(kind, mark=marker, place=PLACES[place])
    if again == "ActorUnavailable":  # the call was on its way when the other host ended the connection
        again = program.ask(kind, mark=marker, place=PLACES[place])
    assert again == "right"


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_is_flipped_where_nothing_is_protected(bare: Attacked, kind: str) -> None:
    hosts, program = bare
    marker = mark()
    hosts.between.ask("watch", marker=marker, bit=77)
    assert program.ask(kind, mark=marker, place=NBYTES // 2) == "changed"


def test_a_request_is_replayed(guarded: Attacked) -> None:
    hosts, program = guarded
    marker = mark()
    hosts.between.ask("watch", marker=marker, replay=True)
    assert program.ask("two", mark=marker) == "right", "the owner closed the socket, and the next one served"
    assert hosts.between.ask("told")[1] == 1


def test_a_request_is_replayed_where_nothing_is_protected(bare: Attacked) -> None:
    hosts, program = bare
    marker = mark()
    hosts.between.ask("watch", marker=marker, replay=True)
    assert program.ask("two", mark=marker) == "ObjectLost", "the owner believed it, and the lease had gone"


def test_recorded_streams_are_replayed(guarded: Attacked) -> None:
    """The attacker runs on the owner's host and holds no token."""
    hosts, program = guarded
    marker = mark()
    hosts.between.ask("watch", marker=marker)
    assert program.ask("argument", mark=marker, place=0) == "right"
    streams = hosts.between.ask("streams")
    assert streams
    script = (
        "import contextlib, socket, sys\n"
        "for place in sys.argv[2:]:\n"
        "    with socket.create_connection((sys.argv[1], int(place)), 5) as sock:\n"
        "        given, got = bytes.fromhex(sys.stdin.readline()), 0\n"
        "        with contextlib.suppress(OSError):  # it is closed on him, at any moment\n"
        "            sock.sendall(given)\n"
        "            sock.shutdown(socket.SHUT_WR)\n"
        "            while data := sock.recv(65536): got += len(data)\n"
        "        print(got)\n"
    )
    ports = hosts.a.command("ss", "-Hltn").split()
    listening = sorted({place.rpartition(":")[2] for place in ports if place.startswith(hosts.a.address + ":")})
    assert listening
    for stream in streams:
        given = f"{stream}\n" * len(listening)
        answers = hosts.b.command("python3", "-c", script, hosts.a.address, *listening, given=given).split()
        assert len(answers) == len(listening)
        assert all(int(nbytes) < 1000 for nbytes in answers), "no bytes of an array"


def test_a_pickle_is_changed(guarded: Attacked) -> None:
    """The cable shows none of the pickle's bytes, so none of them can be swapped."""
    hosts, program = guarded
    marker = mark()
    hosts.between.ask("watch", marker=marker, bit=5)
    assert program.ask("pickle", mark=marker) == "right"
    assert hosts.between.ask("told") == [0, 0]
