"""The Ray actor that holds a bundle: its child is a node agent."""

from __future__ import annotations

import functools
import os
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from zcactor.cluster.daemon import start_node
from zcactor.config import Config
from zcactor.errors import AuthenticationError, ConnectionLost, VersionMismatch, ZcactorError
from zcactor.node.agent_main import launch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.cluster.daemon import StartedNode

__all__ = ["HostAnswer", "NodeHost"]

_AGENT_WORK: Final = 10.0
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
        self._watcher.join(seconds + _AGENT_WORK)
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
