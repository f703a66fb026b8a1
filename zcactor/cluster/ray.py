"""A cluster on Ray: `on_ray` holds a placement group, in whose bundles node agents run, and `sweep_ray` removes those
whose owner is gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import secrets
import signal
import socket
import threading
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from zcactor.cluster.daemon import start_node
from zcactor.cluster.placed import EngineCluster, aside, given, token_of_user
from zcactor.config import Config, load_config
from zcactor.driver.driver import check_free
from zcactor.errors import (
    AuthenticationError,
    ConnectionLost,
    InsufficientResources,
    NameTaken,
    VersionMismatch,
    ZcactorError,
)
from zcactor.node.agent_main import launch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from zcactor.cluster.daemon import StartedNode

__all__ = ["HostAnswer", "NodeHost", "RayCalls", "on_ray", "sweep_ray"]

_KILL_AFTER: Final = 10.0
"""Seconds beyond the actors' own time that an agent gets to end, before it is killed."""
_NAMED: Final = {kind.__name__: kind for kind in (AuthenticationError, ConnectionLost, VersionMismatch)}


class HostAnswer(msgspec.Struct, frozen=True):
    """The outcome of a node's start: its address, or the reason why there is no node."""

    address: str = ""
    kind: str = ""
    """The name of the exception's class."""
    text: str = ""

    def checked(self, bundle: int) -> str:
        """The address of the node of `bundle`.

        Raises:
            ZcactorError: it was not started, with an exception of the class in which that failed there.
        """
        if self.kind:
            raise _NAMED.get(self.kind, ConnectionLost)(f"bundle {bundle}: {self.text}")
        return self.address


class NodeHost:
    """The class of the Ray actor that holds a bundle.

    Its constructor starts the agent, so that an actor that Ray restarts has one again. Ray runs it in the main thread
    of the actor's process: the kernel's signal at the parent's end follows the thread that forked.

    An agent that ends by itself takes this process along, and Ray starts another where there is still a head.

    Args:
        bundle: amounts by the names of resources; they are what the node offers.
        settings: the fields of `Config`.
        token: the cluster's token.
        head: name and namespace of the Ray actor with the head, whose cluster is joined; None makes the node the head.
        host: the address at which a head listens; None asks Ray for this host's.
    """

    def __init__(
        self, bundle: Mapping[str, float], settings: Mapping[str, Any], token: bytes, head: tuple[str, str] | None,
        host: str | None = None,
    ) -> None:  # fmt: skip
        self._ending = False
        self._node: StartedNode | None = None
        self._watcher: threading.Thread | None = None
        self._answer = HostAnswer()
        try:
            self._start(bundle, Config(**settings), token, head, host)
        except (ZcactorError, OSError, ValueError) as error:
            self._answer = HostAnswer(kind=type(error).__name__, text=str(error))

    def _start(
        self, bundle: Mapping[str, float], config: Config, token: bytes, head: tuple[str, str] | None, host: str | None
    ) -> None:
        address = None
        if head is None:
            config = replace(config, host=host or _own_address())
        else:
            address = _address_of(*head)
        config = replace(config, num_cpus=int(bundle.get("CPU", 0)), num_gpus=int(bundle.get("GPU", 0)))
        self._node = start_node(
            config, own_host=False, head=address, port=0, stays=False, token=token,
            resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
            launch=functools.partial(launch, bound=True),
        )  # fmt: skip
        self._answer = HostAnswer(self._node.record.address)
        self._watcher = threading.Thread(target=self._watch, name="zcactor-agent", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        assert self._node is not None
        self._node.process.wait()
        if not self._ending:
            os._exit(1)

    def answer(self) -> HostAnswer:
        """The outcome of the node's start."""
        return self._answer

    def leave(self) -> None:
        """Take the agent's end for what is meant, from now on."""
        self._ending = True

    def end(self, seconds: float) -> None:
        """End the node: its actors are closed in order, for at most `seconds`. Returns when the agent has ended."""
        self._ending = True
        if self._node is None or self._watcher is None:
            return
        self._node.process.send_signal(signal.SIGHUP)  # SIGTERM has its actors move
        self._watcher.join(seconds + _KILL_AFTER)
        if self._watcher.is_alive():
            self._node.process.kill()
            self._watcher.join()
        for node in self._node.all:
            node.control.close()
            node.process.wait()  # the node beside a head has ended with it


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _address_of(name: str, namespace: str) -> str:
    """The head's address, once it has one.

    Raises:
        ConnectionLost: there is no head, or none any more.
    """
    import ray

    try:
        answer = ray.get(ray.get_actor(name, namespace).answer.remote())
    except (ray.exceptions.RayError, ValueError) as error:
        raise ConnectionLost(f"the head is lost, which was in the first bundle: {error}") from error
    assert isinstance(answer, HostAnswer)
    return answer.checked(0)


_NAMESPACE: Final = "zcactor"
"""The namespace of the actors that stand for owners: names are unique in it, and programs may have other namespaces."""
_CONNECT: Final = 5.0
"""Seconds in which Ray's head has to accept a connection. Ray itself would try for minutes."""


class _Owner:
    """The class of the Ray actor that stands for the owner of a cluster: Ray ends it with its owner, and no other has
    its name meanwhile."""


class RayCalls:
    """Ray, as far as it is needed here.

    Args:
        asked_by: the function that needs it, for messages.

    Raises:
        ImportError: Ray is not installed.
    """

    def __init__(self, asked_by: str) -> None:
        try:
            import ray
            import ray.util.placement_group
            import ray.util.scheduling_strategies
        except ImportError as error:
            raise ImportError(f"{asked_by} needs ray: pip install 'zcactor[ray]'", name="ray") from error
        self._ray = ray

    def connect(self, address: str | None) -> bool:
        """Connect this program to a Ray cluster that runs, unless it is connected.

        Args:
            address: as ``ray.init`` takes it; None takes ``RAY_ADDRESS`` or the cluster of this host.

        Returns:
            Whether this call has connected it.

        Raises:
            ConnectionLost: there is no Ray cluster.
            VersionMismatch: it runs another version of Python or Ray.
        """
        if self._ray.is_initialized():
            return False
        remedy = "start one by 'ray start --head', or name one by address= or RAY_ADDRESS"
        if address is not None and address.count(":") == 1 and "/" not in address:
            host, _, port = address.partition(":")
            try:
                socket.create_connection((host, int(port)), _CONNECT).close()
            except (OSError, ValueError) as error:
                raise ConnectionLost(f"no Ray cluster answers at {address} ({error}): {remedy}") from error
        try:
            self._ray.init(address=address or "auto", configure_logging=False)
        except ConnectionError as error:
            raise ConnectionLost(f"there is no Ray cluster: {remedy} ({error})") from error
        except RuntimeError as error:
            if "Version mismatch" not in str(error):
                raise
            raise VersionMismatch(f"the Ray cluster runs other versions than this program: {error}") from error
        return True

    def disconnect(self) -> None:
        """Disconnect this program from Ray."""
        self._ray.shutdown()

    def claim(self, name: str) -> Any:
        """Take a name for a cluster of this program, as long as it lives or until `release`.

        Returns:
            The actor that stands for this program.

        Raises:
            NameTaken: a living program has it.
        """
        owner = self._ray.remote(_Owner).options(name=name, namespace=_NAMESPACE, num_cpus=0)
        try:
            return owner.remote()
        except ValueError as error:
            if not self.claimed(name):
                raise
            raise NameTaken(
                f"on this Ray cluster a living program has {name!r}: leave its context first, or take another name"
            ) from error

    def claimed(self, name: str) -> bool:
        """Whether a living program has this name."""
        try:
            self._ray.get_actor(name, namespace=_NAMESPACE)
        except ValueError:
            return False
        return True

    def kill(self, actor: Any) -> None:
        """Kill a Ray actor for good."""
        self._ray.kill(actor, no_restart=True)

    def groups(self) -> dict[str, str]:
        """The names of the placement groups that exist, by their ids in hexadecimal digits."""
        table = self._ray.util.placement_group_table()
        return {key: str(each["name"]) for key, each in table.items() if each["state"] != "REMOVED"}

    def make_group(self, bundles: Sequence[Mapping[str, float]], strategy: str, name: str) -> Any:
        """Ask for a placement group."""
        return self._ray.util.placement_group([dict(bundle) for bundle in bundles], strategy=strategy, name=name)

    def is_placed(self, group: Any) -> bool:
        """Whether a placement group has its place on nodes."""
        return bool(self._ray.util.placement_group_table(group)["state"] == "CREATED")

    def remove_group(self, group: Any) -> None:
        """Remove a placement group, and with it the actors in it.

        Args:
            group: the group, or its id in hexadecimal digits.
        """
        if isinstance(group, str):
            from ray.util.placement_group import PlacementGroup

            group = PlacementGroup(self._ray.PlacementGroupID(bytes.fromhex(group)))
        self._ray.util.remove_placement_group(group)

    def start_host(
        self, group: Any, number: int, bundle: Mapping[str, float], settings: Mapping[str, Any], token: bytes, name: str
    ) -> Any:
        """Start the Ray actor that holds a bundle.

        Args:
            group: the placement group.
            number: of the bundle. The first is the head's, which is not restarted: its cluster is lost with it.
            bundle: all of it goes to the actor.
            settings: see `NodeHost`.
            token: see `NodeHost`.
            name: of the cluster. The head's actor has one that is made from it, by which the others find it.
        """
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number, placement_group_capture_child_tasks=True
        )
        others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
        head = f"{name}/head"
        named: dict[str, Any] = {"max_restarts": -1} if number else {"name": head, "namespace": _NAMESPACE}
        return self._ray.remote(NodeHost).options(
            num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), memory=bundle.get("memory"), resources=others,
            scheduling_strategy=strategy, **named,
        ).remote(bundle, settings, token, (head, _NAMESPACE) if number else None)  # fmt: skip

    def call(self, actor: Any, method: str, *args: Any) -> Any:
        """Call a method of a Ray actor. Returns the reference to its result."""
        return getattr(actor, method).remote(*args)

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """The references whose results are known, as soon as one is, or after `seconds` none."""
        known, _ = self._ray.wait(list(references), num_returns=1, timeout=seconds)
        return list(known)

    def answer(self, reference: Any, number: int) -> HostAnswer:
        """The known answer of the host of bundle `number`.

        Raises:
            ConnectionLost: that Ray actor could not start.
        """
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            text = str(error)
            if "No module named 'zcactor'" in text:
                text = "zcactor is not installed where Ray has placed it: install it on every node of the Ray cluster"
            raise ConnectionLost(f"bundle {number}: {text}") from error
        assert isinstance(answer, HostAnswer)
        return answer

    def room(self) -> str:
        """The resources of the Ray cluster, and those that are free, for people."""
        return f"it has {_amounts(self._ray.cluster_resources())}, and free {_amounts(self._ray.available_resources())}"


def _amounts(found: Mapping[str, float]) -> str:
    """Amounts without Ray's internal names and the bytes of memory."""
    shown = {
        name: amount
        for name, amount in sorted(found.items())
        if ":" not in name and "_group_" not in name and "memory" not in name
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "nothing"


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
