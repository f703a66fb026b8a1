"""The engine of a process, and connections to peers by queue pairs.

This is the part of `zcactor.transport.verbs.endpoint` that needs a device. Without a device it is never imported.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from zcactor.errors import ProtocolError
from zcactor.logs import logger
from zcactor.transport.stream.record_layer import SealedSocket
from zcactor.transport.verbs.device.engine import Engine
from zcactor.transport.verbs.device.sizing import slot_nbytes_for
from zcactor.transport.verbs.device.viability import NotViable, Viable, prove, viable_ports
from zcactor.transport.verbs.driver.base import Marking, VerbsError
from zcactor.transport.verbs.peer import negotiation
from zcactor.transport.verbs.peer.bootstrap import Offer, PathVerdict, Ports, agree, unlike
from zcactor.transport.verbs.peer.connection import VerbsConnection
from zcactor.transport.verbs.peer.ports import OwnPorts, Pairs
from zcactor.transport.verbs.peer.queue_pairs import QueuePairs

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from zcactor.transport.frames import PeerInfo, Receiver
    from zcactor.transport.verbs.device.registration_cache import PinnableArena
    from zcactor.transport.verbs.driver.base import Binding, Device

__all__ = ["PROOF_SECONDS", "join", "open_ports"]

_OfferT = TypeVar("_OfferT", Ports, Offer)

PROOF_SECONDS: Final = 1.5
"""Seconds in which an end tries to prove a path, or all pairs of ports in turn. It does not wait for the device's own
retries, which take 7.5 s."""
FURTHER_SECONDS: Final = 0.5
"""Seconds of the proof of a further port, which blocks the loop. A READ takes microseconds."""


def open_ports(
    binding: Binding, arena: PinnableArena, *, device: str | None, port: int | None, gid_index: int | None,
    local_address: str, eager_limit: int, marks: tuple[int, int, int] = (0, 0, 0),
) -> OwnPorts | str:  # fmt: skip
    """Find the ports that may be used, and make an engine on the first one that works, or return the reason against it.
    Call it on the loop's thread.

    Args:
        binding: a binding that lists at least one device.
        arena: the arena of this process.
        device, port, gid_index, local_address: as for `viability`.
        eager_limit: bytes of the largest payload in a frame by RDMA.
        marks: the fields of the `Marking` of all packets.
    """
    found = viable_ports(
        binding, arena_nbytes=arena.nbytes, device=device, port=port, gid_index=gid_index, local_address=local_address,
        marking=Marking(*marks),
    )  # fmt: skip
    if isinstance(found, NotViable):
        return str(found)
    first = _open(binding, arena, found[0], eager_limit, proven=True)
    if isinstance(first, str):
        return first
    return OwnPorts(first, found, lambda port: _open(binding, arena, port, eager_limit, proven=False))


def _open(binding: Binding, arena: PinnableArena, found: Viable, eager_limit: int, *, proven: bool) -> Engine | str:
    """Make an engine on one port, which is proven to work before where it was not, or return the reason against it."""
    try:
        opened = binding.open(found.device)
    except OSError as error:
        return f"{found.device} cannot be used: {error}"
    with contextlib.ExitStack() as undo:
        undo.callback(_close, opened)
        try:
            if not proven:
                _prove_port(opened, found)
            engine = Engine(opened, found, arena, slot_nbytes_for(eager_limit), asyncio.get_running_loop())
        except (OSError, VerbsError) as error:
            return f"{found.device} cannot be used: {error}"
        undo.pop_all()
    engine.eager_limit = eager_limit
    return engine


def _prove_port(device: Device, found: Viable) -> None:
    """Prove a port.

    Raises:
        OSError: the port does not work.
        VerbsError: as for `prove`.
    """
    wrong = prove(device, found.port, found.gid, marking=found.marking, seconds=FURTHER_SECONDS)
    if wrong is not None:
        raise OSError(wrong)


def _close(device: Device) -> None:
    try:
        device.close()
    except OSError as error:  # as in `Engine.close`
        logger.debug("closing %s: %s", device.name, error)


@dataclass(frozen=True, slots=True)
class _Unusable:
    """The answer that a pair of ports was not tried, as a port of it cannot be used."""

    reason: str
    ours: bool
    """Whether it is this end's port that cannot be used."""
    theirs: bool


async def join(
    own: OwnPorts, numbers: Sequence[int], sock: socket.socket, peer: PeerInfo, *, leads: bool, **further: Any
) -> VerbsConnection | str:
    """Make a connection to the peer at the other end of `sock`, or return the reason against it. Both ends decide
    alike: they offer their ports, and try the same pairs of them in turn.

    Cancelling closes the queue pairs.

    Args:
        own: the ports of this process.
        numbers: those that are offered.
        sock, peer, leads, further: as for `join_by`.

    Raises:
        ProtocolError: the peer sent an unexpected message.
        ConnectionLost: the peer has ended.
    """
    ours = own.names(numbers)
    theirs = await _exchanged(sock, ours)
    if isinstance(theirs, str):
        return theirs
    pairs = Pairs(ours.names, theirs.names, leads=leads)
    if not pairs.most:
        return unlike(ours.names[0], theirs.names[0])
    reasons, tried = [], dict[Engine, None]()
    while pair := pairs.next():
        mine, peers = pair
        engine = own.engine(numbers[mine])
        made: VerbsConnection | _Unusable | str
        if isinstance(engine, str):
            made = _Unusable(engine, True, await negotiation.decline(sock, engine))
        else:
            tried[engine] = None
            made = await join_by(engine, sock, peer, seconds=PROOF_SECONDS / pairs.most, leads=leads, **further)
        if isinstance(made, VerbsConnection):
            return made
        if isinstance(made, _Unusable):
            pairs.leave_out(ours=made.ours, theirs=made.theirs)
            made = made.reason
        between = f"{ours.names[mine].device} here to the peer's {theirs.names[peers].device}: "
        reasons.append(made if pairs.most == 1 else between + made)
    reason = "; ".join(reasons)
    for engine in tried:
        engine.avoid(peer.process, reason)
    return reason


async def join_by(
    engine: Engine, sock: socket.socket, peer: PeerInfo, *, recv_depth: int, leads: bool, lookup: Callable[[int], Any],
    authorize: Callable[[Receiver | None, int, int, int], object], seconds: float,
) -> VerbsConnection | _Unusable | str:  # fmt: skip
    """Make a connection through one port of each end, or return the reason against it. Both ends decide alike.

    Cancelling closes the queue pairs.

    Args:
        engine: the engine of our port.
        sock: authenticated. It belongs to the connection, if one is made, and otherwise stays the caller's. If it is
            encrypted, so are all messages.
        peer, recv_depth, leads, lookup, authorize: as for `VerbsConnection`.
        seconds: seconds in which an end tries to prove the path.

    Raises:
        ProtocolError: the peer sent an unexpected message.
        ConnectionLost: the peer has ended.
    """
    try:
        pairs = QueuePairs(engine, engine.eager_limit)
    except (OSError, VerbsError) as error:
        reason = f"queue pairs cannot be made: {error}"
        return _Unusable(reason, True, await negotiation.decline(sock, reason))
    with contextlib.ExitStack() as undo:
        undo.callback(pairs.close)
        theirs = await _exchanged(sock, pairs.ours)
        if isinstance(theirs, str):
            return _Unusable(theirs, False, True)
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
            reason = await negotiation.both(sock, await _prove(connection, seconds))
        proven = not reason
    finally:
        if not proven:
            connection.give_up()
    if reason:
        return f"{reason} ({pairs.describe()})"
    connection.adopt(sock)
    pairs.engine.extents.ahead(0, 1)
    return connection


async def _exchanged(sock: socket.socket, ours: _OfferT) -> _OfferT | str:
    """Tell the peer an offer of this end. Returns the peer's, which is of the same kind, or the reason against one.

    Raises:
        ProtocolError: the peer sent another message.
        ConnectionLost: the peer has ended.
    """
    await negotiation.tell(sock, ours)
    theirs = await negotiation.told(sock)
    if isinstance(theirs, PathVerdict):
        return f"the peer cannot use RDMA: {theirs.reason}"
    if not isinstance(theirs, type(ours)):
        raise ProtocolError(f"the peer answered an offer of RDMA with {type(theirs).__name__.lower()!r}")
    return theirs


def _connect(pairs: QueuePairs, theirs: Offer) -> str:
    """Connect our end. Returns the failure, or an empty string."""
    try:
        pairs.connect(theirs, agree(pairs.ours, theirs))
    except (OSError, VerbsError, ProtocolError) as error:
        return f"the queue pairs cannot be connected: {error}"
    return ""


async def _prove(connection: VerbsConnection, seconds: float) -> str:
    try:
        async with asyncio.timeout(seconds):
            return await connection.prove()
    except TimeoutError:
        return f"neither a message nor a READ got through in {seconds:g} s"
    except OSError as error:
        return f"the path could not be tried: {error}"
