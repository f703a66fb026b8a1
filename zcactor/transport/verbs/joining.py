"""A process's engine, and how it and a peer come to a connection by queue pairs.

This is the part of `zcactor.transport.verbs.endpoint` that needs a device: where there is none it is never imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ProtocolError
from zcactor.transport.sealing import SealedSocket
from zcactor.transport.verbs import meeting
from zcactor.transport.verbs.base import VerbsError
from zcactor.transport.verbs.bootstrap import Offer, Verdict, agree
from zcactor.transport.verbs.calibration import calibrate
from zcactor.transport.verbs.connection import VerbsConnection
from zcactor.transport.verbs.engine import Engine
from zcactor.transport.verbs.pair import QueuePairs
from zcactor.transport.verbs.sizing import MAX_VERBS_EAGER_LIMIT, slot_nbytes_for
from zcactor.transport.verbs.viability import NotViable, Viable, viability

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from zcactor.transport.base import PeerInfo, Receiver
    from zcactor.transport.verbs.base import Binding, Device
    from zcactor.transport.verbs.extents import PinnableArena

__all__ = ["PROOF_SECONDS", "join", "open_engine"]

logger = logging.getLogger("zcactor")

PROOF_SECONDS: Final = 1.5
"""How long an end tries to prove a path. The device's own retries take 7.5 s and are not waited for."""


def open_engine(
    binding: Binding, arena: PinnableArena, *, device: str | None, port: int | None, gid_index: int | None,
    local_address: str, eager_limit: int, verbs_eager_limit: int | None,
) -> Engine | str:  # fmt: skip
    """An engine on a port that works, or why there is none. On the loop's thread.

    Args:
        binding: lists at least one device.
        arena: this process's memory.
        device, port, gid_index, local_address: as of `viability`.
        eager_limit: bytes of the largest payload in a frame, where the device cannot be measured.
        verbs_eager_limit: the same, where it is not to be measured.
    """
    found = viability(
        binding, arena_nbytes=arena.nbytes, device=device, port=port, gid_index=gid_index, local_address=local_address
    )
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
    """The eager limit by RDMA, and why it is that."""
    if wanted is not None:
        limit = min(wanted, MAX_VERBS_EAGER_LIMIT)
        return limit, f"arrays of at least {limit} bytes by reference: verbs_eager_limit says so"
    try:
        model = calibrate(device, found.port, found.gid, high=MAX_VERBS_EAGER_LIMIT)
    except OSError as error:
        return eager_limit, f"arrays of at least {eager_limit} bytes by reference: nothing could be measured ({error})"
    return model.eager_limit, model.reason


async def join(
    engine: Engine, sock: socket.socket, peer: PeerInfo, *, recv_depth: int, leads: bool, lookup: Callable[[int], Any],
    authorize: Callable[[Receiver | None, int, int, int], object],
) -> VerbsConnection | str:  # fmt: skip
    """A connection to the peer at the other end of `sock`, or why there is none; both ends come to the same.

    Cancelling closes the queue pairs.

    Args:
        engine: this process's.
        sock: authenticated; the connection's, where there is one, and else still the caller's. Where it is sealed, so
            is each message.
        peer, recv_depth, leads, lookup, authorize: as of `VerbsConnection`.

    Raises:
        ProtocolError: the peer does not say what belongs here.
        ConnectionLost: the peer went away.
    """
    try:
        pairs = QueuePairs(engine, engine.eager_limit)
    except (OSError, VerbsError) as error:
        reason = f"queue pairs cannot be made: {error}"
        await meeting.decline(sock, reason)
        return reason
    with contextlib.ExitStack() as undo:
        undo.callback(pairs.close)
        await meeting.tell(sock, pairs.ours)
        theirs = await meeting.told(sock)
        if isinstance(theirs, Verdict):
            return f"the peer cannot use RDMA: {theirs.reason}"
        if not isinstance(theirs, Offer):
            raise ProtocolError(f"the peer answered an offer of RDMA with {type(theirs).__name__.lower()!r}")
        reason = _connect(pairs, theirs)
        if reason:
            await meeting.both(sock, reason)
            return reason
        undo.pop_all()
    # Before the peer hears that we are ready, as it may send its first message then.
    seals = sock.seals if isinstance(sock, SealedSocket) else None
    connection = VerbsConnection(
        pairs, peer, recv_depth=recv_depth, leads=leads, lookup=lookup, authorize=authorize, seals=seals
    )
    proven = False
    try:
        reason = await meeting.both(sock, "")
        if not reason:
            reason = await meeting.both(sock, await _prove(connection))
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
    """Connect our end; what went wrong."""
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
