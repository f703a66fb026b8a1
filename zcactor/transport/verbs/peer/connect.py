"""The engine of a process, and connections to peers by queue pairs.

This is the part of `zcactor.transport.verbs.endpoint` that needs a device. Without a device it is never imported.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ProtocolError
from zcactor.logs import logger
from zcactor.transport.stream.record_layer import SealedSocket
from zcactor.transport.verbs.device.calibration import calibrate
from zcactor.transport.verbs.device.engine import Engine
from zcactor.transport.verbs.device.sizing import MAX_VERBS_EAGER_LIMIT, slot_nbytes_for
from zcactor.transport.verbs.device.viability import NotViable, Viable, viability
from zcactor.transport.verbs.driver.base import Marking, VerbsError
from zcactor.transport.verbs.peer import negotiation
from zcactor.transport.verbs.peer.bootstrap import Offer, PathVerdict, agree
from zcactor.transport.verbs.peer.connection import VerbsConnection
from zcactor.transport.verbs.peer.queue_pairs import QueuePairs

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from zcactor.transport.base import PeerInfo, Receiver
    from zcactor.transport.verbs.device.registration_cache import PinnableArena
    from zcactor.transport.verbs.driver.base import Binding, Device

__all__ = ["PROOF_SECONDS", "join", "open_engine"]

PROOF_SECONDS: Final = 1.5
"""Seconds in which an end tries to prove a path. It does not wait for the device's own retries, which take 7.5 s."""


def open_engine(
    binding: Binding, arena: PinnableArena, *, device: str | None, port: int | None, gid_index: int | None,
    local_address: str, eager_limit: int, verbs_eager_limit: int | None, marks: tuple[int, int, int] = (0, 0, 0),
) -> Engine | str:  # fmt: skip
    """Make an engine on a port that works, or return the reason against it. Call it on the loop's thread.

    Args:
        binding: a binding that lists at least one device.
        arena: the arena of this process.
        device, port, gid_index, local_address: as for `viability`.
        eager_limit: bytes of the largest payload in a frame, where the device cannot be measured.
        verbs_eager_limit: bytes of the largest payload in a frame by RDMA; with None it is measured.
        marks: the fields of the `Marking` of all packets.
    """
    found = viability(
        binding, arena_nbytes=arena.nbytes, device=device, port=port, gid_index=gid_index, local_address=local_address,
        marking=Marking(*marks),
    )  # fmt: skip
    if isinstance(found, NotViable):
        return str(found)
    try:
        opened = binding.open(found.device)
    except OSError as error:
        return f"{found.device} cannot be used: {error}"
    with contextlib.ExitStack() as undo:
        undo.callback(_close, opened)
        try:
            limit, reason = _choose_limit(opened, found, eager_limit, verbs_eager_limit)
            engine = Engine(opened, found, arena, slot_nbytes_for(limit), asyncio.get_running_loop())
        except (OSError, VerbsError) as error:
            return f"{found.device} cannot be used: {error}"
        undo.pop_all()
    engine.eager_limit, engine.eager_reason = limit, reason
    return engine


def _close(device: Device) -> None:
    try:
        device.close()
    except OSError as error:  # as in `Engine.close`
        logger.debug("closing %s: %s", device.name, error)


def _choose_limit(device: Device, found: Viable, eager_limit: int, wanted: int | None) -> tuple[int, str]:
    """Choose the eager limit by RDMA. Returns it with the reason."""
    if wanted is not None:
        limit = min(wanted, MAX_VERBS_EAGER_LIMIT)
        return limit, f"arrays of at least {limit} bytes by reference: verbs_eager_limit says so"
    try:
        model = calibrate(device, found.port, found.gid, high=MAX_VERBS_EAGER_LIMIT, marking=found.marking)
    except OSError as error:
        return eager_limit, f"arrays of at least {eager_limit} bytes by reference: nothing could be measured ({error})"
    return model.eager_limit, model.reason


async def join(
    engine: Engine, sock: socket.socket, peer: PeerInfo, *, recv_depth: int, leads: bool, lookup: Callable[[int], Any],
    authorize: Callable[[Receiver | None, int, int, int], object],
) -> VerbsConnection | str:  # fmt: skip
    """Make a connection to the peer at the other end of `sock`, or return the reason against it. Both ends decide
    alike.

    Cancelling closes the queue pairs.

    Args:
        engine: the engine of this process.
        sock: authenticated. It belongs to the connection, if one is made, and otherwise stays the caller's. If it is
            encrypted, so are all messages.
        peer, recv_depth, leads, lookup, authorize: as for `VerbsConnection`.

    Raises:
        ProtocolError: the peer sent an unexpected message.
        ConnectionLost: the peer has ended.
    """
    try:
        pairs = QueuePairs(engine, engine.eager_limit)
    except (OSError, VerbsError) as error:
        reason = f"queue pairs cannot be made: {error}"
        await negotiation.decline(sock, reason)
        return reason
    with contextlib.ExitStack() as undo:
        undo.callback(pairs.close)
        await negotiation.tell(sock, pairs.ours)
        theirs = await negotiation.told(sock)
        if isinstance(theirs, PathVerdict):
            return f"the peer cannot use RDMA: {theirs.reason}"
        if not isinstance(theirs, Offer):
            raise ProtocolError(f"the peer answered an offer of RDMA with {type(theirs).__name__.lower()!r}")
        reason = _connect(pairs, theirs)
        if reason:
            await negotiation.both(sock, reason)
            return reason
        undo.pop_all()
    # Before the peer learns that this end is ready, as it may send its first message then.
    seals = sock.seals if isinstance(sock, SealedSocket) else None
    connection = VerbsConnection(
        pairs, peer, recv_depth=recv_depth, leads=leads, lookup=lookup, authorize=authorize, seals=seals
    )
    proven = False
    try:
        reason = await negotiation.both(sock, "")
        if not reason:
            reason = await negotiation.both(sock, await _prove(connection))
        proven = not reason
    finally:
        if not proven:
            connection.give_up()
    if reason:
        return f"{reason} ({pairs.describe()})"
    connection.adopt(sock)
    pairs.engine.extents.ahead(0, 1)
    return connection


def _connect(pairs: QueuePairs, theirs: Offer) -> str:
    """Connect our end. Returns the failure, or an empty string."""
    try:
        pairs.connect(theirs, agree(pairs.ours, theirs))
    except (OSError, VerbsError, ProtocolError) as error:
        return f"the queue pairs cannot be connected: {error}"
    return ""


async def _prove(connection: VerbsConnection) -> str:
    try:
        async with asyncio.timeout(PROOF_SECONDS):
            return await connection.prove()
    except TimeoutError:
        return f"neither a message nor a READ got through in {PROOF_SECONDS:g} s"
    except OSError as error:
        return f"the path could not be tried: {error}"
