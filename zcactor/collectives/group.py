"""`Group`: actors that do operations on arrays together, as a value; and `group`, which makes one."""

from __future__ import annotations

import operator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast, overload

from numpy import ndarray

from zcactor import ids
from zcactor.api.operation import operation
from zcactor.collectives import calls, founding, kinds
from zcactor.collectives.cost import GroupPlan, plan_of
from zcactor.collectives.exchanges import AllGather
from zcactor.collectives.fast_path import begin_barrier, remember, repeated
from zcactor.collectives.group_options import GroupOptions
from zcactor.collectives.operations import Refusal
from zcactor.collectives.plans import result_by
from zcactor.collectives.reducer import GroupCalls, Reducer
from zcactor.collectives.starting import CountedCall, start
from zcactor.collectives.steps import ReducerStep, RefusedStep
from zcactor.marshal.on_gpu import is_on_gpu
from zcactor.process.context import current, current_host
from zcactor.process.spinning import check_spin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zcactor.api.future import ObjectRef
    from zcactor.api.handle import ActorHandle
    from zcactor.collectives.kinds import Array, Op, Plan
    from zcactor.collectives.member import Member
    from zcactor.hooks import Hook
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.call import Call
    from zcactor.topology.topology import Topology

__all__ = ["Group", "group"]

F = TypeVar("F", bound="Callable[..., Any]")


def _counted(method: F, refusal: type[Refusal] = Refusal) -> F:
    """Make a method a collective: each call is a `CountedCall`, also one with arguments that it does not have."""
    what = method.__qualname__

    @wraps(method)
    def call(group: Group, /, *args: Any, **kwargs: Any) -> Any:
        with CountedCall(group._member(), what, refusal):
            return method(group, *args, **kwargs)

    return cast("F", call)


class Group:
    """Actors that do operations on arrays together: rank i is ``actors[i]``. `zcactor.group` makes groups.

    A group is a value: it compares and hashes, and it can be passed to actors, nested and kept. The memory that members
    keep for it is freed with the last value of the group anywhere.

    All collectives are methods of the members, called inside an actor's methods: elsewhere they raise
    ``RuntimeError``. They start at the call and return an `ObjectRef`; an ``async def`` method awaits it, a plain
    method calls its `ObjectRef.result`. Calls are matched by their order: all members make the same calls in the same
    order. A call that raises counts: the other members get its error in place of a result. Cancelling the wait, or a
    timeout, ends the waiting only: the operation goes on, its place in the order is kept, and the group stays usable.

    Where the arrays of all ranks lie on GPUs, NCCL exchanges them, and chooses the order of sums. The results then lie
    on the ranks' GPUs, as arrays of the inputs' library. The reference is done when the exchange is queued on the GPU.
    """

    __slots__ = ("_actors", "_epoch", "_found", "_home", "_key", "_options", "_ranks", "_token")

    def __init__(
        self, key: bytes, epoch: int, actors: tuple[ActorHandle, ...], token: ObjectRef[None], options: GroupOptions
    ) -> None:
        self._key = key
        self._epoch = epoch
        self._actors = actors
        self._options = options
        self._token = token
        """A promise of the founder: the group lives as long as anybody holds it."""
        self._ranks = {handle._remote.actor_id: rank for rank, handle in enumerate(actors)}
        host = current_host.get()
        self._home: Any = host
        """The actor that has received this value."""
        self._found: tuple[Any, Member] | None = None
        """The actor that has called last, and its member."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self._actors)

    @property
    def actors(self) -> tuple[ActorHandle, ...]:
        """The members, by rank."""
        return self._actors

    @property
    def epoch(self) -> int:
        """Number of the epoch: 0 for a new group, and greater for each one that `reform` or `without` has made."""
        return self._epoch

    @property
    def rank(self) -> int:
        """Rank of the actor whose method runs, or which has received this value.

        Raises:
            RuntimeError: the caller is no member.
        """
        for host in (current_host.get(), self._home):
            if host is not None and host.info is not None:
                rank = self._ranks.get(host.info.actor_id)
                if rank is not None:
                    return rank
                raise RuntimeError(f"{host.label} is not a member of this group of {self.size}")
        raise RuntimeError(
            f"this process is not a member of this group of {self.size}: collectives are called in the methods of "
            "its actors"
        )

    # ---------------------------------------------------------------- collectives

    @_counted
    def allreduce(
        self, x: Any, op: Op = "sum", *, out: Array | None = None, plan: Plan = "auto", timeout: float | None = None
    ) -> ObjectRef[Array]:
        """Reduce the arrays of all ranks element by element, in the order of the ranks: ((x0 + x1) + x2) + ...

        Where several hosts have several ranks each, those of each host are added in that order, and then the hosts'
        sums, unless the group was made with ``reproducible="everywhere"``. The bits of the result depend on that order
        alone, and are the same on all ranks. Floats narrower than 32 bits are added as float32 and rounded once. Sums
        of integers wrap as NumPy's do.

        Args:
            x: an array, or a value that ``np.asarray`` makes one of, of the same dtype and shape on all ranks:
                integers, floats, complex numbers, or bools (min and max alone). One of up to `eager_limit` bytes is
                copied at the call. A larger one is lent: read-only until the reference is done, and never written;
                after a failure until no other rank reads it. A piece of an array to which somebody can still write is
                copied at the call, and an array outside the store into it, once.
            op: ``"sum"``, ``"mean"`` (floats and complex numbers), ``"min"``, ``"max"`` (no complex numbers) or
                ``"prod"``.
            out: a writable array of the same dtype and shape that the result is copied to; it may be `x`. Until the
                reference is done it is read-only, and any other use of it raises ValueError.
            plan: ``"auto"`` takes ``"eager"`` for arrays of up to 16 KiB (the setting `eager_limit`): they travel in
                frames and every rank reduces them alone. Larger ones take ``"shared"`` on one host: every rank reduces
                its part into one result, which all map. (Of two ranks one reduces everything, by turns, for sums and
                means of up to 1 MiB.) Over several hosts they take the one that `explain` predicts
                to be faster: ``"direct"``: every rank takes its part of all inputs, reduces it, and then takes the
                finished parts of the others; or ``"naive"``: every rank takes and reduces everything, and has a result
                of its own. ``"direct"`` on one host is ``"shared"``, and the other way round. All these give the same
                bits. Over several hosts there are also ``"ring"``: sums of parts go around all ranks, and then the
                finished parts; and ``"halving"``: two ranks exchange halves, and add, at each step. They add in orders
                of their own, with the same bits on all ranks.
            timeout: seconds to wait at most, also limited by the deadline of the method that runs.

        Returns:
            A reference to the result: an array in C order, of the dtype and shape of `x`, read-only; or `out`.

        Raises:
            RuntimeError: the caller is no member.
            TypeError: `op` is not defined for the dtype, the elements are no plain numbers, `x` carries more than its
                elements, such as a mask, or it is on a GPU and NCCL is missing here, or at another rank (raised by the
                reference then).
            ValueError: unknown `op` or `plan`, `out` does not fit, or `x` or `out` is used by an operation that is not
                done. The reference raises it where two ranks have one GPU, or one rank has several.
            OutOfMemory: the store of a rank has no room for a copy of its input; raised by the reference.
            ProtocolError: a message of a rank was refused; raised by the reference.
            GroupMismatch: another rank has made another call. The reference raises this and the errors below.
            GroupBroken: a member is gone, or the group was formed anew.
            GroupTimeout: the timeout has passed.

        Cancelling ends the waiting; the operation goes on.
        """
        what = "Group.allreduce"
        member = self._member()
        if out is None and plan == "auto" and (repetition := repeated(member, x, op, timeout)) is not None:
            return repetition
        if type(x) is not ndarray and is_on_gpu(x):
            return calls.allreduce_on_gpus(member, x, op, out, plan, timeout)
        array = kinds.as_array(x, what)
        kinds.check_op(array.dtype, op, what)
        if out is not None:
            kinds.check_out(out, array, what)
        kinds.check_plan(plan, what, one_host=member.hierarchy.one_host)
        return self._reduce(array, op, out, plan, timeout, "" if plan == "auto" else f", plan={plan!r}")

    def _reduce(
        self, array: Array, op: Op, out: Array | None, plan: Plan, timeout: float | None, extra: str,
        step: ReducerStep | None = None,
    ) -> ObjectRef[Array]:  # fmt: skip
        what = "Group.allreduce"
        member = self._member()
        make = result_by(plan, member, array, op)
        if out is None and not extra:
            remember(member, array, op, make)
        return start(
            member, what, timeout,
            lambda process, call: make(process, call, "allreduce", op, array, out, None, extra), step,
        )  # fmt: skip

    @_counted
    def reduce_scatter(
        self, x: Any, op: Op = "sum", *, shards: Sequence[int] | None = None, timeout: float | None = None
    ) -> ObjectRef[Array]:
        """Reduce the arrays of all ranks as `allreduce` does, and give each rank its piece along axis 0.

        Args:
            x: as for `allreduce`, with at least one axis.
            op: as for `allreduce`.
            shards: rows of each rank's piece, the same on all ranks, 0 allowed; None cuts as ``np.array_split`` does.
            timeout: seconds, as for `allreduce`.

        Returns:
            A reference to this rank's piece, a writable array of its own.

        Raises:
            ValueError: `x` has no axis, or `shards` are not one length a rank that add up to ``len(x)``.
            Exception: the errors of `allreduce`.

        Cancelling ends the waiting; the operation goes on.
        """
        return calls.reduce_scatter(self._member(), x, op, shards, timeout)

    @overload
    def allgather(self, x: Any, *, concat: Literal[True] = True, timeout: float | None = None) -> ObjectRef[Array]: ...
    @overload
    def allgather(self, x: Any, *, concat: Literal[False], timeout: float | None = None) -> ObjectRef[list[Array]]: ...
    @_counted
    def allgather(
        self, x: Any, *, concat: bool = True, timeout: float | None = None
    ) -> ObjectRef[Array] | ObjectRef[list[Array]]:
        """Give the arrays of all ranks to all.

        Args:
            x: as for `allreduce`, of any dtype of plain bytes. With `concat` it is lent as to `allreduce`;
                otherwise it is shared like an argument of a call, and read-only from then on.
            concat: put the arrays one behind the other along axis 0, in one array that all ranks of a host map. They
                may differ in length and in nothing else. Without it nothing is copied, and dtypes and shapes may
                differ.
            timeout: seconds, as for `allreduce`.

        Returns:
            A reference to the read-only array, or to the list of the read-only arrays by rank.

        Raises:
            TypeError: the elements are not plain bytes.
            ValueError: `x` has no axis, and is to be concatenated.
            Exception: the errors of `allreduce`.

        Cancelling ends the waiting; the operation goes on.
        """
        return calls.allgather(self._member(), x, concat, timeout)

    @_counted
    def broadcast(self, x: Any = None, *, root: int = 0, timeout: float | None = None) -> ObjectRef[Array]:
        """Give the array of one rank to all, by reference.

        Args:
            x: as for `allreduce`, of any dtype of plain bytes, on rank `root`; it is shared like an argument of
                a call, and read-only from then on. The values of other ranks are not looked at.
            root: the rank whose array it is, the same on all ranks.
            timeout: seconds, as for `allreduce`.

        Returns:
            A reference to the read-only array.

        Raises:
            TypeError: the elements are not plain bytes; rank `root` has passed nothing.
            ValueError: there is no rank `root`.
            Exception: the errors of `allreduce`.

        Cancelling ends the waiting; the operation goes on.
        """
        return calls.broadcast(self._member(), operator.index(root), x, timeout)

    @_counted
    def alltoall(self, parts: Sequence[Any], *, timeout: float | None = None) -> ObjectRef[list[ObjectRef[Any]]]:
        """Send a value to each rank, and receive one from each.

        Args:
            parts: one value a rank, in their order; each is shared like an argument of a call.
            timeout: seconds, as for `allreduce`.

        Returns:
            A reference to a list of references: number s is the value from rank s, which is read when it is awaited.

        Raises:
            ValueError: there are more or fewer parts than ranks.
            Exception: the errors of `allreduce`, and those of `zcactor.put`.

        Cancelling ends the waiting; the operation goes on.
        """
        return calls.alltoall(self._member(), parts, timeout)

    @_counted
    def barrier(self, *, timeout: float | None = None) -> ObjectRef[None]:
        """Wait until all ranks have called.

        Args:
            timeout: seconds, as for `allreduce`.

        Raises:
            Exception: the errors of `allreduce`.

        Cancelling ends the waiting; the operation goes on.
        """
        return begin_barrier(self._member(), timeout)

    # ---------------------------------------------------------------- the group itself

    @operation
    async def explain(self, nbytes: int) -> GroupPlan:
        """Predict the time of an allreduce by each plan, and the bytes that a rank takes from others, and name the plan
        of ``"auto"``, and the way of arrays on GPUs at the first member. Any holder of the group may ask. The cost of a
        frame between hosts is that at the time when the group was made.

        Args:
            nbytes: bytes of each rank's input.

        Raises:
            ValueError: `nbytes` is negative.
            ConnectionLost: the first member's process is gone.

        Cancelling has no effect on the group.
        """
        if nbytes < 0:
            raise ValueError(f"Group.explain: nbytes is {nbytes}, and must be at least 0")
        hierarchy, line, eager_nbytes, gpus = await founding.measured(current(), self._key, self._actors[0])
        return plan_of(nbytes, hierarchy, line, eager_nbytes, gpus)

    @operation
    async def reform(self, *, replace: Mapping[int, object] | None = None) -> Group:
        """Make a new epoch of the group, also of a healthy one, with members that were started again or are replaced.
        All living members are told, and calls on this value then raise `GroupBroken`.

        One party reforms, and passes the new value on. Where two do at once there are two epochs, and the later one
        stays.

        Args:
            replace: new actors by rank. A member that is being started again is waited for.

        Returns:
            The group of the new epoch, with the same ranks.

        Raises:
            TypeError, ValueError: an entry of `replace` is no handle, no rank, or a member already.
            ActorDied: a member that is not replaced is dead.
            ConnectionLost: a member is not reached.

        Cancelling leaves the former epoch or the new one.
        """
        actors: list[object] = list(self._actors)
        for rank, handle in (replace or {}).items():
            if not 0 <= operator.index(rank) < self.size:
                raise ValueError(f"Group.reform: there is no rank {rank}; ranks are 0 to {self.size - 1}")
            actors[rank] = handle
        return await self._again("Group.reform", actors)

    @operation
    async def without(self, *ranks: int) -> Group:
        """Make a new epoch of the group without some members; the others keep their order, and get new ranks. Otherwise
        as `reform`.

        Args:
            ranks: the ranks to leave out.

        Raises:
            ValueError: there is no such rank, or no member would be left.
            ActorDied: another member is dead.
            ConnectionLost: a member is not reached.

        Cancelling leaves the former epoch or the new one.
        """
        for rank in ranks:
            if not 0 <= operator.index(rank) < self.size:
                raise ValueError(f"Group.without: there is no rank {rank}; ranks are 0 to {self.size - 1}")
        actors = [handle for rank, handle in enumerate(self._actors) if rank not in ranks]
        return await self._again("Group.without", actors)

    async def _again(self, what: str, actors: Sequence[object]) -> Group:
        handles = founding.checked(what, actors)
        process, name = current(), self._key[: founding.NAME_NBYTES]
        epoch = self._epoch + 1
        return Group(*await founding.found(process, name, epoch, handles, self._actors, options=self._options))

    def _member(self) -> Member:
        host = current_host.get()
        if self._found is not None and self._found[0] is host and self._found[1].kept:
            return self._found[1]
        rank = self.rank
        member: Member | None = current().groups().member(self._key, rank)
        if member is None:
            raise RuntimeError(f"rank {rank} of this group of epoch {self._epoch} is not in this process any more")
        self._found = host, member
        return member

    @partial(_counted, refusal=RefusedStep)
    def reducer(
        self, *, op: Literal["mean", "sum"] = "mean", hook: Hook | None = None, bucket: int | str = "25MiB"
    ) -> Reducer:
        """Make a reducer for many named arrays, such as the gradients of one step. A call that raises counts as a step:
        the other members get its error at the end of their block.

        Args:
            op: ``"mean"`` or ``"sum"``.
            hook: a compression of gradients, see `zcactor.hooks`; the same kind and configuration on all ranks, and
                the same object in each step, as it keeps what it did not send. A step that fails on any rank, or has a
                result that is not finite, leaves it as it was.
            bucket: bytes, or a size as text, of small arrays that are reduced together.

        Raises:
            RuntimeError: the caller is no member.
            ValueError: unknown `op`, or `bucket` is no size.
            TypeError: `hook` is no hook, or `bucket` is neither a number nor text.
        """

        def reduce(array: Array, kind: Op, what: str, step: ReducerStep) -> ObjectRef[Any]:
            kinds.check_op(array.dtype, kind, "Reducer.add")
            return self._reduce(array, kind, None, "auto", None, f", {what}", step)

        def gather(array: Array, what: str, step: ReducerStep) -> ObjectRef[Any]:
            return start(
                self._member(),
                "Reducer",
                None,
                lambda process, call: AllGather(process, call, array, f", {what}"),
                step,
            )

        def begin() -> tuple[ReducerStep, ObjectRef[Any]]:
            made: list[ReducerStep] = []

            def make(process: LocalProcess, call: Call) -> ReducerStep:
                made.append(ReducerStep(process, call))
                return made[0]

            reference = start(self._member(), "Reducer", None, make)
            return made[0], reference

        return Reducer(GroupCalls(begin, reduce, gather, self.size), op, hook, bucket)

    # ---------------------------------------------------------------- as a value

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Group) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"<Group of {self.size} actors, epoch {self._epoch}>"

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, _: Any) -> Group:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "groups travel inside calls, puts and results; pickling one elsewhere would lose track of who holds it"
        )


# ---- making groups


@operation
async def group(
    actors: Sequence[object], *, order: Literal["given", "topology"] | Topology = "given",
    reproducible: Literal["placement", "everywhere"] = "placement", spin_us: float = 0.0,
) -> Group:  # fmt: skip
    """Make a group of actors: rank i is ``actors[i]``, unless `order` says otherwise. All members are connected with
    each other.

    Members that map each other's memory are on one host. Those of other hosts, or without ``local`` among their
    transports, take parts of each other's arrays by RDMA or TCP, straight to where they are needed. Several members
    on one host share one result there. NCCL exchanges arrays that lie on a GPU of each rank; where CuPy does not find
    it, calls with such arrays raise TypeError.

    Args:
        actors: handles, each once.
        order: ``"given"``; ``"topology"``: neighbours in the network between the actors' nodes, which is measured now,
            get neighbouring ranks; or a `zcactor.topology.Topology` whose hosts are node ids or names of hosts, or
            numbers: then ``actors[i]`` is at host i. The group's `actors` are in the order of ranks.
        reproducible: the order of sums over several hosts with several ranks each. ``"placement"``: the ranks of each
            host are added in their order, and then the hosts' sums by their lowest rank, so the bits depend on where
            the actors are. ``"everywhere"``: all are added in the order of the ranks; each host then takes every
            input, in place of one sum a host.
        spin_us: microseconds for which the loop of a member stays awake after each message of the group, so that the
            next one costs no wake-up. Each member's process takes a processor for that time: use it where each has one.
            0 costs nothing.

    Raises:
        ValueError: no actors, an actor twice, an unknown value of an option, or a topology without the actors' hosts.
        TypeError: an element of `actors` is no handle, `spin_us` is no number, or `order` is something else than is
            said here.
        ImportError: networkx is missing, for ``order="topology"`` over several nodes.
        NotInitialized: no runtime is running.
        ActorDied: an actor is dead.
        ConnectionLost: a member is not reached.

    Cancelling leaves no group.
    """
    if reproducible not in ("placement", "everywhere"):
        raise ValueError(f"zc.group: reproducible is {reproducible!r}, and must be 'placement' or 'everywhere'")
    options = GroupOptions(reproducible == "everywhere", check_spin(spin_us, "zc.group"))
    handles = founding.checked("zc.group", actors)
    process = current()
    name = ids.token(founding.NAME_NBYTES)
    if order != "given":
        from zcactor.topology.ranks import order_of_ranks  # few groups need it

        handles = tuple([handles[place] for place in await order_of_ranks(handles, order)])
    return Group(*await founding.found(process, name, 0, handles, options=options))
