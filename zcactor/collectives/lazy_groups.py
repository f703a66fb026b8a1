"""The way to the groups of a process. Most processes have none, and do not import the modules for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.marshal.values import Code, unpackers
from zcactor.process.lazy_part import LazyPart

if TYPE_CHECKING:
    from zcactor.collectives.groups import Groups
    from zcactor.process.context import LocalProcess

__all__ = ["LazyGroups"]


class LazyGroups(LazyPart["Groups"]):
    """The maker of the groups of a process when they are first needed. Any thread may look for a member.

    Args:
        process: the process.
        hosts: the runners of its actors, by index.
    """

    def __init__(self, process: LocalProcess, hosts: Any) -> None:
        def make() -> Groups:
            from zcactor.collectives.groups import Groups

            return Groups(process, hosts)

        super().__init__(make)
        unpackers.setdefault(Code.GROUP, _unpack_first)

    @property
    def figures(self) -> tuple[int, int]:
        """The number of operations, and the bytes that reductions have read."""
        groups = self.part
        return (0, 0) if groups is None else (groups.counts.collectives, groups.counts.bytes_reduced)


def _unpack_first(unpacking: Any, data: memoryview) -> Any:
    """Unpack the first group that comes, by functions that are imported for it and used from then on."""
    from zcactor.collectives.passing import pass_groups

    pass_groups()
    return unpackers[Code.GROUP](unpacking, data)
