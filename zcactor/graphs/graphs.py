"""The graphs of one process: its shares of all graphs, and the runs of those that it has compiled."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVarTuple

from numpy import ndarray

from zcactor.api.future import ObjectRef, packed_result
from zcactor.api.handle import ActorHandle
from zcactor.graphs.service import GraphService
from zcactor.graphs.share import Duty, Share
from zcactor.graphs.values import Outcome
from zcactor.marshal.packed import Packed
from zcactor.marshal.values import SCALARS
from zcactor.peers.seating import Misplaced, reaching
from zcactor.process.spinning import Spinner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zcactor.graphs.runs import Runs
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session

__all__ = ["Graphs"]

Ts = TypeVarTuple("Ts")


class Graphs(GraphService):
    """The graphs of one process. Used on the loop's thread.

    Args:
        process: the process.
        hosts: the runners of its actors, by index.
    """

    def __init__(self, process: LocalProcess, hosts: Any) -> None:
        self.process = process
        self._hosts = hosts
        self._shares: dict[bytes, Share] = {}
        self._founded: dict[bytes, Runs] = {}
        self._all: dict[Runs, None] = {}

    # ---------------------------------------------------------------- from founders

    async def join(
        self, key: bytes, founder: bytes, steps: Sequence[Sequence[Any]], targets: Mapping[str, Sequence[bytes]],
        peers: Sequence[tuple[bytes, str]], order: Sequence[bytes], spin_us: float,
    ) -> None:  # fmt: skip
        """See `GraphService`."""
        own = self.process.process
        duties = []
        for number, place, actor_id, code, label, args, kwargs, needs in steps:
            host = self._hosts.by_index.get(place)
            if host is None or host.info is None or host.info.actor_id != actor_id:
                raise Misplaced(f"the actor of {label} is not in its process any more")
            if code in host.interface.refusals:
                raise host.interface.refusals[code]
            found = [(comes, await self._constant(value)) for comes, value in args]
            named = {name: (comes, await self._constant(value)) for name, (comes, value) in kwargs.items()}
            duties.append(Duty(number, host, code, label, found, named, needs))
        names = dict(peers)
        for peer in names:
            if order.index(peer) > order.index(own):
                with reaching():
                    await self.process.connections.connect(peer)
        runs = self._founded.get(key)
        if founder == own and runs is None:
            raise Misplaced("the graph was given up")
        sink = (frozenset(runs.layout.outputs), runs.arrived, runs.arrived_plain) if runs is not None else None
        share = Share(
            self.process, key, founder, duties, {int(number): to for number, to in targets.items()}, names, sink,
            Spinner(self.process.loop, spin_us * 1e-6) if spin_us else None,
        )  # fmt: skip
        self._shares[key] = share
        self.process.pushes.expectations.takers[share.word] = share.arrived
        for peer in names:
            self.process.sessions.kept[peer] += 1

    async def _constant(self, value: Any) -> Any:
        """A constant argument: the object itself, or packed where each run needs an object of its own."""
        if isinstance(value, ObjectRef):
            found = await value
            packed = None
        elif type(value) is Packed:
            found = self.process.marshaller.unpack(value.payload, value.parts, value.flags)
            packed = value
        else:
            return value
        if _never_changes(found):
            return found
        return Packed(*packed_result(value._call)) if packed is None else packed

    async def start(self, key: bytes) -> list[tuple[bytes, str]]:
        """See `GraphService`."""
        share = self._shares.get(key)
        if share is None:
            raise Misplaced("the graph was given up")
        connect = self.process.connections.connect
        with reaching():
            kinds = [(peer, (await connect(peer)).connection.kind) for peer in share.peers]
        return [(self.process.process, "same process"), *kinds]

    def failed(self, key: bytes, number: int, run: int, packed: Packed) -> None:
        """See `GraphService`."""
        share = self._shares.get(key)
        if share is not None:
            share.failed(number, run, Outcome(packed.status, packed.payload, packed.parts, packed.flags))

    def cancel(self, key: bytes, run: int) -> None:
        """See `GraphService`."""
        share = self._shares.get(key)
        if share is not None:
            share.cancel(run)

    def forget(self, key: bytes) -> None:
        """See `GraphService`."""
        share = self._shares.pop(key, None)
        if share is not None:
            self.process.pushes.expectations.takers.pop(share.word, None)
            share.close()
            if share.spinner is not None:
                share.spinner.close()
            kept = self.process.sessions.kept
            for peer in share.peers:
                kept[peer] -= 1
                if not kept[peer]:
                    del kept[peer]

    # ---------------------------------------------------------------- from shares

    def noted(self, key: bytes, number: int, nbytes: int) -> None:
        """See `GraphService`."""
        runs = self._founded.get(key)
        if runs is not None:
            runs.sizes[number] = max(nbytes, runs.sizes.get(number, 0))

    def broken(self, key: bytes, label: str, cause: str, died: bool) -> None:
        """See `GraphService`."""
        runs = self._founded.get(key)
        if runs is not None:
            runs.broke(label, cause, died=died)

    # ---------------------------------------------------------------- of this process's graphs

    def add(self, runs: Runs) -> None:
        """Enter a graph that this process has compiled."""
        self._all[runs] = None

    def remove(self, runs: Runs) -> None:
        """Forget a graph that nobody can run any more. Idempotent."""
        self._all.pop(runs, None)

    def prepare(self, runs: Runs, key: bytes) -> Callable[[], Share]:
        """Expect this process's share of a graph that it compiles. Returns a function that gives it, once it is
        made."""
        self._founded[key] = runs
        return partial(self._shares.__getitem__, key)

    def forget_everywhere(self, key: bytes, processes: Sequence[bytes]) -> None:
        """Have all processes of a graph forget it."""
        self._founded.pop(key, None)
        self._tell(processes, GraphService.forget, key)
        self.forget(key)

    def cancel_everywhere(self, key: bytes, processes: Sequence[bytes], run: int) -> None:
        """Have all processes of a graph stop a run."""
        self._tell(processes, GraphService.cancel, key, run)
        self.cancel(key, run)

    def _tell(self, processes: Sequence[bytes], method: Callable[[Any, *Ts], None], *args: *Ts) -> None:
        for process in processes:
            session = self.process.sessions.used.get(process)
            if process != self.process.process and session is not None and session.closed is None:
                self.process.requests.send(session, method, args)

    # ---------------------------------------------------------------- the ends

    def session_left(self, session: Session, another: Session | None) -> None:
        """Note that a connection is lost; `another` one to the same process is used instead."""
        if another is not None and session.is_replaced:
            return  # it was closed by agreement, with all that it carried delivered
        peer, died = session.peer_process, another is None
        cause = (session.given_up or "its process has ended") if died else "a connection to its process broke"
        for key, share in list(self._shares.items()):
            if share.founder == peer and died:
                self.forget(key)
            elif peer in share.peers:
                share.tell_broken(share.peers[peer], cause, died=died)

    def actor_ended(self, actor_id: bytes, cause: str) -> None:
        """Note that an actor of this process has ended, while the process may go on."""
        for share in list(self._shares.values()):
            share.actor_ended(actor_id, cause)

    def close(self) -> None:
        """End all runs. Idempotent."""
        for runs in list(self._all):
            runs.close("zcactor was shut down while a graph ran")
        self._all.clear()
        self._founded.clear()
        for key in list(self._shares):
            self.forget(key)


def _never_changes(value: Any) -> bool:
    """Whether no method can change a value, so that all runs may get the same object."""
    values, known = [value], {id(value)}
    for each in values:  # grows: tuples may be nested to any depth
        cls = type(each)
        if cls is tuple:
            found = {id(item): item for item in each if id(item) not in known}
            known.update(found)
            values.extend(found.values())
        elif cls is ndarray:
            if each.flags.writeable:
                return False
        elif cls not in SCALARS and cls is not ActorHandle:
            return False
    return True
