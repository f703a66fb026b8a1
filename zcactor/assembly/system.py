"""The system actor: the services of every process for its peers."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from zcactor.api.future import packed_result
from zcactor.api.passing import OwnRef, known_here
from zcactor.errors import ObjectLost, ProtocolError
from zcactor.exception_pickling import bare
from zcactor.execution.actor_runner import current_call
from zcactor.interface import MARK, Interface
from zcactor.logs import logger
from zcactor.marshal.packed import Packed
from zcactor.objects.broadcast import Copy
from zcactor.objects.device_proof import proof_of
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.store import Block
from zcactor.process.epochs import KnownEpoch
from zcactor.rpc.call import Call
from zcactor.rpc.incoming import NO_ANSWER

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.collectives.groups import Groups
    from zcactor.graphs.graphs import Graphs
    from zcactor.ids import ActorId, ProcessId
    from zcactor.objects.adoption import Adoptions
    from zcactor.objects.broadcast_directory import BroadcastDirectory
    from zcactor.objects.device_proof import Proof
    from zcactor.objects.device_reach import DeviceReach
    from zcactor.objects.promises import Promises
    from zcactor.objects.succession import Succession
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.store import Store
    from zcactor.observe.stats import Stats
    from zcactor.peers.head_link import HeadLink
    from zcactor.peers.idle_reaper import IdleReaper
    from zcactor.peers.simultaneous_open import SimultaneousOpens
    from zcactor.process.sessions import Sessions

__all__ = ["SystemActor", "system_interface"]


def inline(function: Any) -> Any:
    """Mark a system method as short."""
    setattr(function, MARK, {"inline": True})
    return function


def _settle(done: asyncio.Future[None], _: Call) -> None:
    if not done.done():
        done.set_result(None)


class SystemActor:
    """The actor at index 0 of every process. Its callers are authenticated peers.

    Args:
        pid: of the process.
        store: the objects of the process.
        sessions: the sessions with its peers.
        promises: the promises that peers may hold.
        succession: hands values over at the end of the process, and takes over those of others.
        adoptions: the objects that the process has adopted.
        origins: the places of copies of its objects.
        simultaneous_opens, idle_reaper: agree to close connections; without `idle_reaper` idle connections stay open.
        groups: returns the groups that actors of the process are members of.
        graphs: returns the graphs that the process has a share of.
        stats: returns the figures of the process.
        devices: reaches GPU memory.
        copies: counts copies.
        head: the link of the process to the cluster's head.
    """

    def __init__(
        self, pid: int, store: Store, sessions: Sessions, promises: Promises, succession: Succession,
        adoptions: Adoptions, origins: BroadcastDirectory, simultaneous_opens: SimultaneousOpens,
        idle_reaper: IdleReaper | None, groups: Callable[[], Groups], graphs: Callable[[], Graphs],
        stats: Callable[[], Stats], devices: DeviceReach,
        copies: CopyCounter, head: HeadLink,
    ) -> None:  # fmt: skip
        self._pid = pid
        self._store = store
        self._sessions = sessions
        self._promises = promises
        self._succession = succession
        self._adoptions = adoptions
        self._origins = origins
        self._simultaneous_opens = simultaneous_opens
        self._idle_reaper = idle_reaper
        self._groups = groups
        self._graphs = graphs
        self._stats = stats
        self._devices = devices
        self._copies = copies
        self._head = head
        self.revive: Callable[[int], Any] = lambda _: None
        """The head's function that finds an actor which no process holds at the moment."""
        self.on_actor_changed: Callable[..., None] | None = None
        """The function of a node's agent that passes on the head's report of an actor."""
        self.worker: Any = None
        """The `zcactor.node.worker_main.Worker` in a worker process."""
        self.known = KnownEpoch()
        """The epoch of the head whose orders this process carries out."""
        self.on_head_ends: Callable[[], None] = lambda: None
        """The function of a driver that is told that the cluster's head ends in order."""
        self.on_heads: Callable[[list[str]], None] = lambda _: None
        """The function that is told where the cluster has heads, and may have them one day."""
        self.print_log: Any = None
        """The function by which a driver shows the output of actors."""

    async def lease(self, object_id: int) -> bool:
        """Lease an object of ours to the caller, which knows it by a third process; False when the object is gone."""
        holder: Any = self._store.lookup(object_id)
        if holder is None:
            holder = self._promises.exports.get(object_id) or self.revive(object_id)
        if holder is None or self._succession.over:
            return False
        session = current_call.get().session
        with session.lock:
            if isinstance(holder, Block):
                holder.grant(session)
            else:
                session.leases.grant(object_id, holder)
        return True

    async def connect_to(self, process: bytes) -> bool:
        """Connect to a process that cannot connect to this one; see
        `zcactor.peers.head_link.HeadLink.connect_to`."""
        return await self._head.connect_to(process)

    async def device_bytes(self, object_id: int, offset: int, nbytes: int) -> Any:
        """Copy bytes of GPU memory to the host for the caller, which sees no GPU; see
        `zcactor.objects.device_pieces.DevicePieces.whole`."""
        session = current_call.get().session
        return await self._devices.pieces.whole(session, object_id, offset, nbytes, self._copies)

    async def device_keys(self, object_id: int, offset: int, nbytes: int) -> tuple[int, ...] | str:
        """Let the caller's network card read GPU memory; see `zcactor.objects.device_direct.DirectReads.keys`."""
        return await self._devices.direct.keys(current_call.get().session, object_id, offset, nbytes)

    async def device_computed(self, object_id: int) -> None:
        """Return when an object in GPU memory is computed; see
        `zcactor.objects.device_pieces.DevicePieces.computed`."""
        await self._devices.pieces.computed(current_call.get().session, object_id)

    async def stage(self, object_id: int, offset: int, nbytes: int, begins: bool) -> tuple[int, int]:
        """Copy a piece of GPU memory to the host for the caller, which cannot map it; see
        `zcactor.objects.device_pieces.DevicePieces.stage`."""
        session = current_call.get().session
        return await self._devices.pieces.stage(session, object_id, offset, nbytes, begins, self._copies)

    async def device_proof(self, x: Any, uuid: str, exports: bool) -> Proof:
        """The proof that an array on the caller's GPU has come here; see `zcactor.objects.device_proof.proof_of`."""
        session = current_call.get().session
        return await proof_of(x, uuid, exports, session, self._store, self._devices.direct.reason(session))

    @inline
    def device_gone(self, owner: bytes, place: int) -> object:
        """Unmap an extent of another process's GPU memory that is no more."""
        return self._told(self._devices.gone, owner, place)

    async def hold(self, ended: list[int], held: list[int]) -> None:
        """Note the objects that the caller still holds of those leased by connections which have ended at its side.

        Args:
            ended: the caller's numbers of those connections.
            held: ids of the objects that it holds; it holds no others.
        """
        session = current_call.get().session
        for other in list(self._sessions.all()):
            hello = other.peer_hello
            if other.peer_process == session.peer_process and hello is not None and hello.session in ended:
                other.connection.abort()  # its end was not noticed here yet; the objects leased by it are parked then
                await other.connection.aclose()
        reader = session.connection.reader
        if reader is not None:
            self._store.parking.hold(reader, [(session.peer_process, number) for number in ended], set(held))

    async def owner_ends(self, leased: list[int]) -> None:
        """Get the values that this process refers to and the calling one has, as that is about to end; see
        `zcactor.objects.succession.Succession.take_over`."""
        await self._succession.take_over(current_call.get().session.peer_process, set(leased))

    async def adopt(self, pin: int, kind: int, offset: int, nbytes: int) -> tuple[int, int]:
        """Adopt an object that we passed on to the caller, who cannot lease it from its owner, and lease it to the
        caller. Returns its id here, and the offset of its bytes in our arena.

        Args:
            pin: the pin by which we keep it for the caller.
            kind: a `RegionKind`.
            offset: of the bytes in the owner's arena.
            nbytes: the number of wanted bytes.

        Raises:
            ObjectLost: only the object's name is left here, or the caller has not been given the object.
            OutOfMemory: this process has no room for the object.
        """
        session = current_call.get().session
        holder = session.leases.get(pin) if pin >> 63 else None
        own: OwnRef | Block
        if kind == RegionKind.REF and (call := known_here(holder)) is not None:
            own, place = OwnRef(call), 0
        elif isinstance(holder, Lease | RemoteLease) and kind <= RegionKind.MOVED:
            low = offset - holder.offset
            if low < 0 or low + nbytes > holder.nbytes:
                raise ObjectLost(f"bytes {low} to {low + nbytes} of an object of {holder.nbytes} bytes")
            own, first = await self._adoptions.adopt(holder, kind)
            place = first + low
        else:
            raise ObjectLost(f"pid {self._pid} has no value under that name")
        with session.lock:
            _, object_id, _ = own.grant(session)
        return object_id, place

    async def source(
        self, object_id: int, offset: int, nbytes: int, machine: str, failed: bytes, authenticate: int
    ) -> tuple[bytes, int, int]:
        """The source of an object's bytes for the caller, who holds a lease on it: a process, and the id and the offset
        of the copy there; an empty process id stands for this process. See
        `zcactor.objects.broadcast_directory.BroadcastDirectory`.

        Raises:
            ObjectLost: the object is gone.
        """
        block = self._store.lookup(object_id)
        if block is None:
            raise ObjectLost(f"object {object_id:x} is no longer held by its owner, pid {self._pid}")
        reader = current_call.get().session.peer_process
        return (await self._origins.source(reader, block, offset, nbytes, machine, failed, authenticate))[:3]

    async def located(
        self, object_id: int, offset: int, nbytes: int, copy_id: int, copy_offset: int, machine: str, failed: bytes,
        authenticate: int,
    ) -> None:  # fmt: skip
        """Note the end of the caller's transfer of an object of ours, and the id of its copy; 0 where it has none."""
        block = self._store.lookup(object_id)
        if block is not None:
            reader = current_call.get().session.peer_process
            copy = Copy(reader, copy_id, copy_offset, machine) if copy_id else None
            self._origins.ended(reader, block, offset, nbytes, copy, failed, authenticate)

    async def part(self) -> bool:
        """Whether the caller may close its connection to us, which this process does not need either."""
        idle_reaper = self._idle_reaper
        return idle_reaper is not None and idle_reaper.close_if_idle(current_call.get().session)

    async def retire(self) -> bool:
        """Whether the caller may close this connection, beside which another one is open."""
        return self._simultaneous_opens.agree(current_call.get().session)

    async def fetch(self, object_id: int) -> Packed:
        """The outcome of a promise of ours, still packed, once it is known."""
        call = self._promises.exports.get(object_id)
        if not isinstance(call, Call):
            raise ObjectLost(f"promise {object_id:x} is no longer held by its owner, pid {self._pid}")
        if not call.known:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            call.when_known(functools.partial(_settle, done))
            await done
        call.retrieved = True
        if call.error is not None:
            raise bare(call.error, None)
        return Packed(*packed_result(call), call.status)

    async def partition(self, mapper: Any, method: str, count: int, item: list[Any]) -> list[Any]:
        """Make the parts of a mapper of this process; see `zcactor.shuffling.sides.partition`."""
        from zcactor.shuffling import sides  # few processes ever shuffle

        return await sides.partition(mapper, method, count, item)

    async def merge(self, reducer: Any, method: str, refs: list[Any]) -> list[Any]:
        """Merge the parts of a reducer of this process; see `zcactor.shuffling.sides.merge`."""
        from zcactor.shuffling import sides

        return await sides.merge(reducer, method, refs)

    async def group_join(self, key: bytes, epoch: int, seats: list[list[Any]]) -> Any:
        """Make the members of a group that live here; see `zcactor.collectives.groups.Groups.join`."""
        return tuple(await self._groups().join(key, epoch, seats))

    async def group_start(self, key: bytes, facts: list[Any]) -> None:
        """Let the members of a group take calls; see `zcactor.collectives.groups.Groups.start`."""
        await self._groups().start(key, facts)

    @inline
    def group_publish(
        self, key: bytes, to: int, source: int, seq: int, signature: str, failed: bool, data: Any, owner: bytes,
        offset: int, layout: bytes,
    ) -> object:  # fmt: skip
        """Take one rank's publication; see `zcactor.collectives.groups.Groups.publish`."""
        return self._told(self._groups().publish, key, to, source, seq, signature, failed, data, owner, offset, layout)

    @inline
    def group_publish_with(
        self, key: bytes, to: int, source: int, seq: int, signature: str, failed: bool, data: Any, owner: bytes,
        offset: int, layout: bytes, *result: int,
    ) -> bool:  # fmt: skip
        """Take one rank's publication that names leased memory. Returns whether the rank lives here, and has taken the
        lease."""
        return self._groups().publish(
            key, to, source, seq, signature, failed, data, owner, offset, layout, result
        )  # fmt: skip

    @inline
    def group_offer(
        self, key: bytes, to: int, source: int, seq: int, object_id: int, offset: int, nbytes: int
    ) -> bool:  # fmt: skip
        """Take leased memory; see `zcactor.collectives.groups.Groups.offer`."""
        return self._groups().offer(key, to, source, seq, object_id, offset, nbytes)

    @inline
    def group_input(self, key: bytes, to: int, seq: int) -> tuple[int, bytes]:
        """Take a rank's input to memory of this process; see `zcactor.collectives.groups.Groups.input`."""
        return self._groups().input(key, to, seq)

    @inline
    def group_gpu(
        self, key: bytes, to: int, source: int, attempt: int, uuid: str, reason: str, name: Any
    ) -> object:  # fmt: skip
        """Take what a rank tells of its GPU; see `zcactor.collectives.groups.Groups.take_gpu`."""
        return self._told(self._groups().take_gpu, key, to, source, attempt, uuid, reason, name)

    @inline
    def group_piece(self, key: bytes, to: int, source: int, seq: int, data: bytes) -> object:
        """Take a piece of a rank's input."""
        return self._told(self._groups().piece, key, to, source, seq, data)

    @inline
    def group_report(self, key: bytes, to: int, source: int, seq: int, failure: BaseException | None) -> object:
        """Take the report of a rank that it is done with the memory of an operation."""
        return self._told(self._groups().report, key, to, source, seq, failure)

    @inline
    def group_broken(self, key: bytes, rank: int, actor: str, cause: str) -> object:
        """Take the news that a member of a group is gone."""
        return self._told(self._groups().broken, key, rank, actor, cause)

    @inline
    def group_superseded(self, name: bytes, epoch: int) -> object:
        """Take the news that a group was formed anew."""
        return self._told(self._groups().superseded, name, epoch)

    @inline
    def group_forget(self, key: bytes) -> object:
        """Forget a group that nobody holds any more."""
        return self._told(self._groups().forget, key)

    @inline
    def group_state(self, key: bytes, rank: int) -> tuple[int, str, list[str]]:
        """Tell what a member does that others wait for; see `zcactor.collectives.groups.Groups.state`."""
        return self._groups().state(key, rank)

    @inline
    def group_facts(self, key: bytes) -> Any:
        """The facts of a group that lives here, as a plain tuple; see `zcactor.collectives.groups.Groups.facts`."""
        facts = self._groups().facts(key)
        return None if facts is None else tuple(facts)

    async def graph_join(
        self, key: bytes, founder: bytes, steps: list[list[Any]], targets: dict[str, list[bytes]],
        peers: list[tuple[bytes, str]], order: list[bytes], spin_us: float,
    ) -> None:  # fmt: skip
        """Make the share of a graph that belongs here; see `zcactor.graphs.graphs.Graphs.join`."""
        await self._graphs().join(key, founder, steps, targets, peers, order, spin_us)

    async def graph_start(self, key: bytes) -> list[tuple[bytes, str]]:
        """Connect this process to all that exchange values with it; see `zcactor.graphs.graphs.Graphs.start`."""
        return await self._graphs().start(key)

    @inline
    def graph_failed(self, key: bytes, number: int, run: int, packed: Packed) -> object:
        """Take the failure of a node of a graph in one run."""
        return self._told(self._graphs().failed, key, number, run, packed)

    @inline
    def graph_cancel(self, key: bytes, run: int) -> object:
        """Stop what runs for one run of a graph."""
        return self._told(self._graphs().cancel, key, run)

    @inline
    def graph_noted(self, key: bytes, number: int, nbytes: int) -> object:
        """Take note of the bytes of a node's value."""
        return self._told(self._graphs().noted, key, number, nbytes)

    @inline
    def graph_broken(self, key: bytes, label: str, cause: str, died: bool) -> object:
        """Take the news that a graph has lost an actor, or messages."""
        return self._told(self._graphs().broken, key, label, cause, died)

    @inline
    def graph_forget(self, key: bytes) -> object:
        """Forget a graph that nobody can run any more."""
        return self._told(self._graphs().forget, key)

    def _told(self, take: Callable[..., object], *args: object) -> object:
        """Take a message that is not answered: an error can only be logged."""
        try:
            take(*args)
        except ProtocolError:
            logger.exception("a message of a group or a graph was refused")
        return NO_ANSWER

    async def stats(self) -> Any:
        """This process's `zcactor.observe.stats.Stats`, as a plain mapping."""
        return self._stats().plain()

    async def create(
        self, index: int, actor_id: ActorId, object_id: int, restarts: int, options: dict[str, Any], interface: bytes,
        recipe: Packed, epoch: int | None = None,
    ) -> None:  # fmt: skip
        """Make an actor, in a worker; see `zcactor.node.worker_main.Worker.create`.

        Args:
            epoch: of the head that orders it; None where the spawner asks for it, at the place that a head has recorded
                for it.

        Raises:
            Deposed: a later head is known.
        """
        if epoch is not None:
            self.known.check(epoch)
        await self.worker.create(index, actor_id, object_id, restarts, options, interface, recipe)

    async def stop(self, index: int, seconds: float, epoch: int) -> None:
        """End an actor after its queued calls, in a worker, at the word of the head of `epoch`; see
        `zcactor.node.worker_main.Worker.stop`.

        Raises:
            Deposed: a later head is known.
        """
        self.known.check(epoch)
        await self.worker.stop(index, seconds)

    async def vacate(self, index: int, patience: float, epoch: int) -> bool:
        """Close an actor that goes on elsewhere, in a worker, at the word of the head of `epoch`; see
        `zcactor.node.worker_main.Worker.vacate`.

        Raises:
            Deposed: a later head is known.
        """
        self.known.check(epoch)
        return await self.worker.vacate(index, patience)  # type: ignore[no-any-return]

    async def readmit(self, index: int) -> None:
        """Have an actor that has not moved take calls of the caller again, in a worker: all that it has sent are back
        when this returns."""
        await self.worker.readmit(index, current_call.get().session)

    async def moved(self, index: int, place: ProcessId, there: int, last: bool, epoch: int) -> None:
        """Tell all peers where an actor lives that has moved, in a worker; see
        `zcactor.node.worker_main.Worker.moved`.

        Raises:
            Deposed: a later head is known.
        """
        self.known.check(epoch)
        await self.worker.moved(index, place, there, last)

    async def discard(self, index: int, epoch: int) -> None:
        """End an actor at once, in a worker, at the word of the head of `epoch`.

        Raises:
            Deposed: a later head is known.
        """
        self.known.check(epoch)
        await self.worker.discard(index)

    async def discard_others(self, indices: list[int], epoch: int) -> None:
        """End at once, in a worker, the actors that are not at `indices`, as `discard` does."""
        self.known.check(epoch)
        await self.worker.discard_others(indices)

    async def leave(self, grace: float) -> None:
        """End the process, in a worker; see `zcactor.node.worker_main.Worker.leave`."""
        await self.worker.leave(grace)

    @inline
    def actor_changed(
        self, actor_id: ActorId, state: str, process: bytes, index: int, cause: str, epoch: int
    ) -> None:  # fmt: skip
        """Take the head's report on an actor of which this process holds a handle: its node was lost, or it lives
        elsewhere now.

        Args:
            actor_id: the id of the actor.
            state: ``"dead"``, ``"restarting"`` or ``"alive"``.
            process: its process, or its last one.
            index: its number in that process.
            cause: why it has left its former place.
            epoch: of the head.

        Raises:
            Deposed: a later head is known.
        """
        self.known.check(epoch)
        remote = self._sessions.remotes.get(actor_id)
        if remote is not None:
            remote.changed(state, (process, index), cause)
        if self.on_actor_changed is not None:
            self.on_actor_changed(actor_id, state, process, index, cause, epoch)

    @inline
    def head_ends(self) -> None:
        """Take the head's word that it ends in order, and that no other one comes."""
        self.on_head_ends()

    @inline
    def heads_are(self, places: list[str]) -> None:
        """Take the head's word where it is, and then where others may lead one day: ``host:port`` of each."""
        self.on_heads(places)

    @inline
    def log(self, stream: str, text: str) -> None:
        """Show the output of an actor, in a driver."""
        if self.print_log is not None:
            self.print_log(stream, text)

    @inline
    def ping(self) -> int:
        """The pid; answered on the loop."""
        return self._pid


@functools.cache
def system_interface() -> Interface:
    """The methods of `SystemActor`."""
    return Interface.of(SystemActor)
