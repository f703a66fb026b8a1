"""Gradients as numbers of one byte, with a scale for each block of elements."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from zcactor.hooks.base import Compressor, Gather, flag, whole

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

__all__ = ["FP8", "Int8", "float8_values", "to_float8"]


class _Float8(NamedTuple):
    mantissa: int  # bits
    bias: int
    largest: float


_FORMATS: Final = {"e4m3": _Float8(3, 7, 448.0), "e5m2": _Float8(2, 15, 57344.0)}
"""Micikevicius et al., *FP8 Formats for Deep Learning*, 2022. Infinity is never written."""


def float8_values(kind: str) -> NDArray[np.float32]:
    """The value of each of the 256 bit patterns of a float8 format; those above the largest number are NaN."""
    mantissa, bias, largest = _FORMATS[kind]
    codes = np.arange(128)
    exponent, fraction = codes >> mantissa, codes & ((1 << mantissa) - 1)
    scaled = np.where(exponent == 0, fraction, fraction + (1 << mantissa)).astype(np.float64)
    positive = np.ldexp(scaled, np.maximum(exponent, 1) - bias - mantissa)
    positive[positive > largest] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


def to_float8(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """The bit patterns of the nearest float8 numbers, ties to even. NaN stays NaN.

    Args:
        values: of magnitudes up to the largest number of the format.
        kind: ``"e4m3"`` or ``"e5m2"``.
    """
    mantissa, bias, largest = _FORMATS[kind]
    missing = np.isnan(values)
    magnitude = np.where(missing, np.float32(0), np.minimum(np.abs(values), np.float32(largest)))
    bits = magnitude.view(np.uint32)
    dropped = 23 - mantissa
    # As in bfloat16: adding half of the last kept bit carries exactly where rounding goes up.
    normal = (bits + ((1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1))) >> dropped
    normal = normal.astype(np.int64) - ((127 - bias) << mantissa)
    # Below the least normal number all have one exponent: the code is the multiple of the least number.
    small = np.rint(np.ldexp(magnitude, bias - 1 + mantissa)).astype(np.int64)
    codes = np.where(magnitude < np.float32(2.0 ** (1 - bias)), small, normal)
    codes = np.where(missing, 127, codes) | (np.signbit(values).astype(np.int64) << 7)
    patterns: NDArray[np.uint8] = codes.astype(np.uint8)
    return patterns


class _Blockwise(Compressor, ABC):
    """A hook that sends one byte an element and a float32 scale a block."""

    def __init__(self, block: int, error_feedback: bool) -> None:
        super().__init__(error_feedback)
        self.block = whole("block", block, 1, "elements that share a scale")

    def reduce(self, name: str, grad: NDArray[Any], size: int) -> Generator[Gather, Any, NDArray[Any]]:
        """See `zcactor.hooks.Hook.reduce`. The sum is made in the order of ranks.

        Raises:
            TypeError: `grad` has no real floats.
            ValueError: the gradient of that name had another shape or precision before.
        """
        del size
        corrected = self._corrected(name, grad)
        codes, scales = self._encode(name, corrected.astype(np.float32, copy=False).reshape(-1))
        ranks = yield Gather([codes, scales])
        total = self._added(grad, corrected, (self._decode(*theirs) for theirs in ranks))
        rest = self._rest(corrected, self._decode(codes, scales)) if self.error_feedback else None
        self._commit(name, total, rest)
        return total

    def _scaled(self, values: NDArray[np.float32], largest: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """`values` by their blocks' scales, so that each block's largest magnitude is `largest`; and the scales.

        Raises:
            ValueError: a value is infinite or NaN, which no scale brings into range.
        """
        blocks = -(-values.size // self.block)
        padded: NDArray[np.float32] = np.zeros((blocks, self.block), np.float32)
        padded.reshape(-1)[: values.size] = values
        peaks = np.abs(padded).max(axis=1, initial=0.0)
        if not np.isfinite(peaks).all():
            raise ValueError(f"{type(self).__name__} cannot encode infinity or NaN: skip the step, as a scaler does")
        scales = (peaks / np.float32(largest)).astype(np.float32)
        # A block of zeros, or of numbers so small that float32 cannot hold their scale, is sent as zeros.
        divisors = np.where(scales > 0, scales, np.float32(1))
        padded = np.where(scales[:, None] > 0, padded / divisors[:, None], np.float32(0))
        return np.clip(padded, -largest, largest).reshape(-1)[: values.size], scales

    def _spread(self, values: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
        """`values` times their blocks' scales."""
        return values * np.repeat(np.asarray(scales, np.float32), self.block)[: values.size]

    @abstractmethod
    def _encode(self, name: str, values: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The codes of `values`, one byte each, and the scales of their blocks."""

    @abstractmethod
    def _decode(self, codes: NDArray[Any], scales: NDArray[np.float32]) -> NDArray[np.float32]:
        """The values of codes."""


class Int8(_Blockwise):
    """A hook that sends each gradient as integers of 8 bits and a scale a block: 1 + 4 / `block` bytes an element.

    Alistarh et al., *QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding*, 2017.

    Args:
        block: elements that share a scale, at least 1.
        stochastic: whether rounding goes up as often as the value is near the upper number, so that the mean over many
            steps is exact; else to the nearest.
        seed: of this rounding, which also depends on the gradient's name and the step. Ranks that shall round
            independently of each other get seeds of their own.
        error_feedback: whether what rounding took away is added to the next gradient of that name.

    Raises:
        ValueError: an argument is out of range.
    """

    _agreed = ("block", "stochastic", "error_feedback")
    _counts = True

    def __init__(self, block: int = 256, stochastic: bool = True, seed: int = 0, error_feedback: bool = True) -> None:
        super().__init__(block, error_feedback)
        self.stochastic = flag("stochastic", stochastic)
        self.seed = whole("seed", seed, 0, "the start of the random numbers")

    def _encode(self, name: str, values: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.float32]]:
        scaled, scales = self._scaled(values, 127.0)
        if not self.stochastic:
            return np.rint(scaled).astype(np.int8), scales
        drawn = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        chance = np.random.default_rng([self.seed, drawn, self._step_of(name)]).random(scaled.size, dtype=np.float32)
        return np.clip(np.floor(scaled + chance), -127, 127).astype(np.int8), scales

    def _decode(self, codes: NDArray[Any], scales: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._spread(np.asarray(codes, np.int8).astype(np.float32), scales)


class FP8(_Blockwise):
    """A hook that sends each gradient as float8 and a scale a block: 1 + 4 / `block` bytes an element.

    Args:
        kind: ``"e4m3"`` (more precise) or ``"e5m2"`` (of wider range).
        block: elements that share a scale, at least 1.
        error_feedback: whether what rounding took away is added to the next gradient of that name.

    Raises:
        ValueError: an argument is out of range.
    """

    _agreed = ("kind", "block", "error_feedback")

    def __init__(self, kind: Literal["e4m3", "e5m2"] = "e4m3", block: int = 128, error_feedback: bool = True) -> None:
        super().__init__(block, error_feedback)
        if kind not in _FORMATS:
            raise ValueError(f"kind={kind!r}: one of {', '.join(map(repr, _FORMATS))}")
        self.kind = kind
        self._values = float8_values(kind)

    def _encode(self, name: str, values: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.float32]]:
        del name
        scaled, scales = self._scaled(values, _FORMATS[self.kind].largest)
        return to_float8(scaled, self.kind), scales

    def _decode(self, codes: NDArray[Any], scales: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._spread(self._values[np.asarray(codes, np.uint8)], scales)
