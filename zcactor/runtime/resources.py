"""The ledger of what the nodes have: CPUs, GPUs and custom resources."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

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


class _Amounts(msgspec.Struct):
    """Of one node."""

    total: dict[str, float]
    free: dict[str, float]

    def ever(self, request: Mapping[str, float]) -> bool:
        """Whether it fits when nothing else is there."""
        return all(amount <= self.total.get(name, 0.0) + _EPSILON for name, amount in request.items())

    def now(self, request: Mapping[str, float]) -> bool:
        """Whether it fits as things are."""
        return all(self.free.get(name, 0.0) + _EPSILON >= amount for name, amount in request.items())

    def take(self, request: Mapping[str, float]) -> None:
        for name, amount in request.items():
            self.free[name] = max(self.free[name] - amount, 0.0)

    def give(self, request: Mapping[str, float]) -> None:
        for name, amount in request.items():
            left = min(self.free[name] + amount, self.total[name])
            self.free[name] = self.total[name] if self.total[name] - left < _EPSILON else left


class _Waiting(msgspec.Struct, eq=False):
    """One request in the queue."""

    request: dict[str, float]
    order: Callable[[], Sequence[str]]
    granted: Callable[[str], None]
    refused: Callable[[InsufficientResources], None]


class Ledger:
    """What the nodes have, what is free, and who waits. Pure: a grant is a callback.

    Requests are served first come, first served: a small one does not overtake a large one that waits for the same
    resource of the same node, or the large one might wait for ever. Requests that have nothing in common do not wait
    for each other.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _Amounts] = {}
        self._waiting: deque[_Waiting] = deque()

    def add(self, node: str, total: Mapping[str, float]) -> None:
        """A node is there, with `total` amounts by name; those who wait may fit into it."""
        self._nodes[node] = _Amounts(dict(total), dict(total))
        self._serve()

    def remove(self, node: str) -> None:
        """A node is gone, and what was taken from it: who waits and fits nowhere any more is refused."""
        del self._nodes[node]
        self._serve()

    def total(self, node: str | None = None) -> dict[str, float]:
        """Amounts of `node`, or of all."""
        return _sum(amounts.total for amounts in self._of(node))

    def free(self, node: str | None = None) -> dict[str, float]:
        """What is free of them."""
        return _sum(amounts.free for amounts in self._of(node))

    def _of(self, node: str | None) -> Iterable[_Amounts]:
        return self._nodes.values() if node is None else (self._nodes[node],)

    def acquire(
        self,
        request: Mapping[str, float],
        order: Callable[[], Sequence[str]],
        granted: Callable[[str], None],
        refused: Callable[[InsufficientResources], None],
    ) -> Callable[[], None]:
        """Take `request` from one of the nodes, now or later.

        Args:
            request: amounts by name; may be empty.
            order: the nodes that may be taken, the preferred one first; asked each time that something has changed.
            granted: called with the node once it is taken, perhaps before this returns.
            refused: called when the last node into which it could ever fit has gone while it waited.

        Returns:
            A function that withdraws the request while it waits.

        Raises:
            InsufficientResources: it fits into none of the nodes even when they are empty, so waiting would be for
                ever.
        """
        entry = _Waiting(dict(request), order, granted, refused)
        if not self._possible(entry):
            raise self._refusal(entry)
        self._waiting.append(entry)
        self._serve()

        def withdraw() -> None:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._serve()

        return withdraw

    def release(self, node: str, request: Mapping[str, float]) -> None:
        """Give back what `acquire` granted; of a node that is gone there is nothing to give back."""
        amounts = self._nodes.get(node)
        if amounts is not None:
            amounts.give(request)
            self._serve()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def _possible(self, entry: _Waiting) -> list[str]:
        """The nodes into which it fits when they are empty."""
        return [node for node in entry.order() if node in self._nodes and self._nodes[node].ever(entry.request)]

    def _refusal(self, entry: _Waiting) -> InsufficientResources:
        nodes = [node for node in entry.order() if node in self._nodes]
        if len(nodes) == 1:
            total = self._nodes[nodes[0]].total
            have = _words(total) or "none"
            for name, amount in entry.request.items():
                if amount > total.get(name, 0.0) + _EPSILON:
                    return InsufficientResources(
                        f"{amount:g} {name} were asked for, but this node has {total.get(name, 0.0):g} in all "
                        f"(its resources: {have}); ask for less, or give the node more: zc.init(...) or zcactor start "
                        "take num_cpus, num_gpus and resources"
                    )
        have = "; ".join(f"{node[:8]}: {_words(self._nodes[node].total) or 'none'}" for node in nodes)
        return InsufficientResources(
            f"no node has {_words(entry.request) or 'room'} in all (nodes that may be taken: {have or 'none'}); ask "
            "for less, or start a node that has as much: zcactor start --resources"
        )

    def _serve(self) -> None:
        """Grant what fits, in order; what waits keeps its resources from those behind it."""
        awaited: set[tuple[str, str]] = set()
        waiting, self._waiting = self._waiting, deque()
        calls: list[Callable[[], None]] = []
        for entry in waiting:
            request = entry.request
            possible = self._possible(entry)
            for node in possible:
                if self._nodes[node].now(request) and awaited.isdisjoint((node, name) for name in request):
                    self._nodes[node].take(request)
                    calls.append(lambda granted=entry.granted, node=node: granted(node))  # type: ignore[misc]
                    break
            else:
                if possible:
                    awaited.update((node, name) for node in possible for name in request)
                    self._waiting.append(entry)
                else:
                    calls.append(lambda entry=entry: entry.refused(self._refusal(entry)))  # type: ignore[misc]
        for call in calls:
            call()


def _sum(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    amounts: dict[str, float] = {}
    for one in each:
        for name, amount in one.items():
            amounts[name] = amounts.get(name, 0.0) + amount
    return amounts


def _words(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in amounts.items())
