"""Random work on two GPUs, on late streams side by side, against a model that knows each array's bytes."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest

from tests.device.helpers import opened, seen
from zcactor.device.array import DeviceArray, empty_array
from zcactor.device.streams import GpuStream, streams

pytestmark = pytest.mark.slow

NBYTES = 1000


def wrong_arrays(seed: int, waits: str) -> int:
    """Allocate, fill, copy, view and drop arrays. Returns how many have other bytes than the model in the end."""
    draw = random.Random(seed)
    with opened(f"devices=2,late=3,seed={seed},waits={waits}") as store:
        kept = [[GpuStream(gpu) for _ in range(3)] for gpu in store.gpus]
        lanes = [[0, *(stream.ptr for stream in each)] for each in kept]
        held: list[tuple[DeviceArray, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]] = []
        for _ in range(80):
            token = streams.set({index: draw.choice(lane) for index, lane in enumerate(lanes)})
            step = draw.random()
            if step < 0.25 or len(held) < 2:
                made = empty_array(store.gpu(draw.randrange(2)), (NBYTES,), np.dtype("u1"))
                value = draw.randrange(256)
                made.fill(value)
                held.append((made, np.full(NBYTES, value, "u1")))
            elif step < 0.4:
                held.pop(draw.randrange(len(held)))
            elif step < 0.55:
                source, values = draw.choice(held)
                held.append((source.copy(), values.copy()))
            else:
                low = draw.randrange(NBYTES)
                part = slice(low, draw.randrange(low, NBYTES + 1), draw.choice([1, 1, 2]))
                array, model = draw.choice(held)
                if step < 0.75:
                    value = draw.randrange(256)
                    array[part].fill(value)
                    model[part] = value
                else:
                    source, values = draw.choice(held)
                    array[part].copy_from(source[part])
                    model[part] = values[part].copy()
            streams.reset(token)
        wrong = sum((seen(array) != model).any() for array, model in held)
        del made, held, kept, array, source
        gc.collect()
        assert store.used == 0
        return int(wrong)


@pytest.mark.parametrize("seed", range(12))
def test_no_byte_is_wrong(seed: int) -> None:
    assert wrong_arrays(seed, "yes") == 0


def test_without_waits_most_runs_go_wrong() -> None:
    assert sum(wrong_arrays(seed, "no") > 0 for seed in range(6)) >= 3
