"""The calls of collectives whose arrays lie on GPUs: checked in the caller's thread, before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.collectives import gpu_operations as operations
from zcactor.collectives.gpu_exchange import nccl_of
from zcactor.collectives.gpu_sources import taken
from zcactor.collectives.kinds import check_plan, row_bounds
from zcactor.collectives.nccl import element_of
from zcactor.collectives.starting import start
from zcactor.device.driver import LEGACY_STREAM, THREAD_STREAM
from zcactor.device.interchange import library_stream
from zcactor.errors import DeviceUnavailable
from zcactor.marshal.on_gpu import is_on_gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.api.future import ObjectRef
    from zcactor.collectives.gpu_sources import GpuInput
    from zcactor.collectives.member import Member

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "reduce_scatter"]


def _taken(member: Member, x: Any, what: str) -> GpuInput:
    """Take the caller's array, where NCCL can exchange it.

    Raises:
        TypeError: there is no NCCL here, or the elements are of an unknown type.
        Exception: the errors of `zcactor.collectives.gpu_sources.taken`.
    """
    nccl = nccl_of(member.groups, member.process.store.devices().driver.kind)
    if isinstance(nccl, str):
        raise TypeError(f"{what}: groups exchange arrays on GPUs by NCCL. {nccl}; or pass zc.gpu.to_host(x)")
    return taken(member.process, x, what)


def allreduce(member: Member, x: Any, op: str, out: Any, plan: str, timeout: float | None) -> ObjectRef[Any]:
    """Start an allreduce; see `zcactor.Group.allreduce`."""
    what = "Group.allreduce"
    source = _taken(member, x, what)
    element = element_of(source.array.dtype, op, what)
    check_plan(plan, what, one_host=False)
    if plan != "auto":
        raise ValueError(f"{what}: plan is {plan!r}, and arrays on GPUs go by NCCL's own; use 'auto'")
    target, stream = None, tuple[int, object]((0, None))
    if out is not None:
        if not is_on_gpu(out):
            raise TypeError(
                f"{what}: out is of type {type(out).__name__}, and must be an array on a GPU as the input is"
            )
        target = taken(member.process, out, what)
        _check_out(target, source, what)
        stream = _stream_of(target, what)
    return start(
        member, what, timeout,
        lambda process, call: operations.AllReduceOnGpus(
            process, call, source, element, op, None if target is None else (target, out, stream)
        ),
    )  # fmt: skip


def _check_out(out: GpuInput, source: GpuInput, what: str) -> None:
    given, array = out.given, source.array
    if given.dtype != array.dtype or given.shape != array.shape:
        raise ValueError(
            f"{what}: out has dtype {given.dtype} and shape {given.shape}, and the result has dtype {array.dtype} and "
            f"shape {array.shape}"
        )
    if out.gpu is not source.gpu:
        raise ValueError(f"{what}: out is on {given.device}, and the array on {array.device}; it must be the same GPU")
    if given.readonly:
        raise ValueError(f"{what}: out is read-only; pass a writable array, or none and take the result")


def _stream_of(out: GpuInput, what: str) -> tuple[int, object]:
    """The stream on which the library of `out` queues work in this thread, and the object that keeps it: another thread
    queues the exchange.

    Raises:
        ValueError: nobody keeps the stream, or it is another one in each thread.
    """
    library = out.library.partition(":")[0]
    stream, kept = library_stream(out.gpu, library)
    if stream not in {0, LEGACY_STREAM} and (kept is None or stream == THREAD_STREAM):
        raise ValueError(
            f"{what}: the current stream of {library or 'the library'} is this thread's own, or made elsewhere, and "
            "may end before the exchange does; make a stream current that the library has made, or pass no out and "
            "take the result"
        )
    return stream, kept


def reduce_scatter(
    member: Member, x: Any, op: str, shards: Sequence[int] | None, extra: str, timeout: float | None
) -> ObjectRef[Any]:
    """Start a reduce_scatter; see `zcactor.Group.reduce_scatter`."""
    what = "Group.reduce_scatter"
    source = _taken(member, x, what)
    element = element_of(source.array.dtype, op, what)
    if not source.array.ndim:
        raise ValueError(f"{what}: an array without axes cannot be cut along axis 0")
    bounds = row_bounds(len(source.array), member.size, shards, what)
    return start(
        member, what, timeout,
        lambda process, call: operations.ReduceScatterOnGpus(process, call, source, element, op, bounds, extra),
    )  # fmt: skip


def allgather(member: Member, x: Any, concat: bool, timeout: float | None) -> ObjectRef[Any]:
    """Start an allgather; see `zcactor.Group.allgather`."""
    what = "Group.allgather"
    source = _taken(member, x, what)
    if concat and not source.array.ndim:
        raise ValueError(f"{what}: arrays without axes cannot be concatenated; pass concat=False, or x[None]")
    make = operations.ConcatenateOnGpus if concat else operations.AllGatherOnGpus
    return start(member, what, timeout, lambda process, call: make(process, call, source))


def broadcast(member: Member, root: int, x: Any, timeout: float | None) -> ObjectRef[Any]:
    """Start a broadcast at its root; see `zcactor.Group.broadcast`."""
    what = "Group.broadcast"
    source = _taken(member, x, what)
    return start(
        member, what, timeout, lambda process, call: operations.BroadcastOnGpus(process, call, root, source, x)
    )  # fmt: skip


def alltoall(member: Member, parts: Sequence[Any], timeout: float | None) -> ObjectRef[Any] | None:
    """Start an alltoall of arrays on GPUs; None where the parts are to go by reference: there is no NCCL here, or they
    are not all on one GPU."""
    try:
        nccl = nccl_of(member.groups, member.process.store.devices().driver.kind)
        if isinstance(nccl, str):
            return None
        sources = [taken(member.process, part, "Group.alltoall") for part in parts]
    except (DeviceUnavailable, TypeError):  # as of elements that are known to their library alone
        return None
    if any(source.gpu is not sources[0].gpu for source in sources):
        return None
    return start(
        member, "Group.alltoall", timeout,
        lambda process, call: operations.AllToAllOnGpus(process, call, parts, sources),
    )  # fmt: skip
