"""The steps of `tests.marshal.test_devices_machine`, drawn by seeds: with waits nothing is wrong, and without waits of
streams most seeds go wrong. Hypothesis prefers values that hide what a missing wait does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.device.helpers import drawn_options
from tests.marshal.test_devices_machine import SIDES, Machine, World

pytestmark = pytest.mark.slow

STEPS = 25
LATE = "devices=2,late=30"


def drawn(world: World, seed: int, *, kills: bool = False) -> int:
    """Do the steps of a seed. Returns the number of arrays with wrong bytes at the end."""
    draw = random.Random(seed)
    machine: Any = Machine.__new__(Machine)
    Machine.world = world
    machine.begin()
    here: list[Any] = []
    there: list[Any] = []
    for _ in range(STEPS):
        step = draw.random()
        gpu, side, late = draw.choice(["cuda:0", "cuda:1"]), draw.choice(sorted(SIDES)), draw.random() < 0.8
        size, value = draw.choice([1, 1000, 70_000]), draw.randrange(1, 256)
        if step < 0.2 or not here:
            here.append(machine.allocate(gpu, size, value, late))
        elif step < 0.35:
            there.append(machine.make(side, size, value))
        elif step < 0.6:
            here.append(machine.copy(draw.choice(here), gpu, draw.random() < 0.7))
        elif step < 0.7:
            machine.fill(draw.choice(here), value, draw.randrange(500))
        elif step < 0.78:
            there.append(machine.give(draw.choice(here), side))
        elif step < 0.9 and there:
            here.append(machine.take(draw.choice(there)))
        elif step < 0.95 and there:
            there.append(machine.give_on(draw.choice(there), side))
        elif kills and step < 0.97:
            machine.kill(side, draw.random() < 0.5, True)
        else:
            machine.drop(here.pop(draw.randrange(len(here))))
    return _wrong(machine)


def _wrong(machine: Any) -> int:
    wrong = 0
    for side, shelf in machine.shelves.items():
        for number in shelf:
            wrong += _raises(machine.look_there, (side, number))
    for held in machine.arrays:
        wrong += _raises(machine.look, held)
        held.array = None
    for shelf in machine.shelves.values():
        shelf.clear()
    machine.teardown()  # the memory of all is given back
    return wrong


def _raises(look: Any, what: Any) -> bool:
    try:
        look(what)
    except AssertionError:
        return True
    return False


def wrong_seeds(options: str, seeds: range, *, kills: bool = False) -> list[int]:
    """The seeds that end with wrong bytes."""
    world = World(options)
    try:
        return [seed for seed in seeds if drawn(world, seed, kills=kills)]
    finally:
        world.close()


@pytest.mark.parametrize("options", [LATE, f"{LATE},peer=none"])
def test_no_seed_ends_with_a_wrong_byte(options: str) -> None:
    assert wrong_seeds(options, range(6)) == []


def test_no_seed_with_drawn_options_ends_with_a_wrong_byte(rounds: int) -> None:
    for seed in range(2 * rounds):
        assert wrong_seeds(drawn_options(seed), range(seed, seed + 2)) == [], drawn_options(seed)


def test_no_seed_with_kills_ends_with_a_wrong_byte() -> None:
    assert wrong_seeds(LATE, range(100, 104), kills=True) == []


def test_without_waits_most_seeds_end_with_wrong_bytes() -> None:
    assert len(wrong_seeds(f"{LATE},waits=no", range(12))) > 6
