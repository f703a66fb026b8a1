"""The way that arrays on GPUs take to an actor, found out by sending one."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ConnectionLost, DeviceUnavailable, ZcactorError
from zcactor.lazy_numpy import np
from zcactor.process.nvidia import may_have_gpus
from zcactor.rpc.services import remote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session

__all__ = ["DevicePath", "Proof", "ProofService", "device_path"]

Proof = tuple[str, dict[str, str], bytes]
"""The way that an array took, better ways with the reason against each, and the array's bytes."""


class ProofService(ABC):
    """The receiver's half of a proof that arrays on GPUs reach a process: `zcactor.objects.device_proof.Proofs`."""

    @remote(15)
    @abstractmethod
    async def proof(self, x: Any, uuid: str, exports: bool) -> Proof:
        """The proof for an array that the caller has sent.

        Args:
            x: the array.
            uuid: of the GPU on which the caller has it.
            exports: as in `zcactor.device.driver.GpuDriver`, of the caller's driver.

        Raises:
            ObjectLost: the caller has ended.
            DeviceError: the driver refuses.
        """


_PROOF_NBYTES: Final = 64 << 10
_PATIENCE: Final = 30.0
"""Seconds for the transfer: both ends may have to start their driver first."""
_REASONS: Final = {
    "mapped": "same host: the GPU memory is mapped in place",
    "pulled": "same host: copied by the GPU, from one that the actor's process does not see",
    "gpudirect": "other host: read from GPU to GPU by network cards, which is unverified on hardware",
    "host": "copied through host memory",
}


@dataclass(frozen=True, slots=True)
class DevicePath:
    """The way that arrays on the first GPU of this process take to an actor."""

    path: str
    """``"mapped"``, ``"pulled"``, ``"gpudirect"`` or ``"host"``; empty where no array gets there."""
    reason: str
    """The reason for this way, or the error."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """The better ways, each with the reason against it."""
    proven: bool = False
    """Whether 64 KiB of random bytes went that way and came out right."""


async def device_path(process: LocalProcess, session: Session) -> DevicePath | None:
    """Find out the way that arrays on GPUs take to a peer. Both ends open their GPUs for that.

    Returns:
        The way; None where this process has no GPU.

    Raises:
        ConnectionLost: the peer has ended.
    """
    if process.config.gpu == "off" or not may_have_gpus(process.config.gpu):
        return None
    try:
        gpus: list[Any] = process.store.devices().gpus
    except DeviceUnavailable:
        return None
    if not gpus:
        return None
    expected = os.urandom(_PROOF_NBYTES)
    try:
        async with asyncio.timeout(_PATIENCE):
            x = await asyncio.to_thread(_made, gpus[0], expected)
            path, rejected, came = await process.requests.ask(
                session, ProofService.proof, x, gpus[0].uuid, gpus[0].driver.exports
            )
    except ConnectionLost:
        raise
    except ZcactorError as error:
        return DevicePath("", str(error))
    except TimeoutError:
        return DevicePath("", f"the array was not there within {_PATIENCE:g} s")
    if bytes(came) != expected:
        return DevicePath(path, "the bytes that came are not those that were sent", rejected)
    return DevicePath(path, _REASONS.get(path, path), rejected, True)


def _made(gpu: Any, values: bytes) -> Any:
    """An array of these bytes. The thread waits until they are there."""
    from zcactor.device.array import empty_array
    from zcactor.marshal.devices import pass_arrays

    pass_arrays()
    made = empty_array(gpu, (len(values),), np.dtype(np.uint8))
    made.copy_from(np.frombuffer(values, np.uint8))
    return made
