"""The behaviour that all hooks share: arguments, the memory of parts that were not sent, and saved state."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import zcactor as zc
from tests.hooks.ranks import exchange
from zcactor.hooks import BF16, FP8, Hook, Int8, PowerSGD, TopK
from zcactor.hooks.base import Compressor

Make = Callable[..., Any]
HOOKS: list[Make] = [
    BF16, lambda **options: Int8(block=16, **options), lambda **options: FP8("e4m3", block=16, **options),
    lambda **options: FP8("e5m2", block=16, **options), lambda **options: TopK(0.1, **options),
    lambda **options: PowerSGD(2, **options),
]  # fmt: skip
NAMES = ["bf16", "int8", "e4m3", "e5m2", "topk", "powersgd"]
every_hook = pytest.mark.parametrize("make", HOOKS, ids=NAMES)


def gradients(ranks: int = 3, dtype: Any = np.float32, step: int = 0) -> list[Any]:
    return [np.random.default_rng([rank, step]).standard_normal((24, 16)).astype(dtype) for rank in range(ranks)]


def test_the_public_names() -> None:
    assert zc.hooks.BF16 is BF16
    assert isinstance(BF16(), Hook)
    assert not isinstance(object(), Hook)


@every_hook
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_the_sum_is_near(make: Make, dtype: Any) -> None:
    """Nearer than no gradient at all; how near is each hook's own test."""
    grads = gradients(dtype=dtype)
    exact = sum(grad.astype(np.float64) for grad in grads)
    (result, *_), nbytes = exchange([make() for _ in grads], grads)
    assert np.linalg.norm(result.astype(np.float64) - exact) < np.linalg.norm(exact)
    assert nbytes < exact.size * 4


@every_hook
def test_gradients_are_not_written_to(make: Make) -> None:
    grads = gradients()
    before = [grad.copy() for grad in grads]
    for grad in grads:
        grad.flags.writeable = False
    exchange([make() for _ in grads], grads)
    np.testing.assert_array_equal(grads, before)


@every_hook
def test_strides_do_not_matter(make: Make) -> None:
    grads = gradients()
    straight, _ = exchange([make() for _ in grads], grads)
    turned, _ = exchange([make() for _ in grads], [np.asfortranarray(grad) for grad in grads])
    np.testing.assert_array_equal(straight[0], turned[0])


@every_hook
def test_feedback_sends_in_the_end_what_was_left_out(make: Make) -> None:
    """The parts sent over many steps of one gradient add up to that gradient; without feedback they do not."""
    grads = gradients()
    exact = sum(grads)
    errors = {}
    for feedback in (True, False):
        hooks = [make(error_feedback=feedback) for _ in grads]
        total = sum(exchange(hooks, grads)[0][0].astype(np.float64) for _ in range(40)) / 40
        errors[feedback] = np.linalg.norm(total - exact) / np.linalg.norm(exact)
    assert errors[True] < 0.15
    assert errors[True] < errors[False]


@every_hook
@pytest.mark.parametrize("grad", [np.arange(4), np.ones(3, np.complex64), np.array(["a"]), [1.0, 2.0]])
def test_what_is_no_array_of_real_floats(make: Make, grad: Any) -> None:
    with pytest.raises(TypeError, match="gradient 'w'.*real floats"):
        next(make().reduce("w", grad, 2))


@every_hook
def test_another_shape_under_the_same_name(make: Make) -> None:
    hook = make()
    exchange([hook, make()], gradients(2))
    with pytest.raises(ValueError, match=r"gradient 'w' has shape \(24, 15\).*\(24, 16\).*name of its own"):
        next(hook.reduce("w", np.ones((24, 15), np.float32), 2))
    exchange([hook, make()], [np.ones((24, 15), np.float32)] * 2, name="other")


@every_hook
def test_saved_state_goes_on_alike(make: Make) -> None:
    """Steps after a restart give the same bits as without one."""
    hooks = [make() for _ in range(2)]
    exchange(hooks, gradients(2))
    saved = pickle.loads(pickle.dumps([hook.state_dict() for hook in hooks]))
    expected, _ = exchange(hooks, gradients(2, step=1))
    again = [make() for _ in range(2)]
    for hook, state in zip(again, saved, strict=True):
        hook.load_state_dict(state)
    results, _ = exchange(again, gradients(2, step=1))
    np.testing.assert_array_equal(results[0], expected[0])


@every_hook
def test_saved_state_is_a_copy(make: Make) -> None:
    hook = make()
    exchange([hook], gradients(1))
    saved = hook.state_dict()
    for residual in saved["residuals"].values():
        residual += 1
    again = hook.state_dict()["residuals"]
    assert all(not np.array_equal(again[name], saved["residuals"][name]) for name in again)
    assert list(again) == ["w"]


@pytest.mark.parametrize(
    "change",
    [
        {"more": {}},
        {"steps": {"w": -1}},
        {"steps": {1: 1}},
        {"steps": [1]},
        {"residuals": {"w": [1.0]}},
        {"residuals": {"w": np.arange(3)}},
    ],
)
def test_a_state_that_is_none(change: dict[str, Any]) -> None:
    hook = BF16()
    exchange([hook], gradients(1))
    before = hook.state_dict()
    with pytest.raises(ValueError, match="state"):
        hook.load_state_dict(before | change)
    with pytest.raises(ValueError, match="has the keys"):
        hook.load_state_dict({})
    assert hook.state_dict().keys() == before.keys()
    np.testing.assert_array_equal(hook.state_dict()["residuals"]["w"], before["residuals"]["w"])


@every_hook
@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_error_feedback_is_a_bool(make: Make, value: Any) -> None:
    with pytest.raises(ValueError, match=f"error_feedback={value!r}"):
        make(error_feedback=value)


@every_hook
@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 5), (5, 0)])
def test_gradients_of_few_elements(make: Make, shape: tuple[int, ...]) -> None:
    grads = [np.ones(shape, np.float32), np.ones(shape, np.float32)]
    results, _ = exchange([make() for _ in grads], grads)
    np.testing.assert_allclose(results[0], np.full(shape, 2, np.float32), rtol=0.01)


def test_without_feedback_nothing_is_kept() -> None:
    hook = BF16(error_feedback=False)
    exchange([hook], gradients(1))
    assert hook.state_dict() == {"residuals": {}, "steps": {}}
    assert isinstance(hook, Compressor)
