"""The head's tables against reality: each difference that a test makes is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from simulation.supervision import Supervision
from tests.simulation.clusters import Bench, Keeper, bench
from zcactor.assembly.process import Process


def watched(made: Bench) -> tuple[Supervision, Any]:
    host = made.cluster.head_host
    assert host is not None
    supervision = Supervision(made.cluster, made.record)
    supervision.attach(host.node)
    return supervision, host.node


def told(made: Bench) -> list[str]:
    return [f"{each.invariant}: {each.text}" for each in made.record.broken]


async def two_keepers(_: Process) -> list[Any]:
    return [await Keeper.options(name=name, max_restarts=2, node="spread").spawn() for name in ("one", "other")]


def test_a_cluster_at_rest_agrees_with_its_head() -> None:
    with bench(2) as made:
        supervision, _ = watched(made)
        kept = made.run(two_keepers)
        supervision.look()
        supervision.at_rest()
        assert not told(made)
        assert len(supervision._restarts) == 2
        del kept


def _dead_without_cause(actor: Any) -> None:
    actor.state, actor.cause = "dead", ""


def _not_restarted(actor: Any) -> None:
    actor.state, actor.cause = "dead", "its process exited with status 3"


def _between(actor: Any) -> None:
    actor.state = "restarting"


def _elsewhere(actor: Any) -> None:
    actor.location = (b"another process ", 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_dead_without_cause, "I10: Keeper(one) has died without a cause"),
        (_not_restarted, "I10: Keeper(one) may restart (max_restarts=2, 0 so far) and has not: its process exited"),
        (_between, "I10: Keeper(one) is still restarting"),
        (_elsewhere, "I10: Keeper(one) does not live where the head has it"),
    ],
)
def test_an_actor_whose_state_is_wrong(change: Callable[[Any], None], said: str) -> None:
    with bench(2) as made:
        supervision, head = watched(made)
        kept = made.run(two_keepers)
        supervision.look()
        change(next(actor for actor in head._actors.all() if actor.name == "one"))
        supervision.at_rest()
        assert any(each.startswith(said) for each in told(made)), told(made)
        del kept


def test_an_actor_and_a_node_that_are_unknown() -> None:
    with bench(2) as made:
        supervision, head = watched(made)
        kept = made.run(two_keepers)
        head._actors._by_id.pop(next(iter(head._actors._by_id)))
        head._nodes.by_id.popitem()
        supervision.at_rest()
        assert any("is unknown to the head" in each for each in told(made))
        assert "I10: the head does not know 1 of the nodes, and knows 0 that are gone" in told(made)
        del kept


def test_a_name_that_two_actors_have() -> None:
    with bench(1) as made:
        supervision, head = watched(made)
        kept = made.run(two_keepers)
        first, second = head._actors.all()
        second.name = first.name
        supervision.look()
        assert [each[:2] for each in told(made)] == ["I4", "I4"]
        del kept


def test_a_ledger_is_checked_after_each_step() -> None:
    with bench(1) as made:
        _, head = watched(made)
        kept = made.run(two_keepers)
        (amounts,) = head._ledger._nodes.values()
        amounts.actors += 1
        head._ledger._serve()
        assert told(made) == ["I9: 3 actors have a node's resources, 2 are on it"]
        del kept


def test_a_request_behind_another_of_its_kind_may_wait() -> None:
    async def program(_: Process) -> Any:
        keeper: Any = await Keeper.options(num_cpus=6).spawn()
        waiting = [asyncio.ensure_future(Keeper.options(num_cpus=count).spawn()) for count in (4, 2)]
        await asyncio.sleep(1)
        return keeper, waiting

    with bench(1) as made:
        supervision, head = watched(made)
        kept = made.run(program)
        assert head._ledger.waiting == 2
        supervision.look()
        assert not told(made), "the small request may not overtake the large one"
        head._ledger._waiting.pop(head._ledger.first.kind)
        supervision.look()
        assert told(made) == ["I9: a request for {'CPU': 2.0} waits, and there is room for it"]
        del kept


def test_an_actor_in_another_process_than_the_heads() -> None:
    with bench(2) as made:
        supervision, head = watched(made)
        kept = made.run(two_keepers)
        one, other = (actor for actor in head._actors.all())
        loops = {loop.process.process: loop for loop in made.world.loops.values() if loop.process is not None}
        supervision.constructed(loops[one.worker.process], one.actor_id)
        assert not told(made)
        made.wait(1)
        supervision.constructed(loops[other.worker.process], one.actor_id)
        assert [each[:2] for each in told(made)] == ["I4"]
        del kept


def test_the_frames_of_a_head_that_was_killed_are_not_judged() -> None:
    with bench(2) as made:
        supervision, head = watched(made)
        kept = made.run(two_keepers)
        head._ledger._nodes.popitem()[1].free["CPU"] = 0.5
        supervision.head_lost(head)
        head._ledger._serve()  # as in the `finally` of a frame that is destroyed
        assert not told(made)
        del kept
