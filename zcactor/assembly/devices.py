"""The GPUs of a process, opened when something needs them first, and those that a node offers. Most processes never
need any, and import nothing for it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from zcactor.errors import DeviceUnavailable
from zcactor.process.nvidia import may_have_gpus

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from zcactor.config import Config
    from zcactor.device.driver import GpuDriver
    from zcactor.errors import DeviceError

__all__ = ["device_opener", "offered_gpus"]


def device_opener(
    config: Config, loop: asyncio.AbstractEventLoop, broken: Callable[[DeviceError], object] | None = None,
    gone: Callable[[set[bytes], int], object] | None = None,
) -> Callable[[], Any]:  # fmt: skip
    """The function that opens the GPUs of a process, for `zcactor.objectstore.store.Store.open_devices`.

    Args:
        config: the settings; `Config.gpu` and the further ones for GPUs decide.
        loop: the loop of the process.
        broken: a bound method, called on the loop with errors by which a GPU's context turns out to be broken after a
            call.
        gone: a bound method, called as `zcactor.device.tending.Tending.on_gone`.
    """

    unavailable = ""
    tell_broken, tell_gone = _unless_gone(broken), _unless_gone(gone)

    def open_devices() -> Any:
        nonlocal unavailable
        if unavailable:  # to look for a library that is not there takes milliseconds
            raise DeviceUnavailable(unavailable)
        from zcactor.device.store import open_store

        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        limits = config.device_capacity, config.device_keep_nbytes, loop
        try:
            store = open_store(config.gpu, variable, *limits)
        except DeviceUnavailable as error:
            unavailable = str(error)
            raise
        store.tending.on_broken = partial(_broke, store.driver, tell_broken)
        store.tending.on_gone = tell_gone
        return store

    return open_devices


def _broke(driver: GpuDriver, tell: Callable[[DeviceError], object], error: DeviceError) -> None:
    """Let peers know that no work of a GPU is done any more, though this process may go on. Work of its other GPUs may
    wait for that one's."""
    try:
        driver.lose_events()
    finally:
        tell(error)


def _unless_gone(method: Callable[..., object] | None) -> Callable[..., None]:
    """Call a bound method as long as its object lives, and do not keep that alive: an array keeps the store, and no
    collection sees a ring that leads through an array, as one over the actor that has it would."""
    kept = None if method is None else WeakMethod(method)

    def call(*args: object) -> None:
        found = None if kept is None else kept()
        if found is not None:
            found(*args)

    return call


def offered_gpus(config: Config, environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """The UUIDs of the GPUs that a node of this host offers: all that it sees, or the first `Config.num_gpus` of them.

    Args:
        config: the settings. The fake's GPUs are offered where `Config.gpu` is ``"fake"``, and NVIDIA's otherwise.
        environ: the node's; ``CUDA_VISIBLE_DEVICES`` limits the GPUs.
        root: the folder of ``proc`` and ``dev``.

    Returns:
        The UUIDs. None where no GPU is found: then a node with `Config.num_gpus` counts GPUs that it does not know.

    Raises:
        ValueError: the node sees fewer GPUs than it is to offer; or an option of the fake is malformed.
    """
    if config.num_gpus == 0:
        return []
    kind, _, options = config.gpu.partition(":")
    if kind == "fake":
        from zcactor.device.fake import host_uuids
        from zcactor.device.visible import visible

        uuids = host_uuids(options)
        found = [uuids[number] for number in visible(uuids, environ.get("CUDA_VISIBLE_DEVICES"))]
    elif may_have_gpus("auto", root):
        from zcactor.device.listing import list_gpus

        found = list_gpus(environ, root)
    else:
        return []
    if config.num_gpus is not None and 0 < len(found) < config.num_gpus:
        raise ValueError(
            f"num_gpus={config.num_gpus}, and this node sees {len(found)} of them ({', '.join(found)}): offer at most "
            "as many. Actors share a GPU where they ask for a part of one, as by num_gpus=0.5; CUDA_VISIBLE_DEVICES "
            "limits what a node sees"
        )
    return found[: config.num_gpus]
