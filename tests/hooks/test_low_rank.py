"""Matrices as products of two narrow ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.hooks.ranks import exchange
from zcactor.hooks import PowerSGD, Sum

LAYERS = {"w1": (64, 128), "b1": (128,), "w2": (128, 64), "b2": (64,), "w3": (64, 10), "b3": (10,)}


@pytest.mark.parametrize(("rank", "nbytes"), [(4, 8136), (1, 2640)])
def test_bytes_of_a_small_network(rank: int, nbytes: int) -> None:
    hooks = [PowerSGD(rank), PowerSGD(rank)]
    sent = [exchange(hooks, [np.ones(shape, np.float32)] * 2, name)[1] for name, shape in LAYERS.items()]
    assert sum(sent) == nbytes


def test_a_matrix_of_low_rank_is_exact() -> None:
    random = np.random.default_rng(0)
    grads = [(random.standard_normal((40, 3)) @ random.standard_normal((3, 30))) for _ in range(1)]
    results, _ = exchange([PowerSGD(3)], grads)
    np.testing.assert_allclose(results[0], grads[0], atol=1e-9)


def test_the_next_step_starts_where_the_last_one_has_ended() -> None:
    """Power iteration: for one gradient again and again, the error falls to that of the best product."""
    grad = np.random.default_rng(0).standard_normal((30, 20))
    left, values, right = np.linalg.svd(grad)
    best = np.linalg.norm(values[2:])
    hook = PowerSGD(2, error_feedback=False)
    errors = [np.linalg.norm(exchange([hook], [grad])[0][0] - grad) for _ in range(60)]
    assert errors[0] > 1.02 * best
    assert errors[-1] < 1.001 * best
    del left, right


def test_vectors_and_small_matrices_are_summed_as_they_are() -> None:
    for shape in [(100,), (1, 100), (2, 3), (4, 4)]:
        grads = [np.random.default_rng(rank).standard_normal(shape).astype(np.float32) for rank in range(2)]
        results, nbytes = exchange([PowerSGD(2), PowerSGD(2)], grads)
        np.testing.assert_array_equal(results[0], grads[0] + grads[1])
        assert nbytes == grads[0].nbytes


def test_more_dimensions_are_taken_as_rows_of_the_first() -> None:
    grads = [np.random.default_rng(rank).standard_normal((8, 4, 5, 5)) for rank in range(2)]
    deep, nbytes = exchange([PowerSGD(2), PowerSGD(2)], grads)
    flat, same = exchange([PowerSGD(2), PowerSGD(2)], [grad.reshape(8, 100) for grad in grads])
    np.testing.assert_array_equal(deep[0].reshape(8, 100), flat[0])
    assert nbytes == same == (8 + 100) * 2 * 8


def test_the_first_steps_are_summed_as_they_are() -> None:
    hooks = [PowerSGD(1, start_after=2), PowerSGD(1, start_after=2)]
    grads = [np.random.default_rng(rank).standard_normal((20, 20)) for rank in range(2)]
    for _ in range(2):
        np.testing.assert_array_equal(exchange(hooks, grads)[0][0], grads[0] + grads[1])
    assert exchange(hooks, grads)[1] == 40 * 8


def test_all_ranks_draw_alike_and_each_name_for_itself() -> None:
    grad = np.random.default_rng(0).standard_normal((20, 20))

    def asked(name: str, seed: int = 0) -> Any:
        request = next(PowerSGD(2, seed=seed).reduce(name, grad, 2))
        assert isinstance(request, Sum)
        return request.arrays[0]

    np.testing.assert_array_equal(asked("a"), asked("a"))
    assert not np.array_equal(asked("a"), asked("b"))
    assert not np.array_equal(asked("a"), asked("a", seed=1))


@pytest.mark.parametrize(
    "options", [{"rank": 0}, {"rank": 1.5}, {"rank": True}, {"rank": 1, "start_after": -1}, {"rank": 1, "seed": None}]
)
def test_arguments_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="an integer of at least"):
        PowerSGD(**options)


def test_a_saved_basis_that_is_none() -> None:
    hook = PowerSGD(1)
    exchange([hook], [np.ones((9, 9))])
    state = hook.state_dict()
    with pytest.raises(ValueError, match="bases"):
        hook.load_state_dict(state | {"bases": {"w": np.ones(3)}})
