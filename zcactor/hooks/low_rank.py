"""Gradients of matrices as products of two narrow ones."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from zcactor.hooks.base import Compressor, Sum, checked, is_float, whole

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from numpy.typing import NDArray

__all__ = ["PowerSGD"]


class PowerSGD(Compressor):
    """A hook that sends a matrix of m rows and n columns as (m + n) x `rank` numbers.

    Vogels, Karimireddy and Jaggi, *PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization*,
    2019: one step of power iteration, which starts where the step before has ended. A gradient of more dimensions is
    taken as (shape[0], -1). A vector, and a matrix that the product would not make smaller, is summed as it is.

    Args:
        rank: columns of the narrow matrices, at least 1.
        start_after: steps of each gradient that are summed as they are before, at least 0.
        seed: of the first narrow matrix, which all ranks draw alike.
        error_feedback: whether what the product lacks is added to the next gradient of that name.

    Raises:
        ValueError: an argument is out of range.
    """

    _agreed = ("rank", "start_after", "seed", "error_feedback")
    _counts = True
    _state = ("_residuals", "_steps", "_bases")

    def __init__(self, rank: int, start_after: int = 0, seed: int = 0, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        self.rank = whole("rank", rank, 1, "columns of the narrow matrices")
        self.start_after = whole("start_after", start_after, 0, "steps without compression")
        self.seed = whole("seed", seed, 0, "the start of the random numbers")
        self._bases: dict[str, NDArray[Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        """See `Compressor.state_dict`; the narrow matrices come along, as the next step starts with them."""
        return super().state_dict() | {"bases": {name: basis.copy() for name, basis in self._bases.items()}}

    def _load(self, state: Mapping[str, Any]) -> None:
        bases = checked(state, "bases", lambda one: is_float(one) and one.ndim == 2, "matrices of floats")
        self._bases = {name: basis.copy() for name, basis in bases.items()}

    def reduce(self, name: str, grad: NDArray[Any], size: int) -> Generator[Sum, Any, NDArray[Any]]:
        """See `zcactor.hooks.Hook.reduce`.

        Raises:
            TypeError: `grad` has no real floats.
            ValueError: the gradient of that name had another shape or precision before.
        """
        del size
        step = self._step_of(name)
        corrected = self._corrected(name, grad)
        rows = grad.shape[0] if grad.ndim > 1 else 1
        columns = grad.size // rows if rows else 0
        if step < self.start_after or rows <= 1 or (rows + columns) * self.rank >= grad.size:
            (total,) = yield Sum([corrected])
            same: NDArray[Any] = np.asarray(total).astype(grad.dtype)
            self._commit(name, same, None)
            return same
        matrix = corrected.reshape(rows, columns)
        basis = self._bases.get(name)
        if basis is None or basis.shape != (columns, self.rank) or basis.dtype != matrix.dtype:
            basis = self._drawn(name, columns).astype(matrix.dtype)
        (left,) = yield Sum([_product(matrix, basis)])
        # The same bits on all ranks, as the sum has them. LAPACK is not asked about what is not finite.
        left = np.linalg.qr(np.asarray(left))[0] if np.isfinite(left).all() else np.full_like(left, np.nan)
        ours = _product(matrix.T, left)
        (right,) = yield Sum([ours])
        right = np.array(right)
        product: NDArray[Any] = _product(left, right.T).reshape(grad.shape).astype(grad.dtype)
        if self._commit(name, product, self._rest(corrected, _product(left, ours.T))):
            self._bases[name] = right
        return product

    def _drawn(self, name: str, columns: int) -> NDArray[Any]:
        """The first narrow matrix of the gradient `name`."""
        drawn = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        return np.random.default_rng([self.seed, drawn]).standard_normal((columns, self.rank))


def _product(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """The matrix product. NumPy would warn of infinities, which the caller of a step sees in its result."""
    with np.errstate(all="ignore"):
        product: NDArray[Any] = left @ right
    return product
