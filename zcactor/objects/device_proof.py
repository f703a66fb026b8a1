"""The receiver's half of a proof that arrays on GPUs reach this process: the way that one took, and its bytes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from zcactor.api.device_paths import Proof, ProofService
from zcactor.errors import DeviceUnavailable
from zcactor.lazy_numpy import np
from zcactor.rpc.services import caller

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from zcactor.objects.device_direct import DirectReads
    from zcactor.objectstore.store import Store
    from zcactor.rpc.session import Session
    from zcactor.transport.base import Connection
    from zcactor.transport.local.extents import ExtentReply

__all__ = ["Proofs", "fetcher_of", "proof_of"]


class Proofs(ProofService):
    """The proofs of one process.

    Args:
        store: of the process.
        direct: the reads of its network cards.
    """

    def __init__(self, store: Store, direct: DirectReads) -> None:
        self._store = store
        self._direct = direct

    async def proof(self, x: Any, uuid: str, exports: bool) -> Proof:
        """See `ProofService`."""
        session = caller()
        return await proof_of(x, uuid, exports, session, self._store, self._direct.reason(session))


def fetcher_of(connection: Connection) -> Callable[[Collection[int]], Awaitable[ExtentReply]] | None:
    """The function that gets extents of the peer's GPU memory, see `zcactor.transport.local.endpoint.LocalConnection`;
    None where the transport passes none, as the peer is on another host."""
    return getattr(connection, "fetch_extents", None)


async def proof_of(x: Any, uuid: str, exports: bool, session: Session, store: Store, direct: str = "") -> Proof:
    """The proof for an array that a peer has sent.

    Args:
        x: the array.
        uuid: of the GPU on which the peer has it.
        exports: as in `zcactor.device.driver.GpuDriver`, of the peer's driver.
        session: with the peer.
        store: of this process.
        direct: the reason why no network card carries arrays from the peer's GPU to one of this process; empty where
            there is none.

    Raises:
        ObjectLost: the peer has ended.
        DeviceError: the driver refuses.
    """
    if isinstance(x, np.ndarray):
        values = x
    else:
        values = np.empty(x.shape, x.dtype)
        await asyncio.to_thread(x.copy_to_host, values)
    if getattr(getattr(x, "holder", None), "extent", None) is not None or session.peer_process == store.process:
        return "mapped", {}, values.tobytes()
    way = getattr(getattr(x, "holder", None), "path", "") or "host"
    rejected = {"mapped": _against(uuid, exports, session, store)}
    if way == "host" and direct and fetcher_of(session.connection) is None:
        rejected["gpudirect"] = direct
    return way, rejected, values.tobytes()


def _against(uuid: str, exports: bool, session: Session, store: Store) -> str:
    """The reason why the memory of a peer's GPU is not mapped here."""
    if fetcher_of(session.connection) is None:
        return "memory of GPUs is mapped between processes of one host only"
    if not exports:
        return "its driver lets no memory of GPUs out of a process"
    try:
        seen = [gpu.uuid for gpu in store.devices().gpus]
    except DeviceUnavailable as error:
        return f"the actor's process has no GPU: {error}"
    if uuid not in seen:
        return f"the actor's process does not see the GPU {uuid} (it sees: {', '.join(seen) or 'none'})"
    return "the driver of the actor's process refused to map it"
