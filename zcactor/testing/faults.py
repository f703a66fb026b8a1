"""The faults of a connection that `zc_loopback` makes, and the moments at which they strike."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FAULTS", "LinkFaults", "check_faults"]

FAULTS: Final = ("delay", "break_after", "stall")
"""The valid keys, in the order of messages."""


def check_faults(faults: Mapping[str, Any]) -> None:
    """Check the faults that a test has asked for.

    Raises:
        TypeError: a key is unknown, or a value has the wrong type; the message names the valid keys, or the form.
        ValueError: a number is negative, or not finite, or a pair is in the wrong order.
    """
    unknown = [key for key in faults if key not in FAULTS]
    if unknown:
        raise TypeError(f"zc_loopback: unknown fault {unknown[0]!r}; valid ones: {', '.join(FAULTS)}")
    if "delay" in faults:
        low, high = _pair("delay", faults["delay"], "(low, high), in seconds")
        if low > high:
            raise ValueError(f"zc_loopback: delay is (low, high) with low <= high, not {faults['delay']!r}")
    if "stall" in faults:
        _pair("stall", faults["stall"], "(at, seconds), both in seconds")
    if "break_after" in faults:
        frames = faults["break_after"]
        if type(frames) is not int:
            raise TypeError(f"zc_loopback: break_after is a number of frames, such as 20, not {frames!r}")
        if frames < 0:
            raise ValueError(f"zc_loopback: break_after is a number of frames, 0 or more, not {frames}")


def _pair(name: str, value: Any, form: str) -> tuple[float, float]:
    numbers = value if isinstance(value, tuple | list) else ()
    if len(numbers) != 2 or any(isinstance(each, bool) or not isinstance(each, int | float) for each in numbers):
        raise TypeError(f"zc_loopback: {name} is {form}, not {value!r}")
    first, second = map(float, numbers)
    if not (0 <= first < math.inf and 0 <= second < math.inf):
        raise ValueError(f"zc_loopback: {name} is {form}, each 0 or more and finite, not {value!r}")
    return first, second


class LinkFaults:
    """The faults of one pair. They begin with `begin`; before that, connections work.

    Args:
        time: the clock, in seconds, that delays and stalls are counted by.
        seed: of the delays.
        faults: checked by `check_faults`.
    """

    def __init__(self, time: Callable[[], float], seed: int, faults: Mapping[str, Any]) -> None:
        self._time = time
        self._drawn = random.Random(f"{seed}/delays")
        self._delay: tuple[float, float] | None = faults.get("delay")
        self._stall: tuple[float, float] = faults.get("stall", (0.0, 0.0))
        self.break_after: int | None = faults.get("break_after")
        self.left = self.break_after
        """Frames, of both directions, until the connection breaks; None where it does not, or has done so."""
        self.begun: float | None = None
        """The time at which the faults have begun."""

    def begin(self) -> None:
        """Let the faults happen from now on. Idempotent."""
        if self.begun is None:
            self.begun = self._time()

    def arrival(self) -> float:
        """The time at which a batch arrives that is sent now."""
        now = self._time()
        if self.begun is None:
            return now
        when = now if self._delay is None else now + self._drawn.uniform(*self._delay)
        at, seconds = self._stall
        begin = self.begun + at
        return max(when, begin + seconds) if begin <= when < begin + seconds else when
