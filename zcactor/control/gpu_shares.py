"""The free shares of one node's GPUs: whole GPUs for actors that ask for some, shared ones for fractions. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GpuShares"]

_EPSILON: Final = 1e-9
"""Tolerance of comparisons: shares are sums of floats, and 10 x 0.1 must fit into 1."""


class GpuShares:
    """The shares of a node's GPUs that are free, by their numbers on the node.

    Args:
        total: number of GPUs; of a rest beyond a whole number, one further GPU is offered to that share.
    """

    __slots__ = ("_free", "_total")

    def __init__(self, total: float) -> None:
        whole, rest = _parts(total)
        self._total: Final = (*([1.0] * whole), *([rest] if rest else []))
        self._free: Final = list(self._total)

    @property
    def free(self) -> tuple[float, ...]:
        """The free share of each GPU, between 0 and 1."""
        return tuple(self._free)

    @property
    def key(self) -> tuple[float, ...]:
        """Equal for nodes that have room for the same requests."""
        return tuple(sorted(self._free))

    def fits(self, amount: float) -> bool:
        """Whether there is room for `amount`: for its whole part that many GPUs which nobody uses, and for the rest a
        share of one other GPU."""
        return self._choice(amount) is not None

    def take(self, amount: float) -> tuple[int, ...]:
        """Take `amount`, for which there is room. A fraction takes the fullest GPU with room for it, so that one is
        full before the next is begun.

        Returns:
            The numbers of the GPUs, ascending; the number of the shared one is last where there is one.
        """
        chosen = self._choice(amount)
        assert chosen is not None
        self._change(chosen, amount, -1.0)
        return chosen

    def retake(self, amount: float, numbers: Sequence[int]) -> None:
        """Take `amount` from the GPUs of these numbers, as `take` has returned them for the same GPUs."""
        self._change(numbers, amount, -1.0)

    def give(self, amount: float, numbers: Sequence[int]) -> None:
        """Take `amount` back, for which `take` returned `numbers`."""
        self._change(numbers, amount, 1.0)

    def _choice(self, amount: float) -> tuple[int, ...] | None:
        whole, rest = _parts(amount)
        unused = [number for number, share in enumerate(self._free) if share > 1.0 - _EPSILON]
        if len(unused) < whole:
            return None
        if not rest:
            return tuple(unused[:whole])
        taken = set(unused[:whole])
        fitting = [
            (share, number) for number, share in enumerate(self._free)
            if number not in taken and share + _EPSILON >= rest
        ]  # fmt: skip
        return (*unused[:whole], min(fitting)[1]) if fitting else None

    def _change(self, numbers: Sequence[int], amount: float, sign: float) -> None:
        whole, rest = _parts(amount)
        for number, share in zip(numbers, (*([1.0] * whole), *([rest] if rest else [])), strict=True):
            left = self._free[number] + sign * share
            bound = self._total[number]
            self._free[number] = 0.0 if left < _EPSILON else bound if bound - left < _EPSILON else left


def _parts(amount: float) -> tuple[int, float]:
    """The whole part of an amount, and the rest; a rest within the tolerance counts as none."""
    whole = int(amount + _EPSILON)
    rest = amount - whole
    return whole, rest if rest > _EPSILON else 0.0
