"""Arrays on GPUs that are given to groups: their layouts, the work on them, and how long they are read-only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvloop

import zcactor as zc
from tests.collectives.gpu_ranks import gpu_ranks, running
from tests.device.helpers import array_on, held, opened, seen
from zcactor.collectives.gpu_sources import Borrowed, taken

LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop: nothing here depends on its kind."""

VALUES = np.arange(12, dtype="i4").reshape(3, 4)


def process(store: Any) -> Any:
    """A process with GPUs."""
    return SimpleNamespace(store=SimpleNamespace(devices=lambda: store))


def test_an_array_in_one_piece_is_taken_as_it_is() -> None:
    with opened() as store:
        x = array_on(store.gpu(0), VALUES)
        for part in (x, x[1:], x[1:2, :3], x[:0], x.reshape(-1)):
            found = taken(process(store), part, "call")
            assert found.array is part and found.given is part and found.library == "" and found.gpu is store.gpu(0)


def test_an_array_with_gaps_is_copied_on_its_gpu() -> None:
    with opened() as store:
        x = array_on(store.gpu(0), VALUES)
        for part, wanted in ((x.T, VALUES.T), (x[:, ::2], VALUES[:, ::2]), (x[::-1], VALUES[::-1])):
            found = taken(process(store), part, "call")
            assert found.array is not part and found.given is part
            assert np.array_equal(seen(found.array), wanted)


def test_an_array_of_cupy() -> None:
    pytest.importorskip("cupy")
    with opened() as store:
        x = array_on(store.gpu(0), VALUES)
        found = taken(process(store), x.as_cupy(), "call")
        assert found.library == "cupy" and found.array.holder is x.holder and found.array.shape == (3, 4)


def test_work_that_is_queued_later_is_not_waited_for() -> None:
    with opened() as store:
        x = array_on(store.gpu(0), VALUES)
        with held(store.driver):
            x.fill(1)
            after = taken(process(store), x, "call").after
            x.fill(2)
            assert len(after) == 1 and not after[0].done()
            assert x.holder.work.writes() != after


def test_values_that_are_no_arrays_on_a_gpu_here() -> None:
    with opened() as store, pytest.raises(TypeError, match="call: the elements of this list on a GPU have no dtype"):
        taken(process(store), [1], "call")


def test_an_array_of_an_earlier_runtime() -> None:
    with opened() as former, opened() as store:
        x = array_on(former.gpu(0), VALUES)
        with pytest.raises(zc.DeviceUnavailable, match="call: .* is of an earlier runtime; make the array anew"):
            taken(process(store), x, "call")


def test_a_borrowed_array_is_read_only_until_all_loans_end() -> None:
    with opened() as store:
        x = array_on(store.gpu(0), VALUES)
        loans = [Borrowed(x[1:]), Borrowed(x)]
        for loan in loans:
            assert x.readonly
            with pytest.raises(ValueError, match="read-only"):
                x[:1].fill(1)
            loan.end()
            loan.end()
        x.fill(1)
        assert not x.readonly


async def test_without_waits_the_order_is_wrong() -> None:
    """The test of order in `test_gpu_operations` would see a wait that is missing."""
    async with running("devices=2,late=20,waits=no"), gpu_ranks(2) as (group, actors):
        found = await zc.get([actor.late(group, rank) for rank, actor in enumerate(actors)], timeout=30)
        assert any(sums != [3.0] * 5 or overwritten != [9.0] * 5 for sums, overwritten in found)


async def test_explain_says_which_way_arrays_on_gpus_go() -> None:
    async with running("devices=2"), gpu_ranks(2, nccl=False) as (group, actors):
        assert (await group.explain(1 << 20)).gpus == "the first member has not used a GPU"
        await actors[0].seen()
        plan = await group.explain(1 << 20)
        assert plan.gpus == "NCCL does not know fake GPUs"
        assert str(plan).endswith("\narrays on GPUs: NCCL does not know fake GPUs")
        await actors[0].use("")
        assert (await group.explain(1 << 20)).gpus == "nccl"
