"""The GPUs of a process, opened when something needs them first: most processes never do, and import nothing for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from zcactor.errors import DeviceUnavailable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zcactor.config import Config

__all__ = ["device_opener"]


def device_opener(config: Config, loop: asyncio.AbstractEventLoop) -> Callable[[], Any]:
    """The function that opens the GPUs of a process, for `zcactor.objectstore.store.Store.open_devices`.

    Args:
        config: the settings; `Config.gpu` and the further ones for GPUs decide.
        loop: the loop of the process.
    """

    unavailable = ""

    def open_devices() -> Any:
        nonlocal unavailable
        if unavailable:  # to look for a library that is not there takes milliseconds
            raise DeviceUnavailable(unavailable)
        from zcactor.device.store import open_store

        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        limits = config.device_capacity, config.device_keep_nbytes, loop
        try:
            return open_store(config.gpu, config.gpu_fake, variable, *limits)
        except DeviceUnavailable as error:
            unavailable = str(error)
            raise

    return open_devices
