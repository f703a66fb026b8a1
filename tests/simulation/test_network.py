"""Delays and cut ways; `tests.simulation.test_connection` has their effect on connections."""

from __future__ import annotations

import random
from unittest.mock import Mock

import pytest

from simulation.network import LOCAL, Delay, Network, reset, timed_out
from simulation.trace import Trace
from simulation.world import World


def test_ways_have_delays_of_their_own() -> None:
    world = World(1, Trace())
    network = Network(world)
    here, near, far = world.process("h0", "a"), world.process("h0", "b"), world.process("h1", "c")
    assert all(LOCAL[0] <= network.time(here, near) <= LOCAL[1] for _ in range(100))
    assert all(50e-6 <= network.time(here, far) <= 200e-6 for _ in range(100))
    network.slow["h0", "h1"] = Delay(1.0, 2.0)
    assert 1.0 <= network.time(here, far) <= 2.0
    assert network.time(far, here) < 1.0


@pytest.mark.parametrize("tail", [0.0, 0.5])
def test_a_tail_is_heavy(tail: float) -> None:
    rng = random.Random(1)
    drawn = [Delay(1.0, 2.0, tail).draw(rng) for _ in range(500)]
    assert min(drawn) >= 1.0
    assert (max(drawn) > 4.0) == (tail > 0)
    assert max(drawn) <= 2.0 * 10**1.5


def test_cuts() -> None:
    network = Network(World(1, Trace()))
    network.cut("h0", "h0")
    assert not network.is_cut("h0", "h0")
    network.cut("h0", "h1")
    assert network.is_cut("h0", "h1") and not network.is_cut("h1", "h0")
    network.heal("h0", "h1")
    network.heal("h0", "h1")
    assert not network.is_cut("h0", "h1")
    network.switch_off("h2")
    assert network.is_off("h2") and network.is_cut("h0", "h2") and network.is_cut("h2", "h0")
    network.cut("h0", "h1")
    network.heal_all()
    assert network.is_off("h2") and not network.is_cut("h0", "h1")
    network.switch_on("h2")
    assert not network.is_off("h2")


def test_what_waited_at_a_cut_is_late_until_it_has_arrived() -> None:
    network = Network(World(1, Trace()))
    end = Mock(held=[b"frame"], not_before=0.0)
    end.loop.host, end.other.loop.host = "h0", "h1"
    network.connections[end] = None
    assert network.is_late("h0", "h1") and network.is_late("h1", "h0") and not network.is_late("h0", "h2")
    end.held, end.not_before = [], 1.0
    assert network.is_late("h0", "h1")
    network.world.now = 1.0
    assert not network.is_late("h0", "h1")
    network.cut("h2", "h0")
    assert network.is_late("h0", "h2")


def test_errors_tell_a_silent_host_from_one_that_was_started_again() -> None:
    assert isinstance(timed_out().__cause__, TimeoutError)
    assert isinstance(reset().__cause__, ConnectionResetError)
