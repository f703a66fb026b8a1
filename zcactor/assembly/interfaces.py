"""The interfaces of the actors of node agents, imported when they are first needed: most processes never do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zcactor.interface import Interface

__all__ = ["of_head", "of_membership", "of_node"]


def of_head() -> Interface:
    """The interface of the head, `zcactor.control.head.Head`."""
    from zcactor.control.head import agent_interface

    return agent_interface()


def of_membership() -> Interface:
    """The interface of the head's `zcactor.control.membership.Membership`."""
    from zcactor.control.membership import membership_interface

    return membership_interface()


def of_node() -> Interface:
    """The interface of another node's `zcactor.control.node_agent.NodeAgent`."""
    from zcactor.control.node_agent import member_interface

    return member_interface()
