"""The protocol between a reducer and a hook, and the memory of the parts that a hook did not send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["Compressor", "Gather", "Hook", "Sum", "checked", "flag", "is_float", "whole"]


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """A request of a hook: the element-wise sums of `arrays` over all ranks, which are sent to the generator as a list.

    Attributes:
        arrays: of the same dtypes and shapes on all ranks, and of dtypes that a group's ``allreduce`` takes. They are
            not to be written to until the generator goes on.
    """

    arrays: Sequence[Array]


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """A request of a hook: the `arrays` of all ranks, which are sent to the generator as a list, by rank, of lists.

    Attributes:
        arrays: of any dtypes of plain bytes and any shapes. They become read-only.
    """

    arrays: Sequence[Array]


@runtime_checkable
class Hook(Protocol):
    """The method that a reducer calls. A hook belongs to one rank, and all ranks use hooks of one configuration.

    A hook may have more, which the protocol does not ask for. ``settings`` is a text that has to be the same on all
    ranks; otherwise the name of the hook's class has to be. Where it has ``snapshot()`` and ``restore(snapshot)``, a
    reducer makes it as it was before a step that fails on some rank, or has a result that is not finite.
    """

    def reduce(self, name: str, grad: Array, size: int) -> Generator[Sum | Gather, Any, Array]:
        """Exchange a gradient, and return the sum over ranks.

        Args:
            name: of the gradient; the same on all ranks, and in each step.
            grad: this rank's gradient, not to be written to.
            size: number of ranks.

        Yields:
            What the ranks exchange; every rank yields the same requests in the same order.

        Returns:
            The sum over ranks, of the shape and dtype of `grad`. The reducer divides it for a mean.
        """
        ...


def flag(what: str, value: object) -> bool:
    """`value`, which has to be a bool.

    Raises:
        ValueError: `value` is not a bool.
    """
    if value is True or value is False:
        return value
    raise ValueError(f"{what}={value!r}: True or False")


def whole(what: str, value: object, least: int, meaning: str) -> int:
    """`value`, which has to be an integer of at least `least`.

    Raises:
        ValueError: `value` is not such an integer.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise ValueError(f"{what}={value!r}: {meaning}, an integer of at least {least}")


class Compressor:
    """The part that all hooks of this package share: error feedback by name, and the state that is saved.

    Args:
        error_feedback: whether what was not sent of a gradient is added to the next one of that name.

    Raises:
        ValueError: `error_feedback` is no bool.
    """

    _agreed: tuple[str, ...] = ("error_feedback",)
    """Attributes that are the same on all ranks."""
    _counts = False
    """Whether the number of a step matters."""
    _state: tuple[str, ...] = ("_residuals", "_steps")
    """Attributes that steps change: dicts by the names of gradients, whose values are replaced."""

    def __init__(self, error_feedback: bool) -> None:
        self.error_feedback = flag("error_feedback", error_feedback)
        self._residuals: dict[str, Array] = {}
        self._steps: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        """The residuals and step counts by name, as copies; pickles, and goes to `load_state_dict` of an equal hook."""
        return {
            "residuals": {name: residual.copy() for name, residual in self._residuals.items()},
            "steps": dict(self._steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has given. Nothing changes where it raises.

        Raises:
            ValueError: a key is missing or unknown, or a value is not what `state_dict` gives.
        """
        wanted, found = sorted(self.state_dict()), sorted(state)
        if found != wanted:
            raise ValueError(f"the state of {type(self).__name__} has the keys {wanted}, not {found}")
        steps = checked(state, "steps", lambda count: isinstance(count, int) and count >= 0, "counts of steps")
        residuals = checked(state, "residuals", is_float, "arrays of float32 or float64")
        self._load(state)
        self._steps = dict(steps)
        self._residuals = {name: residual.copy() for name, residual in residuals.items()}

    def _load(self, state: Mapping[str, Any]) -> None:
        """Take over what a hook keeps besides."""

    @property
    def settings(self) -> str:
        """The kind and the arguments, in which the hooks of all ranks agree."""
        arguments = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._agreed)
        return f"{type(self).__name__}({arguments})"

    def snapshot(self) -> Any:
        """The state at this moment, for `restore`. Arrays of it are replaced by later steps, and never changed."""
        return [dict(getattr(self, name)) for name in self._state]

    def restore(self, snapshot: Any) -> None:
        """Make the state as it was at a `snapshot`."""
        for name, values in zip(self._state, snapshot, strict=True):
            setattr(self, name, dict(values))

    def _step_of(self, name: str) -> int:
        """The number of this step for the gradient `name`, from 0."""
        return self._steps.get(name, 0)

    def _corrected(self, name: str, grad: Any) -> Array:
        """`grad` with what was not sent of the one before, in C order: float64 where `grad` is, else float32.

        Raises:
            TypeError: `grad` is no array of real floats.
            ValueError: the gradient of that name had another shape or precision in the step before.
        """
        if not isinstance(grad, np.ndarray) or not (
            grad.dtype.kind == "f" or grad.dtype.type.__module__ == "ml_dtypes"
        ):
            what = f"dtype {grad.dtype}" if isinstance(grad, np.ndarray) else type(grad).__name__
            raise TypeError(f"gradient {name!r}: {type(self).__name__} takes arrays of real floats, not {what}")
        exact = np.float64 if grad.dtype == np.float64 else np.float32
        residual = self._residuals.get(name)
        if residual is None:
            return np.array(grad, dtype=exact, order="C")
        if residual.shape != grad.shape or residual.dtype != exact:
            raise ValueError(
                f"gradient {name!r} has shape {grad.shape} and dtype {grad.dtype}; in the step before it was "
                f"{residual.shape} of {residual.dtype}: give each gradient a name of its own"
            )
        with np.errstate(all="ignore"):
            corrected: Array = np.add(residual, grad, dtype=exact, order="C")
        return corrected

    @staticmethod
    def _added(grad: Array, corrected: Array, sent: Iterable[Array]) -> Array:
        """The sum of the flat gradients that the ranks have sent, in their order. It is added as precisely as
        `corrected` is, and gets the shape and dtype of `grad`."""
        total = np.zeros(grad.size, corrected.dtype)
        with np.errstate(all="ignore"):  # a step that is not finite is the caller's to see
            for each in sent:
                total += each
            return total.reshape(grad.shape).astype(grad.dtype)

    @staticmethod
    def _rest(corrected: Array, sent: Array) -> Array:
        """The part of `corrected` that was not `sent`."""
        with np.errstate(all="ignore"):
            rest: Array = np.subtract(corrected, sent.reshape(corrected.shape), dtype=corrected.dtype)
        return rest

    def _commit(self, name: str, total: Array, rest: Array | None) -> bool:
        """Keep what was not sent for the next step, and count the step. Called behind the last exchange, so that a step
        which fails before changes nothing; nor does one whose `total` is not finite, on any rank.

        Args:
            name: of the gradient.
            total: the sum over ranks.
            rest: the part of this rank's gradient that was not sent; None keeps none.

        Returns:
            Whether the step counts.
        """
        if not np.isfinite(total).all():
            return False
        if self._counts:
            self._steps[name] = self._step_of(name) + 1
        if rest is not None and self.error_feedback:
            self._residuals[name] = rest
        else:
            self._residuals.pop(name, None)
        return True


def is_float(value: Any) -> bool:
    """Whether `value` is an array of float32 or float64."""
    return isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float64)


def checked(state: Mapping[str, Any], key: str, fits: Callable[[Any], bool], what: str) -> dict[str, Any]:
    """The dict at `key` of a saved state, from names to values that `fits` accepts.

    Raises:
        ValueError: it is something else; `what` says what was expected.
    """
    values: Any = state[key]
    if not isinstance(values, dict) or not all(isinstance(name, str) and fits(one) for name, one in values.items()):
        raise ValueError(f"the state's {key} have to be a dict from names to {what}")
    return dict(values)
