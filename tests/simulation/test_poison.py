"""Changes of freed bytes are found."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from simulation.invariants import POISON, Poison
from zcactor.objectstore.store import Store


def test_bytes_that_were_given_back_are_filled_and_others_are_not() -> None:
    store = Store(4 << 20, os.urandom(16))
    kept = store.empty(20_000, np.uint8)
    kept[...] = 7
    poison = Poison(store, random.Random(1))
    freed = store.empty(1 << 20, np.uint8)
    freed[...] = 7
    del freed
    for _ in range(200):
        assert poison.fill()
    assert (kept == 7).all()
    assert store.stats().used < 1 << 20
    assert (store.empty(64, np.uint8) == POISON).any()
    store.close()


def test_a_store_without_room_is_left_as_it_is() -> None:
    store = Store(1 << 20, os.urandom(16))
    held = []
    while True:
        try:
            held.append(store.empty(60_000, np.uint8))
        except MemoryError:
            break
    for array in held:
        array[...] = 5
    assert not all(Poison(store, random.Random(seed)).fill() for seed in range(10))
    assert all((array == 5).all() for array in held)
    del array, held
    store.close()


def test_a_store_in_which_nothing_happens_is_filled_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    fills = 0
    fill = Poison.fill

    def counting(self: Poison) -> bool:
        nonlocal fills
        fills += 1
        return fill(self)

    monkeypatch.setattr(Poison, "fill", counting)
    store = Store(4 << 20, os.urandom(16))
    poison = Poison(store, random.Random(1))
    for _ in range(80):
        poison.renew()
    assert fills == 10
    for turn in range(80):
        array = store.empty(100, np.uint8)
        poison.renew()
        assert fills == 11 + 2 * turn
        del array
        poison.renew()
        assert fills == 12 + 2 * turn
    store.close()
