"""The wait of a new head that may not act, because less than half of the nodes on record serve it, and its end by an
operator's word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from zcactor.logs import logger

if TYPE_CHECKING:
    from zcactor.control.failover import Failover
    from zcactor.control.leader_lease import LeaderLease

__all__ = ["Forced", "force", "reason", "waited_for"]


class Forced(Protocol):
    """The parts of `zcactor.control.membership.Membership` that are needed here."""

    taking_over: Failover | None
    leader_lease: LeaderLease | None


def _labels(members: Forced) -> list[str]:
    """Labels of the nodes that have neither come nor ended."""
    if members.leader_lease is None or members.taking_over is None:
        return []
    absent = members.taking_over.absent
    return [absent[node] for node in sorted(members.leader_lease.silent) if node in absent]


def waited_for(members: Forced) -> list[str]:
    """Labels of the nodes without which a head may not act; empty where it acts, or will after some seconds."""
    return _labels(members) if members.leader_lease is not None and members.leader_lease.lacks_half() else []


def reason(members: Forced) -> str:
    """The reason why a head does not act, and the remedy, for people."""
    return (
        "this head decides nothing yet: less than half of the nodes on record serve it, and the others may serve "
        f"another head. It waits for {', '.join(_labels(members))}. Where these have ended for good: "
        "zcactor start --head --directory ... --standby --force"
    )


async def force(members: Forced) -> list[str]:
    """Have a head act though less than half of the nodes on record serve it, and wait until it does. Nodes that are
    silent get the time that they need to end by themselves, and are given up.

    Returns:
        Labels of the nodes that were given up.

    Raises:
        ValueError: the head takes nothing over, or has done that.

    Cancelling ends the wait alone.
    """
    leader_lease, taking = members.leader_lease, members.taking_over
    if leader_lease is None or taking is None or taking.done.is_set():
        raise ValueError("the head acts already, so there is nothing to force")
    if leader_lease.lacks_half():
        logger.warning("an operator has this head act by force, without %s", ", ".join(_labels(members)))
    leader_lease.force()
    await taking.done.wait()
    return taking.given_up
