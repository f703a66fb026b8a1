"""The calls of collectives: their arguments are checked, and their operations chosen, in the caller's thread."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from numpy import ndarray

from zcactor.collectives import kinds
from zcactor.collectives.exchanges import AllToAll, Concatenate, ConcatenateOverHosts
from zcactor.collectives.fast_path import begin_broadcast, begin_gather
from zcactor.collectives.plans import pieces_by
from zcactor.collectives.starting import start
from zcactor.marshal.on_gpu import is_on_gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.api.future import ObjectRef
    from zcactor.collectives.member import Member

__all__ = ["allgather", "allreduce_on_gpus", "alltoall", "broadcast", "reduce_scatter"]


def _on_gpus() -> Any:
    """The module `zcactor.collectives.gpu_calls`, which is imported with the first array on a GPU."""
    from zcactor.collectives import gpu_calls

    return gpu_calls


def allreduce_on_gpus(member: Member, x: Any, op: str, out: Any, plan: str, timeout: float | None) -> ObjectRef[Any]:
    """Start an allreduce of arrays on GPUs; see `zcactor.Group.allreduce`."""
    return _on_gpus().allreduce(member, x, op, out, plan, timeout)  # type: ignore[no-any-return]


def reduce_scatter(
    member: Member, x: Any, op: str, shards: Sequence[int] | None, timeout: float | None
) -> ObjectRef[Any]:
    """Start a reduce_scatter; see `zcactor.Group.reduce_scatter`."""
    what = "Group.reduce_scatter"
    extra = "" if shards is None else f", shards={[*map(operator.index, shards)]}"
    if type(x) is not ndarray and is_on_gpu(x):
        return _on_gpus().reduce_scatter(member, x, op, shards, extra, timeout)  # type: ignore[no-any-return]
    array = kinds.as_array(x, what)
    kinds.check_op(array.dtype, op, what)
    if not array.ndim:
        raise ValueError(f"{what}: an array without axes cannot be cut along axis 0")
    bounds = kinds.row_bounds(len(array), member.size, shards, what)
    make = pieces_by(member, array, bounds)
    rows = bounds[member.rank], bounds[member.rank + 1]
    return start(
        member, what, timeout,
        lambda process, call: make(process, call, "reduce_scatter", op, array, None, rows, extra),
    )  # fmt: skip


def allgather(member: Member, x: Any, concat: bool, timeout: float | None) -> ObjectRef[Any]:
    """Start an allgather; see `zcactor.Group.allgather`."""
    what = "Group.allgather"
    if type(x) is not ndarray and is_on_gpu(x):
        return _on_gpus().allgather(member, x, concat, timeout)  # type: ignore[no-any-return]
    array = kinds.as_array(x, what)
    if not concat:
        return begin_gather(member, array, timeout)
    if not array.ndim:
        raise ValueError(f"{what}: arrays without axes cannot be concatenated; pass concat=False, or x[None]")
    make = Concatenate if member.hierarchy.one_host else ConcatenateOverHosts
    return start(member, what, timeout, lambda process, call: make(process, call, array, member.eager_nbytes))


def broadcast(member: Member, root: int, x: Any, timeout: float | None) -> ObjectRef[Any]:
    """Start a broadcast; see `zcactor.Group.broadcast`."""
    what = "Group.broadcast"
    if not 0 <= root < member.size:
        raise ValueError(f"{what}: root is {root}, and ranks are 0 to {member.size - 1}")
    if member.rank != root:
        return begin_broadcast(member, root, None, timeout)
    if x is None:
        raise TypeError(f"{what}: rank {root} is the root, and has passed no array")
    if type(x) is not ndarray and is_on_gpu(x):
        return _on_gpus().broadcast(member, root, x, timeout)  # type: ignore[no-any-return]
    return begin_broadcast(member, root, kinds.as_array(x, what), timeout)


def alltoall(member: Member, parts: Sequence[Any], timeout: float | None) -> ObjectRef[Any]:
    """Start an alltoall; see `zcactor.Group.alltoall`."""
    what = "Group.alltoall"
    if len(parts) != member.size:
        raise ValueError(f"{what}: there are {len(parts)} parts for {member.size} ranks; pass one value for each")
    if all(is_on_gpu(part) for part in parts):
        started = _on_gpus().alltoall(member, parts, timeout)
        if started is not None:
            return started  # type: ignore[no-any-return]
    return start(member, what, timeout, lambda process, call: AllToAll(process, call, parts))
