"""Random work on two GPUs, on late streams side by side, against a model that knows each array's bytes."""

from __future__ import annotations

import contextlib
import gc
import random

import numpy as np
import pytest

from tests.device.helpers import held, opened, seen, settle
from zcactor.device.array import DeviceArray, empty_array
from zcactor.device.streams import GpuStream, streams

pytestmark = pytest.mark.slow

NBYTES = 1000


def wrong_arrays(seed: int, options: str, *, hold: bool) -> int:
    """Allocate, fill, copy, view and drop arrays. Returns how many have other bytes than the model in the end.

    Args:
        seed: decides what is done.
        options: of the fake GPUs.
        hold: whether no stream begins before everything is queued; then one after the other does its work, and an
            order that is missing shows for certain.
    """
    draw = random.Random(seed)
    with opened(f"devices=2,{options}") as store, contextlib.ExitStack() as holding:
        kept = [[GpuStream(gpu) for _ in range(3)] for gpu in store.gpus]
        lanes = [[0, *(stream.ptr for stream in each)] for each in kept]
        for index, stream in [(index, stream) for index, lane in enumerate(lanes) for stream in lane if hold]:
            holding.callback(settle, store.driver, index)
            holding.enter_context(held(store.driver, stream, device=index))
        arrays: list[tuple[DeviceArray, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]] = []
        for _ in range(80):
            token = streams.set({index: draw.choice(lane) for index, lane in enumerate(lanes)})
            step = draw.random()
            if step < 0.25 or len(arrays) < 2:
                made = empty_array(store.gpu(draw.randrange(2)), (NBYTES,), np.dtype("u1"))
                value = draw.randrange(256)
                made.fill(value)
                arrays.append((made, np.full(NBYTES, value, "u1")))
            elif step < 0.4:
                arrays.pop(draw.randrange(len(arrays)))
            elif step < 0.55:
                source, values = draw.choice(arrays)
                arrays.append((source.copy(), values.copy()))
            else:
                low = draw.randrange(NBYTES)
                part = slice(low, draw.randrange(low, NBYTES + 1), draw.choice([1, 1, 2]))
                array, model = draw.choice(arrays)
                if step < 0.75:
                    value = draw.randrange(256)
                    part = slice(low, part.stop) if hold else part  # a fill with gaps comes from the host, and waits
                    array[part].fill(value)
                    model[part] = value
                else:
                    source, values = draw.choice(arrays)
                    array[part].copy_from(source[part])
                    model[part] = values[part].copy()
            streams.reset(token)
        holding.close()
        wrong = sum((seen(array) != model).any() for array, model in arrays)
        del made, arrays, kept, array, source
        gc.collect()
        assert store.used == 0
        return int(wrong)


@pytest.mark.parametrize("seed", range(12))
def test_no_byte_is_wrong(seed: int) -> None:
    assert wrong_arrays(seed, f"late=3,seed={seed}", hold=False) == 0
    assert wrong_arrays(seed, f"refuse=0.2,seed={seed}", hold=True) == 0


def test_without_waits_all_runs_go_wrong() -> None:
    assert all(wrong_arrays(seed, "waits=no", hold=True) for seed in range(6))
