"""The way to the head's log: batches, refusals, and the head at each of its decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import zcactor as zc
from tests.control.gated_log import NAME, GatedLog, has
from tests.simulation.clusters import Bench, Keeper, bench
from zcactor.assembly.process import Process
from zcactor.control import recorder as module
from zcactor.control.actor_record import ActorRecord
from zcactor.control.head_log import MAX_CHANGES, MAX_NBYTES, Candidate, Change, Deposed
from zcactor.control.memory_log import MemoryBook, MemoryLog
from zcactor.control.recorder import HeadRecorder
from zcactor.errors import HeadUnavailable
from zcactor.ids import ProcessId, for_spawn
from zcactor.interface import Interface
from zcactor.process.cluster import HeadNews, HeadService, WorkerService

ME = Candidate("h@host:1", "host", 1)


def put(key: str, value: bytes = b"1") -> Change:
    return Change("name", key, value)


def made(log: MemoryLog) -> HeadRecorder:
    return HeadRecorder(asyncio.get_running_loop(), log, ME)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_is_decided_in_one_turn_is_one_batch() -> None:
    log = GatedLog()
    recorder = made(log)
    assert recorder.epoch == 0
    first = [asyncio.ensure_future(recorder.record(put(key))) for key in "abc"]
    recorder.note(put("d"), put("a", b"2"))  # before the others, whose tasks begin after this turn
    await asyncio.gather(*first)
    assert recorder.epoch == 1
    assert [{change.key: change.value for change in batch} for batch in log.taken] == [
        {"a": b"1", "b": b"1", "c": b"1", "d": b"1"}
    ]


@pytest.mark.parametrize("refused", [True, False])
async def test_what_is_done_in_any_case_waits_for_the_log_for_a_while(refused: bool) -> None:
    log = GatedLog()
    log.refuses, log.holds = (lambda _: refused), (lambda _: not refused)
    recorder = made(log)
    await recorder.told(0.01, put("a"))
    late = asyncio.ensure_future(recorder.noted(put("b")))
    await turns()
    assert not late.done() and not log.taken
    log.refuses = lambda _: False
    log.gate.set()
    await late
    assert [change.key for batch in log.taken for change in batch] == ["a", "b"]
    recorder.depose(9)
    with pytest.raises(Deposed):
        await recorder.told(0.01, put("c"))


async def test_what_comes_while_the_log_is_at_work_is_the_next_batch() -> None:
    log = GatedLog()
    log.holds = lambda _: True
    recorder = made(log)
    early = asyncio.ensure_future(recorder.record(put("a")))
    await turns()
    late = [asyncio.ensure_future(recorder.record(put(key))) for key in "bcb"]
    await turns()
    assert len(log.begun) == 1 and not early.done() and not any(each.done() for each in late)
    log.gate.set()
    await asyncio.gather(early, *late)
    assert [[change.key for change in batch] for batch in log.taken] == [["a"], ["b", "c"]]


async def test_a_batch_has_as_much_as_a_log_takes_and_no_decision_is_divided() -> None:
    log = GatedLog()
    recorder = made(log)
    pairs = [(put(f"{number}x"), put(f"{number}y")) for number in range(MAX_CHANGES)]
    await asyncio.gather(*(recorder.record(*pair) for pair in pairs))
    assert [len(batch) for batch in log.taken] == [MAX_CHANGES, MAX_CHANGES]
    large = [put(key, bytes(MAX_NBYTES // 2)) for key in "abc"]
    await asyncio.gather(*(recorder.record(change) for change in large))
    assert [len(batch) for batch in log.taken[2:]] == [1, 1, 1]
    with pytest.raises(ValueError, match="a batch has at most"):
        await recorder.record(put("a", bytes(MAX_NBYTES)))


async def test_what_is_asked_for_is_refused_and_what_has_happened_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(module, "_LAST_PAUSE", 0.0)
    log = GatedLog()
    log.refuses = lambda _: True
    recorder = made(log)
    recorder.note(put("a", b"1"))
    noted = asyncio.ensure_future(recorder.noted(put("b")))
    for key in "cd":
        with pytest.raises(HeadUnavailable, match=f"its log {NAME} has not answered for") as caught:
            await recorder.record(put(key))
        assert caught.value.log == NAME and caught.value.since >= 0
    with pytest.raises(HeadUnavailable):
        await recorder.settled()
    assert not noted.done() and log._book.state == {}
    recorder.note(put("a", b"2"))
    log.refuses = lambda _: False
    await noted
    await recorder.settled()
    assert log._book.state == {"name": {"a": b"2", "b": b"1"}}
    assert [record.message for record in caplog.records] == [
        f"the head cannot decide now: {NAME}: no answer", "the head's log answers again",
    ]  # fmt: skip


async def test_the_order_of_decisions_is_the_logs_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is freed by what has happened, and given by what is asked for: also where the first was refused once."""
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.0)
    log = GatedLog()
    recorder = made(log)
    await recorder.record(put("a", b"old"))
    log.holds, log.refuses = lambda _: True, lambda _: len(log.begun) == 2
    recorder.note(Change("name", "a", None))
    await turns()
    given = asyncio.ensure_future(recorder.record(put("a", b"new")))
    await turns()
    log.gate.set()
    with pytest.raises(HeadUnavailable):
        await given
    await recorder.record(put("a", b"newer"))
    assert log._book.state == {"name": {"a": b"newer"}}


async def test_a_barrier_waits_for_what_was_before() -> None:
    log = GatedLog()
    recorder = made(log)
    await recorder.noted()
    await recorder.settled()
    assert not log.begun, "there was nothing to wait for"
    log.holds = lambda _: True
    recorder.note(put("a"))
    barriers = [asyncio.ensure_future(each) for each in (recorder.noted(), recorder.settled())]
    await turns()
    assert not any(barrier.done() for barrier in barriers)
    log.gate.set()
    await asyncio.gather(*barriers)
    assert log.entries.names == {"a": b"1"}


async def test_a_wait_that_is_cancelled_takes_nothing_back() -> None:
    log = GatedLog()
    log.holds = lambda _: True
    recorder = made(log)
    asked = asyncio.ensure_future(recorder.record(put("a")))
    await turns()
    asked.cancel()
    await asyncio.wait([asked])
    log.gate.set()
    await recorder.noted()
    assert log.entries.names == {"a": b"1"}


async def test_a_head_that_is_deposed_decides_no_more() -> None:
    book = MemoryBook()
    old, new = made(MemoryLog(book)), MemoryLog(book)
    await old.record(put("a"))
    assert old._term is not None
    await MemoryLog(book).resign(old._term)
    await new.campaign(ME)
    for _ in range(2):
        with pytest.raises(Deposed, match="epoch 1 is over: the log is at epoch 2"):
            await old.record(put("b"))
        with pytest.raises(Deposed):
            await old.noted(put("b"))
        old.note(put("b"))
    assert book.state == {"name": {"a": b"1"}}


async def test_a_head_that_does_not_lead_yet_waits() -> None:
    book = MemoryBook()
    first, second = made(MemoryLog(book)), made(MemoryLog(book))
    await asyncio.gather(first.lead(), first.lead())
    asked = asyncio.ensure_future(second.record(put("a")))
    await turns()
    assert not asked.done() and second.epoch == 0
    await first.aclose()
    await asked
    assert second.epoch == 2
    await second.lead()
    await second.aclose()


async def test_a_deposed_head_that_ends_refuses_what_it_has_not_decided() -> None:
    log = GatedLog()
    log.holds = lambda _: True
    recorder = made(log)
    waits = [asyncio.ensure_future(each) for each in (recorder.record(put("a")), recorder.noted(put("b")))]
    await turns()
    recorder.depose(2)
    await recorder.aclose()
    for wait in waits:
        with pytest.raises(Deposed, match="at epoch 2"):
            await wait


async def test_an_error_of_the_log_itself_ends_every_wait() -> None:
    log = GatedLog()

    def fail(_: object) -> bool:
        raise ZeroDivisionError

    log.refuses = fail
    recorder = made(log)
    waits = [asyncio.ensure_future(each) for each in (recorder.record(put("a")), recorder.noted(put("b")))]
    await turns(2)
    writing = recorder._writing
    for wait in waits:
        with pytest.raises(ZeroDivisionError):
            await wait
    assert writing is None or isinstance(writing.exception(), ZeroDivisionError)


# ---------------------------------------------------------------- the head, at each of its decisions


DOORS: list[int] = []
"""An item for each shop that was constructed: simulated processes have one memory."""


@zc.actor
class Shop(Keeper):
    """An actor whose process can be ended."""

    def __init__(self) -> None:
        super().__init__()
        DOORS.append(1)


def key_of(handle: Any) -> str:
    """The key of an actor's entry."""
    return handle._remote.actor_id.hex()  # type: ignore[no-any-return]


async def until(true: Callable[[], Any]) -> None:
    """Wait on the virtual clock."""
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not happen")


async def workers() -> int:
    return sum(node.workers for node in await zc.nodes())


@contextmanager
def played(nodes: int = 1) -> Iterator[tuple[Bench, GatedLog]]:
    """A cluster, with the log of its head."""
    log = GatedLog()
    with bench(nodes, log) as made:
        yield made, log
        assert not made.world.problems


def test_a_spawn_is_answered_when_both_of_its_batches_are_recorded() -> None:
    DOORS.clear()
    with played() as (made, log):

        async def program(_: Process) -> None:
            for point in (has("actor", b"pending"), has("actor", b"alive")):
                log.gate.clear()
                log.holds = point
                spawning = asyncio.ensure_future(Shop.options(name="till", max_restarts=1).spawn())
                await until(log.held)
                await asyncio.sleep(1)
                assert await workers() == 1, "its process starts meanwhile"
                assert not spawning.done()
                assert len(DOORS) == (b"alive" in log.begun[-1][0].value), "it is constructed after the first"  # type: ignore[operator]
                found = asyncio.ensure_future(zc.get_actor("till"))
                await asyncio.sleep(1)
                assert not found.done()
                log.gate.set()
                shop: Any = await spawning
                assert await found is not None and await shop.keep("abc") == 3
                entry = log.entries.actors[key_of(shop)]
                assert (entry.state, entry.worker, entry.restarts) == ("alive", shop._remote.location[0], 0)
                assert log.entries.recipes.keys() == {key_of(shop)}
                assert list(log.entries.names.values()) == [shop._remote.actor_id]
                await zc.kill(shop)
                DOORS.clear()
                assert not log.entries.actors and not log.entries.names and not log.entries.recipes

        made.run(program)


def test_a_spawn_that_the_log_refuses_leaves_nothing() -> None:
    with played() as (made, log):

        async def program(process: Process) -> None:
            free = await zc.available_resources()
            pool: Any = made.cluster.hosts["h0"].workers
            for point in (has("actor", b"pending"), has("actor", b"alive")):
                log.refuses = point
                with pytest.raises(zc.HeadUnavailable, match=f"its log {NAME} has not .* nothing was done"):
                    await Shop.options(name="till", num_cpus=1).spawn()
                log.refuses = lambda _: False
                await until(lambda: not log.entries.actors and not log.entries.names and not pool.by_process)
                assert await zc.available_resources() == free
                with pytest.raises(zc.NoSuchActor):
                    await zc.get_actor("till")
            shop: Any = await Shop.options(name="till").spawn()
            assert await shop.keep("abc") == 3
            await zc.stop(shop)

        made.run(program)


@pytest.mark.parametrize("state", [b"pending", b"alive"])
def test_a_spawn_to_which_the_log_does_not_answer_leaves_nothing(state: bytes) -> None:
    """The log may take it later, as one that is stopped for a while does, and takes its end after it."""
    with played() as (made, log):

        async def program(process: Process) -> None:
            free = await zc.available_resources()
            pool: Any = made.cluster.hosts["h0"].workers
            log.holds = has("actor", state)
            with pytest.raises(zc.HeadUnavailable, match="has not answered for 10.0 s; nothing was done"):
                await Shop.options(name="till", num_cpus=1, max_restarts=1).spawn()
            assert log.held()
            log.gate.set()
            await until(lambda: log.taken[-1] == log.begun[-1] and not log.entries.actors)
            assert not log.entries.names and not log.entries.recipes
            await until(lambda: not pool.by_process)
            assert await zc.available_resources() == free
            shop: Any = await Shop.options(name="till").spawn()
            assert await shop.keep("abc") == 3
            await zc.stop(shop)

        made.run(program)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_an_end_to_which_the_log_does_not_answer_comes_later(how: str) -> None:
    with played() as (made, log):

        async def program(_: Process) -> None:
            pool: Any = made.cluster.hosts["h0"].workers
            shop: Any = await Shop.options(name="till", max_restarts=1).spawn()
            log.holds = lambda _: True
            with pytest.raises(zc.HeadUnavailable, match="has not answered for 10.0 s; nothing was done so far"):
                await getattr(zc, how)(shop)
            assert log.held() and pool.by_process
            assert await shop.keep("abc") == 3, "it lives on"
            log.holds = lambda _: False
            log.gate.set()
            await until(lambda: not pool.by_process)
            await until(lambda: not log.entries.actors)
            assert not log.entries.names and not log.entries.recipes
            with pytest.raises(zc.ActorDied):
                await shop.keep("abc")

        made.run(program)


async def being_restarted(made: Bench, log: GatedLog) -> Any:
    """Spawn an actor and end its process; return it when the log has that it is being restarted."""
    shop: Any = await Shop.options(max_restarts=1).spawn()
    DOORS.clear()
    (worker,) = made.cluster.hosts["h0"].workers.by_process.values()  # type: ignore[union-attr]
    worker.kill("the test ends it")
    await until(lambda: next(iter(log.entries.actors.values())).state == "restarting")
    return shop


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_nothing_is_recorded_of_a_life_after_its_end(how: str) -> None:
    """A head that took over would start the actor again."""
    with played() as (made, log):

        async def program(_: Process) -> None:
            shop = await being_restarted(made, log)
            log.holds = has("actor", removed=True) if how == "kill" else has("actor", b"stopping")
            ending = asyncio.ensure_future(getattr(zc, how)(shop))
            await until(log.held)
            at = len(log.begun)
            await until(lambda: DOORS)
            await asyncio.sleep(1)
            assert not ending.done()
            log.gate.set()
            await ending
            await until(lambda: not log.entries.actors)
            assert [change.value for batch in log.begun[at:] for change in batch if change.value is not None] == []

        made.run(program)


def test_an_actor_lives_on_whose_end_the_log_refuses_while_it_is_restarted() -> None:
    with played() as (made, log):

        async def program(_: Process) -> None:
            shop = await being_restarted(made, log)
            log.holds = log.refuses = has("actor", removed=True)
            ending = asyncio.ensure_future(zc.kill(shop))
            await until(log.held)
            await until(lambda: DOORS)
            await asyncio.sleep(1)
            log.gate.set()
            with pytest.raises(zc.HeadUnavailable):
                await ending
            assert await shop.keep("abc") == 3
            log.refuses = lambda _: False
            await until(lambda: [entry.state for entry in log.entries.actors.values()] == ["alive"])

        made.run(program)


def test_an_actor_whose_process_ends_before_its_life_is_recorded() -> None:
    """Its spawn was not answered, so that it is not restarted."""
    with played() as (made, log):

        async def program(_: Process) -> None:
            log.holds = has("actor", b"alive")
            spawning = asyncio.ensure_future(Shop.options(max_restarts=-1).spawn())
            await until(log.held)
            head: Any = made.cluster.hosts["h0"].node
            (record,) = head._actors.all()
            record.worker.kill("the test ends it")
            await until(lambda: not head._pool.by_process)
            assert not spawning.done()
            log.gate.set()
            with pytest.raises(zc.ActorDied, match="the test ends it"):
                await spawning
            await until(lambda: not log.entries.actors)
            assert not log.entries.recipes and await workers() == 0

        made.run(program)


@pytest.mark.parametrize("failure", ["its constructor raised ValueError", ""])
def test_a_failed_spawn_is_taken_note_of_when_its_end_is_recorded(failure: str) -> None:
    """Its spawner reports it to one head only."""
    with played() as (made, log):

        async def program(process: Process) -> None:
            shop: Any = await Shop.spawn()
            head: Any = made.cluster.hosts["h0"].node
            record = head._actors.get(shop._remote.actor_id)
            if not failure:
                record.worker.kill("the test ends it")
            log.holds = lambda changes: any(change.value is None for change in changes)
            for _ in range(2):  # a repeated report waits, too
                told = asyncio.ensure_future(process.head.ask(HeadService.constructed, record.actor_id, failure))
                await until(log.held)
                await asyncio.sleep(3)
                assert record.state == "dead" and not told.done()
            log.gate.set()
            await told
            assert not log.entries.actors

        made.run(program)


def test_a_refused_spawn_may_be_asked_for_again_by_the_same_request() -> None:
    with played() as (made, log):

        async def program(process: Process) -> None:
            ids = for_spawn()
            asked: Any = ({"namespace": "n", "name": "till"}, "Shop", Interface.of(Shop).wire(), None, *ids, b"")
            log.refuses = has("actor")
            with pytest.raises(zc.HeadUnavailable):
                await process.head.ask(HeadService.reserve, *asked)
            log.refuses = lambda _: False
            with pytest.raises(zc.ActorDied, match="it could not be placed"):
                await process.head.ask(HeadService.reserve, *asked)

        made.run(program)


def test_a_restart_waits_until_it_is_counted() -> None:
    with played() as (made, log):

        async def program(_: Process) -> None:
            shop: Any = await Shop.options(max_restarts=2).spawn()
            head: Any = made.cluster.hosts["h0"].node
            record = head._actors.get(shop._remote.actor_id)
            for turn, refused in ((1, False), (2, True)):
                log.gate.clear()
                if refused:
                    log.refuses = lambda _: not log.gate.is_set()
                else:
                    log.holds = has("actor", b"restarting")
                record.worker.kill("the test ends it")
                await until(log.held)
                await asyncio.sleep(3)
                assert (record.state, await workers()) == ("restarting", 0)
                assert log.entries.actors[key_of(shop)].restarts == turn - 1
                calling = shop.keep("abc")
                log.gate.set()
                assert await calling == 3
                entry = log.entries.actors[key_of(shop)]
                assert (entry.state, entry.restarts, entry.worker) == ("alive", turn, record.worker.process)
            await zc.kill(shop)

        made.run(program)


def test_a_death_is_told_when_it_is_recorded() -> None:
    with played() as (made, log):

        async def program(_: Process) -> None:
            shop: Any = await Shop.options(name="till").spawn()
            head: Any = made.cluster.hosts["h0"].node
            log.refuses = lambda _: not log.gate.is_set()
            head._actors.get(shop._remote.actor_id).worker.kill("the test ends it")
            dying = asyncio.ensure_future(shop.size())
            await until(lambda: log.begun[-1][0].value is None)
            with pytest.raises(zc.HeadUnavailable):
                await zc.get_actor("till")
            with pytest.raises(zc.HeadUnavailable):
                await Shop.options(name="till").spawn()
            assert not dying.done() and log.entries.names
            log.gate.set()
            with pytest.raises(zc.ActorDied, match="the test ends it"):
                await dying
            assert not log.entries.names and not log.entries.actors
            with pytest.raises(zc.NoSuchActor):
                await zc.get_actor("till")

        made.run(program)


@pytest.mark.parametrize("end", [zc.kill, zc.stop])
def test_an_end_that_the_log_refuses_does_not_happen(end: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    with played() as (made, log):

        async def program(_: Process) -> None:
            shop: Any = await Shop.options(max_restarts=1).spawn()
            log.refuses = lambda _: True
            with pytest.raises(zc.HeadUnavailable):
                await end(shop)
            log.refuses = lambda _: False
            assert await shop.keep("abc") == 3, "it lives on"
            log.holds = lambda _: True
            ending = asyncio.ensure_future(end(shop))
            await until(log.held)
            assert await shop.size() == 3 and not ending.done()
            log.gate.set()
            await ending
            assert not log.entries.actors and await workers() == 0

        made.run(program)


@pytest.mark.parametrize("end", [zc.kill, zc.stop])
def test_an_actor_that_dies_while_its_end_is_recorded_is_not_restarted(
    end: Callable[[Any], Coroutine[Any, Any, None]],
) -> None:
    with played() as (made, log):

        async def program(_: Process) -> None:
            shop: Any = await Shop.options(max_restarts=1).spawn()
            head: Any = made.cluster.hosts["h0"].node
            log.holds = lambda _: True
            ending = asyncio.ensure_future(end(shop))
            await until(log.held)
            head._actors.get(shop._remote.actor_id).worker.kill("the test ends it")
            await until(lambda: not head._pool.by_process)
            log.gate.set()
            await ending
            with pytest.raises(zc.ActorDied, match="the test ends it while it was being stopped"):
                await shop.size()
            assert not log.entries.actors and await workers() == 0

        made.run(program)


def test_a_stop_by_the_head_itself_waits_for_the_log() -> None:
    with played() as (made, log):

        async def program(_: Process) -> None:
            shop: Any = await Shop.spawn()
            log.refuses = lambda _: not log.gate.is_set()
            del shop
            await until(lambda: log.begun[-1][0].value is not None and b"stopping" in log.begun[-1][0].value)
            await asyncio.sleep(3)
            assert await workers() == 1
            log.gate.set()
            await until(lambda: not log.entries.actors)
            await asyncio.sleep(1)
            assert await workers() == 0

        made.run(program)


def test_nodes_join_and_are_lost_by_the_log() -> None:
    with played() as (made, log):
        head: Any = made.cluster.hosts["h0"].node
        log.holds = has("member")
        made.cluster.start_agent("h1")
        made.wait(3)
        assert log.held() and len(head._nodes.by_id) == 1 and made.cluster.joined == 1
        log.gate.set()
        made.wait(1)
        assert len(head._nodes.by_id) == 2 and made.cluster.joined == 2
        (entry,) = log.entries.members.values()
        assert (entry.facts["host"], entry.resources) == ("h1", {"CPU": 8.0})
        agent = made.cluster.hosts["h1"].agent
        assert agent is not None
        made.cluster.kill(agent, "killed")
        made.wait(12)
        assert not log.entries.members and len(head._nodes.by_id) == 1
        log.refuses = has("member")
        made.cluster.start_agent("h1")
        made.wait(3)
        assert made.cluster.joined == 2 and len(head._nodes.by_id) == 1, "it was refused"
        assert made.cluster.hosts["h1"].agent is None


def test_a_node_that_goes_while_it_joins_is_forgotten() -> None:
    with played() as (made, log):
        head: Any = made.cluster.hosts["h0"].node
        log.holds = has("member")
        made.cluster.start_agent("h1")
        made.wait(3)
        agent = made.cluster.hosts["h1"].agent
        assert log.held() and agent is not None
        made.cluster.kill(agent, "killed")
        made.wait(3)
        log.gate.set()
        made.wait(1)
        assert not log.entries.members and len(head._nodes.by_id) == 1


def test_programs_join_and_leave_by_the_log() -> None:
    with played() as (made, log):

        async def program(process: Process) -> None:
            (entry,) = log.entries.drivers.items()
            assert entry[0] == process.process.hex() and entry[1].address == process.address
            shop: Any = await Shop.options(name="till", lifetime="detached").spawn()
            assert await shop.keep("abc") == 3

        made.run(program)
        made.cluster.kill(made.driver, "killed")
        made.wait(3)
        assert not log.entries.drivers and [entry.state for entry in log.entries.actors.values()] == ["alive"]
        log.holds = has("driver")
        late = made.cluster.start_driver("late", "h0", program)
        made.wait(1)
        assert log.held()
        made.cluster.kill(late, "killed")
        log.gate.set()
        made.wait(1)
        assert not log.entries.drivers


def test_the_log_says_what_the_head_knows_and_that_the_cluster_has_ended() -> None:
    """A later head makes its table of actors from the entries."""
    with played(2) as (made, log):

        async def program(_: Process) -> None:
            nodes = [node.node_id for node in await zc.nodes()]
            kept: list[Any] = [
                await Shop.options(
                    name=f"s{number}", node=nodes[number % 2], max_restarts=number % 3, num_cpus=0.5
                ).spawn()
                for number in range(6)
            ]
            await zc.kill(kept.pop())
            head: Any = made.cluster.hosts["h0"].node
            entries = log.entries
            living = [actor for actor in head._actors.all() if actor.state != "dead"]
            assert len(living) == len(entries.actors) == len(entries.names) == 5
            for actor in living:
                entry = entries.actors[actor.actor_id.hex()]
                again = ActorRecord(
                    entry.options, entry.class_name, entry.interface, ProcessId(entry.owner), entry.object_id,
                    actor.actor_id,
                )  # fmt: skip
                for field in (
                    "spec",
                    "class_name",
                    "interface",
                    "owner",
                    "object_id",
                    "name",
                    "namespace",
                    "request",
                ):
                    assert getattr(again, field) == getattr(actor, field)
                assert (entry.node, entry.worker, entry.index) == (actor.node_id, *actor.location)
                assert (entry.state, entry.number, entry.request) == ("alive", actor.number, actor.asked)
                recipe = entries.recipes.get(actor.actor_id.hex())
                assert recipe == (actor.recipe.payload if actor.spec.max_restarts else None)
            assert not entries.closed

        made.run(program)
        head: Any = made.cluster.hosts["h0"].node
        log.holds = has("cluster")
        head.process.tasks.start(head.shutdown(0.0))
        made.wait(0.5)
        assert log.held() and sum(node["workers"] for node in head._nodes.told()) == 5
        log.gate.set()
        made.wait(1)
        assert log.entries.closed


def test_a_kill_whose_caller_goes_away_is_carried_out() -> None:
    with played() as (made, log):

        async def program(process: Process) -> None:
            shop: Any = await Shop.options(max_restarts=1).spawn()
            log.holds = lambda _: True
            killing = asyncio.ensure_future(zc.kill(shop))
            await until(log.held)
            killing.cancel()
            await asyncio.sleep(0.5)
            assert await shop.keep("abc") == 3
            log.gate.set()
            await asyncio.sleep(1)
            with pytest.raises(zc.ActorDied, match=r"killed by zc\.kill"):
                await shop.size()
            assert await workers() == 0

        made.run(program)


def test_a_shared_process_ends_the_actors_that_a_new_head_does_not_know() -> None:
    with played() as (made, _):

        async def program(process: Process) -> None:
            shops: list[Any] = [await Shop.options(process="shared").spawn() for _ in range(9)]
            places = [shop._remote.location for shop in shops]
            shared = next(place[0] for place in places if sum(other[0] == place[0] for other in places) > 1)
            known, *others = [shop for shop in shops if shop._remote.location[0] == shared]
            index = known._remote.location[1]
            session = await process.connections.connect(shared)
            await process.requests.ask(session, WorkerService.discard_others, [index], 1)
            (hosts,) = [
                loop.process.hosts for loop in made.world.loops.values()
                if loop.process is not None and loop.process.process == shared
            ]  # fmt: skip
            assert [host.index for host in hosts.actors()] == [index] and others
            assert await known.keep("abc") == 3
            for shop in shops:
                await zc.kill(shop)

        made.run(program)


def test_a_worker_refuses_an_earlier_head_which_decides_no_more() -> None:
    """As if another head had led for a while: the worker has carried out its order."""
    with played() as (made, _):

        async def program(process: Process) -> None:
            shop: Any = await Shop.options(max_restarts=1).spawn()
            session = await process.connections.connect(shop._remote.location[0])
            ask: Any = process.requests.ask
            later = (shop._remote.actor_id, "alive", *shop._remote.location, "", 9)
            await process.requests.ask(session, HeadNews.actor_changed, *later)
            for method, args in (
                (WorkerService.stop, (0, 5.0, 8)), (WorkerService.discard, (0, 8)),
                (WorkerService.discard_others, ([], 8)), (HeadNews.actor_changed, (*later[:-1], 8)),
                (WorkerService.create, (1, b"a" * 16, 1, 0, {}, b"", None, 8)),
            ):  # fmt: skip
                with pytest.raises(zc.RemoteError) as caught:
                    await ask(session, method, *args)
                assert isinstance(caught.value.original, Deposed)
                assert (caught.value.original.epoch, caught.value.original.known) == (8, 9)
            head: Any = made.cluster.hosts["h0"].node
            assert head.recorder.epoch == 1 and not head.recorder.is_deposed
            await zc.stop(shop)
            assert head.recorder.is_deposed
            assert await shop.keep("abc") == 3, "it was not stopped"
            for ask in (lambda: zc.kill(shop), lambda: zc.get_actor("till"), Shop.spawn):
                with pytest.raises(zc.ConnectionLost, match="epoch 1 is over: the log is at epoch 9"):
                    await ask()
            assert await shop.size() == 3

        made.run(program)
