"""The suite that every log of a head passes. A log joins by a subclass with one fixture."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from zcactor.control.head_log import MAX_CHANGES, MAX_NBYTES, Candidate, Change, Deposed, HeadLog, LeaderAt, LogInUse

ONE = Candidate("10.0.0.1:7433", "n1", 11)
TWO = Candidate("10.0.0.2:7433", "n2", 22)
PATIENCE = 60.0
Make = Callable[[], HeadLog]


class HeadLogTests:
    """The rules for each log. `make` makes logs of one cluster, each for another head."""

    waits = True
    """Whether a second candidate waits; otherwise it is refused."""

    async def test_a_new_log_is_empty(self, make: Make) -> None:
        log = make()
        term = await log.campaign(ONE)
        assert term.epoch >= 1
        assert await log.load(term) == {}
        await log.aclose()
        await log.aclose()

    async def test_changes_are_made_in_order(self, make: Make) -> None:
        log = make()
        term = await log.campaign(ONE)
        await log.record(term, [Change("name", "a", b"1"), Change("name", "b", b"2"), Change("actor", "a", b"\0\xff")])
        await log.record(term, [Change("name", "a", None), Change("name", "b", b"3"), Change("recipe", "x", None)])
        await log.record(term, [Change("member", "m", b"1"), Change("member", "m", None), Change("driver", "ä ", b"")])
        await log.record(term, [])
        assert await log.load(term) == {"name": {"b": b"3"}, "actor": {"a": b"\0\xff"}, "driver": {"ä ": b""}}
        await log.aclose()

    async def test_entries_outlive_a_head(self, make: Make) -> None:
        epochs = []
        for number in range(3):
            log = make()
            term = await log.campaign(ONE)
            epochs.append(term.epoch)
            await log.record(term, [Change("name", str(number), b"x")])
            if number == 1:
                await log.resign(term)
                await log.resign(term)
            await log.aclose()
        assert epochs == sorted(set(epochs))
        log = make()
        term = await log.campaign(TWO)
        assert await log.load(term) == {"name": {"0": b"x", "1": b"x", "2": b"x"}}
        await log.aclose()

    async def test_a_term_that_is_over(self, make: Make) -> None:
        first, second = make(), make()
        old = await first.campaign(ONE)
        await first.record(old, [Change("name", "a", b"1")])
        await first.resign(old)
        new = await second.campaign(TWO)
        assert new.epoch > old.epoch
        for log in (first, second):
            with pytest.raises(Deposed) as raised:
                await log.record(old, [Change("name", "a", b"2")])
            assert raised.value.epoch == old.epoch
            with pytest.raises(Deposed):
                await log.load(old)
        await first.resign(old)
        assert await second.load(new) == {"name": {"a": b"1"}}
        await first.aclose()
        assert await second.load(new) == {"name": {"a": b"1"}}
        await second.aclose()

    async def test_one_leads_at_a_time(self, make: Make) -> None:
        first, second, third = make(), make(), make()
        term = await first.campaign(ONE)
        if not self.waits:
            for log in (second, third):
                with pytest.raises(LogInUse, match=r"in use by the head at 10.0.0.1:7433 on n1 \(pid 11\)") as raised:
                    await log.campaign(TWO)
                assert raised.value.holder == ONE
            await first.aclose()
            assert (await second.campaign(TWO)).epoch > term.epoch
            await second.aclose()
            return
        waiting = [asyncio.ensure_future(log.campaign(TWO)) for log in (second, third)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        await first.resign(term)
        async with asyncio.timeout(PATIENCE):
            done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (winner,), (loser,) = done, pending
        assert (await winner).epoch > term.epoch
        loser.cancel()
        for log in (first, second, third):
            await log.aclose()

    async def test_a_batch_is_made_as_a_whole(self, make: Make) -> None:
        log = make()
        term = await log.campaign(ONE)
        good = Change("name", "a", b"1")
        with pytest.raises(ValueError, match="there is no kind 'names' of entries"):
            await log.record(term, [good, Change("names", "b", b"1")])
        with pytest.raises(ValueError, match=f"at most {MAX_CHANGES} changes, and this has {MAX_CHANGES + 1}"):
            await log.record(term, [good] * (MAX_CHANGES + 1))
        with pytest.raises(ValueError, match=f"at most {MAX_NBYTES} bytes of keys and values"):
            await log.record(term, [good, Change("recipe", "b", bytes(MAX_NBYTES))])
        assert await log.load(term) == {}
        most = [Change("actor", f"{number:03}", b"x" * 100) for number in range(MAX_CHANGES)]
        await log.record(term, most)
        await log.record(term, [Change("recipe", "r", bytes(MAX_NBYTES - 1))])
        found = await log.load(term)
        assert (len(found["actor"]), len(found["recipe"]["r"])) == (MAX_CHANGES, MAX_NBYTES - 1)
        await log.aclose()

    async def test_many_at_once(self, make: Make) -> None:
        log = make()
        term = await log.campaign(ONE)
        await asyncio.gather(
            *(log.record(term, [Change("name", str(number % 10), b"%d" % number)]) for number in range(50))
        )
        assert await log.load(term) == {"name": {str(digit): b"%d" % (40 + digit) for digit in range(10)}}
        await log.aclose()

    async def test_following_the_leader(self, make: Make) -> None:
        log = make()
        leaders = log.leaders()
        assert await anext(leaders) is None
        following = asyncio.ensure_future(anext(leaders))
        term = await log.campaign(ONE)
        async with asyncio.timeout(PATIENCE):
            assert await following == LeaderAt(term.epoch, ONE.address)
            following = asyncio.ensure_future(anext(leaders))
            await log.resign(term)
            assert await following is None
        await log.aclose()
