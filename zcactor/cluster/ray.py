"""A cluster on Ray: `on_ray` holds a placement group, in whose bundles node agents run, and `sweep_ray` removes those
whose owner is gone."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from zcactor.cluster.placed import EngineCluster, aside, given, token_of_user
from zcactor.cluster.ray_calls import RayCalls
from zcactor.config import load_config
from zcactor.driver.driver import check_free
from zcactor.errors import ConnectionLost, InsufficientResources

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

__all__ = ["on_ray", "sweep_ray"]

_PREFIX: Final = "zcactor:"
_STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_PAUSE: Final = 0.05
"""Seconds between two questions to Ray."""
_ANSWER: Final = 0.2
"""Seconds of one wait for Ray's answers: as long, a cancelled wait goes on."""
_WORD: Final = 5.0
"""Seconds in which a living Ray actor answers; one whose host is silent is not waited for longer."""
_AGENT_WORK: Final = 15.0
"""Seconds beyond the actors' own time that a Ray actor gets to end its node."""


class _Wanted(msgspec.Struct, frozen=True):
    """The arguments of `on_ray`, checked."""

    bundles: tuple[dict[str, float], ...]
    strategy: str
    name: str
    """The placement group's."""
    address: str | None
    timeout: float
    join: bool


def on_ray(
    bundles: Sequence[Mapping[str, float]],
    strategy: str = "SPREAD",
    name: str | None = None,
    address: str | None = None,
    timeout: float = 60.0,
    join: bool = True,
) -> AbstractAsyncContextManager[EngineCluster]:
    """Start a cluster on a running Ray cluster: ``async with zcactor.cluster.on_ray([{"CPU": 4}] * 4) as cluster:``.

    Ray gives a placement group, named ``zcactor:`` and the cluster's name. Each of its bundles becomes a node, which
    offers what the bundle has. The nodes are processes beside Ray's own; actors and arrays do not pass through Ray.
    Leaving the context closes actors in order, ends the nodes and removes the group. Cancelling inside it does the
    same; cancelling again meanwhile leaves actors unclosed. Nodes and group end with this program, too.

    Where a node of Ray's is lost, its zcactor node is lost, and a new one joins where Ray places the bundle anew. The
    head is with the first bundle: with it the cluster is lost.

    Args:
        bundles: amounts by the names of Ray's resources, one bundle for each node, such as ``{"CPU": 4, "GPU": 1}``.
            Amounts of CPU and GPU are whole numbers.
        strategy: how Ray spreads bundles over its nodes: ``"SPREAD"``, ``"PACK"``, ``"STRICT_SPREAD"`` (one a node) or
            ``"STRICT_PACK"`` (all on one).
        name: the cluster's name, which one living program at a time has on a Ray cluster; default a new one. A
            group that an earlier owner of it has left is removed first.
        address: Ray's, as ``ray.init`` takes it; default ``RAY_ADDRESS``, or the Ray cluster of this host. It is not
            used where this program is connected to Ray.
        timeout: seconds in which the group has its place and every node has joined.
        join: whether this program joins by ``zc.init``, with settings as `zc.init` takes them, and leaves at the end.

    Returns:
        An asynchronous context manager, which gives an `EngineCluster`.

    Raises:
        ValueError: an argument is wrong; at the call.

    Raises when entered:
        ImportError: Ray is not installed.
        InsufficientResources: Ray had no room for the bundles within `timeout`.
        ConnectionLost: there is no Ray cluster; or a node could not start, or did not join in time.
        NameTaken: a living program has the name.
        VersionMismatch: the Ray cluster, or one of its nodes, has another version of Python, Ray or zcactor.
        AlreadyInitialized: with `join`: the runtime is running in this process.
        AuthenticationError: the token's file is not safe.
    """
    if not bundles:
        raise ValueError("on_ray: bundles is empty: give one for each node, such as [{'CPU': 4}] * 4")
    if strategy not in _STRATEGIES:
        raise ValueError(f"on_ray: unknown strategy {strategy!r}; valid ones: {', '.join(_STRATEGIES)}")
    if name == "":
        raise ValueError("on_ray: name is empty: leave it out, or give one that no other program has")
    if not timeout > 0:
        raise ValueError(f"on_ray: timeout is {timeout!r}: it must be seconds, more than 0")
    checked = tuple(_checked(number, bundle) for number, bundle in enumerate(bundles))
    return _on_ray(_Wanted(checked, strategy, f"{_PREFIX}{name or secrets.token_hex(4)}", address, timeout, join))


def _checked(number: int, bundle: Mapping[str, Any]) -> dict[str, float]:
    for name, amount in bundle.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < math.inf:
            raise ValueError(f"on_ray: bundle {number} has {name!r}: {amount!r}; amounts are numbers, at least 0")
        if name in ("CPU", "GPU") and amount != int(amount):
            raise ValueError(f"on_ray: bundle {number} has {amount:g} {name}: a node offers a whole number of them")
    if not any(bundle.values()):
        raise ValueError(f"on_ray: bundle {number} is empty: give amounts of resources, such as {{'CPU': 4}}")
    return {name: amount for name, amount in bundle.items() if amount}


@contextlib.asynccontextmanager
async def _on_ray(wanted: _Wanted) -> AsyncIterator[EngineCluster]:
    deadline = time.monotonic() + wanted.timeout
    if wanted.join:
        check_free()
    token = token_of_user()
    config, _ = load_config()
    ray = await aside(RayCalls, "zcactor.cluster.on_ray")
    async with contextlib.AsyncExitStack() as undo:
        if await aside(ray.connect, wanted.address):
            undo.push_async_callback(aside, ray.disconnect)
        placement = _Placement(ray, wanted, asdict(replace(config, address=None)), token)
        undo.push_async_callback(placement.end, config.shutdown_timeout)
        cluster = EngineCluster(await placement.begin(deadline), len(wanted.bundles))
        yield await undo.enter_async_context(given(cluster, token, join=wanted.join))


class _Placement:
    """The placement group of a cluster, and the Ray actors in it.

    Args:
        ray: the calls to Ray.
        wanted: the bundles and the rest of the arguments.
        settings: the fields of the nodes' `Config`.
        token: the cluster's token.
    """

    def __init__(self, ray: RayCalls, wanted: _Wanted, settings: Mapping[str, Any], token: bytes) -> None:
        self._ray, self._wanted, self._settings, self._token = ray, wanted, settings, token
        self._owner: Any = None
        self._group: Any = None
        self._hosts: list[Any] = []
        self._started: list[Any] = []
        """The hosts whose nodes are there, the head's first."""

    async def begin(self, deadline: float) -> str:
        """Place the nodes and wait until all have joined. Returns the head's address.

        Args:
            deadline: the time of giving up, in seconds of ``time.monotonic()``.
        """
        await aside(self._place)
        while not await aside(self._ray.is_placed, self._group):
            if time.monotonic() >= deadline:
                raise InsufficientResources(
                    f"the Ray cluster had no room within {self._wanted.timeout:g} s for {list(self._wanted.bundles)} "
                    f"by {self._wanted.strategy}: {await aside(self._ray.room)}; ask for less, or add nodes to it"
                )
            await asyncio.sleep(_PAUSE)
        await aside(self._fill)
        waiting = {self._ray.call(host, "answer"): number for number, host in enumerate(self._hosts)}
        addresses: dict[int, str] = {}
        while waiting:
            for reference in await aside(self._ray.wait, list(waiting), _ANSWER):
                number = waiting.pop(reference)
                addresses[number] = (await aside(self._ray.answer, reference, number)).checked(number)
                self._started = [self._hosts[each] for each in sorted(addresses)]
            if waiting and time.monotonic() >= deadline:
                missing = ", ".join(map(str, sorted(waiting.values())))
                raise ConnectionLost(
                    f"no node in bundle {missing} within {self._wanted.timeout:g} s; joined: {len(addresses)} of "
                    f"{len(self._hosts)}; Ray's logs of the actor NodeHost may say why"
                )
        return addresses[0]

    def _place(self) -> None:
        self._owner = self._ray.claim(self._wanted.name)
        for key, name in self._ray.groups().items():
            if name == self._wanted.name:  # an earlier owner has left it
                self._ray.remove_group(key)
        self._group = self._ray.make_group(self._wanted.bundles, self._wanted.strategy, self._wanted.name)

    def _fill(self) -> None:
        for number, bundle in enumerate(self._wanted.bundles):
            self._hosts.append(
                self._ray.start_host(self._group, number, bundle, self._settings, self._token, self._wanted.name)
            )

    async def end(self, grace: float) -> None:
        """End all: the head and its actors in order first, then the others. Cancelling skips the order.

        Args:
            grace: seconds in which actors are closed.
        """
        try:
            if self._started:
                await self._finish(self._started, "leave", seconds=_WORD)  # no agent is missed from now on
                await self._finish(self._started[:1], "end", grace, seconds=grace + _AGENT_WORK)
                await self._finish(self._started[1:], "end", grace, seconds=grace + _AGENT_WORK)
        finally:
            await aside(self._remove)

    async def _finish(self, hosts: Sequence[Any], method: str, *args: Any, seconds: float) -> None:
        """Call a method of Ray actors, and wait until each has returned or is gone."""
        deadline = time.monotonic() + seconds
        waiting = [self._ray.call(host, method, *args) for host in hosts]
        while waiting and time.monotonic() < deadline:
            for reference in await aside(self._ray.wait, waiting, _ANSWER):
                waiting.remove(reference)

    def _remove(self) -> None:
        """Remove all from Ray, and wait until the name is free, for up to `_WORD` seconds. Runs in a thread."""
        for host in self._hosts:
            self._ray.kill(host)
        if self._group is not None:
            self._ray.remove_group(self._group)
        if self._owner is not None:
            self._ray.kill(self._owner)
            deadline = time.monotonic() + _WORD
            while self._ray.claimed(self._wanted.name) and time.monotonic() < deadline:
                time.sleep(_PAUSE)  # Ray tells nobody when a name comes free


async def sweep_ray(prefix: str = _PREFIX) -> list[str]:
    """Remove the placement groups of clusters whose owner is gone, and with them the nodes in their bundles.

    Ray itself removes those of a program that has ended. It keeps those of an actor that was killed, as long as the
    program lives that has started the actor.

    Args:
        prefix: the beginning of the groups' names, at least ``zcactor:``.

    Returns:
        The names of the groups that were removed. Groups of living owners are left alone.

    Raises:
        ValueError: `prefix` does not begin with ``zcactor:``.
        ImportError: Ray is not installed.
        ConnectionLost: there is no Ray cluster; see `on_ray`.
        VersionMismatch: it has another version of Python or Ray.
    """
    if not prefix.startswith(_PREFIX):
        raise ValueError(f"sweep_ray: prefix is {prefix!r}: groups of other programs are not removed, so it begins "
                         f"with {_PREFIX!r}")  # fmt: skip
    ray = await aside(RayCalls, "zcactor.cluster.sweep_ray")
    connected = await aside(ray.connect, None)
    try:
        return await aside(_sweep, ray, prefix)
    finally:
        if connected:
            await aside(ray.disconnect)


def _sweep(ray: RayCalls, prefix: str) -> list[str]:
    removed = []
    for key, name in ray.groups().items():
        if name.startswith(prefix) and not ray.claimed(name):
            ray.remove_group(key)
            removed.append(name)
    return sorted(removed)
