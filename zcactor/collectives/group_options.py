"""The options of a group, which its later epochs and its values in other processes have as well."""

from __future__ import annotations

from typing import Any, NamedTuple

from zcactor.errors import ProtocolError

__all__ = ["GroupOptions"]


class GroupOptions(NamedTuple):
    """Options of `zcactor.group`, checked."""

    everywhere: bool
    """Whether sums add in the order of the ranks, wherever they are."""
    spin_us: float = 0.0
    """Microseconds for which a waiting member's loop stays awake."""

    @staticmethod
    def from_wire(fields: Any) -> GroupOptions:
        """The options that came with a group.

        Raises:
            ProtocolError: they are malformed.
        """
        if type(fields) is not list or [type(each) for each in fields] != [bool, float]:
            raise ProtocolError("the options of a group are malformed")
        return GroupOptions(*fields)
