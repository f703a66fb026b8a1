"""The ledger of the nodes' resources: CPUs, GPUs and custom resources."""

from __future__ import annotations

import copy
import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.errors import InsufficientResources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from zcactor.options import ActorSpec

__all__ = ["Amounts", "GpuShares", "Ledger", "Order", "QueuedRequest", "request_of"]

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


_GPU = "GPU"
"""The name of the resource of which each piece is one of its own, and not only an amount."""
_NAMED = 8
"""Nodes that a refusal lists."""


def request_of(spec: ActorSpec) -> dict[str, float]:
    """The resources that an actor asks for, by name; a zero amount is left out."""
    asked = {"CPU": spec.num_cpus, _GPU: spec.num_gpus, **spec.resources}
    return {name: float(amount) for name, amount in asked.items() if amount > 0}


class Order(msgspec.Struct, frozen=True):
    """The nodes that a request may take, and those that it prefers.

    Args:
        where: ``"spread"`` prefers the node with the fewest actors, ``"pack"`` the node with the most; the id of a node
            allows no other; None prefers `near`. Among equals the node that joined first comes first.
        near: returns the id of the node that None prefers, None for no node; called when the request is about to be
            granted.
    """

    where: str | None
    near: Callable[[], str | None]

    @property
    def only(self) -> str | None:
        """The id of the only node that may be taken; None for all."""
        return None if self.where in (None, "spread", "pack") else self.where


class Amounts(msgspec.Struct):
    """The resources of one node."""

    total: dict[str, float]
    free: dict[str, float]
    shape: frozenset[tuple[str, float]]
    """`total`, as a key."""
    number: int
    """The node's number, in the order of joining."""
    gpus: GpuShares
    """The shares of each GPU of which the free amount of GPUs consists."""
    actors: int = 0
    """Grants that were not released."""

    def ever(self, request: Mapping[str, float]) -> bool:
        """Whether `request` fits into the empty node."""
        return _fits(request, self.total)

    def now(self, request: Mapping[str, float]) -> bool:
        """Whether `request` fits into the node as it is."""
        return _fits(request, self.free) and (_GPU not in request or self.gpus.fits(request[_GPU]))

    def take(self, request: Mapping[str, float]) -> tuple[int, ...]:
        """Grant `request`, for which there is room. Returns the numbers of its GPUs on the node."""
        self._subtract(request)
        return self.gpus.take(request[_GPU]) if _GPU in request else ()

    def retake(self, request: Mapping[str, float], gpus: Sequence[int]) -> None:
        """Grant `request` with the GPUs of these numbers."""
        self._subtract(request)
        if _GPU in request:
            self.gpus.retake(request[_GPU], gpus)

    def _subtract(self, request: Mapping[str, float]) -> None:
        self.actors += 1
        for name, amount in request.items():
            self.free[name] = max(self.free[name] - amount, 0.0)

    def give(self, request: Mapping[str, float], gpus: Sequence[int]) -> None:
        """Take `request` back, for which `take` returned `gpus`."""
        self.actors -= 1
        if _GPU in request:
            self.gpus.give(request[_GPU], gpus)
        for name, amount in request.items():
            left = min(self.free[name] + amount, self.total[name])
            self.free[name] = self.total[name] if self.total[name] - left < _EPSILON else left


class QueuedRequest(msgspec.Struct, eq=False):
    """A request in the queue."""

    number: int
    """The request's number, in the order of arrival."""
    request: dict[str, float]
    order: Order
    granted: Callable[[str, tuple[int, ...]], None]
    refused: Callable[[InsufficientResources], None]

    @property
    def kind(self) -> tuple[str | None, frozenset[tuple[str, float]]]:
        """The key that requests share which fit into the same nodes."""
        return self.order.only, frozenset(self.request.items())


class _Groups:
    """Groups of nodes with the same total amounts, free amounts and number of actors: a group is looked at as one
    node."""

    def __init__(self) -> None:
        self._nodes: dict[object, list[tuple[int, str]]] = {}

    def __iter__(self) -> Iterator[list[tuple[int, str]]]:
        """The groups, each a list of its nodes' numbers and ids, in the order in which they joined."""
        return iter(self._nodes.values())

    def add(self, node: str, amounts: Amounts) -> None:
        insort(self._nodes.setdefault(self._key(amounts), []), (amounts.number, node))

    def remove(self, node: str, amounts: Amounts) -> None:
        key = self._key(amounts)
        group = self._nodes[key]
        del group[bisect_left(group, (amounts.number, node))]
        if not group:
            del self._nodes[key]

    @staticmethod
    def _key(amounts: Amounts) -> object:
        return amounts.shape, frozenset(amounts.free.items()), amounts.gpus.key, amounts.actors


class _Awaited:
    """Resources that earlier requests wait for, of all nodes of a shape or of one node."""

    def __init__(self) -> None:
        self._names: dict[object, set[str]] = {}
        self.nodes = False
        """Whether a resource is awaited of one node alone."""

    def add(self, where: object, request: Mapping[str, float]) -> None:
        """Add the resources of `request`; `where` is a shape, or the id of a node."""
        self._names.setdefault(where, set()).update(request)

    def free(self, where: object, request: Mapping[str, float]) -> bool:
        """Whether no resource of `request` is awaited at `where`."""
        names = self._names.get(where)
        return names is None or names.isdisjoint(request)


class Ledger:
    """The resources of the nodes, their free amounts, and the waiting requests. Pure: a grant is a callback.

    Requests are served first come, first served: a small one does not overtake a large one that waits for the same
    resource of the same node, or the large one might wait for ever. Requests without a common resource do not wait for
    each other.

    The cost of a step grows with the number of different kinds of nodes (`_Groups`) and of waiting requests, not with
    the number of nodes and requests.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Amounts] = {}
        self._groups = _Groups()
        self._shapes: dict[frozenset[tuple[str, float]], int] = {}
        """The number of nodes for each shape, that is for their total amounts."""
        self._waiting: dict[object, OrderedDict[int, QueuedRequest]] = {}
        """The waiting requests by `QueuedRequest.kind`, and within a kind by number."""
        self._closed: set[str] = set()
        """Nodes that get no grants: they belong to no group."""
        self._joined = 0
        self._asked = 0

    def add(self, node: str, total: Mapping[str, float]) -> None:
        """Add a node, with `total` amounts by name; waiting requests may fit into it."""
        self._joined += 1
        gpus = GpuShares(total.get(_GPU, 0.0))
        amounts = Amounts(dict(total), dict(total), frozenset(total.items()), self._joined, gpus)
        self._nodes[node] = amounts
        self._shapes[amounts.shape] = self._shapes.get(amounts.shape, 0) + 1
        self._groups.add(node, amounts)
        self._serve()

    def remove(self, node: str) -> None:
        """Remove a node with its grants, and refuse the waiting requests that fit into no other node."""
        amounts = self._nodes.pop(node)
        if node in self._closed:
            self._closed.remove(node)
        else:
            self._groups.remove(node, amounts)
        self._shapes[amounts.shape] -= 1
        if not self._shapes[amounts.shape]:
            del self._shapes[amounts.shape]
        self._serve()

    def close(self, node: str) -> None:
        """Grant nothing at `node` until `open` is called. Requests that fit nowhere else wait."""
        self._groups.remove(node, self._nodes[node])
        self._closed.add(node)

    def open(self, node: str) -> None:
        """Grant requests at `node` again, which was closed."""
        self._closed.remove(node)
        self._groups.add(node, self._nodes[node])
        self._serve()

    def is_open(self, node: str) -> bool:
        """Whether requests may be granted at `node`, a node that is not gone."""
        return node in self._nodes and node not in self._closed

    def room(self, requests: Iterable[tuple[Mapping[str, float], str]]) -> Mapping[str, float] | None:
        """Whether there is room elsewhere, at this moment, for requests that have been granted.

        Args:
            requests: each with the node that it would leave.

        Returns:
            None, or the first request for which there is no room beside those before it.
        """
        left = {node: copy.deepcopy(amounts) for node, amounts in self._nodes.items() if node not in self._closed}
        for request, node in sorted(requests, key=lambda each: -sum(each[0].values())):
            found = next((each for name, each in left.items() if name != node and each.now(request)), None)
            if found is None:
                return request
            found.take(request)
        return None

    def total(self, node: str | None = None) -> dict[str, float]:
        """The total amounts of `node`, or of all nodes."""
        return _sum(amounts.total for amounts in self._of(node))

    def free(self, node: str | None = None) -> dict[str, float]:
        """The free amounts of `node`, or of all nodes."""
        return _sum(amounts.free for amounts in self._of(node))

    def _of(self, node: str | None) -> Iterable[Amounts]:
        return self._nodes.values() if node is None else (self._nodes[node],)

    def acquire(
        self,
        request: Mapping[str, float],
        order: Order,
        granted: Callable[[str, tuple[int, ...]], None],
        refused: Callable[[InsufficientResources], None],
    ) -> Callable[[], None]:
        """Take `request` from one of the nodes, now or later.

        Args:
            request: amounts by name; may be empty.
            order: the nodes that may be taken, and the preferred ones.
            granted: called once the request is granted, perhaps before this returns, with the node's id and the numbers
                of the request's GPUs on that node.
            refused: called when the last node that the request could ever fit into has gone while it waited.

        Returns:
            A function that withdraws the request while it waits.

        Raises:
            InsufficientResources: the request fits into no node, even an empty one, so that it would wait for ever.
        """
        self._asked += 1
        entry = QueuedRequest(self._asked, dict(request), order, granted, refused)
        if not self._possible(entry):
            raise self._refusal(entry)
        queue = self._waiting.setdefault(entry.kind, OrderedDict())
        queue[entry.number] = entry
        if len(queue) == 1:  # otherwise it waits for the same resources as the first of its kind
            self._serve()

        def withdraw() -> None:
            if self._drop(entry):
                self._serve()

        return withdraw

    def _drop(self, entry: QueuedRequest) -> bool:
        """Take a request out of the queue; False when it does not wait."""
        queue = self._waiting.get(entry.kind, OrderedDict())
        if queue.pop(entry.number, None) is None:
            return False
        if not queue:
            del self._waiting[entry.kind]
        return True

    def restore(self, node: str, request: Mapping[str, float], gpus: Sequence[int] = ()) -> None:
        """Grant again what another ledger has granted, for which `acquire` called ``granted(node, gpus)``."""
        amounts = self._nodes[node]
        self._groups.remove(node, amounts)
        amounts.retake(request, gpus)
        self._groups.add(node, amounts)

    def release(self, node: str, request: Mapping[str, float], gpus: Sequence[int] = ()) -> None:
        """Give back a grant of `acquire`; without effect for a node that is gone.

        Args:
            node, gpus: as they were granted.
            request: as it was asked for.
        """
        amounts = self._nodes.get(node)
        if amounts is not None:
            closed = node in self._closed
            if not closed:
                self._groups.remove(node, amounts)
            amounts.give(request, gpus)
            if not closed:
                self._groups.add(node, amounts)
            self._serve()

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    @property
    def first(self) -> QueuedRequest | None:
        """The request that has waited longest."""
        return min(map(_first, self._waiting.values()), key=lambda entry: entry.number, default=None)

    def _possible(self, entry: QueuedRequest) -> bool:
        """Whether the request of `entry` fits into an empty node that it may take."""
        only = entry.order.only
        if only is not None:
            return only in self._nodes and self._nodes[only].ever(entry.request)
        return any(_fits(entry.request, dict(shape)) for shape in self._shapes)

    def _refusal(self, entry: QueuedRequest) -> InsufficientResources:
        only = entry.order.only
        nodes = list(self._nodes) if only is None else [only] if only in self._nodes else []
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
        have = "; ".join(f"{node[:8]}: {_words(self._nodes[node].total) or 'none'}" for node in nodes[:_NAMED])
        more = f"; and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
        return InsufficientResources(
            f"no node has {_words(entry.request) or 'room'} in all (nodes that may be taken: {have or 'none'}{more}); "
            "ask for less, or start a node that has as much: zcactor start --resources"
        )

    def _serve(self) -> None:
        """Grant the requests that fit, in order; a waiting request keeps its resources from those behind it."""
        awaited = _Awaited()
        heads = [(_first(queue).number, _first(queue)) for queue in self._waiting.values()]
        heapq.heapify(heads)
        calls: list[Callable[[], None]] = []
        while heads:
            _, entry = heapq.heappop(heads)
            node = self._choice(entry, awaited)
            if node is not None:
                calls.append(partial(entry.granted, node, self._take(node, entry.request)))
            elif self._possible(entry):
                self._await(entry, awaited)
                continue  # and the others of its kind wait, too
            else:
                calls.append(lambda entry=entry: entry.refused(self._refusal(entry)))  # type: ignore[misc]
            self._drop(entry)
            if entry.kind in self._waiting:
                following = _first(self._waiting[entry.kind])
                heapq.heappush(heads, (following.number, following))
        for call in calls:
            call()

    def _take(self, node: str, request: Mapping[str, float]) -> tuple[int, ...]:
        amounts = self._nodes[node]
        self._groups.remove(node, amounts)
        gpus = amounts.take(request)
        self._groups.add(node, amounts)
        return gpus

    def _await(self, entry: QueuedRequest, awaited: _Awaited) -> None:
        """Keep the resources that an entry waits for from the entries behind it."""
        if entry.order.only is not None:
            awaited.nodes = True
            awaited.add(entry.order.only, entry.request)
            return
        for shape in self._shapes:
            if _fits(entry.request, dict(shape)):
                awaited.add(shape, entry.request)

    def _choice(self, entry: QueuedRequest, awaited: _Awaited) -> str | None:
        """The node to take for an entry; None where the entry has to wait."""
        request, where = entry.request, entry.order.where
        preferred = entry.order.near() if where is None else entry.order.only
        if preferred is not None and self._takes(preferred, request, awaited):
            return preferred
        if entry.order.only is not None:
            return None
        best: tuple[int, int, str] | None = None
        for group in self._groups:
            amounts = self._nodes[group[0][1]]
            if not amounts.now(request) or not awaited.free(amounts.shape, request):
                continue
            rank = amounts.actors if where == "spread" else -amounts.actors if where == "pack" else 0
            if best is not None and best < (rank, *group[0]):
                continue
            found = next((one for one in group if not awaited.nodes or awaited.free(one[1], request)), None)
            if found is not None and (best is None or (rank, *found) < best):
                best = rank, *found
        return None if best is None else best[2]

    def _takes(self, node: str, request: Mapping[str, float], awaited: _Awaited) -> bool:
        amounts = self._nodes.get(node)
        return (
            amounts is not None
            and node not in self._closed
            and amounts.now(request)
            and awaited.free(amounts.shape, request)
            and awaited.free(node, request)
        )


def _first(queue: OrderedDict[int, QueuedRequest]) -> QueuedRequest:
    return next(iter(queue.values()))


def _fits(request: Mapping[str, float], amounts: Mapping[str, float]) -> bool:
    """Whether `amounts` has at least as much of every resource as `request`."""
    return all(amounts.get(name, 0.0) + _EPSILON >= amount for name, amount in request.items())


def _sum(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    amounts: dict[str, float] = {}
    for one in each:
        for name, amount in one.items():
            amounts[name] = amounts.get(name, 0.0) + amount
    return amounts


def _words(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in amounts.items())
