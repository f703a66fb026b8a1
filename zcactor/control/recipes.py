"""The recipes, class and arguments, of actors that may start again, where the head's log does not take them: large
ones, and those with arrays among them.

Two agents hold each of them, the one of the actor's node and one other, and the log names both; so a later head starts
the actor again. When one of them leaves, another is chosen. Where only one agent can hold a recipe, the head is the
second holder, and where there is none, as in an embedded node, the head holds it alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple

from zcactor import ids
from zcactor.control.entries import actor_change, reserved_changes
from zcactor.control.recipe_shelf import HELD_NBYTES, nbytes_of_recipe
from zcactor.errors import ConnectionLost, ObjectLost, ZcactorError
from zcactor.logs import logger
from zcactor.objects.locations import LostPart
from zcactor.process.cluster import NodeService
from zcactor.process.epochs import Deposed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from zcactor.control.actor_record import ActorRecord
    from zcactor.control.head_log import Change
    from zcactor.control.node_table import NodeRecord, NodeTable
    from zcactor.control.recorder import HeadRecorder
    from zcactor.marshal.packed import Packed
    from zcactor.process.context import LocalProcess

__all__ = ["HOLDERS", "Recipes", "is_at_hand", "lack"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

HOLDERS: Final = 2
"""Agents that hold a recipe: a cluster loses one host at a time."""
_NO_RECIPE: Final = "; the log has not its class and arguments, so it is not started again"
_GONE: Final = "; the nodes that held its class and arguments are gone, so it is not started again"


def is_at_hand(actor: ActorRecord, nodes: NodeTable) -> bool:
    """Whether the class and arguments of an actor are to be had: from this head, or from an agent that is there."""
    return actor.recipe is not None or bool(_holders(actor, nodes))


def lack(actor: ActorRecord, nodes: NodeTable) -> str:
    """The reason why the class and arguments of an actor are not to be had, as an addition to the cause of its end;
    empty where they are, and for an actor that is never started again."""
    if not actor.recipe_holders or is_at_hand(actor, nodes):
        return ""
    return _GONE if actor.recipe_key else _NO_RECIPE


def _holders(actor: ActorRecord, nodes: NodeTable) -> list[NodeRecord]:
    """The agents that hold a recipe and are there."""
    found = [nodes.by_id.get(holder.hex()) for holder in actor.recipe_holders]
    return [node for node in found if node is not None and node is not nodes.own]


def _is_steady(actor: ActorRecord) -> bool:
    """Whether an actor lives and nothing about that changes, so that the log has it as alive."""
    return actor.state == "alive" and actor.ending is None and not actor.doomed and actor.moving is None


class Recipes:
    """The head's side of the recipes that agents hold. Used on the loop's thread.

    Args:
        process: the head's process.
        recorder: records the head's decisions.
        nodes: the table of nodes.
    """

    def __init__(self, process: LocalProcess, recorder: HeadRecorder, nodes: NodeTable) -> None:
        self._process = process
        self._recorder = recorder
        self._nodes = nodes
        self._held: dict[ActorRecord, None] = {}
        """The living actors whose recipes are held by processes."""
        self._nbytes: Counter[bytes] = Counter()
        """The bytes that each holder has."""
        self._placing: dict[int, None] = {}
        """The keys of recipes that are on their way to agents."""
        self._decided = asyncio.Event()
        """Set when it is known which agents of an earlier head's cluster are there."""
        self._decided.set()
        self._mending: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        """Held while an actor's recipe gets further holders: this head has one of them in memory meanwhile."""
        self._lacking: dict[ActorRecord, None] = {}
        """The actors whose recipes may lack holders."""

    # ---------------------------------------------------------------- spawns and ends

    async def reserve(self, actor: ActorRecord) -> list[Change]:
        """The changes that an actor has a place, after its recipe has gone to agents where the log does not take it.

        Raises:
            ValueError: see `zcactor.control.entries.reserved_changes`.

        Cancelling ends the wait only. `release` has to follow then, as at the end of each actor.
        """
        changes = reserved_changes(actor, self._recorder.max_recipe, ids.ProcessId(self._process.process))
        if actor.recipe_holders:
            if await self._may_order():
                await asyncio.shield(self._process.tasks.begin(self._place(actor)))
                changes[0] = actor_change(actor, "pending")
            elif actor.state != "dead":
                self._held[actor] = None
        return changes

    async def _may_order(self) -> bool:
        """Whether this head may give orders at present. Does not wait for that."""
        lasts = self._recorder.lasts
        if lasts is None:
            return True
        try:
            async with asyncio.timeout(0):
                return await lasts()
        except TimeoutError:
            return False

    async def _place(self, actor: ActorRecord) -> None:
        recipe, key = actor.recipe, ids.bits(62)
        assert recipe is not None
        nbytes = nbytes_of_recipe(recipe)
        holders = await self._spread(actor, recipe, nbytes, key, [])
        if actor.state == "dead":
            await self._drop(key, holders)
            return
        self._held[actor] = None
        if holders:
            self._note(actor, holders, nbytes, key)

    def release(self, actor: ActorRecord) -> None:
        """Have the recipe of an actor that ends held no longer, once the log has taken its end."""
        if actor in self._held:
            del self._held[actor]
            holders = _holders(actor, self._nodes)
            self._nbytes.subtract(dict.fromkeys(actor.recipe_holders, actor.recipe_nbytes))
            if holders:
                self._process.tasks.start(self._drop(actor.recipe_key, holders))

    # ---------------------------------------------------------------- restarts

    async def get(self, actor: ActorRecord) -> Packed:
        """The recipe of an actor, from a holder if this head has it not.

        Raises:
            ObjectLost: its holders are gone.
            Deposed: another head decides now.
        """
        if actor.recipe is not None:
            return actor.recipe
        for node in _holders(actor, self._nodes):
            try:
                recipe = await self._order(node, NodeService.recipe, actor.recipe_key)
            except Deposed:
                raise
            except ZcactorError as error:
                logger.warning("%s did not give the class and arguments of %s: %s", node.label, actor.label, error)
                continue
            if recipe is not None and not any(isinstance(part.holder, LostPart) for part in recipe.parts):
                return recipe
        raise ObjectLost(_GONE.removeprefix("; "))

    # ---------------------------------------------------------------- holders

    def take_over(self, actors: Iterable[ActorRecord], decided: asyncio.Event) -> None:
        """Go on with the recipes of an earlier head's actors, as the log has them, once `decided` is set: then it is
        known which of their holders are there."""
        self._decided = decided
        for actor in actors:
            if actor.recipe_holders:
                self._held[actor] = None
                self._nbytes.update(dict.fromkeys(actor.recipe_holders, actor.recipe_nbytes))
        self._process.tasks.start(self._resume())

    async def _resume(self) -> None:
        """Have agents drop what the log does not know: a head may be killed before they learn of an actor's end."""
        await self._decided.wait()
        for node in self._agents():
            keys = [actor.recipe_key for actor in self._held if node.process in actor.recipe_holders]
            try:
                await self._order(node, NodeService.keep_recipes, [*keys, *self._placing])
            except Deposed:
                return
            except ZcactorError as error:
                logger.debug("%s was not told which recipes to keep: %s", node.label, error)
        self.look()

    def look(self) -> None:
        """Choose further holders where some are gone, or where a node has joined. Does not wait."""
        self._look_at(self._held)

    def lives(self, actor: ActorRecord) -> None:
        """Choose further holders for an actor that lives, where some went before it did."""
        if actor in self._held and len(_holders(actor, self._nodes)) < HOLDERS:
            self._look_at([actor])

    def _look_at(self, actors: Iterable[ActorRecord]) -> None:
        if self._decided.is_set():
            self._lacking.update(dict.fromkeys(actors))
            if self._mending is None and self._lacking:
                self._mending = self._process.tasks.begin(self._mend())

    async def leave(self, node: NodeRecord) -> None:
        """Choose other holders in the place of a node that is about to leave, and takes nothing new."""
        for actor in [each for each in self._held if node.process in each.recipe_holders]:
            try:
                async with self._one_at_a_time:
                    await self._mend_one(actor)
            except Deposed:
                return

    async def _mend(self) -> None:
        try:
            while self._lacking:
                actor = next(iter(self._lacking))
                del self._lacking[actor]
                async with self._one_at_a_time:
                    await self._mend_one(actor)
        except Deposed as error:
            logger.debug("another head chooses holders: %s", error)
        finally:
            self._mending = None

    async def _mend_one(self, actor: ActorRecord) -> None:
        """Have the recipe of an actor held by as many agents as possible. One that does not live is left for later:
        what the log has of it changes.

        Raises:
            Deposed: another head decides now.
        """
        there = _holders(actor, self._nodes)
        staying = [node for node in there if self._nodes.ledger.is_open(node.id)]
        if actor not in self._held or not _is_steady(actor) or len(staying) >= HOLDERS:
            return
        nbytes, key = actor.recipe_nbytes, actor.recipe_key
        if actor.recipe is not None and not key:  # no agent has had it
            nbytes, key = nbytes_of_recipe(actor.recipe), ids.bits(62)
        named = [node.process for node in staying] == actor.recipe_holders
        if actor.recipe is not None and named and not self._candidates(actor, nbytes, staying):
            return
        try:
            recipe = await self.get(actor)
        except ObjectLost:
            logger.warning("%s: its class and arguments are lost with the nodes that held them", actor.label)
            return
        holders = await self._spread(actor, recipe, nbytes, key, staying)
        if actor not in self._held or not _is_steady(actor):
            await self._drop(key, [node for node in holders if node.process not in actor.recipe_holders])
            return
        actor.recipe = recipe  # this head is a holder as long as only one agent is
        if holders and [node.process for node in holders] != actor.recipe_holders:
            self._note(actor, holders, nbytes, key)
            await self._recorder.noted(actor_change(actor, "alive"))
            await self._drop(key, [node for node in there if node not in holders])

    def _note(self, actor: ActorRecord, holders: Sequence[NodeRecord], nbytes: int, key: int) -> None:
        """Note the agents that hold a recipe. With one of them, or none, this head holds it as well."""
        self._nbytes.subtract(dict.fromkeys(actor.recipe_holders, actor.recipe_nbytes))
        actor.recipe_nbytes, actor.recipe_key = nbytes, key
        actor.recipe_holders = [node.process for node in holders] or [ids.ProcessId(self._process.process)]
        self._nbytes.update(dict.fromkeys(actor.recipe_holders, nbytes))
        if len(holders) >= HOLDERS:
            actor.recipe = None

    async def _spread(
        self, actor: ActorRecord, recipe: Packed, nbytes: int, key: int, there: Sequence[NodeRecord]
    ) -> list[NodeRecord]:
        """Give a recipe to agents, until enough of them hold it. Returns those that do."""
        holders = list(there)
        left = self._candidates(actor, nbytes, there)
        self._placing[key] = None
        try:
            while left and len(holders) < HOLDERS:
                lacking = HOLDERS - len(holders)
                chosen, left = left[:lacking], left[lacking:]
                taken = await asyncio.gather(*(self._give(node, key, recipe) for node in chosen))
                holders += [node for node, took in zip(chosen, taken, strict=True) if took]
        finally:
            del self._placing[key]
        return holders

    async def _give(self, node: NodeRecord, key: int, recipe: Packed) -> bool:
        try:
            took = await self._order(node, NodeService.hold_recipe, key, recipe)
        except ZcactorError as error:
            logger.warning("%s does not hold the class and arguments of an actor: %s", node.label, error)
            return False
        return took and self._nodes.has(node)

    async def _drop(self, key: int, holders: Iterable[NodeRecord]) -> None:
        """Have agents hold a recipe no longer. The log takes what came before first: a later head may need the
        recipe till then."""
        for node in holders:
            try:
                await self._recorder.noted()
                await self._order(node, NodeService.drop_recipe, key)
            except ZcactorError as error:  # the agent has ended, or hears it from a later head
                logger.debug("%s was not told to drop a recipe: %s", node.label, error)

    def _candidates(self, actor: ActorRecord, nbytes: int, there: Sequence[NodeRecord]) -> list[NodeRecord]:
        """The agents that may hold a recipe in addition, the best ones first: the one of the actor's node, then those
        on other machines, with the fewest bytes."""
        machines = {node.facts["machine"] for node in (*there, actor.node) if node is not None}
        found = [
            node for node in self._agents()
            if node not in there and self._nodes.ledger.is_open(node.id)
            and self._nbytes[node.process] + nbytes <= HELD_NBYTES
        ]  # fmt: skip
        return sorted(
            found,
            key=lambda node: (
                node is not actor.node, node.facts["machine"] in machines, self._nbytes[node.process], node.id
            ),
        )  # fmt: skip

    def _agents(self) -> list[NodeRecord]:
        return [node for node in self._nodes.by_id.values() if node is not self._nodes.own]

    async def _order(
        self, node: NodeRecord, method: Callable[[Any, int, *Ts], Coroutine[Any, Any, R]], *args: *Ts
    ) -> R:
        """Order something of a node's agent. Returns its answer.

        Raises:
            Deposed: another head decides now.
            ZcactorError: it was not done.
        """
        recorder = self._recorder
        over = recorder.lasts is not None and not await recorder.lasts()
        if over or recorder.is_deposed:
            raise Deposed(recorder.epoch, recorder.epoch)
        session = self._process.sessions.used.get(node.process)
        if session is None:
            raise ConnectionLost(f"the connection to {node.label} has ended")
        try:
            return await self._process.requests.ask_of(session, method, recorder.epoch, *args)
        except Deposed as error:
            recorder.depose(error.known)
            raise
