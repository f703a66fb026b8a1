"""`BulkPair`: two of them on a fake fabric, with queues of messages between them, and failures at any time.

Nothing moves by itself: the tests say when the fabric works, when completions are taken, and when a message arrives.
The messages of one direction stay in order, as on a socket; a message may come again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from tests.conformance.connection import turns
from tests.transport.verbs.parts import EAGER, SLOT, Memory, engine_on
from zcactor.errors import ConnectionLost, ObjectLost
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.verbs.device.engine import Engine
from zcactor.transport.verbs.device.sizing import MAX_READS
from zcactor.transport.verbs.driver.base import MAX_U24, Read
from zcactor.transport.verbs.driver.codes import CompletionStatus, QpState
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.driver.fake_queues import FakeQueuePair
from zcactor.transport.verbs.peer import pulling
from zcactor.transport.verbs.peer.bootstrap import Message, Rebuild, Rebuilt, Resume, agree
from zcactor.transport.verbs.peer.bulk import BulkPair
from zcactor.transport.verbs.peer.queue_pairs import QueuePairs

NBYTES = 1 << 16
ARENA = 1 << 16
PIECE = 1024


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pause, so that no test goes by the clock."""
    monkeypatch.setattr(pulling, "MAX_PAUSE", 0.0)


class Half:
    """One end: its bulk pair, its arena, memory to pull to, and the messages that it has sent."""

    def __init__(self, engine: Engine, pairs: QueuePairs, *, leads: bool) -> None:
        self.engine = engine
        self.pairs = pairs
        self.inbox: deque[Message] = deque()
        self.seen: list[Message] = []
        self.told: list[Message] = []
        self.broken: list[Exception] = []
        self.drained = 0
        self.peer: Half
        self.posts = 0
        engine.arena.memory[:] = self.data = random.Random(int(leads)).randbytes(ARENA)  # type: ignore[attr-defined]
        self.region = engine.device.register(engine.arena.address, ARENA, remote_read=True)
        self.target = Memory(NBYTES)
        self.local = engine.device.register(self.target.address, NBYTES, remote_read=False)
        post = pairs.bulk.post_reads
        self.bulk = BulkPair(pairs, leads=leads, tell=self._tell, broken=self.broken.append, drained=self._drained)

        def checked(reads: Sequence[Read]) -> None:
            assert self.bulk.generation == self.peer.bulk.generation, "the peer is not connected"
            self.posts += len(reads)
            post(reads)

        pairs.bulk.post_reads = checked  # type: ignore[method-assign]

    @property
    def qp(self) -> FakeQueuePair:
        """The bulk queue pair."""
        assert isinstance(self.pairs.bulk, FakeQueuePair)
        return self.pairs.bulk

    def _tell(self, message: Message) -> None:
        self.told.append(message)
        self.peer.inbox.append(message)

    def _drained(self) -> None:
        assert self.bulk.puller.drained and not self.qp.work
        self.drained += 1

    def take(self, message: Message) -> None:
        """Take a message that has arrived."""
        assert isinstance(message, Rebuild | Rebuilt | Resume)
        self.bulk.take(message)

    def deliver(self) -> bool:
        """Take the next message, if there is one."""
        if not self.inbox:
            return False
        self.seen.append(self.inbox.popleft())
        self.take(self.seen[-1])
        return True

    def poll(self, limit: int = 1 << 10) -> int:
        """Hand on completions."""
        found = self.engine.cq.poll(limit)
        for completion in found:
            assert completion.qp_num == self.qp.qp_num
            self.bulk.completed(completion)
        return len(found)

    def start(self, offset: int, nbytes: int, *, rkey: int = 0) -> asyncio.Task[None]:
        """Pull bytes of the peer's arena to the same offset here."""
        named = RemoteRegion(7, offset, nbytes, 0, rkey or self.peer.region.rkey)
        address = self.target.address + offset
        return asyncio.ensure_future(self.bulk.puller.pull(named, address, ((nbytes, self.local.lkey),), None))

    def arrived(self, offset: int, nbytes: int) -> bool:
        """Whether exactly these bytes have arrived."""
        return self.target.bytes[offset : offset + nbytes] == self.peer.data[offset : offset + nbytes]

    def unused(self) -> bool:
        """Whether no READ is under way, and no pull waits."""
        puller: Any = self.bulk.puller
        return bool(
            puller.drained and not puller._ready and not puller._under_way and len(puller._free_seals) == MAX_READS
        )


class Both:
    """Two ends, the left one of which leads."""

    def __init__(self, fabric: FakeFabric, left: Half, right: Half) -> None:
        self.fabric = fabric
        self.left, self.right = self.halves = left, right
        left.peer, right.peer = right, left
        for half in self.halves:
            half.bulk.puller.up = True

    def check(self) -> None:
        """Check the facts that hold at all times."""
        leader, other = (half.bulk for half in self.halves)
        assert other.generation - leader.generation in (0, 1), "the end that does not lead is connected first"
        for half in self.halves:
            if half.bulk.puller.up:
                assert leader.generation == other.generation, "one end posts, and the other is not connected"

    def settle(self) -> None:
        """Let every possible step happen."""
        moved = True
        while moved:
            moved = bool(self.fabric.drain())
            for half in self.halves:
                moved |= bool(half.poll())
                moved |= half.deliver()
                self.check()

    def fail(self, half: Half) -> asyncio.Task[None]:
        """Have `half` READ with a key that does not exist, which fails when the fabric works."""
        return half.start(0, 10, rkey=1)

    def generations(self) -> tuple[int, int]:
        """The generations of both ends."""
        return self.left.bulk.generation, self.right.bulk.generation

    async def works(self) -> None:
        """Check that both ends can READ at once, and that no request is repeated."""
        retries = self.fabric.statistics().retries
        assert self.left.bulk.generation == self.right.bulk.generation
        pulls = []
        for half in self.halves:
            half.target.bytes[:] = bytes(NBYTES)
            pulls.append(half.start(100, 5000))
        await turns()
        self.settle()
        await asyncio.gather(*pulls)
        for half in self.halves:
            assert half.arrived(100, 5000) and half.unused()
            assert half.bulk.puller.up and half.qp.state() == QpState.RTS
        assert self.fabric.statistics().retries == retries


@contextlib.contextmanager
def both_on(fabric: FakeFabric) -> Iterator[Both]:
    """Two connected ends, inside the running loop, which does not watch the completion queues."""
    for name in ("a", "b"):
        fabric.add_nic(name)
    with engine_on(fabric, "a", SLOT, ARENA) as one, engine_on(fabric, "b", SLOT, ARENA) as other:
        for engine in (one, other):
            asyncio.get_running_loop().remove_reader(engine.cq.fd)
        left, right = QueuePairs(one, EAGER), QueuePairs(other, EAGER)
        left.connect(right.ours, agree(left.ours, right.ours))
        right.connect(left.ours, agree(right.ours, left.ours))
        for pairs in (left, right):  # small pieces, so that a pull takes many READs
            pairs.agreed = msgspec.structs.replace(pairs.agreed, max_msg_sz=PIECE)
        yield Both(fabric, Half(one, left, leads=True), Half(other, right, leads=False))


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    with both_on(FakeFabric(manual=True)) as both:
        yield both


async def lost(*pulls: asyncio.Task[None]) -> None:
    """Check that each of the pulls was told that its object is lost."""
    for outcome in await asyncio.gather(*pulls, return_exceptions=True):
        assert isinstance(outcome, ObjectLost)


async def fail_once(both: Both, *halves: Half) -> None:
    """Let a READ of each of `halves` fail, and check that both ends recover."""
    bad = [both.fail(half) for half in halves]
    await turns()
    both.settle()
    await lost(*bad)


# ---- one failure


async def test_nothing_fails(both: Both) -> None:
    await both.works()
    assert both.generations() == (0, 0)
    assert not both.left.told and not both.right.told


async def test_leader_fails(both: Both) -> None:
    await fail_once(both, both.left)
    rebuild, resume = both.left.told
    (rebuilt,) = both.right.told
    assert isinstance(rebuild, Rebuild) and rebuild.generation == 1
    assert isinstance(rebuilt, Rebuilt) and rebuilt.generation == 1
    assert resume == Resume(1)
    assert both.left.qp.path is not None and both.right.qp.path is not None
    assert (both.left.qp.path.psn, both.right.qp.path.psn) == (rebuild.psn, rebuilt.psn)
    assert both.generations() == (1, 1)
    await both.works()


async def test_other_one_fails(both: Both) -> None:
    await fail_once(both, both.right)
    assert [type(message) for message in both.right.told] == [Rebuild, Rebuilt]
    assert [type(message) for message in both.left.told] == [Rebuild, Resume]
    assert both.generations() == (1, 1)
    await both.works()


async def test_both_fail_at_once(both: Both) -> None:
    bad = [both.fail(half) for half in both.halves]
    for half in both.halves:
        both.fabric.inject(half.qp.qp_num, CompletionStatus.REM_ACCESS)
    await turns()
    both.fabric.drain()
    for half in both.halves:
        half.poll()
    assert [type(half.told[-1]) for half in both.halves] == [Rebuild, Rebuild], "neither knows of the other's failure"
    both.settle()
    await lost(*bad)
    assert both.generations() == (1, 1)
    await both.works()


@pytest.mark.parametrize("first", [0, 1])
async def test_request_of_the_other_meets_what_is_under_way(both: Both, first: int) -> None:
    """The leader has READs under way, and has to see their flushed completions before it can answer."""
    good = both.left.start(0, 40_000)
    bad = both.fail(both.right)
    await turns()
    both.fabric.inject(both.right.qp.qp_num, CompletionStatus.REM_ACCESS)
    both.fabric.step(first)
    while not both.right.poll():
        both.fabric.step()
    both.right.deliver()
    assert both.left.deliver() and not both.left.told
    assert both.left.qp.state() == QpState.ERR and not both.left.bulk.puller.drained
    both.settle()
    await lost(bad)
    await good
    assert both.left.arrived(0, 40_000)
    assert both.generations() == (1, 1)
    await both.works()


async def test_again_and_again(both: Both) -> None:
    for count in range(1, 51):
        await fail_once(both, *both.halves[: count % 2 + 1])
        assert both.left.bulk.generation >= count
        await both.works()
    assert both.fabric.statistics().retries == 0


async def test_numbers_differ_each_time(both: Both) -> None:
    numbers: set[int] = set()
    for _ in range(5):
        await fail_once(both, both.left)
        for half in both.halves:
            assert half.qp.path is not None
            numbers.add(half.qp.path.psn)
    assert len(numbers) == 10 and all(0 <= psn <= MAX_U24 for psn in numbers)


async def test_pull_that_comes_meanwhile_waits(both: Both) -> None:
    bad = both.fail(both.left)
    await turns()
    both.fabric.drain()
    both.left.poll()
    assert both.right.deliver() and both.right.bulk.generation == 1
    waiting = [half.start(1000, 500) for half in both.halves]
    await turns()
    assert both.left.posts == 1 and both.right.posts == 0
    both.left.deliver()
    assert both.left.posts == 2 and both.right.posts == 0
    both.right.deliver()
    assert both.right.posts == 1
    both.settle()
    await lost(bad)
    await asyncio.gather(*waiting)
    assert all(half.arrived(1000, 500) for half in both.halves)
    assert both.fabric.statistics().retries == 0


async def test_fails_again_before_the_other_has_resumed(both: Both) -> None:
    """The leader posts as soon as both are connected; its READ may fail before the other end knows of that."""
    bad = both.fail(both.left)
    await turns()
    both.fabric.drain()
    both.left.poll()
    both.right.deliver()
    waiting, worse = both.right.start(0, 100), both.fail(both.left)
    await turns()
    both.left.deliver()
    both.fabric.drain()
    both.left.poll()
    assert list(both.right.inbox) == [Resume(1), both.left.told[-1]]
    both.settle()
    await lost(bad, worse)
    await waiting
    assert both.generations() == (2, 2)
    await both.works()


# ---- late messages


@pytest.mark.parametrize("generation", [0, 1, 2, 4, 2**32 - 1])
async def test_other_generations_are_ignored(both: Both, generation: int) -> None:
    for _ in range(2):
        await fail_once(both, both.left)
    assert both.generations() == (2, 2)
    told = [len(half.told) for half in both.halves]
    for half in both.halves:
        for message in (Rebuild(generation, 1), Rebuilt(generation, 1), Resume(generation)):
            half.take(message)
    both.settle()
    assert [len(half.told) for half in both.halves] == told
    assert both.generations() == (2, 2)
    await both.works()


async def test_what_the_leader_never_asked_for(both: Both) -> None:
    both.left.take(Rebuilt(1, 5))
    both.left.take(Resume(0))
    both.left.take(Resume(1))
    both.right.take(Rebuilt(1, 5))
    both.settle()
    assert both.generations() == (0, 0)
    await both.works()


async def test_resume_that_comes_again(both: Both) -> None:
    """The queue pair has failed since then, so nothing may be posted."""
    await fail_once(both, both.right)
    worse = both.fail(both.right)
    await turns()
    both.fabric.drain()
    both.right.poll()
    waiting = both.right.start(0, 10)
    await turns()
    posts, told = both.right.posts, len(both.right.told)
    both.right.take(Resume(1))
    assert not both.right.bulk.puller.up
    assert (both.right.posts, len(both.right.told)) == (posts, told)
    both.settle()
    await lost(worse)
    await waiting
    await both.works()


@pytest.mark.parametrize("failing", [0, 1])
async def test_everything_comes_twice(both: Both, failing: int) -> None:
    for count in range(1, 4):
        bad = both.fail(both.halves[failing])
        await turns()
        moved = True
        while moved:
            moved = bool(both.fabric.drain())
            for half in both.halves:
                moved |= bool(half.poll())
                if half.deliver():
                    half.take(half.seen[-1])
                    moved = True
                both.check()
        await lost(bad)
        assert both.generations() == (count, count)
    await both.works()
    assert both.fabric.statistics().retries == 0


# ---- devices that fail


def refuse(*_: object) -> None:
    """Fail as a verb of a device that has failed."""
    raise OSError(errno.EIO, "the device failed")


@pytest.mark.parametrize("verb", ["reset", "connect"])
@pytest.mark.parametrize("index", [0, 1])
async def test_cannot_be_connected(both: Both, monkeypatch: pytest.MonkeyPatch, index: int, verb: str) -> None:
    half = both.halves[index]
    bad = both.fail(both.left)
    waiting = both.left.start(100, 10)
    await turns()
    monkeypatch.setattr(half.qp, verb, refuse)
    both.settle()
    await lost(bad)
    assert [str(error) for error in half.broken] == ["[Errno 5] the device failed"]
    assert not half.peer.broken
    assert half.bulk.generation == 0
    assert not any(each.bulk.puller.up for each in both.halves)
    posts = [each.posts for each in both.halves]
    half.bulk.end()
    both.settle()
    assert [each.posts for each in both.halves] == posts
    for each in both.halves:
        each.bulk.puller.lose(ConnectionLost("it broke"))
    with pytest.raises(ConnectionLost, match="it broke"):
        await waiting
    assert all(each.unused() for each in both.halves)


@pytest.mark.parametrize("index", [0, 1])
async def test_cannot_be_fenced(both: Both, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    half = both.halves[index]
    bad = both.fail(half.peer)
    await turns()
    monkeypatch.setattr(half.qp, "to_error", refuse)
    both.settle()
    await lost(bad)
    assert len(half.broken) == 1 and not half.told and half.bulk.generation == 0
    with pytest.raises(OSError, match="the device failed"):
        half.bulk.end()


async def test_nothing_is_done_about_a_device_that_failed(both: Both) -> None:
    both.left.bulk.device_failed(OSError("it failed"))
    both.left.bulk.turn_ended()
    assert not both.left.told and not both.left.broken and not both.left.drained


# ---- the end


async def test_end_with_nothing_under_way(both: Both) -> None:
    both.left.bulk.end()
    both.left.bulk.end()
    assert both.left.qp.state() == QpState.ERR and both.left.bulk.puller.drained
    both.settle()
    assert both.left.drained == 0 and not both.left.told, "there was nothing to wait for"


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 7, 12])
async def test_end_with_something_under_way(both: Both, index: int, steps: int) -> None:
    half = both.halves[index]
    pull = half.start(0, 60_000)
    await turns()
    both.fabric.step(steps)
    half.bulk.end()
    half.bulk.puller.lose(ConnectionLost("it ended"))
    while half.qp.work:
        assert half.drained == 0
        both.fabric.step()
        half.poll(1)
    both.settle()
    assert half.drained == 1 and half.unused() and not half.told
    (outcome,) = await asyncio.gather(pull, return_exceptions=True)
    assert isinstance(outcome, ConnectionLost)


async def test_end_when_all_has_succeeded_and_the_peer_has_failed_it(both: Both) -> None:
    """The queue pair is in ERR already, by the peer's fault, and no completion will report that."""
    pull = both.left.start(0, 100)
    await turns()
    both.fabric.drain()
    bad = both.fail(both.right)
    await turns()
    both.fabric.drain()
    assert both.left.qp.state() == QpState.ERR
    both.left.bulk.end()
    assert not both.left.bulk.puller.drained and both.left.drained == 0
    both.left.poll()
    assert both.left.unused() and both.left.drained == 1
    both.settle()
    await pull
    await lost(bad)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("ending", [0, 1])
@pytest.mark.parametrize("after", range(12))
async def test_end_during_a_rebuild(both: Both, failing: int, ending: int, after: int) -> None:
    """The end comes after that many events of the rebuild."""
    half = both.halves[ending]
    pulls = [both.fail(both.halves[failing]), *(each.start(5000, 40_000) for each in both.halves)]
    await turns()
    while after:
        for each in both.halves:
            for event in (both.fabric.step, each.poll, each.deliver):
                event()
                after -= after > 0
    under_way = not half.bulk.puller.drained
    half.bulk.end()
    half.bulk.puller.lose(ConnectionLost("it ended"))
    assert half.drained == 0
    told, posts, generation = len(half.told), half.posts, half.bulk.generation
    both.settle()
    for message in (*half.seen, Rebuild(generation + 1, 9), Rebuilt(generation + 1, 9), Resume(generation)):
        half.take(message)
    both.settle()
    assert half.drained == under_way
    assert (len(half.told), half.posts, half.bulk.generation) == (told, posts, generation)
    assert half.qp.state() == QpState.ERR and not half.bulk.puller.up and half.bulk.puller.drained
    half.peer.bulk.end()
    half.peer.bulk.puller.lose(ConnectionLost("the other one ended"))
    both.settle()
    assert half.peer.bulk.puller.drained
    await asyncio.gather(*pulls, return_exceptions=True)
    assert half.unused() and half.peer.unused()


async def test_end_by_telling(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader finds the socket broken while it reports that both are connected, and the connection ends there."""
    bad = both.fail(both.left)
    await turns()
    both.fabric.drain()
    both.left.poll()
    both.right.deliver()

    def broken(message: Message) -> None:
        assert message == Resume(1)
        both.left.bulk.end()

    waiting = both.left.start(0, 10)
    await turns()
    monkeypatch.setattr(both.left.bulk, "_tell", broken)
    posts = both.left.posts
    both.left.deliver()
    assert both.left.posts == posts and not both.left.bulk.puller.up
    assert both.left.qp.state() == QpState.ERR
    both.left.bulk.puller.lose(ConnectionLost("it ended"))
    with pytest.raises(ConnectionLost):
        await waiting
    await lost(bad)
    assert both.left.bulk.puller.drained


# ---- any events in any order


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("faults", ["keys", "any"])
async def test_random_walk(seed: int, faults: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulls, faults at either end, messages that come, come late and come again, completions that are seen late."""
    monkeypatch.setattr(pulling, "_ATTEMPTS", 1000)  # a pull that is hit again and again has tests of its own
    rng = random.Random(seed)
    with both_on(FakeFabric(seed=seed, manual=True)) as both:
        pulls: list[tuple[asyncio.Task[None], Half, int, int, bool]] = []
        at = 0
        acts = ["step", "step", "step", "poll", "poll", "deliver", "deliver", "again", "pull", "bad", "settle"]
        if faults == "any":
            acts += ["inject", "inject"]
        for _ in range(300):
            half = rng.choice(both.halves)
            act = rng.choice(acts)
            if act == "step":
                both.fabric.step(rng.randint(1, 20))
            elif act == "poll":
                half.poll(rng.choice((1, 3, 1000)))
            elif act == "deliver":
                half.deliver()
            elif act == "again" and half.seen:
                half.take(rng.choice(half.seen[-4:]))
            elif act in ("pull", "bad"):
                nbytes = rng.randint(1, 600) if act == "bad" or at > 40_000 else rng.randint(1, 30_000)
                offset = at % (NBYTES - 30_000)
                at += nbytes
                bad = act == "bad"
                pulls.append((half.start(offset, nbytes, rkey=1 if bad else 0), half, offset, nbytes, bad))
                await turns(1)
            elif act == "inject":
                both.fabric.inject(half.qp.qp_num, rng.choice((CompletionStatus.GENERAL, CompletionStatus.REM_OP)))
            elif act == "settle" and rng.random() < 0.2:
                both.settle()
            both.check()
        both.settle()
        await turns()
        assert not both.left.broken and not both.right.broken
        assert all(not half.inbox and half.unused() for half in both.halves)
        assert both.left.bulk.generation == both.right.bulk.generation > 0
        for task, half, offset, nbytes, bad in pulls:
            assert task.done(), "a pull got lost"
            error = task.exception()
            if faults == "keys":
                assert isinstance(error, ObjectLost) if bad else error is None
            if error is None:
                assert not bad and half.arrived(offset, nbytes)
            else:
                assert isinstance(error, ObjectLost | ConnectionLost)
        if faults == "keys":
            assert both.fabric.statistics().retries == 0
        both.fabric._injected.clear()
        await both.works()
        for half in both.halves:
            half.bulk.end()
            assert half.drained == 0
