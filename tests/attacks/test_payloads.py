"""Payloads above the eager limit between two hosts, with an attacker in between who knows no secret."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.hosts.netns import Network, Program, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

COUNT = 50_000
"""Letters of an order: more than fit into a frame."""
WAYS = ["argument", "result", "items", "put"]


class Scene(NamedTuple):
    """A caller, an actor's process, and an attacker that each of them takes for the other."""

    caller: Program
    actor: Program
    between: Program

    def undo(self) -> None:
        """Pass everything on unchanged from now on."""
        self.between.ask("overwrite", wanted="", put="")
        self.between.ask("flip", least=0)


@contextlib.contextmanager
def scene() -> Iterator[Scene]:
    """Start programs on three hosts; all traffic between the first two goes through the third."""
    with Network(3) as (left, right, middle), contextlib.ExitStack() as stack:
        caller, actor = (
            stack.enter_context(host.python("-m", "tests.attacks.member", host.address)) for host in (left, right)
        )
        between = stack.enter_context(middle.python("-m", "tests.attacks.interceptor", middle.address))
        found = actor.ask("about")
        port = between.ask("stand_for", host=found["host"], port=found["port"])
        caller.ask("meet", **{**found, "host": middle.address, "port": port})
        about = caller.ask("about")
        port = between.ask("stand_for", host=about["host"], port=about["port"])
        caller.ask("behind", host=middle.address, port=port)
        port = between.ask("stand_for", host=found["host"], port=found["port"])
        actor.ask("behind", host=middle.address, port=port)
        yield Scene(caller, actor, between)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Scene]:
    with scene() as made:
        yield made


def expected(way: str) -> str:
    return " ".join([f"x*{COUNT}"] * (3 if way == "items" else 1))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_between_lets_calls_through(hosts: Scene, way: str) -> None:
    hosts.undo()
    before = hosts.between.ask("passed")
    assert hosts.caller.ask(way, letter="x", count=COUNT) == expected(way)
    assert hosts.between.ask("passed") - before >= COUNT


@pytest.mark.parametrize("way", WAYS)
def test_a_values_own_bytes_are_not_to_be_found_on_the_way(hosts: Scene, way: str) -> None:
    hosts.between.ask("overwrite", wanted=(b"x" * 16).hex(), put=(b"y" * 16).hex())
    assert hosts.caller.ask(way, letter="x", count=COUNT) == expected(way)
    assert hosts.between.ask("found") == 0
    hosts.undo()


@pytest.mark.parametrize("way", WAYS)
def test_no_pickle_of_somebody_elses_is_run(hosts: Scene, way: str) -> None:
    made = [program.host.directory / f"made-by-{way}" for program in (hosts.caller, hosts.actor)]
    code = "; ".join(["import os", *(f"os.makedirs({str(path)!r}, exist_ok=True)" for path in made)])
    harmful = b"\x80\x05cbuiltins\nexec\n(V" + code.encode() + b"\ntR."
    # Each pickle begins with its version and the mark of a frame.
    hosts.between.ask("overwrite", wanted=b"\x80\x05\x95".hex(), put=harmful.hex())
    found = hosts.caller.ask(way, letter="x", count=COUNT)
    assert not any(path.exists() for path in made)
    assert found == expected(way) or found.startswith("error: ")
    hosts.undo()


@pytest.mark.parametrize("way", WAYS)
def test_a_payload_that_was_changed_gives_an_error_and_no_value(way: str) -> None:
    with scene() as hosts:
        assert hosts.caller.ask(way, letter="x", count=COUNT) == expected(way)
        hosts.between.ask("flip", least=8192)
        found = hosts.caller.ask(way, letter="x", count=COUNT)
        assert found.startswith("error: "), found
        assert hosts.between.ask("flipped") > 0
