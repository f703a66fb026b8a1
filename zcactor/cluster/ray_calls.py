"""The calls that `zcactor.cluster.ray` makes to Ray. They block, for milliseconds each, except `RayCalls.connect`."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Final

from zcactor.cluster.ray_host import HostAnswer, NodeHost
from zcactor.errors import ConnectionLost, NameTaken, VersionMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["RayCalls"]

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
