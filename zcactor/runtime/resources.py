"""The ledger of a node's CPUs, GPUs and custom resources."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from zcactor.errors import InsufficientResources

__all__ = ["Ledger", "request_of"]

_EPSILON = 1e-9
"""Fractions are sums of floats: 10 x 0.1 must fit into 1."""


def request_of(options: Mapping[str, object]) -> dict[str, float]:
    """What an actor's options ask for, by resource name; nothing for zero."""
    request: dict[str, float] = {}
    for name, option in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        amount = options.get(option)
        if isinstance(amount, int | float) and amount > 0:
            request[name] = float(amount)
    custom = options.get("resources")
    if isinstance(custom, Mapping):
        request.update({name: float(amount) for name, amount in custom.items() if amount > 0})
    return request


class Ledger:
    """What there is, what is free, and who waits. Pure: a grant is a callback.

    Requests are served first come, first served: a small one does not overtake a large one that waits for the same
    resource, or the large one might wait for ever. Requests that have no resource in common do not wait for each other.

    Args:
        total: amounts by name.
    """

    def __init__(self, total: Mapping[str, float]) -> None:
        self.total = dict(total)
        self.free = dict(total)
        self._waiting: deque[tuple[dict[str, float], Callable[[], None]]] = deque()

    def acquire(self, request: Mapping[str, float], granted: Callable[[], None]) -> Callable[[], None]:
        """Take `request` now or later; ``granted()`` is called once it is taken, perhaps before this returns.

        Returns:
            A function that withdraws the request while it waits.

        Raises:
            InsufficientResources: it exceeds the total, so waiting would be for ever.
        """
        for name, amount in request.items():
            if amount > self.total.get(name, 0.0) + _EPSILON:
                have = ", ".join(f"{key}: {value:g}" for key, value in self.total.items()) or "none"
                raise InsufficientResources(
                    f"{amount:g} {name} were asked for, but this node has {self.total.get(name, 0.0):g} in all "
                    f"(its resources: {have}); ask for less, or pass more to zc.init()"
                )
        entry = (dict(request), granted)
        self._waiting.append(entry)
        self._serve()

        def withdraw() -> None:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._serve()

        return withdraw

    def release(self, request: Mapping[str, float]) -> None:
        """Give back what `acquire` granted."""
        for name, amount in request.items():
            left = min(self.free[name] + amount, self.total[name])
            self.free[name] = self.total[name] if self.total[name] - left < _EPSILON else left
        self._serve()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def _serve(self) -> None:
        """Grant what fits, in order; what waits keeps its resources' names from those behind it."""
        awaited: set[str] = set()
        waiting, self._waiting = self._waiting, deque()
        granted = []
        for entry in waiting:
            request = entry[0]
            if awaited.isdisjoint(request) and all(self.free[name] + _EPSILON >= n for name, n in request.items()):
                for name, amount in request.items():
                    self.free[name] = max(self.free[name] - amount, 0.0)
                granted.append(entry[1])
            else:
                awaited.update(request)
                self._waiting.append(entry)
        for grant in granted:
            grant()
